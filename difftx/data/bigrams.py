"""Exact counts of token bigrams within documents.

Counts are merged in memory, one chunk of tokens after another. This takes about 50 bytes per distinct bigram, plus 1.5
GB for a chunk.

`write_bigrams` writes a JSON line (the header), all bigrams in ascending order, and their counts. Both arrays are
little-endian uint64, so they can be memory-mapped. The header has the SHA-256 of both arrays and of itself, so it
identifies the whole file.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from difftx.data.store import TokenStore
from difftx.errors import UserError, read_error
from difftx.files import new_file, open_file
from difftx.json_files import parse_record, with_sha256
from difftx.progress import Work

FORMAT = "difftx bigrams 1"
CHUNK_TOKENS = 2**25


@dataclasses.dataclass(frozen=True)
class BigramCounts:
    """The counts of all bigrams that occur at least `min_count` times."""

    bigrams: np.ndarray  # Encoded by `as_bigrams`, ascending, uint64.
    counts: np.ndarray  # Number of occurrences of each bigram, uint64.
    min_count: int
    description: dict[str, Any]  # JSON object that describes the counted text.

    def of(self, bigrams: np.ndarray) -> np.ndarray:
        """Return the count of each given bigram, or 0 if the bigram is not listed."""
        if not len(self.bigrams):
            return np.zeros(len(bigrams), np.uint64)
        indices = np.minimum(np.searchsorted(self.bigrams, bigrams), len(self.bigrams) - 1)
        return np.where(self.bigrams[indices] == bigrams, self.counts[indices], np.uint64(0))


def as_bigrams(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Encode pairs of token ids as uint64: `first × 2**32 + second`."""
    return first.astype(np.uint64) << np.uint64(32) | second.astype(np.uint64)


def count_bigrams(stores: Sequence[TokenStore], advance: Callable[[int], None] = lambda tokens: None) -> BigramCounts:
    """Count the bigrams of all stores together. After each chunk, call `advance` with its number of tokens."""
    bigrams, counts = np.zeros((2, 0), np.uint64)
    for store in stores:
        for start in range(0, len(store), CHUNK_TOKENS):
            stop = min(start + CHUNK_TOKENS, len(store))
            found, times = np.unique(_bigrams_of(store, start, stop), return_counts=True)
            bigrams, counts = np.concatenate([bigrams, found]), np.concatenate([counts, times.astype(np.uint64)])
            order = np.argsort(bigrams, kind="stable")  # Takes linear time: both parts are sorted.
            bigrams, counts = bigrams[order], counts[order]
            firsts = np.flatnonzero(np.diff(bigrams, prepend=~bigrams[:1]))
            bigrams, counts = bigrams[firsts], np.add.reduceat(counts, firsts)
            advance(stop - start)
    description = {"counted": "the training text, in memory", "tokens": sum(map(len, stores))}
    return BigramCounts(bigrams, counts, 1, description)


def write_bigrams(
    stores: Sequence[TokenStore], path: Path, *, min_count: int, description: dict[str, Any], work: Work
) -> dict[str, Any]:
    """Count the bigrams of all stores together, write the counts to a file atomically, and return the file's header.

    Leave out bigrams that occur less than `min_count` times. Add the entries of `description` to the header.
    """
    tokens = sum(map(len, stores))
    with work.task("counting", tokens) as advance:
        found = count_bigrams(stores, advance)
    kept = found.counts >= min_count
    arrays = [found.bigrams[kept].astype("<u8"), found.counts[kept].astype("<u8")]
    header = {
        "format": FORMAT,
        **description,
        "tokens": tokens,
        "occurrences": int(found.counts.sum()),
        "min_count": min_count,
        "bigrams": len(arrays[0]),
        "arrays_sha256": [hashlib.sha256(array).hexdigest() for array in arrays],
    }
    with new_file(path) as file:
        line = json.dumps(with_sha256(header)).encode()
        file.write(line + b" " * (-(len(line) + 1) % 64) + b"\n")  # Align the arrays that follow to 64 bytes.
        file.writelines(array.data for array in arrays)
    return header


def read_bigrams(path: Path, vocabulary_sha256: str, *, field: str) -> BigramCounts:
    """Memory-map a file that `write_bigrams` wrote. Errors name it as the value of the config field `field`."""
    where = f"{field}={str(path)!r}"
    try:
        with open_file(path) as file:
            line = file.readline(2**20)
    except OSError as error:
        raise read_error(error, f"{where}: cannot be read ({error.strerror})") from error
    header = parse_record(line)
    if header is None or header.get("format") != FORMAT:
        raise UserError(f"{where}: not an intact file of bigrams; count them with `difftx data bigrams`")
    found, expected = path.stat(), len(line) + 16 * header["bigrams"]
    arrays = (path, len(line), found.st_size, found.st_mtime_ns)
    if found.st_size != expected or _sha256_of_arrays(*arrays) != header["arrays_sha256"]:
        raise UserError(f"{where}: the counts are corrupt; count the bigrams again")
    if (counted_with := header["tokenizer"]["vocabulary_sha256"]) != vocabulary_sha256:
        raise UserError(
            f"{where}: counted with tokenizer {header['tokenizer']['name']!r} (vocabulary {counted_with[:12]}), "
            f"not this run's (vocabulary {vocabulary_sha256[:12]}); count the bigrams of the run's own store"
        )
    bigrams, counts = np.split(_mapped(path, offset=len(line)), 2)
    description = {"counted": str(path), "stores": header["stores"], "tokens": header["tokens"]}
    return BigramCounts(bigrams, counts, header["min_count"], description)


def _bigrams_of(store: TokenStore, start: int, stop: int) -> np.ndarray:
    """Return the bigrams that begin at tokens `start` to `stop - 1`, except those that span two documents."""
    tokens = store.slice(start, min(stop + 1, len(store)))
    bigrams = as_bigrams(tokens[:-1], tokens[1:])
    offsets = store.offsets.view(np.int64)
    first, last = np.searchsorted(offsets, [start + 1, start + len(tokens)])
    inside = np.ones(len(bigrams), bool)
    inside[offsets[first:last] - start - 1] = False  # The second token begins a document.
    return bigrams[inside]


@functools.lru_cache(maxsize=1)  # Training and the suite `quantize` open the file many times, and it may be large.
def _sha256_of_arrays(path: Path, offset: int, size: int, mtime_ns: int) -> list[str]:
    """Return the SHA-256 of each array. `size` and `mtime_ns` are cache keys that change with the file."""
    return [hashlib.sha256(array).hexdigest() for array in np.split(_mapped(path, offset), 2)]


def _mapped(path: Path, offset: int = 0) -> np.ndarray:
    if path.stat().st_size == offset:  # An empty array cannot be memory-mapped.
        return np.zeros(0, np.uint64)
    return np.memmap(path, "<u8", mode="r", offset=offset).view(np.ndarray)
