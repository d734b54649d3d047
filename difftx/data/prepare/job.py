"""The options of a `difftx prepare` call, and the journal with which a later call resumes an unfinished store."""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from difftx.data.chat_template import Date
from difftx.data.prepare.readers import READERS, Fields, Source, load_hugging_face
from difftx.data.store import FORMAT, SPLITS, is_store, read_meta
from difftx.data.tokenizer import Tokenizer
from difftx.data.tokenizers import load_tokenizer
from difftx.errors import UserError
from difftx.files import Owner, list_folder, remove_folder, size_of
from difftx.json_files import json_sha256, read_record, write_record
from difftx.run_files import locked
from difftx.storage import objects
from difftx.storage.hub import HubFile
from difftx.storage.paths import AnyPath, BucketPath, is_bucket

STATES = "sha256_of_names_sizes_and_times"  # Field of meta.json.
# If only these fields of meta.json changed, an unfinished store can be resumed with the units tokenised so far. They
# assign documents to splits and shards, or describe the input files. A changed file also changes the names of its
# units.
FIELDS_WITHOUT_EFFECT_ON_UNITS = ("valid_input", "files", "bytes", STATES, "valid_fraction", "shard_tokens")

TAKEOVER_SECONDS = 60.0  # Take over the lock in a bucket after this time without a renewal.

_load_tokenizer = functools.cache(load_tokenizer)  # Cached, because every task has its own copy of the job.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The options of a `difftx prepare` call, and the paths of its intermediate files."""

    input: str
    valid_input: str | None
    out: AnyPath
    tokenizer: str
    end_of_text: str | None  # Name of the end-of-text token, if the tokenizer's files do not name one.
    fields: Fields
    date: Date = None
    bin_dtype: str | None = None  # Dtype of .bin files without .idx.
    max_tokens: int | None = None  # Limit on the tokens of `input`, including duplicates. Reading stops there.
    valid_fraction: float  # Fraction of documents to hold out for validation, selected by hash.
    shard_tokens: int  # Tokens per shard. The last document may exceed it.
    skip_unreadable: bool  # Skip unreadable documents instead of raising an error.
    workers: int  # Number of processes.

    @property
    def work(self) -> AnyPath:
        """Folder for intermediate files. It is deleted when the store is finished."""
        return self.out / ".prepare"

    @property
    def units(self) -> AnyPath:
        return self.work / "units"

    @property
    def journal(self) -> AnyPath:
        return self.work / "job.json"

    @property
    def loaded_tokenizer(self) -> Tokenizer:
        return _load_tokenizer(self.tokenizer, field="--tokenizer", end_of_text=self.end_of_text)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype("<u2" if self.loaded_tokenizer.n_vocab <= 2**16 else "<u4")


def describe(job: Job, sources: Sequence[Source], files: dict[str, list[Any]]) -> dict[str, Any]:
    """Return the fields of `meta.json` that determine the content of the store. They are known before tokenising.

    `files` is the result of `input_states`.
    """
    readers = {READERS.extension_of(source.kind) for source in sources}
    extensions = sorted(extension.sha256 for extension in readers if extension)
    library = job.loaded_tokenizer.library
    # All sources of an input have the same commit.
    commits = {
        f"{'valid_input' if source.valid else 'input'}_commit": file.commit
        for source in sources
        if isinstance(file := source.files[0], HubFile)
    }
    return {
        "format": FORMAT,
        "tokenizer": {
            "name": job.tokenizer,
            "vocabulary_sha256": job.loaded_tokenizer.fingerprint,
            "vocab_size": job.loaded_tokenizer.n_vocab,
            "end_of_text": job.loaded_tokenizer.eot_token,
        }
        | ({} if job.end_of_text is None else {"end_of_text_name": job.end_of_text}),
        "dtype": job.dtype.name,
        "source": {
            "input": job.input,
            "valid_input": job.valid_input,
            "files": len(files),
            "bytes": sum(source.size for source in sources),
            STATES: hashlib.sha256(json.dumps(files).encode()).hexdigest(),
            "text_field": job.fields.text,
            "id_field": job.fields.id,
            "prompt_field": job.fields.prompt,
            "valid_fraction": job.valid_fraction,
            "shard_tokens": job.shard_tokens,
        }
        | ({"extensions": extensions} if extensions else {})
        | {name: value for name in ("max_tokens", "bin_dtype") if (value := getattr(job, name)) is not None}
        | commits
        | _messages(job),
        "versions": {library: importlib.metadata.version(library)},
    }


def pinned_commit(job: Job, flag: str) -> str | None:
    """Return the Hub commit at which the store, finished or not, read the input `flag`. None if there is none."""
    meta = read_meta(job.out) if is_store(job.out) else None
    if meta is None and size_of(job.journal) is not None:
        meta = read_record(job.journal)
    before = meta["source"] if meta else {}
    return before.get(f"{flag}_commit") if before.get(flag) == getattr(job, flag) else None


def _messages(job: Job) -> dict[str, str]:
    """Return the fields of `meta.json` that determine the text of conversations."""
    if (field := job.fields.messages) is None:
        return {}
    template = job.loaded_tokenizer.require_chat_template(f"--messages_field={field}")
    if "strftime_now" in template.text and job.date is None:
        raise UserError(f"--date is missing, which the chat template of {job.tokenizer} writes; set --date=YYYY-MM-DD")
    fields = {"messages_field": field, "chat_template_sha256": template.sha256}
    return fields if job.date is None else fields | {"date": job.date.isoformat()}


def input_states(sources: Sequence[Source]) -> dict[str, list[Any]]:
    """Return the state of each file: size and modification time, version (in a bucket), or data set fingerprint."""
    states: dict[str, list[Any]] = {}
    in_folders: dict[BucketPath, list[BucketPath]] = {}
    for source in sources:
        for file in source.files:
            if source.kind == "hf":
                states[str(file)] = [load_hugging_face(str(file))._fingerprint]
            elif isinstance(file, HubFile):
                states[str(file)] = [file.size, file.content]  # A commit does not change.
            elif is_bucket(file):
                in_folders.setdefault(file.parent, []).append(file)
            else:
                stat = file.stat()
                states[str(file)] = [stat.st_size, stat.st_mtime_ns]
    for folder, files in in_folders.items():
        # With few files, single requests are cheaper than a listing.
        listed = objects.describe_below(folder) if len(files) > 8 else {}
        for file in files:
            if (found := listed.get(file.name) or objects.describe(file)) is None:
                raise UserError(f"{file}: deleted while it was read; run the same command again")
            states[str(file)] = [found.size, found.version]
    return states


def with_states(sources: Sequence[Source], states: dict[str, list[Any]]) -> list[Source]:
    """Set the field `state` of the sources from the result of `input_states`."""
    contents = ([source.held_out, *([str(file), states[str(file)]] for file in source.files)] for source in sources)
    return [
        dataclasses.replace(source, state=json_sha256(content)[:8])
        for source, content in zip(sources, contents, strict=True)
    ]


@contextlib.contextmanager
def open_job(job: Job, description: dict[str, Any]) -> Iterator[Owner | None]:
    """Lock the folder `job.out` and yield its owner, or yield None if it already holds the finished store.

    The owner raises an error if another process has taken the folder. When the store is finished, delete `job.work`.
    """
    if _is_finished(job, description):
        yield None
    else:
        if list_folder(job.out).keys() - {job.work.name} and size_of(job.journal) is None:
            raise UserError(f"--out={job.out}: not empty, and no unfinished store; choose another folder")
        with locked(job.work, f"--out={job.out}", TAKEOVER_SECONDS, wait_seconds=0) as owner:
            if _is_finished(job, description):  # Another process finished the store before this one got the lock.
                yield None
            else:
                _resume_or_start(job, description)
                yield owner
    if is_store(job.out):
        remove_folder(job.work)  # Release the lock first, because NFS keeps open files.


def _is_finished(job: Job, description: dict[str, Any]) -> bool:
    """Return whether `job.out` holds the finished store. Raise `UserError` if it holds a different store."""
    if not is_store(job.out):
        return False
    meta = read_meta(job.out)
    if difference := _difference({name: meta[name] for name in description}, description):
        raise UserError(f"--out={job.out}: holds a store of other {difference}; choose another --out, or delete it")
    return True


def _resume_or_start(job: Job, description: dict[str, Any]) -> None:
    """Prepare to resume: delete the shards of an unfinished store, but keep its units. Write the journal.

    If there are no units yet, as after a wrong --text_field, the settings may change.
    """
    shard_folders = [job.out / split for split in SPLITS]
    if size_of(job.journal) is not None:
        advice = f"choose another --out, or delete {job.out}"
        before = read_record(job.journal)
        if before is None:
            raise UserError(f"{job.journal}: corrupt; {advice}")
        difference = _difference(before, description, FIELDS_WITHOUT_EFFECT_ON_UNITS)
        if difference and list_folder(job.units):
            raise UserError(f"{difference}: differs from the unfinished run in {job.work}; {advice}")
        for folder in shard_folders:
            remove_folder(folder)
        if before["source"][STATES] != description["source"][STATES]:
            print(f"{job.input}: changed since the unfinished run; tokenising changed files again", file=sys.stderr)
    write_record(job.journal, description)  # Before the folders: `open_job` rejects folders without a journal.
    if not is_bucket(job.out):
        for folder in (job.units, *shard_folders):
            folder.mkdir(exist_ok=True)


def _difference(old: dict[str, Any], new: dict[str, Any], ignored: Sequence[str] = ()) -> str:
    """Return the first field that differs, with both values, as text, or "" if all are equal."""
    for name in old | new:
        before, value = old.get(name), new.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            if inner := _difference(before, value, ignored):
                return f"{name}.{inner}"
        elif before != value and name not in ignored:
            return f"{name} ({before!r}, now {value!r})"
    return ""
