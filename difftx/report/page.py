"""The report, a self-contained HTML page that describes one run or compares several runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bokeh.document
import bokeh.embed
import bokeh.model
import bokeh.resources
import jinja2

from difftx.errors import UserError, printable
from difftx.files import write_atomically
from difftx.model.abstract import count_parameters
from difftx.model.flops import flops_per_token
from difftx.report import panels
from difftx.report.panels import Table, shown
from difftx.report.runs import RunRecord, different_tokenizers, read_runs
from difftx.training.resume import changed_fields

TEMPLATES = Path(__file__).parent / "templates"


def write_page(workdirs: Sequence[Path], out: Path) -> Path:
    """Write the report of the given runs, and return its path. All other runs are compared with the first one."""
    if len({workdir.resolve() for workdir in workdirs}) < len(workdirs):
        raise UserError(f"--workdir={','.join(map(str, workdirs))}: a run is named twice")
    runs = read_runs(workdirs)
    foreign = different_tokenizers(runs)
    sections = [
        panels.losses(runs, comparable=foreign is None),
        panels.evaluations(runs),
        panels.lambdas(runs),
        panels.gradients(runs),
        panels.wall_time(runs),
    ]
    figures: dict[str, bokeh.model.Model] = {
        panel.figure.id: panel.figure for section in sections for panel in section.panels
    }
    document = bokeh.document.Document()
    with document.models.freeze():  # Without this, Bokeh would traverse all figures whenever one is added.
        for figure in figures.values():
            document.add_root(figure)
    script, divs = bokeh.embed.components(figures)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    template = environment.get_template("report.html")
    page = template.render(
        title=" and ".join(run.name for run in runs),
        runs=_run_headers(runs),
        changes=_config_changes(runs),
        results=_results(runs, comparable=foreign is None),
        samples=_samples(runs),
        notes=_notes(runs, foreign, [section.title for section in sections if not section.panels]),
        sections=[section for section in sections if section.panels],
        divs=divs,
        script=script,
        library=bokeh.resources.Resources("inline", components=["bokeh"]).render_js(),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page)
    return out


def _notes(runs: Sequence[RunRecord], foreign: tuple[str, str] | None, empty: Sequence[str]) -> list[str]:
    """Return notes on data that the page thins or leaves out, and on the sections without data, `empty`."""
    notes = [
        f"Lines are thinned to {panels.MOST_POINTS:,} points, those of layers to {panels.MOST_POINTS_OF_MANY}: of each "
        "stretch the least and the greatest value stay. Hover or tap for values; a name below a figure hides its line.",
    ]
    for run in runs:
        if run.skipped:
            notes.append(f"{run.name}: {run.skipped} lines of metrics and journal could not be read.")
        notes += [
            f"{run.name}: evals/{suite}/{step}.json is left out: its weights are not those of checkpoints/{step}. Run "
            f"eval.py --workdir={run.workdir} --suite={suite} --step={step} to evaluate that checkpoint."
            for suite, step in run.outdated
        ]
    if foreign:
        what = "different tokenizers: losses per token do not compare, bits per byte do"
        notes.append(f"{foreign[0]} and {foreign[1]} have {what}.")
    if empty:
        notes.append(f"Nothing was recorded yet for: {', '.join(empty)}.")
    return notes


def _run_headers(runs: Sequence[RunRecord]) -> Table:
    """Return a table that describes each run in a column: model, progress, devices, data and versions."""
    columns = [_header(run) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(column.get(name, "–") for column in columns)] for name in names]
    return Table(["", *(run.name for run in runs)], rows)


def _config_changes(runs: Sequence[RunRecord]) -> Table:
    """Return a table of the config fields in which a run differs from the first run, with their values in each run."""
    changed: dict[str, dict[str, str]] = {}
    first = runs[0]
    for run in runs[1:]:
        for change in changed_fields(first.config, run.config):
            changed.setdefault(change.field, {first.name: str(change.old)})[run.name] = str(change.new)
    rows = [[field, *(v.get(run.name, v[first.name]) for run in runs)] for field, v in changed.items()]
    return Table(["field", *(run.name for run in runs)], rows)


def _results(runs: Sequence[RunRecord], *, comparable: bool) -> list[tuple[str, Table]]:
    """Return (suite, table) for each suite. The table has the numbers in each run's newest result.

    It also has the differences from the first run that has the suite. If the runs are not `comparable`, because their
    tokenizers differ, only bits per byte have differences.
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


def _samples(runs: Sequence[RunRecord]) -> list[tuple[str, str, str]]:
    """Return (run, prompt, completion) for each sample in the newest results of the suites."""
    texts = []
    for run in runs:
        for steps in run.results.values():
            details = list(steps.values())[-1].get("details", {})
            texts += [(run.name, str(s.get("prompt")), str(s.get("completion"))) for s in details.get("samples", [])]
    return texts


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
    if "attention_kernel" in manifest:
        header["attention kernel"] = str(manifest["attention_kernel"])
    for name, label in (("train_tokens", "training data"), ("valid_tokens", "validation data")):
        if isinstance(data.get(name), dict):
            header[label] = ", ".join(f"{source}: {shown(count)} tokens" for source, count in data[name].items())
    header["tokenizer"] = config.data.tokenizer + (f" ({str(data['tokenizer'])[:12]}…)" if "tokenizer" in data else "")
    header |= {name: str(manifest[name]) for name in ("commit", "python") if manifest.get(name)}
    if isinstance(manifest.get("packages"), dict):
        header["packages"] = ", ".join(f"{name} {version}" for name, version in manifest["packages"].items())
    return header
