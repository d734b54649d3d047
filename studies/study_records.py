"""Records of runs in docs/results.json, means over seeds with intervals, and the parts that all tables share.

Intervals are 95 % Student's t intervals over seeds. A `number` is a key of a record's "numbers", such as
"loss/bits_per_byte".
"""

import collections
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import scipy.stats

from difftx.errors import UserError

CONFIDENCE = 0.95
MAX_COMMANDS = 6  # Largest number of commands below a table. If there are more, only the first one is shown.
REFERENCE = "transformer"
BIMODAL_TASKS = {"recall", "recall-easy"}
SOLVED_TASK = "retrieval"  # Key, in the details of the suite `exact_match`, of the rows that ask for one key.
SOLVED_ACCURACY = 0.9  # A run has solved recall or recall-easy if its accuracy on these rows is at least this.
SOLVED_NUMBER = f"exact_match/{SOLVED_TASK}"
TEST_LOSS = "test/loss_bits_per_byte"  # Loss on the test text.
VALIDATION_LOSS = "loss/bits_per_byte"
STEP_TIME = "step_milliseconds"  # Time of a training step; studies/step_times.py has a record for each round.
WHOLE_CACHE = "whole"  # Name in the suite `cache` of the cache without compression.
CACHE_SIZE_PREFIX = "cache/bytes_per_token_"  # The number of a cache's bytes per token is this and the cache's name.

type Record = dict[str, Any]  # A run in docs/results.json; `_record` in studies/results.py lists the fields.


class Estimate(NamedTuple):
    """A mean over seeds and its interval."""

    mean: float
    half_width: float | None  # Half of the interval's width; None for a single seed.

    def __str__(self) -> str:
        decimals = 3 if abs(self.mean) < 10 else max(0, 3 - int(math.log10(abs(self.mean))))
        if self.half_width and 0 < round(self.half_width, decimals) == round(abs(self.mean), decimals):
            decimals += 1  # Otherwise a reader could not tell whether the interval contains zero.
        interval = "" if self.half_width is None else f" ± {self.half_width:.{decimals}f}"
        return f"{self.mean:.{decimals}f}{interval}"


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean and the interval of a sample."""
    count = len(values)
    if count < 2:
        return Estimate(values[0], None)
    quantile = scipy.stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)
    return Estimate(statistics.fmean(values), float(quantile * statistics.stdev(values) / math.sqrt(count)))


def signed(value: Estimate) -> str:
    """Return an estimate as text, with a plus sign if it is positive."""
    return f"{'+' if value.mean > 0 else ''}{value}"


def one_per_seed(records: Iterable[Record], number: str, what: str) -> dict[int, float]:
    """Return seed → number, or raise `UserError` if two runs of `what` have the same seed."""
    found: dict[int, float] = {}
    for record in records:
        if (seed := record["seed"]) in found:
            raise UserError(f"{what}: two runs have the seed {seed}; collect only one of them")
        found[seed] = record["numbers"][number]
    return found


def numbers_by_seed(records: Iterable[Record], task: str, arm: str, number: str) -> dict[int, float]:
    """Return seed → number, for the runs of one task and arm."""
    found = (r for r in records if (r["task"], r["arm"]) == (task, arm) and number in r["numbers"])
    return one_per_seed(found, number, f"task {task}, arm {arm}")


def differences_within_runs(
    records: Sequence[Record], task: str, arm: str, number: str, reference_number: str
) -> list[float]:
    """Return one number of an arm minus another number of the same run, in the order of the seeds."""
    own, other = (numbers_by_seed(records, task, arm, name) for name in (number, reference_number))
    return [own[seed] - other[seed] for seed in sorted(own)]


def estimates_by_rate(records: Sequence[Record], task: str, arm: str, number: str) -> dict[float, Estimate]:
    """Return learning rate → mean and interval of an arm's number over the seeds, in the order of the rates."""
    found: dict[float, list[float]] = collections.defaultdict(list)
    for r in records:
        if (r["task"], r["arm"]) == (task, arm):
            found[r["learning_rate"]].append(r["numbers"][number])
    return {rate: estimate(found[rate]) for rate in sorted(found)}


def has_solved(record: Record) -> bool:
    """Return whether a run of recall has solved the task."""
    return record["numbers"][SOLVED_NUMBER] >= SOLVED_ACCURACY


def arm_outcomes(records: Sequence[Record], task: str, arm: str) -> list[bool]:
    """Return for each of an arm's runs whether it has solved the task."""
    return [has_solved(r) for r in records if (r["task"], r["arm"]) == (task, arm)]


def solved_text(records: Sequence[Record], task: str, arm: str) -> str:
    """Return the number of an arm's runs that have solved the task, such as "2 of 3"."""
    return count_text(arm_outcomes(records, task, arm))


def count_text(outcomes: Sequence[bool]) -> str:
    """Return how many of the outcomes are true, such as "2 of 3"."""
    return f"{sum(outcomes)} of {len(outcomes)}"


def cache_names(records: Sequence[Record], task: str) -> list[str]:
    """Return the names of the caches that the suite `cache` measured, the whole one first, then by falling size."""
    numbers = next(r["numbers"] for r in records if r["task"] == task)
    sizes = {
        name.removeprefix(CACHE_SIZE_PREFIX): size
        for name, size in numbers.items()
        if name.startswith(CACHE_SIZE_PREFIX)
    }
    return sorted(sizes, key=lambda name: (name != WHOLE_CACHE, -sizes[name]))


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, without a line feed at its end."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def provenance(records: Sequence[Record]) -> str:
    """Return the text below a table: commands, number of runs, tokens, seeds, time, hardware, commits and JAX versions.

    It begins with the blank line that ends the table.
    """
    seeds = sorted({r["seed"] for r in records})
    commits = dict.fromkeys(r["commit"][:7] + "+" * r["commit"].endswith("+") for r in records)
    hardware = dict.fromkeys(r["hardware"] for r in records)
    minutes = sum(r["wall_seconds"] for r in records) / 60
    tokens = dict.fromkeys(f"{r['tokens']:,}" for r in records)
    commands = list(dict.fromkeys(r["sweep"] for r in records))
    if len(commands) > MAX_COMMANDS:
        commands[1:] = [f"# and {len(commands) - 1} sweeps with other values"]
    sweeps = "\n".join(f"    {command}" for command in commands)
    return (
        f"\n\n{sweeps}\n\n{len(records)} runs of {' or '.join(tokens)} tokens, {'seeds' if len(seeds) > 1 else 'seed'} "
        f"{', '.join(map(str, seeds))}; {minutes:.0f} minutes of {' and '.join(hardware)} in all; "
        f"commit {', '.join(commits)}; jax {', '.join(dict.fromkeys(r['jax'] for r in records))}."
    )
