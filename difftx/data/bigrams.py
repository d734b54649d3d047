"""Exact counts of token bigrams within documents, for stores of any size, in bounded memory.

`write_bigrams` counts one chunk of tokens after another, writes each chunk's sorted counts to a temporary file, and
merges them. Its output has a line of JSON (the header), all bigrams in ascending order, and their counts. Both arrays
are little-endian uint64, so that they can be memory-mapped. The header has their SHA-256 and its own, so it identifies
the whole file.
"""

import dataclasses
import functools
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from difftx.data.store import TokenStore
from difftx.errors import UserError, read_error
from difftx.files import new_file, open_file, sha256_of
from difftx.json_files import parse_record, with_sha256
from difftx.progress import Work

FORMAT = "difftx bigrams 1"
BYTES_PER_ITEM = 64  # Memory to count one token or to merge one count, including all temporary copies.


@dataclasses.dataclass(frozen=True)
class BigramCounts:
    """The number of occurrences of each bigram that occurs at least `min_count` times."""

    bigrams: np.ndarray  # The bigrams in ascending order, encoded by `as_bigrams` as uint64.
    counts: np.ndarray  # Number of occurrences of each bigram, uint64.
    min_count: int
    description: dict[str, Any]  # JSON object that says which text was counted.

    def of(self, bigrams: np.ndarray) -> np.ndarray:
        """Return the count of each given bigram, or 0 if there is no count for it."""
        if not len(self.bigrams):
            return np.zeros(len(bigrams), np.uint64)
        indices = np.minimum(np.searchsorted(self.bigrams, bigrams), len(self.bigrams) - 1)
        return np.where(self.bigrams[indices] == bigrams, self.counts[indices], np.uint64(0))


def as_bigrams(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Encode pairs of token ids as uint64: `first × 2**32 + second`."""
    return first.astype(np.uint64) << np.uint64(32) | second.astype(np.uint64)


def count_bigrams(stores: Sequence[TokenStore]) -> BigramCounts:
    """Count the bigrams of all stores together, without temporary files."""
    found = np.concatenate([_bigrams_of(store, 0, len(store)) for store in stores])
    bigrams, counts = np.unique(found, return_counts=True)
    description = {"counted": "the training text, in memory", "tokens": sum(map(len, stores))}
    return BigramCounts(bigrams, counts.astype(np.uint64), 1, description)


def write_bigrams(
    stores: Sequence[TokenStore],
    path: Path,
    *,
    min_count: int,
    memory_bytes: int,
    description: dict[str, Any],
    work: Work,
) -> dict[str, Any]:
    """Count the bigrams of all stores together, write the counts to a file atomically, and return the file's header.

    Bigrams that occur less than `min_count` times are left out. The limit on memory does not cover the document offsets
    of the stores. The entries of `description` are added to the header.
    """
    # The temporary files take up to 32 bytes per distinct bigram of each chunk.
    items = max(1, memory_bytes // BYTES_PER_ITEM)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as scratch:
        runs, *merged = (Path(scratch) / name for name in ("runs", "bigrams", "counts"))
        bounds = _write_runs(stores, runs, items, work)
        distinct = occurrences = 0
        merging = work.task("merging", int(bounds[-1]))
        with merged[0].open("wb") as bigrams_file, merged[1].open("wb") as counts_file, merging as advance:
            for read, bigrams, counts in _merge(_mapped(runs).reshape(-1, 2), bounds, items):
                kept = counts >= min_count
                bigrams[kept].tofile(bigrams_file)
                counts[kept].tofile(counts_file)
                distinct += int(kept.sum())
                occurrences += int(counts.sum())
                advance(read)
        header = {
            "format": FORMAT,
            **description,
            "tokens": sum(map(len, stores)),
            "occurrences": occurrences,
            "min_count": min_count,
            "bigrams": distinct,
            "arrays_sha256": list(map(sha256_of, merged)),
        }
        with new_file(path) as file:
            line = json.dumps(with_sha256(header)).encode()
            file.write(line + b" " * (-(len(line) + 1) % 64) + b"\n")  # Aligns the arrays that follow to 64 bytes.
            for name in merged:
                with name.open("rb") as part:
                    shutil.copyfileobj(part, file)
    return header


def read_bigrams(path: Path, vocabulary_sha256: str, *, field: str) -> BigramCounts:
    """Memory-map a file of `write_bigrams`. Error messages name it as the value of the config field `field`."""
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
    if found.st_size != expected:
        raise UserError(f"{where}: {found.st_size} bytes, its header says {expected}; count the bigrams again")
    if _sha256_of_arrays(path, len(line), found.st_size, found.st_mtime_ns) != header["arrays_sha256"]:
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
    """Return the bigrams that begin at tokens `start` to `stop - 1`, without those that span two documents."""
    tokens = store.slice(start, min(stop + 1, len(store)))
    bigrams = as_bigrams(tokens[:-1], tokens[1:])
    offsets = store.offsets.view(np.int64)
    first, last = np.searchsorted(offsets, [start + 1, start + len(tokens)])
    inside = np.ones(len(bigrams), bool)
    inside[offsets[first:last] - start - 1] = False  # The second token of these bigrams is the first of a document.
    return bigrams[inside]


def _write_runs(stores: Sequence[TokenStore], path: Path, items: int, work: Work) -> np.ndarray:
    """Write the sorted pairs (bigram, count) of each chunk of `items` tokens. Return where each chunk's pairs begin."""
    lengths = [0]
    with path.open("wb") as file, work.task("counting", sum(map(len, stores))) as advance:
        for store in stores:
            for start in range(0, len(store), items):
                stop = min(start + items, len(store))
                bigrams, counts = np.unique(_bigrams_of(store, start, stop), return_counts=True)
                np.stack([bigrams, counts.astype(np.uint64)], axis=1).tofile(file)
                lengths.append(len(bigrams))
                advance(stop - start)
    return np.cumsum(lengths)


def _merge(runs: np.ndarray, bounds: np.ndarray, items: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Merge the pairs of all chunks (runs). Yield the number of pairs read, their bigrams, and the total counts.

    A step looks at the next part of each run, `items` pairs in all. It merges all pairs up to the smallest bigram that
    ends a part. These totals are final, because all pairs that are not read yet have larger bigrams.
    """
    starts, ends = bounds[:-1].copy(), bounds[1:]
    share = max(1, items // max(1, len(ends)))
    while len(unfinished := np.flatnonzero(starts < ends)):
        stops = np.minimum(starts[unfinished] + share, ends[unfinished])
        last = runs[stops - 1, 0].min()
        parts = [
            runs[start : start + np.searchsorted(runs[start:stop, 0], last, side="right")]
            for start, stop in zip(starts[unfinished], stops, strict=True)
        ]
        starts[unfinished] += [len(part) for part in parts]
        entries = np.concatenate(parts)
        entries = entries[np.argsort(entries[:, 0], kind="stable")]
        firsts = np.flatnonzero(np.concatenate([[True], entries[1:, 0] != entries[:-1, 0]]))
        yield len(entries), entries[firsts, 0], np.add.reduceat(entries[:, 1], firsts)


@functools.lru_cache(maxsize=1)  # Training and suite `quantize` read the file many times, and it may be large.
def _sha256_of_arrays(path: Path, offset: int, size: int, mtime_ns: int) -> list[str]:
    """Return the SHA-256 of both arrays. The last two arguments tell versions of the file apart."""
    return [hashlib.sha256(array).hexdigest() for array in np.split(_mapped(path, offset), 2)]


def _mapped(path: Path, offset: int = 0) -> np.ndarray:
    if path.stat().st_size == offset:  # An empty array cannot be memory-mapped.
        return np.zeros(0, np.uint64)
    return np.memmap(path, "<u8", mode="r", offset=offset).view(np.ndarray)
