"""The report's sections on suites: what each measures, its numbers and their differences, its charts and samples."""

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from difftx.analysis.differences import half_width
from difftx.config.fields import flat
from difftx.evals import SUITES, explanation_of
from difftx.evals.result import Number, format_together, format_value, read_numbers, signed_change
from difftx.report.arms import Arm, over_runs, seeds_of
from difftx.report.charts import heatmap_values
from difftx.report.panels import Cell, Panel, Section, Table, panel_over_steps, run_lines
from difftx.report.runs import RunRecord

VERDICT_SUITE = "loss"  # The verdict and the curves show this suite's numbers.
MAX_SHOWN_NUMBERS = 15  # Maximum numbers shown per section. The rest are in a table that the reader can open.
MAX_SHOWN_PANELS = 2  # Maximum figures shown per section. The rest are folded.
BANDS = "Lines are means over the runs of a model. Bands reach from its lowest run to its highest."
COUNTS = ("tokens", "documents", "demonstrations")  # Units of numbers that say how much was measured.

Result = Mapping[str, Any]  # A suite's result, as JSON.
Results = Mapping[int, Result]  # Step → result of one suite, by ascending step.
Newest = Mapping[Arm, list[tuple[RunRecord, Result]]]  # Arm → each of its runs, with the newest result of a suite.


def suite_sections(arms: Sequence[Arm], colours: Mapping[str, str], *, comparable: bool) -> list[Section]:
    """Return a section for each suite of the runs, except `VERDICT_SUITE`.

    If an arm has several runs, its numbers and charts are means. Arms are not `comparable` if their tokenizers differ;
    then only bits per byte have differences. An arm whose result has other options than the first arm's has no
    differences (`option_notes`).
    """
    sections = []
    runs = [run for arm in arms for run in arm.runs]
    found = {suite for run in runs for suite in run.results} - {VERDICT_SUITE}
    for suite in [*(name for name in SUITES if name in found), *sorted(found - SUITES.keys())]:
        results = {arm: [(run, run.results[suite]) for run in arm.runs if suite in run.results] for arm in arms}
        newest = {arm: _newest(of_arm) for arm, of_arm in results.items() if of_arm}
        title, explanation = explanation_of(suite)
        header, rows, basis, judged = _numbers(newest, comparable=comparable)
        first = (judged or list(rows))[:MAX_SHOWN_NUMBERS]
        has_seeds = any(len(of_arm) > 1 for of_arm in newest.values())
        panels = []
        for chart in _charts(newest, colours):
            has_bands = has_seeds and any(line.get("low") for line in chart.get("series", ()))
            panels.append(Panel(title=chart["title"], chart=chart, note=BANDS if has_bands else ""))
        main = SUITES[suite].main_charts if suite in SUITES else ()
        shown = [panel for panel in panels if panel.is_informative and (not main or panel.chart["name"] in main)]
        shown = shown[:MAX_SHOWN_PANELS]
        over_steps = _number_panels(suite, arms, colours)
        for run, of_run in itertools.chain(*results.values()):
            over_steps += _charts_over_steps(run.name, of_run)
        section = Section(
            id=f"suite-{suite}",
            title=title,
            explanation=explanation,
            basis="; ".join([_steps(results), *basis]),
            numbers=Table(header, [rows[name] for name in first]),
            further=Table(header, [row for name, row in rows.items() if name not in first]),
            panels=shown,
            folded=[*(panel for panel in panels if panel not in shown), *over_steps],
            samples=_samples(newest),
        )
        sections.append(section)
    return sections


def _newest(results: Sequence[tuple[RunRecord, Results]]) -> list[tuple[RunRecord, Result]]:
    """Return the newest result of each run of an arm. Leave out results with other options than the first one."""
    newest = [(run, of_run[max(of_run)]) for run, of_run in results]
    return [(run, result) for run, result in newest if not _changed_options(newest[0][1], result)]


def _steps(results: Mapping[Arm, Sequence[tuple[RunRecord, Results]]]) -> str:
    steps = {run.name: max(of_run) for of_arm in results.values() for run, of_run in of_arm}
    if len(steps) > 1 and len(set(steps.values())) == 1:
        return f"{len(steps)} runs at step {next(iter(steps.values())):,}"
    return "; ".join(f"{run} at step {step:,}" for run, step in steps.items())


def option_notes(runs: Sequence[RunRecord]) -> list[str]:
    """Return a note for each newest result of a suite that has other options than the first run's."""
    notes = []
    for suite in dict.fromkeys(suite for run in runs for suite in run.results):
        first, *others = [run for run in runs if suite in run.results]
        for run in others:
            if suite == VERDICT_SUITE and first.config.eval.loss_tokens != run.config.eval.loss_tokens:
                continue  # `data_notes` already says so.
            base, result = (of_run[max(of_run)] for of_run in (first.results[suite], run.results[suite]))
            if changes := _changed_options(base, result):
                fields = "; ".join(f"{name}: {before} and {after}" for name, (before, after) in changes.items())
                what = f"so their results of suite {suite} are not comparable"
                notes.append(f"{first.name} and {run.name} differ in {fields}, {what}")
    return notes


def _changed_options(first: Result, second: Result) -> dict[str, tuple[str, str]]:
    """Return both values of each option in which two results differ."""
    before, after = flat(first["options"]), flat(second["options"])

    def text(value: Any) -> str:
        """Return a value as JSON, with each SHA-256 shortened to 12 digits."""
        return re.sub(r"([0-9a-f]{12})[0-9a-f]{52}", r"\1…", json.dumps(value, ensure_ascii=False))

    changed = [name for name in before if name in after and before[name] != after[name]]
    return {name: (text(before[name]), text(after[name])) for name in changed}


def _numbers(
    newest: Newest, *, comparable: bool
) -> tuple[list[str], dict[str, list[str | Cell]], list[str], list[str]]:
    """Return the header and the rows of a table of numbers, notes, and the names of numbers with a better direction.

    A row has the number for each arm, its differences from the first arm, and its value by chance. Counts that are
    equal in all runs are in the notes instead of the table.
    """
    arms = list(newest)
    of_arms = [[(seeds_of(run), read_numbers(result)) for run, result in of_arm] for of_arm in newest.values()]
    names = dict.fromkeys(name for of_arm in of_arms for _, numbers in of_arm for name in numbers)
    all_numbers = [numbers for of_arm in of_arms for _, numbers in of_arm]
    has_chance = any(number.chance is not None for number in all_numbers[0].values())
    header = ["", *(["chance"] if has_chance else []), *(arm.name for arm in arms)]
    header += [f"{arm.name} − {arms[0].name}" for arm in arms[1:]]
    base = newest[arms[0]][0][1]
    is_like_base = [not _changed_options(base, newest[arm][0][1]) for arm in arms[1:]]
    rows, basis, judged, at_chance = {}, [], [], False
    for name in names:
        values = [numbers[name] for numbers in all_numbers if name in numbers]
        number, is_in_all = values[0], len(values) == len(all_numbers)
        if number.unit in COUNTS and is_in_all and len(set(values)) == 1:
            basis.append(f"{number.label}: {format_value(number)}")
            continue
        by_arm = [[(seeds, numbers[name]) for seeds, numbers in of_arm if name in numbers] for of_arm in of_arms]
        chance, *texts = _texts(number, by_arm)
        row = [Cell(number.label, unit=number.unit), *([chance] if has_chance else []), *texts]
        for is_comparable, of_arm in zip(is_like_base, by_arm[1:], strict=True):
            is_comparable = is_comparable and (comparable or name == "bits_per_byte")
            row.append(difference_of(by_arm[0], of_arm) if is_comparable and by_arm[0] and of_arm else "–")
        if judged and at_chance:
            row = [dataclasses.replace(x, verdict=None) if isinstance(x, Cell) else x for x in row]
        elif not judged and number.better:
            at_chance = all(_is_at_chance(number, [value for _, value in of_arm]) for of_arm in by_arm)
        rows[name] = row
        judged += [name] if number.better else []
    if at_chance:
        who = "no model is" if len(arms) > 1 else "the model is not"
        basis.append(
            f"{who} better than chance at {rows[judged[0]][0].text}, so no other row says which model is better"
        )
    return header, rows, basis, judged


def _is_at_chance(number: Number, values: Sequence[float]) -> bool:
    """Return whether the mean of the values is at most as good as chance. If chance is unknown, return False."""
    if number.chance is None or not values:
        return False
    mean = float(np.mean(values))
    return mean <= number.chance if number.better == "higher" else mean >= number.chance


def _texts(number: Number, by_arm: Sequence[Sequence[tuple[Any, Number]]]) -> list[str]:
    """Return the texts of a number: chance, and for each arm the mean and half the width of its 95 % interval."""
    values = [[value for _, value in of_arm] for of_arm in by_arm]
    means = [float(np.mean(of_arm)) if of_arm else None for of_arm in values]
    # Runs with equal seeds are not a sample of seeds.
    halves = [half_width([*dict(of).values()]) if 1 < len(dict(of)) == len(of) else None for of in by_arm]
    texts = format_together([number.chance, *means])
    decimals = max((len(text.partition(".")[2]) for text in texts), default=0)
    spreads = ["" if half is None else f" ± {half:,.{decimals}f}" for half in (None, *halves)]
    return [text + spread for text, spread in zip(texts, spreads, strict=True)]


def difference_of(first: Sequence[tuple[Any, Number]], second: Sequence[tuple[Any, Number]]) -> str | Cell:
    """Return the difference in a number between two arms, with a verdict if one direction is better.

    Each arm is a list of the seeds and the number of its runs. If both have several runs, add an interval.
    """
    before, after = (float(np.mean([value for _, value in of_arm])) for of_arm in (first, second))
    number, change = first[0][1], after - before
    interval, _ = over_runs(first, second)
    text = signed_change(before, after, relative=number.unit != "share" and interval is None)
    if interval is not None:
        ends = format_together([change, interval.low, interval.high], digits=3, signed=True)
        text = f"{ends[0]} ({ends[1]} to {ends[2]})"
    if number.better is None or change != change:
        return Cell(text)
    if _is_at_chance(number, [before]) and _is_at_chance(number, [after]):
        return Cell(text, "no better than chance")
    if (interval is not None and interval.low <= 0 <= interval.high) or (len(first) + len(second) > 2 and not interval):
        return Cell(text, "open")
    if change == 0:
        return Cell("0", "equal")
    return Cell(text, "better" if (change < 0) == (number.better == "lower") else "worse")


def _samples(newest: Newest) -> dict[str, list[tuple[str, str]]]:
    """Return the samples of the first run of each arm, grouped by prompt."""
    by_prompt: dict[str, list[tuple[str, str]]] = {}
    for arm, ((_, result), *_) in newest.items():
        for sample in result["details"].get("samples", []):
            by_prompt.setdefault(sample["prompt"], []).append((arm.name, sample["completion"]))
    return by_prompt


def _number_panels(suite: str, arms: Sequence[Arm], colours: Mapping[str, str]) -> list[Panel]:
    """Return a panel for each number of a suite that changes over the evaluated steps of a run."""
    runs = [run for arm in arms for run in arm.runs]
    by_step = {r.name: {step: read_numbers(x) for step, x in r.results.get(suite, {}).items()} for r in runs}
    found = {name: x for of_run in by_step.values() for numbers in of_run.values() for name, x in numbers.items()}

    def values_of(run: RunRecord, name: str) -> tuple[list[int], list[float]]:
        values = {step: numbers[name] for step, numbers in by_step[run.name].items() if name in numbers}
        return list(values), list(values.values())

    panels = []
    for name, number in found.items():
        series = run_lines(arms, colours, functools.partial(values_of, name=name))
        is_constant = len({value for line in series for value in line["y"]}) < 2
        if max(len(line["x"]) for line in series) > 1 and not is_constant:
            panels.append(panel_over_steps(f"{number.label} over the steps", series, number.axis))
    return panels


def _charts_over_steps(run: str, results: Results) -> list[Panel]:
    """Return a panel for each line of a chart with `over_steps`. It has one line per x, such as a layer."""
    found: dict[tuple[str, str], dict[float, dict[int, float]]] = {}  # (Title, x label) → x → step → y.
    for step, result in results.items():
        for chart in result["charts"]:
            for line in chart["series"] if chart.get("over_steps") else []:
                values = found.setdefault((f"{chart['title']}: {line['name']}", chart["x_label"]), {})
                for x, y in zip(line["x"], line["y"], strict=True):
                    values.setdefault(x, {})[step] = y
    panels = []
    for (title, x_label), values in found.items():
        if max(map(len, values.values()), default=0) < 2:
            continue
        series = [{"name": f"{x_label} {x:g}", "x": [*y_at], "y": [*y_at.values()]} for x, y_at in values.items()]
        panels.append(panel_over_steps(f"{title}, over the steps: {run}", series, title))
    return panels


def _charts(newest: Newest, colours: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the charts of all arms. Merge line charts of the same name: each arm has a line in its colour.

    If the charts to merge have several lines, make one chart per line, named `<chart>: <line>`. Lines that some arms
    lack go into one common chart. Heatmaps are not merged.
    """
    by_name: dict[str, dict[Arm, dict[str, Any]]] = {}
    for arm, of_arm in newest.items():
        by_run = [{chart["name"]: chart for chart in result["charts"]} for _, result in of_arm]
        for name in by_run[0]:
            by_name.setdefault(name, {})[arm] = _mean_chart([charts[name] for charts in by_run if name in charts])
    return [chart for of_name in by_name.values() for chart in _merged(of_name, colours, len(newest))]


def _merged(charts: Mapping[Arm, dict[str, Any]], colours: Mapping[str, str], arms: int) -> list[dict[str, Any]]:
    chart = next(iter(charts.values()))
    if arms == 1:
        return [chart]
    if chart["kind"] == "heatmap":
        return [{**of_arm, "title": f"{arm.name}: {of_arm['title']}"} for arm, of_arm in charts.items()]
    references = [line for of_arm in charts.values() for line in of_arm["series"] if line.get("is_reference")]
    references = [line for i, line in enumerate(references) if line not in references[:i]]
    measured = {arm: [x for x in of_arm["series"] if not x.get("is_reference")] for arm, of_arm in charts.items()}
    is_single = max(map(len, measured.values())) == 1  # The names of the lines may then differ.
    by_name: dict[str, list[tuple[Arm, dict[str, Any]]]] = {}
    for arm, lines in measured.items():
        for line in lines:
            by_name.setdefault("" if is_single else line["name"], []).append((arm, line))
    merged, own = [], []
    for name, lines in by_name.items():
        if is_single or len(lines) == len(charts) > 1:
            series = [{**line, "name": arm.name, "colour": colours[arm.name]} for arm, line in lines]
            named = {"name": f"{chart['name']}: {name}", "title": f"{chart['title']}: {name}"} if name else {}
            merged.append({**chart, "series": [*series, *references], **named})
        else:
            own += [{**line, "name": f"{arm.name}: {line['name']}"} for arm, line in lines]
    return merged + ([{**chart, "series": [*own, *references]}] if own else [])


def _mean_chart(charts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean of an arm's charts, with bands over the range of its runs, or the first chart if axes differ.

    The bands are ranges because a confidence interval over so few runs could exceed the range of a share. They include
    the bands of the runs' own charts.
    """
    first = charts[0]
    if len(charts) == 1:
        return first
    if first["kind"] == "heatmap":
        if any((chart["x"], chart["y"]) != (first["x"], first["y"]) for chart in charts):
            return first
        return {**first, "values": np.mean([heatmap_values(chart) for chart in charts], axis=0).tolist()}
    axes = [[(line["name"], line["x"]) for line in chart["series"]] for chart in charts]
    if any(of_chart != axes[0] for of_chart in axes):
        return first
    series = []
    for lines in zip(*(chart["series"] for chart in charts), strict=True):
        y, low, high = (np.array([line.get(e) or line["y"] for line in lines], float) for e in ("y", "low", "high"))
        band = {"low": low.min(axis=0).tolist(), "high": high.max(axis=0).tolist()}
        series.append({**lines[0], "y": y.mean(axis=0).tolist(), **({} if lines[0].get("is_reference") else band)})
    return {**first, "series": series}
