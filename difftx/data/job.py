"""What one call of `difftx prepare` does, and the journal by which the next one knows whether it may go on."""

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from difftx.data.readers import Fields, Source, load_hugging_face
from difftx.data.store import FORMAT, SPLITS, is_store, read_meta
from difftx.data.tokenizer import fingerprint, load_tokenizer
from difftx.errors import UserError
from difftx.files import read_json, write_atomically


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The options, as the workers need them."""

    out: Path
    tokenizer: str
    fields: Fields
    valid_fraction: float  # Share of the documents held out, by the hash of their text.
    shard_tokens: int  # A shard has the documents that start within so many tokens.
    skip: bool  # Leave out what cannot be read, rather than stop.

    @property
    def work(self) -> Path:
        """Folder of what is not the store yet."""
        return self.out / ".prepare"

    @property
    def units(self) -> Path:
        """Folder of the tokenised units."""
        return self.work / "units"

    @property
    def records(self) -> Path:
        """Folder of what meta.json will say of each finished shard."""
        return self.work / "shards"

    @property
    def encoding(self) -> tiktoken.Encoding:
        """The tokenizer, loaded once a process."""
        return _load(self.tokenizer)

    @property
    def dtype(self) -> np.dtype:
        """Of the tokens."""
        return np.dtype("<u2" if self.encoding.n_vocab <= 2**16 else "<u4")


@functools.cache
def _load(name: str) -> tiktoken.Encoding:
    return load_tokenizer(name, field="--tokenizer")


def describe(job: Job, inputs: dict[str, str | None], sources: Sequence[Source]) -> dict[str, Any]:
    """Return the fields of meta.json that are known before the work: equal ones mean an equal store."""
    files = input_states(sources)
    return {
        "format": FORMAT,
        "tokenizer": {
            "name": job.tokenizer,
            "vocabulary_sha256": fingerprint(job.encoding),
            "vocab_size": job.encoding.n_vocab,
            "end_of_text": job.encoding.eot_token,
        },
        "dtype": job.dtype.name,
        "source": {
            **inputs,
            "files": len(files),
            "bytes": sum(source.size for source in sources),
            "sha256_of_names_sizes_and_times": hashlib.sha256(json.dumps(files).encode()).hexdigest(),
            "text_field": job.fields.text,
            "id_field": job.fields.id,
            "prompt_field": job.fields.prompt,
            "valid_fraction": job.valid_fraction,
            "shard_tokens": job.shard_tokens,
        },
        "versions": {"tiktoken": importlib.metadata.version("tiktoken")},
    }


def input_states(sources: Sequence[Source]) -> dict[str, list[Any]]:
    """Return size and time of each input file, by which a change is noticed."""
    states: dict[str, list[Any]] = {}
    for source in sources:
        for file in source.files:
            if source.kind == "hf":
                states[str(file)] = [load_hugging_face(str(file))._fingerprint]
            else:
                stat = file.stat()
                states[str(file)] = [stat.st_size, stat.st_mtime_ns]
    return states


@contextlib.contextmanager
def open_job(job: Job, description: dict[str, Any], sources: Sequence[Source]) -> Iterator[bool]:
    """Hold the journal, for one process; yield whether there is anything to do.

    Raises:
        UserError: `out` holds something else, or another process works there.
    """
    if is_store(job.out):
        meta = read_meta(job.out)
        if different := _differences({name: meta[name] for name in description}, description):
            raise UserError(f"--out={job.out}: holds a store of other {different}; choose another --out, or delete it")
        shutil.rmtree(job.work, ignore_errors=True)
        yield False
        return
    others = [path for path in job.out.iterdir() if path != job.work] if job.out.exists() else []
    if others and not (job.work / "job.json").exists():
        raise UserError(f"--out={job.out}: not empty, and no unfinished store; choose another folder")
    job.work.mkdir(parents=True, exist_ok=True)
    with (job.work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"--out={job.out}: another `difftx prepare` is at work there") from error
        _continue_or_begin(job, {"description": description, "files": input_states(sources)})
        yield True


def _continue_or_begin(job: Job, journal: dict[str, Any]) -> None:
    path = job.work / "job.json"
    if path.exists():
        before = read_json(path)
        names = sorted(before["files"].keys() | journal["files"].keys())
        changed = [name for name in names if before["files"].get(name) != journal["files"].get(name)]
        different = changed[0] if changed else _differences(before["description"], journal["description"])
        if different:
            what = "the input file has changed since" if changed else "differs from"
            raise UserError(f"{different}: {what} the unfinished run in {job.work}; delete {job.out} to start anew")
    write_atomically(path, json.dumps(journal))  # First: without it, the folders would be taken for somebody else's.
    for folder in (job.units, job.records, *(job.out / split for split in SPLITS)):
        folder.mkdir(exist_ok=True)


def _differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Return the first field that differs with both values, or ""."""
    for name, value in new.items():
        before = old.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            if inner := _differences(before, value):
                return f"{name}.{inner}"
        elif before != value:
            return f"{name} ({before!r}, now {value!r})"
    return ""
