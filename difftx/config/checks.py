"""Helpers for checks in config groups: distinct names, and divisors for the hints in error messages."""

import math
from collections.abc import Sequence

from difftx.errors import UserError


def require_distinct_names(field: str, names: Sequence[str]) -> None:
    """Raise `UserError` if two entries of a list of groups have the same name."""
    for name in names:
        if names.count(name) > 1:
            what = field.rpartition(".")[2]
            raise UserError(f"{field}: {names.count(name)} {what} are named {name!r}; names must differ")


def largest_divisor_up_to(bound: int, number: int) -> int:
    """Return the largest divisor of `number` that is at most `bound`, or 1 if `bound` is below 1."""
    return max(n for n in divisors(number) if n <= max(bound, 1))


def divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})
