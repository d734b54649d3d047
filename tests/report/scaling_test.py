"""Scaling studies of runs and tables, and the paper's printed points."""

import csv
import json

import numpy as np
import pytest
import scipy
from helpers.report_runs import write_run

from difftx.analysis.scaling_law import PowerLaw
from difftx.commands.flags import run_folders
from difftx.errors import UserError
from difftx.report.points import LossPoint, read_points
from difftx.report.runs import match_runs
from difftx.report.scaling import format_study, write_scaling

SIZES = [0.834e9, 1.410e9, 2.763e9, 6.837e9, 13.083e9]  # Table 10.


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch):
    monkeypatch.setattr("difftx.report.scaling.RESAMPLES", 15)


def points_of(path, laws, x, column="size"):
    """Write a table with a point of each law at each x, a size or a number of tokens, and return its path."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["architecture", column, {"size": "tokens", "tokens": "size"}[column], "loss", "seed"])
        rows.writerows([name, value, 1e10, float(law(value)), 0] for name, law in laws.items() for value in x)
    return str(path)


def paper_laws():
    """Return laws of both models through the points of Figure 3a that §3.2 and Table 6 print.

    These are losses of 3.087 and 3.062 at 1.4B, and equal losses at 6.8B and 11B (62.2 %) and at 7.8B and 13.1B
    (59.5 %). Together with the Transformer's law, they determine the differential model's law. The floor of the
    Transformer's law puts Figure 3a's axis at 2.9 to 3.15.
    """
    transformer = PowerLaw((3.087 - 2.75) * 1.410e9**0.3, 0.3, 2.75)
    known = [
        (1.410e9, 3.062),
        (6.837e9, float(transformer(6.837e9 / 0.622))),
        (7.8e9, float(transformer(7.8e9 / 0.595))),
    ]

    def misses(p):
        return [np.exp(p[0]) * (x / 3e9) ** -p[1] + p[2] - loss for x, loss in known]

    log_a, b, c = scipy.optimize.fsolve(misses, (np.log(0.3), 0.3, 2.7), xtol=1e-12)
    return PowerLaw(np.exp(log_a) * 3e9**b, b, c), transformer


def test_the_papers_printed_points(tmp_path):
    diff, transformer = paper_laws()
    table = points_of(tmp_path / "points.csv", {"diff": diff, "transformer": transformer}, SIZES)
    (study,), files = write_scaling(table, tmp_path / "out")
    drawn = study.drawn["diff"]
    assert (drawn.x, drawn.ratio) == (6.837e9, pytest.approx(0.622, abs=1e-3))
    assert drawn.reference_x == pytest.approx(11.0e9, rel=5e-3)
    largest = next(match for match in study.matches["diff"] if match.reference_x == 13.083e9)
    assert (largest.x, largest.ratio) == (pytest.approx(7.8e9, rel=5e-3), pytest.approx(0.595, abs=2e-3))
    assert [file.name for file in files] == ["scaling_size.png", "scaling_size.svg", "scaling.json"]
    assert "62.2%" in files[1].read_text()  # Written next to the match, as in Figure 3a.


def test_the_papers_match_in_tokens(tmp_path):
    """Figure 3b has points every 40B tokens, up to 360B. 160B tokens reach the Transformer's loss after 251B tokens."""
    transformer = PowerLaw(0.45 * 40e9**0.35, 0.35, 2.45)
    diff = PowerLaw(transformer.a * (160 / 251) ** transformer.b, transformer.b, transformer.c)
    laws = {"diff": diff, "transformer": transformer}
    table = points_of(tmp_path / "points.csv", laws, np.arange(40e9, 361e9, 40e9), "tokens")
    (study,), files = write_scaling(table, tmp_path / "out")
    match = next(match for match in study.matches["diff"] if match.x == 160e9)
    assert match.reference_x == pytest.approx(251e9, rel=2e-3)
    assert match.ratio == pytest.approx(0.637, abs=1e-3)
    assert files[0].name == "scaling_tokens.png"
    written = json.loads(files[-1].read_text())
    assert written["not_fitted"].keys() == {"size"}


def test_runs_are_fitted_by_size_and_by_tokens(config, tmp_path):
    """The losses of both architectures fall with the width. The differential model needs 70 % of the size."""
    for architecture, factor in (("diff", 0.7), ("transformer", 1.0)):
        law = PowerLaw(30 * factor**0.4, 0.4, 1.0)
        for width in (16, 32, 64, 128, 256):
            c = config(architecture, model__d_model=width, model__mlp_dim=2 * width, train__steps=9)
            limit = float(law(10.0 * width**2))
            folder = tmp_path / "runs" / f"{architecture}-{width}"
            write_run(folder, c, loss=lambda step, limit=limit: limit + 0.3 / step, valid_every=1)
    studies, files = write_scaling(f"{tmp_path}/runs/*", tmp_path / "out")
    assert [study.quantity for study in studies] == ["size", "tokens"]
    by_size, by_tokens = studies
    assert [len(fit.x) for fit in by_size.fits.values()] == [5, 5]
    assert by_tokens.fits["diff"].x == pytest.approx(256.0 * np.arange(1, 10))
    assert by_size.drawn["diff"].ratio == pytest.approx(0.7, abs=0.1)
    assert {file.suffix for file in files} == {".png", ".svg", ".json"}
    laws, matches = format_study(by_size)
    assert (laws.row_count, matches.row_count) == (2, 6)  # Five sizes, and the Transformer's largest.


def test_runs_without_a_last_loss_are_excluded_with_their_reasons(config, tmp_path):
    """Of nine steps, one run has trained four, and the last loss of the other is not finite."""
    for name, rows_of in {
        "unfinished": lambda rows: [row for row in rows if row["step"] < 5],
        "diverged": lambda rows: [*rows[:-1], rows[-1] | {"loss": None}],
    }.items():
        metrics = write_run(tmp_path / name, config(train__steps=9), valid_every=1) / "metrics.jsonl"
        rows = rows_of(list(map(json.loads, metrics.read_text().splitlines())))
        metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    points, notes = read_points(f"{tmp_path}/*", "loss")
    assert (len(points), [point for point in points if point.is_last]) == (8 + 4, [])
    assert notes == [
        "diverged: the loss of its last validation, at step 9, is not finite: not a point of loss against size",
        "unfinished: its last validation is at step 4, of 9: not a point of loss against size",
    ]


def test_extrapolation_is_marked(tmp_path):
    transformer = PowerLaw(450.0, 0.3, 2.3)
    diff = PowerLaw(transformer.a * 0.05**transformer.b, transformer.b, transformer.c)  # Needs a twentieth of the size.
    table = points_of(tmp_path / "points.csv", {"diff": diff, "transformer": transformer}, SIZES)
    (study,), files = write_scaling(table, tmp_path / "out")
    assert study.drawn["diff"].extrapolated is False  # 0.834B matches 16.7B, within 2 × 13.1B.
    assert [match.extrapolated for match in study.matches["diff"] if match.x >= 1.4e9] == [True] * 4
    marks = list(format_study(study)[1].columns[-1].cells)
    assert marks.count("extrapolated beyond 2× the data") == sum(m.extrapolated for m in study.matches["diff"])
    assert files[1].read_text().count("extrapolated") == 0


@pytest.mark.parametrize(
    ("laws", "sizes", "message"),
    [
        ({"diff": 1.0}, 3, r"too few points.*needs 4 sizes of finished runs.*diff has 3"),
        ({"diff": 1.0, "transformer": 3.0}, 99, r"diff and transformer never meet.*\+ 1, transformer by.*\+ 3"),
    ],
)
def test_points_without_a_fit_or_a_crossing_are_refused(tmp_path, laws, sizes, message):
    laws = {name: PowerLaw(10.0, 0.3, floor) for name, floor in laws.items()}
    with pytest.raises(UserError, match=message):
        write_scaling(points_of(tmp_path / "points.csv", laws, SIZES[:sizes]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "architecture,size,tokens,los\ndiff,1e9,1e9,3\n", "line 2 has no 'loss'. Did you mean 'los'"),
        ("a.csv", "architecture,size,tokens,loss\ndiff,1e9,1e9,low\n", "line 2: loss='low': expected a number"),
        ("a.csv", "architecture,size,tokens,loss\ndiff,-1,1e9,3\n", "line 2: size=-1.0 must be positive"),
        ("a.csv", "", "no points there"),
        ("a.txt", "", "no folder with a metrics.jsonl matches"),
    ],
)
def test_a_bad_table_is_refused(name, text, message, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as error:
        write_scaling(str(tmp_path / name), tmp_path / "out")
    assert message in str(error.value)


def test_a_table_may_begin_with_a_byte_order_mark(tmp_path):
    """Excel writes one into a CSV file in UTF-8."""
    path = tmp_path / "a.csv"
    path.write_text("architecture,size,tokens,loss\ndiff,1e9,2e9,3\n", encoding="utf-8-sig")
    assert read_points(str(path), "loss")[0] == [LossPoint("diff", 1e9, 2e9, 3.0, True)]


def test_an_existing_path_is_neither_a_glob_nor_a_list(config, tmp_path):
    """As globs, these paths would match nothing, or the paths with a 1 in place of [1]."""
    text = "architecture,size,tokens,loss\ndiff,10,9,3.0\n"
    (tmp_path / "table[1].csv").write_text(text)
    (tmp_path / "table1.csv").write_text(text.replace("3.0", "2.0"))
    assert read_points(f"{tmp_path}/table[1].csv", "loss")[0] == [LossPoint("diff", 10.0, 9.0, 3.0, True)]
    named, commas = tmp_path / "sweep[1]" / "run[a]", tmp_path / "x,y" / "a,b"
    for folder in (named, commas):
        write_run(folder, config("diff"))
    assert [run.workdir for run in match_runs(str(named), "curves")] == [named]
    assert run_folders(str(named.parent)) == [named]
    assert run_folders(str(commas)) == run_folders(str(commas.parent)) == [commas]
    assert run_folders(f"{named},{tmp_path}/x?y/a?b") == [named, commas]


def test_arms_and_rates_that_a_fit_pools_are_named(config, tmp_path):
    """Seeds are repetitions, and each size, length and architecture may have a rate of its own."""

    def train(name, architecture="diff", width=16, **changes):
        fields = {"model__d_model": width, "model__mlp_dim": 2 * width, "train__steps": 9} | changes
        write_run(tmp_path / name, config(architecture, **fields))

    train("first")
    train("seed", train__seed=7)
    train("machine", train__accumulation=2, model__remat="full", data__prefetch_batches=8)  # Only rounding differs.
    for name, changes in {
        "wider": {"width": 32},
        "shorter": {"train__steps": 6},
        "baseline": {"architecture": "transformer"},
    }.items():
        train(name, **changes, optimizer__learning_rate=1e-3)
    assert read_points(f"{tmp_path}/*", "loss")[1] == []
    train("rate", optimizer__learning_rate=1e-3)
    train("arm", model__head_norm="none")
    [note] = read_points(f"{tmp_path}/*", "loss")[1]
    assert note.startswith("diff: runs of about the same size and length differ in model.head_norm, optimizer.learning")
