"""Suite `attention`: each measure, and evaluations of models whose attention weights are known."""

import contextlib
import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, TINY
from helpers.evals_results import chance_of
from model.oracle import softmax_row

from difftx.config.build import override
from difftx.config.recipes import load_config
from difftx.errors import UserError
from difftx.evals import run as evals
from difftx.evals.attention import suite as attention
from difftx.evals.attention.statistics import PARTS, UNSEEN, row_pictures, row_statistics
from difftx.kernels.rows import AttentionRows
from difftx.model.architectures import heads_of
from difftx.training.run import Run
from difftx.training.state import init_state

SHARE = 0.01
PROSE = "".join(f"Chapter {i} has {i * 37} pages! And so it goes.\n" for i in range(3000))
COMPARED = ("answer", "noise", "others")
SETTINGS = {"needles": 4, "queries": 2, "samples": 3, "l0_share": SHARE, "shown_queries": 5}


def by_hand(logits, lam, part):
    """Return the expected `row_statistics` of one row of one head in float64, given logits `[G, S]`, and λ or None."""
    seen = [s for s in range(len(part)) if part[s] != UNSEEN]
    soft = [softmax_row(z[seen]) for z in logits]
    row = soft[0] if lam is None else soft[0] - lam * soft[1]
    inside = {name: [i for i, s in enumerate(seen) if part[s] == PARTS.index(name)] for name in PARTS}
    w = np.abs(row) / np.abs(row).sum()
    found = {"first": w[0], "first_signed": row[0], **sparsity(w)}
    for name, at in inside.items():
        at = [i for i in at if i > 0]
        found[name], found[f"{name}_signed"] = w[at].sum(), row[at].sum()
    if lam is None:
        return found
    found["lambda"] = lam
    for a, suffix in zip(soft, ("a1", "a2"), strict=True):
        found |= {f"{name}_{suffix}": value for name, value in {"first": a[0], **sparsity(a)}.items()}
    for name, (with_first, suffix) in itertools.product(COMPARED, ((False, ""), (True, "_with_first"))):
        at = [seen[i] for i in inside[name] if i > 0 or with_first]
        p1, p2 = (softmax_row(z[at]) for z in logits)
        found[f"cosine_{name}{suffix}"] = p1 @ p2 / math.sqrt((p1 @ p1) * (p2 @ p2))
        log1, log2 = (z[at] - z[at].max() - math.log(np.exp(z[at] - z[at].max()).sum()) for z in logits)
        found[f"kl_{name}{suffix}"] = float(np.sum(p1 * (log1 - log2)))
    return found


def sparsity(w):
    return {
        "gini": np.abs(w[:, None] - w).sum() / (2 * len(w) * w.sum()),  # Half the relative mean difference.
        "entropy": -sum(x * math.log(x) for x in w if x > 0),
        "l0": sum(x > SHARE for x in w) / len(w),
    }


@pytest.mark.parametrize("scale", [1.0, 60.0])  # At 60, some weights are 0 in float32, but KL needs their logarithms.
@pytest.mark.parametrize("is_pair", [True, False])
def test_each_measure_by_hand(scale, is_pair):
    B, H, S = 3, 2, 40
    rng = np.random.default_rng(0)
    part = np.sort(rng.integers(0, 4, (B, S)))[:, rng.permutation(S)].astype(np.int32)
    part[:, -5:] = UNSEEN
    part[0, 0] = PARTS.index("answer")
    logits = rng.normal(scale=scale, size=(B, 1, H, 2 if is_pair else 1, S)).astype(np.float32)
    lam = np.float32([[[0.3, 1.7]]] * B) if is_pair else None
    masked = np.where(part[:, None, None, None] == UNSEEN, -np.inf, logits)
    soft = jax.nn.softmax(masked, axis=-1)
    row = soft[:, :, :, 0] - lam[..., None] * soft[:, :, :, 1] if is_pair else soft[:, :, :, 0]
    rows = AttentionRows(row, jnp.asarray(masked), lam)
    found = jax.jit(lambda r, p: row_statistics(r, p, l0_share=SHARE, compared=COMPARED))(rows, part)
    for b in range(B):
        heads = [by_hand(np.float64(logits[b, 0, h]), lam[b, 0, h] if is_pair else None, part[b]) for h in range(H)]
        assert found.keys() == heads[0].keys()
        for name in found:
            expected = np.mean([head[name] for head in heads])
            assert float(found[name][b]) == pytest.approx(expected, rel=2e-5, abs=2e-6), (name, b)


def test_pictures_are_sums_of_bins():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(1, 2, 3, 2, 11)).astype(np.float32)
    soft = np.asarray(jax.nn.softmax(logits, axis=-1), np.float64)
    row = soft[:, :, :, 0] - 0.6 * soft[:, :, :, 1]
    found = row_pictures(AttentionRows(jnp.float32(row), logits, jnp.full((1, 2, 3), 0.6)), tokens_per_bin=4)
    whole = {"map": row, "a1": soft[:, :, :, 0], "a2": soft[:, :, :, 1]}
    whole["share"] = np.abs(row) / np.abs(row).sum(-1, keepdims=True)
    assert found.keys() == whole.keys()
    for name, expected in whole.items():
        mean = expected.mean(axis=2)
        bins = np.stack([mean[..., 0:4].sum(-1), mean[..., 4:8].sum(-1), mean[..., 8:].sum(-1)], axis=-1)
        np.testing.assert_allclose(found[name], bins, atol=1e-6)


def config_of(folder, architecture, **changes):
    (folder / "prose.txt").write_text(PROSE)
    sizes = {"data.sequence_length": 512, "train.global_batch_tokens": 4096, "mesh.fsdp": 8, "model.num_heads": 2}
    sizes |= {"data.path": folder / "prose.txt", "data.valid_fraction": 0.5, "model.rope_theta": 1e30}
    sizes |= {f"eval.attention.{name}": value for name, value in SETTINGS.items()} | changes
    settings = TINY | {name: str(value) for name, value in sizes.items()}
    return load_config(f"{ROOT}/configs/quickstart.py:{architecture}", settings)


PLANTED = {
    0: (2.0, 5.0),
    1: (0.0, 0.0),
}  # Layer → half the difference between the logits of digits and of other tokens, per head.


def planted(config, mesh):
    """Return parameters whose A1, or A, prefers digits, and whose A2 is uniform. The rest of the model has no effect.

    The last pair of channels rotates so slowly at θ = 1e30 that a logit does not depend on the distance.
    """
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(lambda: init_state(config).params)
    params = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), shapes)
    model, blocks = config.model, params["blocks"]
    params["embedding_VD"][:, 0] = 1
    params["embedding_VD"][:, 1] = [1 if chr(i) in "0123456789" else -1 for i in range(model.vocab_size)]
    x = 1 / math.sqrt(2 / model.d_model + model.norm_eps)  # The magnitude of both channels after the norm.
    for name in ("attention_norm", "mlp_norm"):
        blocks[name]["scale"][:] = 1
    params["final_norm"]["scale"][:] = 1
    channel = heads_of(model).d_head - 1
    query = blocks["attention"]["query_DHGd" if model.architecture == "diff" else "query_DHd"]
    key = blocks["attention"]["key_DKGd" if model.architecture == "diff" else "key_DKd"]
    for layer, logits in PLANTED.items():
        for head, logit in enumerate(logits):
            at = (head, 0, channel) if model.architecture == "diff" else (head, channel)
            query[(layer, 0, *at)] = logit * math.sqrt(heads_of(model).d_head) / x
            key[(layer, 1, *at)] = 1 / x
    specs = jax.tree.map(lambda shape: jax.NamedSharding(mesh, shape.sharding.spec), shapes)
    return jax.device_put(params, specs)


def expected_of(run, architecture):
    """Return (depth, layer, name) → the expected mean over prompts and heads, from the text of the prompts."""
    found = {}
    prompts = attention.prompts_of(run)
    for prompt in map(prompts.prompt, prompts.items):
        part = np.full(len(prompt.tokens), PARTS.index("noise"))
        text = run.tokenizer.decode(prompt.tokens)
        assert len(text) == len(prompt.tokens)
        for spans, name in ((prompt.asked, "answer"), (prompt.others, "others"), ([prompt.question], "question")):
            for start, stop in spans:
                part[start:stop] = PARTS.index(name)
        for layer, by_head in PLANTED.items():
            lam = 0.8 - 0.6 * math.exp(-0.3 * layer) if architecture == "diff" else None
            for logit in by_head:
                digits = np.array([logit if c.isdigit() else -logit for c in text])
                logits = np.stack([digits, np.zeros(len(text))]) if architecture == "diff" else digits[None]
                for name, value in by_hand(logits, lam, part).items():
                    found.setdefault((prompt.item.depth, layer, name), []).append(value)
    return {key: np.mean(values) for key, values in found.items()}


@pytest.mark.long
@pytest.mark.parametrize("architecture", ["diff", pytest.param("transformer", marks=pytest.mark.exhaustive)])
def test_planted_attention_has_the_expected_numbers(tmp_path, architecture):
    config = config_of(tmp_path, architecture)
    run = Run.open(config, tmp_path / "run")
    result = evals.evaluate(run, planted(config, run.mesh), 3, ["attention"])["attention"]
    expected = expected_of(run, architecture)
    names, depths = {name for *_, name in expected}, sorted({depth for depth, *_ in expected})
    assert result.numbers.keys() == names & set(attention.NUMBERS)
    assert len(result.numbers) == (22 if architecture == "diff" else 11)
    chance, prompts = chance_of(result), attention.prompts_of(run)
    for prompt in map(prompts.prompt, prompts.items):
        answer = sum(stop - start for start, stop in prompt.asked) / len(prompt.tokens)
        assert chance["answer"] == pytest.approx(answer, abs=4 / len(prompt.tokens))  # Names of cities differ.
    assert (chance.keys(), sum(chance.values())) == (set(PARTS), pytest.approx(1))
    by_depth, by_layer = result.details["by_depth"], result.details["by_layer"]
    for name in names:
        of_layer = [np.mean([expected[d, layer, name] for d in depths]) for layer in (0, 1)]
        assert by_layer[name] == pytest.approx(of_layer, rel=1e-4, abs=1e-6), name
        if name in result.numbers:
            assert result.numbers[name] == pytest.approx(np.mean(of_layer), rel=1e-4, abs=1e-6), name
        for depth in depths:
            value = np.mean([expected[depth, layer, name] for layer in (0, 1)])
            assert by_depth[f"{depth:g}"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), (name, depth)
    check_charts(result, expected, depths, architecture)


@pytest.mark.long
def test_selected_layers_on_another_mesh(tmp_path):
    config = config_of(tmp_path, "diff")
    run = Run.open(config, tmp_path / "run")
    every = evals.evaluate(run, planted(config, run.mesh), 3, ["attention"])["attention"]
    flags = {"eval.attention.layers": "1", "mesh.fsdp": "2", "mesh.tensor": "2", "mesh.data": "2"}
    other = Run.open(override(config, flags), tmp_path / "run")
    assert evals.stored_result(run, "attention", 3) is not None
    assert evals.stored_result(other, "attention", 3) is None
    first = evals.evaluate(other, planted(config, other.mesh), 3, ["attention"])["attention"]
    by_layer = every.details["by_layer"]
    assert first.numbers.keys() == every.numbers.keys()
    assert first.numbers == pytest.approx({name: by_layer[name][0] for name in first.numbers}, rel=1e-5, abs=1e-6)
    assert first.details["by_layer"]["gini"] == pytest.approx(by_layer["gini"], rel=1e-5)


def check_charts(result, expected, depths, architecture):
    charts = {chart.name.removeprefix("attention_"): chart for chart in result.charts}
    is_diff = architecture == "diff"
    pair = {"a1", "a2", "cosine", "kl", "cosine_with_first", "kl_with_first", "lambda"} if is_diff else set()
    assert charts.keys() == {"parts", "context", "map", "layers", "position_0", "gini", "entropy", "l0"} | pair
    parts = charts["parts"]
    assert (parts.x, parts.y[:2]) == (["0 %", "25 %", "50 %", "75 %", "100 %", "mean"], ["answer", "other needles"])
    np.testing.assert_allclose(np.sum(parts.values, axis=0), 1, atol=1e-5)
    answer = [np.mean([expected[depth, layer, "answer"] for layer in (0, 1)]) for depth in depths]
    assert parts.values[0] == pytest.approx([*answer, np.mean(answer)], rel=1e-4)
    lines = {line.name: line for line in charts["gini"].series}
    assert lines.keys() == ({"A1 − λ A2", "A1", "A2"} if is_diff else {"A"})
    assert lines["A1 − λ A2" if is_diff else "A"].y == result.details["by_layer"]["gini"]
    # The charts show one prompt in bins of two tokens, because its 480 tokens exceed 256 columns.
    line, *others = charts["context"].series
    assert sum(line.y) == pytest.approx(1, abs=1e-5)
    assert [o.name for o in others] == (["A1", "A2"] if is_diff else []) + ["answer", "answer"]
    picture = charts["map"]
    assert np.array(picture.values).shape == (5, 240)
    assert picture.x[0].startswith("0 … 1 '")
    digits = [any(c.isdigit() for c in name.split("'", 1)[1]) for name in picture.x]
    assert np.min(np.array(picture.values)[-1, digits]) > np.max(np.array(picture.values)[-1, ~np.array(digits)])


WINDOW = r"model\.window=479: .* the last of the 480 tokens of a prompt .*; use eval\.attention\.length=511 or less,"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eval.attention.layers": 3}, r"eval.attention.layers=\(3,\): the model has 2 layers; use 1 … 2"),
        ({"eval.attention.length": 600}, "eval.attention.length: 600 tokens are more than the model's context"),
        (
            {"eval.attention.length": 100},
            r"eval\.attention\.length: 100 tokens do not hold 4 needles.*; use at least \d+ .*eval\.attention\.needles",
        ),
        # A prompt has 480 tokens, and 32 of `eval.attention.length` = 512 are left for the answer.
        ({"model.window": 479}, WINDOW),
        ({"model.window": 479, "eval.attention.length": 511}, None),
        ({"model.window": 480}, None),
        (
            {"model.attention_logit_bits": 8},
            r"model\.attention_logit_bits=8: the suite 'attention' .*; leave out the suite",
        ),
    ],
)
def test_mistakes_are_named(tmp_path, changes, message):
    run = Run.open(config_of(tmp_path, "diff"), tmp_path / "run")
    config = override(run.config, {name: str(value) for name, value in changes.items()})
    with contextlib.nullcontext() if message is None else pytest.raises(UserError, match=message):
        evals.check_run(dataclasses.replace(run, config=config), ["attention"])


@pytest.mark.long
def test_examples_of_retrieval_are_prompts_with_their_parts(config, tmp_path):
    """Uniform attention gives every part its share of the tokens. The test locates the parts in the rows itself."""
    synthetic = {"pairs": 4, "distractors": 12, "vocab_size": 64, "valid_examples": 200}
    changes = {f"data__synthetic__{name}": value for name, value in synthetic.items()}
    c = config("transformer", data__path="synthetic:retrieval", mesh__fsdp=8, eval__attention__samples=3, **changes)
    run = Run.open(c, tmp_path)
    prompts, rows, seen = attention.prompts_of(run), run.data.valid["valid"], set()
    by_tokens = {tuple(rows[i]["tokens"][:21]): rows[i] for i in range(len(rows))}
    for item in prompts.items:
        prompt = prompts.prompt(item)
        row = by_tokens[tuple(prompt.tokens)]
        [(start, stop)] = prompt.asked
        assert prompt.tokens[start] == prompt.tokens[-1]
        assert prompt.tokens[start + 1] == row["targets"][20]  # The answer.
        assert abs(start / 20 - item.depth) <= 0.125
        keys = [prompt.tokens[other] for other, _ in prompt.others]
        assert len({*keys, prompt.tokens[-1]}) == 4  # Each key is in the row once, and one of them again at its end.
        assert all(prompt.tokens.count(key) == 1 for key in keys)
        assert stop - start == 2
        seen.add(tuple(prompt.tokens))
    assert len(seen) == len(prompts.items) == 15
    with jax.set_mesh(run.mesh):
        params = jax.tree.map(jnp.zeros_like, jax.jit(lambda: init_state(c).params)())
    result = evals.evaluate(run, params, 0, ["attention"])["attention"]
    first = [prompts.prompt(item).asked[0][0] == 0 for item in prompts.items]
    assert result.numbers["answer"] == pytest.approx(np.mean([(2 - at_0) / 21 for at_0 in first]))
    assert result.numbers["question"] == pytest.approx(1 / 21)
    assert sum(result.numbers[part] for part in (*PARTS, "first")) == pytest.approx(1)
    with pytest.raises(UserError, match=r"samples=500: of data\.synthetic\.valid_examples=200 only \d+ have"):
        attention.prompts_of(dataclasses.replace(run, config=override(c, {"eval.attention.samples": "500"})))
    assert attention.prompts_of(dataclasses.replace(run, config=override(c, {"model.window": "21"}))).lengths == [21]
    with pytest.raises(
        UserError,
        match=r"model\.window=20: the suite 'attention' .* the last of the 21 tokens .* others; leave out the suite$",
    ):
        attention.prompts_of(dataclasses.replace(run, config=override(c, {"model.window": "20"})))
