"""The suite quantize: rounded attention, against a reference implementation."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from conftest import replace
from helpers.evals_params import one_device, random_params
from helpers.inference_models import TENSOR, full_logits, language_model, prompts_of

from difftx.config.build import override
from difftx.errors import UserError
from difftx.evals import run as evals
from difftx.evals.quantize import quantized
from difftx.model.abstract import parameter_metadata
from difftx.training.fit import fit
from difftx.training.run import Run


def open_run(config, text_file, tmp_path, **changes):
    return Run.open(config(data__path=text_file, eval__loss_tokens=256, **changes), tmp_path, one_device())


OPTIONS = {"model__qk_norm": "true", "model__logit_soft_cap": 2.0, "model__window": 3, "model__window_pattern": "LG"}


@pytest.mark.parametrize("options", [{}, pytest.param(OPTIONS, marks=pytest.mark.long)], ids=["plain", "options"])
def test_sixteen_bits_change_nothing_and_two_equal_the_reference(config, text_file, tmp_path, options):
    """16 bits give the suites' usual numbers, bit for bit. 2 bits give the loss of the reference implementation."""
    changes = {"eval__quantize__bits": "16,2", "eval__quantize__suites": "loss,recall"}
    run = open_run(config, text_file, tmp_path, **changes, **options)
    params = random_params(run)
    plain = evals.evaluate(run, params, 0, ["loss", "recall"])
    result = evals.evaluate(run, params, 0, ["quantize"])["quantize"]
    for suite, of_suite in plain.items():
        for name, value in of_suite.numbers.items():
            assert result.numbers[f"{suite}_{name}_16_bits"] == value
    model = {"model.attention_logit_bits": "2", "model.attention_implementation": "reference"}
    by_oracle = dataclasses.replace(run, config=override(run.config, model))
    expected = evals.evaluate(by_oracle, params, 0, ["loss"])["loss"].numbers["loss"]
    assert result.numbers["loss_loss_2_bits"] == pytest.approx(expected, rel=1e-5)
    assert abs(expected / plain["loss"].numbers["loss"] - 1) > 1e-3
    chart = next(chart for chart in result.charts if chart.name == "quantize_loss_loss")
    assert (chart.series[0].x, chart.series[0].y[1]) == ([2.0, 16.0], plain["loss"].numbers["loss"])
    names = {f"quantize_{suite}_{name}" for suite, of_suite in plain.items() for name in of_suite.numbers}
    assert {chart.name for chart in result.charts} == {name for name in names if not name.endswith("_tokens")}


@pytest.mark.long
def test_operands_are_rounded(config, text_file, tmp_path):
    """The suite sets the field that tests/model/rounded_test.py compares with an oracle."""
    changes = {"eval__quantize__bits": "16,4", "eval__quantize__rounded": "operands", "eval__quantize__suites": "loss"}
    run = open_run(config, text_file, tmp_path, **changes)
    params = random_params(run)
    result = evals.evaluate(run, params, 0, ["quantize"])["quantize"]
    rounded = dataclasses.replace(run, config=replace(run.config, "model", attention_operand_bits=4))
    for bits, of_run in (("16", run), ("4", rounded)):
        expected = evals.evaluate(of_run, params, 0, ["loss"])["loss"].numbers["loss"]
        assert result.numbers[f"loss_loss_{bits}_bits"] == expected
    assert abs(result.numbers["loss_loss_4_bits"] / result.numbers["loss_loss_16_bits"] - 1) > 1e-4
    assert result.details["rounded"] == "operands"


@pytest.mark.long
def test_products_are_rounded(config, text_file, tmp_path):
    """Weights alone are compared with NumPy's rounding, and other precisions with runs that have them as a field.

    tests/model/products_test.py compares the products themselves with NumPy.
    """
    names = ["int8_weights", "int4_weights", "int8", "int8_static", "fp8", "fp8_static"]
    changes = {"eval__quantize__rounded": "products", "eval__quantize__suites": "loss", "model__num_layers": 3}
    run = open_run(config, text_file, tmp_path, eval__quantize__calibration_tokens=256, **changes)
    params = random_params(run)
    result = evals.evaluate(run, params, 0, ["quantize"])["quantize"]
    found = {name: result.numbers[f"loss_loss_{name}"] for name in ["16_bits", *names]}

    def loss(params, **model):
        changed = dataclasses.replace(run, config=replace(run.config, "model", **model))
        return evals.evaluate(changed, params, 0, ["loss"])["loss"].numbers["loss"]

    assert found["16_bits"] == loss(params)
    for name in ("int8", "fp8"):
        assert found[name] == loss(params, matmul=name)
    with jax.set_mesh(run.mesh):
        for name, levels, group in (("int8_weights", 127, 64), ("int4_weights", 7, 128)):
            assert found[name] == pytest.approx(loss(rounded_by_numpy(run, params, levels, group)), rel=1e-6)
    assert abs(found["int4_weights"] / found["16_bits"] - 1) > 1e-4
    for name in ("int8", "fp8"):
        assert found[f"{name}_static"] not in (found[name], found["16_bits"])
        assert found[f"{name}_static"] == pytest.approx(found["16_bits"], rel=0.05)
    ranges_LP, errors = np.array(result.details["ranges"]), result.details["errors"]
    assert ranges_LP.shape == (3, 7)
    np.testing.assert_array_equal(ranges_LP[:, [0, 0, 4]], ranges_LP[:, [1, 2, 5]])  # Q, K and V, and gate and up.
    assert len(set(ranges_LP.ravel())) == 3 * 4
    for low, high in (("int8_weights", "int8"), ("int8", "fp8"), ("fp8", "int4_weights")):
        assert (np.array(errors[low]) < errors[high]).all()
    charts = {chart.name: chart for chart in result.charts}
    lines = {line.name: (line.x, line.y) for line in charts["quantize_loss_loss"].series}
    weights = [found[name] for name in ("int4_weights", "int8_weights", "16_bits")]
    assert lines["weights only"] == ([4.0, 8.0, 16.0], weights)
    assert len(lines) == 5
    assert {"quantize_errors", "quantize_outliers"} <= set(charts)


def rounded_by_numpy(run, params, levels, group):
    """Return parameters with rounded matrices of the layers. A scale has `group` inputs or fewer, as they divide."""
    axes = parameter_metadata(run.config.model, "matrix_axes", None)

    def one(weight_L, matrix_axes):
        if matrix_axes is None:
            return weight_L
        inputs = len(matrix_axes[0])
        values = np.asarray(weight_L)
        count = int(np.prod(values.shape[1 : 1 + inputs]))
        size = math.gcd(count, group) if levels == 7 else count
        groups = values.reshape(len(values), count // size, size, -1)
        scale = np.abs(groups).max(2, keepdims=True) / np.float32(levels)
        rounded = (np.rint(groups / scale) * scale).reshape(values.shape)
        return jax.device_put(rounded, weight_L.sharding)

    blocks = jax.tree.map(one, params["blocks"], axes["blocks"], is_leaf=lambda leaf: leaf is None)
    return params | {"blocks": blocks}


def test_kernel_and_config_fields(config):
    named = replace(config(), "model", attention_implementation="cudnn")
    for bits, implementation in ((16, "cudnn"), (4, "auto")):
        model = quantized(named, bits).model
        assert model.attention_implementation == implementation
        assert model.attention_logit_bits == (None if bits == 16 else 4)
    both = config(eval__quantize__suites="loss,recall")
    fields = {"quantize", "loss_tokens", "recall_max_bigram_count", "bigrams_path"}
    assert set(evals.fields_of(both, "quantize")) == fields
    with pytest.raises(UserError, match=r"attention_implementation='cudnn' does not serve quantised .*; use one of"):
        fit(replace(named, "model", attention_logit_bits=4))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eval__quantize__suites": "los"}, r"eval\.quantize\.suites: 'los' is not a suite to .* Did you mean 'loss'"),
        ({"eval__quantize__suites": "quantize"}, r"eval\.quantize\.suites: 'quantize' is not a suite to quantise"),
        ({"eval__quantize__suites": "exact_match"}, "suite 'exact_match': no data path is a synthetic task"),
        ({"model__attention_logit_bits": "16"}, r"model\.attention_logit_bits=16 must lie in 2 … 15"),
    ],
)
def test_mistakes_are_one_line_with_a_fix(config, text_file, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        evals.check_run(open_run(config, text_file, tmp_path, **changes), ["quantize"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("architecture", "field", "granularity"),
    [
        ("diff", "attention_logit_bits", "token"),
        ("transformer", "attention_logit_bits", "query"),
        ("diff", "attention_operand_bits", "query"),
    ],
)
def test_cache_and_mesh_do_not_change_the_logits(config, mesh_of, architecture, field, granularity):
    """Compare a prefill on eight devices, which shard the heads, with a forward pass on one device."""
    from difftx.inference import decode

    changes = {"model__num_heads": 4, "model__attention_logit_granularity": granularity, f"model__{field}": 4}
    lm = language_model(config, mesh_of(**TENSOR), architecture, **changes)
    prompts = prompts_of([40, 33, 64, 90, 1, 7, 12, 50])
    with jax.set_mesh(lm.mesh):
        rows = decode.prefill(lm, prompts, seeds=[0] * 8, limits=[0] * 8)
        hidden_BD = np.asarray(rows.x_BD)
    actual_BV = hidden_BD @ np.asarray(lm.params["embedding_VD"]).T
    tokens_BT, length_B, _ = decode.padded(prompts, lm.mesh, lm.config.model.cache)
    expected_BV = full_logits(lm, mesh_of(), tokens_BT)[np.arange(8), length_B - 1]
    unquantized = dataclasses.replace(lm, config=replace(lm.config, "model", **{field: None}))
    other_BV = full_logits(unquantized, mesh_of(), tokens_BT)[np.arange(8), length_B - 1]
    # A number between two levels may be rounded either way, so only most rows must agree.
    errors_B = np.abs(actual_BV - expected_BV).max(axis=1)
    assert np.median(errors_B) < 1e-5
    assert np.median(np.abs(other_BV - expected_BV).max(axis=1)) > 1e-2
