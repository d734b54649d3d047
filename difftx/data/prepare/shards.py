"""Assembly of tokenised units into a store: assign documents to shards, write the shards, finish the store."""

import contextlib
import dataclasses
import hashlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from difftx.data.prepare.job import Job
from difftx.data.prepare.readers import Source
from difftx.data.prepare.units import HOW_TO_SKIP, finished_units, unit_file
from difftx.data.store import SPLITS, sha256_of, shard_file, write_meta
from difftx.errors import RunError, UserError
from difftx.files import new_file, read_record, write_atomically, write_record

SKIPPED = "skipped.txt"

type Selection = tuple[int, int, np.ndarray]  # Source, unit, and mask of selected documents: bool [documents of unit].


@dataclasses.dataclass(frozen=True)
class Shard:
    """A shard to write, and the documents that it takes from each unit."""

    split: str
    index: int
    selections: tuple[Selection, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The assignment of documents to shards, and counts of the documents left out."""

    shards: list[Shard]
    duplicates: dict[str, int]  # Number of duplicates per split.
    empty: int
    problems: list[str]  # One message per unreadable document.


def make_plan(job: Job, sources: Sequence[Source]) -> Plan:
    """Assign every document to a split and a shard, or leave it out as a duplicate.

    The first of several equal documents stays. Validation inputs come first, so the validation split keeps a document
    that is also in the training input. The plan takes about 100 bytes of memory per document.

    Raises:
        UserError: If there are no documents, or none to train on, or if unreadable documents are not to be skipped.
    """
    units, from_valid, lengths, hashes, problems, empty = [], [], [], [], [], 0
    for source in sources:
        for index, summary in enumerate(finished_units(job, source)):
            with np.load(unit_file(job, source.index, index)) as archive:
                lengths.append(archive["lengths"])
                hashes.append(archive["hashes"].reshape(-1, 2).astype(np.uint64))
            from_valid.append(np.full(len(lengths[-1]), source.valid))
            units.append((source.index, index, len(lengths[-1])))
            problems += summary.problems
            empty += summary.empty
    if problems and not job.skip_unreadable:  # An earlier call with --on_error=skip left them out.
        raise UserError(f"{problems[0]}; {HOW_TO_SKIP}")
    length, hash_, valid = np.concatenate(lengths), np.concatenate(hashes), np.concatenate(from_valid)
    if not len(length):
        raise UserError("the input has no documents")
    if job.valid_fraction and not any(source.valid for source in sources):
        valid = _held_out(hash_[:, 0], job.valid_fraction)
    first = _first_occurrences(hash_)
    if not (first & ~valid).any():
        raise UserError(
            f"the input has {int(first.sum())} different documents, and none is left to train on; give more, name "
            "validation text with --valid_input, or hold none out with --valid_fraction=0"
        )
    shards: list[Shard] = []
    duplicates: dict[str, int] = {}
    for split, in_split in zip(SPLITS, (~valid, valid), strict=True):
        kept = first & in_split
        starts = np.cumsum(length[kept]) - length[kept]
        shard_of = np.full(len(length), -1)
        shard_of[kept] = np.unique(starts // job.shard_tokens, return_inverse=True)[1]
        shards += [Shard(split, i, selections) for i, selections in enumerate(_selections(units, shard_of))]
        duplicates[split] = int((~first & in_split).sum())
    return Plan(shards, duplicates, empty, problems)


def discard_corrupt_shards(job: Job) -> Iterator[str]:
    """Delete the records of an earlier run's corrupt shards, and yield a message for each."""
    for file in sorted(job.shard_records.glob("*.json")):
        split, _, index = file.stem.partition("-")
        record = read_record(file)
        files = {} if record is None else record["files"]
        if not files or any(
            not (path := shard_file(job.out, split, int(index), kind)).is_file() or sha256_of(path) != expected
            for kind, expected in files.items()
        ):
            file.unlink()
            yield f"{file}: the record or its shard is corrupt; writing the shard again"


def write_shard(job: Job, shard: Shard) -> None:
    """Assemble a shard from its units, then save its entry for meta.json, which marks the shard as finished."""
    if _record_file(job, shard).exists():
        return
    kinds = ["tokens", "offsets"]
    kinds += ["ids"] if job.fields.id is not None else []
    kinds += ["prompts"] if job.fields.prompt is not None else []
    hashes = {kind: hashlib.sha256() for kind in kinds}
    documents, tokens, text_bytes = 0, 0, 0
    with contextlib.ExitStack() as stack:
        files = {
            kind: stack.enter_context(new_file(shard_file(job.out, shard.split, shard.index, kind))) for kind in kinds
        }

        def write(kind: str, data: np.ndarray | bytes) -> None:
            hashes[kind].update(data)
            files[kind].write(data)

        for source, unit, mask in shard.selections:
            with np.load(unit_file(job, source, unit)) as archive:
                length = archive["lengths"]
                write("tokens", archive["tokens"] if mask.all() else archive["tokens"][np.repeat(mask, length)])
                write("offsets", (tokens + np.cumsum(length[mask]) - length[mask]).astype("<u8"))
                if "ids" in kinds:
                    lines = archive["ids"].tobytes().splitlines(keepends=True)
                    write("ids", b"".join(line for line, kept in zip(lines, mask, strict=True) if kept))
                if "prompts" in kinds:
                    write("prompts", archive["prompts"][mask].astype("<u8"))
                documents += int(mask.sum())
                tokens += int(length[mask].sum())
                text_bytes += int(archive["sizes"][mask].sum())
        write("offsets", np.array([tokens], "<u8"))
    record = {"documents": documents, "tokens": tokens, "bytes": text_bytes}
    sha256_of_files = {kind: digest.hexdigest() for kind, digest in hashes.items()}
    write_record(_record_file(job, shard), record | {"files": sha256_of_files})


def finish(job: Job, description: dict[str, Any], plan: Plan) -> None:
    """Write `meta.json`, which makes the folder a store, and remove temporary files."""
    meta = dict(description) | {"empty": plan.empty, "skipped": len(plan.problems), "splits": {}}
    for split in SPLITS:
        shards = [_meta_entry(job, shard) for shard in plan.shards if shard.split == split]
        for leftover in (job.out / split).glob(".*"):  # Temporary files of a killed run.
            leftover.unlink()
        meta["splits"][split] = {
            **{name: sum(shard[name] for shard in shards) for name in ("documents", "tokens", "bytes")},
            "duplicates": plan.duplicates[split],
            "shards": shards,
        }
    if plan.problems:
        write_atomically(job.out / SKIPPED, "".join(f"{problem}\n" for problem in plan.problems))
    write_meta(job.out, meta)
    shutil.rmtree(job.work)


def _meta_entry(job: Job, shard: Shard) -> dict[str, Any]:
    """Return a finished shard's entry of meta.json."""
    record = read_record(_record_file(job, shard))
    if record is None:
        raise RunError(f"{_record_file(job, shard)}: corrupt since it was written; run the same command again")
    return {("sha256" if name == "files" else name): value for name, value in record.items()}


def _record_file(job: Job, shard: Shard) -> Path:
    return job.shard_records / f"{shard.split}-{shard.index:05d}.json"


def _first_occurrences(hash_: np.ndarray) -> np.ndarray:
    """Return a mask of the rows of `hash_`, `[documents, 2]`, that appear for the first time."""
    order = np.lexsort((hash_[:, 1], hash_[:, 0]))  # Stable, so equal hashes stay in the order of the input.
    repeated = (hash_[order[1:]] == hash_[order[:-1]]).all(axis=1)
    first = np.ones(len(hash_), bool)
    first[order[1:][repeated]] = False
    return first


def _held_out(hash_: np.ndarray, fraction: float) -> np.ndarray:
    """Return a mask of the validation documents: those whose hash lies in the lowest `fraction` of the hash range.

    The split of a document does not depend on other documents, so it stays the same when the corpus grows. If no hash
    is low enough, the document with the lowest hash is taken instead.
    """
    valid = hash_ < np.uint64(min(int(fraction * 2.0**64), 2**64 - 1))
    return valid if valid.any() else hash_ == hash_.min()


def _selections(units: Sequence[tuple[int, int, int]], shard_of: np.ndarray) -> Iterator[tuple[Selection, ...]]:
    """Yield the selections of each shard.

    Args:
        units: Source, index and number of documents of each unit.
        shard_of: Shard of each document, int [documents]; -1 for a document of no shard.
    """
    selections: dict[int, list[Selection]] = {}
    start = 0
    for source, unit, documents in units:
        shards = shard_of[start : start + documents]
        for shard in np.unique(shards[shards >= 0]):
            selections.setdefault(int(shard), []).append((source, unit, shards == shard))
        start += documents
    for shard in sorted(selections):
        yield tuple(selections[shard])
