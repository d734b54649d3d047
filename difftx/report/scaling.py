"""Scaling laws of several runs, and the sizes at which architectures have equal loss, as in Figure 3 of the paper."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy as np
import rich.markup
import rich.table

from difftx.analysis.scaling_law import MAX_EXTRAPOLATION, MIN_SIZES, Fit, Match, match_at, match_reference_at
from difftx.errors import UserError, printable
from difftx.files import write_atomically
from difftx.report.arms import EQUAL_SIZES
from difftx.report.charts import colours_of, draw, save_figure, short_number
from difftx.report.curves import METRIC_LABELS
from difftx.report.points import LossPoint, read_points
from difftx.report.runs import Metric

REFERENCE = "transformer"  # All other architectures are compared with this one, if it has points.
RESAMPLES = 1000  # Bootstrap resamples for confidence intervals.


@dataclasses.dataclass(frozen=True)
class Study:
    """Loss as a function of one quantity: a fit per architecture, and comparisons between architectures."""

    quantity: str  # "size" (parameters) or "tokens".
    title: str
    fits: dict[str, Fit]  # Architecture → fit.
    reference: str  # All other architectures are compared with this one.
    # Architecture → pairs of sizes (of it and of the reference) with equal loss, ascending.
    matches: dict[str, list[Match]]
    drawn: dict[str, Match]  # Architecture → the match that the figure shows as an arrow.
    notes: list[str]


def write_scaling(pattern: str, out: Path, metric: Metric = "loss") -> tuple[list[Study], list[Path]]:
    """Fit loss against size and against tokens, as far as there are enough points. Return the studies and the files."""
    points, notes = read_points(pattern, metric)
    chosen = {"size": [point for point in points if point.is_last], "tokens": _points_of_one_size(points)}
    missing = {quantity: _missing_points(quantity, of_quantity) for quantity, of_quantity in chosen.items()}
    if all(missing.values()):
        reasons = "; ".join(map(str, missing.values()))
        raise UserError(f"--scaling={pattern!r}: too few points to fit a·x^-b + c; {reasons}")
    fitted = [name for name in chosen if not missing[name]]
    studies = [_study(name, chosen[name], notes if name == fitted[0] else []) for name in fitted]
    files = [file for study in studies for file in save_figure(_draw(study, metric), out / f"scaling_{study.quantity}")]
    written = {
        "metric": metric,
        "studies": [_as_json(study) for study in studies],
        "not_fitted": {quantity: reason for quantity, reason in missing.items() if reason},
    }
    write_atomically(out / "scaling.json", json.dumps(written, indent=2) + "\n")
    return studies, [*files, out / "scaling.json"]


def format_study(study: Study) -> tuple[rich.table.Table, rich.table.Table]:
    """Return a table of a study's fits and a table of its matches, both with 95 % confidence intervals."""
    laws = rich.table.Table(title=f"{study.title}: a·x^-b + c (95 % intervals)")
    for title in ("architecture", "points", "a", "b", "c"):
        laws.add_column(title, justify="left" if title == "architecture" else "right")
    for name, fit in study.fits.items():
        parameters = []
        for p in "abc":
            low, high = fit.interval(p)
            parameters.append(f"{getattr(fit.law, p):.4g} ({low:.3g} to {high:.3g})")
        laws.add_row(rich.markup.escape(printable(name)), str(len(fit.x)), *parameters)
    matched = f"{study.quantity} with which an architecture matches the {study.reference}"
    matches = rich.table.Table(title=f"{matched} (95 % intervals)")
    for title in ("architecture", study.quantity, study.reference, "loss", "ratio", ""):
        matches.add_column(title, justify="left" if title in ("architecture", "") else "right")
    for name, matches_of_name in study.matches.items():
        for match in matches_of_name:
            sizes = short_number(match.x), short_number(match.reference_x)
            low, high = match.interval
            ratio = f"{match.ratio:.1%} ({low:.1%} to {high:.1%})"
            mark = f"extrapolated beyond {MAX_EXTRAPOLATION:g}× the data" if match.extrapolated else ""
            matches.add_row(rich.markup.escape(printable(name)), *sizes, f"{match.loss:.4f}", ratio, mark)
    return laws, matches


def _points_of_one_size(points: Sequence[LossPoint]) -> list[LossPoint]:
    """Return the points of one model size, for fits of loss against tokens.

    Choose the largest size with enough distinct numbers of tokens to fit every architecture. If no size has enough,
    choose the size with the most.
    """
    groups: list[list[LossPoint]] = []
    for point in sorted(points, key=lambda point: point.size):
        if not groups or point.size > groups[-1][0].size * EQUAL_SIZES:
            groups.append([])
        groups[-1].append(point)

    def rank(group: list[LossPoint]) -> tuple[int, float]:
        tokens = [{point.tokens for point in group if point.architecture == name} for name in _architectures(points)]
        return min(*map(len, tokens), MIN_SIZES), group[0].size

    chosen = max(groups, key=rank)
    return [point for point in points if chosen[0].size <= point.size <= chosen[-1].size]


def _missing_points(quantity: str, points: Sequence[LossPoint]) -> str | None:
    """Return a message with the number of points if there are too few for a fit, else None."""
    counts = {
        name: len({getattr(point, quantity) for point in points if point.architecture == name})
        for name in _architectures(points)
    }
    if counts and min(counts.values()) >= MIN_SIZES:
        return None
    existing = ", ".join(f"{name} has {count}" for name, count in counts.items()) or "there is none"
    points_of = "sizes of finished runs" if quantity == "size" else "numbers of tokens at one size"
    return f"loss against {quantity} needs {MIN_SIZES} {points_of} of each architecture: {existing}"


def _architectures(points: Sequence[LossPoint]) -> list[str]:
    return sorted({point.architecture for point in points})


def _study(quantity: str, points: Sequence[LossPoint], notes: Sequence[str]) -> Study:
    fits = {}
    for name in _architectures(points):
        of_name = [point for point in points if point.architecture == name]
        x, loss = np.array([getattr(point, quantity) for point in of_name]), np.array([point.loss for point in of_name])
        fits[name] = Fit.of(x, loss, resamples=RESAMPLES, seed=0)
    reference = REFERENCE if REFERENCE in fits else next(iter(fits))
    matches = {name: _matches(quantity, name, reference, fits) for name in fits if name != reference}
    drawn = {name: _match_to_draw(of_name, fits[name], fits[reference]) for name, of_name in matches.items()}
    title = f"loss against tokens, models of {short_number(points[0].size)} parameters"
    if quantity == "size":
        title = "loss against parameters"
        fewest, most = min(point.tokens for point in points), max(point.tokens for point in points)
        if most > 1.01 * fewest:
            seen = f"{short_number(fewest)} to {short_number(most)}"
            notes = [*notes, f"the models have seen different numbers of tokens, {seen}"]
    return Study(quantity, title, fits, reference, matches, drawn, [*notes])


def _matches(quantity: str, name: str, reference: str, fits: dict[str, Fit]) -> list[Match]:
    """Return ascending matches for each size of the architecture `name`, and for the largest size of the reference."""
    fit, other = fits[name], fits[reference]
    matches = [match for x in np.unique(fit.x) if (match := match_at(fit, other, x)) is not None]
    if not matches:
        raise UserError(
            f"{name} and {reference} never meet: in loss against {quantity}, {reference} never comes down to {name}; "
            f"{name} is fitted by {_law_text(fit)}, {reference} by {_law_text(other)}"
        )
    at_largest = match_reference_at(fit, other, other.x.max())
    return sorted([*matches, *([at_largest] if at_largest else [])], key=lambda match: match.x)


def _match_to_draw(matches: Sequence[Match], fit: Fit, reference: Fit) -> Match:
    """Return the match at the largest x of `fit` whose counterpart is within the reference's data, as in the paper."""
    # If no counterpart is within the data, use the smallest x, where extrapolation is shortest.
    measured = [match for match in matches if match.x in fit.x]
    within = [match for match in measured if match.reference_x <= reference.x.max()]
    return (within or measured[:1])[-1]


def _draw(study: Study, metric: Metric) -> matplotlib.figure.Figure:
    """Draw the points, the fits with confidence bands, and arrows between sizes of equal loss."""
    series: list[dict[str, Any]] = []
    for (name, fit), colour in zip(study.fits.items(), colours_of([*study.fits]).values(), strict=True):
        low, high = fit.x.min(), fit.x.max()
        matched = [match.reference_x if name == study.reference else match.x for match in study.drawn.values()]
        beyond = np.geomspace(min([low, *matched]), max([high, *matched]), 200)
        within = np.geomspace(low, high, 200)
        bottom, top = fit.band(beyond)
        of_fit = {"name": name, "group": "", "colour": colour}
        series += [
            of_fit | {"x": fit.x, "y": fit.loss, "style": "points"},
            of_fit | {"x": within, "y": fit.law(within), "group": f"{name}: {_law_text(fit)}"},
            of_fit | {"x": beyond, "y": fit.law(beyond), "low": bottom, "high": top, "style": "dashed"},
        ]
    x_label = f"{'parameters' if study.quantity == 'size' else 'training tokens'} (log scale)"
    labels = {"title": study.title, "x_label": x_label, "y_label": f"validation {METRIC_LABELS[metric]}"}
    figure = draw({"kind": "line", "series": series, "log_x": True, **labels}, (6.5, 4.5))
    for match in study.drawn.values():
        arrow = {"arrowstyle": "<->", "linestyle": ":"}
        figure.axes[0].annotate("", (match.x, match.loss), (match.reference_x, match.loss), arrowprops=arrow)
        text = f"{match.ratio:.1%}" + (" (extrapolated)" if match.extrapolated else "")
        middle = float(np.sqrt(match.x * match.reference_x))
        placed = {"textcoords": "offset points", "ha": "center", "va": "top"}
        figure.axes[0].annotate(text, (middle, match.loss), (0, -4), **placed)
    return figure


def _as_json(study: Study) -> dict[str, Any]:
    def of_match(match: Match) -> dict[str, Any]:
        # JSON has no infinity, so write an infinite end of an interval as null.
        interval = [end if np.isfinite(end) else None for end in match.interval]
        return dataclasses.asdict(match) | {"interval": interval}

    fits = {
        name: {
            "points": [{study.quantity: x, "loss": loss} for x, loss in zip(fit.x, fit.loss, strict=True)],
            **{p: getattr(fit.law, p) for p in "abc"},
            "intervals": {p: fit.interval(p) for p in "abc"},
        }
        for name, fit in study.fits.items()
    }
    return {
        "quantity": study.quantity,
        "title": study.title,
        "reference": study.reference,
        "fits": fits,
        "matches": {name: [*map(of_match, matches)] for name, matches in study.matches.items()},
        "drawn": {name: of_match(match) for name, match in study.drawn.items()},
        "notes": study.notes,
    }


def _law_text(fit: Fit) -> str:
    return f"{fit.law.a:.3g}·x^-{fit.law.b:.3g} + {fit.law.c:.3g}"
