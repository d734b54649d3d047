"""Token files as inputs of `difftx prepare`: numpy arrays, raw ids (.bin), and Megatron's .bin and .idx files."""

import dataclasses
import itertools
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from difftx.data import records
from difftx.data.prepare.readers import Chunk, Document, Fields, InputFile, Source, unreadable
from difftx.data.tokenizer import Tokenizer
from difftx.errors import UserError
from difftx.files import open_file

# Header of an .idx file, and its dtype codes (megatron/core/datasets/indexed_dataset.py).
INDEX_MAGIC, INDEX_HEADER = b"MMIDIDX\0\0", struct.Struct("<9sQBQQ")
INDEX_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
MAX_DOCUMENT_IDS = 2**28
NPY_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Whole documents of a token file, from id `start` on."""

    file: InputFile
    start: int
    ids: np.ndarray
    ends: np.ndarray  # End of each document in `ids`.

    def documents(self, fields: Fields, tokenizer: Tokenizer) -> Iterator[Document | UserError]:
        """Yield the documents without prefix and end-of-text token. The file may or may not contain these."""
        if (field := fields.messages or fields.prompt) is not None:
            yield UserError(f"{self.file}: a token file has no field {field!r}; remove the flag that names it")
            return
        known = np.array([value is not None for value in tokenizer.token_bytes])
        unknown = (self.ids < 0) | (self.ids >= len(known))
        unknown |= ~known[np.where(unknown, 0, self.ids)]
        prefix = list(tokenizer.prefix)
        for start, end in itertools.pairwise([0, *self.ends]):
            if unknown[start:end].any():
                at = start + int(unknown[start:end].argmax())
                yield UserError(
                    f"{self.file}: id {self.start + at} is {self.ids[at]}, which --tokenizer={tokenizer.name} does not "
                    f"have ({len(known):,} ids); choose the tokenizer of the file"
                )
                continue
            ids = self.ids[start:end].astype(np.uint32)
            ids = ids[:-1] if ids[-1] == tokenizer.eot_token else ids
            ids = ids[len(prefix) :] if ids[: len(prefix)].tolist() == prefix else ids
            text = tokenizer.decode(ids.tolist())
            name = fields.id and f"{self.file}: id {self.start + start}"
            yield Document(text, text.encode(errors="replace"), name, ids=ids)


def read_tokens(source: Source, fields: Fields, position: int) -> Iterator[Chunk]:
    """Read a token file from id `position` on, as a reader in `READERS`. Documents end after an end-of-text token."""
    file = source.files[0]
    try:
        with open_file(file) as stream:
            dtype, first, total, all_ends = _layout(source, stream)
            length = usual = max(1, source.unit_bytes // 4)
            while position < total:
                stop = min(position + length, total)
                stream.seek(first + position * dtype.itemsize)
                ids = np.frombuffer(stream.read((stop - position) * dtype.itemsize), dtype)
                named = slice(*np.searchsorted(all_ends, (position, stop), side="right"))
                ends = np.union1d(np.flatnonzero(ids == source.end_of_text) + 1, all_ends[named] - position)
                if not len(ends):
                    if length >= MAX_DOCUMENT_IDS:
                        why = f"no end-of-text token, {source.end_of_text}, in {length:,} ids; check --tokenizer"
                        raise UserError(f"{file}: the document at id {position} has {why}")
                    length = min(2 * length, MAX_DOCUMENT_IDS)
                    continue
                count, length = int(ends[-1]), usual
                yield Tokens(file, position, ids[:count], ends), position + count, count * dtype.itemsize
                position += count
            if not total:
                raise UserError(f"{file}: the file has no ids")
    except UserError as error:
        yield unreadable(file, str(error), source.size)


def _layout(source: Source, stream: BinaryIO) -> tuple[np.dtype, int, int, np.ndarray]:
    """Return dtype, first byte and number of a token file's ids, and the document ends from its index, if any."""
    file, index = source.files[0], source.files[1:]
    start, ends = 0, np.array([], np.int64)
    if Path(str(file)).suffix.lower() in records.OPENERS:
        raise UserError(f"{file}: token files are read by parts; decompress it")
    if source.kind == "npy":
        try:
            shape, _, dtype = NPY_HEADERS[np.lib.format.read_magic(stream)](stream)
        except (ValueError, KeyError) as error:
            reason = next(iter(str(error).splitlines()), "")
            raise UserError(f"{file}: not a file of numpy ({reason}); write it again with numpy.save") from error
        if len(shape) != 1 or dtype.kind not in "iu":
            raise UserError(f"{file}: an array of shape {shape} and dtype {dtype}; write one row of integers")
        start, count = stream.tell(), shape[0]
    elif index:
        dtype, ends = _read_index(index[0])
        count = int(ends[-1]) if len(ends) else 0
    elif source.bin_dtype is None:
        raise UserError(f"{file}: raw ids without an .idx file; set --bin_dtype=uint16 or --bin_dtype=uint32")
    else:
        dtype = np.dtype(source.bin_dtype).newbyteorder("<")
        count = source.size // dtype.itemsize
    if source.size != start + count * dtype.itemsize:
        expected = f"{start + count * dtype.itemsize:,} bytes for {count:,} ids of {dtype.name}"
        raise UserError(f"{file}: {source.size:,} bytes, not {expected}; copy the file again, or check its dtype")
    return dtype, start, count, np.union1d(ends, [count])


def _read_index(index: InputFile) -> tuple[np.dtype, np.ndarray]:
    """Return the dtype of the ids, and the end of each document, from an .idx file."""
    with open_file(index) as stream:
        data = stream.read()
    try:
        magic, version, code, sequences, documents = INDEX_HEADER.unpack_from(data)
        if magic != INDEX_MAGIC or version != 1:
            raise ValueError(f"magic {magic!r}, version {version}")
        dtype = np.dtype(INDEX_DTYPES[code])
        at = INDEX_HEADER.size
        lengths = np.frombuffer(data, "<i4", sequences, at)
        pointers = np.frombuffer(data, "<i8", sequences, at + lengths.nbytes)
        bounds = np.frombuffer(data, "<i8", documents, at + lengths.nbytes + pointers.nbytes)
        starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        if (lengths < 0).any() or not np.array_equal(pointers, starts[:-1] * dtype.itemsize):
            raise ValueError("its sequences do not follow each other")
        if not len(bounds) or (bounds[0], bounds[-1]) != (0, sequences) or (np.diff(bounds) < 0).any():
            raise ValueError("its documents do not cover the sequences")
    except (ValueError, KeyError, OverflowError, struct.error) as error:
        raise UserError(f"{index}: not a complete index of Megatron ({error}); copy or write it again") from error
    return dtype, starts[bounds[1:]]
