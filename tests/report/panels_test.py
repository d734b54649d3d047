"""Panels of the report, and the content of its sections on suites."""

import json

from helpers.report_runs import tiny, write_result, write_run

from difftx.evals.attention.suite import NUMBERS
from difftx.evals.result import Number
from difftx.report.panels import Cell, chart_panel, losses, panel_over_steps, wall_time
from difftx.report.runs import read_runs
from difftx.report.suites import suite_sections


def chart(value, **changes):
    series = [{"name": name, "x": [1.0, 2.0], "y": [value, value + i]} for i, name in enumerate(("noise", "answer"))]
    labels = {"title": "Cosine", "x_label": "layer", "y_label": "cosine"}
    return {"kind": "line", "name": "cosine", "series": series, **labels, "over_steps": True, **changes}


def test_lines_over_layers_are_drawn_over_the_steps(tmp_path):
    """Each line of a chart with `over_steps` becomes a panel with a line per layer.

    There is no panel for results of a single step, nor for a chart without `over_steps`.
    """
    workdirs = [write_run(tmp_path / name, tiny("diff", train__steps=9)) for name in ("one", "two")]
    for step in (3, 6, 9):
        write_result(workdirs[0], "attention", step, {}, [chart(step / 10), chart(1.0, name="l0", over_steps=False)])
    write_result(workdirs[1], "attention", 9, {}, [chart(0.5)])
    (section,) = suite_sections(read_runs(workdirs), comparable=True)
    found = {panel.title: panel for panel in section.panels}
    drawn = {title for title in found if "over the steps" in title}
    assert drawn == {f"Cosine: {line}, over the steps: one" for line in ("noise", "answer")}
    values = found["Cosine: answer, over the steps: one"].values
    assert values.header == ["steps", "layer 1", "layer 2"]
    assert values.rows == [["3", "0.3", "1.3"], ["6", "0.6", "1.6"], ["9", "0.9", "1.9"]]


def sections_of(tmp_path, results):
    """Return the sections of runs by suite, given run → suite → numbers."""
    workdirs = [write_run(tmp_path / name, tiny("diff", train__steps=3)) for name in results]
    for workdir, of_run in zip(workdirs, results.values(), strict=True):
        for suite, numbers in of_run.items():
            write_result(workdir, suite, 3, numbers)
    return {section.id: section for section in suite_sections(read_runs(workdirs), comparable=True)}


def test_differences_are_better_or_worse_by_direction_not_by_sign(tmp_path):
    first = {"answer": 0.2, "noise": 0.5, "gini": 0.7, "entropy": 3.0, "lambda": 0.4}
    second = {"answer": 0.1, "noise": 0.4, "gini": 0.9, "entropy": 3.0}
    first, second = ({name: Number(x, *NUMBERS[name]) for name, x in of_run.items()} for of_run in (first, second))
    sections = sections_of(tmp_path, {"a": {"attention": first}, "b": {"attention": second}})
    section = sections["suite-attention"]
    assert section.numbers.header == ["", "a", "b", "b − a"]
    assert [(row[0].text, row[-1]) for row in section.numbers.rows] == [
        ("weight on the answer", Cell("−0.1", "worse")),
        ("weight on irrelevant text (noise)", Cell("−0.1", "better")),
    ]
    assert [(row[0].text, row[2], row[-1]) for row in section.further.rows] == [
        ("Gini coefficient of the weights (0: even)", "0.9", Cell("+0.2 (+28.57%)", "")),
        ("entropy of the weights", "3", Cell("+0 (+0.00%)", "")),
        ("λ", "–", "–"),
    ]


def test_counts_that_are_equal_are_written_once_and_suites_have_an_order(tmp_path):
    numbers = {
        "ar_hit_loss": Number(2, "nats per token", "lower", "AR-Hit loss"),
        "ar_hit_tokens": Number(645, "tokens", label="AR-Hit tokens"),
    }
    own, quantized = {"zeal": 1.0}, {"loss_loss_4_bits": Number(2, "nats per token", "lower", "loss 4 bits")}
    runs = {"a": {"own": own, "quantize": quantized, "recall": numbers, "loss": {"loss": 1.0}}}
    sections = sections_of(tmp_path, runs | {"b": {"recall": numbers, "position": {"loss": 2.0, "documents": 3.0}}})
    assert list(sections) == ["suite-recall", "suite-position", "suite-quantize", "suite-own"]
    recall = sections["suite-recall"]
    assert recall.basis == "a at step 3; b at step 3; AR-Hit tokens: 645"
    assert [row[0].text for row in recall.numbers.rows] == ["AR-Hit loss"]
    assert recall.numbers.rows[0][-1] == Cell("0", "equal")
    assert sections["suite-quantize"].numbers.rows == []  # The charts show the numbers.
    assert [row[0] for row in sections["suite-quantize"].further.rows] == [Cell("loss 4 bits", unit="nats per token")]


def test_lines_of_several_runs_share_colours_by_name_and_dashes_by_run(tmp_path):
    workdirs = [write_run(tmp_path / name, tiny("diff", train__steps=3)) for name in ("one", "two")]
    guess = {"name": "guessing", "x": [1.0, 2.0], "y": [0.5, 0.5], "is_reference": True}
    for workdir in workdirs:
        both = chart(0.3)
        alone = {**both, "name": "alone", "series": [both["series"][0], guess]}
        write_result(workdir, "attention", 3, {}, [{**both, "series": [*both["series"], guess]}, alone])
    (section,) = suite_sections(read_runs(workdirs), comparable=True)
    drawn, alone = [
        {line.name: (line.glyph.line_color, line.glyph.line_dash) for line in panel.figure.renderers if line.name}
        for panel in section.panels
    ]
    assert list(drawn) == ["one: noise", "one: answer", "guessing", "two: noise", "two: answer"]
    assert drawn["one: noise"][0] == drawn["two: noise"][0] != drawn["two: answer"][0]
    assert drawn["one: noise"][1] != drawn["two: noise"][1]
    assert list(alone) == ["one", "guessing", "two"]
    assert alone["one"][0] != alone["two"][0]


def test_one_validation_has_an_axis_from_zero(tmp_path):
    """For a single point, the axis of tokens is not 2 tokens wide, and its labels have the units of curves.png."""
    run = write_run(tmp_path / "run", tiny("diff", train__steps=3, train__global_batch_tokens=2**20))
    section = losses(read_runs([run]), "loss")
    panel = next(
        p for p in section.panels if p.title == "Validation loss" and p.shown_for == "against-tokens axes-linear"
    )
    assert panel.figure.x_range.start == 0
    assert panel.figure.xaxis.major_label_overrides[2_000_000] == "2M"
    assert panel.figure.xaxis.major_label_overrides[500_000] == "0.5M"
    assert len(panel.figure.xaxis.major_label_overrides) < 300


def test_wall_time_has_the_labels_of_the_terminal(tmp_path):
    run = write_run(tmp_path / "run", tiny("diff", train__steps=3))
    with (run / "metrics.jsonl").open("a") as file:
        seconds = {"train_seconds": 8.0, "data_wait_seconds": 1.0, "lost_work_seconds": 1.0, "wall_seconds": 10.0}
        file.write(json.dumps({"split": "goodput", "step": 3, "attempt": 1, **seconds}) + "\n")
    table = wall_time(read_runs([run]))
    assert table.header == ["run", "training steps", "waiting for data", "steps done again"]
    assert table.rows == [["run", "8.0 (80%)", "1.0 (10%)", "1.0 (10%)"]]


def test_a_heatmap_says_in_html_what_its_colour_shows():
    chart = {"kind": "heatmap", "x": [1], "y": [1], "values": [[0.5]], "x_label": "x", "y_label": "y"}
    panel = chart_panel("Found", chart | {"value_label": "accuracy"}, "Thinned.")
    assert panel.note == "The colour shows: accuracy. Thinned."


def test_the_table_of_values_does_not_continue_a_shorter_line():
    """A run of 6 steps has no loss at step 9, nor has one that was logged from step 6 on at step 3.

    Lines whose x differ slightly, as the FLOPs of two models do, have values at both ends.
    """
    lines = {"long": ([3, 6, 9], [3.0, 2.0, 1.5]), "short": ([3, 6], [4.0, 3.5]), "late": ([6, 9], [2.5, 2.25])}
    lines |= {"above": ([3.003, 6.006, 9.009], [1.0, 0.5, 0.25]), "none": ([], [])}
    assert panel_over_steps("Loss", lines, "loss").values.rows == [
        ["3", "3", "4", "–", "1", "–"],
        ["6", "2", "3.5", "2.5", "0.5", "–"],
        ["9", "1.5", "–", "2.25", "0.25", "–"],
    ]
