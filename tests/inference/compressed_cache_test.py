"""Quantised caches and caches that evict tokens, compared with numpy, and the suite that measures them."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import suite_config, write_text
from helpers.evals_examples import examples, task_of, write_lines
from helpers.evals_params import one_device, random_params
from jax.sharding import reshard

from difftx import evals
from difftx.config.model import CacheConfig
from difftx.errors import UserError
from difftx.evals.cache import compressed
from difftx.inference.cache import Entries, capacity_of, grow, write_chunk, write_token
from difftx.kernels import cached, maps
from difftx.kernels.cached import EMPTY, SegmentMask, Slots
from difftx.kernels.quantized import dequantized, quantize, rounded
from difftx.training.run import Run

B, K, R, G, D, E = 2, 2, 2, 2, 8, 16


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_numbers_are_rounded_to_the_nearest_level(bits, dtype):
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
    assert np.abs(np.asarray(dequantized(found)) - x).max() <= scale.max() / 2 * (1 + 1e-5) + levels * scale.max() / 256


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

    def __init__(self, q_TRGD, k_TGD, v_TE, lam_TR, config, window):
        self.q, self.k, self.v, self.lam, self.config, self.window = q_TRGD, k_TGD, v_TE, lam_TR, config, window
        self.mass = {}

    def chunk(self, start, end):
        """Return the outputs of the tokens from `start` to `end`, and evict tokens."""
        out, found = [], dict.fromkeys([*self.mass, *range(start, end)], 0.0)
        for t in range(start, end):
            seen = [s for s in found if s <= t and t - s < (self.window or np.inf)]
            heads = []
            for r in range(R):
                a1, a2 = (softmax(self.k[seen, g] @ self.q[t, r, g] / np.sqrt(D)) for g in range(G))
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


@pytest.mark.parametrize(
    ("chunk", "share", "window"),
    [
        *((32, 0.5, None), (32, 0.25, 20), (1, 0.0, 40)),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((1, 0.5, None), (32, 0.9, None))),
    ],
)
@pytest.mark.parametrize("devices", [{}, pytest.param({"fsdp": 2, "tensor": 2}, marks=pytest.mark.long)])
def test_kept_tokens_and_outputs_equal_brute_force(mesh_of, chunk, share, window, devices):
    T = 160 if chunk > 1 else 80
    config = CacheConfig(tokens=64, recent_share=share)
    rng = np.random.default_rng(0)
    q = rng.normal(size=(B, T, K, R, G, D), scale=2.0)
    k, v, lam = rng.normal(size=(B, T, K, G, D)), rng.normal(size=(B, T, K, E)), rng.uniform(0, 1, (B, T, K, R))
    oracles = [
        [Oracle(q[b, :, h], k[b, :, h], v[b, :, h], lam[b, :, h], config, window) for h in range(K)] for b in range(B)
    ]
    spec = jax.P(("data", "fsdp"), None, "tensor")

    with jax.set_mesh(mesh_of(**devices)):

        def put(x, dtype=jnp.float32, spec=spec):
            return reshard(jnp.asarray(x, dtype), spec)

        keys, values, numbers = ((1, B, K, G, 64, D), (1, B, K, 64, E), (1, B, K, 64))
        of_cache = jax.P(None, ("data", "fsdp"), "tensor")
        slots = Slots(put(np.full(numbers, EMPTY), jnp.int32, of_cache), put(np.zeros(numbers), spec=of_cache))
        cache = put(np.zeros(keys), spec=of_cache), put(np.zeros(values), spec=of_cache), slots

        @jax.jit
        def step(cache, q_BTHGD, k_BTKGD, v_BTKE, lam_BTH, position_BT, segment_BT):
            ids = SegmentMask(segment_BT, jnp.zeros_like(segment_BT), position_BT, jnp.zeros((B, 64), jnp.int32))
            layer = jax.tree.map(lambda x: x[0], cache)
            out, mass = cached.mapped_attention(
                maps.difference, q_BTHGD, k_BTKGD, v_BTKE, layer, ids, map_parameter=lam_BTH, window=window
            )
            written = jnp.where(segment_BT == EMPTY, EMPTY, position_BT)
            entries = Entries(k_BTKGD[None], v_BTKE[None], written, *(m[None] for m in mass))
            if chunk == 1:
                return out, write_token(cache, entries, position_BT[:, 0], config)
            return out, write_chunk(cache, entries, jnp.int32(0), config)

        end = T - 7 if chunk > 1 else T  # The last chunk has padding.
        for start in range(0, T, chunk):
            part = slice(start, start + chunk)
            positions = np.tile(np.arange(T)[part], (B, 1))
            segments = np.where(positions < end, 0, EMPTY)
            row = jax.P(("data", "fsdp"))
            out, cache = step(
                cache,
                put(q[:, part].reshape(B, chunk, K * R, G, D)),
                put(k[:, part]),
                put(v[:, part]),
                put(lam[:, part].reshape(B, chunk, K * R)),
                put(positions, jnp.int32, row),
                put(segments, jnp.int32, row),
            )
            real = min(start + chunk, end) - start
            expected = [[oracle.chunk(start, start + real) for oracle in of_row] for of_row in oracles]
            expected_BTHE = np.moveaxis(np.array(expected), 1, 2).reshape(B, real, K * R, E)
            np.testing.assert_allclose(out[:, :real], expected_BTHE, atol=2e-5)
            position_BKS, mass_BKS = (np.asarray(x[0]) for x in cache[2])
            for b in range(B):
                for h in range(K):
                    kept = position_BKS[b, h] != EMPTY
                    found = dict(zip(position_BKS[b, h][kept].tolist(), mass_BKS[b, h][kept].tolist(), strict=True))
                    assert found == pytest.approx(oracles[b][h].mass, rel=1e-4, abs=1e-4)
                    at = position_BKS[b, h][kept]
                    np.testing.assert_array_equal(
                        np.asarray(cache[0][0])[b, h][:, kept], np.float32(k[b, at, h].swapaxes(0, 1))
                    )
                    np.testing.assert_array_equal(np.asarray(cache[1][0])[b, h][kept], np.float32(v[b, at, h]))
        larger = grow(cache, 96)
        assert capacity_of(larger) == 96
        assert (np.asarray(larger[2].position_BKS)[..., 64:] == EMPTY).all()


@pytest.mark.long
@pytest.mark.parametrize("architecture", ["diff", pytest.param("transformer", marks=pytest.mark.exhaustive), "diff_v2"])
def test_losses_by_cache(config, text_file, tmp_path, architecture):
    """A cache of 8 bits changes the loss less than one of 4 bits. A cache of all tokens changes nothing."""
    c = config(
        architecture, data__path=text_file, data__sequence_length=128, eval__loss_tokens=512, model__num_heads=2,
        model__head_dim=8, eval__cache__suites="loss,recall", eval__cache__shares="1,0.5",
    )  # fmt: skip
    run = Run.open(c, tmp_path, one_device())
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
    model = c.model
    numbers_a_token = model.num_layers * model.kv_heads * (model.groups + (2 if architecture == "diff" else 1)) * 8
    vectors = model.num_layers * model.kv_heads * (model.groups + 1)
    expected = {"whole": 4 * numbers_a_token, "8_bits": numbers_a_token + 2 * vectors}
    expected |= {"4_bits": numbers_a_token / 2 + 2 * vectors, "64_tokens": 2 * numbers_a_token}
    for name, size in expected.items():
        assert numbers[f"bytes_per_token_{name}"] == size


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


@pytest.mark.long
def test_answers_are_those_of_the_compressed_cache(config, tmp_path):
    c = config(
        data__path="synthetic:copy", data__sequence_length=64, data__synthetic__vocab_size=8, data__synthetic__pairs=2,
        data__synthetic__valid_examples=16, eval__cache__suites="exact_match", eval__cache__bits="()",
        eval__cache__shares="1,0.25", eval__cache__chunk_tokens=8,
    )  # fmt: skip
    run = Run.open(c, tmp_path, one_device())
    numbers = evals.evaluate(run, random_params(run), 0, ["cache"])["cache"].numbers
    assert numbers["exact_match_accuracy_64_tokens"] == numbers["exact_match_accuracy_whole"] > 0
    assert numbers["exact_match_accuracy_16_tokens"] != numbers["exact_match_accuracy_whole"]


@pytest.mark.long
def test_retrieval_from_a_cache(tmp_path):
    """Run the suites needle and icl, which docs/suites.md recommends for the suite cache."""
    write_lines(tmp_path / "train.jsonl.gz", examples(100, 0))
    write_lines(tmp_path / "test.jsonl", examples(40, 1))
    write_text(tmp_path / "text.txt")
    changes = {
        "mesh.fsdp": 1, "eval.cache.suites": "needle,icl", "eval.cache.shares": "1,0.5", "eval.cache.bits": "4",
        "eval.icl.tasks": json.dumps([task_of(tmp_path)]), "eval.icl.questions": 4, "eval.icl.permutations": 1,
        "eval.needle.samples": 1, "eval.needle.depths": "0.5", "eval.needle.new_tokens": 4,
        "eval.needle.cases": json.dumps([{"needles": 2, "queries": 1}]),
    }  # fmt: skip
    run = Run.open(suite_config(tmp_path, 512, **changes), tmp_path / "run", one_device())
    params = random_params(run)
    plain = evals.evaluate(run, params, 0, ["needle", "icl"])
    numbers = evals.evaluate(run, params, 0, ["cache"])["cache"].numbers
    for suite, result in plain.items():
        for name, value in result.numbers.items():
            assert numbers[f"{suite}_{name}_whole"] == value
            assert {f"{suite}_{name}_{cache}" for cache in ("4_bits", "512_tokens", "256_tokens")} <= numbers.keys()
    # All tokens are kept, so only the order of sums differs.
    for name, value in plain["icl"].numbers.items():
        assert numbers[f"icl_{name}_512_tokens"] == pytest.approx(value)


def test_a_row_of_documents_is_refused(config, text_file, tmp_path):
    fields = {"data__path": text_file, "eval__cache__shares": "0.5"}
    c = config(data__sequence_length=128, data__document_mask="true", **fields)
    with pytest.raises(UserError, match=r"data\.document_mask=True: .*requires a run with data\.document_mask=False"):
        evals.check_run(run := Run.open(c, tmp_path, one_device()), ["cache"])
    compressing = dataclasses.replace(run, config=compressed(c)["8_bits"])
    with pytest.raises(UserError, match=r"data\.document_mask=True: "):
        evals.evaluate(compressing, random_params(run), 0, ["loss"])
