"""Tokenisation of units of input, each into its own file, from which the shards are assembled."""

import dataclasses
import hashlib
import io
import itertools
import json
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from difftx.data.prepare.job import Job
from difftx.data.prepare.readers import Document, Source, Unit
from difftx.errors import UserError
from difftx.files import new_file

PARTS = ("tokens", "lengths", "prompts", "sizes", "hashes", "ids", "state")  # Arrays in a unit's file.


@dataclasses.dataclass(frozen=True)
class Done:
    """Counts and problems of a tokenised unit."""

    input_bytes: int  # Size as stored, before decompression.
    text_bytes: int
    tokens: int
    problems: tuple[str, ...]  # One message per document that was left out.


def unit_file(job: Job, source: int, index: int) -> Path:
    """Return the path of a tokenised unit's file."""
    return job.units / f"{source:05d}-{index:06d}.npz"


def encode_unit(job: Job, unit: Unit) -> Done:
    """Tokenise a unit and write its file, which depends only on the job's options and the unit's bytes.

    The file is a numpy archive, whose arrays carry CRCs. It holds all tokens, with an end-of-text token after each
    document. Per document it holds the number of tokens, the number of prompt tokens, the size of prompt and text in
    bytes, and the first 128 bits of their SHA-256. With an id field, it also holds the ids. Its state includes the
    position at which the source continues.

    Raises:
        UserError: If a document cannot be read and `job.skip` is not set.
    """
    end = np.array([job.encoding.eot_token], np.uint32)
    parts: list[np.ndarray] = []  # Three arrays per document: prompt, text, end-of-text token.
    documents: list[Document] = []
    problems: list[str] = []
    empty = 0
    for document in unit.content.documents(job.fields):
        if isinstance(document, UserError):
            if not job.skip:
                raise UserError(f"{document}; repair it, or leave such out with --on_error=skip")
            problems.append(str(document))
        elif not document.text:
            empty += 1
        else:
            # Encode text that looks like a special token as ordinary text. Encode prompt and text separately, so that
            # no token spans both: generation, too, starts after the last token of a prompt.
            texts = (document.prompt, document.text)
            parts += [*(job.encoding.encode_to_numpy(text, disallowed_special=()) for text in texts), end]
            documents.append(document)
    tokens = np.concatenate([*parts, np.array([], np.uint32)]).astype(job.dtype, copy=False)
    sizes = np.array([len(document.utf8) for document in documents], np.int64)
    done = Done(unit.input_bytes, int(sizes.sum()), len(tokens), tuple(problems))
    ids = "".join(json.dumps(d.id, ensure_ascii=False) + "\n" for d in documents if job.fields.id is not None)
    state = {"end": unit.end, "last": unit.last, "empty": empty, "done": dataclasses.asdict(done)}
    with new_file(unit_file(job, unit.source, unit.index)) as file:
        np.savez(
            file,
            tokens=tokens,
            lengths=np.array([sum(map(len, each)) for each in itertools.batched(parts, 3)], np.int64),
            prompts=np.array([len(prompt) for prompt in parts[::3]], np.int64),
            sizes=sizes,
            hashes=np.frombuffer(b"".join(hashlib.sha256(d.utf8).digest()[:16] for d in documents), ">u8"),
            ids=np.frombuffer(ids.encode(), np.uint8),
            state=np.frombuffer(json.dumps(state).encode(), np.uint8),
        )
    return done


def discard_damaged_units(job: Job) -> Iterator[str]:
    """Delete the corrupt unit files of an earlier run, and yield a message for each."""
    for file in sorted(job.units.glob("*.npz")):
        if not _is_whole(file.read_bytes()):
            file.unlink()
            yield f"{file}: damaged; tokenising that part of the input again"


def _is_whole(data: bytes) -> bool:
    """Return whether a unit's file has every array, each with a matching CRC."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = sorted(archive.namelist())
            return names == sorted(f"{part}.npy" for part in PARTS) and archive.testzip() is None
    except Exception:  # zipfile raises many types of exceptions for corrupt archives.
        return False


def read_state(file: Path) -> dict[str, Any]:
    """Return the state of a tokenised unit: its end position in the source, and its counts."""
    with np.load(file) as archive:
        return json.loads(archive["state"].tobytes())


def finished_units(job: Job, source: Source) -> tuple[int, int, list[dict[str, Any]]]:
    """Return a source's next position, the next unit's index (-1 if none is left), and the states of finished units."""
    position, states = 0, []
    for index in itertools.count():
        file = unit_file(job, source.index, index)
        if not file.exists():
            return position, index, states
        states.append(read_state(file))
        position = states[-1]["end"]
        if states[-1]["last"]:
            return position, -1, states
    raise AssertionError  # itertools.count has no end.


def units_to_do(job: Job, sources: Sequence[Source]) -> Iterator[Unit]:
    """Read and yield the units that have no file yet."""
    for source in sources:
        position, index, _ = finished_units(job, source)
        if index >= 0:
            for unit in source.units(job.fields, position, index):
                if not unit_file(job, source.index, unit.index).exists():
                    yield unit
