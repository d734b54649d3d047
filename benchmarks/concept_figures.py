"""Figures of docs/concepts/differential-attention.md, from one trained run and the results of its suite attention.

difftx train --config=toy:recall-diff --workdir=runs/recall-diff
difftx eval --workdir=runs/recall-diff --suite=attention --eval.attention.layers=2 --eval.attention.shown_queries=16
python benchmarks/concept_figures.py runs/recall-diff
    writes docs/images/attention-….png, attention_row-….png and lambda-….png for light and dark pages
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from difftx.errors import run_command
from difftx.report.charts import COLOURS
from difftx.report.runs import RunRecord, read_runs

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
TEXT_COLOURS = {"light": "#1f2328", "dark": "#e6edf3"}
# Colours of the weight 0 and of the largest weight. The colour of 0 is that of the page, so that only attention is
# visible.
WEIGHT_COLOURS = {"light": ("#ffffff", COLOURS[0]), "dark": ("#1e2129", COLOURS[5])}


def draw_maps(charts: Mapping[str, Any], scheme: str) -> plt.Figure:
    """Draw A1, A2 and A1 - λ A2 of the last tokens of a prompt, with one scale."""
    page, positive = WEIGHT_COLOURS[scheme]
    colours = mpl.colors.LinearSegmentedColormap.from_list("weights", [COLOURS[1], page, positive])
    figure, axes = plt.subplots(1, 3, figsize=(9, 2.5), layout="constrained", sharey=True)
    panels = {"A1": "attention_a1", "A2": "attention_a2", "A1 − λ A2": "attention_map"}
    values = {title: np.asarray(charts[name]["values"]) for title, name in panels.items()}
    limit = max(np.abs(value).max() for value in values.values())
    for axis, (title, value) in zip(axes, values.items(), strict=True):
        axis.imshow(value, cmap=colours, vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
        axis.set_title(title)
        axis.set_xlabel("key position")
    tokens = len(values["A1"][0])
    axes[0].set_ylabel("query position")
    axes[0].set_yticks([0, len(values["A1"]) - 1], [str(tokens - len(values["A1"])), str(tokens - 1)])
    figure.colorbar(axes[-1].images[0], ax=axes, label="weight", pad=0.01)
    return figure


def draw_row(charts: Mapping[str, Any], scheme: str) -> plt.Figure:
    """Draw how the last token's attention is spread over the prompt, and where the answer is."""
    figure, axis = plt.subplots(figsize=(8, 2.8), layout="constrained")
    colours = {
        "A1": COLOURS[5],
        "A2": COLOURS[4],
        "A1 − λ A2": WEIGHT_COLOURS[scheme][1] if scheme == "light" else TEXT_COLOURS[scheme],
    }
    for series in charts["attention_context"]["series"]:
        if series["name"] == "answer":
            axis.axvspan(series["x"][0] - 0.5, series["x"][1] + 0.5, color=COLOURS[2], alpha=0.3, label="answer")
        else:
            axis.plot(series["x"], series["y"], color=colours[series["name"]], label=series["name"], marker=".")
    axis.set(xlabel="key position", ylabel="share of |attention|")
    axis.legend(frameon=False, loc="upper left")
    return figure


def draw_lambda(run: RunRecord) -> plt.Figure:
    """Draw λ of each layer over training."""
    figure, axis = plt.subplots(figsize=(8, 2.8), layout="constrained")
    rows = run.split("train")
    for layer, values in enumerate(zip(*(row["lambda"] for row in rows), strict=True), 1):
        axis.plot([row["step"] for row in rows], values, color=COLOURS[layer], label=f"layer {layer}")
    axis.set(xlabel="training step", ylabel="λ")
    axis.legend(frameon=False)
    return figure


def main(arguments: Sequence[str]) -> int:
    """Draw the figures of a run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("workdir", type=Path, help="directory of the run")
    (run,) = read_runs([parser.parse_args(arguments).workdir])
    charts = {chart["name"]: chart for chart in max(run.results["attention"].items())[1]["charts"]}
    for scheme, colour in TEXT_COLOURS.items():
        names = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
        style = dict.fromkeys(names, colour) | {"axes.spines.right": False, "axes.spines.top": False}
        with mpl.rc_context(style):
            for name, figure in (
                ("attention", draw_maps(charts, scheme)),
                ("attention_row", draw_row(charts, scheme)),
                ("lambda", draw_lambda(run)),
            ):
                figure.savefig(IMAGES / f"{name}-{scheme}.png", dpi=110, transparent=True)
                plt.close(figure)
    return 0


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
