"""Tokenisation of units of input, each into its own file, from which the shards are assembled."""

import dataclasses
import hashlib
import io
import itertools
import json
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from difftx.data.prepare.job import Job
from difftx.data.prepare.readers import Document, Source, Unit
from difftx.errors import UserError
from difftx.files import new_file

ARRAYS = ("tokens", "lengths", "prompts", "sizes", "hashes", "ids", "summary")  # Arrays in a unit's file.
HOW_TO_SKIP = "repair it, or leave such documents out with --on_error=skip"


@dataclasses.dataclass(frozen=True)
class UnitSummary:
    """Counts and problems of a tokenised unit, saved in its file."""

    end: int  # As in `Unit`.
    last: bool
    input_bytes: int
    text_bytes: int
    tokens: int
    empty: int  # Number of documents without text, which are left out.
    problems: list[str]  # One message per unreadable document, which is left out.


def unit_file(job: Job, source: int, index: int) -> Path:
    """Return the path of a tokenised unit's file."""
    return job.units / f"{source:05d}-{index:06d}.npz"


def encode_unit(job: Job, unit: Unit) -> UnitSummary:
    """Tokenise a unit and write its file, which depends only on the job's options and the unit's bytes.

    The file is a numpy archive, whose arrays carry CRCs. It holds all tokens, with an end-of-text token after each
    document. Per document it holds the number of tokens, the number of prompt tokens, the size of prompt and text in
    bytes, and the first 128 bits of their SHA-256. With an id field, it also holds the ids.

    Raises:
        UserError: If a document cannot be read and `job.skip_unreadable` is not set.
    """
    end_of_text = np.array([job.encoding.eot_token], np.uint32)
    parts: list[np.ndarray] = []  # Three arrays per document: prompt, text, end-of-text token.
    documents: list[Document] = []
    problems: list[str] = []
    empty = 0
    for document in unit.content.documents(job.fields):
        if isinstance(document, UserError):
            if not job.skip_unreadable:
                raise UserError(f"{document}; {HOW_TO_SKIP}")
            problems.append(str(document))
        elif not document.text:
            empty += 1
        else:
            # Encode text that looks like a special token as ordinary text. Encode prompt and text separately, so that
            # no token spans both: generation, too, starts after the last token of a prompt.
            texts = (document.prompt, document.text)
            parts += [*(job.encoding.encode_to_numpy(text, disallowed_special=()) for text in texts), end_of_text]
            documents.append(document)
    tokens = np.concatenate([*parts, np.array([], np.uint32)]).astype(job.dtype, copy=False)
    sizes = np.array([len(document.utf8) for document in documents], np.int64)
    ids = "".join(json.dumps(d.id, ensure_ascii=False) + "\n" for d in documents if job.fields.id is not None)
    text_bytes = int(sizes.sum())
    summary = UnitSummary(unit.end, unit.last, unit.input_bytes, text_bytes, len(tokens), empty, problems)
    with new_file(unit_file(job, unit.source, unit.index)) as file:
        np.savez(
            file,
            tokens=tokens,
            lengths=np.array([sum(map(len, each)) for each in itertools.batched(parts, 3)], np.int64),
            prompts=np.array([len(prompt) for prompt in parts[::3]], np.int64),
            sizes=sizes,
            hashes=np.frombuffer(b"".join(hashlib.sha256(d.utf8).digest()[:16] for d in documents), ">u8"),
            ids=np.frombuffer(ids.encode(), np.uint8),
            summary=np.frombuffer(json.dumps(dataclasses.asdict(summary)).encode(), np.uint8),
        )
    return summary


def discard_corrupt_units(job: Job) -> Iterator[str]:
    """Delete the corrupt unit files of an earlier run, and yield a message for each."""
    for file in sorted(job.units.glob("*.npz")):
        if not _is_intact(file.read_bytes()):
            file.unlink()
            yield f"{file}: corrupt; tokenising that part of the input again"


def _is_intact(data: bytes) -> bool:
    """Return whether a unit's file has every array, each with a matching CRC."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return set(archive.namelist()) == {f"{name}.npy" for name in ARRAYS} and archive.testzip() is None
    except Exception:  # zipfile raises many types of exceptions for corrupt archives.
        return False


def finished_units(job: Job, source: Source) -> list[UnitSummary]:
    """Return the summaries of a source's tokenised units, up to the first unit without a file."""
    summaries: list[UnitSummary] = []
    while (file := unit_file(job, source.index, len(summaries))).exists():
        with np.load(file) as archive:
            summaries.append(UnitSummary(**json.loads(archive["summary"].tobytes())))
    return summaries


def units_to_do(job: Job, sources: Sequence[Source]) -> Iterator[Unit]:
    """Read and yield the units that have no file yet."""
    for source in sources:
        finished = finished_units(job, source)
        if finished and finished[-1].last:
            continue
        position = finished[-1].end if finished else 0
        for unit in source.units(job.fields, position, len(finished)):
            if not unit_file(job, source.index, unit.index).exists():
                yield unit
