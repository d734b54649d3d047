"""Tokenise each part of the input (unit) into one file, and assemble these files into the shards of a store."""

import contextlib
import dataclasses
import hashlib
import io
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from difftx.data.blocks import BlockHasher
from difftx.data.prepare.job import Job
from difftx.data.prepare.readers import Conversation, Document, Source, Unit
from difftx.data.prepare.token_files import Tokens
from difftx.data.store import SPLITS, shard_file, write_meta
from difftx.data.tokenizer import Tokenizer
from difftx.errors import UserError
from difftx.files import Owner, list_folder, new_file, read_file, write_atomically
from difftx.storage.paths import AnyPath, is_bucket
from difftx.storage.reading import map_ahead

HOW_TO_SKIP = "repair it, or leave such documents out with --on_error=skip"
SKIPPED = "skipped.txt"

type Selection = tuple[AnyPath, np.ndarray]  # File of a unit, and mask of the documents to take from it.


@dataclasses.dataclass(frozen=True)
class UnitSummary:
    """Counts and problems of a tokenised unit, saved in its file."""

    end: int  # `end`, `last`, `source` and `input_bytes` are the fields of `Unit`.
    last: bool
    source: int
    input_bytes: int
    text_bytes: int
    tokens: int
    empty: int  # Number of skipped documents without text.
    problems: list[str]  # One message per skipped unreadable document.


def unit_file(job: Job, source: int, index: int, state: str) -> AnyPath:
    """Return the path of the file of unit `index` of a source.

    The name includes the source's `state`, so files are not reused after the input has changed.
    """
    return job.units / f"{source:05d}-{index:06d}-{state}.npz"


def encode_unit(job: Job, unit: Unit) -> UnitSummary:
    """Tokenise a unit and write its file. The content only depends on the job's options and the unit's bytes.

    The file is a numpy archive with a CRC per array. "tokens" has all tokens, with an end-of-text token after each
    document. Per document, "lengths" has its number of tokens, "turns" its number of ranges that count in the loss,
    "sizes" its bytes of prompt and text, and "hashes" the first 128 bits of their SHA-256. "counted" has start and stop
    of each range, relative to its document, and "ids" has the document ids as JSON lines.
    """
    end_of_text = np.array([job.loaded_tokenizer.eot_token], np.uint32)
    # Per document: prompt and text of each turn. The last text ends with the end-of-text token.
    parts: list[list[np.ndarray]] = []
    documents: list[Document] = []
    problems: list[str] = []
    empty = 0
    for document in _documents(job, unit):
        if isinstance(document, UserError):
            if not job.skip_unreadable:
                raise UserError(f"{document}; {HOW_TO_SKIP}")
            problems.append(str(document))
        elif not document.text:
            empty += 1
        else:
            *turns, text = _encode(job.loaded_tokenizer, document)
            parts.append([*turns, np.concatenate([text, end_of_text])])
            documents.append(document)
    tokens = np.concatenate([*itertools.chain(*parts), np.array([], np.uint32)]).astype(job.dtype, copy=False)
    edges = [np.cumsum([len(part) for part in document]) for document in parts]
    sizes = np.array([len(d.utf8) for d in documents], np.int64)
    ids = "".join(json.dumps(d.id, ensure_ascii=False) + "\n" for d in documents if job.fields.id is not None)
    copies = unit.end, unit.last, unit.source, unit.input_bytes
    summary = UnitSummary(*copies, int(sizes.sum()), len(tokens), empty, problems)
    with new_file(unit_file(job, unit.source, unit.index, unit.state)) as file:
        np.savez(
            file,
            tokens=tokens,
            lengths=np.array([ends[-1] for ends in edges], np.int64),
            turns=np.array([len(ends) // 2 for ends in edges], np.int64),
            counted=np.concatenate([*edges, np.array([], np.int64)]).reshape(-1, 2),
            sizes=sizes,
            hashes=np.frombuffer(b"".join(hashlib.sha256(d.utf8).digest()[:16] for d in documents), ">u8"),
            # UTF-8 cannot encode half of a surrogate pair. Write it as a JSON escape, such as \\ud800.
            ids=np.frombuffer(ids.encode(errors="backslashreplace"), np.uint8),
            summary=np.frombuffer(json.dumps(dataclasses.asdict(summary)).encode(), np.uint8),
        )
    return summary


def _documents(job: Job, unit: Unit) -> Iterator[Document | UserError]:
    """Yield the documents of a unit."""
    if isinstance(unit.content, Tokens):
        yield from unit.content.documents(job.fields, job.loaded_tokenizer)
        return
    for document in unit.content.documents(job.fields):
        if isinstance(document, Conversation):
            yield from document.documents(job.loaded_tokenizer, job.date)
        else:
            yield document


def _encode(tokenizer: Tokenizer, document: Document) -> Sequence[np.ndarray]:
    """Return the token ids of each turn's prompt and text, uint32. Only a conversation has several turns.

    Prompt and text are encoded separately, so that no token spans both: generation also starts after the last token of
    a prompt. Names of special tokens are ordinary text, except where a chat template wrote them.
    """
    prompt, text = document.prompt, document.text
    if document.ids is not None:
        return np.array(tokenizer.prefix, np.uint32), document.ids
    if document.turns:
        return [np.array(ids, np.uint32) for ids in document.turns]
    before = tokenizer.encode_prompt(prompt) if prompt else tokenizer.prefix
    return np.array(before, np.uint32), tokenizer.encode_to_numpy(text, continues=bool(prompt))


def finished_units(job: Job, sources: Sequence[Source]) -> dict[int, list[UnitSummary]]:
    """Return the summaries of each source's tokenised units, up to the first missing file."""
    finished: dict[int, list[UnitSummary]] = {source.index: [] for source in sources}
    for source, _, archive in _archives(job, sources):
        finished[source.index].append(_summary(archive))
    return finished


def _archives(job: Job, sources: Sequence[Source]) -> Iterator[tuple[Source, AnyPath, Mapping[str, np.ndarray]]]:
    """Yield source, path and content of each source's unit files, up to the first missing file."""
    names = list_folder(job.units)
    unit_files: list[tuple[Source, AnyPath]] = []
    for source in sources:
        files = (unit_file(job, source.index, index, source.state) for index in itertools.count())
        unit_files += ((source, file) for file in itertools.takewhile(lambda file: file.name in names, files))
    for (file, archive), (source, _) in zip(_opened(file for _, file in unit_files), unit_files, strict=True):
        yield source, file, archive


def _opened(files: Iterable[AnyPath]) -> Iterator[tuple[AnyPath, Mapping[str, np.ndarray]]]:
    """Yield path and content of unit files in order. Objects in a bucket are read whole, several ahead."""

    def content(file: AnyPath) -> tuple[AnyPath, Any]:
        return file, io.BytesIO(read_file(file) or b"") if is_bucket(file) else file

    for file, opened in map_ahead(content, files):
        with np.load(opened) as archive:
            yield file, archive


def _summary(archive: Mapping[str, np.ndarray]) -> UnitSummary:
    return UnitSummary(**json.loads(archive["summary"].tobytes()))


def units_to_do(job: Job, sources: Sequence[Source], finished: Mapping[int, Sequence[UnitSummary]]) -> Iterator[Unit]:
    """Read and yield the units that have no file yet. `finished` is the result of `finished_units`."""
    names = list_folder(job.units)
    for source in sources:
        done = finished[source.index]
        if done and done[-1].last:
            continue
        position = done[-1].end if done else 0
        for unit in source.units(job.fields, position, len(done)):
            if unit_file(job, source.index, unit.index, source.state).name not in names:
                yield unit


@dataclasses.dataclass(frozen=True)
class Shard:
    """A shard to write, and the documents to take from each unit."""

    split: str
    index: int
    selections: tuple[Selection, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The assignment of documents to shards, and facts about the documents left out."""

    shards: list[Shard]
    duplicates: dict[str, int]  # Number of duplicates per split.
    empty: int  # Number of documents without text.
    problems: list[str]  # One message per unreadable document.


def make_plan(job: Job, sources: Sequence[Source]) -> Plan:
    """Assign every document to a split and a shard, or leave it out as a duplicate.

    Keep the first of several equal documents. Validation inputs come first, so a document in both inputs stays in the
    validation split. The plan takes about 100 bytes of memory per document.
    """
    units, from_valid, lengths, hashes, problems, empty, tokens = [], [], [], [], [], 0, 0
    largest = math.inf if job.max_tokens is None else job.max_tokens
    for source, file, archive in _archives(job, sources):
        summary = _summary(archive)
        lengths.append(archive["lengths"])
        hashes.append(archive["hashes"].reshape(-1, 2).astype(np.uint64))
        from_valid.append(np.full(len(lengths[-1]), source.valid))
        units.append((file, len(lengths[-1])))
        problems += summary.problems
        empty += summary.empty
        tokens += 0 if source.valid else summary.tokens
        if tokens >= largest:
            break
    if problems and not job.skip_unreadable:  # The units come from an earlier call with --on_error=skip.
        raise UserError(f"{problems[0]}; {HOW_TO_SKIP}")
    if not sum(map(len, lengths)):
        raise UserError("the input has no documents")
    length, hash_, valid = np.concatenate(lengths), np.concatenate(hashes), np.concatenate(from_valid)
    # Documents are in input order, so those that exceed the token limit are the last ones.
    fits = np.cumsum(np.where(valid, 0, length)) <= largest
    if not (fits & ~valid).any() and tokens > largest:
        first_length = length[~valid][0]
        raise UserError(f"--max_tokens={job.max_tokens}: the first document has {first_length} tokens; give more")
    documents, count = len(length), int(fits.sum())
    length, hash_, valid = length[:count], hash_[:count], valid[:count]
    if job.valid_fraction and not any(source.valid for source in sources):
        valid = _held_out(hash_[:, 0], job.valid_fraction)
    first = _first_occurrences(hash_)
    if not (first & ~valid).any():
        raise UserError(
            f"the input has {int(first.sum())} different documents, and none is left to train on; give more, name "
            "validation text with --valid_input, or hold none out with --valid_fraction=0"
        )
    plan = Plan([], {}, empty, problems)
    for split, in_split in zip(SPLITS, (~valid, valid), strict=True):
        kept = first & in_split
        starts = np.cumsum(length[kept]) - length[kept]
        shard_of = np.full(documents, -1)
        shard_of[:count][kept] = np.unique(starts // job.shard_tokens, return_inverse=True)[1]
        plan.shards.extend(_shards_of(split, units, shard_of))
        plan.duplicates[split] = int((~first & in_split).sum())
    return plan


def write_shard(job: Job, shard: Shard) -> dict[str, Any]:
    """Assemble a shard from its units, and return its entry for `meta.json`."""
    kinds, blocks = ["tokens", "offsets", "blocks"], BlockHasher()
    kinds += ["ids"] if job.fields.id is not None else []
    kinds += ["counted"] if job.fields.prompt is not None or job.fields.messages is not None else []
    hashes = {kind: hashlib.sha256() for kind in kinds}
    documents, tokens, text_bytes = 0, 0, 0
    with contextlib.ExitStack() as stack:
        files = {
            kind: stack.enter_context(new_file(shard_file(job.out, shard.split, shard.index, kind))) for kind in kinds
        }

        def write(kind: str, data: np.ndarray | bytes) -> None:
            hashes[kind].update(data)
            files[kind].write(data)

        archives = _opened(file for file, _ in shard.selections)
        for (_, archive), (_, mask) in zip(archives, shard.selections, strict=True):
            length = archive["lengths"]
            tokens_here = archive["tokens"] if mask.all() else archive["tokens"][np.repeat(mask, length)]
            write("tokens", tokens_here)
            blocks.update(tokens_here)
            write("offsets", (tokens + np.cumsum(length[mask]) - length[mask]).astype("<u8"))
            if "ids" in kinds:
                lines = archive["ids"].tobytes().splitlines(keepends=True)
                write("ids", b"".join(line for line, kept in zip(lines, mask, strict=True) if kept))
            if "counted" in kinds:
                starts, turns = np.zeros(len(mask), np.int64), archive["turns"]
                starts[mask] = tokens + np.cumsum(length[mask]) - length[mask]
                counted = archive["counted"] + np.repeat(starts, turns)[:, None]
                write("counted", counted[np.repeat(mask, turns)].astype("<u8"))
            documents += int(mask.sum())
            tokens += int(length[mask].sum())
            text_bytes += int(archive["sizes"][mask].sum())
        write("offsets", np.array([tokens], "<u8"))
        write("blocks", blocks.hashes())
    files_sha256 = {kind: digest.hexdigest() for kind, digest in hashes.items()}
    return {"documents": documents, "tokens": tokens, "bytes": text_bytes, "sha256": files_sha256}


def finish(
    job: Job, description: dict[str, Any], plan: Plan, entries: Sequence[Mapping[str, Any]], owner: Owner
) -> None:
    """Write `meta.json`, which makes the folder a store. `entries` has the result of `write_shard` for each shard.

    `owner` comes from `open_job`, which deletes `job.work` afterwards.
    """
    meta = description | {"empty": plan.empty, "skipped": len(plan.problems), "splits": {}}
    for split in SPLITS:
        shards = [entry for shard, entry in zip(plan.shards, entries, strict=True) if shard.split == split]
        meta["splits"][split] = {
            **{name: sum(shard[name] for shard in shards) for name in ("documents", "tokens", "bytes")},
            "duplicates": plan.duplicates[split],
            "shards": shards,
        }
    if plan.problems:
        write_atomically(job.out / SKIPPED, "".join(f"{problem}\n" for problem in plan.problems))
    owner.check()
    write_meta(job.out, meta)


def _first_occurrences(hash_: np.ndarray) -> np.ndarray:
    """Return a mask: True for documents with a hash (row of `hash_`) that no earlier document has."""
    order = np.lexsort((hash_[:, 1], hash_[:, 0]))  # The sort is stable, so equal hashes stay in input order.
    repeated = (hash_[order[1:]] == hash_[order[:-1]]).all(axis=1)
    first = np.ones(len(hash_), bool)
    first[order[1:][repeated]] = False
    return first


def _held_out(hash_: np.ndarray, fraction: float) -> np.ndarray:
    """Return a mask of the validation documents: the fraction with the lowest hashes, and at least one document."""
    # The split of a document depends only on its own hash, so it does not change when the corpus grows.
    valid = hash_ < np.uint64(min(int(fraction * 2.0**64), 2**64 - 1))
    return valid if valid.any() else hash_ == hash_.min()


def _shards_of(split: str, units: Sequence[tuple[AnyPath, int]], shard_of: np.ndarray) -> list[Shard]:
    """Return the shards of a split.

    `units` has each unit's file and number of documents. `shard_of` has each document's shard, or -1.
    """
    selections: list[list[Selection]] = [[] for _ in range(int(shard_of.max()) + 1)]
    start = 0
    for file, documents in units:
        shards = shard_of[start : start + documents]
        for shard in np.unique(shards[shards >= 0]):
            selections[shard].append((file, shards == shard))
        start += documents
    return [Shard(split, index, tuple(each)) for index, each in enumerate(selections)]
