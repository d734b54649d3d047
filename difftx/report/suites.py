"""The report's sections on suites: what each measures, its numbers and their differences, its charts and samples."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from difftx.config.fields import flat
from difftx.evals import SUITES, explanation_of
from difftx.evals.result import Number, format_value, read_numbers
from difftx.report.panels import Cell, Panel, Table, averaged_heatmap, chart_panel, panel_over_steps, thinned_lines
from difftx.report.runs import RunRecord

VERDICT_SUITE = "loss"  # The verdict and the curves show this suite's numbers.
MAX_SHOWN_NUMBERS = 15  # A section shows at most this many numbers. The others are in a table that the reader opens.
COUNTS = ("tokens", "documents", "demonstrations")  # Units of numbers that describe how much was measured.

Result = Mapping[str, Any]  # A result of a suite, as JSON.
Results = Mapping[int, Result]  # Step → result of one suite, in ascending order of steps.


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuiteSection:
    """Results of one suite."""

    id: str
    title: str
    explanation: str
    basis: str  # Steps of the results, and how much was measured.
    numbers: Table
    further: Table  # Numbers that are folded away, such as those of which neither direction is better.
    panels: list[Panel]
    samples: dict[str, list[tuple[str, str]]]  # Prompt → its completion by each run (name of the run, text).


def suite_sections(runs: Sequence[RunRecord], *, comparable: bool) -> list[SuiteSection]:
    """Return a section for each suite of the runs, except `VERDICT_SUITE`.

    If the runs are not `comparable`, because their tokenizers differ, only bits per byte have differences. Differences
    are also omitted for a run whose result has other options than the first run's (`option_notes`).
    """
    sections = []
    found = {suite for run in runs for suite in run.results} - {VERDICT_SUITE}
    for suite in [*(name for name in SUITES if name in found), *sorted(found - SUITES.keys())]:
        results = {run.name: run.results[suite] for run in runs if suite in run.results}
        newest = {run: of_run[max(of_run)] for run, of_run in results.items()}
        title, explanation = explanation_of(suite)
        panels = _chart_panels({run: result.get("charts", []) for run, result in newest.items()})
        panels += _number_panels(results)
        for run, of_run in results.items():
            panels += _charts_over_steps(run, of_run)
        header, rows, basis, judged = _numbers(newest, comparable=comparable)
        first = (judged or list(rows))[:MAX_SHOWN_NUMBERS]
        if suite in SUITES and SUITES[suite].charts_show_numbers:
            first = []
        steps = {run: max(of_run) for run, of_run in results.items()}
        of_steps = [f"{run} at step {step:,}" for run, step in steps.items()]
        section = SuiteSection(
            id=f"suite-{suite}",
            title=title,
            explanation=explanation,
            basis="; ".join([*of_steps, *basis]),
            numbers=Table(header, [rows[name] for name in first]),
            further=Table(header, [row for name, row in rows.items() if name not in first]),
            panels=panels,
            samples=_samples(newest),
        )
        sections.append(section)
    return sections


def option_notes(runs: Sequence[RunRecord]) -> list[str]:
    """Return a note for each newest result of a suite with other options than the newest result of the first run."""
    notes = []
    for suite in dict.fromkeys(suite for run in runs for suite in run.results):
        first, *others = [run for run in runs if suite in run.results]
        for run in others:
            if suite == VERDICT_SUITE and first.config.eval.loss_tokens != run.config.eval.loss_tokens:
                continue  # A note of `data_notes` says so.
            base, result = (of_run[max(of_run)] for of_run in (first.results[suite], run.results[suite]))
            if changes := _changed_options(base, result):
                fields = "; ".join(f"{name}: {before} and {after}" for name, (before, after) in changes.items())
                what = f"so their results of suite {suite} are not comparable"
                notes.append(f"{first.name} and {run.name} differ in {fields}, {what}")
    return notes


def _changed_options(first: Result, second: Result) -> dict[str, tuple[str, str]]:
    """Return the values of each option in which two results differ. Options that one does not record are left out."""
    default: dict[str, Any] = {"revision": 0}  # A result does not record revision 0.
    recorded = (o if isinstance(o := result.get("options"), dict) else {} for result in (first, second))
    before, after = (flat(default | options) for options in recorded)

    def text(value: Any) -> str:
        """Return a value as JSON, with the first 12 digits of each SHA-256."""
        return re.sub(r"([0-9a-f]{12})[0-9a-f]{52}", r"\1…", json.dumps(value, ensure_ascii=False))

    changed = [name for name in before if name in after and before[name] != after[name]]
    return {name: (text(before[name]), text(after[name])) for name in changed}


def _numbers(
    newest: Mapping[str, Result], *, comparable: bool
) -> tuple[list[str], dict[str, list[str | Cell]], list[str], list[str]]:
    """Return the header and the rows of a table of the numbers, and texts of the counts that are equal in all runs.

    The table also has the differences from the first run, and the values of guessing. The last list has the names of
    numbers of which one direction is better.
    """
    (first, base), *others = newest.items()
    of_runs = [read_numbers(result) for result in newest.values()]
    has_chance = any(number.chance is not None for number in of_runs[0].values())
    header = ["", *(["guessing"] if has_chance else []), first]
    for run, _ in others:
        header += [run, f"{run} − {first}"]
    rows, basis, judged = {}, [], []
    has_other_options = [bool(_changed_options(base, result)) for _, result in others]
    for name in dict.fromkeys(name for numbers in of_runs for name in numbers):
        values = [numbers.get(name) for numbers in of_runs]
        number = next(value for value in values if value is not None)
        if number.unit in COUNTS and len(set(values)) == 1:
            basis.append(f"{number.label}: {format_value(number)}")
            continue
        row = [Cell(number.label, unit=number.unit)]
        row += [format_value(None if values[0] is None else values[0].chance)] if has_chance else []
        row.append(format_value(values[0]))
        for other_options, value in zip(has_other_options, values[1:], strict=True):
            is_comparable = (comparable or name == "bits_per_byte") and not other_options
            row += [format_value(value), difference_of(values[0], value) if is_comparable else "–"]
        rows[name] = row
        judged += [name] if number.better else []
    return header, rows, basis, judged


def difference_of(before: Number | None, value: Number | None) -> str | Cell:
    """Return the difference of two values of a number, with a verdict if one direction is better."""
    if before is None or value is None:
        return "–"
    difference = value - before
    text = signed_change(before, value, relative=before.unit != "share")
    if before.better is None or difference != difference:
        return Cell(text, "")
    if difference == 0:
        return Cell("0", "equal")
    return Cell(text, "better" if (difference < 0) == (before.better == "lower") else "worse")


def signed_change(before: float, value: float, *, relative: bool = True) -> str:
    """Return the difference of two values with its sign and, if `relative`, as a percentage of the first value."""
    share = f" ({(value - before) / abs(before):+.2%})" if before and relative else ""
    return f"{value - before:+.4g}{share}".replace("-", "−")


def _samples(newest: Mapping[str, Result]) -> dict[str, list[tuple[str, str]]]:
    """Return the samples in the details of the results, those of the same prompt together."""
    by_prompt: dict[str, list[tuple[str, str]]] = {}
    for run, result in newest.items():
        for sample in result.get("details", {}).get("samples", []):
            by_prompt.setdefault(str(sample.get("prompt")), []).append((run, str(sample.get("completion"))))
    return by_prompt


def _chart_panels(charts_of_run: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Panel]:
    panels = []
    for chart in _merged(charts_of_run):
        thin, note = thinned_lines(chart) if chart["kind"] == "line" else averaged_heatmap(chart)
        panels.append(chart_panel(chart["title"], thin, note))
    return panels


def _number_panels(results: Mapping[str, Results]) -> list[Panel]:
    """Return a panel for each number of a suite that changes between the evaluated steps of a run."""
    panels = []
    by_step = {run: {step: read_numbers(result) for step, result in of_run.items()} for run, of_run in results.items()}
    found = {name: x for of_run in by_step.values() for numbers in of_run.values() for name, x in numbers.items()}
    for name, number in found.items():
        lines = {}
        for run, of_run in by_step.items():
            values = {step: numbers[name] for step, numbers in of_run.items() if name in numbers}
            lines[run] = list(values), list(values.values())
        is_constant = len({value for _, values in lines.values() for value in values}) < 2
        if max(len(steps) for steps, _ in lines.values()) > 1 and not is_constant:
            panels.append(panel_over_steps(f"{number.label} over the steps", lines, number.axis))
    return panels


def _charts_over_steps(run: str, results: Results) -> list[Panel]:
    """Return a panel for each line of a chart with `over_steps`. In it, each x, such as a layer, becomes a line."""
    found: dict[tuple[str, str], dict[float, dict[int, float]]] = {}  # (Title, x label) → x → step → y.
    for step, result in results.items():
        for chart in result.get("charts", []):
            for line in chart["series"] if chart.get("over_steps") else []:
                values = found.setdefault((f"{chart['title']}: {line['name']}", chart["x_label"]), {})
                for x, y in zip(line["x"], line["y"], strict=True):
                    values.setdefault(x, {})[step] = y
    panels = []
    for (title, x_label), values in found.items():
        if max(map(len, values.values()), default=0) < 2:
            continue
        lines = {f"{x_label} {x:g}": (list(of_x), list(of_x.values())) for x, of_x in values.items()}
        panels.append(panel_over_steps(f"{title}, over the steps: {run}", lines, title))
    return panels


def _merged(charts_of_run: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the charts of all runs. Line charts of the same name are merged into one, but heatmaps are not.

    If a chart has several lines per run, a line's colour shows its name and its dashes show the run.
    """
    if len(charts_of_run) == 1:
        (charts,) = charts_of_run.values()
        return list({chart["name"]: dict(chart) for chart in charts}.values())
    merged: dict[str, list[dict[str, Any]]] = {}  # Name → one line chart, or a heatmap of each run.
    for index, (run, charts) in enumerate(charts_of_run.items()):
        for chart in charts:
            of_name = merged.setdefault(chart["name"], [])
            if chart["kind"] == "heatmap":
                of_name.append({**chart, "title": f"{run}: {chart['title']}"})
                continue
            if not of_name:
                of_name.append({**chart, "series": []})
            series = of_name[0]["series"]
            is_single = sum(not line.get("is_reference") for line in chart["series"]) == 1
            for line in chart["series"]:
                if line.get("is_reference"):
                    series += [line] if line not in series else []
                elif is_single:
                    series.append({**line, "name": run})
                else:
                    styles = {"colour_of": line["name"], "dash": index}
                    series.append({**line, **styles, "name": f"{run}: {line['name']}"})
    return [chart for charts in merged.values() for chart in charts]
