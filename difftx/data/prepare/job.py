"""The options of a `difftx prepare` call, and the journal by which a later call resumes an unfinished one."""

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

# Fields of "source" in meta.json that do not affect the tokens of a unit. Some only assign documents to splits and
# shards. Others describe the input files, whose changes the journal detects per source.
FIELDS_WITHOUT_EFFECT_ON_UNITS = (
    "valid_input",
    "files",
    "bytes",
    "sha256_of_names_sizes_and_times",
    "valid_fraction",
    "shard_tokens",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The options of a call."""

    input: str
    valid_input: str | None
    out: Path
    tokenizer: str
    fields: Fields
    valid_fraction: float  # Share of the documents held out, chosen by the hash of their text.
    shard_tokens: int  # A shard holds the documents that start within this many tokens.
    skip_unreadable: bool  # Whether to leave out unreadable documents instead of stopping.
    workers: int  # Number of local processes.
    runner: str  # "local", or a runner of Apache Beam.
    runner_options: str

    @property
    def work(self) -> Path:
        """Folder of intermediate files, deleted when the store is finished."""
        return self.out / ".prepare"

    @property
    def units(self) -> Path:
        return self.work / "units"

    @property
    def shard_records(self) -> Path:
        """Folder of the finished shards' entries for meta.json."""
        return self.work / "shards"

    @property
    def journal(self) -> Path:
        return self.work / "job.json"

    @property
    def encoding(self) -> tiktoken.Encoding:
        return _load_tokenizer(self.tokenizer)

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the stored tokens."""
        return np.dtype("<u2" if self.encoding.n_vocab <= 2**16 else "<u4")


@functools.cache  # A job is sent to the workers with every task, and each worker loads the tokenizer once.
def _load_tokenizer(name: str) -> tiktoken.Encoding:
    return load_tokenizer(name, field="--tokenizer")


def describe(job: Job, sources: Sequence[Source]) -> dict[str, Any]:
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
            "input": job.input,
            "valid_input": job.valid_input,
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
    """Lock the folder `job.out` for this process; yield False if it already holds the finished store, else True.

    Raises:
        UserError: If `job.out` holds another store, another unfinished run or other files, or if another process works
            there.
    """
    if is_store(job.out):
        meta = read_meta(job.out)
        if difference := _difference({name: meta[name] for name in description}, description):
            raise UserError(f"--out={job.out}: holds a store of other {difference}; choose another --out, or delete it")
        shutil.rmtree(job.work, ignore_errors=True)
        yield False
        return
    others = [path for path in job.out.iterdir() if path != job.work] if job.out.exists() else []
    if others and not job.journal.exists():
        raise UserError(f"--out={job.out}: not empty, and no unfinished store; choose another folder")
    job.work.mkdir(parents=True, exist_ok=True)
    with (job.work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(f"--out={job.out}: another `difftx prepare` is at work there") from error
        inputs = [{"held_out": source.held_out, **input_states([source])} for source in sources]
        _resume_or_start(job, {"description": description, "inputs": inputs})
        yield True


def _resume_or_start(job: Job, journal: dict[str, Any]) -> None:
    """Delete the outdated files of an earlier run, write the journal, and create the folders.

    The units of unchanged sources are kept. Shards are kept only if the whole journal is unchanged.

    Raises:
        UserError: If the earlier run had another input or tokenizer, or other fields.
    """
    shard_folders = (job.shard_records, *(job.out / split for split in SPLITS))
    if job.journal.exists():
        before = read_record(job.journal)
        if before is None:
            print(f"{job.journal}: corrupt; preparing everything again", file=sys.stderr)
            before = {"description": {}, "inputs": []}
        elif difference := _difference(_unit_settings(before["description"]), _unit_settings(journal["description"])):
            raise UserError(
                f"{difference}: differs from the unfinished run in {job.work}; choose another --out, or delete "
                f"{job.out}"
            )
        for index, (old, new) in enumerate(itertools.zip_longest(before["inputs"], journal["inputs"])):
            if old != new:
                _delete_units(job, index, old or {}, new or {})
        if before != journal:
            for folder in shard_folders:
                shutil.rmtree(folder, ignore_errors=True)
    write_record(job.journal, journal)  # Written first, because `open_job` rejects the folders without a journal.
    for folder in (job.units, *shard_folders):
        folder.mkdir(exist_ok=True)


def _delete_units(job: Job, source: int, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Delete the units of a source whose state in the journal has changed, and print the reason."""
    if changed := [name for name in old if name in new and old[name] != new[name]]:
        what = changed[-1] if changed != ["held_out"] else "--valid_fraction"
        print(f"{what}: changed since the unfinished run; tokenising again", file=sys.stderr)
    for unit in job.units.glob(f"{source:05d}-*.npz"):
        unit.unlink()


def _unit_settings(description: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a description that determines the content of the units' files."""
    source = {k: value for k, value in description["source"].items() if k not in FIELDS_WITHOUT_EFFECT_ON_UNITS}
    return description | {"source": source}


def _difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Return the name and both values of the first field that differs, or ""."""
    for name in old | new:
        before, value = old.get(name), new.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            if inner := _difference(before, value):
                return f"{name}.{inner}"
        elif before != value:
            return f"{name} ({before!r}, now {value!r})"
    return ""
