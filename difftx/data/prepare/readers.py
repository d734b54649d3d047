"""Readers that split input files into units of about `UNIT_BYTES` of text. The boundaries only depend on the input.

The main process reads and decompresses a unit, and a worker parses it into documents.
"""

import bisect
import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from difftx.data import records
from difftx.data.chat_template import Date
from difftx.data.tokenizer import Tokenizer
from difftx.errors import UserError, import_extra, printable
from difftx.files import open_file, size_of
from difftx.registry import Registry
from difftx.storage import hub
from difftx.storage.hub import HubFile
from difftx.storage.paths import AnyPath, is_bucket, path_of
from difftx.storage.reading import map_ahead

UNIT_BYTES = 4 * 2**20
UNITS = 64  # With `--max_tokens`, split into at least this many units, so that little is read beyond the limit.
# Files in a data set's folder on the Hub that are not data. The `datasets` library leaves them out too.
DESCRIPTIONS = {"README.md", "config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json"}
HUGGING_FACE = "hf:"
TOKEN_FILES = ("npy", "bin")  # Suffixes of files with token ids.
COLON = re.compile(r":(?![^\[]*\])")  # A colon outside brackets, because a split may be a slice such as "train[:10%]".

type InputFile = AnyPath | HubFile


@dataclasses.dataclass(frozen=True)
class Fields:
    """Names of the fields to read from JSON lines and tables."""

    text: str = "text"
    id: str | None = None
    prompt: str | None = None  # Text before the document that does not count in the loss.
    messages: str | None = None  # A conversation, instead of `text` and `prompt`.

    @property
    def names(self) -> list[str]:
        content = (self.text, self.prompt) if self.messages is None else (self.messages,)
        return [name for name in (*content, self.id) if name is not None]


@dataclasses.dataclass(frozen=True)
class Document:
    """A document of the input."""

    text: str  # Without the prompt.
    utf8: bytes  # Prompt and text together.
    id: str | None
    prompt: str = ""
    turns: Sequence[list[int]] = ()  # Token ids of a conversation, alternating: before an answer, of the answer.
    ids: Any = None  # Token ids of the text, uint32, if they were read from a token file.


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A conversation of the input."""

    messages: Any
    id: str | None
    record_name: Callable[[], str]

    def documents(self, tokenizer: Tokenizer, date: Date) -> Iterator[Document | UserError]:
        """Yield one document, with a turn for each assistant message.

        Start a new document whenever the ids so far are not a prefix of the next answer's prompt in generation, for
        example because the template drops the reasoning of earlier answers.
        """
        template, whole, turns = tokenizer.require_chat_template("--messages_field"), "", list[list[int]]()
        try:
            for prompt, text in template.turns(self.messages, date):
                ids, earlier = tokenizer.encode_chat(prompt), list(itertools.chain(*turns))
                if ids[: len(earlier)] != earlier:
                    yield Document(whole, whole.encode(), self.id, turns=turns)
                    earlier, turns = [], []
                whole = prompt + text
                turns += [ids[len(earlier) :], tokenizer.encode_chat(text, continues=True)]
            yield Document(whole, whole.encode(), self.id, turns=turns)
        except (UnicodeEncodeError, UserError) as error:
            yield UserError(f"{self.record_name()}: {error}")


# `Lines`, `Texts`, `Rows`, or `Tokens`. Their method `documents` yields a `UserError` for an unreadable document.
type Content = Any
type Found = Document | Conversation | UserError


@dataclasses.dataclass(frozen=True)
class Lines:
    """Whole JSON lines from byte `start` of a decompressed file. Each non-blank line is a document."""

    file: InputFile
    start: int
    data: bytes

    def documents(self, fields: Fields) -> Iterator[Found]:
        position = self.start
        for index, line in enumerate(self.data.split(b"\n")):
            if line.strip():
                yield self._document(line, index, position, fields)
            position += len(line) + 1

    def _document(self, line: bytes, index: int, position: int, fields: Fields) -> Found:
        try:
            record = json.loads(line.decode().removeprefix(records.BYTE_ORDER_MARK if position == 0 else ""))
        except UnicodeDecodeError as error:
            return UserError(f"{self.line_name(index)}: byte {position + error.start} of the file is not UTF-8")
        except (ValueError, RecursionError) as error:
            return UserError(f"{self.line_name(index)}: broken JSON ({error})")
        if not isinstance(record, dict):
            return UserError(f"{self.line_name(index)}: not a JSON object")
        return _document_of(record, fields, lambda: self.line_name(index))

    def line_name(self, index: int) -> str:
        """Return the file and number of a line, for messages. Read the file again to count earlier lines."""
        before = 0
        if self.start:
            with records.open_stream(self.file) as stream:
                left = self.start
                while left and (data := stream.read(min(left, 2**20))):
                    before += data.count(b"\n")
                    left -= len(data)
        return f"{self.file}: line {before + index + 1}"


@dataclasses.dataclass(frozen=True)
class Texts:
    """Text files. Each is a document, and its path is the document's id."""

    # For each file: path, and content or the error of reading it.
    files: tuple[tuple[InputFile, bytes | UserError], ...]
    start: int = 0  # First byte of the content in its file. Above 0 only for the held-out end of a single file.

    def documents(self, fields: Fields) -> Iterator[Found]:
        for file, data in self.files:
            if isinstance(data, UserError):
                yield data
            elif (field := fields.messages or fields.prompt) is not None:
                flag = "--prompt_field" if fields.messages is None else "--messages_field"
                yield UserError(f"{file}: a text file has no field {field!r}; {flag} is for JSON lines")
            else:
                mark = records.BYTE_ORDER_MARK if self.start == 0 else ""
                try:
                    text = data.decode().removeprefix(mark)
                    yield Document(text, data.removeprefix(mark.encode()), fields.id and str(file))
                except UnicodeDecodeError as error:
                    yield UserError(f"{file}: byte {self.start + error.start} is not UTF-8")


@dataclasses.dataclass(frozen=True)
class Rows:
    """Consecutive rows of a table, from row `start`. Each row is a document."""

    table: str
    start: int
    rows: tuple[dict[str, Any], ...]

    def documents(self, fields: Fields) -> Iterator[Found]:
        for index, row in enumerate(self.rows, start=self.start):
            yield _document_of(row, fields, lambda index=index: f"{self.table}: row {index}")


type Chunk = tuple[Content, int, int]  # The fields `content`, `end` and `input_bytes` of a `Unit`.


@dataclasses.dataclass(frozen=True)
class Unit:
    """A part of a source that one worker tokenises."""

    source: int  # Index of the source.
    index: int  # Index of the unit within the source.
    content: Content
    end: int  # Start of the next unit: a byte of the decompressed file, a row, or a file index.
    input_bytes: int  # Size in bytes in the file, which may be compressed.
    last: bool = False  # Whether this is the last unit of the source.
    state: str = ""  # State of the source.


@dataclasses.dataclass(frozen=True)
class Source:
    """An input file, a group of small text files, or a Hugging Face data set."""

    index: int
    kind: str  # "texts", "hf", or a name in `READERS`.
    files: tuple[InputFile, ...]  # Paths. For "hf", one entry NAME[:SPLIT[:CONFIG]].
    size: int  # Size on disk in bytes.
    valid: bool  # Whether the source is validation text.
    held_out: float | None = None  # Fraction at the end of a single text to hold out for validation.
    max_tokens: int | None = None  # `Job.max_tokens` if this is training text.
    end_of_text: int | None = None  # For token files: the id that ends documents.
    bin_dtype: str | None = None  # Dtype of a .bin file without .idx.
    state: str = ""  # Text that changes when the files change, from `with_states`.

    @property
    def unit_bytes(self) -> int:
        """Size of a unit of text in bytes, which is also about its maximum number of tokens."""
        return UNIT_BYTES if self.max_tokens is None else max(1, min(UNIT_BYTES, self.max_tokens // UNITS))

    def units(self, fields: Fields, position: int = 0, index: int = 0) -> Iterator[Unit]:
        """Read and yield the units from unit `index` on, which starts at `position`."""
        numbered = (Unit(self.index, i, *chunk) for i, chunk in enumerate(self._chunks(fields, position), start=index))
        # Read one unit ahead to know which one is the last.
        for unit, following in itertools.pairwise(itertools.chain(numbered, [None])):
            assert unit is not None
            yield dataclasses.replace(unit, last=following is None, state=self.state)

    def _chunks(self, fields: Fields, position: int) -> Iterator[Chunk]:
        read = {"texts": _read_texts, "hf": _read_hugging_face}.get(self.kind) or READERS[self.kind]
        try:
            yield from read(self, fields, position)
        except records.READ_ERRORS as error:  # Keep the documents read so far. The last chunk is the error.
            yield unreadable(self.files[0], records.why_unreadable(self.files[0], error))
        except UnicodeDecodeError as error:  # Raised by pyarrow, `datasets` or an extension's reader.
            yield unreadable(self.files[0], f"{self.files[0]}: the file has text that is not UTF-8 ({error.reason})")


# Readers by file suffix. Files with other suffixes are texts. A reader takes a source, the fields to read, and a
# position (0, or the `end` of a chunk). It yields all chunks from there on, the same ones in every call. Readers of
# tables can use `read_rows`.
READERS: Registry[Callable[[Source, Fields, int], Iterator[Chunk]]] = Registry(
    "reader",
    {
        **dict.fromkeys(("jsonl", "ndjson", "json"), "difftx.data.prepare.readers:_read_lines"),
        "parquet": "difftx.data.prepare.readers:_read_parquet",
        **dict.fromkeys(TOKEN_FILES, "difftx.data.prepare.token_files:read_tokens"),
    },
)


def sources_of(pattern: str, *, valid: bool, first_index: int, commit: str | None = None) -> list[Source]:
    """List the sources of a file, folder, glob, `hf:` name or `hf://` address, sorted by path.

    If `commit` is given, it replaces the revision in the address.
    """
    if pattern.startswith(HUGGING_FACE) and not pattern.startswith(hub.SCHEME):
        name = pattern.removeprefix(HUGGING_FACE)
        return [Source(first_index, "hf", (Path(name),), load_hugging_face(name).data.nbytes, valid)]
    files = _input_files(pattern, "--valid_input" if valid else "--input", commit)
    sources: list[Source] = []
    for file, size in files.items():
        name = Path(str(file))
        ending = (Path(name.stem) if name.suffix.lower() in records.OPENERS else name).suffix.removeprefix(".")
        kind = next((name for name in (ending, ending.lower()) if name in READERS), "texts")
        if ending == "idx":  # An index belongs to a .bin file.
            continue
        if sources and kind == "texts" == sources[-1].kind and sources[-1].size < UNIT_BYTES:
            group = sources[-1]  # Group small texts into one source.
            sources[-1] = dataclasses.replace(group, files=(*group.files, file), size=group.size + size)
        else:
            parts = [file]
            if kind == "bin" and not isinstance(file, HubFile) and size_of(file.with_suffix(".idx")) is not None:
                parts.append(file.with_suffix(".idx"))
            sources.append(Source(first_index + len(sources), kind, tuple(parts), size, valid))
    return sources


def _input_files(pattern: str, flag: str, commit: str | None) -> dict[Any, int]:
    """Return the size of each file of a path, folder or glob. In folders, skip files that only describe a data set."""
    if pattern.startswith(hub.SCHEME):
        return {file: file.size for file in hub.list_files(flag, pattern, commit)}
    sizes, path = records.files_of(pattern, flag), path_of(flag, pattern)
    if descriptions := [file for file in sizes if path in file.parents and file.name in DESCRIPTIONS]:
        line = f"left out of the folder, because they describe data sets: {', '.join(map(str, descriptions))}"
        print(printable(f"{flag}={pattern}: {line}; a glob reads them"))
    return {file: size for file, size in sizes.items() if file not in descriptions}


@functools.cache
def load_hugging_face(name: str) -> Any:
    """Load NAME[:SPLIT[:CONFIG]] with the `datasets` library, from its cache or the network."""
    datasets = import_extra("datasets", "datasets")
    dataset, split, config, *_ = [*COLON.split(name), "", ""]
    try:
        return datasets.load_dataset(dataset, config or None, split=split or "train")
    except Exception as error:  # `datasets` raises many types of exceptions.
        reason = next(iter(str(error).splitlines()), "")
        raise UserError(f"--input={HUGGING_FACE}{name}: {type(error).__name__}: {reason}") from error


def _read_lines(source: Source, fields: Fields, position: int) -> Iterator[Chunk]:
    file = source.files[0]
    with open_file(file) as stored, records.open_stream(file, stored) as stream:
        stream.seek(position)
        before = stored.tell()
        while data := stream.read(source.unit_bytes):
            data += stream.readline()  # Read to the end of the last line.
            end, read = position + len(data), stored.tell() - before
            yield Lines(file, position, data), end, read
            position, before = end, before + read
        if not position:
            yield unreadable(file, f"{file}: the file is empty", source.size)


def _read_texts(source: Source, fields: Fields, position: int) -> Iterator[Chunk]:
    # `position` is the index of a file.
    def read(file: InputFile) -> bytes | UserError:
        try:
            with records.open_stream(file) as stream:
                return stream.read() or UserError(f"{file}: the file is empty")
        except records.READ_ERRORS as error:
            return UserError(records.why_unreadable(file, error))

    files, contents, size, start = source.files[position:], [], 0, 0
    for end, (file, data) in enumerate(zip(files, map_ahead(read, files), strict=True), start=position + 1):
        if source.held_out is not None and isinstance(data, bytes):
            start = validation_start(data, source.held_out)
            start, data = (start, data[start:]) if source.valid else (0, data[:start])
            data = data or UserError(f"{file}: too short to hold some out; give more, or --valid_fraction=0")
        contents.append((file, data))
        size += len(data) if isinstance(data, bytes) else 0
        if size >= source.unit_bytes or end == len(source.files):
            yield Texts(tuple(contents), start), end, source.size * len(contents) // len(source.files)
            contents, size = [], 0


def validation_start(text: bytes, share: float) -> int:
    """Return the byte at which the last `share` of a text starts, moved back to the start of a line or character."""
    start = min(round((1 - share) * len(text)), len(text) - 1)
    # Use the start of a line only if the held-out part is then at most twice as long as requested.
    start = text.rfind(b"\n", max(0, round((1 - 2 * share) * len(text))), start) + 1 or start
    while start > 0 and text[start] & 0xC0 == 0x80:  # Inside a multi-byte character.
        start -= 1
    return start


def _read_parquet(source: Source, fields: Fields, position: int) -> Iterator[Chunk]:
    pyarrow, parquet = import_extra("pyarrow", "parquet"), import_extra("pyarrow.parquet", "parquet")
    try:
        file: Any = source.files[0]
        opened = hub.HubReader(file) if isinstance(file, HubFile) else open_file(file) if is_bucket(file) else file
        # Without a buffer, pyarrow would read a whole column of a row group, however large it is.
        options = {"buffer_size": hub.REQUEST_BYTES, "pre_buffer": False, "page_checksum_verification": True}
        table = parquet.ParquetFile(opened, **options)
        total, names = table.metadata.num_rows, table.schema_arrow.names
        counts = [table.metadata.row_group(index).num_rows for index in range(table.num_row_groups)]
        starts = [0, *itertools.accumulate(counts)]
        first = bisect.bisect_right(starts, position) - 1  # Row group of the first row.
        # If the table lacks a field, no row is a document, and the message lists the names.
        rows: Iterator[dict[str, Any]] = itertools.repeat(dict.fromkeys(names, ""), total - position)
        if set(fields.names) <= set(names):
            # Read few rows at a time, because rows may have megabytes even in a small file.
            groups = range(first, table.num_row_groups)
            batches = table.iter_batches(batch_size=64, row_groups=groups, columns=fields.names)
            every = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
            rows = itertools.islice(every, position - starts[first], None)
        yield from read_rows(source, rows, position, total, fields)
    except (pyarrow.ArrowException, OSError) as error:
        reason = next(iter(str(error).splitlines()), "")
        yield unreadable(source.files[0], f"{source.files[0]}: not readable as Parquet ({reason})")


def _read_hugging_face(source: Source, fields: Fields, position: int) -> Iterator[Chunk]:
    data = load_hugging_face(str(source.files[0]))
    rows = itertools.repeat(dict.fromkeys(data.column_names, ""), len(data) - position)
    if set(fields.names) <= set(data.column_names):
        rows = iter(data.select_columns(fields.names).select(range(position, len(data))))
    yield from read_rows(source, rows, position, len(data), fields)


def read_rows(
    source: Source, rows: Iterator[dict[str, Any]], position: int, total: int, fields: Fields
) -> Iterator[Chunk]:
    """Group the rows of a table into chunks of about `Source.unit_bytes` of text.

    `rows` yields all rows from row `position` on, as dictionaries from field names to values. `total` is the number of
    rows in the whole table. `source`, `position` and `fields` are the arguments of the reader.
    """
    batch: list[dict[str, Any]] = []
    size = 0
    name = str(source.files[0])
    for row in rows:
        batch.append(row)
        size += len(str(row.get(fields.messages or fields.text, "")))
        if size >= source.unit_bytes:
            end = position + len(batch)
            yield Rows(name, position, tuple(batch)), end, source.size * len(batch) // total
            batch, size, position = [], 0, end
    if batch:
        yield Rows(name, position, tuple(batch)), position + len(batch), source.size * len(batch) // total
    elif not position:
        yield unreadable(source.files[0], f"{name}: the table has no rows", source.size)


def unreadable(file: InputFile, reason: str, input_bytes: int = 0) -> Chunk:
    """Return a chunk that stands for an unreadable file, or for its unreadable rest."""
    # This is the last chunk of its source, so its `end` (0) is not used.
    return Texts(((file, UserError(reason)),)), 0, input_bytes


def _document_of(record: dict[str, Any], fields: Fields, name_of_record: Callable[[], str]) -> Found:
    flags = {fields.text: "--text_field", fields.prompt: "--prompt_field"}
    for field, flag in {fields.messages: "--messages_field"}.items() if fields.messages else flags.items():
        if field is None:
            continue
        if field not in record:
            names = ", ".join(map(repr, itertools.islice(record, 10))) or "none"
            return UserError(f"{name_of_record()}: no field {field!r}; its fields: {names}; choose with {flag}")
        if fields.messages is None and not isinstance(record[field], str):
            return UserError(f"{name_of_record()}: field {field!r} is not text but {type(record[field]).__name__}")
    if fields.id is not None and fields.id not in record:
        return UserError(f"{name_of_record()}: no field {fields.id!r}; choose with --id_field")
    document_id = None if fields.id is None else str(record[fields.id])
    if fields.messages is not None:
        return Conversation(record[fields.messages], document_id, name_of_record)
    text, prompt = record[fields.text], "" if fields.prompt is None else record[fields.prompt]
    try:
        return Document(text, (prompt + text).encode(), document_id, prompt)
    except UnicodeEncodeError as error:
        return UserError(f"{name_of_record()}: character {error.start} is half of a surrogate pair, which is not UTF-8")
