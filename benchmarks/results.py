"""docs/results.md, every number of it from run directories.

python benchmarks/results.py collect --study=arms runs/reproduce/books runs/reproduce/recall
    reads what `difftx sweep` left in these folders into docs/results.json, in place of the study's runs there
python benchmarks/results.py render
    writes docs/results.md from docs/results.json and benchmarks/results_template.md, and its figures
python benchmarks/results.py compare runs/reproduce/books runs/reproduce/recall
    says which means of new runs lie within docs/results.json's intervals; exit code 1 if one does not

In the template `{{WORD STUDY …}}` stands for a table or a value of that study: see PLACES.
Intervals are Student's, 95 %, over seeds.
"""

import argparse
import collections
import json
import math
import platform
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.figure
import scipy.stats

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from difftx.errors import UserError, run_command
from difftx.files import read_json, write_atomically
from difftx.model.flops import count_parameters
from difftx.report.charts import COLOURS, label_axes, save_figure
from difftx.report.runs import read_results, read_runs

ROOT = Path(__file__).resolve().parents[1]
COLLECTED = ROOT / "docs" / "results.json"
TEMPLATE = ROOT / "benchmarks" / "results_template.md"
PAGE = ROOT / "docs" / "results.md"
IMAGES = ROOT / "docs" / "images"
CONFIDENCE = 0.95
PLACES_OF_DATA = ("data.path", "eval.bigrams_path")  # Left out of commands: each machine's own.
NO_CHANGES = ("train.seed", "data.", "eval.")  # What a run was told that changes nothing of its arm.
# Suites whose numbers are kept, of the last step.
SUITES = ("loss", "recall", "exact_match", "attention", "outliers")
SIGNIFICANT_DIGITS = 6
# Added to an interval that means are compared with: seeds that agree to the digit leave one without width.
RESOLUTION = 0.005

type Record = dict[str, Any]


class Estimate(NamedTuple):
    """A mean over seeds, and half of its interval's width; None for one seed."""

    mean: float
    half: float | None

    def __str__(self) -> str:
        decimals = 3 if abs(self.mean) < 10 else max(0, 3 - int(math.log10(abs(self.mean))))
        return f"{self.mean:.{decimals}f}" + ("" if self.half is None else f" ± {self.half:.{decimals}f}")


def estimate(values: Sequence[float]) -> Estimate:
    """Return mean and interval of a sample."""
    count = len(values)
    if count < 2:
        return Estimate(values[0], None)
    width = scipy.stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)
    return Estimate(statistics.fmean(values), float(width * statistics.stdev(values) / math.sqrt(count)))


# ── Run directories to records ──


def collect(folders: Sequence[Path]) -> list[Record]:
    """Read the runs of sweeps.

    Raises:
        UserError: a folder has no sweep, or one that is not finished.
    """
    return [record for folder in folders for record in _of_sweep(folder)]


def _of_sweep(folder: Path) -> Iterable[Record]:
    if not (folder / "sweep.json").is_file():
        raise UserError(f"{folder}: no sweep.json there; name folders that `difftx sweep --out` wrote")
    sweep = read_json(folder / "sweep.json")
    points = sweep["runs"]
    grid = " ".join(f"{name}={','.join(values)}" for name, values in sweep["grid"].items())
    overrides = _flags(sweep["overrides"])
    unfinished = [point["name"] for point in points if point["state"] != "done"]
    if unfinished:
        raise UserError(f"{folder}: {unfinished[0]} is not finished; the same sweep again continues it")
    for point, run in zip(points, read_runs([folder / point["name"] for point in points]), strict=True):
        spec, *_ = (flag.removeprefix("--config=") for flag in point["flags"] if flag.startswith("--config="))
        fields = dict(flag.removeprefix("--config.").partition("=")[::2] for flag in point["flags"][2:])
        changes = {name: value for name, value in fields.items() if not name.startswith(NO_CHANGES)}
        task, _, arm = spec.partition(":")[2].partition("-")
        config, train = run.config, run.split("train")[-1]
        newest = {suite: max(steps.items())[1] for suite, steps in read_results(run.workdir).items()}
        numbers = {
            f"{suite}/{n}": x for suite in SUITES if suite in newest for n, x in newest[suite]["numbers"].items()
        }
        of_tasks = newest.get("exact_match", {"details": {"sets": {}}})["details"]["sets"]
        numbers |= {f"exact_match/{name}": scores["accuracy"] for name, scores in of_tasks.items()}
        numbers |= {f"lambda/{layer}": x for layer, x in enumerate(train.get("lambda", ()), 1)}
        yield {
            "task": task,
            "arm": arm,
            "seed": config.train.seed,
            "changes": changes,
            "sweep": " ".join(["python -m difftx sweep", f"--config={sweep['config']}", "--grid", grid, *overrides]),
            "command": " ".join(["python train.py", f"--config={spec}", *_flags(fields)]),
            "learning_rate": config.optimizer.learning_rate,
            "parameters": count_parameters(config.model).total,
            "tokens": train["tokens"],
            "commit": run.manifest["commit"],
            "jax": run.manifest["packages"]["jax"],
            "hardware": _hardware(run.manifest["devices"]),
            "wall_seconds": round(run.split("goodput")[-1]["wall_seconds"], 1),
            "numbers": {name: float(f"{value:.{SIGNIFICANT_DIGITS}g}") for name, value in numbers.items()},
        }


def _flags(fields: Mapping[str, str]) -> list[str]:
    return [f"--config.{name}={value}" for name, value in fields.items() if name not in PLACES_OF_DATA]


def _hardware(devices: Mapping[str, Any]) -> str:
    """Return what trained; of a CPU the model that this machine has, as JAX names none."""
    if devices["kind"] != "cpu":
        return f"{devices['count']} × {devices['kind']}"
    path = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", path.read_text()) if path.is_file() else None
    return f"a core of {found[1] if found else platform.processor() or platform.machine()}"


# ── Records to text ──


class Column(NamedTuple):
    """A column of a table of arms."""

    title: str
    number: str
    minus_reference: bool = False  # Of each seed what it has more than the Transformer's.


REFERENCE = "transformer"
TASK_COLUMNS = {
    "books": (
        Column("bits per byte", "loss/bits_per_byte"),
        Column("more than transformer", "loss/bits_per_byte", minus_reference=True),
        Column("AR-Hit, nats", "recall/ar_hit_loss"),
        Column("Others, nats", "recall/others_loss"),
    ),
    "recall": (
        Column("accuracy, one key asked for", "exact_match/retrieval"),
        Column("more than transformer", "exact_match/retrieval", minus_reference=True),
        Column("accuracy, all keys", "exact_match/mqar"),
        Column("loss, nats", "loss/loss"),
    ),
}
INSIDE_COLUMNS = {
    "books": (
        Column("largest logit", "outliers/logits_top_1"),
        Column("median logit", "outliers/logits_median"),
        Column("largest hidden state", "outliers/hidden_top_1"),
        Column("median", "outliers/hidden_median"),
        Column("λ, layer 1", "lambda/1"),
        Column("λ, layer 2", "lambda/2"),
    ),
    "recall": (
        Column("attention to the answer", "attention/answer"),
        Column("to other pairs", "attention/others"),
        Column("to distractors", "attention/noise"),
        Column("Gini", "attention/gini"),
        Column("λ, layer 1", "lambda/1"),
        Column("λ, layer 2", "lambda/2"),
    ),
}
# What `compare` compares.
COMPARED = {
    task: [column.number for column in columns if not column.minus_reference] for task, columns in TASK_COLUMNS.items()
}


def render(collected: Mapping[str, Sequence[Record]], template: str) -> str:
    """Return the page: the template with a table or a value in place of each `{{…}}`.

    Raises:
        UserError: a place that nothing fills.
    """

    def fill(found: re.Match[str]) -> str:
        kind, *arguments = found[1].split()
        if kind not in PLACES:
            raise UserError(f"{{{{{found[1]}}}}}: no such place; known: {', '.join(PLACES)}")
        study, *rest = arguments
        if study not in collected:
            raise UserError(f"{{{{{found[1]}}}}}: no such study; docs/results.json has {', '.join(collected)}")
        return PLACES[kind](collected[study], *rest)

    return re.sub(r"\{\{(.+?)\}\}", fill, template)


def of_seeds(records: Iterable[Record], task: str, arm: str, number: str) -> dict[int, float]:
    """Return seed → a number."""
    return {
        r["seed"]: r["numbers"][number]
        for r in records
        if (r["task"], r["arm"]) == (task, arm) and number in r["numbers"]
    }


def difference(records: Sequence[Record], task: str, arm: str, number: str, reference: str = REFERENCE) -> str:
    """Return what an arm has more than another, by pairs of one seed, hence one data order."""
    own, other = (of_seeds(records, task, name, number) for name in (arm, reference))
    found = estimate([own[seed] - other[seed] for seed in own.keys() & other.keys()])
    return f"{'+' if found.mean > 0 else ''}{found}"


def arms_table(records: Sequence[Record], task: str, columns: Sequence[Column], *, sizes: bool) -> str:
    """Return a row for each arm: means over seeds."""
    records = [r for r in records if r["task"] == task]
    rows = []
    for arm in dict.fromkeys(r["arm"] for r in records):
        first = next(r for r in records if r["arm"] == arm)
        cells = [f"{first['parameters']:,}", f"{first['learning_rate']:g}"] * sizes
        for _, number, minus_reference in columns:
            if not of_seeds(records, task, arm, number) or (minus_reference and arm == REFERENCE):
                cells.append("")
            elif minus_reference:
                cells.append(difference(records, task, arm, number))
            else:
                cells.append(str(estimate(list(of_seeds(records, task, arm, number).values()))))
        rows.append([arm, *cells])
    return markdown(["arm", *["parameters", "rate"] * sizes, *(c.title for c in columns)], rows) + provenance(records)


def rates_table(records: Sequence[Record], task: str, number: str) -> str:
    """Return a row for each arm and change, a column for each learning rate, a row's least in bold."""
    rows: dict[str, dict[float, list[float]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    chosen = [r for r in records if r["task"] == task]
    for r in chosen:
        changes = [
            f"{name.removeprefix('model.')}={value}"
            for name, value in r["changes"].items()
            if name != "optimizer.learning_rate"
        ]
        rows[", ".join([r["arm"], *changes])][r["learning_rate"]].append(r["numbers"][number])
    rates = sorted({r["learning_rate"] for r in chosen})
    cells = []
    for name, found in rows.items():
        means = {rate: estimate(values) for rate, values in found.items()}
        top = min(means.values(), key=lambda e: e.mean)
        cells.append([name, *(_bold(means[rate], top) if rate in means else "" for rate in rates)])
    return markdown(["", *(f"{rate:g}" for rate in rates)], cells) + provenance(chosen)


def _bold(value: Estimate, top: Estimate) -> str:
    return f"**{value}**" if value == top else str(value)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def provenance(records: Sequence[Record]) -> str:
    """Return the line below a table: how much was run, where, from which commit."""
    seeds = sorted({r["seed"] for r in records})
    commits = dict.fromkeys(r["commit"][:7] for r in records)
    hardware = dict.fromkeys(r["hardware"] for r in records)
    minutes = sum(r["wall_seconds"] for r in records) / 60
    tokens = dict.fromkeys(f"{r['tokens']:,}" for r in records)
    sweeps = "\n".join(f"    {sweep}" for sweep in dict.fromkeys(r["sweep"] for r in records))
    return (
        f"\n\n{sweeps}\n\n{len(records)} runs of {' or '.join(tokens)} tokens, {'seeds' if len(seeds) > 1 else 'seed'} "
        f"{', '.join(map(str, seeds))}; {minutes:.0f} minutes of {' and '.join(hardware)} in all; "
        f"commit {', '.join(commits)}; jax {', '.join(dict.fromkeys(r['jax'] for r in records))}."
    )


def mean(records: Sequence[Record], task: str, arm: str, number: str) -> str:
    """Return an arm's mean over seeds."""
    return str(estimate(list(of_seeds(records, task, arm, number).values())))


# First word of a place in the template → what fills it, of a study's records and the other words.
PLACES: dict[str, Callable[..., str]] = {
    "arms": lambda records, task: arms_table(records, task, TASK_COLUMNS[task], sizes=True),
    "inside": lambda records, task: arms_table(records, task, INSIDE_COLUMNS[task], sizes=False),
    "rates": rates_table,
    "mean": mean,
    "difference": difference,
}


def draw(records: Sequence[Record], folder: Path) -> None:
    """Draw the headline: every arm's mean and interval on both tasks, and its seeds."""
    figure = matplotlib.figure.Figure(figsize=(10, 3.6), layout="constrained")
    for axes, (task, columns) in zip(
        figure.subplots(1, len(TASK_COLUMNS), sharey=True), TASK_COLUMNS.items(), strict=True
    ):
        arms = list(dict.fromkeys(r["arm"] for r in records if r["task"] == task))[::-1]
        for y, arm in enumerate(arms):
            values = list(of_seeds(records, task, arm, columns[0].number).values())
            centre, half = estimate(values)
            colour = {"diff": COLOURS[0], REFERENCE: COLOURS[1]}.get(arm, COLOURS[-1])
            axes.errorbar(centre, y, xerr=half, fmt="o", capsize=3, color=colour)
            axes.plot(values, [y] * len(values), "|", color=colour, alpha=0.6)
        axes.set_yticks(range(len(arms)), arms)
        if columns[0].number.startswith("exact_match/"):
            axes.set_xlim(-0.03, 1.03)  # A share; wide intervals are cut off.
        label_axes(axes, {"title": task, "x_label": columns[0].title, "y_label": ""})
    save_figure(figure, folder / "results")


# ── The command ──


def main(arguments: Sequence[str]) -> int:
    """Collect, render or compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("collect", "compare"):
        command = commands.add_parser(name, allow_abbrev=False)
        command.add_argument("sweeps", nargs="+", type=Path, help="folders of `difftx sweep --out`")
        command.add_argument("--study", default="arms", help="its name in docs/results.json (%(default)s)")
    commands.add_parser("render", allow_abbrev=False)
    args = parser.parse_args(arguments)
    collected = read_json(COLLECTED) if COLLECTED.is_file() else {}
    if args.command == "render":
        write_atomically(PAGE, render(collected, TEMPLATE.read_text()))
        draw(collected["arms"], IMAGES)
        return 0
    records = collect(args.sweeps)
    if args.command == "compare":
        if args.study not in collected:
            raise UserError(f"--study={args.study}: docs/results.json has {', '.join(collected) or 'none'}")
        return compare(records, collected[args.study])
    lines = ",\n".join(
        f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, runs)) + "\n]"
        for name, runs in {**collected, args.study: records}.items()
    )
    write_atomically(COLLECTED, f"{{{lines}}}\n")
    return 0


def compare(records: Sequence[Record], committed: Sequence[Record]) -> int:
    """Print which means lie within the committed ones' intervals; return 0 if all do."""
    rows = []
    for task, arm in dict.fromkeys((r["task"], r["arm"]) for r in committed):
        for number in COMPARED[task]:
            stated = estimate(list(of_seeds(committed, task, arm, number).values()))
            values = list(of_seeds(records, task, arm, number).values())
            inside = bool(values) and abs(estimate(values).mean - stated.mean) <= (stated.half or 0) + RESOLUTION
            rows.append(
                [
                    task,
                    arm,
                    number,
                    str(stated),
                    str(estimate(values)) if values else "not run",
                    "yes" if inside else "NO",
                ]
            )
    print(markdown(["task", "arm", "number", "docs/results.json", "here", "within"], rows))
    outside = sum(row[-1] == "NO" for row in rows)
    print(f"\n{len(rows) - outside} of {len(rows)} means are within the stated intervals")
    return int(outside > 0)


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
