"""Checks of field values that several config groups share."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from difftx.errors import UserError


def require_positive(path: str, group: Any, *names: str) -> None:
    """Raise `UserError` unless the named fields of a group are greater than 0.

    These functions check each entry of a list, and accept None.
    """
    for name, value in _entries(group, names):
        if not value > 0:
            raise UserError(f"{path}.{name}={value} must be positive")


def require_not_negative(path: str, group: Any, *names: str) -> None:
    """Raise `UserError` unless the named fields of a group are at least 0."""
    for name, value in _entries(group, names):
        if not value >= 0:
            raise UserError(f"{path}.{name}={value} must not be negative")


def require_within(path: str, group: Any, name: str, low: float, high: float) -> None:
    """Raise `UserError` unless a field of a group lies between two bounds, which are valid values."""
    for _, value in _entries(group, [name]):
        if not low <= value <= high:
            raise UserError(f"{path}.{name}={value} must lie in {low} … {high}")


def require_size(path: str, group: Any, *names: str) -> None:
    """Raise `UserError` unless the named fields of a group are valid lengths of an array axis, 1 … 2**31 - 1."""
    require_positive(path, group, *names)
    for name, value in _entries(group, names):
        if value >= 2**31:
            raise UserError(f"{path}.{name}={value} must be less than 2**31, the limit for an axis of an array")


def require_seed(path: str, group: Any) -> None:
    """Raise `UserError` unless the field `seed` of a group is valid for numpy, 0 … 2**32 - 1."""
    if not 0 <= group.seed < 2**32:
        raise UserError(f"{path}.seed={group.seed} must lie in 0 … 2**32 - 1")


def require_entries(path: str, group: Any, *names: str) -> None:
    """Raise `UserError` if a named field of a group is an empty list or has an entry twice."""
    for name in names:
        if not getattr(group, name):
            raise UserError(f"{path}.{name}=(): give at least one entry")
    require_distinct(path, group, *names)


def require_distinct(path: str, group: Any, *names: str) -> None:
    """Raise `UserError` if a named field of a group is a list that has an entry twice."""
    for name in names:
        values = getattr(group, name)
        if len(set(values)) < len(values):
            raise UserError(f"{path}.{name}={values}: the entries must differ")


def _entries(group: Any, names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each field, and of each entry of a field that is a list, except None."""
    for name in names:
        value = getattr(group, name)
        for entry in value if isinstance(value, tuple) else (value,):
            if entry is not None:
                yield name, entry


def require_distinct_names(field: str, names: Sequence[str]) -> None:
    """Raise `UserError` if two entries of a list of groups have the same name."""
    for name in names:
        if names.count(name) > 1:
            what = field.rpartition(".")[2]
            raise UserError(f"{field}: {names.count(name)} {what} are named {name!r}; names must differ")


def require_weights(field: str, names: Sequence[str], weights: Sequence[float]) -> None:
    """Raise `UserError` unless each name has a finite weight of at least 0, and at least one weight is above 0."""
    if len(weights) != len(names):
        raise UserError(f"{field}={tuple(weights)}: {len(weights)} weights for the {len(names)} data.sources")
    if not all(0 <= weight < math.inf for weight in weights) or not sum(weights) > 0:
        raise UserError(f"{field}={tuple(weights)}: weights must not be negative, and one must be positive")


def divisor_below(bound: int, number: int) -> int:
    """Return the largest divisor of `number` that is at most `bound`, or 1 if `bound` is below 1."""
    return max(n for n in divisors(number) if n <= max(bound, 1))


def divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})
