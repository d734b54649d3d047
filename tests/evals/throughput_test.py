"""The suite throughput: the counterpart of a model, and times of both."""

import statistics

import pytest
from conftest import ROOT, replace
from helpers.evals_params import one_device, params_of

from difftx.config.recipes import load_config
from difftx.errors import UserError
from difftx.evals import run as evals
from difftx.evals.throughput import counterpart, pair, rates_in_turn
from difftx.model.abstract import count_parameters
from difftx.training.run import Run


@pytest.mark.parametrize("spec", ["scaling.py:{}-830m", "scaling.py:{}-13.1b", "diff_3b.py:{}"])
def test_the_counterpart_is_the_papers(spec):
    pair = [load_config(f"{ROOT}/configs/{spec.format(name)}", {}) for name in ("diff", "transformer")]
    assert [counterpart(config) for config in pair] == pair[::-1]


def test_counterpart_with_grouped_queries_and_a_specific_kernel(config):
    diff = replace(config(model__num_heads=4, model__num_kv_heads=2), "model", attention_implementation="pallas_gpu")
    other = counterpart(diff).model
    assert (other.num_heads, other.num_kv_heads, other.attention_implementation) == (8, 4, "auto")
    sizes = [count_parameters(model) for model in (diff.model, other)]
    assert sizes[0].projections == sizes[1].projections
    with pytest.raises(UserError, match=r"model.num_heads=1: .* even"):
        counterpart(config("transformer", model__num_heads=1))
    with pytest.raises(UserError, match=r"model.architecture='gated': Table 7 compares"):
        pair(config("gated"))


def test_both_models_are_timed_in_turn():
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    rates = rates_in_turn(calls, range(2), steps=3, tokens=7)
    assert order == list("aaabbbaaabbb")
    assert {name: len(found) for name, found in rates.items()} == {"a": 2, "b": 2}


@pytest.mark.long
def test_the_suite_prints_both_percentages(config, text_file, tmp_path):
    changes = {
        "eval__throughput_rounds": 3,
        "eval__throughput_steps": 1,
        "model__attention_implementation": "reference",
    }
    run = Run.open(config("transformer", data__path=text_file, **changes), tmp_path, one_device())
    result = evals.evaluate(run, params_of(run), 0, ["throughput"])["throughput"]
    for kind in ("forward", "forward_backward"):
        rates = result.details["tokens_per_second"][kind]
        ratio = statistics.median(d / t for d, t in zip(rates["diff"], rates["transformer"], strict=True))
        assert result.numbers[f"{kind}_throughput_drop_percent"] == pytest.approx(100 * (1 - ratio))
        assert result.numbers[f"{kind}_time_rise_percent"] == pytest.approx(100 * (1 / ratio - 1))
        for name in ("diff", "transformer"):
            assert result.numbers[f"{kind}_{name}_tokens_per_second"] == statistics.median(rates[name]) > 0
    assert (result.details["devices"], result.details["rows"]) == (1, 8)
