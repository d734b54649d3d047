"""The first sentences of a report: which model has the lower validation loss, by how much, and how certain that is."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from difftx.analysis.differences import FEWEST_BLOCKS, Difference, over_blocks, over_pairs, over_seeds
from difftx.files import schema_error
from difftx.model.abstract import count_parameters
from difftx.report.runs import METRIC_UNITS, Metric, RunRecord, different_tokenizers
from difftx.training.resume import changed_fields

# Runs of one arm have equal values in these groups of the config, except in the fields of SEEDS.
TRAINING_GROUPS = ("model", "data", "optimizer", "train")
SEEDS = ("train.seed", "data.seed")
EQUAL_SIZES = 0.02  # Largest relative difference of parameters or tokens that counts as equal.


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A headline, and the sentences below it: the uncertainty first, and then what limits the comparison."""

    headline: str
    details: list[str]


@dataclasses.dataclass(frozen=True)
class Arm:
    """Runs that differ only in their seeds, with their last validation losses."""

    name: str
    runs: list[RunRecord]
    losses: list[float]

    @property
    def mean(self) -> float:
        return float(np.mean(self.losses))

    @property
    def of_seeds(self) -> dict[tuple[int, int], float]:
        """The seeds of weights and data → the loss. Several runs of the same seeds have one entry."""
        seeds = [(run.config.train.seed, run.config.data.seed) for run in self.runs]
        return dict(zip(seeds, self.losses, strict=True))


def verdict(runs: Sequence[RunRecord], metric: Metric) -> Verdict:
    """Compare the arms by the last validation in `metric`. All other arms are compared with the first one."""
    unit = METRIC_UNITS[metric]
    missing = [run.name for run in runs if run.last_validation(metric) is None]
    if missing:
        what = "loss" if metric == "loss" else f"loss in {unit}"
        fix = "Run difftx eval --suite=loss on each of them."
        return Verdict(f"No verdict: there is no finite validation {what} of {_listed(missing)} yet.", [fix])
    arms = _arms(runs, metric)
    limits = _limits(arms)
    if len(arms) == 1:
        (arm,) = arms
        spread = f", the mean over {len(runs)} seeds ({min(arm.losses):.4g} to {max(arm.losses):.4g})" * (len(runs) > 1)
        headline = f"{arm.name} reaches a validation loss of {arm.mean:.4g} {unit}{_text(runs)}{spread}."
        return Verdict(headline, ["There is no other model to compare it with.", *limits])
    if pair := _different_text(runs):
        headline = f"No verdict: {pair[0]} and {pair[1]} were validated on different text."
        return Verdict(headline, ["Losses on different text cannot be compared.", *limits])
    first, *others = arms
    found = [_compared(first, other, metric) for other in others]
    if len(found) == 1:
        headline, uncertainty = found[0]
        return Verdict(headline, [uncertainty, *limits])
    best = min(arms, key=lambda arm: arm.mean)
    headline = f"Of {len(arms)} models, {best.name} has the lowest validation loss{_text(runs)}."
    return Verdict(headline, [*(f"{sentence} {uncertainty}" for sentence, uncertainty in found), *limits])


def _arms(runs: Sequence[RunRecord], metric: Metric) -> list[Arm]:
    """Group runs that differ only in their seeds. An arm has its architecture's name, or the name of its first run."""
    groups: list[list[RunRecord]] = []
    for run in runs:
        group = next((group for group in groups if _differ_in_seeds_only(group[0], run)), None)
        if group is None:
            groups.append([run])
        else:
            group.append(run)
    architectures = [group[0].config.model.architecture for group in groups]
    arms = []
    for group, architecture in zip(groups, architectures, strict=True):
        is_unique = len(group) > 1 and architectures.count(architecture) == 1
        losses = [loss for run in group if (last := run.last_validation(metric)) for loss in last[1:]]
        arms.append(Arm(architecture if is_unique else group[0].name, group, losses))
    return arms


def _differ_in_seeds_only(first: RunRecord, second: RunRecord) -> bool:
    if different_tokenizers([first, second]):  # Equal configs may name a file that has changed.
        return False
    changes = changed_fields(first.config, second.config)
    return all(change.is_in(SEEDS) for change in changes if change.is_in(TRAINING_GROUPS))


def _compared(first: Arm, second: Arm, metric: Metric) -> tuple[str, str]:
    """Return a sentence on the difference of two arms, and a sentence on its uncertainty."""
    better, worse = sorted((first, second), key=lambda arm: arm.mean)
    gap = worse.mean - better.mean
    size = f"{gap:.3g} {METRIC_UNITS[metric]} ({100 * gap / (worse.mean or 1):.2g} %)"
    text = _text([*first.runs, *second.runs])
    difference, how = _difference(better, worse, metric)
    single = ", in one run each" if len(first.runs) == len(second.runs) == 1 else ""
    if difference is None:
        sentence = f"{better.name} has a lower validation loss{text} than {worse.name}, by {size}, but {how}."
        return sentence, "Train more seeds of both, or see whether the suites agree."
    sentence = f"{better.name} has a lower validation loss{text} than {worse.name}{single}, by {size}"
    if difference.low <= 0:
        losses = f"their validation losses{text} differ by {size}{single}"
        sentence = f"{better.name} and {worse.name} cannot be told apart: {losses}"
    return f"{sentence}.", f"95 % interval of the difference: {difference.low:.3g} to {difference.high:.3g}, {how}."


def _difference(first: Arm, second: Arm, metric: Metric) -> tuple[Difference | None, str]:
    """Return an interval and what it covers, or None and why there is none."""
    counts = [len(arm.runs) for arm in (first, second)]
    of_seeds = first.of_seeds, second.of_seeds
    if min(counts) > 1 and counts == [len(of_seeds[0]), len(of_seeds[1])]:
        if of_seeds[0].keys() == of_seeds[1].keys():
            pairs = [(loss, of_seeds[1][seeds]) for seeds, loss in of_seeds[0].items()]
            return over_pairs(*zip(*pairs, strict=True)), f"over {counts[0]} pairs of runs with equal seeds"
        return over_seeds(first.losses, second.losses), f"over {counts[0]} and {counts[1]} seeds, which are not pairs"
    if max(counts) > 1:
        return None, "an interval over seeds needs at least two different seeds of each"
    blocks = [_blocks(arm.runs[0]) for arm in (first, second)]
    if metric == "loss" and blocks[0] and blocks[0].keys() == blocks[1].keys():
        pairs = [(*blocks[0][targets], blocks[1][targets][0]) for targets in blocks[0]]
        if min(len(tokens) for _, tokens, _ in pairs) >= FEWEST_BLOCKS:
            found = over_blocks([(nats, others, tokens) for nats, tokens, others in pairs])
            count = sum(len(tokens) for _, tokens, _ in pairs)
            how = f"paired over {count} blocks of the same validation text"
            meaning = "It shows what the choice of text changes; one run each cannot tell what another seed would do"
            return found, f"{how}. {meaning}"
    return None, "one run each cannot tell whether that is chance"


def _text(runs: Sequence[RunRecord]) -> str:
    """Return " on " and the data that the runs are validated on, or "" if the configs do not name the same data."""
    configs = [run.config.data for run in runs]
    names = {data.path or _listed([source.name for source in data.sources]) for data in configs}
    return f" on {name}" if len(names) == 1 and (name := names.pop()) else ""


def _blocks(run: RunRecord) -> dict[tuple[str, ...], tuple[np.ndarray, np.ndarray]]:
    """Return the nats and the tokens of each block of the last validation, by what identifies the blocks' targets.

    Results that an older version wrote have no blocks.
    """
    last = run.last_validation("loss")
    details: Any = run.results.get("loss", {}).get(last[0] if last else -1, {}).get("details")
    if schema_error(details, {"sets": {str: {"blocks": {"nats": [float], "tokens": [int], "targets_sha256": str}}}}):
        return {}
    found: dict[tuple[str, ...], tuple[np.ndarray, np.ndarray]] = {}
    for scores in details["sets"].values():
        blocks = scores["blocks"]
        if len(blocks["nats"]) == len(blocks["tokens"]) and sum(blocks["tokens"]):
            targets = (blocks["targets_sha256"], *map(str, blocks["tokens"]))
            found[targets] = np.array(blocks["nats"]), np.array(blocks["tokens"], float)
    return found


def _different_text(runs: Sequence[RunRecord]) -> tuple[str, str] | None:
    """Return the names of two runs whose validation targets differ, or None if none are known to differ."""
    known = [(run.name, found.keys()) for run in runs if (found := _blocks(run))]
    return next(((known[0][0], name) for name, targets in known if targets != known[0][1]), None)


def _limits(arms: Sequence[Arm]) -> list[str]:
    """Return sentences on runs that are unfinished, and on unequal training, sizes, heads or head norms."""
    runs = [run for arm in arms for run in arm.runs]
    found = []
    for run in runs:
        if (step := run.split("train")[-1]["step"]) < run.steps:
            found.append(f"{run.name} is not finished: step {step:,} of {run.steps:,}.")
    models = {arm.name: arm.runs[0].config.model for arm in arms}
    for what, sizes in (
        ("training tokens", {run.name: run.tokens for run in runs}),
        ("parameters", {name: count_parameters(model).total for name, model in models.items()}),
    ):
        if max(sizes.values()) > (1 + EQUAL_SIZES) * min(sizes.values()):
            found.append(_unequal(what, {name: f"{size:,}" for name, size in sizes.items()}))
    for what, texts in (
        ("the width of heads", {name: f"{model.d_head:,}" for name, model in models.items()}),
        ("the head norm", {name: model.head_norm for name, model in models.items()}),
    ):
        if len(set(texts.values())) > 1:
            found.append(_unequal(what, texts))
    return found


def _unequal(what: str, value_of: Mapping[str, str]) -> str:
    return f"The comparison is unequal in {what}: {_listed([f'{name} {value}' for name, value in value_of.items()])}."


def _listed(names: Sequence[str]) -> str:
    if not names:
        return ""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
