"""Quantised caches and caches that evict tokens, compared with numpy, and the suite that measures them."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import marked
from helpers.evals_params import one_device, random_params
from jax.sharding import reshard

from difftx.config.model import CacheConfig
from difftx.errors import UserError
from difftx.evals import run as evals
from difftx.evals.cache import bytes_per_token, compressed
from difftx.inference.cache import Entries, capacity_of, grow, write_chunk, write_token
from difftx.kernels import cached, weight_functions
from difftx.kernels.cached import EMPTY, SegmentMask, Slots
from difftx.kernels.quantized import dequantized, quantize, rounded
from difftx.model.architectures import heads_of
from difftx.training.run import Run

B, K, R, G, d, E = 2, 2, 2, 2, 8, 16
OF_SUITE = {
    "data__sequence_length": 128, "eval__loss_tokens": 512, "model__num_heads": 2, "model__head_dim": 8,
    "eval__cache__suites": "loss,recall", "eval__cache__shares": "1,0.5",
}  # fmt: skip


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_numbers_are_rounded_to_the_nearest_level(bits, dtype):
    """A vector of numbers x is stored as integers from -L to L times a scale, which is max |x| / L in bfloat16."""
    x = np.random.default_rng(0).normal(size=(3, 5, 8)) * np.exp(np.random.default_rng(1).normal(size=(3, 5, 1)))
    x[0, 0] = 0
    x = np.asarray(jnp.asarray(x, dtype).astype(jnp.float32))
    levels = 2 ** (bits - 1) - 1
    scale = np.asarray(jnp.asarray(np.abs(x).max(-1, keepdims=True) / levels, jnp.bfloat16).astype(jnp.float32))
    nearest = np.clip(np.rint(np.divide(x, scale, out=np.zeros_like(x), where=scale > 0)), -levels, levels)
    found = quantize(jnp.asarray(x, dtype), bits)
    np.testing.assert_array_equal(dequantized(found), nearest * scale)
    assert found.codes_W.dtype == jnp.int8
    assert found.codes_W.shape == (3, 5, 8 * bits // 8)
    # The nearest integer is at most half a level away, but a number may lie above L times a scale that was rounded
    # down. bfloat16 rounds by at most a 256th, so this number is at most a 256th of L times the scale away.
    rounding, clipping = scale.max() / 2 * (1 + 1e-5), levels * scale.max() / 256
    assert np.abs(np.asarray(dequantized(found)) - x).max() <= rounding + clipping


def test_the_gradient_passes_through_the_rounding():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8)), jnp.float32)
    weights = jnp.arange(16.0).reshape(2, 8)
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(weights * rounded(x, 4)))(x), weights)
    np.testing.assert_allclose(rounded(x, 4), dequantized(quantize(x, 4)), rtol=1e-6)


def softmax(z):
    weights = np.exp(z - z.max())
    return weights / weights.sum()


class Oracle:
    """Brute-force attention of one row and key/value head to a cache, with the mass of each cached position."""

    def __init__(self, q_TRGd, k_TGd, v_TE, lam_TR, config, window):
        self.q, self.k, self.v, self.lam, self.config, self.window = q_TRGd, k_TGd, v_TE, lam_TR, config, window
        self.mass = {}

    def chunk(self, start, end):
        """Return the outputs of the tokens from `start` to `end`, and evict tokens."""
        out, found = [], dict.fromkeys([*self.mass, *range(start, end)], 0.0)
        for t in range(start, end):
            seen = [s for s in found if s <= t and t - s < (self.window or np.inf)]
            heads = []
            for r in range(R):
                a1, a2 = (softmax(self.k[seen, g] @ self.q[t, r, g] / np.sqrt(d)) for g in range(G))
                weights = a1 - self.lam[t, r] * a2
                heads.append(weights @ self.v[seen])
                for s, weight in zip(seen, weights, strict=True):
                    found[s] += abs(weight)
            out.append(heads)
        self.mass = {s: self.mass.get(s, 0) + mass for s, mass in found.items()}
        recent = int(self.config.recent_share * self.config.tokens)
        while len(self.mass) > self.config.tokens:
            old = [s for s in self.mass if s < start and end - 1 - s >= recent]
            if old:
                del self.mass[min(old, key=self.mass.__getitem__)]
            else:
                del self.mass[min(self.mass)]
        return np.array(out)


SLOTS = 64  # Capacity of the caches below, per row and key/value head.
OF_ROWS, OF_HEADS = jax.P(("data", "fsdp")), jax.P(("data", "fsdp"), None, "tensor")
OF_CACHE = jax.P(None, ("data", "fsdp"), "tensor")
DEVICES = [{}, pytest.param({"fsdp": 2, "tensor": 2}, marks=pytest.mark.long)]


def put(x, spec, dtype=jnp.float32):
    return reshard(jnp.asarray(x, dtype), spec)


def empty_cache():
    """Return a cache of one layer without tokens."""
    numbers = (1, B, K, SLOTS)
    slots = Slots(put(np.full(numbers, EMPTY), OF_CACHE, jnp.int32), put(np.zeros(numbers), OF_CACHE))
    keys, values = (1, B, K, G, SLOTS, d), (1, B, K, SLOTS, E)
    return put(np.zeros(keys), OF_CACHE), put(np.zeros(values), OF_CACHE), slots


def attend_and_write(chunk, config, window):
    """Return a jitted function that returns a chunk's outputs, and a cache that contains its tokens."""

    @jax.jit
    def step(cache, q_BTHGd, k_BTKGd, v_BTKE, lam_BTH, position_BT, segment_BT):
        ids = SegmentMask(segment_BT, jnp.zeros_like(segment_BT), position_BT, jnp.zeros((B, SLOTS), jnp.int32))
        layer = jax.tree.map(lambda x: x[0], cache)
        out, mass = cached.weighted_attention(
            weight_functions.difference, q_BTHGd, k_BTKGd, v_BTKE, layer, ids, weight_argument=lam_BTH, window=window
        )
        written = jnp.where(segment_BT == EMPTY, EMPTY, position_BT)
        entries = Entries(k_BTKGd[None], v_BTKE[None], written, *(m[None] for m in mass))
        if chunk == 1:
            return out, write_token(cache, entries, position_BT[:, 0], config)
        return out, write_chunk(cache, entries, jnp.int32(0), config)

    return step


def check_cache(cache, oracles, k, v):
    """Check that a cache has the tokens of the oracles, with their mass, keys and values."""
    (keys,), (values,) = np.asarray(cache[0]), np.asarray(cache[1])
    position_BKS, mass_BKS = (np.asarray(x[0]) for x in cache[2])
    for b in range(B):
        for h in range(K):
            kept = position_BKS[b, h] != EMPTY
            at = position_BKS[b, h][kept]
            found = dict(zip(at.tolist(), mass_BKS[b, h][kept].tolist(), strict=True))
            assert found == pytest.approx(oracles[b][h].mass, rel=1e-4, abs=1e-4)
            np.testing.assert_array_equal(keys[b, h][:, kept], np.float32(k[b, at, h].swapaxes(0, 1)))
            np.testing.assert_array_equal(values[b, h][kept], np.float32(v[b, at, h]))


@pytest.mark.parametrize(
    ("chunk", "share", "window"),
    [
        (32, 0.25, 20),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((32, 0.5, None), (1, 0.0, 40), (32, 0.9, None))),
    ],
)
@pytest.mark.parametrize("devices", DEVICES)
def test_kept_tokens_and_outputs_equal_brute_force(mesh_of, chunk, share, window, devices):
    T = 160 if chunk > 1 else 80
    config = CacheConfig(tokens=SLOTS, recent_share=share)
    rng = np.random.default_rng(0)
    q = rng.normal(size=(B, T, K, R, G, d), scale=2.0)
    k, v, lam = rng.normal(size=(B, T, K, G, d)), rng.normal(size=(B, T, K, E)), rng.uniform(0, 1, (B, T, K, R))
    oracles = [
        [Oracle(q[b, :, h], k[b, :, h], v[b, :, h], lam[b, :, h], config, window) for h in range(K)] for b in range(B)
    ]
    end = T - 7 if chunk > 1 else T  # The last chunk has padding.
    with jax.set_mesh(mesh_of(**devices)):
        cache, step = empty_cache(), attend_and_write(chunk, config, window)
        for start in range(0, T, chunk):
            part = slice(start, start + chunk)
            positions = np.tile(np.arange(T)[part], (B, 1))
            out, cache = step(
                cache,
                put(q[:, part].reshape(B, chunk, K * R, G, d), OF_HEADS),
                put(k[:, part], OF_HEADS),
                put(v[:, part], OF_HEADS),
                put(lam[:, part].reshape(B, chunk, K * R), OF_HEADS),
                put(positions, OF_ROWS, jnp.int32),
                put(np.where(positions < end, 0, EMPTY), OF_ROWS, jnp.int32),
            )
            real = min(start + chunk, end) - start
            expected = [[oracle.chunk(start, start + real) for oracle in of_row] for of_row in oracles]
            expected_BTHE = np.moveaxis(np.array(expected), 1, 2).reshape(B, real, K * R, E)
            np.testing.assert_allclose(out[:, :real], expected_BTHE, atol=2e-5)
            check_cache(cache, oracles, k, v)


def test_a_larger_cache_has_empty_slots_after_those_that_it_had(mesh_of):
    with jax.set_mesh(mesh_of()):
        keys, values, slots = empty_cache()
        positions = np.broadcast_to(np.arange(SLOTS), (1, B, K, SLOTS))
        full = keys + 1, values + 2, slots._replace(position_BKS=put(positions, OF_CACHE, jnp.int32))
        larger = grow(full, 96)
    assert capacity_of(larger) == 96
    np.testing.assert_array_equal(larger[2].position_BKS[..., :SLOTS], positions)
    assert (np.asarray(larger[2].position_BKS)[..., SLOTS:] == EMPTY).all()
    assert (np.asarray(larger[0])[..., :SLOTS, :] == 1).all()
    assert (np.asarray(larger[1])[..., :SLOTS, :] == 2).all()


@pytest.mark.long
@pytest.mark.parametrize("architecture", ["diff", pytest.param("transformer", marks=pytest.mark.exhaustive), "diff_v2"])
def test_fewer_bits_change_the_loss_more_and_a_cache_of_all_tokens_changes_nothing(
    config, text_file, tmp_path, architecture
):
    run = Run.open(config(architecture, data__path=text_file, **OF_SUITE), tmp_path, one_device())
    params = random_params(run)
    plain = evals.evaluate(run, params, 0, ["loss", "recall"])
    numbers = evals.evaluate(run, params, 0, ["cache"])["cache"].numbers
    whole = plain["loss"].numbers["loss"]
    assert numbers["loss_loss_whole"] == whole
    assert numbers["recall_ar_hit_loss_whole"] == plain["recall"].numbers["ar_hit_loss"]
    # All tokens are kept, so only the order of sums differs.
    assert numbers["loss_loss_128_tokens"] == pytest.approx(whole, rel=1e-5)
    eight, four, half = (numbers[f"loss_loss_{name}"] - whole for name in ("8_bits", "4_bits", "64_tokens"))
    assert 1e-7 < abs(eight) < abs(four)
    assert abs(half) > 1e-5


@pytest.mark.parametrize("architecture", marked(["diff", "transformer", "diff_v2"], fast=["diff"]))
def test_bytes_per_token_are_those_of_keys_values_and_scales(config, text_file, tmp_path, architecture):
    c = config(architecture, data__path=text_file, **OF_SUITE)
    run = Run.open(c, tmp_path, one_device())
    evaluation = types.SimpleNamespace(run=run, params=random_params(run))
    found = {name: bytes_per_token(evaluation, changed) for name, changed in compressed(c).items()}
    model, heads = c.model, heads_of(c.model)
    # A head has a key for each group, and a value, which has twice the width of a key in `diff`.
    vectors = model.num_layers * heads.kv_heads * (heads.groups + 1)
    numbers = model.num_layers * heads.kv_heads * (heads.groups + (2 if architecture == "diff" else 1)) * model.head_dim
    # Whole numbers have 4 bytes. Each rounded vector has a scale of 2 bytes.
    expected = {"whole": 4 * numbers, "8_bits": numbers + 2 * vectors, "4_bits": numbers / 2 + 2 * vectors}
    assert found == expected | {"128_tokens": 4 * numbers, "64_tokens": 2 * numbers}


@pytest.mark.long
def test_short_rows_are_compressed_in_small_chunks(config, text_file, tmp_path):
    """A row that is one chunk is not compressed before it is scored."""
    changes = {"data__path": text_file, "data__sequence_length": 32, "eval__loss_tokens": 256}
    changes |= {"eval__cache__bits": "4", "eval__cache__shares": "0.25"}
    with pytest.raises(UserError, match=r"tokens=8 is less than twice model\.cache\.chunk_tokens=32; .*eval\.cache\."):
        compressed(config(**changes))
    found = {}
    for chunk, shares in ((32, "()"), (4, "0.25")):
        c = config(**changes | {"eval__cache__chunk_tokens": chunk, "eval__cache__shares": shares})
        run = Run.open(c, tmp_path, one_device())
        found[chunk] = evals.evaluate(run, random_params(run), 0, ["cache"])["cache"].numbers
    assert found[32]["loss_loss_4_bits"] == pytest.approx(found[32]["loss_loss_whole"], rel=1e-6)
    assert abs(found[4]["loss_loss_4_bits"] - found[4]["loss_loss_whole"]) > 1e-5
    assert abs(found[4]["loss_loss_8_tokens"] - found[4]["loss_loss_whole"]) > 1e-5


def test_the_suite_refuses_rows_of_documents(config, text_file, tmp_path):
    fields = {"data__path": text_file, "data__document_mask": "true", "eval__cache__shares": "0.5"}
    run = Run.open(config(data__sequence_length=128, **fields), tmp_path, one_device())
    with pytest.raises(UserError, match=r"data\.document_mask=True: .*requires a run with data\.document_mask=False"):
        evals.check_run(run, ["cache"])
