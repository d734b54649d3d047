"""Explanations of suites, and units, labels and better directions of their numbers, as the suites declare them."""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

from difftx.evals import SUITES, summary
from difftx.evals.result import Measure
from difftx.json_files import schema_error


def measure_of(suite: str, number: str) -> Measure:
    """Return the measure that a suite declares for a number. Other numbers have no unit, direction or label."""
    if suite not in SUITES:  # Its extension is not loaded.
        return Measure("")
    declared = SUITES[suite]
    for form, measure in declared.measures.items():
        if _pattern(form).fullmatch(number):
            return measure
    for inner in SUITES if declared.inner_numbers else ():
        if not number.startswith(f"{inner}_"):  # Do not import this suite.
            continue
        for form, measure in SUITES[inner].measures.items():
            name = declared.inner_numbers.replace("<suite>", inner).replace("<number>", form)
            if _pattern(name).fullmatch(number):
                label = measure.label and number.replace(form, measure.label).replace("_", " ")
                return dataclasses.replace(measure, label=label)
    return Measure("")


@functools.cache
def _pattern(form: str) -> re.Pattern[str]:
    """Return a regular expression for the names that have a form of `Suite.measures`."""
    rest = re.sub(r"^(<[^>]+>_)+", "", form)
    prefix = "" if rest == form else "(.+_)?"
    return re.compile(prefix + ".+".join(map(re.escape, re.split(r"<[^>]+>", rest))))


def measures_of(suite: str, result: Mapping[str, Any]) -> dict[str, Measure]:
    """Return the measure of each number in a result as JSON: the stored one, or else that of the suite."""
    stored = result.get("measures")
    own = {} if stored is None or schema_error(stored, {str: {"unit": str, "label": str}}) else stored
    measures = {name: measure_of(suite, name) for name in result["numbers"]}
    for name, measure in own.items():
        if (better := measure.get("better")) in ("lower", "higher", None):
            measures[name] = Measure(measure["unit"], better, measure["label"])
    return measures


def label_of(number: str, measure: Measure) -> str:
    """Return the label of a number. A suite that runs the suite "loss" has numbers such as `loss_loss`."""
    return measure.label or re.sub(r"^(\w+)_\1(?=_|$)", r"\1", number).replace("_", " ")


def explanation_of(suite: str) -> tuple[str, str]:
    """Return a suite's title and explanation. If it declares none, they are its name and the line of `--list`."""
    if suite not in SUITES:
        return suite, ""
    return SUITES[suite].title or suite, SUITES[suite].explanation or summary(suite)


def format_value(value: Any) -> str:
    """Format a value for a table: integers in full, other numbers with four or five significant digits."""
    if value is None:
        return "–"
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int) or (abs(value) < 1e15 and float(value).is_integer()):
        return f"{int(value):,}"
    return f"{value:,.5g}" if abs(value) < 1e5 else f"{value:.4g}"
