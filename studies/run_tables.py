"""Values for sentences about single runs: how many runs meet conditions, and in which range their numbers lie.

This module has no command: `python studies/results.py render` calls the functions in `PLACEHOLDERS`. A condition is a
name, an operator (`=`, `!=`, `<`, `>`, or `~` for a regular expression) and a value without spaces, such as `arm=diff`
or `lambda/1<-1.8`. A name is a field of a record, one of its numbers or changes, or a key of `DERIVED`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from studies.controls_tables import cell_numbers_by_seed, cell_of
from studies.study_records import TEST_LOSS, Record, estimate, has_solved

DERIVED: Mapping[str, Callable[[Record], Any]] = {
    "solved": lambda record: "yes" if has_solved(record) else "no",
    "tokens_per_parameter": lambda record: round(record["tokens"] / record["parameters"]),
}


def value_of(record: Record, name: str) -> Any:
    """Return what a record has under a name, or "" for a field that its run did not change."""
    if name in DERIVED:
        return DERIVED[name](record)
    return next((of[name] for of in (record, record["numbers"]) if name in of), record["changes"].get(name, ""))


def meets(record: Record, condition: str) -> bool:
    """Return whether a run meets a condition."""
    name, operator, wanted = re.split(r"(!=|[=<>~])", condition, maxsplit=1)
    value = value_of(record, name)
    if operator == "~":
        return re.search(wanted, str(value)) is not None
    if operator in ("<", ">"):
        return value < float(wanted) if operator == "<" else value > float(wanted)
    is_equal = value == float(wanted) if isinstance(value, int | float) else value == wanted
    return is_equal == (operator == "=")


def chosen(records: Sequence[Record], conditions: Sequence[str]) -> list[Record]:
    """Return the runs that meet all conditions. A run that two studies share counts once."""
    distinct = {repr(record): record for record in records}.values()
    return [record for record in distinct if all(meets(record, condition) for condition in conditions)]


def count_text(records: Sequence[Record], *conditions: str) -> str:
    """Return how many runs meet the conditions."""
    return str(len(chosen(records, conditions)))


def range_text(records: Sequence[Record], name: str, *conditions: str) -> str:
    """Return the smallest and the largest value under a name, with three digits, or the only one."""
    values = [value_of(record, name) for record in chosen(records, conditions)]
    return " to ".join(dict.fromkeys(f"{value:.3g}" for value in (min(values), max(values))))


def more_parameters_text(records: Sequence[Record], arm: str, reference: str) -> str:
    """Return how many more parameters an arm has than another one, in per cent."""
    own, other = (next(r["parameters"] for r in records if r["arm"] == name) for name in (arm, reference))
    return f"{100 * (own / other - 1):.0f}"


def core_hours_text(records: Sequence[Record]) -> str:
    """Return the time of all runs, of which each used one core."""
    return f"{sum(record['wall_seconds'] for record in chosen(records, ())) / 3600:.0f}"


def smallest_text(records: Sequence[Record], arm: str) -> str:
    """Return the cell of an arm with the smallest mean loss."""
    cells = dict.fromkeys(cell_of(record) for record in records if record["arm"] == arm)
    return min(cells, key=lambda cell: estimate([*cell_numbers_by_seed(records, cell, TEST_LOSS).values()]).mean)


PLACEHOLDERS = {
    "count": count_text,
    "range": range_text,
    "more_parameters": more_parameters_text,
    "core_hours": core_hours_text,
    "smallest": smallest_text,
}
