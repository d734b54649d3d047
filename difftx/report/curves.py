"""Loss curves of several runs: a figure and a table."""

import glob
import json
from pathlib import Path
from typing import Any

import matplotlib.figure
import rich.table

from difftx.errors import UserError
from difftx.files import write_atomically
from difftx.training.metrics import read_metrics
from difftx.training.run import read_config

# Okabe and Ito's colours: told apart by colour-blind readers too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
COLUMNS = (
    "run",
    "architecture",
    "tokens",
    "loss",
    "perplexity",
    "bits_per_byte",
    "tokens_per_second",
    "seconds",
)


def write_curves(pattern: str, out: Path) -> tuple[list[dict[str, Any]], list[Path]]:
    """Draw the runs that match a glob; return the table's rows and the files written.

    Writes `curves.png` and `curves.svg` (validation bits per byte and training loss against tokens) and `curves.json`.

    Raises:
        UserError: no run matches.
    """
    workdirs = [Path(name) for name in sorted(glob.glob(pattern)) if (Path(name) / "metrics.jsonl").is_file()]
    if not workdirs:
        raise UserError(f"--curves={pattern!r}: no folder with a metrics.jsonl matches; quote the glob, as in 'runs/*'")
    runs = {_name(workdir, workdirs): _read_run(workdir) for workdir in workdirs}
    table = [{"run": name, **_summary(run)} for name, run in runs.items()]
    out.mkdir(parents=True, exist_ok=True)
    figure = _draw(runs)
    files = [out / "curves.png", out / "curves.svg"]
    for file in files:
        temporary = file.with_stem(f".{file.stem}")
        figure.savefig(temporary, dpi=150, metadata={"Date": None} if file.suffix == ".svg" else {})
        temporary.replace(file)
    write_atomically(out / "curves.json", json.dumps(table, indent=2) + "\n")
    return table, [*files, out / "curves.json"]


def format_table(rows: list[dict[str, Any]]) -> rich.table.Table:
    """Return the rows of `write_curves` as a table for a terminal."""
    table = rich.table.Table(title="last evaluation of each run")
    for name in COLUMNS:
        table.add_column(name.replace("_", " "), justify="left" if name in COLUMNS[:2] else "right")
    for row in rows:
        table.add_row(*(_shown(row[name]) for name in COLUMNS))
    return table


def _name(workdir: Path, workdirs: list[Path]) -> str:
    names = [w.name for w in workdirs]
    return workdir.name if names.count(workdir.name) == 1 else str(workdir)


def _read_run(workdir: Path) -> dict[str, Any]:
    rows, skipped = read_metrics(workdir / "metrics.jsonl")
    train = [row for row in rows if row["split"] == "train"]
    valid = [row for row in rows if row["split"] == "valid" and row.get("suite") == "loss"]
    if skipped:
        print(f"{workdir}/metrics.jsonl: skipped {skipped} lines that are not metrics")
    if not train:
        raise UserError(f"{workdir}/metrics.jsonl: no training steps in it yet")
    return {"config": read_config(workdir), "train": train, "valid": valid}


def _summary(run: dict[str, Any]) -> dict[str, Any]:
    train, config = run["train"], run["config"]
    last = run["valid"][-1] if run["valid"] else {}
    speeds = sorted(row["tokens_per_second"] for row in train)
    return {
        "architecture": config.model.architecture,
        "tokens": train[-1]["tokens"],
        **{name: last.get(name) for name in ("loss", "perplexity", "bits_per_byte")},
        "tokens_per_second": speeds[len(speeds) // 2],  # The median: compilation and pauses do not count.
        "seconds": sum(row["step_seconds"] for row in train) * config.logging.every_steps,
    }


def _draw(runs: dict[str, Any]) -> matplotlib.figure.Figure:
    figure = matplotlib.figure.Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for colour, (name, run) in zip(COLOURS * len(runs), runs.items(), strict=False):
        per_step = run["config"].train.global_batch_tokens
        valid = [row for row in run["valid"] if "bits_per_byte" in row]  # Synthetic tasks have no bytes.
        if valid:
            left.plot(
                [row["step"] * per_step for row in valid],
                [row["bits_per_byte"] for row in valid],
                "o-",
                color=colour,
                label=name,
            )
        steps = [row for row in run["train"] if row["loss"] is not None]
        tokens = [row["tokens"] for row in steps]
        losses = [row["loss"] for row in steps]
        right.plot(tokens, losses, color=colour, alpha=0.25, linewidth=0.8)
        right.plot(tokens, _smoothed(losses), color=colour, label=name)
    left.set(xlabel="training tokens", ylabel="bits per byte", title="validation")
    right.set(xlabel="training tokens", ylabel="loss (nats per token)", title="training, raw and smoothed")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


def _smoothed(values: list[float], half_life: float = 10.0) -> list[float]:
    """Exponential moving average, corrected for its start."""
    keep = 0.5 ** (1 / half_life)
    total = weight = 0.0
    smoothed = []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        smoothed.append(total / weight)
    return smoothed


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
