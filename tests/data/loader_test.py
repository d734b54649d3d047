import jax
import numpy as np
import pytest

from difftx.data.loader import HostSlice, Loader, Rows, ordered_batches
from difftx.data.store import TokenStore
from difftx.errors import UserError
from difftx.parallel.layout import Layout

LENGTH, ROWS = 8, 8
STORE = TokenStore(np.arange(50 * LENGTH + 3, dtype=np.uint16), np.array([0, 50 * LENGTH + 3], np.uint64))


def loader_on(mesh, seed=1, rows=ROWS, signature=None):
    return Loader(
        STORE,
        sequence_length=LENGTH,
        rows=rows,
        seed=seed,
        prefetch_batches=2,
        sharding=jax.NamedSharding(mesh, Layout().act_BT),
        signature=signature or {"corpus": "c", "tokenizer": "t"},
    )


def take(loader, count):
    return [np.asarray(next(loader).tokens_BT) for _ in range(count)]


def test_an_epoch_has_every_row_once_and_targets_are_one_later(mesh_of):
    loader = loader_on(mesh_of(fsdp=8))
    batch = next(loader)
    np.testing.assert_array_equal(batch.targets_BT, np.asarray(batch.tokens_BT) + 1)
    assert np.asarray(batch.loss_mask_BT).all()
    assert batch.tokens_BT.sharding.spec == Layout().act_BT
    rows = np.concatenate([np.asarray(batch.tokens_BT), *take(loader, 12)])[:, 0] // LENGTH  # 104 of 2 × 50 rows.
    assert sorted(rows[:50]) == list(range(50))
    assert sorted(rows[50:100]) == list(range(50))
    assert list(rows[:50]) != list(rows[50:100])  # Another order in each epoch.


@pytest.mark.parametrize("after", [0, 1, 5, 7, 20])
def test_state_continues_exactly(mesh_of, after):
    mesh = mesh_of()
    whole = take(loader_on(mesh), 24)
    first = loader_on(mesh)
    take(first, after)
    second = loader_on(mesh)
    second.restore(first.state())
    for a, b in zip(take(second, 4), whole[after : after + 4], strict=True):
        np.testing.assert_array_equal(a, b)


def test_state_continues_with_another_batch_size(mesh_of):
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


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_slices_of_hosts_concatenate_to_the_same_batches(processes):
    import grain

    examples = grain.MapDataset.source(Rows(STORE, LENGTH)).shuffle(seed=1).repeat()
    slices = [HostSlice(examples, ROWS, p, processes) for p in range(processes)]
    here = ROWS // processes
    for batch in (0, 3, 9):
        joined = np.concatenate([[s[batch * here + i] for i in range(here)] for s in slices])
        np.testing.assert_array_equal(joined, [examples[batch * ROWS + i] for i in range(ROWS)])


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"seed": 2}, "seed"), ({"signature": {"corpus": "x", "tokenizer": "t"}}, "corpus")],
)
def test_a_state_of_other_data_is_refused(mesh_of, changes, named):
    mesh = mesh_of()
    with pytest.raises(UserError, match=f"made with {named} = "):
        loader_on(mesh, **changes).restore(loader_on(mesh).state())


def test_ordered_batches_mask_their_filler(mesh_of):
    sharding = jax.NamedSharding(mesh_of(), Layout().act_BT)
    options = {"sequence_length": LENGTH, "rows": ROWS, "sharding": sharding}
    batches = list(ordered_batches(STORE, limit_tokens=10**9, **options))
    mask = np.concatenate([np.asarray(b.loss_mask_BT) for b in batches])
    targets = np.concatenate([np.asarray(b.targets_BT) for b in batches])
    assert len(batches) == 7
    np.testing.assert_array_equal(targets[mask > 0], np.arange(1, 50 * LENGTH + 1))
    assert len(list(ordered_batches(STORE, limit_tokens=ROWS * LENGTH, **options))) == 1
