"""Panels of the report."""

from helpers.report_runs import tiny, write_result, write_run

from difftx.report import panels
from difftx.report.runs import read_runs


def chart(value, **changes):
    series = [{"name": name, "x": [1.0, 2.0], "y": [value, value + i]} for i, name in enumerate(("noise", "answer"))]
    labels = {"title": "Cosine", "x_label": "layer", "y_label": "cosine"}
    return {"kind": "line", "name": "cosine", "series": series, **labels, "over_steps": True, **changes}


def test_lines_over_layers_are_drawn_over_the_steps(tmp_path):
    """Each line of a chart that says so: a line a layer. One step makes no line, and other charts none."""
    workdirs = [write_run(tmp_path / name, tiny("diff", train__steps=9)) for name in ("one", "two")]
    for step in (3, 6, 9):
        write_result(workdirs[0], "attention", step, {}, [chart(step / 10), chart(1.0, name="l0", over_steps=False)])
    write_result(workdirs[1], "attention", 9, {}, [chart(0.5)])
    section = panels.evaluations(read_runs(workdirs))
    found = {panel.title: panel for panel in section.panels}
    drawn = {title for title in found if "over the steps" in title}
    assert drawn == {f"attention: Cosine: {line}, over the steps: one" for line in ("noise", "answer")}
    values = found["attention: Cosine: answer, over the steps: one"].values
    assert values.header == ["steps", "layer 1", "layer 2"]
    assert values.rows == [["3", "0.3", "1.3"], ["6", "0.6", "1.6"], ["9", "0.9", "1.9"]]
