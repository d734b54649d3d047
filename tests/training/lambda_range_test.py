"""Warnings about a λ that leaves its range: in a training run, after a restart, and in the report."""

import math

import pytest
from helpers.report_runs import write_run

from difftx.report.page import write_page
from difftx.training.lambda_range import LambdaRange, lambda_warning
from difftx.training.loop import train
from difftx.training.metrics import MetricsWriter, read_metrics
from difftx.training.run import Run


def test_each_crossing_outward_is_reported_once():
    observed = LambdaRange()
    told = [
        observed.observe(lambda_L)
        for lambda_L in ([0.2, 0.8], [2.1, 0.8], [2.2, -0.6], [2.0, -0.7], [2.01, -0.5], [math.inf, math.nan])
    ]
    assert told == [[], [1], [2], [], [1], [2]]


def test_restart_reads_earlier_crossings_from_the_rows():
    rows = [
        {"split": "train", "lambda": [2.1, 0.8, None]},
        {"split": "train", "lambda": [0.9, 2.2, None]},
        {"split": "lambda_crossing", "layer": 2, "value": 2.2},
        {"split": "lambda_crossing", "layer": 4, "value": 3.0},  # Its step has no train row.
        {"split": "valid"},
    ]
    assert LambdaRange(rows).observe([2.5, 2.5, 2.5, 2.5]) == [1]


@pytest.mark.parametrize(
    ("value", "meaning"), [(2.5, "dominate the first"), (-0.75, "are added to the first"), (math.nan, "not a number")]
)
def test_warning_explains_the_value_and_names_the_documentation(value, meaning):
    line = lambda_warning(7, 3, value)
    assert line.startswith(f"step 7: λ of layer 3 is {value:g}, outside of [-0.5, 2]: ")
    assert meaning in line
    assert "docs/operations.md" in line


@pytest.mark.long
def test_training_reports_the_crossings_in_its_rows(config, text_file, tmp_path, capfd):
    """λ starts at 2, changes fast and leaves its range, in a run that is resumed. A run of diff_v2 has no crossing."""

    def steps_of(split, run):
        return [row for row in read_metrics(run.workdir / "metrics.jsonl") if row["split"] == split]

    changes = {"model__lambda_init": 2.0, "optimizer__learning_rate": 0.3, "mesh__fsdp": 8}
    changes |= {"eval__every_steps": 100, "logging__trackers": (), "data__path": text_file}
    for steps in (6, 9):
        run = Run.open(config(train__steps=steps, optimizer__warmup_steps=1, **changes), tmp_path / "diff")
        assert train(run, lambda *_: {}) == 0
    expected, before = [], {}
    for row in steps_of("train", run):
        for layer, value in enumerate(row["lambda"], 1):
            if not -0.5 <= value <= 2 and -0.5 <= before.get(layer, 0) <= 2:
                expected.append((row["step"], layer, value))
            before[layer] = value
    assert expected  # Otherwise, the test would check nothing.
    assert [(row["step"], row["layer"], row["value"]) for row in steps_of("lambda_crossing", run)] == expected
    printed = capfd.readouterr().out
    assert printed.count(": λ of layer ") == len(expected)
    step, layer, value = expected[0]
    assert f"step {step}: λ of layer {layer} is {value:.4g}, outside of [-0.5, 2]" in printed
    del changes["model__lambda_init"]
    other = Run.open(config("diff_v2", **changes), tmp_path / "diff_v2")
    assert train(other, lambda *_: {}) == 0
    assert steps_of("train", other)[-1]["lambda"]
    assert not steps_of("lambda_crossing", other)


@pytest.mark.long
def test_report_contains_the_warning(config, tmp_path):
    workdir = write_run(tmp_path / "diff", config("diff"), layers=2)
    out = tmp_path / "report.html"
    write_page([workdir], out)
    assert "Warning: λ left" not in out.read_text()
    writer = MetricsWriter(workdir, config().logging, 6)
    for step in range(4, 18):
        writer.write("lambda_crossing", step, {"layer": 2, "value": math.nan if step == 5 else -0.625})
    writer.close()
    write_page([workdir], out)
    page = out.read_text()
    assert "Warning: λ left [-0.5, 2] in layer 2 at step 4 (λ = -0.625), layer 2 at step 5 (λ = –)" in page
    assert "and 4 more times. Below this range, the second attention weights are added to the first" in page
