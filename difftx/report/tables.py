"""Tables of the report: descriptions of the runs, differences of their configs, and results of the suites."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from difftx.model.abstract import count_parameters
from difftx.model.flops import flops_per_token
from difftx.report.runs import RunRecord
from difftx.training.resume import changed_fields

MOST_ROWS = 12  # Most rows in the table of a line chart's values.
MOST_VALUES = 400  # Most cells of a heatmap that is also shown as a table.


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of texts, whose first column names the rows."""

    header: list[str]
    rows: list[list[str]]


def run_headers(runs: Sequence[RunRecord]) -> Table:
    """Return a table with a description of each run: model, progress, devices, data and versions."""
    columns = [_header(run) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(column.get(name, "–") for column in columns)] for name in names]
    return Table(["", *(run.name for run in runs)], rows)


def config_changes(runs: Sequence[RunRecord]) -> Table:
    """Return a table of the fields in which some run's config differs from the first run's."""
    changed: dict[str, dict[str, str]] = {}
    first = runs[0]
    for run in runs[1:]:
        for change in changed_fields(first.config, run.config):
            changed.setdefault(change.field, {first.name: str(change.old)})[run.name] = str(change.new)
    rows = [[field, *(v.get(run.name, v[first.name]) for run in runs)] for field, v in changed.items()]
    return Table(["field", *(run.name for run in runs)], rows)


def results(runs: Sequence[RunRecord], *, comparable: bool) -> list[tuple[str, Table]]:
    """Return (suite, table) for each suite: the numbers of each run's newest result.

    Each run after the first one has a column with the differences from the first run that has the suite.

    Args:
        runs: Runs to compare.
        comparable: Whether all runs have the same tokenizer. If not, only bits per byte have differences.
    """
    tables = []
    for suite in dict.fromkeys(suite for run in runs for suite in run.results):
        newest = {run.name: max(run.results[suite].items()) for run in runs if suite in run.results}
        (first, (step, result)), *others = newest.items()
        base, header = result["numbers"], ["number", f"{first} (step {step:,})"]
        for run, (step, _) in others:
            header += [f"{run} (step {step:,})", "difference"]
        rows = []
        for name in dict.fromkeys(name for _, result in newest.values() for name in result["numbers"]):
            row = [name, shown(base.get(name))]
            for _, (_, result) in others:
                value = result["numbers"].get(name)
                is_comparable = comparable or name == "bits_per_byte"
                row += [shown(value), _difference(base.get(name), value) if is_comparable else "–"]
            rows.append(row)
        tables.append((suite, Table(header, rows)))
    return tables


def samples(runs: Sequence[RunRecord]) -> list[tuple[str, str, str]]:
    """Return (run, prompt, completion) for each sample in the newest results of the runs' suites."""
    texts = []
    for run in runs:
        for steps in run.results.values():
            details = list(steps.values())[-1].get("details", {})
            texts += [(run.name, str(s.get("prompt")), str(s.get("completion"))) for s in details.get("samples", [])]
    return texts


def chart_values(chart: Mapping[str, Any]) -> Table | None:
    """Return a chart's values as a table, or None for a heatmap of more than `MOST_VALUES` cells."""
    if chart["kind"] == "line":
        return series_values(chart["x_label"], {line["name"]: (line["x"], line["y"]) for line in chart["series"]})
    if len(chart["x"]) * len(chart["y"]) > MOST_VALUES:
        return None
    header = [f"{chart['y_label']} \\ {chart['x_label']}", *map(shown, chart["x"])]
    return Table(header, [[shown(y), *map(shown, row)] for y, row in zip(chart["y"], chart["values"], strict=True)])


def series_values(x_label: str, series: Mapping[str, tuple[Any, Any]]) -> Table:
    """Return the values of lines at up to `MOST_ROWS` evenly spaced points of the first line.

    Args:
        x_label: Header of the first column.
        series: Name of a line → its x and y values. The table has the y value at the nearest x.
    """
    if not series:
        return Table([x_label], [])
    first = np.array(next(iter(series.values()))[0], float)
    rows = []
    for x in first[evenly_spaced(len(first), MOST_ROWS)]:
        row = [shown(float(x))]
        for xs, ys in series.values():
            xs = np.array(xs, float)
            row.append(shown(ys[int(np.argmin(np.abs(xs - x)))]) if len(xs) else "–")
        rows.append(row)
    return Table([x_label, *series], rows)


def evenly_spaced(count: int, most: int) -> np.ndarray:
    """Return at most `most` evenly spaced indices below `count`, including the first and the last."""
    return np.unique(np.linspace(0, max(count - 1, 0), min(count, most)).round().astype(int))


def event_text(entry: Mapping[str, Any]) -> str:
    """Return a journal entry as one line of text."""
    details = [f"{name} {value}" for name, value in entry.items() if name not in ("event", "step")]
    return ", ".join([str(entry["event"]), *details])


def shown(value: Any) -> str:
    """Return a value as text for a table: whole numbers in full, fractions with four or five significant digits."""
    if value is None:
        return "–"
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int) or (abs(value) < 1e15 and float(value).is_integer()):
        return f"{int(value):,}"
    return f"{value:,.5g}" if abs(value) < 1e5 else f"{value:.4g}"


def _difference(before: Any, value: Any) -> str:
    if not all(isinstance(v, int | float) for v in (before, value)):
        return "–"
    relative = f" ({(value - before) / abs(before):+.2%})" if before else ""
    return f"{value - before:+.4g}{relative}"


def _header(run: RunRecord) -> dict[str, str]:
    config, manifest = run.config, run.manifest
    parameters = count_parameters(config.model)
    train = run.split("train")
    devices, data = manifest.get("devices", {}), manifest.get("data", {})
    tokens = train[-1]["step"] * config.train.global_batch_tokens
    rate = flops_per_token(config.model, config.data.sequence_length, causal=False)
    mesh = ", ".join(f"{axis} {size}" for axis, size in devices.get("mesh", {}).items() if size != 1)
    header = {
        "folder": str(run.workdir),
        "architecture": config.model.architecture,
        "parameters": f"{parameters.total:,}, {parameters.embedding:,} of them embedding",
        "steps": f"{train[-1]['step']:,} of {run.steps:,}",
        "training tokens": f"{tokens:,}",
        "training FLOPs (6 N + 12 L T d a token)": f"{rate * tokens:.3g}",
        "attempts": str(max(row["attempt"] for row in train)),
    }
    if devices:
        header["devices"] = f"{devices.get('count')} × {devices.get('kind')}" + (f"; mesh {mesh}" if mesh else "")
    for name, label in (("train_tokens", "training data"), ("valid_tokens", "validation data")):
        if isinstance(data.get(name), dict):
            header[label] = ", ".join(f"{source}: {shown(count)} tokens" for source, count in data[name].items())
    header["tokenizer"] = config.data.tokenizer + (f" ({str(data['tokenizer'])[:12]}…)" if "tokenizer" in data else "")
    for name in ("commit", "python"):
        if manifest.get(name):
            header[name] = str(manifest[name])
    if isinstance(manifest.get("packages"), dict):
        header["packages"] = ", ".join(f"{name} {version}" for name, version in manifest["packages"].items())
    return header
