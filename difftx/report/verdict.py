"""The first sentences of a report: which model has the lower validation loss, by how much, and how certain that is."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from difftx.analysis.differences import MIN_BLOCKS, Difference, over_blocks
from difftx.evals.result import format_together, format_value, signed_change
from difftx.model.abstract import count_parameters
from difftx.model.architectures import heads_of
from difftx.report.arms import EQUAL_SIZES, Arm, arms_of, over_runs, seeds_of
from difftx.report.runs import METRIC_UNITS, Metric, RunRecord, different_tokenizers


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A headline, and sentences below it: first the uncertainty, then the limits of the comparison."""

    headline: str
    details: list[str]
    arms: list[Arm]
    differences: Mapping[str, str] = dataclasses.field(default_factory=dict)  # Arm → its difference from the first arm.


def verdict(runs: Sequence[RunRecord], metric: Metric) -> Verdict:
    """Compare the arms by the last validation in `metric`. All other arms are compared with the first one."""
    unit, arms = METRIC_UNITS[metric], arms_of(runs)
    if missing := [run for run in runs if run.last_value(metric) is None]:
        what = "loss" if metric == "loss" else f"loss in {unit}"
        headline = f"No verdict: there is no finite validation {what} of {listed([run.name for run in missing])}."
        return Verdict(headline, _why_missing(missing, metric), arms)
    limits = _limits(arms)
    known = [(run, found.keys()) for run in runs if (found := _blocks(run))]
    if pair := next(((known[0][0], run) for run, targets in known if targets != known[0][1]), None):
        what, reason = "were validated on different text", "Losses on different text cannot be compared."
        if different_tokenizers(pair):
            what = "have different tokenizers"
            reason = "Their targets do not show whether the text is the same. If it is, compare the bits per byte."
        return Verdict(f"No verdict: {pair[0].name} and {pair[1].name} {what}.", [reason, *limits], arms)
    if len(arms) == 1:
        (arm,) = arms
        losses = arm.values(metric)
        spread = ""
        if len(runs) > 1:
            spread = f", the mean over {len(runs)} seeds ({' to '.join(format_together([min(losses), max(losses)]))})"
        loss = f"{format_value(arm.mean(metric))} {unit}"
        headline = f"{arm.name} reaches a validation loss of {loss}{_text(runs)}{spread}."
        return Verdict(headline, ["There is no other model to compare it with.", *limits], arms)
    baseline, *others = arms
    means = {arm.name: float(np.mean(arm.values(metric))) for arm in arms}
    found = {arm.name: _difference(baseline, arm, metric) for arm in others}
    differences = {
        name: signed_change(means[baseline.name], means[name]) + (f", {interval_text(it)}" if it else "")
        for name, (it, _) in found.items()
    }
    if len(others) == 1:
        headline, uncertainty = _compared(baseline, others[0], metric, *found[others[0].name])
        return Verdict(headline, [uncertainty, *limits], arms, differences)
    best = min(arms, key=lambda arm: means[arm.name])
    rivals = [(arm.name, _difference(best, arm, metric)[0]) for arm in arms if arm is not best]
    unsure = [name for name, difference in rivals if difference is None or difference.low <= 0]
    certain = "and the 95 % interval of its difference from each other model excludes 0"
    if unsure:
        certain = f"but it cannot be told apart from {listed(unsure)}"
    headline = f"Of {len(arms)} models, {best.name} has the lowest validation loss{_text(runs)}, {certain}."
    details = [f"The table has the difference of each model from {baseline.name}."]
    for how in dict.fromkeys(how for _, how in found.values()):
        names = [name for name in found if found[name][1] == how]
        interval = "the 95 % interval is" if found[names[0]][0] else "there is no interval:"
        details.append(f"{listed(names)}: {interval} {how}.")
    return Verdict(headline, [*details, *limits], arms, differences)


def _why_missing(runs: Sequence[RunRecord], metric: Metric) -> list[str]:
    """Return a sentence for each run with a non-finite last loss, and one for all runs without a loss."""
    found, unvalidated = [], []
    for run in runs:
        step, numbers = run.last_validation()
        if metric in numbers:
            found.append(f"{run.name}: the loss of its last validation, at step {step:,}, is not finite.")
        else:
            unvalidated.append(run.name)
    if unvalidated:
        found.append(f"Run difftx eval --suite=loss on {listed(unvalidated)}.")
    return found


def interval_text(difference: Difference) -> str:
    """Return the ends of a difference's 95 % interval as text."""
    return " to ".join(format_together([difference.low, difference.high], digits=3, signed=True))


def _compared(baseline: Arm, other: Arm, metric: Metric, difference: Difference | None, how: str) -> tuple[str, str]:
    """Return a sentence on two arms, the better one first, and a sentence on their difference."""
    unit, text = METRIC_UNITS[metric], _text([*baseline.runs, *other.runs])
    means = {arm: float(np.mean(arm.values(metric))) for arm in (baseline, other)}
    best, rival = sorted((other, baseline), key=means.__getitem__)
    counts = [len(arm.runs) for arm in (best, rival)]
    runs = f"{counts[0]} runs each" if counts[0] == counts[1] else f"{counts[0]} and {counts[1]} runs"
    basis = f"{unit} ({'one run each' if counts == [1, 1] else f'means over {runs}'}; lower is better)"
    losses = " and ".join(format_together([means[best], means[rival]]))
    named = f"In {unit}, {other.name} − {baseline.name} = {signed_change(means[baseline], means[other])}"
    if difference is None:
        order = f"{best.name} has a lower validation loss{text} than {rival.name}"
        if means[best] == means[rival]:
            order = f"{best.name} and {rival.name} have the same validation loss{text}"
        advice = "Train more seeds of both, or see whether the suites agree."
        return f"{order}: {losses} {basis}, but {how}.", f"{named}. {advice}"
    order = f"{best.name} is better than {rival.name}"
    if difference.low <= 0 <= difference.high:
        order = f"{best.name} and {rival.name} cannot be told apart"
    sentence = f"{order}: their validation losses{text} are {losses} {basis}."
    if max(counts) > 1 and min(counts) == 2:
        how += ". Two seeds make wide intervals; a third narrows them most"
    return sentence, f"{named}, with a 95 % interval of {interval_text(difference)}, {how}."


def _difference(first: Arm, second: Arm, metric: Metric) -> tuple[Difference | None, str]:
    """Return an interval for the second arm minus the first, and what it covers; or None, and why there is none."""
    if max(len(arm.runs) for arm in (first, second)) > 1:
        pairs = ([*zip(map(seeds_of, arm.runs), arm.values(metric), strict=True)] for arm in (first, second))
        return over_runs(*pairs)
    blocks = [_blocks(arm.runs[0]) for arm in (first, second)]
    if metric == "loss" and blocks[0] and blocks[0].keys() == blocks[1].keys():
        pairs = [(*blocks[0][targets], blocks[1][targets][0]) for targets in blocks[0]]
        if min(len(tokens) for _, tokens, _ in pairs) >= MIN_BLOCKS:
            interval = over_blocks([(nats, others, tokens) for nats, tokens, others in pairs])
            count = sum(len(tokens) for _, tokens, _ in pairs)
            how = f"paired over {count} blocks of the same validation text"
            meaning = "It shows what the choice of text changes; one run each cannot tell what another seed would do"
            return interval, f"{how}. {meaning}"
    return None, "one run each cannot tell whether that is chance"


def _text(runs: Sequence[RunRecord]) -> str:
    """Return " on " and the name of the validation data, or "" if the configs name different data."""
    configs = [run.config.data for run in runs]
    names = {data.path or listed([source.name for source in data.sources]) for data in configs}
    return f" on {name}" if len(names) == 1 and (name := names.pop()) else ""


def _blocks(run: RunRecord) -> dict[tuple[str, ...], tuple[np.ndarray, np.ndarray]]:
    """Return nats and tokens of each block of the last validation. The keys identify the blocks' targets."""
    step, _ = run.last_validation()
    sets = run.results.get("loss", {}).get(step, {}).get("details", {}).get("sets", {})
    all_blocks = [scores["blocks"] for scores in sets.values()]
    return {
        (blocks["targets_sha256"], *map(str, blocks["tokens"])): (np.array(blocks["nats"]), np.array(blocks["tokens"]))
        for blocks in all_blocks
        if sum(blocks["tokens"])
    }


def _limits(arms: Sequence[Arm]) -> list[str]:
    """Return sentences on unfinished runs, old validations, and unequal training, sizes, weights or heads."""
    runs = [run for arm in arms for run in arm.runs]
    limits = []
    for run in runs:
        if (step := run.split("train")[-1]["step"]) < run.steps:
            limits.append(f"{run.name} is not finished: step {step:,} of {run.steps:,}.")
        if (validated := run.last_validation()[0]) < step:
            limits.append(
                f"{run.name} has trained to step {step:,}, but its last validation is that of step {validated:,} "
                "(run difftx eval --suite=loss)."
            )
    models = {arm.name: arm.runs[0].config.model for arm in arms}
    for what, sizes in (
        ("training tokens", {run.name: run.tokens for run in runs}),
        ("parameters", {name: count_parameters(model).total for name, model in models.items()}),
    ):
        if max(sizes.values()) > EQUAL_SIZES * min(sizes.values()):
            limits.append(_unequal(what, {name: f"{size:,}" for name, size in sizes.items()}))
    sources = {arm.name: arm.runs[0].config.checkpoint for arm in arms}
    is_new = {name: source.init_from is None and source.branch_from is None for name, source in sources.items()}
    # If architectures differ, their head norms are part of the compared methods.
    is_one_architecture = len({model.architecture for model in models.values()}) == 1
    for what, texts in (
        ("the initial weights", {name: "new ones" if new else "those of another run" for name, new in is_new.items()}),
        ("the width of heads", {name: f"{heads_of(model).d_head:,}" for name, model in models.items()}),
        ("the head norm", {name: model.head_norm for name, model in models.items() if is_one_architecture}),
    ):
        if len(set(texts.values())) > 1:
            limits.append(_unequal(what, texts))
    return limits


def _unequal(what: str, value_of: Mapping[str, str]) -> str:
    return f"The comparison is unequal in {what}: {listed([f'{name} {value}' for name, value in value_of.items()])}."


def listed(names: Sequence[str]) -> str:
    """Join names to a text such as "a, b and c"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
