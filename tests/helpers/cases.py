"""Cases that only `make test-long` runs."""

from collections.abc import Collection, Iterable

import pytest

PAPER = ("diff", "transformer")  # The architectures of arXiv 2410.05258.


def long_except[T](cases: Iterable[T], kept: Collection[T] = PAPER) -> list:
    """Return the cases, each a value or a tuple of values. Those that are not in `kept` are long."""

    def long(case: T):
        return pytest.param(*case if isinstance(case, tuple) else (case,), marks=pytest.mark.long)

    return [case if case in kept else long(case) for case in cases]
