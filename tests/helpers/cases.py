"""Cases that only `make test-long` or `make test-exhaustive` runs."""

from collections.abc import Collection, Iterable

import pytest

PAPER = ("diff", "transformer")  # The architectures of arXiv 2410.05258.


def long_except[T](cases: Iterable[T], kept: Collection[T] = PAPER, exhaustive: Collection[T] = ()) -> list:
    """Return the cases, each a value or a tuple of values. Those that are not in `kept` are long or `exhaustive`."""

    def marked(case: T):
        mark = pytest.mark.exhaustive if case in exhaustive else pytest.mark.long
        return pytest.param(*case if isinstance(case, tuple) else (case,), marks=mark)

    return [case if case in kept else marked(case) for case in cases]
