"""Tables that benchmarks print to a terminal or a file. This module has no command."""

import statistics
import sys
from collections.abc import Sequence
from typing import Any

import rich.console
import rich.table


def numbers_table(title: str, columns: Sequence[str], **options: Any) -> rich.table.Table:
    """Return an empty table with a first column of names and further columns of right-aligned numbers.

    `options` are further arguments of `rich.table.Table`.
    """
    table = rich.table.Table(title=title, **options)
    names, *numbers = columns
    table.add_column(names)
    for column in numbers:
        table.add_column(column, justify="right")
    return table


def console(width: int) -> rich.console.Console:
    """Return a console as wide as the terminal, or of `width` characters where the output is a file."""
    return rich.console.Console(width=None if sys.stdout.isatty() else width)


def median_and_range(values: Sequence[float], format_spec: str) -> str:
    """Return the median and the range of measured values, such as "1.20 (1.10 … 1.30)" for the format ".2f"."""
    median, least, most = (
        format(value, format_spec) for value in (statistics.median(values), min(values), max(values))
    )
    return f"{median} ({least} … {most})"
