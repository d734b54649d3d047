"""Write the report: a self-contained HTML page about one run, or a comparison of several runs."""

import datetime
import itertools
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path

import jinja2

from difftx.data.sources import STDLIB
from difftx.errors import UserError, printable
from difftx.evals.result import format_together, format_value, read_numbers
from difftx.files import write_atomically
from difftx.model.abstract import count_parameters
from difftx.model.architectures import describe_heads
from difftx.model.flops import flops_per_token
from difftx.report import panels
from difftx.report.charts import colours_of, line_colours, page_figure, short_number
from difftx.report.curves import summary
from difftx.report.panels import Cell, Panel, Table
from difftx.report.runs import X_AXES, Metric, RunRecord, baselines_first, data_notes, different_tokenizers, read_runs
from difftx.report.suites import option_notes, suite_sections
from difftx.report.verdict import Verdict, listed, verdict
from difftx.training.resume import changed_fields

TEMPLATES = Path(__file__).parent / "templates"
# Numbers of the suite "loss" → label and unit, for the table below the verdict.
LOSSES = {
    "loss": Cell("validation loss", unit="nats per token"),
    "perplexity": Cell("perplexity"),
    "bits_per_byte": Cell("bits per byte"),
}


def write_page(workdirs: Sequence[Path], out: Path) -> Verdict:
    """Write the report on runs in the local folders `workdirs` (`pulled`) to `out`, and return its verdict.

    Transformers come first, because they are the baselines. All runs are compared with the first one.
    """
    if len({workdir.resolve() for workdir in workdirs}) < len(workdirs):
        raise UserError(f"--workdir={','.join(map(str, workdirs))}: a run is named twice")
    runs = baselines_first(read_runs(workdirs))
    with_different_tokenizers = different_tokenizers(runs)
    metric: Metric = "bits_per_byte" if with_different_tokenizers else "loss"
    judged = verdict(runs, metric)
    colours = colours_of([arm.name for arm in judged.arms])
    comparable = with_different_tokenizers is None
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    salts, styles = map(str, itertools.count()), {}
    page = environment.get_template("report.html").render(
        title=listed([arm.name for arm in judged.arms]),
        colours=colours | {arm.title: colours[arm.name] for arm in judged.arms},
        verdict=judged,
        scores=_scores(judged, metric),
        notes=_notes(runs, with_different_tokenizers),
        losses=panels.loss_panels(judged.arms, colours, metric),
        controls={"against": list(X_AXES.items()), "axes": [("linear", "linear"), ("log", "logarithmic")]},
        suites=suite_sections(judged.arms, colours, comparable=comparable),
        training=panels.training(judged.arms, colours, metric),
        has_seeds=len(judged.arms) < len(runs),
        time=panels.wall_time(runs),
        headers=_run_headers(runs),
        changes=_config_changes(runs),
        commands=_commands(runs, out),
        figure_of=lambda panel: page_figure(panel.chart, styles, next(salts)),
        styles=styles,
        legend_of=_legend,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page)
    return judged


def _legend(panel: Panel) -> list[tuple[str, str, list[int]]]:
    """Return the legend of a line chart, if it has several groups: name, colour and line indices of each group."""
    if panel.chart["kind"] == "heatmap":
        return []
    series, groups = panel.chart["series"], {}
    for index, (line, colour) in enumerate(zip(series, line_colours(series), strict=True)):
        groups.setdefault((line.get("group", line["name"]) or None, colour), []).append(index)
    # Lines without a legend entry are hidden together with the named lines of the same colour.
    named = {colour: name for name, colour in groups if name}
    merged: dict[tuple[str, str], list[int]] = {}
    for (name, colour), indices in groups.items():
        merged.setdefault((name or named[colour], colour), []).extend(indices)
    return [(name, colour, indices) for (name, colour), indices in merged.items()]


def _scores(judged: Verdict, metric: Metric) -> Table:
    """Return a table with a column per arm: validation losses, the loss of guessing, and sizes of models and data.

    For a single arm, the loss is left out, because the verdict has it. The row of differences does not say "better",
    because the verdict says how certain the differences are.
    """
    arms = judged.arms
    rows: list[Sequence[str | Cell]] = []

    def add(label: Cell, texts: Sequence[str]) -> None:
        rows.append([label, *_once(texts)])

    for name, label in LOSSES.items():
        found = [arm.mean(name) for arm in arms]
        if any(value is not None for value in found) and not (len(arms) == 1 and name == metric):
            add(label, format_together(found))
        if name == metric and judged.differences:
            differences = [judged.differences.get(arm.name, "–") for arm in arms]
            add(Cell(f"difference from {arms[0].name}, 95 % interval"), differences)
    if any(guesses := [_guess(arm.runs[0]) for arm in arms]):
        add(Cell("loss of a uniform guess", unit="nats per token"), format_together(guesses))
    models = [arm.runs[0].config.model for arm in arms]
    add(Cell("heads"), [describe_heads(model) for model in models])
    if len({model.head_norm for model in models}) > 1:
        add(Cell("head norm"), [model.head_norm for model in models])
    add(Cell("parameters"), [format_value(count_parameters(model).total) for model in models])
    tokens = [sorted({run.tokens for run in arm.runs}) for arm in arms]
    add(Cell("training tokens"), [" to ".join(map(format_value, of[:: max(len(of) - 1, 1)])) for of in tokens])
    speeds = [[row["tokens_per_second"] for run in arm.runs for row in run.split("train")] for arm in arms]
    if all(speeds):
        add(Cell("speed of training", unit="tokens per second"), format_together(list(map(statistics.median, speeds))))
    return Table(["", *(arm.title for arm in arms)], rows)


def _once(values: Sequence[str]) -> list[str | Cell]:
    """Return the cells of a table row. If all values are equal, return one cell that spans all runs."""
    return [Cell(values[0], span=len(values))] if len(set(values)) == 1 else list(values)


def _guess(run: RunRecord) -> float | None:
    """Return the loss of a uniform guess, or None if the run has no result of the suite `loss`."""
    results = list(run.results.get("loss", {}).values())
    return read_numbers(results[-1])["loss"].chance if results else None


def _notes(runs: Sequence[RunRecord], with_different_tokenizers: tuple[str, str] | None) -> list[str]:
    """Return notes on data and results that are unreadable, outdated or not comparable."""
    notes = []
    if any(run.config.data.path == STDLIB for run in runs):
        notes.append(f"{STDLIB} is the source code of Python's standard library.")
    for run in runs:
        notes += [
            f"{run.name}: evals/{suite}/{step}.json is left out: its weights are not those of checkpoints/{step}. To "
            "evaluate that checkpoint, run "
            + _command("eval", f"--workdir={run.workdir}", f"--suite={suite}", f"--step={step}")
            for suite, step in run.outdated
        ]
    notes += [f"{note}." for note in (*data_notes(runs), *option_notes(runs))]
    if with_different_tokenizers:
        what = "different tokenizers: losses per token do not compare, bits per byte do"
        notes.append(f"{with_different_tokenizers[0]} and {with_different_tokenizers[1]} have {what}.")
    return notes


def _commands(runs: Sequence[RunRecord], out: Path) -> list[str]:
    """Return the commands that trained the runs, evaluated them, and wrote this page."""
    commands = []
    for run in runs:
        commands.append(run.manifest["command"])
        if run.results:
            commands.append(_command("eval", f"--workdir={run.workdir}", f"--suite={','.join(run.results)}"))
    workdirs = ",".join(str(run.workdir) for run in runs)
    return [*commands, _command("report", f"--workdir={workdirs}", f"--out={out}")]


def _command(*words: str) -> str:
    return shlex.join(["difftx", *words])


def _run_headers(runs: Sequence[RunRecord]) -> Table:
    """Return a table with a column per run: model, progress, devices, data and versions."""
    columns = [_header(run) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *_once([column.get(name, "–") for column in columns])] for name in names]
    return Table(["", *(run.name for run in runs)], rows)


def _config_changes(runs: Sequence[RunRecord]) -> Table:
    """Return a table of the config fields in which any run differs from the first, with the values of each run."""
    changed: dict[str, dict[str, str]] = {}
    first = runs[0]
    for run in runs[1:]:
        for change in changed_fields(first.config, run.config):
            changed.setdefault(change.field, {first.name: str(change.old)})[run.name] = str(change.new)
    rows = [[field, *(v.get(run.name, v[first.name]) for run in runs)] for field, v in changed.items()]
    return Table(["field", *(run.name for run in runs)], rows)


def _header(run: RunRecord) -> dict[str, str]:
    config, manifest = run.config, run.manifest
    train, total = run.split("train"), summary(run)
    rate = flops_per_token(config.model, config.data.sequence_length, causal=False)
    devices, data = manifest["devices"], manifest["data"]
    mesh = ", ".join(f"{axis} {size}" for axis, size in devices["mesh"].items() if size != 1)
    header = {
        "folder": str(run.workdir),
        "architecture": config.model.architecture,
        "embedding parameters": f"{count_parameters(config.model).embedding:,}",
        "steps": f"{train[-1]['step']:,} of {run.steps:,}",
        "attempts": str(max(row["attempt"] for row in train)),
        "training FLOPs": short_number(rate * run.tokens),
        "training time (h:mm:ss)": str(datetime.timedelta(seconds=round(total["seconds"]))),
        "median tokens per second": f"{total['tokens_per_second']:,.0f}",
        "devices": f"{devices['count']} × {devices['kind']}" + (f"; mesh {mesh}" if mesh else ""),
        "attention kernel": manifest["attention_kernel"],
    }
    for name, label in (("train_tokens", "training data"), ("valid_tokens", "validation data")):
        header[label] = ", ".join(f"{source}: {format_value(count)} tokens" for source, count in data[name].items())
    header["tokenizer"] = f"{config.data.tokenizer} ({data['tokenizer'][:12]}…)"
    if "source_weights" in manifest:
        header["weights at the start"] = manifest["source_weights"]
    header |= {name: manifest[name] for name in ("commit", "python") if manifest[name]}
    header["packages"] = ", ".join(f"{name} {version}" for name, version in manifest["packages"].items())
    return header
