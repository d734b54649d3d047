"""Tokenising a unit of input into a file of its own, from which the shards are put together."""

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

from difftx.data.job import Job
from difftx.data.readers import Document, Source, Unit
from difftx.errors import UserError
from difftx.files import new_file

PARTS = ("tokens", "lengths", "prompts", "sizes", "hashes", "ids", "state")  # Of a unit's file.


@dataclasses.dataclass(frozen=True)
class Done:
    """What a unit came to."""

    input_bytes: int  # As stored.
    text_bytes: int
    tokens: int
    problems: tuple[str, ...]  # What was left out, and why.


def unit_file(job: Job, source: int, index: int) -> Path:
    """Return the path of a tokenised unit."""
    return job.units / f"{source:05d}-{index:06d}.npz"


def encode_unit(job: Job, unit: Unit) -> Done:
    """Tokenise a unit and write its file: a function of the unit's bytes alone.

    The file is a numpy archive (its parts carry CRCs): the tokens, with one end-of-text token after each document; of
    each document the number of tokens, how many of them are the prompt, the bytes and the first 128 bits of the
    SHA-256; and where the source goes on.

    Raises:
        UserError: a document that cannot be read, unless they are to be skipped.
    """
    end = np.array([job.encoding.eot_token], np.uint32)
    parts: list[np.ndarray] = []  # Of each document three: prompt, text, end.
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
            # Text that spells a special token is text. No token spans prompt and text: generation too begins after one.
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
    """Delete the units of an earlier run that are not as they were written, and yield a line for each."""
    for file in sorted(job.units.glob("*.npz")):
        if not _is_whole(file.read_bytes()):
            file.unlink()
            yield f"{file}: damaged; tokenising that part of the input again"


def _is_whole(data: bytes) -> bool:
    """Return whether a unit's file has every part, each with its CRC."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = sorted(archive.namelist())
            return names == sorted(f"{part}.npy" for part in PARTS) and archive.testzip() is None
    except Exception:  # zipfile raises nearly anything for bytes that are no archive.
        return False


def read_state(file: Path) -> dict[str, Any]:
    """Return where a tokenised unit ends and what it came to."""
    with np.load(file) as archive:
        return json.loads(archive["state"].tobytes())


def finished_units(job: Job, source: Source) -> tuple[int, int, list[dict[str, Any]]]:
    """Return where to read on in a source, the index of that unit (-1: none is left), and the states before it."""
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
    """Read the units that have no file yet."""
    for source in sources:
        position, index, _ = finished_units(job, source)
        if index >= 0:
            for unit in source.units(job.fields, position, index):
                if not unit_file(job, source.index, unit.index).exists():
                    yield unit
