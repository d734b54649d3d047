"""The report: a self-contained HTML page of one run, or of several runs to compare."""

from collections.abc import Sequence
from pathlib import Path

import bokeh.document
import bokeh.embed
import bokeh.model
import bokeh.resources
import jinja2

from difftx.errors import UserError, printable
from difftx.files import write_atomically
from difftx.report import panels, tables
from difftx.report.runs import RunRecord, different_tokenizers, read_runs

TEMPLATES = Path(__file__).parent / "templates"


def write_page(workdirs: Sequence[Path], out: Path) -> Path:
    """Write the report of the given runs, which are compared with the first one; return the file.

    Raises:
        UserError: A directory is not a run, or is given twice.
    """
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
    with document.models.freeze():  # Or Bokeh would traverse all figures for each one added.
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
        runs=tables.run_headers(runs),
        changes=tables.config_changes(runs),
        results=tables.results(runs, comparable=foreign is None),
        samples=tables.samples(runs),
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
    """Return notes for the reader of the page on data that are thinned, unreadable, outdated or missing."""
    notes = [
        f"Lines are thinned to {panels.MOST_POINTS:,} points, those of layers to {panels.MOST_POINTS_OF_MANY}: of each "
        "stretch the least and the greatest value stay. Hover or tap for values; a name below a figure hides its line.",
    ]
    notes += [
        f"{run.name}: {run.skipped} lines of metrics and journal could not be read." for run in runs if run.skipped
    ]
    notes += [
        f"{run.name}: evals/{suite}/{step}.json is left out: its weights are not those of checkpoints/{step}. Run "
        f"eval.py --workdir={run.workdir} --suite={suite} --step={step} to evaluate that checkpoint."
        for run in runs
        for suite, step in run.outdated
    ]
    if foreign:
        notes.append(
            f"{foreign[0]} and {foreign[1]} have different tokenizers: losses a token do not compare, bits per byte do."
        )
    if empty:
        notes.append(f"Nothing was recorded yet for: {', '.join(empty)}.")
    return notes
