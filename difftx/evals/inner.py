"""Helpers for suites that run other suites with changed configs, such as `quantize` and `cache`."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from difftx.config import Config
from difftx.errors import UserError, did_you_mean
from difftx.evals import SUITES
from difftx.evals.evaluation import Evaluation
from difftx.evals.result import LineChart, Number, Series

type Numbers = Mapping[str, Number]


def evaluate_inner(
    evaluation: Evaluation,
    suites: Sequence[str],
    configs: Mapping[str, Config],
    lines: Mapping[str, Mapping[str, float]],
    **texts: str,
) -> tuple[dict[str, Number], list[LineChart]]:
    """Run suites with each config. Return the numbers, and a chart for each number that depends on the config.

    `lines` maps each line of the charts to its configs and their x-values, in ascending order. A line needs at least
    two configs. The line "" is shown with the name of its suite. `texts` are the `prefix` of the chart names, the end
    of the `title`, and the `x_label`.
    """
    # Items with the same config are adjacent, so their suites share a forward pass over the validation data.
    items = [(suite, config) for config in configs for suite in suites]

    @functools.lru_cache(maxsize=1)
    def with_config(name: str) -> Evaluation:
        run = dataclasses.replace(evaluation.run, config=configs[name])
        return Evaluation(run, evaluation.params, evaluation.work)

    def answer(items: Sequence[tuple[str, str]]) -> list[dict[str, dict[str, Any]]]:
        found = [SUITES[suite].evaluate(with_config(config)).numbers for suite, config in items]
        return [{name: {"value": float(n), **vars(n)} for name, n in numbers.items()} for numbers in found]

    by_suite: dict[str, dict[str, Numbers]] = {}
    for (suite, config), numbers in evaluation.answers(items, answer, what="suites by config", batch_items=1):
        by_suite.setdefault(suite, {})[config] = {name: Number(**stored) for name, stored in numbers.items()}
    numbers, charts = {}, []
    for suite, by_config in by_suite.items():
        for config, of_suite in by_config.items():
            numbers |= named(suite, of_suite, config)
        charts += _charts(by_config, suite, lines, **texts)
    return numbers, charts


def named(suite: str, numbers: Numbers, ending: str = "") -> dict[str, Number]:
    """Return the numbers of an inner suite with their names and labels in the outer suite's result.

    Put the suite's name before each label, unless the label already begins with it, as for the loss in the suite
    `loss`.
    """
    words = suite.replace("_", " ")
    found = {}
    for name, number in numbers.items():
        label = number.label if f"{number.label} ".startswith(f"{words} ") else f"{words} {number.label}"
        ended = f"_{ending}" if ending else ""
        found[f"{suite}_{name}{ended}"] = number.but(label=label + ended.replace("_", " "))
    return found


def require_quantizable(field: str, names: Sequence[str]) -> Sequence[str]:
    """Return `names`. Raise `UserError` if one is not a suite that can run with a quantised model."""
    quantizable = [name for name, suite in SUITES.items() if suite.quantizable]
    for name in names:
        if name not in quantizable:
            raise UserError(f"{field}: {name!r} is not a suite to quantise.{did_you_mean(name, quantizable)}")
    return names


def _charts(
    by_config: Mapping[str, Numbers], suite: str, lines: Mapping[str, Mapping[str, float]], **texts: str
) -> list[LineChart]:
    charts = []
    for name, number in next(iter(by_config.values())).items():
        if len({numbers[name] for numbers in by_config.values()}) > 1:  # Numbers of tokens, for example, are constant.
            label = name.replace("_", " ")
            series = [
                Series(name=line or suite, x=list(x_of.values()), y=[by_config[config][name] for config in x_of])
                for line, x_of in lines.items()
                if len(x_of) > 1
            ]
            title = f"{label if name == suite else f'{suite}: {label}'} {texts['title']}"
            labels = {"x_label": texts["x_label"], "y_label": number.axis}
            charts.append(LineChart(name=f"{texts['prefix']}_{suite}_{name}", title=title, series=series, **labels))
    return charts
