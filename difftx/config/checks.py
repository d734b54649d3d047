"""Checks of field values that several config groups share."""

import math
from collections.abc import Sequence

from difftx.errors import UserError


def require_positive(group: str, name: str, value: float) -> None:
    """Raise `UserError` unless the value is greater than 0."""
    if not value > 0:
        raise UserError(f"{group}.{name}={value} must be positive")


def require_not_negative(group: str, name: str, value: float) -> None:
    """Raise `UserError` unless the value is at least 0."""
    if not value >= 0:
        raise UserError(f"{group}.{name}={value} must not be negative")


def require_size(group: str, name: str, value: int) -> None:
    """Raise `UserError` unless the value is a valid length of an array axis, 1 … 2**31 - 1."""
    require_positive(group, name, value)
    if value >= 2**31:
        raise UserError(f"{group}.{name}={value} must be less than 2**31, as the axis of an array is")


def require_seed(group: str, seed: int) -> None:
    """Raise `UserError` unless the seed is valid for numpy, 0 … 2**32 - 1."""
    if not 0 <= seed < 2**32:
        raise UserError(f"{group}.seed={seed} must lie in 0 … 2**32 - 1")


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
