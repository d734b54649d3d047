"""Cases that only `make test-long` runs."""

from collections.abc import Collection, Iterable

import pytest

PAPER = ("diff", "transformer")  # The architectures of arXiv 2410.05258.


def long_except[T](cases: Iterable[T], kept: Collection[T] = PAPER) -> list:
    """Return the cases, of which those that are not in `kept` are long."""
    return [case if case in kept else pytest.param(case, marks=pytest.mark.long) for case in cases]
