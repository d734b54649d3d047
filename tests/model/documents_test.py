"""Attention stays inside a document: in a packed row, one document's tokens change nothing in another's outputs."""

import jax
import numpy as np
import pytest
from flax import nnx

from difftx.data.packing import PackedRows
from difftx.data.store import TokenStore
from difftx.model.decoder import Decoder
from difftx.training.state import graph

BACKENDS = [("diff", "reference"), ("diff", "xla"), ("transformer", "reference"), ("transformer", "xla")]
BACKENDS += [pytest.param("diff", "pallas_tpu", marks=pytest.mark.interpreter)]
BACKENDS += [pytest.param("transformer", "splash", marks=pytest.mark.interpreter)]


@pytest.mark.parametrize(("architecture", "backend"), BACKENDS)
def test_a_document_changes_no_output_of_another(config, mesh_of, tmp_path, architecture, backend):
    c = config(architecture, model__attention_implementation=backend, data__document_mask="true")
    rng = np.random.default_rng(0)
    offsets = np.cumsum([0, *rng.integers(3, 15, 20)]).astype(np.uint64)
    store = TokenStore(rng.integers(0, 256, offsets[-1]).astype(np.uint16), offsets)
    rows = PackedRows(
        store,
        sequence_length=c.data.sequence_length,
        packing="best_fit",
        document_mask=True,
        cache_path=str(tmp_path),
    )
    batch = {name: np.stack([rows[i][name] for i in range(4)]) for name in rows[0]}
    ids_BT = batch["segment_ids"]
    assert ids_BT.max() >= 3
    with jax.set_mesh(mesh_of()):
        params = jax.jit(lambda: nnx.to_pure_dict(nnx.state(Decoder(c.model, rngs=nnx.Rngs(0)))))()
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
