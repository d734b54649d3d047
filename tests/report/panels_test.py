"""Panels of the report, and the content of its sections on suites."""

import json

import numpy as np
import pytest
import scipy  # It imports scipy.stats at the first use, which takes a second.
from helpers.report_runs import tiny, write_result, write_run

from difftx.evals.attention.suite import NUMBERS
from difftx.evals.result import Number
from difftx.report.arms import arms_of
from difftx.report.charts import COLOURS, colours_of
from difftx.report.panels import Cell, Panel, training, wall_time
from difftx.report.runs import read_runs
from difftx.report.suites import suite_sections


def chart(value, **changes):
    series = [{"name": name, "x": [1.0, 2.0], "y": [value, value + i]} for i, name in enumerate(("noise", "answer"))]
    labels = {"title": "Cosine", "x_label": "layer", "y_label": "cosine"}
    return {"kind": "line", "name": "cosine", "series": series, **labels, "over_steps": True, **changes}


def heatmap(values, **changes):
    axes = {"x": list(range(len(values[0]))), "y": list(range(len(values)))}
    labels = {"title": "Map", "x_label": "key", "y_label": "query", "value_label": "weight"}
    return {"kind": "heatmap", "name": "map", "values": values, **axes, **labels, **changes}


def sections_of(workdirs):
    """Return the sections of runs by suite."""
    arms = arms_of(read_runs(workdirs))
    sections = suite_sections(arms, colours_of([arm.name for arm in arms]), comparable=True)
    return {section.id: section for section in sections}


def panels_of(section):
    return {panel.title: panel for panel in (*section.panels, *section.folded)}


def write_runs(folder, results, **changes):
    """Write runs with the given run → suite → numbers, and return their folders."""
    workdirs = [write_run(folder / name, tiny("diff", train__steps=3, **changes)) for name in results]
    for workdir, of_run in zip(workdirs, results.values(), strict=True):
        for suite, numbers in of_run.items():
            write_result(workdir, suite, 3, numbers)
    return workdirs


def write_seeds(folder, results):
    """Write a run for each seed of each architecture, with results of the suite `recall`. Return their folders."""
    workdirs = []
    for architecture, of_seeds in results.items():
        for seed, (value, charts) in enumerate(of_seeds):
            seeds = {"train__seed": seed, "data__seed": seed}
            workdir = write_run(folder / f"{architecture}{seed}", tiny(architecture, train__steps=3, **seeds))
            write_result(workdir, "recall", 3, {"loss": Number(value, "nats per token", "lower", chance=5.0)}, charts)
            workdirs.append(workdir)
    return workdirs


def test_lines_over_layers_are_drawn_over_the_steps(tmp_path):
    """Each line of a chart with `over_steps` becomes a folded panel with a line per layer.

    There is no panel for results of a single step, nor for a chart without `over_steps`.
    """
    workdirs = [write_run(tmp_path / name, tiny(name, train__steps=9)) for name in ("diff", "transformer")]
    for step in (3, 6, 9):
        write_result(workdirs[0], "attention", step, {}, [chart(step / 10), chart(1.0, name="l0", over_steps=False)])
    write_result(workdirs[1], "attention", 9, {}, [chart(0.5)])
    (section,) = sections_of(workdirs).values()
    found = {panel.title: panel for panel in section.folded}
    drawn = {title for title in found if "over the steps" in title}
    assert drawn == {f"Cosine: {line}, over the steps: diff" for line in ("noise", "answer")}
    drawn = found["Cosine: answer, over the steps: diff"].chart
    assert drawn["x_label"] == "steps"
    assert drawn["series"] == [
        {"name": "layer 1", "x": [3, 6, 9], "y": [0.3, 0.6, 0.9]},
        {"name": "layer 2", "x": [3, 6, 9], "y": [1.3, 1.6, 1.9]},
    ]


def test_differences_are_better_or_worse_by_direction_not_by_sign(tmp_path):
    first = {"answer": 0.2, "noise": 0.5, "gini": 0.7, "entropy": 3.0, "lambda": 0.4}
    second = {"answer": 0.1, "noise": 0.4, "gini": 0.9, "entropy": 3.0}
    first, second = ({name: Number(x, *NUMBERS[name]) for name, x in of_run.items()} for of_run in (first, second))
    (section,) = sections_of(
        [
            *write_runs(tmp_path, {"a": {"attention": first}}),
            *write_runs(tmp_path, {"b": {"attention": second}}, model__d_model=64),
        ]
    ).values()
    assert section.numbers.header == ["", "a", "b", "b − a"]
    assert [(row[0].text, *row[1:]) for row in section.numbers.rows] == [
        ("weight on the answer", "0.2000", "0.1000", Cell("−0.100", "worse")),
        ("weight on irrelevant text (noise)", "0.5000", "0.4000", Cell("−0.100", "better")),
    ]
    assert [(row[0].text, row[2], row[-1]) for row in section.further.rows] == [
        ("Gini coefficient of the weights (0: even)", "0.9000", Cell("+0.200 (+28.57%)")),
        ("entropy of the weights", "3", Cell("+0 (+0.00%)")),
        ("λ", "–", "–"),
    ]


def test_counts_that_are_equal_are_written_once_and_suites_have_an_order(tmp_path):
    numbers = {
        "ar_hit_loss": Number(2, "nats per token", "lower", "AR-Hit loss"),
        "ar_hit_tokens": Number(645, "tokens", label="AR-Hit tokens"),
    }
    own, quantized = {"zeal": 1.0}, {"loss_loss_4_bits": Number(2, "nats per token", "lower", "loss 4 bits")}
    workdirs = write_runs(
        tmp_path, {"a": {"own": own, "quantize": quantized, "recall": numbers, "loss": {"loss": 1.0}}}
    )
    position = {"loss": 2.0, "documents": 3.0}
    workdirs += write_runs(tmp_path, {"b": {"recall": numbers, "position": position}}, model__d_model=64)
    sections = sections_of(workdirs)
    assert list(sections) == ["suite-recall", "suite-position", "suite-quantize", "suite-own"]
    recall = sections["suite-recall"]
    assert recall.basis == "2 runs at step 3; AR-Hit tokens: 645"
    assert [row[0].text for row in recall.numbers.rows] == ["AR-Hit loss"]
    assert recall.numbers.rows[0][-1] == Cell("0", "equal")


def test_seeds_have_means_intervals_and_no_verdict_among_themselves(tmp_path):
    """Charts have the mean and the range over seeds, in a single colour per model. Intervals could leave 0 to 1."""
    losses = {"transformer": [2.0, 2.2, 2.1], "diff": [1.5, 1.75, 1.55]}
    results = {
        architecture: [(loss, [chart(loss, series=[{"name": "valid", "x": [1, 2], "y": [loss, 1]}])]) for loss in found]
        for architecture, found in losses.items()
    }
    (section,) = sections_of(write_seeds(tmp_path, results)).values()
    assert section.numbers.header == ["", "chance", "transformer", "diff", "diff − transformer"]
    ((_, chance, first, second, difference),) = section.numbers.rows
    half = scipy.stats.t.ppf(0.975, 2) * np.std(losses["transformer"], ddof=1) / np.sqrt(3)
    assert (chance, first, second[:5]) == ("5.000", f"2.100 ± {half:.3f}", "1.600")
    expected = scipy.stats.ttest_rel(losses["diff"], losses["transformer"]).confidence_interval(0.95)
    assert difference == Cell(f"−0.500 (−{-expected.low:.3f} to −{-expected.high:.3f})", "better")
    (panel,) = section.panels
    assert [(line["name"], line["colour"]) for line in panel.chart["series"]] == [
        ("transformer", COLOURS[0]),
        ("diff", COLOURS[1]),
    ]
    line = panel.chart["series"][0]
    assert (line["low"], line["y"], line["high"]) == ([2.0, 1], pytest.approx([2.1, 1]), [2.2, 1])
    assert "from its lowest run to its highest" in panel.note


@pytest.mark.parametrize(
    ("transformer", "diff", "word", "is_noted"),
    [
        ([2.0, 2.4], [2.1, 2.2], "open", False),  # The interval contains 0.
        ([2.0], [2.1, 2.2], "open", False),  # One seed has no interval.
        ([5.5, 5.6], [5.1, 5.3], "no better than chance", True),
        ([5.5], [5.1], "no better than chance", True),
        ([5.5], [4.0], "better", False),
    ],
)
def test_a_difference_that_says_nothing_has_no_winner(tmp_path, transformer, diff, word, is_noted):
    results = {"transformer": [(x, []) for x in transformer], "diff": [(x, []) for x in diff]}
    (section,) = sections_of(write_seeds(tmp_path, results)).values()
    assert section.numbers.rows[0][-1].verdict == word
    assert ("no model is better than chance at loss, so no other row" in section.basis) == is_noted


def test_lines_of_a_chart_of_two_models_become_a_figure_each(tmp_path):
    """A line that only one of them has stays in a figure of its own, with the model in its name."""
    guess = {"name": "guessing", "x": [1.0, 2.0], "y": [0.5, 0.5], "is_reference": True}
    workdirs = []
    for name in ("transformer", "diff"):
        workdirs.append(write_run(tmp_path / name, tiny(name, train__steps=3)))
        both = chart(0.3)
        alone = {**both, "name": "alone", "title": "Alone", "series": [both["series"][1], guess]}
        own = [{**both["series"][1], "name": "λ"}] if name == "diff" else []
        charts = [{**both, "series": [*both["series"], *own, guess]}, alone, heatmap([[1.0, 2.0]])]
        write_result(workdirs[-1], "own", 3, {}, charts)
    (section,) = sections_of(workdirs).values()
    drawn = {title: [line["name"] for line in p.chart.get("series", [])] for title, p in panels_of(section).items()}
    pair = ["transformer", "diff", "guessing"]
    figures = {"Cosine: noise": pair, "Cosine: answer": pair, "Cosine": ["diff: λ", "guessing"], "Alone": pair}
    assert drawn == figures | {"transformer: Map": [], "diff: Map": []}
    # The line "noise" is constant, and two figures are shown.
    assert [panel.title for panel in section.panels] == ["Cosine: answer", "Cosine"]


@pytest.mark.parametrize(
    ("shown", "is_informative"),
    [
        (heatmap([[0.0, 0.0], [0.9, 0.8], [0.0, 0.001]]), False),
        (heatmap([[0.0, 0.5], [0.9, 0.8]]), True),
        (heatmap([[0.3, 0.5]]), True),
        (heatmap([[0.5, 0.5], [0.5, None]]), True),
        (heatmap([[0.0, 0.0], [0.0, 0.0]]), False),
        (chart(0.5), True),
        (chart(0.5, series=[{"name": str(i), "x": [1, 2], "y": [i, 2 * i]} for i in range(8)]), False),
        (chart(0.5, series=[{"name": "one point", "x": [1], "y": [2]}]), False),
        (chart(0.5, series=[]), False),
    ],
)
def test_figures_without_information_are_folded(shown, is_informative):
    assert Panel(title="", chart=shown).is_informative == is_informative


def test_wall_time_has_the_labels_of_the_terminal(tmp_path):
    run = write_run(tmp_path / "run", tiny("diff", train__steps=3))
    with (run / "metrics.jsonl").open("a") as file:
        seconds = {"train_seconds": 8.0, "data_wait_seconds": 1.0, "lost_work_seconds": 1.0, "wall_seconds": 10.0}
        file.write(json.dumps({"split": "goodput", "step": 3, "attempt": 1, **seconds}) + "\n")
    table = wall_time(read_runs([run]))
    assert table.header == ["run", "training steps", "waiting for data", "steps done again"]
    assert table.rows == [["run", "8.0 (80%)", "1.0 (10%)", "1.0 (10%)"]]


def test_the_largest_logit_of_all_heads_is_drawn_over_the_steps(tmp_path):
    logged, other = (write_run(tmp_path / name, tiny(name, train__steps=3)) for name in ("diff", "transformer"))
    rows = [json.loads(line) for line in (logged / "metrics.jsonl").read_text().splitlines()]
    of_step = {1: [[[1.5, 4.0]], [[2.0, -1.0]]], 2: [[[1.0, None]], [[2.0, 3.0]]], 3: [[[1.0, 2.0]], [[6.0, 5.0]]]}
    for row in rows:
        if row["split"] == "train":
            row["largest_logits"] = of_step[row["step"]]
    (logged / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arms = arms_of(read_runs([logged, other]))
    section = training(arms, colours_of([arm.name for arm in arms]), "loss")
    # A logit of step 2 is not finite.
    (series,) = panels_of(section)["Largest attention logit"].chart["series"]
    assert (series["name"], series["x"], series["y"]) == ("diff", [1, 3], [4.0, 6.0])
