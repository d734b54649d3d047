"""Batches of the loader: their order, their shards per host, and resumption."""

import json

import grain
import jax
import numpy as np
import pytest
from helpers.data_loaders import loader_of
from hypothesis import given, settings
from hypothesis import strategies as st

from difftx.data.loader import HostBatches, ordered_batches
from difftx.data.mixture import Mixture
from difftx.data.packing import PackedRows
from difftx.data.store import TokenStore
from difftx.errors import UserError
from difftx.parallel.layout import Layout

LENGTH, ROWS = 8, 8
STORE = TokenStore(np.arange(50 * LENGTH + 3, dtype=np.uint16), np.array([0, 50 * LENGTH + 3], np.uint64))


def rows_of(store, packing="concat", document_mask=False):
    return PackedRows(store, sequence_length=LENGTH, packing=packing, document_mask=document_mask)


def examples_of(rows, seed=1):
    return grain.MapDataset.source(rows).shuffle(seed=seed).repeat()


def loader_on(mesh, rows=ROWS, signature=None):
    return loader_of(examples_of(rows_of(STORE)), mesh, rows=rows, signature=signature, vocab_size=2**31)


def take(loader, count):
    return [np.asarray(next(loader).tokens_BT) for _ in range(count)]


def test_epoch_has_every_row_once_and_targets_are_shifted_by_one(mesh_of):
    loader = loader_on(mesh_of(fsdp=8))
    batch = next(loader)
    np.testing.assert_array_equal(batch.targets_BT, np.asarray(batch.tokens_BT) + 1)
    assert np.asarray(batch.loss_mask_BT).all()
    assert batch.segment_ids_BT is batch.positions_BT is None
    assert batch.tokens_BT.sharding.spec == Layout().act_BT
    rows = np.concatenate([np.asarray(batch.tokens_BT), *take(loader, 12)])[:, 0] // LENGTH  # 2 × 50 rows and 4 more.
    assert sorted(rows[:50]) == list(range(50))
    assert sorted(rows[50:100]) == list(range(50))
    assert list(rows[:50]) != list(rows[50:100])  # Another order in each epoch.


@pytest.mark.parametrize("after", [0, 7])
def test_restored_loader_continues_exactly(mesh_of, after):
    mesh = mesh_of()
    whole = take(loader_on(mesh), 24)
    first = loader_on(mesh)
    take(first, after)
    second = loader_on(mesh)
    second.restore(json.loads(json.dumps(first.state())))
    for a, b in zip(take(second, 4), whole[after : after + 4], strict=True):
        np.testing.assert_array_equal(a, b)


def test_restored_loader_continues_with_another_batch_size(mesh_of):
    mesh = mesh_of()
    first = loader_on(mesh)
    take(first, 2)
    state = first.state()
    halves = loader_on(mesh, rows=ROWS // 2)
    halves.restore(state)
    np.testing.assert_array_equal(np.concatenate(take(halves, 2)), take(first, 1)[0])
    double = loader_on(mesh, rows=3 * ROWS)
    with pytest.raises(UserError, match="not a whole number of batches of 24 rows"):
        double.restore(state)


@pytest.fixture(scope="module")
def mixed():
    """Return a mixture of two sources of packed rows with document masks. Its weights change at block 1."""
    rng = np.random.default_rng(0)
    sources = []
    for source in range(2):
        offsets = np.cumsum([0, *rng.integers(1, 20, 60)]).astype(np.uint64)
        store = TokenStore((np.arange(offsets[-1]) + 10_000 * source).astype(np.uint32), offsets)
        rows = rows_of(store, ("concat", "best_fit")[source], document_mask=True)
        sources.append(examples_of(rows, seed=source))
    return Mixture(sources, [(0, (1.0, 2.0)), (1, (1.0, 0.0))], seed=5)


@settings(max_examples=15, deadline=None, database=None)
@given(
    stopped=st.integers(0, 40),
    before=st.sampled_from([1, 2, 4]),
    after=st.sampled_from([1, 2, 4]),
    scattered=st.booleans(),
)
def test_batches_and_resumption_do_not_depend_on_the_number_of_hosts(mixed, stopped, before, after, scattered):
    def hosts(count, next_batch):
        """Return the rows and an iterator of each host. Its rows are adjacent or, as in some meshes, scattered."""
        shares = [np.arange(h, ROWS, count) for h in range(count)] if scattered else np.split(np.arange(ROWS), count)
        iterators = [HostBatches(mixed, ROWS, share).iterator(2) for share in shares]
        for iterator in iterators:
            iterator.set_state({"next_index": next_batch})
        return shares, iterators

    def global_batch(shares, iterators):
        parts = [next(iterator) for iterator in iterators]
        order = np.argsort(np.concatenate(shares))
        return {name: np.concatenate([part[name] for part in parts])[order] for name in parts[0]}

    first = hosts(before, max(0, stopped - 2))
    batches = [global_batch(*first) for _ in range(min(stopped, 2))]
    second = hosts(after, stopped)
    batches += [global_batch(*second) for _ in range(2)]
    for number, batch in enumerate(batches, start=stopped - min(stopped, 2)):
        for row in range(ROWS):
            expected = mixed[number * ROWS + row]
            assert set(batch) == {"tokens", "targets", "loss_mask", "segment_ids", "positions"}
            for name, array in expected.items():
                np.testing.assert_array_equal(batch[name][row], array)


def test_segments_and_positions_reach_the_batch(mesh_of, mixed):
    batch = next(loader_of(mixed, mesh_of(fsdp=4), rows=ROWS, vocab_size=2**31))
    for row in range(ROWS):
        for name, array in mixed[row].items():
            np.testing.assert_array_equal(np.asarray(getattr(batch, f"{name}_BT"))[row], array)


def test_ordered_batches_mask_their_filler(mesh_of):
    sharding = jax.NamedSharding(mesh_of(), Layout().act_BT)
    options = {"batch_rows": ROWS, "sharding": sharding, "vocab_size": 2**31}
    batches = list(ordered_batches(rows_of(STORE), limit_tokens=10**9, **options))
    mask = np.concatenate([np.asarray(b.loss_mask_BT) for b in batches])
    targets = np.concatenate([np.asarray(b.targets_BT) for b in batches])
    assert len(batches) == 7
    np.testing.assert_array_equal(targets[mask > 0], np.arange(1, 50 * LENGTH + 1))
    np.testing.assert_array_equal(np.concatenate([np.asarray(b.is_real_BT) for b in batches]), mask > 0)
    assert len(list(ordered_batches(rows_of(STORE), limit_tokens=ROWS * LENGTH, **options))) == 1


def test_batches_of_one_row():
    """Endless examples have the length sys.maxsize, which could overflow when grain counts batches of one row."""
    rows = grain.MapDataset.source(list(range(10))).map(lambda i: {"tokens": np.array([i])}).repeat()
    batches = HostBatches(rows, 1, np.array([0])).iterator(2)
    assert [next(batches)["tokens"].tolist() for _ in range(11)] == [[[i % 10]] for i in range(11)]
