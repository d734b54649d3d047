"""The report, a self-contained HTML page that describes one run or compares several runs."""

import datetime
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bokeh.document
import bokeh.embed
import bokeh.model
import bokeh.resources
import jinja2

from difftx.data.sources import STDLIB
from difftx.errors import UserError, printable
from difftx.evals.result import format_value, read_numbers
from difftx.files import write_atomically
from difftx.model.abstract import count_parameters
from difftx.model.architectures import describe_heads
from difftx.model.flops import flops_per_token
from difftx.report import panels
from difftx.report.charts import series_colours, short_number
from difftx.report.curves import summary
from difftx.report.panels import Cell, Table
from difftx.report.runs import Metric, RunRecord, data_notes, different_tokenizers, read_runs
from difftx.report.suites import option_notes, signed_change, suite_sections
from difftx.report.verdict import Verdict, verdict
from difftx.training.resume import changed_fields

TEMPLATES = Path(__file__).parent / "templates"
# Script whose path begins the command of a manifest → command of difftx.
SCRIPTS = {"train.py": "difftx train", "__main__.py": "difftx", "difftx": "difftx"}
# Numbers of the suite "loss" → label and unit, as in the table below the verdict.
LOSSES = {
    "loss": Cell("validation loss", unit="nats per token"),
    "perplexity": Cell("perplexity"),
    "bits_per_byte": Cell("bits per byte"),
}


def write_page(workdirs: Sequence[Path], out: Path) -> Path:
    """Write the report of runs, whose folders are those of `pulled`, and return its path.

    Transformers stand first, because they are the baselines, and all other runs are compared with the first run.
    """
    if len({workdir.resolve() for workdir in workdirs}) < len(workdirs):
        raise UserError(f"--workdir={','.join(map(str, workdirs))}: a run is named twice")
    runs = sorted(read_runs(workdirs), key=lambda run: run.config.model.architecture != "transformer")
    with_different_tokenizers = different_tokenizers(runs)
    metric: Metric = "bits_per_byte" if with_different_tokenizers else "loss"
    curves = panels.losses(runs, metric)
    judged = verdict(runs, metric)
    suites = suite_sections(runs, comparable=with_different_tokenizers is None)
    dynamics = [section for section in (panels.lambdas(runs), panels.gradients(runs)) if section.panels]
    figures: dict[str, bokeh.model.Model] = {
        panel.figure.id: panel.figure for section in (curves, *suites, *dynamics) for panel in section.panels
    }
    document = bokeh.document.Document()
    with document.models.freeze():  # Without this, Bokeh would traverse all figures whenever one is added.
        for figure in figures.values():
            document.add_root(figure)
    script, divs = bokeh.embed.components(figures)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    page = environment.get_template("report.html").render(
        title=" and ".join(run.name for run in runs),
        colours={run.name: colour for run, colour in zip(runs, series_colours(len(runs)), strict=True)},
        verdict=judged,
        scores=_scores(judged, metric),
        notes=_notes(runs, with_different_tokenizers),
        curves=curves,
        suites=suites,
        dynamics=dynamics,
        time=panels.wall_time(runs),
        headers=_run_headers(runs),
        changes=_config_changes(runs),
        commands=_commands(runs, out),
        most_points=panels.MAX_POINTS,
        divs=divs,
        script=script,
        library=bokeh.resources.Resources("inline", components=["bokeh"]).render_js(),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page)
    return out


def _scores(judged: Verdict, metric: Metric) -> Table:
    """Return a table of the validation losses, of guessing, and of the sizes of the comparison, with a column per arm.

    The verdict on a single arm contains its loss, so that the table leaves it out. Two arms have a column for the
    difference, without a word such as "better", because the verdict says how certain it is.
    """
    arms = judged.arms
    is_pair, comparable = len(arms) == 2, metric == "loss"
    rows: list[Sequence[str | Cell]] = []

    def add(label: Cell, values: Sequence[Any], difference: str = "") -> None:
        cells = _once([format_value(value) for value in values])
        rows.append([label, *cells, *([difference] if is_pair else [])])

    for name, label in LOSSES.items():
        found = [arm.mean(name) for arm in arms]
        numbers = [value for value in found if value is not None]
        if numbers and not (len(arms) == 1 and name == metric):
            difference = ""
            if len(numbers) == len(arms) == 2 and (comparable or name == metric):
                difference = signed_change(numbers[0], numbers[1])
            add(label, found, difference)
            if name == metric and judged.interval:
                add(Cell("95 % interval"), ["", ""], judged.interval)
    if any(guesses := [_guess(arm.runs[0]) for arm in arms]):
        add(Cell("loss of a uniform guess", unit="nats per token"), guesses)
    add(Cell("heads"), [describe_heads(arm.runs[0].config.model) for arm in arms])
    for name, of_arms in (
        ("parameters", [[count_parameters(arm.runs[0].config.model).total] for arm in arms]),
        ("training tokens", [sorted({run.tokens for run in arm.runs}) for arm in arms]),
    ):
        sizes = [max(of_arm) for of_arm in of_arms]
        texts = [" to ".join(map(format_value, of_arm[:: max(len(of_arm) - 1, 1)])) for of_arm in of_arms]
        add(Cell(name), texts, f"{sizes[1] / sizes[0] - 1:+.2%}".replace("-", "−") if len(set(sizes)) == 2 else "")
    difference = [f"{arms[1].name} − {arms[0].name}"] if is_pair else []
    return Table(["", *(arm.title for arm in arms), *difference], rows)


def _once(values: Sequence[str]) -> list[str | Cell]:
    """Return the cells of a table's row: one that spans all runs if all values are the same."""
    return [Cell(values[0], span=len(values))] if len(set(values)) == 1 else list(values)


def _guess(run: RunRecord) -> float | None:
    """Return the loss of a uniform guess, or None if no result of the suite `loss` has it."""
    newest = list(run.results.get("loss", {}).values())[-1:]
    return next((loss.chance for result in newest if (loss := read_numbers(result).get("loss")) is not None), None)


def _notes(runs: Sequence[RunRecord], with_different_tokenizers: tuple[str, str] | None) -> list[str]:
    """Return notes on the data and results: what could not be read, is not of the checkpoints or not comparable."""
    notes = []
    if any(run.config.data.path == STDLIB for run in runs):
        notes.append(f"{STDLIB} is the source code of Python's standard library.")
    for run in runs:
        if run.skipped:
            notes.append(f"{run.name}: {run.skipped} lines of metrics and journal could not be read.")
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
    """Return the commands that trained the runs, as far as known, evaluated them, and wrote this page."""
    commands = []
    for run in runs:
        if isinstance(command := run.manifest.get("command"), str):
            program, _, flags = command.partition(" ")
            name = Path(program).name
            commands.append(f"{SCRIPTS[name]} {flags}".strip() if name in SCRIPTS else command)
        if run.results:
            commands.append(_command("eval", f"--workdir={run.workdir}", f"--suite={','.join(run.results)}"))
    workdirs = ",".join(str(run.workdir) for run in runs)
    return [*commands, _command("report", f"--workdir={workdirs}", f"--out={out}")]


def _command(*words: str) -> str:
    return printable(shlex.join(["difftx", *words]))


def _run_headers(runs: Sequence[RunRecord]) -> Table:
    """Return a table that describes each run in a column: model, progress, devices, data and versions."""
    columns = [_header(run) for run in runs]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *_once([column.get(name, "–") for column in columns])] for name in names]
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


def _header(run: RunRecord) -> dict[str, str]:
    config, manifest = run.config, run.manifest
    train, total = run.split("train"), summary(run)
    rate = flops_per_token(config.model, config.data.sequence_length, causal=False)
    devices, data = manifest.get("devices", {}), manifest.get("data", {})
    mesh = ", ".join(f"{axis} {size}" for axis, size in devices.get("mesh", {}).items() if size != 1)
    header = {
        "folder": printable(str(run.workdir)),
        "architecture": config.model.architecture,
        "embedding parameters": f"{count_parameters(config.model).embedding:,}",
        "steps": f"{train[-1]['step']:,} of {run.steps:,}",
        "attempts": str(max(row["attempt"] for row in train)),
        "training FLOPs": short_number(rate * run.tokens),
        "training time (h:mm:ss)": str(datetime.timedelta(seconds=round(total["seconds"]))),
        "median tokens per second": f"{total['tokens_per_second']:,.0f}",
    }
    if devices:
        header["devices"] = f"{devices.get('count')} × {devices.get('kind')}" + (f"; mesh {mesh}" if mesh else "")
    if "attention_kernel" in manifest:
        header["attention kernel"] = str(manifest["attention_kernel"])
    for name, label in (("train_tokens", "training data"), ("valid_tokens", "validation data")):
        if isinstance(data.get(name), dict):
            header[label] = ", ".join(f"{source}: {format_value(count)} tokens" for source, count in data[name].items())
    header["tokenizer"] = config.data.tokenizer + (f" ({str(data['tokenizer'])[:12]}…)" if "tokenizer" in data else "")
    if "source_weights" in manifest:
        header["weights at the start"] = str(manifest["source_weights"])
    header |= {name: str(manifest[name]) for name in ("commit", "python") if manifest.get(name)}
    if isinstance(manifest.get("packages"), dict):
        header["packages"] = ", ".join(f"{name} {version}" for name, version in manifest["packages"].items())
    return header
