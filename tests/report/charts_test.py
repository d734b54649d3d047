"""Charts as PNG and SVG: colours, axes and lines."""

import dataclasses
import json
import xml.etree.ElementTree as ET

import matplotlib.image
import numpy as np
import pytest

from difftx.evals.result import Heatmap, LineChart, ReferenceLine, ScatterChart, Series
from difftx.report.charts import GREY, axis_number, colour_limits, draw, draw_chart

LINES = LineChart(
    name="position/α",
    title="costs $5",
    x_label="position",
    y_label="nats",
    log_x=True,
    series=[
        Series(name="<b>", x=[1, 10, 100], y=[3.0, 2.0, 1.0], low=[2.5, 1.5, 0.5], high=[3.5, 2.5, 1.5]),
        Series(name="$x_", x=[1, 10], y=[2.0, 2.0]),
    ],
)
MAP = Heatmap(
    name="needle",
    title="needles",
    x_label="context",
    y_label="depth",
    x=["8K", "64K"],
    y=[0.0, 0.5, 1.0],
    values=[[1.0, None], [0.5, 0.25], [0.0, 1.0]],
    value_label="accuracy",
)

GROUPS = {"diff0": "diff, 2 runs", "diff1": "diff, 2 runs", "diff0, training": "", "costs": "$5"}


@pytest.mark.parametrize("chart", [LINES, MAP], ids=["lines", "heatmap"])
def test_charts_are_written_as_png_and_svg(chart, tmp_path):
    png, svg = draw_chart(json.loads(json.dumps(dataclasses.asdict(chart))), tmp_path / "out")
    assert [png.name, svg.name] in (["position_α.png", "position_α.svg"], ["needle.png", "needle.svg"])
    assert matplotlib.image.imread(png).std() > 0.05
    assert ET.parse(svg).getroot().tag.endswith("svg")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {png.name, svg.name}
    again = draw_chart(dataclasses.asdict(chart), tmp_path / "again")
    assert [path.read_bytes() for path in again] == [png.read_bytes(), svg.read_bytes()]


@pytest.mark.parametrize(
    ("most", "shown"),
    [
        (1.1e6, {0: "0", 2e5: "0.2M", 1e6: "1M"}),
        (8e5, {0: "0", 2e5: "200,000"}),
        (9.04e14, {2e14: "200T"}),
        (5e15, {1e15: "1e+15"}),
        (3, {0.5: "0.5"}),
    ],
)
def test_numbers_on_an_axis_share_a_unit_suffix(most, shown):
    assert {x: axis_number(most)(x) for x in shown} == shown


def test_empty_and_single_charts_are_drawn(tmp_path):
    draw_chart(dataclasses.asdict(dataclasses.replace(LINES, name="none", series=[])), tmp_path)
    draw_chart(dataclasses.asdict(dataclasses.replace(MAP, name="one", x=[1.0], y=["a"], values=[[None]])), tmp_path)
    many = [Series(name=f"layer {i}", x=[1.0, 2.0], y=[i, i + 1.0]) for i in range(28)]
    draw_chart(dataclasses.asdict(dataclasses.replace(LINES, name="many", series=many)), tmp_path)
    assert len(list(tmp_path.iterdir())) == 6


def test_colours_of_signed_values_are_centred_on_zero():
    signed = dataclasses.asdict(dataclasses.replace(MAP, values=[[-0.5, None], [0.1, 0.2], [0.0, 0.3]]))
    assert colour_limits(signed) == (-0.5, 0.5)
    assert colour_limits(dataclasses.asdict(MAP)) == (0.0, 1.0)
    assert colour_limits(dataclasses.asdict(dataclasses.replace(MAP, low=0.2, high=0.8))) == (0.2, 0.8)
    low, high = colour_limits(dataclasses.asdict(dataclasses.replace(MAP, values=[[0.5, 0.5]] * 3)))
    assert np.isfinite([low, high]).all()
    assert low < high


def test_integers_references_and_points():
    """Demonstrations have integer ticks on a log axis, permutations are points without lines, guessing is dashed."""
    guess = ReferenceLine(name="guessing", x=[1, 300], y=[0.5, 0.5])
    shots = [Series(name="random", x=[1, 2, 4, 300], y=[0.1, 0.2, 0.3, 0.4]), guess]
    titles = {"title": "", "x_label": "demonstrations", "y_label": "accuracy"}
    axes = drawn(LineChart(name="shots", series=shots, log_x=True, **titles))
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2", "4", "300"]
    random, guessing = axes.lines
    assert (random.get_linestyle(), guessing.get_linestyle(), guessing.get_color()) == ("-", "--", GREY)
    axes = drawn(ScatterChart(name="orders", series=[Series(name="random", x=[0, 1, 2], y=[0.1, 0.4, 0.2])], **titles))
    (points,) = axes.lines
    assert (points.get_linestyle(), points.get_marker()) == ("None", "o")
    assert all(float(tick).is_integer() for tick in axes.get_xticks())


def test_lines_of_a_group_share_an_entry_of_the_legend():
    lines = [dataclasses.asdict(LINES.series[0]) | {"name": name, "group": group} for name, group in GROUPS.items()]
    figure = draw(dataclasses.asdict(LINES) | {"series": lines})
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["diff, 2 runs", "$5"]


def drawn(chart):
    return draw(json.loads(json.dumps(dataclasses.asdict(chart)))).axes[0]
