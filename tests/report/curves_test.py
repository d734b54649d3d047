"""Loss curves of several runs, and their table."""

import json
import xml.etree.ElementTree as ET

import matplotlib.image
import numpy as np
import pytest
from helpers.report_runs import write_result, write_run

from difftx.errors import UserError
from difftx.model.flops import flops_per_token
from difftx.report.arms import arms_of
from difftx.report.curves import format_table, loss_chart, smoothed, write_curves
from difftx.report.runs import data_notes, match_runs
from difftx.training.run import write_run_files


def test_curves_have_a_figure_and_a_row_for_each_run(config, tmp_path):
    write_run(tmp_path / "runs" / "diff", config("diff"), loss=lambda step: 7 - step)
    write_run(tmp_path / "runs" / "transformer", config("transformer"), loss=lambda step: 8 - step)
    (tmp_path / "runs" / "notes").mkdir()
    rows, files, notes = write_curves(str(tmp_path / "runs" / "*"), tmp_path / "out")
    assert [(r["run"], r["architecture"], r["tokens"], r["loss"]) for r in rows] == [
        ("diff", "diff", 1536, 1.0),
        ("transformer", "transformer", 1536, 2.0),
    ]
    assert rows[0]["bits_per_byte"] == pytest.approx(1 / np.log(2) / 4)
    assert rows[0]["tokens_per_second"] == 400.0
    assert rows[0]["seconds"] == 12.0
    assert notes == []
    assert [f.name for f in files] == ["curves.png", "curves.svg", "curves.json"]
    assert json.loads(files[2].read_text()) == rows
    assert matplotlib.image.imread(files[0]).std() > 0.05
    assert ET.parse(files[1]).getroot().tag.endswith("svg")
    assert len(format_table(rows).columns) == 8


def test_a_run_that_only_difftx_eval_has_validated_has_a_curve(config, tmp_path):
    workdir = write_run(tmp_path / "run", config("diff"), valid_every=100)
    for step in (3, 6):
        write_result(workdir, "loss", step, {"loss": 9.0 - step, "perplexity": 2.0, "bits_per_byte": 1.5})
    ((row,), *_) = write_curves(str(workdir), tmp_path / "out", "bits_per_byte")
    assert (row["loss"], row["bits_per_byte"]) == (3.0, 1.5)
    (run,) = match_runs(str(workdir), "curves")
    assert run.evaluations("loss") == {3: 6.0, 6: 3.0}


def test_progress_after_a_step(config, tmp_path):
    """One of ten steps is logged, with the seconds per step of all ten. Step 35 lies between two logged steps."""
    c = config("diff", train__steps=40)
    write_run(tmp_path / "run", c, every=10)
    (run,) = match_runs(str(tmp_path / "run"), "curves")
    spent = run.progress([10, 35, 40])
    assert spent["steps"] == [10, 35, 40]
    assert spent["tokens"] == [2560, 8960, 10240]
    assert spent["seconds"] == [20, 60, 80]
    per_token = flops_per_token(c.model, c.data.sequence_length, causal=False)
    assert spent["flops"] == [per_token * tokens for tokens in spent["tokens"]]


def test_a_branch_spends_seconds_from_the_step_at_which_it_starts(config, tmp_path):
    workdir = write_run(tmp_path / "run", config("diff", train__steps=40), every=10)
    path = workdir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    spent = {"train_seconds": 0.0, "wall_seconds": 1.0}
    rows = [{"split": "goodput", "step": 20, "attempt": 1, **spent}, *(row for row in rows if row["step"] > 20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run,) = match_runs(str(workdir), "curves")
    assert run.progress([30, 40])["seconds"] == [20, 40]


def test_the_legend_has_the_last_values(config, tmp_path):
    for name, offset in (("diff", 7), ("transformer", 8)):
        write_run(tmp_path / name, config(name), loss=lambda step, offset=offset: offset - step)
    arms, colours = arms_of(match_runs(f"{tmp_path}/*", "curves")), {"diff": "red", "transformer": "blue"}
    chart = loss_chart(arms, colours, "loss", "tokens")
    assert (chart["x_label"], chart["y_label"]) == ("training tokens", "loss (nats per token)")
    lines = {(line["colour"], line["group"]): (line["x"], line["y"]) for line in chart["series"]}
    assert lines["red", "diff: 1.000"] == ([768, 1536], [4, 1])
    assert lines["blue", "transformer: 2.000"] == ([768, 1536], [5, 2])
    # The curves of the training loss are in the background, without a name in the legend.
    assert [line["group"] for line in chart["series"] if line.get("style") == "faint"] == ["", ""]
    chart = loss_chart(arms, colours, "bits_per_byte", "seconds")
    assert chart["x_label"] == "seconds of training"
    assert [line["x"] for line in chart["series"]] == [[6, 12], [6, 12]]


def test_smoothing_has_no_lag():
    """Smoothing does not change a straight line, except at the end, where the window lacks later values."""
    line = np.linspace(5, 1, 200)
    assert smoothed(line)[:-10] == pytest.approx(line[:-10], rel=1e-12)
    rng = np.random.default_rng(0)
    noisy = rng.normal(size=300)
    found = smoothed(noisy)
    assert found[0] == noisy[0]
    for i in (1, 5, 9, 10, 150, 289, 290, 299):
        half = min(i, 10)
        assert found[i] == pytest.approx(noisy[i - half : i + half + 1].mean(), rel=1e-9)


def test_smoothing_skips_gaps():
    assert smoothed(np.array([3.0, 3.0, 3.0])) == pytest.approx([3.0, 3.0, 3.0])
    gaps = smoothed(np.array([np.nan, 1.0, np.nan, 3.0, 5.0, np.inf]))
    assert gaps == pytest.approx([np.nan, 1.0, 1.0, 3.0, 3.0, 3.0], nan_ok=True)
    assert smoothed(np.array([])).tolist() == []


def test_different_tokenizers_do_not_compare_by_loss(config, tmp_path):
    write_run(tmp_path / "runs" / "a", config("diff"))
    write_run(tmp_path / "runs" / "b", config("transformer"), tokenizer="b" * 64)
    with pytest.raises(UserError, match=r"a and b have different tokenizers.*--metric=bits_per_byte"):
        write_curves(str(tmp_path / "runs" / "*"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    _, files, _ = write_curves(str(tmp_path / "runs" / "*"), tmp_path / "out", "bits_per_byte")
    assert "training loss" not in files[1].read_text()


def test_runs_with_different_data_are_named(config, tmp_path):
    """Each difference has one line, with the first run that has it."""
    write_run(tmp_path / "a", config("diff"))
    write_run(tmp_path / "b", config("transformer"))
    assert data_notes(match_runs(f"{tmp_path}/*", "curves")) == []
    write_run(tmp_path / "d", config("transformer", eval__loss_tokens=77, data__sequence_length=64), text="y")
    write_run(tmp_path / "e", config("transformer", eval__loss_tokens=78, data__sequence_length=128), text="z")
    assert data_notes(match_runs(f"{tmp_path}/*", "curves")) == [
        "a and d have other data at data.path or data.sources, so their losses are not comparable",
        "a and d differ in data.sequence_length: 32 and 64 tokens per row, so their losses are not comparable",
        f"a and d differ in eval.loss_tokens: {config().eval.loss_tokens:,} and 77 tokens to validate on, so their "
        "losses are not comparable",
    ]
    # Other tokens of another tokenizer may be the same text.
    write_run(tmp_path / "f", config("transformer"), text="w", tokenizer="b" * 64)
    assert data_notes(match_runs(f"{tmp_path}/[af]", "curves")) == []


def test_a_run_that_has_not_begun_is_an_error(config, tmp_path):
    write_run_files(tmp_path, config("diff"))
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="no training steps in it yet"):
        write_curves(str(tmp_path), tmp_path / "out")
