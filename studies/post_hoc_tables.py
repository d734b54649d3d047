"""Tables and values of docs/results.md and README.md that no plan named: worth in tokens, and pooled differences.

This module has no command: `python studies/results.py render` calls the functions in `PLACEHOLDERS`.

The *worth* of an arm's tokens is D'/D: the arm trains on D tokens, and the Transformer needs D' tokens for the same
loss of the test text. D' is read from the Transformer's curve E + B · D^-b. The losses at the three lengths of the
smallest models determine E, B and b. Larger models have two lengths, which determine their E and B; b is that of the
smallest models. All losses are means over seeds. Intervals are 95 % jackknife intervals of log2 of the worth. The
jackknife leaves out each seed in turn, for the curve too, so that the intervals contain the noise of the curve.

The worth of a difference of two arms, of which neither need be the Transformer, is D'/D too: at D tokens the curve has
a loss, and at D' tokens that loss plus the difference. Its interval is that of the difference, read from the curve.
"""

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.optimize
import scipy.stats

from studies.controls_study import (
    ARCHITECTURES,
    LENGTHS,
    REPORTED_SEEDS,
    SEEDS_AGAIN,
    SIZE_SEEDS,
    STEPS,
    WIDER,
)
from studies.controls_tables import (
    FAMILIES,
    MUON,
    cell_numbers_by_seed,
    cell_of,
    contrast_values,
    family_results,
    holm,
    marked,
    named_cell,
    p_text,
    p_value,
    verdict,
    versus,
)
from studies.size_tables import SECOND_MAP, SMALLEST, differences_by_length, step_ratio
from studies.study_records import REFERENCE, TEST_LOSS, VALIDATION_LOSS, Estimate, Record, estimate, markdown, signed

WORTH_ARMS = tuple(arm for arm in ARCHITECTURES if arm != REFERENCE)
SEED_SETS = (REPORTED_SEEDS, SEEDS_AGAIN, SIZE_SEEDS)
# Pair of arms of question 1 that no plan compares → what the first one has.
UNPLANNED_EFFECTS = {
    "diff-gain/transformer": "the whole architecture, without the norm",
    "zero-norm/transformer": "one map in each of 4 heads, with the norm; 11 % of the parameters without effect",
    "zero-gain/transformer": "one map in each of 4 heads, with a gain; 11 % of the parameters without effect",
    "transformer-wide-norm/transformer": "one map in each of 4 heads, with the norm; all parameters in use",
    "diff/transformer-wide-norm": "the second map, against 4 heads with all parameters in use",
}


# ── Worth in tokens ──


class LossCurve(NamedTuple):
    """Loss after D million tokens: floor + scale · D^-exponent."""

    floor: float
    scale: float
    exponent: float

    def loss(self, tokens: float) -> float:
        """Return the loss of the curve after a number of tokens, in millions."""
        return self.floor + self.scale * tokens**-self.exponent

    def tokens(self, loss: float) -> float:
        """Return the number of tokens, in millions, with which the curve has a loss."""
        return ((loss - self.floor) / self.scale) ** (-1 / self.exponent)


type Losses = Mapping[str, Mapping[float, float]]  # Arm → tokens in millions → mean loss.


def curve_through(points: Mapping[float, float], exponent: float | None = None) -> LossCurve:
    """Return the curve through three points, or through two if the exponent is known."""
    (x, first), (y, second), *rest = sorted(points.items())
    if exponent is None:
        [(z, third)] = rest
        ratio = (first - second) / (second - third)
        root: Any = scipy.optimize.brentq(lambda b: (x**-b - y**-b) / (y**-b - z**-b) - ratio, 1e-3, 10)
        exponent = float(root)
    scale = (first - second) / (x**-exponent - y**-exponent)
    return LossCurve(first - scale * x**-exponent, scale, exponent)


class Chords(NamedTuple):
    """Straight lines over log2 of the tokens, in millions, whose last parts extend beyond the points. A check."""

    points: Mapping[float, float]

    def tokens(self, loss: float) -> float:
        """Return the number of tokens, in millions, at which the lines have a loss."""
        (x, first), (y, second), (z, third) = sorted(self.points.items())
        if loss < second:
            x, first, y, second = y, second, z, third
        return x * (y / x) ** ((first - loss) / (first - second))


def mean_losses(records: Sequence[Record], task: str, without: int | None = None) -> Losses:
    """Return the mean losses of question 4 of a size over its seeds, or over those other than `without`."""
    found: dict[str, dict[float, float]] = {}
    for arm, steps in itertools.product(ARCHITECTURES, LENGTHS[task].values()):
        runs = [r for r in records if (r["task"], r["arm"], r["changes"].get(STEPS)) == (task, arm, str(steps))]
        losses = [r["numbers"][TEST_LOSS] for r in runs if r["seed"] != without]
        found.setdefault(arm, {})[runs[0]["tokens"] / 1e6] = statistics.fmean(losses)
    return found


def log_worths(records: Sequence[Record], task: str, without: int | None = None) -> dict[str, list[float]]:
    """Return arm → log2 of the worth of its tokens at each length."""
    smallest = mean_losses(records, SMALLEST, without)
    curve = curve_through(smallest[REFERENCE])
    if task == SMALLEST:
        return _log_worths(smallest, curve)
    larger = mean_losses(records, task, without)
    return _log_worths(larger, curve_through(larger[REFERENCE], curve.exponent))


def _log_worths(losses: Losses, curve: LossCurve | Chords) -> dict[str, list[float]]:
    return {
        arm: [float(np.log2(curve.tokens(loss) / tokens)) for tokens, loss in losses[arm].items()] for arm in WORTH_ARMS
    }


def log_worths_by_chords(records: Sequence[Record], task: str, without: int | None = None) -> dict[str, list[float]]:
    """Return arm → log2 of the worth of its tokens at each length of the smallest models, read from chords."""
    losses = mean_losses(records, task, without)
    return _log_worths(losses, Chords(losses[REFERENCE]))


METHODS = {"curve": log_worths, "chords": log_worths_by_chords}  # How to read tokens from the Transformer's losses.


def jackknife(statistic: Callable[[int | None], float]) -> Estimate:
    """Return a statistic of all seeds, and its interval from its values without each seed of question 4."""
    whole, count = statistic(None), len(SIZE_SEEDS)
    pseudo_values = [count * whole - (count - 1) * statistic(seed) for seed in SIZE_SEEDS]
    return Estimate(whole, estimate(pseudo_values).half_width)


def log_worth_estimates(records: Sequence[Record], task: str, arm: str) -> list[Estimate]:
    """Return log2 of the worth of an arm's tokens at each length, with its interval."""
    values = {seed: log_worths(records, task, seed)[arm] for seed in (None, *SIZE_SEEDS)}
    return [jackknife(lambda seed, i=i: values[seed][i]) for i in range(len(LENGTHS[task]))]


def worth_interval(of: Estimate) -> tuple[float, float, float]:
    """Return a worth and the ends of its interval, from log2 of it."""
    half_width = of.half_width or 0
    return 2**of.mean, 2 ** (of.mean - half_width), 2 ** (of.mean + half_width)


def worth_text_of(worth: float, low: float, high: float) -> str:
    """Return a worth and the ends of its interval as text."""
    # Two decimals could hide whether the interval contains 1.
    decimals = 3 if "1.00" in (f"{low:.2f}", f"{high:.2f}") else 2
    return f"{worth:.{decimals}f} ({low:.{decimals}f} to {high:.{decimals}f})"


def worth_table(records: Sequence[Record]) -> str:
    """Return a table of the worth of tokens: a row for each arm, and a column for each size and length."""
    header = ["arm"]
    for task, lengths in LENGTHS.items():
        parameters = next(r["parameters"] for r in records if (r["task"], r["arm"]) == (task, REFERENCE))
        header += [f"{parameters / 1e6:.2f}M, {tokens}" for tokens in lengths]
    rows = [
        [
            f"`{arm}`",
            *(worth_text_of(*worth_interval(of)) for task in LENGTHS for of in log_worth_estimates(records, task, arm)),
        ]
        for arm in WORTH_ARMS
    ]
    return markdown(header, rows)


def worth_family_table(records: Sequence[Record], family: str, *pairs: str) -> str:
    """Return a table of a family's contrasts on novels, each with the worth of its difference in the place of p.

    Each of `pairs` adds a row without a planned test: two arms, such as "diff-gain/transformer".
    """
    curve = curve_through(mean_losses(records, SMALLEST)[REFERENCE])
    rows = []
    for contrast, (value, p) in family_results(records, family).items():
        tokens = next(r["tokens"] for r in records if cell_of(r) == contrast.plus[0]) / 1e6
        worth = worth_text_of(*worth_of_difference(curve, tokens, value))
        found = marked(verdict(value.mean, p, contrast), p)
        rows.append([contrast.title, contrast.effect, signed(value), worth, found])
    for pair in pairs:
        arm, reference = pair.split("/")
        contrast = versus(arm, reference, UNPLANNED_EFFECTS[pair])
        value = estimate(contrast_values(records, contrast, TEST_LOSS))
        tokens = next(r["tokens"] for r in records if cell_of(r) == contrast.plus[0]) / 1e6
        worth = worth_text_of(*worth_of_difference(curve, tokens, value))
        rows.append([contrast.title, contrast.effect, signed(value), worth, "not planned"])
    header = ["first − second model", "what the first one has", "difference in bits per byte", "worth in tokens"]
    return markdown([*header, "verdict"], rows)


def worth_of_difference(curve: LossCurve, tokens: float, difference: Estimate) -> tuple[float, float, float]:
    """Return the worth of a difference in losses after a number of tokens, in millions, and the ends of its interval.

    The loss and the tokens are those of the curve.
    """
    half_width = difference.half_width or 0
    ends = (difference.mean, difference.mean + half_width, difference.mean - half_width)
    worth, low, high = (curve.tokens(curve.loss(tokens) + end) / tokens for end in ends)
    return worth, low, high


def _log_worth(records: Sequence[Record], task: str, arm: str, tokens: str) -> float:
    return log_worths(records, task)[arm][[*LENGTHS[task]].index(int(tokens))]


def worth_text(records: Sequence[Record], task: str, arm: str, tokens: str) -> str:
    """Return the worth of an arm's tokens with two decimals. `tokens` is the number per parameter."""
    return f"{2 ** _log_worth(records, task, arm, tokens):.2f}"


def more_tokens_text(records: Sequence[Record], task: str, arm: str, tokens: str) -> str:
    """Return how many more tokens than the Transformer an arm needs for the same loss, in per cent."""
    return f"{100 * (2 ** -_log_worth(records, task, arm, tokens) - 1):.0f}"


def worth_per_time_text(records: Sequence[Record], arm: str, tokens: str) -> str:
    """Return the worth of an arm's tokens over the time of its training step, both relative to the Transformer."""
    return f"{2 ** _log_worth(records, SMALLEST, arm, tokens) / step_ratio(records, arm):.2f}"


def _log_advantages(records: Sequence[Record], without: int | None, method: str = "curve") -> list[float]:
    """Return log2 of the worth of `diff` over that of `zero-norm`, at each length of the smallest models."""
    own, other = (METHODS[method](records, SMALLEST, without)[arm] for arm in SECOND_MAP)
    return [a - b for a, b in zip(own, other, strict=True)]


def advantage_text(records: Sequence[Record], tokens: str) -> str:
    """Return how many tokens of `zero-norm` a token of `diff` is worth, with its interval."""
    i = [*LENGTHS[SMALLEST]].index(int(tokens))
    return worth_text_of(*worth_interval(jackknife(lambda seed: _log_advantages(records, seed)[i])))


def _slope(values: Sequence[float]) -> float:
    return float(np.polyfit(np.log2([*LENGTHS[SMALLEST]]), values, 1)[0])


def advantage_slope_text(records: Sequence[Record], method: str) -> str:
    """Return the slope of log2 of this ratio per doubling of the tokens."""
    return signed(jackknife(lambda seed: _slope(_log_advantages(records, seed, method))))


def worth_change_text(records: Sequence[Record], arm: str, method: str) -> str:
    """Return by how much log2 of the worth of an arm's tokens changes from 20 to 80 tokens per parameter."""

    def change(without: int | None) -> float:
        _, before, after = METHODS[method](records, SMALLEST, without)[arm]
        return after - before

    return signed(jackknife(change))


def parameters_buy_text(records: Sequence[Record], factor: str) -> str:
    """Return by how much the Transformer's loss falls if it has `factor` times the parameters and the same tokens.

    The result is a range over the lengths of the larger models, of the loss per doubling from the smallest models.
    """
    small, large = (mean_losses(records, task)[REFERENCE] for task in (SMALLEST, WIDER))
    curve = curve_through(small)
    first, second = (
        next(r["parameters"] for r in records if (r["task"], r["arm"]) == (task, REFERENCE)) for task in LENGTHS
    )
    share = np.log(float(factor)) / np.log(second / first)
    gains = [share * (curve.loss(tokens) - loss) for tokens, loss in large.items()]
    return " to ".join(dict.fromkeys(f"{gain:.3f}" for gain in (min(gains), max(gains))))


def parameters_buy_at_text(records: Sequence[Record]) -> str:
    """Return the lengths of `parameters_buy_text`, in tokens per parameter of the smallest models."""
    small = next(r["parameters"] for r in records if (r["task"], r["arm"]) == (SMALLEST, REFERENCE))
    return " and ".join(f"{1e6 * tokens / small:.0f}" for tokens in mean_losses(records, WIDER)[REFERENCE])


# ── Many settings ──


def contrast_p_text(records: Sequence[Record], cell: str, reference: str) -> str:
    """Return the p-value of the difference of two cells, without a correction."""
    return p_text(p_value(contrast_values(records, versus(named_cell(cell), named_cell(reference), ""), TEST_LOSS)))


def differences_by_setting(records: Sequence[Record], arm: str, reference: str, number: str) -> dict[str, float]:
    """Return setting → mean difference of two arms. A setting is a task, a set of seeds and changes of the recipe.

    Runs without a test text have settings of their own, and there the number is the loss of the validation text.
    """
    found: dict[str, dict[str, list[Record]]] = {}
    for r in records:
        if r["arm"] in (arm, reference):
            seeds = next(i for i, of in enumerate(SEED_SETS) if r["seed"] in of)
            setting = f"{r['task']}{cell_of(r).removeprefix(r['arm'])}, {seeds}, {TEST_LOSS in r['numbers']}"
            found.setdefault(setting, {}).setdefault(r["arm"], []).append(r)
    means = {}
    for setting, runs in found.items():
        if len(runs) == 2:
            own, other = (
                {r["seed"]: r["numbers"][number if TEST_LOSS in r["numbers"] else VALIDATION_LOSS] for r in runs[name]}
                for name in (arm, reference)
            )
            if own.keys() != other.keys():
                raise AssertionError(f"{arm} − {reference}, {setting}: runs of different seeds")
            means[setting] = statistics.fmean(own[seed] - other[seed] for seed in own)
    return means


def _of_adamw(differences: Mapping[str, float]) -> list[float]:
    return [difference for setting, difference in differences.items() if MUON not in setting]


def settings_text(records: Sequence[Record], arm: str, reference: str) -> str:
    """Return the mean difference of two arms over all settings, with an interval over settings."""
    return signed(estimate([*differences_by_setting(records, arm, reference, TEST_LOSS).values()]))


def settings_below_text(records: Sequence[Record], arm: str, reference: str) -> str:
    """Return in how many settings the mean difference is below zero, such as "10 of 11"."""
    differences = differences_by_setting(records, arm, reference, TEST_LOSS).values()
    return f"{sum(d < 0 for d in differences)} of {len(differences)}"


def adamw_above_text(records: Sequence[Record], arm: str, reference: str) -> str:
    """Return in how many settings with AdamW the mean difference is above zero."""
    differences = _of_adamw(differences_by_setting(records, arm, reference, TEST_LOSS))
    return f"{sum(d > 0 for d in differences)} of {len(differences)}"


def _both_texts(records: Sequence[Record]) -> list[tuple[float, float]]:
    """Return each arm's difference from the Transformer on the test text and on the validation text, by setting."""
    arms = sorted({r["arm"] for r in records} - {REFERENCE})
    pairs = []
    for arm in arms:
        of_test, of_validation = (
            differences_by_setting(records, arm, REFERENCE, number) for number in (TEST_LOSS, VALIDATION_LOSS)
        )
        pairs += [(of_test[setting], of_validation[setting]) for setting in of_test]
    return pairs


def texts_gap_text(records: Sequence[Record]) -> str:
    """Return by how much the differences of arms on the test and the validation text differ at most."""
    return f"{max(abs(test - validation) for test, validation in _both_texts(records)):.3f}"


def texts_count_text(records: Sequence[Record]) -> str:
    """Return how many differences of arms `texts_gap_text` compares."""
    return str(len(_both_texts(records)))


def resized_text(records: Sequence[Record], arm: str, tokens: str) -> str:
    """Return by how much an arm's difference from the Transformer changes from the smallest to the larger models."""
    small, large = (differences_by_length(records, task, arm)[int(tokens)] for task in LENGTHS)
    return signed(estimate([difference - small[seed] for seed, difference in large.items()]))


def welch_p_text(records: Sequence[Record], family: str, arm: str, reference: str) -> str:
    """Return the p-value of a family's contrast by Welch's test, which does not pair seeds, after Holm's correction."""
    contrasts = FAMILIES[family]
    p_values = []
    for contrast in contrasts:
        own, other = ([*cell_numbers_by_seed(records, cell, TEST_LOSS).values()] for cell in contrast.pair)
        p_values.append(float(scipy.stats.ttest_ind(own, other, equal_var=False).pvalue))
    return p_text(dict(zip([contrast.pair for contrast in contrasts], holm(p_values), strict=True))[arm, reference])


PLACEHOLDERS = {
    "worth_table": worth_table,
    "worth_family": worth_family_table,
    "worth": worth_text,
    "more_tokens": more_tokens_text,
    "worth_per_time": worth_per_time_text,
    "worth_change": worth_change_text,
    "advantage": advantage_text,
    "advantage_slope": advantage_slope_text,
    "parameters_buy": parameters_buy_text,
    "parameters_buy_at": parameters_buy_at_text,
    "contrast_p": contrast_p_text,
    "settings": settings_text,
    "settings_below": settings_below_text,
    "adamw_above": adamw_above_text,
    "texts_gap": texts_gap_text,
    "texts_count": texts_count_text,
    "resized": resized_text,
    "welch_p": welch_p_text,
}
