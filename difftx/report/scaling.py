"""Scaling laws of several runs, and the sizes at which architectures have equal loss (Figures 3a and 3b)."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy as np
import rich.markup
import rich.table

from difftx.analysis.scaling_law import FEWEST_SIZES, LARGEST_EXTRAPOLATION, Fit, Match, match_at, match_reference_at
from difftx.errors import UserError, printable
from difftx.files import write_atomically
from difftx.report.charts import add_legend, label_axes, save_figure, series_colours
from difftx.report.curves import METRIC_LABELS
from difftx.report.points import Point, group_sizes, read_points
from difftx.report.runs import Metric

REFERENCE = "transformer"  # Architecture that the others are compared with, if it is among them.
RESAMPLES = 1000
SEED = 0


@dataclasses.dataclass(frozen=True)
class Study:
    """Loss against one quantity: a fit for each architecture, and the points of equal loss."""

    quantity: str  # "size" (parameters) or "tokens".
    title: str
    fits: dict[str, Fit]  # Architecture → fit.
    reference: str  # Architecture that the others are compared with.
    matches: dict[str, list[Match]]  # Architecture except the reference → points of equal loss, ascending.
    drawn: dict[str, Match]  # Architecture → the match that the figure shows.
    notes: list[str]


def write_scaling(pattern: str, out: Path, metric: Metric = "loss") -> tuple[list[Study], list[Path]]:
    """Fit loss against size and against tokens, if there are enough points; return the studies and files written.

    The files are `scaling.json` and, for each study, `scaling_size` or `scaling_tokens` as .png and .svg.

    Raises:
        UserError: There are too few points for both fits, or two curves never reach the same loss.
    """
    points, notes = read_points(pattern, metric)
    chosen = {"size": _points_by_size(points), "tokens": _points_by_tokens(points)}
    lacks = {quantity: _lack(quantity, points) for quantity, points in chosen.items()}
    if all(lacks.values()):
        raise UserError(
            f"--scaling={pattern!r}: too few points to fit a·x^-b + c; {'; '.join(map(str, lacks.values()))}"
        )
    studies = [
        _study(quantity, found, notes if quantity == "size" else [])
        for quantity, found in chosen.items()
        if not lacks[quantity]
    ]
    files = [file for study in studies for file in save_figure(_draw(study, metric), out / f"scaling_{study.quantity}")]
    written = {
        "metric": metric,
        "studies": [_as_json(study) for study in studies],
        "not_fitted": {quantity: lack for quantity, lack in lacks.items() if lack},
    }
    write_atomically(out / "scaling.json", json.dumps(written, indent=2) + "\n")
    return studies, [*files, out / "scaling.json"]


def format_study(study: Study) -> tuple[rich.table.Table, rich.table.Table]:
    """Return the table of fits and the table of matches for a terminal, with 95 % intervals."""
    laws = rich.table.Table(title=f"{study.title}: a·x^-b + c")
    for title in ("architecture", "points", "a", "b", "c"):
        laws.add_column(title, justify="left" if title == "architecture" else "right")
    for name, fit in study.fits.items():
        shown = [f"{getattr(fit.law, p):.4g} ({_range(fit.interval(p))})" for p in "abc"]
        laws.add_row(rich.markup.escape(printable(name)), str(len(fit.x)), *shown)
    matches = rich.table.Table(title=f"{study.quantity} with which an architecture matches the {study.reference}")
    for title in ("architecture", study.quantity, study.reference, "loss", "needs of it", ""):
        matches.add_column(title, justify="left" if title in ("architecture", "") else "right")
    for name, found in study.matches.items():
        shown_name = rich.markup.escape(printable(name))
        for match in found:
            mark = f"extrapolated beyond {LARGEST_EXTRAPOLATION:g}× the data" if match.extrapolated else ""
            low, high = match.interval
            ratio = f"{match.ratio:.1%} ({low:.1%} to {high:.1%})"
            matches.add_row(
                shown_name,
                _count(match.x),
                _count(match.reference_x),
                f"{match.loss:.4f}",
                ratio,
                mark,
            )
    return laws, matches


def _points_by_size(points: Sequence[Point]) -> list[Point]:
    """Return the last point of each run."""
    return [point for point in points if point.is_last]


def _points_by_tokens(points: Sequence[Point]) -> list[Point]:
    """Return the points of the largest size at which all architectures have enough different numbers of tokens.

    If there is no such size, return the points of the size that comes closest.
    """

    def fewest(of_size: list[Point]) -> int:
        return min(len({p.tokens for p in of_size if p.architecture == name}) for name in _architectures(points))

    groups = group_sizes([point.size for point in points])
    by_size = [[point for point in points if point.size in sizes] for sizes in groups]
    return max(by_size, key=lambda found: (min(fewest(found), FEWEST_SIZES), found[0].size))


def _lack(quantity: str, points: Sequence[Point]) -> str | None:
    """Return a text on the points that are missing for a fit, or None if there are enough."""
    counts = {
        name: len({getattr(point, quantity) for point in points if point.architecture == name})
        for name in _architectures(points)
    }
    if counts and min(counts.values()) >= FEWEST_SIZES:
        return None
    found = ", ".join(f"{name} has {count}" for name, count in counts.items()) or "there is none"
    what = "sizes of finished runs" if quantity == "size" else "numbers of tokens at one size"
    return f"loss against {quantity} needs {FEWEST_SIZES} {what} of each architecture: {found}"


def _architectures(points: Sequence[Point]) -> list[str]:
    return sorted({point.architecture for point in points})


def _study(quantity: str, points: Sequence[Point], notes: Sequence[str]) -> Study:
    names = _architectures(points)
    fits = {
        name: Fit.of(
            np.array([getattr(point, quantity) for point in points if point.architecture == name]),
            np.array([point.loss for point in points if point.architecture == name]),
            resamples=RESAMPLES,
            seed=SEED,
        )
        for name in names
    }
    reference = REFERENCE if REFERENCE in fits else names[0]
    others = [name for name in names if name != reference]
    matches = {name: _matches(quantity, name, reference, fits) for name in others}
    drawn = {name: _match_to_draw(matches[name], fits[name], fits[reference]) for name in others}
    notes = list(notes)
    if quantity == "size":
        title = "loss against parameters"
        tokens = sorted({point.tokens for point in points})
        if tokens[-1] > 1.01 * tokens[0]:
            notes.append(
                f"the models have seen different numbers of tokens, {_count(tokens[0])} to {_count(tokens[-1])}"
            )
    else:
        title = f"loss against tokens, models of {_count(points[0].size)} parameters"
    return Study(quantity, title, fits, reference, matches, drawn, notes)


def _matches(quantity: str, name: str, reference: str, fits: dict[str, Fit]) -> list[Match]:
    """Return the matches at each point of an architecture and at the largest point of the reference.

    Raises:
        UserError: The reference never reaches the losses of the architecture.
    """
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
    """Return the match at the largest point that lies within the reference's data, as in the paper's figure.

    If no match lies within the data, return the one at the smallest point.
    """
    measured = [match for match in matches if match.x in fit.x]
    within = [match for match in measured if match.reference_x <= reference.x.max()]
    return (within or measured[:1])[-1]


def _draw(study: Study, metric: Metric) -> matplotlib.figure.Figure:
    """Draw the points, the fits with their bands, and the matches, as in the paper's Figure 3."""
    figure = matplotlib.figure.Figure(figsize=(6.5, 4.5), layout="constrained")
    axes = figure.subplots()
    colours = dict(zip(study.fits, series_colours(len(study.fits)), strict=True))
    for name, fit in study.fits.items():
        low, high = fit.x.min(), fit.x.max()
        reached = [match.reference_x if name == study.reference else match.x for match in study.drawn.values()]
        beyond = np.geomspace(min([low, *reached]), max([high, *reached]), 200)
        within = np.geomspace(low, high, 200)
        axes.plot(fit.x, fit.loss, "o", color=colours[name])
        axes.plot(within, fit.law(within), color=colours[name], label=f"{name}: {_law_text(fit)}")
        axes.plot(beyond, fit.law(beyond), "--", color=colours[name], linewidth=1)
        axes.fill_between(beyond, *fit.band(beyond), color=colours[name], alpha=0.15, linewidth=0)
    for match in study.drawn.values():
        axes.annotate(
            "",
            (match.x, match.loss),
            (match.reference_x, match.loss),
            arrowprops={"arrowstyle": "<->", "linestyle": ":"},
        )
        text = f"{match.ratio:.1%}" + (" (extrapolated)" if match.extrapolated else "")
        middle = float(np.sqrt(match.x * match.reference_x))
        axes.annotate(text, (middle, match.loss), (0, -4), textcoords="offset points", ha="center", va="top")
    x_label = "parameters" if study.quantity == "size" else "training tokens"
    label_axes(
        axes,
        {
            "title": study.title,
            "x_label": f"{x_label} (log scale)",
            "y_label": f"validation {METRIC_LABELS[metric]}",
            "log_x": True,
        },
    )
    add_legend(axes)
    return figure


def _as_json(study: Study) -> dict[str, Any]:
    return {
        "quantity": study.quantity,
        "title": study.title,
        "reference": study.reference,
        "fits": {
            name: {
                "points": [{study.quantity: x, "loss": loss} for x, loss in zip(fit.x, fit.loss, strict=True)],
                **{p: getattr(fit.law, p) for p in "abc"},
                "intervals": {p: fit.interval(p) for p in "abc"},
            }
            for name, fit in study.fits.items()
        },
        "matches": {name: [_match_as_json(match) for match in found] for name, found in study.matches.items()},
        "drawn": {name: _match_as_json(match) for name, match in study.drawn.items()},
        "notes": study.notes,
    }


def _match_as_json(match: Match) -> dict[str, Any]:
    # JSON has no infinity, so an infinite end of an interval becomes null.
    interval = [end if np.isfinite(end) else None for end in match.interval]
    return dataclasses.asdict(match) | {"interval": interval}


def _law_text(fit: Fit) -> str:
    return f"{fit.law.a:.3g}·x^-{fit.law.b:.3g} + {fit.law.c:.3g}"


def _range(interval: tuple[float, float]) -> str:
    return f"{interval[0]:.3g} to {interval[1]:.3g}"


def _count(number: float) -> str:
    """Return a number of parameters or tokens with a unit, such as 6.8B."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:,.0f}"
