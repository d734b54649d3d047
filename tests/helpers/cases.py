"""Marks of cases that only `make test-long` or `make test-exhaustive` runs."""

from collections.abc import Collection, Iterable

import pytest

PAPER = ("diff", "transformer")  # The architectures of arXiv 2410.05258.


def marked[T](cases: Iterable[T], *, fast: Collection[T] = PAPER, exhaustive: Collection[T] = ()) -> list:
    """Return the cases of a test, each a value or a tuple of values, with marks.

    Cases in `fast` have no mark. Of the others, those in `exhaustive` are marked exhaustive, and the rest long.
    """

    def with_mark(case: T):
        mark = pytest.mark.exhaustive if case in exhaustive else pytest.mark.long
        return pytest.param(*case if isinstance(case, tuple) else (case,), marks=mark)

    return [case if case in fast else with_mark(case) for case in cases]
