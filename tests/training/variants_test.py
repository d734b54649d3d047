"""Integration test of each variant: a step sharded over eight devices, its checkpoint on one, and cached decoding."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.cases import PAPER
from helpers.model_layers import OPTIONS, batch_on
from jax.sharding import reshard
from model.oracle import SIZES

from difftx.inference.cache import ROWS as CACHE_ROWS
from difftx.inference.cache import Entries, empty_cache, write_chunk
from difftx.kernels.cached import EMPTY, SegmentMask
from difftx.model.abstract import parameter_metadata
from difftx.parallel.layout import Layout
from difftx.training.checkpoint.checkpointer import Checkpointer
from difftx.training.checkpoint.restoring import restore_state
from difftx.training.loss import batch_loss
from difftx.training.state import graph, init_state, make_train_step

pytestmark = pytest.mark.long

EIGHT = {"fsdp": 2, "context": 2, "tensor": 2}
FOUR_KV_HEADS = {"model__num_heads": 12}  # Four devices share the KV heads. By SIZES, other variants have four too.
# The output of a token that sees only itself is tanh(z) v. Its head norm hardly depends on z, so the float32 gradient
# of a small z is ill-conditioned. A large epsilon reduces the errors from 1e-4 to 1e-5.
LARGE_HEAD_NORM_EPS = {"model__head_norm_eps": 1.0}
OF_VARIANT = {"gda": FOUR_KV_HEADS, "motif": FOUR_KV_HEADS, "signed_mask": LARGE_HEAD_NORM_EPS}
ROWS, TOKENS = 2, 7


def state_on(mesh, c):
    """Return a train state with large random parameters. Numpy draws them, because compiling `init_state` is slow."""
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


def hidden_both_ways(model, tokens_BT, positions_BT, segment_BT):
    """Return the hidden states `[B, T, D]` of one pass, and of a chunk and then two single tokens with the cache."""
    cache, parts = empty_cache(model, ROWS, 16), []
    for start, end in [(0, TOKENS - 2), (TOKENS - 2, TOKENS - 1), (TOKENS - 1, TOKENS)]:
        new = [reshard(jnp.asarray(x[:, start:end]), CACHE_ROWS) for x in (tokens_BT, positions_BT, segment_BT)]
        cached_BS = np.where(np.arange(16) < start, np.pad(segment_BT, [(0, 0), (0, 16 - TOKENS)]), EMPTY)
        segments = SegmentMask(new[2], jnp.zeros_like(new[2]), new[1], reshard(jnp.asarray(cached_BS), CACHE_ROWS))
        x_BTD, entries = model.extend(new[0], positions_BT=new[1], cache=cache, segments=segments)
        cache = write_chunk(cache, Entries(*entries, new[1]), jnp.int32(start), model.config.cache)
        parts.append(x_BTD)
    whole_BTD, _ = model.hidden(tokens_BT, positions_BT=positions_BT, segment_ids_BT=segment_BT)
    return whole_BTD, jnp.concatenate(parts, axis=1)


# The norm of a query of width 2, as gda would have, divides by a small number too often for float32 gradients.
ALL_OPTIONS = OPTIONS | {"train__z_loss": 0.01, "model__head_dim": 8}
# The first two have the code of their subclasses, sink and gdla.
VARIANTS = [name for name in SIZES if name not in ("off_by_one", "diff_v2", "diff_fixed_lambda")]


@pytest.mark.parametrize(
    ("name", "options"),
    # One variant without options stands for all, because the cases with options run all code of those without.
    [("diff_v2", {}), *((name, ALL_OPTIONS) for name in (*PAPER, *VARIANTS))],
)
def test_variant_trains_sharded_saves_and_decodes(config, mesh_of, tmp_path, name, options):
    # Without clipping, Adam's first moment is a multiple of the gradient.
    sizes = SIZES.get(name, {"model__num_heads": 4}) | {"model__num_kv_heads": None, "optimizer__clip_norm": None}
    c = config(name, **sizes | OF_VARIANT.get(name, {}) | options)
    eight, one = mesh_of(**EIGHT), mesh_of()
    with jax.set_mesh(eight):
        state, metrics = jax.jit(make_train_step(c))(state_on(eight, c), batch_on(eight, c))

    checkpointer = Checkpointer(tmp_path, c.checkpoint)
    checkpointer.save(state, {"examples": 0, "signature": {}}, c)
    checkpointer.close()
    with jax.set_mesh(one):
        restored = restore_state(checkpointer.read(1), jax.eval_shape(lambda: init_state(c)), one)
    jax.tree.map(np.testing.assert_array_equal, state, restored)

    tokens_BT = np.random.default_rng(1).integers(0, 257, (ROWS, TOKENS)).astype(np.int32)
    positions_BT = np.tile(np.arange(TOKENS, dtype=np.int32), (ROWS, 1))
    segment_BT = np.zeros_like(tokens_BT)
    segment_BT[1, 3:] = 1
    with jax.set_mesh(one):
        graphdef, inference = graph(c), graph(c, Layout().for_inference())

        @jax.jit
        def on_one_device(params, batch, trained):
            def loss(params):
                loss, (nll, _), _ = batch_loss(nnx.merge(graphdef, params), batch, c.train.z_loss)
                return loss, nll

            grads, nll = jax.grad(loss, has_aux=True)(params)
            return nll, grads, hidden_both_ways(nnx.merge(inference, trained), tokens_BT, positions_BT, segment_BT)

        batch = batch_on(one, c)
        nll, grads, (whole_BTD, cached_BTD) = on_one_device(state_on(one, c).params, batch, restored.params)
    np.testing.assert_allclose(cached_BTD, whole_BTD, atol=2e-5)
    count = float(np.sum(batch.loss_mask_BT))
    assert float(metrics["loss"]) == pytest.approx(float(nll) / count, rel=1e-5)

    def same(path, moment, grad, is_prescribed):
        largest = np.abs(grad).max()
        if is_prescribed:
            assert largest == 0 == np.abs(moment).max()
            return
        assert largest > 0, f"{jax.tree_util.keystr(path)} gets no gradient"
        np.testing.assert_allclose(moment / (1 - c.optimizer.b1) * count, grad, atol=5e-5 * largest)

    adam = next(s for s in jax.tree.leaves(state.opt_state, is_leaf=is_adam) if is_adam(s))
    marks = (parameter_metadata(c.model, name, False) for name in ("is_constant", "is_progress"))
    jax.tree.map_with_path(same, adam.mu, grads, jax.tree.map(operator.or_, *marks))


def is_adam(state):
    return hasattr(state, "mu")
