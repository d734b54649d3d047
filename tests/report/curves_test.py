import json
import xml.etree.ElementTree as ET

import matplotlib.image
import pytest

from difftx.errors import UserError
from difftx.report.curves import format_table, write_curves
from difftx.training.metrics import MetricsWriter


def make_run(config, workdir, architecture, offset):
    c = config(architecture)
    workdir.mkdir(parents=True)
    (workdir / "config.json").write_text(c.to_json())
    writer = MetricsWriter(workdir, c.logging, 0)
    for step in range(1, 7):
        row = {
            "loss": offset + 1 / step,
            "tokens": step * 256,
            "tokens_per_second": 100.0 * step,
            "step_seconds": 2.0,
        }
        writer.write("train", step, row)
    numbers = {"suite": "loss", "loss": offset, "perplexity": 2.0, "bits_per_byte": offset / 2}
    writer.write("valid", 3, numbers | {"bits_per_byte": offset})
    writer.write("valid", 6, numbers)
    writer.close()


def test_figure_and_table(config, tmp_path):
    make_run(config, tmp_path / "runs" / "diff", "diff", 1.0)
    make_run(config, tmp_path / "runs" / "transformer", "transformer", 2.0)
    (tmp_path / "runs" / "notes").mkdir()
    rows, files = write_curves(str(tmp_path / "runs" / "*"), tmp_path / "out")
    assert [(r["run"], r["architecture"], r["tokens"], r["loss"]) for r in rows] == [
        ("diff", "diff", 1536, 1.0),
        ("transformer", "transformer", 1536, 2.0),
    ]
    assert rows[0]["bits_per_byte"] == 0.5
    assert rows[0]["tokens_per_second"] == 400.0
    assert rows[0]["seconds"] == 12.0
    assert [f.name for f in files] == ["curves.png", "curves.svg", "curves.json"]
    assert json.loads(files[2].read_text()) == rows
    assert matplotlib.image.imread(files[0]).std() > 0.05
    text = "".join(ET.parse(files[1]).getroot().itertext())
    assert "svg" in ET.parse(files[1]).getroot().tag
    assert text is not None
    assert len(format_table(rows).columns) == 8


def test_no_run_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"no folder with a metrics\.jsonl matches"):
        write_curves(str(tmp_path / "*"), tmp_path)
