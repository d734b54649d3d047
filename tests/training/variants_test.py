"""Every variant, whole: a train step cut over eight devices, its checkpoint on one, and decoding through the cache."""

import jax
import numpy as np
import pytest
from flax import nnx
from model.decoder_test import batch_on
from model.oracle import SIZES

from difftx.inference.cache import empty_cache, extend, write_chunk
from difftx.parallel.layout import INFERENCE
from difftx.training.checkpoint import Checkpointer
from difftx.training.state import graph, init_state, make_train_step

EIGHT = {"fsdp": 2, "context": 2, "tensor": 2}
FOUR_KV_HEADS = {"gda": {"model__num_heads": 12}}  # As many as devices that share heads; else SIZES has four heads.
ROWS, TOKENS, CHUNK = 2, 9, 5


def state_on(mesh, c):
    """A train state with random parameters, far from uniform. In numpy: compiling an initialisation takes long."""
    rng = np.random.default_rng(0)
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(lambda: init_state(c))

    def draw(path, leaf):
        names = jax.tree_util.keystr(path)
        value = np.zeros(leaf.shape) if "params" not in names else 0.3 * rng.normal(size=leaf.shape)
        value += "params" in names and "scale" in names
        spec = leaf.sharding.spec if leaf.sharding else jax.P()
        return jax.device_put(value.astype(leaf.dtype), jax.NamedSharding(mesh, spec))

    return jax.tree.map_with_path(draw, shapes)


def one_step(c, mesh):
    with jax.set_mesh(mesh):
        return jax.jit(make_train_step(c))(state_on(mesh, c), batch_on(mesh, c))


def hidden_both_ways(c, mesh, params):
    """Hidden states `[B, T, D]` of one pass, and through the cache: a chunk, then token by token."""
    tokens_BT = np.random.default_rng(1).integers(0, 257, (ROWS, TOKENS)).astype(np.int32)
    positions_BT = np.tile(np.arange(TOKENS, dtype=np.int32), (ROWS, 1))
    segment_BT = np.zeros_like(tokens_BT)
    segment_BT[1, 3:] = 1
    graphdef = graph(c, INFERENCE)

    @jax.jit
    def step(params, cache, start, *new):
        x_BTD, entries = extend(nnx.merge(graphdef, params), cache, *new)
        return x_BTD, write_chunk(cache, entries, new[2], start)

    @jax.jit
    def whole(params):
        model = nnx.merge(graphdef, params)
        x_BTD, _ = model.hidden(tokens_BT, positions_BT=positions_BT, segment_ids_BT=segment_BT)
        return x_BTD, empty_cache(model, ROWS, 16)

    with jax.set_mesh(mesh):
        expected, cache = whole(params)
        parts = []
        for start, end in [(0, CHUNK), *((i, i + 1) for i in range(CHUNK, TOKENS))]:
            new = (x[:, start:end] for x in (tokens_BT, positions_BT, segment_BT))
            x_BTD, cache = step(params, cache, np.int32(start), *new)
            parts.append(np.asarray(x_BTD))
    return np.concatenate(parts, axis=1), np.asarray(expected)


@pytest.mark.parametrize("name", [name for name in SIZES if name != "diff_fixed_lambda"])
def test_a_variant_is_trained_cut_saved_and_decoded(config, mesh_of, tmp_path, name):
    c = config(name, **SIZES[name] | {"model__num_kv_heads": None} | FOUR_KV_HEADS.get(name, {}))
    eight, one = mesh_of(**EIGHT), mesh_of()
    (state, metrics), (expected, metrics_one) = one_step(c, eight), one_step(c, one)
    assert float(metrics["loss"]) == pytest.approx(float(metrics_one["loss"]), rel=1e-5)
    assert float(metrics["grad_norm"]) == pytest.approx(float(metrics_one["grad_norm"]), rel=1e-4)

    def trained(path, moment, on_one):
        largest = np.abs(on_one).max()
        assert largest > 0, f"{jax.tree_util.keystr(path)} gets no gradient"
        np.testing.assert_allclose(moment, on_one, atol=1e-4 * largest)

    first_moments = lambda state: nnx.to_pure_dict(_adam(state.opt_state).mu)  # noqa: E731
    jax.tree.map_with_path(trained, first_moments(state), first_moments(expected))

    checkpointer = Checkpointer(tmp_path, c.checkpoint)
    checkpointer.save(state, {"examples": 0, "signature": {}}, c)
    checkpointer.close()
    with jax.set_mesh(one):
        restored, _ = Checkpointer(tmp_path).restore(1, jax.eval_shape(lambda: init_state(c)), one)
    jax.tree.map(np.testing.assert_array_equal, state, restored)

    actual, expected = hidden_both_ways(c, eight, state.params)
    np.testing.assert_allclose(actual, expected, atol=2e-5)


def _adam(opt_state):
    return next(s for s in jax.tree.leaves(opt_state, is_leaf=lambda s: hasattr(s, "mu")) if hasattr(s, "mu"))
