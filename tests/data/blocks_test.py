"""Reads of blocks from a function in place of a bucket. `tests/storage/data_test.py` has buckets."""

import random
from pathlib import Path

import pytest

from difftx.data.blocks import BLOCK_BYTES, BlockCache, BlockHasher, CachedObject
from difftx.errors import UserError
from difftx.storage import objects


@pytest.mark.parametrize("wrong_reads", [0, 1, 2, 3, 4])
def test_each_of_four_reads_may_be_the_right_one(tmp_path, monkeypatch, wrong_reads):
    content = random.Random(0).randbytes(3 * BLOCK_BYTES + 100)
    hasher, reads = BlockHasher(), []
    for start in range(0, len(content), 20_000):  # The parts end within blocks.
        hasher.update(content[start : start + 20_000])

    def read_ranges(_, ranges):
        ranges = list(ranges)
        reads.append(ranges)
        for start, stop in ranges:
            stored = content[start:stop]
            yield objects.Stored(stored[:-1] if len(reads) <= wrong_reads else stored, b"1")

    monkeypatch.setattr(objects, "read_ranges", read_ranges)
    monkeypatch.setattr(objects, "REREAD_SECONDS", (0.0,) * 3)
    cache = BlockCache(tmp_path, 8 * BLOCK_BYTES)
    stored = CachedObject(Path("name"), len(content), hasher.hashes(), cache=cache, slot=5)
    if wrong_reads == 4:
        with pytest.raises(UserError, match="name: changed since the store was opened, or corrupt: bytes from 49152"):
            stored.read(10, len(content))
    else:
        assert bytes(stored.read(10, len(content))) == content[10:]
        assert len(reads) == wrong_reads + 1
        assert bytes(stored.read(20_000, 40_000)) == content[20_000:40_000]
    assert len(reads) == min(wrong_reads + 1, 4)  # A second read takes the blocks from the cache.
