"""Attention within documents: in a packed row, a document's tokens do not change the outputs of other documents."""

import jax
import numpy as np
import pytest
from flax import nnx
from helpers.cases import marked
from helpers.model_layers import parameters_of

from difftx.data.loader import make_batch
from difftx.data.packing import PackedRows
from difftx.data.store import TokenStore
from difftx.parallel.layout import Layout
from difftx.training.loss import batch_loss
from difftx.training.state import graph


def packed_rows(c):
    rng = np.random.default_rng(0)
    offsets = np.cumsum([0, *rng.integers(3, 15, 40)]).astype(np.uint64)
    store = TokenStore(rng.integers(0, 256, offsets[-1]).astype(np.uint16), offsets)
    return PackedRows(store, sequence_length=c.data.sequence_length, packing="best_fit", document_mask=True)


BACKENDS = [("diff", "xla"), ("transformer", "xla"), ("diff", "pallas_tpu"), ("transformer", "splash")]


@pytest.mark.parametrize(("architecture", "backend"), marked(BACKENDS, fast=BACKENDS[:1]))
def test_a_document_changes_no_output_of_another(config, mesh_of, tmp_path, architecture, backend):
    c = config(architecture, model__attention_implementation=backend, data__document_mask="true")
    rows = packed_rows(c)
    batch = {name: np.stack([rows[i][name] for i in range(4)]) for name in rows[0]}
    ids_BT = batch["segment_ids"]
    assert ids_BT.max() >= 3
    with jax.set_mesh(mesh_of()):
        params = parameters_of(c)
        graphdef = graph(c)

        @jax.jit
        def logits(tokens_BT):
            model = nnx.merge(graphdef, params)
            return model(tokens_BT, positions_BT=batch["positions"], segment_ids_BT=ids_BT)[0]

        before = np.asarray(logits(batch["tokens"]))
        for document in range(ids_BT.max() + 1):  # 0: padding.
            changed_BT = ids_BT == document
            after = np.asarray(logits(np.where(changed_BT, 255 - batch["tokens"], batch["tokens"])))
            np.testing.assert_array_equal(after[~changed_BT], before[~changed_BT])
            assert (after[changed_BT] != before[changed_BT]).any(axis=-1).all() == changed_BT.any()


@pytest.mark.long
def test_a_packed_batch_has_the_same_gradient_with_rows_sharded_over_devices(config, mesh_of, tmp_path):
    c = config(data__document_mask="true")
    rows = packed_rows(c)
    host_batch = {name: np.stack([rows[i][name] for i in range(2)]) for name in rows[0]}
    results = []
    for sizes in ({}, {"context": 2}):
        mesh = mesh_of(**sizes)
        batch = make_batch(host_batch, 2, jax.NamedSharding(mesh, Layout().act_BT))
        with jax.set_mesh(mesh):
            graphdef = graph(c)
            loss_of = lambda p, b: batch_loss(nnx.merge(graphdef, p), b)[0]  # noqa: E731, B023
            loss, grads = jax.jit(jax.value_and_grad(loss_of))(parameters_of(c), batch)
        results.append((float(loss), float(np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(grads))))))
    (one_loss, one_norm), (loss, norm) = results
    assert loss == pytest.approx(one_loss, rel=1e-5)
    assert norm == pytest.approx(one_norm, rel=1e-5)
