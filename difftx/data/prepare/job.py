"""The options of one `difftx prepare` call, and the journal that determines whether the next call may resume."""

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import importlib.metadata
import itertools
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from difftx.data.prepare.readers import Fields, Source, load_hugging_face
from difftx.data.store import FORMAT, SPLITS, is_store, read_meta
from difftx.data.tokenizer import fingerprint, load_tokenizer
from difftx.errors import UserError
from difftx.files import read_record, write_record
from difftx.registry import loaded_extensions

# Fields of a description's "source" that do not affect how a unit is tokenised. They assign documents to splits and
# shards, or describe input files, which the journal compares per source.
DECIDES_NO_UNIT = (
    "valid_input",
    "files",
    "bytes",
    "sha256_of_names_sizes_and_times",
    "valid_fraction",
    "shard_tokens",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The options of a call that the workers need."""

    out: Path
    tokenizer: str
    fields: Fields
    valid_fraction: float  # Share of the documents held out, chosen by the hash of their text.
    shard_tokens: int  # A shard holds the documents that start within this many tokens.
    skip: bool  # Whether to leave out unreadable documents instead of stopping.

    @property
    def work(self) -> Path:
        """Folder of intermediate files, deleted when the store is finished."""
        return self.out / ".prepare"

    @property
    def units(self) -> Path:
        """Folder of the tokenised units."""
        return self.work / "units"

    @property
    def records(self) -> Path:
        """Folder of the finished shards' entries for meta.json."""
        return self.work / "shards"

    @property
    def encoding(self) -> tiktoken.Encoding:
        """The tokenizer, loaded once per process."""
        return _load(self.tokenizer)

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the stored tokens."""
        return np.dtype("<u2" if self.encoding.n_vocab <= 2**16 else "<u4")


@functools.cache
def _load(name: str) -> tiktoken.Encoding:
    return load_tokenizer(name, field="--tokenizer")


def describe(job: Job, inputs: dict[str, str | None], sources: Sequence[Source]) -> dict[str, Any]:
    """Return the fields of meta.json that are known before the work. Stores with equal fields are equal."""
    files, extensions = input_states(sources), [extension.sha256 for extension in loaded_extensions()]
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
            **({"extensions": extensions} if extensions else {}),
        },
        "versions": {"tiktoken": importlib.metadata.version("tiktoken")},
    }


def input_states(sources: Sequence[Source]) -> dict[str, list[Any]]:
    """Return the size and modification time of each file, or the fingerprint of a data set, to detect changes."""
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
    """Lock the journal for this process; yield whether there is work to do.

    Raises:
        UserError: If `out` holds another store, another unfinished run or other files, or if another process works
            there.
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
        inputs = [{"held_out": source.held_out, **input_states([source])} for source in sources]
        _continue_or_begin(job, {"description": description, "inputs": inputs})
        yield True


def _continue_or_begin(job: Job, journal: dict[str, Any]) -> None:
    """Delete the outdated files of an earlier run, write the journal, and create the folders.

    Units stay if their source is unchanged. Shards stay only if the whole journal is unchanged.

    Raises:
        UserError: If the earlier run had another input or tokenizer, or other fields.
    """
    path = job.work / "job.json"
    if path.exists():
        before = read_record(path)
        if before is None:
            print(f"{path}: damaged; preparing everything again", file=sys.stderr)
            before = {"description": {}, "inputs": []}
        elif different := _differences(_of_units(before["description"]), _of_units(journal["description"])):
            raise UserError(
                f"{different}: differs from the unfinished run in {job.work}; choose another --out, or delete {job.out}"
            )
        for index, (old, new) in enumerate(itertools.zip_longest(before["inputs"], journal["inputs"])):
            if old == new:
                continue
            if changed := [name for name in old or () if name in (new or ()) and old[name] != new[name]]:
                what = f"{changed[-1]}: changed" if changed != ["held_out"] else "--valid_fraction: changed"
                print(f"{what} since the unfinished run; tokenising again", file=sys.stderr)
            for unit in job.units.glob(f"{index:05d}-*.npz"):
                unit.unlink()
        if before != journal:
            for folder in (job.records, *(job.out / split for split in SPLITS)):
                shutil.rmtree(folder, ignore_errors=True)
    write_record(path, journal)  # Written first: `open_job` rejects the folders if there is no journal.
    for folder in (job.units, job.records, *(job.out / split for split in SPLITS)):
        folder.mkdir(exist_ok=True)


def _of_units(description: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a description that affects the content of a unit's file."""
    source = {name: value for name, value in description["source"].items() if name not in DECIDES_NO_UNIT}
    return description | {"source": source}


def _differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Return the name and both values of the first field that differs, or ""."""
    for name in old | new:
        before, value = old.get(name), new.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            if inner := _differences(before, value):
                return f"{name}.{inner}"
        elif before != value:
            return f"{name} ({before!r}, now {value!r})"
    return ""
