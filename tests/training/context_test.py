"""The loss and its gradients with rows sharded along `context` and gathered keys equal those of one device."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx
from helpers.model_layers import OPTIONS

from difftx.data.loader import Batch
from difftx.errors import UserError
from difftx.parallel.layout import Layout
from difftx.parallel.mesh import make_mesh
from difftx.training.fit import fit
from difftx.training.loss import batch_loss
from difftx.training.state import graph, init_state

ROWS, LENGTH, VOCABULARY = 2, 64, 264


def host_batch(packed):
    """Return a batch of random tokens.

    If `packed`, the rows have documents of many lengths, some of which cross boundaries of shards, and the first row
    ends in padding.
    """
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCABULARY, (ROWS, LENGTH + 1), dtype=np.int32)
    mask = np.ones((ROWS, LENGTH), np.float32)
    if not packed:
        return Batch(tokens_BT=tokens[:, :-1], targets_BT=tokens[:, 1:], loss_mask_BT=mask)
    lengths = [[5, 27, 1, 12, 9, 10], [40, 3, 21]]  # The padding of the first row belongs to no document.
    ids, positions = np.zeros((ROWS, LENGTH), np.int32), np.zeros((ROWS, LENGTH), np.int32)
    ids[0, 54:], positions[0, 54:], mask[0, 54:] = 0, np.arange(10), 0
    for row, of_row in enumerate(lengths):
        start = 0
        for number, length in enumerate(of_row[: 5 if row == 0 else None], 1):
            piece = slice(start, start + length)
            ids[row, piece], positions[row, piece], mask[row, start + length - 1] = number, np.arange(length), 0
            start += length
    places = {"segment_ids_BT": ids, "positions_BT": positions}
    return Batch(tokens_BT=tokens[:, :-1], targets_BT=tokens[:, 1:], loss_mask_BT=mask, **places)


def loss_and_gradients(c, mesh, packed):
    with jax.set_mesh(mesh):
        params, graphdef = jax.jit(lambda: init_state(c).params)(), graph(c)
        batch = jax.device_put(host_batch(packed), jax.NamedSharding(mesh, Layout().act_BT))

        def loss(params, batch):
            return batch_loss(nnx.merge(graphdef, params), batch)[0]

        return jax.device_get(jax.jit(jax.value_and_grad(loss))(params, batch))


@functools.cache
def on_one_device(c, packed):
    return loss_and_gradients(c, make_mesh(c.mesh, jax.devices()[:1]), packed)


LONG = {("diff", 2, "gather", False), ("diff_v2", 4, "zigzag", True)}
CASES = [
    pytest.param(
        *case,
        marks=pytest.mark.long if case in LONG else pytest.mark.exhaustive,
        id=f"{case[0]}-{case[1]}-{case[2]}-{'packed' if case[3] else 'whole'}",
    )
    for architecture in ("diff", "transformer", "diff_v2")
    for devices in (2, 4, 8)
    for method in ("gather", "zigzag")
    for packed in (False, True)
    for case in [(architecture, devices, method, packed)]
]


@pytest.mark.parametrize(
    ("architecture", "devices", "method", "packed", "options"),
    [
        *(pytest.param(*case.values, {}, marks=case.marks, id=case.id) for case in CASES),
        pytest.param("diff", 4, "zigzag", True, OPTIONS, marks=pytest.mark.long, id="options"),
        pytest.param("transformer", 2, "gather", True, OPTIONS, marks=pytest.mark.long, id="options of a Transformer"),
    ],
)
def test_loss_and_gradients_equal_those_of_one_device(config, mesh_of, architecture, devices, method, packed, options):
    fields = {"data__sequence_length": LENGTH, "train__global_batch_tokens": ROWS * LENGTH, "model__num_heads": 2}
    if architecture != "diff":
        fields["model__num_heads"] = 2 if architecture == "diff_v2" else 4
    fields |= options
    expected = on_one_device(config(architecture, **fields), packed)
    c = config(architecture, **fields, mesh__context_method=method)
    mesh = mesh_of(context=devices, **{2: {"data": 2}, 4: {"tensor": 2}, 8: {}}[devices])
    fit(c, mesh)
    found = loss_and_gradients(c, mesh, packed)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for (path, actual), wanted in zip(jax.tree.leaves_with_path(found[1]), jax.tree.leaves(expected[1]), strict=True):
        largest = np.abs(wanted).max()
        np.testing.assert_allclose(actual, wanted, atol=1e-5 * largest, rtol=0, err_msg=jax.tree_util.keystr(path))
        assert largest > 0


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_batch_that_the_mesh_does_not_divide_can_have_the_size_in_the_error(config, mesh_of, accumulation):
    mesh, fields = mesh_of(data=3), {"train__accumulation": accumulation}  # A batch has 8 rows of 32 tokens.
    with pytest.raises(UserError) as error:
        fit(config(**fields), mesh)
    assert str(error.value).startswith(f"train.global_batch_tokens=256: {8 // accumulation} rows per microbatch ")
    advised = str(error.value).rpartition(" ")[2]
    fit(config(**fields, train__global_batch_tokens=advised), mesh)


def test_error_names_the_field_that_does_not_divide(config, mesh_of):
    c = config(data__sequence_length=72, mesh__context_method="zigzag", train__global_batch_tokens=72)
    with pytest.raises(
        UserError, match=r"data.sequence_length: 72 cannot be split into 2 × mesh.context .* = 16 shards"
    ):
        fit(c, mesh_of(context=8))
    c = config(mesh__context_method="heads")
    with pytest.raises(UserError, match=r"model.num_heads: 2 .*mesh.context = 8 .*or mesh.context_method='zigzag'"):
        fit(c, mesh_of(context=8))
