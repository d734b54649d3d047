"""Generator of the pages of results in docs/, which takes every number on them from run directories.

python studies/results.py collect --study=arms runs/study/arms-books runs/study/arms-recall
    reads the sweeps in these folders and replaces the study's runs in docs/results.json by them
python studies/results.py render
    writes the pages and their figures from docs/results.json and the templates of the pages, and the part of README.md
    between the markers from studies/results_summary.md
python studies/results.py compare --study=question-1-novels+question-1-recall runs/reproduce/*
    compares new runs with those of one or several studies in docs/results.json: on recall the number of solved runs, on
    other tasks means with intervals; the exit code is 1 if a result does not agree

In the templates, `{{WORD STUDY …}}` stands for a table or a value of one study, or of several (STUDY+STUDY; a name may
end in `*`). The words are the keys of PLACEHOLDERS in the modules `*_tables.py`. Some sentences rely on a value without
showing it, such as a verdict. `{{WORD STUDY … = VALUE | TEXT}}` shows TEXT, which may be empty, and is an error if the
data give another value than VALUE. `{{WORD STUDY … = VALUE}}` shows the value itself. For a mean with an interval,
VALUE may be a key of SIDES. Only `compare` prints something: a table, and how many results agree.
"""

import argparse
import fnmatch
import json
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import matplotlib

from difftx.configs import toy
from difftx.errors import UserError, run_command
from difftx.files import write_atomically
from difftx.json_files import read_json
from difftx.model.abstract import count_parameters
from difftx.report.runs import RunRecord, read_runs
from studies import (
    answer_tables,
    controls_tables,
    exploratory_tables,
    optimizer_tables,
    post_hoc_tables,
    recall_tables,
    run_tables,
    size_tables,
)
from studies.controls_study import AGAINST_NOISE
from studies.exploratory_tables import COMPARED
from studies.results_figures import (
    draw_arms,
    draw_caches,
    draw_family,
    draw_optimizers,
    draw_solved,
    draw_transfer,
    draw_warmup,
    draw_warmup_contrasts,
    draw_worth,
)
from studies.study_records import (
    SOLVED_ACCURACY,
    SOLVED_TASK,
    Record,
    arm_outcomes,
    estimate,
    markdown,
    numbers_by_seed,
    solved_text,
)

ROOT = Path(__file__).resolve().parents[1]
COLLECTED = ROOT / "docs" / "results.json"
PAGES = {  # Template → page.
    ROOT / "studies" / f"{name}_template.md": ROOT / "docs" / f"{name}.md"
    for name in ("results", "results_appendix", "exploratory")
}
SUMMARY = ROOT / "studies" / "results_summary.md"
README = ROOT / "README.md"
SUMMARY_MARKERS = ("<!-- studies/results.py writes from here -->\n", "<!-- to here -->\n")
IMAGES = ROOT / "docs" / "images"
INK = "#e6edf3"  # Text on dark pages.
DARK_TEXTS = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
# End of a figure's name → its style. Figures for dark pages have a transparent background.
SCHEMES = {"": {}, "-dark": {**dict.fromkeys(DARK_TEXTS, INK), "axes.facecolor": "none", "savefig.transparent": True}}
PLACEHOLDERS: Mapping[str, Callable[..., str]] = {
    **controls_tables.PLACEHOLDERS,
    **size_tables.PLACEHOLDERS,
    **recall_tables.PLACEHOLDERS,
    **post_hoc_tables.PLACEHOLDERS,
    **exploratory_tables.PLACEHOLDERS,
    **optimizer_tables.PLACEHOLDERS,
    **run_tables.PLACEHOLDERS,
    **answer_tables.PLACEHOLDERS,
}
# Where an interval lies → check of its text.
SIDES: Mapping[str, Callable[[str], bool]] = {
    "above 0": lambda text: _ends(text)[0] > 0,
    "below 0": lambda text: _ends(text)[1] < 0,
    "around 0": lambda text: _ends(text)[0] <= 0 <= _ends(text)[1],
}
# Fields whose paths are left out of printed commands, because they differ by machine.
PATH_FIELDS = ("data.path", "eval.bigrams_path", "checkpoint.init_from")
# Prefixes of fields that do not define an arm. The changes of a record leave them out.
FIELDS_OUTSIDE_ARM = ("train.seed", "data.", "eval.", "checkpoint.")
TEACHER = "train.teacher"  # In all studies, the teacher is the Transformer of the same seed from which a model starts.
# Suites whose numbers at the last step are collected, if the run has results of them.
SUITES = ("loss", "test", "recall", "exact_match", "attention", "outliers", "cache", "quantize")
SIGNIFICANT_DIGITS = 6  # Number of digits that docs/results.json keeps of each number.
# Added to the half width of an interval in comparisons: equal results of all seeds would give an interval of width 0.
RESOLUTION = 0.005


# ── Run directories to records ──


def collect(folders: Sequence[Path]) -> list[Record]:
    """Return the records of all runs in the folders of sweeps, in the order of the sweeps' points.

    Raises:
        UserError: A folder has no sweep, or the sweep is not finished.
    """
    return [record for folder in folders for record in _records_of_sweep(folder)]


def _records_of_sweep(folder: Path) -> list[Record]:
    if not (folder / "sweep.json").is_file():
        raise UserError(f"{folder}: no sweep.json there; name folders that `difftx sweep --out` wrote")
    sweep = read_json(folder / "sweep.json")
    points = sweep["runs"]
    unfinished = [point["name"] for point in points if point["state"] != "done"]
    if unfinished:
        raise UserError(f"{folder}: {unfinished[0]} is not finished; the same sweep again continues it")
    runs = read_runs([folder / point["name"] for point in points])
    return [_record(sweep, point, run) for point, run in zip(points, runs, strict=True)]


def _record(sweep: Mapping[str, Any], point: Mapping[str, Any], run: RunRecord) -> Record:
    """Return the record of a run, from the sweep.json of its sweep, its entry in that file, and its directory."""
    spec, fields, task, arm = _parse_point(point["flags"], sweep["grid"]["task"])
    config, train = run.config, run.split("train")[-1]
    grid = [f"{name}={','.join(values)}" for name, values in sweep["grid"].items()]
    sweep_command = ["python -m difftx sweep", f"--config={sweep['config']}", "--grid", *grid]
    return {
        "task": task,
        "arm": arm,
        "seed": config.train.seed,
        "changes": {
            name: "start" if name == TEACHER else value
            for name, value in fields.items()
            if not name.startswith(FIELDS_OUTSIDE_ARM)
        },
        "sweep": " ".join([*sweep_command, *_flags(sweep["overrides"])]),
        "command": " ".join(["python train.py", f"--config={spec}", *_flags(fields)]),
        "learning_rate": config.optimizer.learning_rate,
        "parameters": count_parameters(config.model).total,
        "tokens": train["tokens"],
        "commit": run.manifest["commit"],
        "jax": run.manifest["packages"]["jax"],
        "hardware": hardware(run.manifest["devices"]),
        "wall_seconds": round(run.split("goodput")[-1]["wall_seconds"], 1),
        "numbers": {name: float(f"{value:.{SIGNIFICANT_DIGITS}g}") for name, value in _numbers(run).items()},
    }


class _Point(NamedTuple):
    """What the flags of a sweep's run say about it."""

    spec: str  # Recipe and argument, such as "configs/toy.py:recall-diff".
    fields: dict[str, str]  # Overridden fields → values.
    task: str
    arm: str


def _parse_point(flags: Sequence[str], tasks: Sequence[str]) -> _Point:
    """Parse the flags of a run of a sweep; `tasks` are the tasks of the sweep."""
    config, _, *overrides = flags  # `SweepPoint.flags` writes --config and --workdir first.
    spec = config.removeprefix("--config=")
    fields = {}
    for override in overrides:
        name, _, value = override.removeprefix("--config.").partition("=")
        fields[name] = value
    # The argument is <task>-<arm>. Names of tasks and arms may contain hyphens, and of two tasks that match, the longer
    # one is right: "books-0.8m-diff" has the task "books-0.8m", not "books".
    argument = spec.partition(":")[2]
    task = max((task for task in tasks if argument.startswith(f"{task}-")), key=len)
    return _Point(spec, fields, task, argument.removeprefix(f"{task}-"))


def _numbers(run: RunRecord) -> dict[str, float]:
    """Return the numbers of a run's newest results, with λ of each layer at the last step.

    Runs of recall also have the accuracy of each task and the first step that solved it. If the suite attention ran
    several times, the cosines of its first result are included.
    """
    newest = {}
    for suite, steps in run.results.items():
        step, newest[suite] = max(steps.items())
        if suite in SUITES and step != run.steps:
            raise UserError(
                f"{run.workdir}: the newest result of suite {suite} is of step {step}; evaluate step {run.steps}"
            )
    if run.outdated:
        suite, step = run.outdated[0]
        raise UserError(f"{run.workdir}: suite {suite}, step {step}: the result is of other weights; evaluate it again")
    numbers = {f"{suite}/{n}": x for suite in SUITES if suite in newest for n, x in newest[suite]["numbers"].items()}
    if "exact_match" in newest:
        tasks = newest["exact_match"]["details"]["sets"]
        numbers |= {f"exact_match/{name}": scores["accuracy"] for name, scores in tasks.items()}
        if len(run.results["exact_match"]) > 1 and SOLVED_TASK in tasks:
            numbers |= _solved_at(run.results["exact_match"])
    if len(steps := run.results.get("attention", {})) > 1:
        first = min(steps.items())[1]["numbers"]
        for name in recall_tables.ALIGNMENT:
            if (cosine := name.removeprefix("attention/")) in first:
                numbers[recall_tables.FIRST_PREFIX + name] = first[cosine]
    lambdas = run.split("train")[-1].get("lambda", ())
    return numbers | {f"lambda/{layer}": value for layer, value in enumerate(lambdas, 1)}


def _solved_at(results: Mapping[int, Mapping[str, Any]]) -> dict[str, float]:
    """Return the first evaluated step at which a run solved recall, under its name, or nothing if it did not."""
    accuracies = {step: found["details"]["sets"][SOLVED_TASK]["accuracy"] for step, found in results.items()}
    steps = [step for step, accuracy in accuracies.items() if accuracy >= SOLVED_ACCURACY]
    return {recall_tables.SOLVED_AT: float(min(steps))} if steps else {}


def _flags(fields: Mapping[str, str]) -> list[str]:
    """Return the flags that change fields in a printed command, without the paths of one machine."""
    shown = {n: value for n, value in fields.items() if n not in (*PATH_FIELDS, TEACHER) or "/" not in value}
    return [f"--config.{n}={value}" for n, value in shown.items()]


def hardware(devices: Mapping[str, Any]) -> str:
    """Return the number and kind of devices, or for CPUs the processor model of this machine.

    JAX does not name the model of a CPU.
    """
    if devices["kind"] != "cpu":
        return f"{devices['count']} × {devices['kind']}"
    path = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", path.read_text()) if path.is_file() else None
    return f"a core of {found[1] if found else platform.processor() or platform.machine()}"


# ── Records to pages ──


def render(collected: Mapping[str, Sequence[Record]], template: str) -> str:
    """Return the template with a table or a value for each placeholder `{{…}}`.

    Raises:
        UserError: A placeholder names an unknown word or study, or its value is not the one that its sentence needs.
    """

    def fill(found: re.Match[str]) -> str:
        call, has_text, text = found[1].partition(" |")
        call, is_needed, needed = call.partition(" = ")
        kind, *arguments = call.split()
        if kind not in PLACEHOLDERS:
            raise UserError(f"{{{{{found[1]}}}}}: no such placeholder; known: {', '.join(PLACEHOLDERS)}")
        studies, *rest = arguments
        if missing := missing_studies(collected, studies):
            known = ", ".join(collected)
            raise UserError(f"{{{{{found[1]}}}}}: no such study as {', '.join(missing)}; docs/results.json has {known}")
        value = PLACEHOLDERS[kind](joined(collected, studies), *rest)
        if is_needed and not (SIDES[needed](value) if needed in SIDES else value == needed):
            raise UserError(f"{{{{{found[1]}}}}}: the value is {value!r} now, so change this sentence of the template")
        return text.removeprefix(" ") if has_text else value

    return re.sub(r"\{\{(.+?)\}\}", fill, template)


def _ends(text: str) -> tuple[float, float]:
    """Return the ends of an interval that is written as "MEAN ± HALF"."""
    mean, half = map(float, text.split(" ± "))
    return mean - half, mean + half


def joined(collected: Mapping[str, Sequence[Record]], studies: str) -> list[Record]:
    """Return the records of one study or of several, whose names are joined by "+"."""
    return [record for study in _names(collected, studies) for record in collected[study]]


def missing_studies(collected: Mapping[str, Sequence[Record]], studies: str) -> set[str]:
    """Return those of the studies, whose names are joined by "+", that docs/results.json does not have."""
    return set(_names(collected, studies)) - collected.keys()


def _names(collected: Mapping[str, Sequence[Record]], studies: str) -> list[str]:
    """Return the names of studies joined by "+". A name that ends in "*" stands for those that begin so."""
    return [
        name
        for pattern in studies.split("+")
        for name in (fnmatch.filter(collected, pattern) if pattern.endswith("*") else [pattern])
    ]


def write_pages(collected: Mapping[str, Sequence[Record]]) -> None:
    """Write the pages, their figures, and the generated part of README.md."""
    for template, page in PAGES.items():
        write_atomically(page, render(collected, template.read_text()))
    write_atomically(README, with_summary(README.read_text(), collected))
    for suffix, style in SCHEMES.items():
        with matplotlib.rc_context(style):
            draw_figures(collected, suffix)


def draw_figures(collected: Mapping[str, Sequence[Record]], suffix: str) -> None:
    """Write the figures of the pages in the current style; `suffix` is the end of their names, a key of `SCHEMES`."""

    def path(name: str) -> Path:
        return IMAGES / f"{name}{suffix}"

    on_recall = joined(collected, "question-1-recall+question-6+question-6-more")
    recipe = toy.get_config("books-diff")
    draw_family(collected["question-1-again"], "again", path("results_again"))
    with_warmups = joined(collected, "question-1-novels+question-2+question-2-zero")
    draw_warmup_contrasts(with_warmups, path("results_optimizer_family"))
    draw_family(joined(collected, "question-1-novels+question-3-novels"), "lambda", path("results_lambda"))
    draw_family(collected["question-5"], "differential", path("results_conversion"))
    draw_solved([record for record in on_recall if record["arm"] in AGAINST_NOISE], path("results_noise"))
    draw_worth(collected["question-4"], path("results_worth"))
    draw_arms(collected["arms"], path("results"))
    draw_arms(collected["differential"], path("results_differential"))
    draw_optimizers(collected["optimizers"], path("results_optimizers"))
    draw_transfer(collected["transfer"], path("results_transfer"))
    draw_caches(collected["cache"], path("results_cache"))
    draw_warmup(
        collected["settings"],
        path("results_warmup"),
        default_steps=round(recipe.optimizer.warmup_steps * recipe.train.steps),
        total_steps=recipe.train.steps,
    )


# ── The command ──


def main(arguments: Sequence[str]) -> int:
    """Run the subcommand `collect`, `render` or `compare`.

    Return the exit code: 1 if `compare` finds a result that does not agree, otherwise 0.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("collect", "compare"):
        command = commands.add_parser(name, allow_abbrev=False)
        command.add_argument("sweeps", nargs="+", type=Path, help="folders of `difftx sweep --out`")
        command.add_argument("--study", default="arms", help="name in docs/results.json (%(default)s)")
    commands.add_parser("render", allow_abbrev=False)
    args = parser.parse_args(arguments)
    collected = read_json(COLLECTED) if COLLECTED.is_file() else {}
    if args.command == "render":
        write_pages(collected)
        return 0
    records = collect(args.sweeps)
    if args.command == "compare":
        if missing := missing_studies(collected, args.study):
            known = ", ".join(collected) or "none"
            raise UserError(f"--study={args.study}: no {', '.join(missing)}; docs/results.json has {known}")
        return compare(records, joined(collected, args.study))
    write_collected({**collected, args.study: records})
    return 0


def write_collected(collected: Mapping[str, Sequence[Record]]) -> None:
    """Write docs/results.json with one line per run, so that a change of a study is a readable diff."""
    studies = ",\n".join(
        f"{json.dumps(study)}: [\n" + ",\n".join(map(json.dumps, records)) + "\n]"
        for study, records in collected.items()
    )
    write_atomically(COLLECTED, f"{{{studies}}}\n")


def with_summary(readme: str, collected: Mapping[str, Sequence[Record]]) -> str:
    """Return the README with the rendered summary between its markers."""
    start, end = SUMMARY_MARKERS
    before, _, rest = readme.partition(start)
    return before + start + render(collected, SUMMARY.read_text()) + end + rest.partition(end)[2]


def compare(records: Sequence[Record], committed: Sequence[Record]) -> int:
    """Print which new results agree with the committed ones; return 0 if all agree, or else 1.

    A mean agrees if it lies within the committed interval. On recall, an arm agrees if each of its new outcomes (solved
    or not) also occurs among the committed runs.
    """
    rows = []
    for task, arm in dict.fromkeys((r["task"], r["arm"]) for r in committed):
        if task not in COMPARED:
            new_outcomes = set(arm_outcomes(records, task, arm))
            agrees = new_outcomes and new_outcomes <= set(arm_outcomes(committed, task, arm))
            counts = [solved_text(runs, task, arm) for runs in (committed, records)]
            rows.append([task, arm, "solved", *counts, "yes" if agrees else "NO"])
            continue
        for number in COMPARED[task]:
            stated = estimate(list(numbers_by_seed(committed, task, arm, number).values()))
            numbers = list(numbers_by_seed(records, task, arm, number).values())
            new = estimate(numbers) if numbers else None
            agrees = new is not None and abs(new.mean - stated.mean) <= (stated.half_width or 0) + RESOLUTION
            rows.append([task, arm, number, str(stated), str(new or "not run"), "yes" if agrees else "NO"])
    print(markdown(["task", "arm", "number", "docs/results.json", "here", "agrees"], rows))
    disagreeing = sum(row[-1] == "NO" for row in rows)
    print(f"\n{len(rows) - disagreeing} of {len(rows)} results agree with docs/results.json")
    return int(disagreeing > 0)


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
