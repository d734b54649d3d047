"""Arms of a comparison: the runs of a report, grouped by everything except their seeds."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from difftx.analysis.differences import Difference, over_pairs, over_seeds
from difftx.config.fields import Effect, Flag
from difftx.report.runs import RunRecord, data_content, different_tokenizers
from difftx.training.resume import Change, changed_fields

# Two numbers of parameters or tokens with at most this ratio count as equal. A differential model has slightly more
# parameters than its Transformer: λ vectors, and gains of head norms.
EQUAL_SIZES = 1.02

type Run = tuple[tuple[int, int], float]  # Seeds of a run, and one of its numbers.


@dataclasses.dataclass(frozen=True, eq=False)
class Arm:
    """Runs that only differ in their seeds, and in fields that affect results at most by rounding."""

    name: str
    runs: list[RunRecord]

    @property
    def title(self) -> str:
        """The name, plus the number of runs if their mean is shown."""
        return self.name if len(self.runs) == 1 else f"{self.name}, mean of {len(self.runs)} runs"

    def values(self, number: str) -> list[float]:
        """Return a number from the last validation of each run. Skip runs where it is missing or not finite."""
        return [value for run in self.runs if (value := run.last_value(number)) is not None]

    def mean(self, number: str) -> float | None:
        """Return the mean of `values`, or None if the number is missing or not finite in some run."""
        values = self.values(number)
        return float(np.mean(values)) if len(values) == len(self.runs) else None


def arms_of(runs: Sequence[RunRecord]) -> list[Arm]:
    """Group runs into arms. An arm of several runs is named after its architecture, if that name is unique."""
    groups: list[list[RunRecord]] = []

    def differ_in_seeds_only(one: RunRecord, other: RunRecord) -> bool:
        # Equal configs may name files that have changed.
        of_same_data = not different_tokenizers([one, other]) and data_content(one) == data_content(other)
        return of_same_data and not training_changes(one, other)

    for run in runs:
        group = next((group for group in groups if all(differ_in_seeds_only(other, run) for other in group)), [])
        if not group:
            groups.append(group)
        group.append(run)
    architectures = [group[0].config.model.architecture for group in groups]
    return [
        Arm(architecture if len(group) > 1 and architectures.count(architecture) == 1 else group[0].name, group)
        for group, architecture in zip(groups, architectures, strict=True)
    ]


def over_runs(first: Sequence[Run], second: Sequence[Run]) -> tuple[Difference | None, str]:
    """Return an interval for the second arm minus the first, and what it covers; or None, and why there is none.

    Each run is a pair of its seeds and a number. If both arms have the same seeds, their runs are compared in pairs.
    """
    by_seeds = dict(first), dict(second)
    if min(map(len, (first, second))) < 2 or [*map(len, by_seeds)] != [len(first), len(second)]:
        return None, "an interval over seeds needs at least two different seeds of each"
    if by_seeds[0].keys() == by_seeds[1].keys():
        pairs = [(value, by_seeds[1][seeds]) for seeds, value in first]
        how = f"over {len(pairs)} pairs of runs with equal seeds"
        return over_pairs(*zip(*pairs, strict=True)), how
    how = f"over {len(first)} and {len(second)} seeds, which are not pairs"
    return over_seeds([*by_seeds[0].values()], [*by_seeds[1].values()]), how


def seeds_of(run: RunRecord) -> tuple[int, int]:
    """Return the seeds of weights and data."""
    return run.config.train.seed, run.config.data.seed


def training_changes(first: RunRecord, second: RunRecord) -> list[Change]:
    """Return the config fields in which two runs differ, without seeds and fields that do not affect training.

    If the seeds differ, also leave out the run that each one started from, because it may have the same seed.
    """
    changes = [change for change in changed_fields(first.config, second.config) if not change.is_neutral]
    has_other_seed = any(change.has(Flag.SEED) for change in changes)
    return [
        change
        for change in changes
        if not change.has(Flag.SEED)
        and not (change.has(Effect.START) and has_other_seed and None not in (change.old, change.new))
    ]
