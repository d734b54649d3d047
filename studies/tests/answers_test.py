"""The tables of docs/results.md that show an answer at once, against sums over the runs of single studies."""

import numpy as np
import pytest
import scipy.optimize
import scipy.stats

from difftx.json_files import read_json
from studies import answer_tables, controls_study, controls_tables, recall_tables, results, size_tables
from studies.study_records import TEST_LOSS, VALIDATION_LOSS

COLLECTED = read_json(results.COLLECTED)
NOVELS = "question-1-again+question-1-novels+question-1-wide+question-1-stdlib+question-2+question-4+question-5"
RECALL = [f"question-{name}" for name in ("1-recall", "6", "6-more", "6-longer")]


def rows_of(table):
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]


def losses(study, arm, number=TEST_LOSS, **changes):
    """Return the losses of an arm by seed, of the runs with these values of fields, whose names end in the keys."""
    found = {}
    for r in COLLECTED[study]:
        of_run = {name.replace(".name", "").rpartition(".")[2]: value for name, value in r["changes"].items()}
        of_run = {name: of_run.get(name) for name in ("optimizer", "warmup_steps", "steps")}
        if r["arm"] == arm and of_run == {**dict.fromkeys(of_run), **changes}:
            found[r["seed"]] = r["numbers"][number]
    return [found[seed] for seed in sorted(found)]


def interval_text(values):
    low, high = scipy.stats.ttest_1samp(values, 0).confidence_interval()
    return np.mean(values), (high - low) / 2


SHORT = {"warmup_steps": "0.01"}
MUON = {"optimizer": "muon"}
# Text and recipe, size, tokens per parameter, seeds → study, its family, changes of the runs, and the loss.
PLACES = {
    ("novels", "150,000", "14", "10"): ("question-1-again", "again", {}, TEST_LOSS),
    ("novels", "150,000", "14", "5"): ("question-1-novels", "norm-or-gain", {}, TEST_LOSS),
    ("novels, heads of width 32", "210,000", "10", "5"): ("question-1-wide", "main", {}, TEST_LOSS),
    ("source code", "150,000", "14", "5"): ("question-1-stdlib", "main", {}, VALIDATION_LOSS),
    ("novels, warm-up of 1 %", "150,000", "14", "5"): ("question-2", "warmup", SHORT, TEST_LOSS),
    ("novels, Muon", "150,000", "14", "5"): ("question-2", "warmup", MUON, TEST_LOSS),
    ("novels, Muon, warm-up of 1 %", "150,000", "14", "5"): ("question-2", "warmup", MUON | SHORT, TEST_LOSS),
    **{
        ("novels", size, str(tokens), "8"): ("question-4", task, {"steps": str(steps)}, TEST_LOSS)
        for task, size in (("novels", "150,000"), ("novels-0.4m", "430,000"))
        for tokens, steps in controls_study.LENGTHS[task].items()
    },
    **{
        ("novels, converted", size, "14", "8"): ("question-5", "differential", {}, TEST_LOSS)
        for size in ("150,000", "180,000")
    },
}


def verdicts(study, family, number):
    """Return the verdicts of the appendix: title of a contrast → verdict; for question 4, with the tokens."""
    if study == "question-4":
        tables = (
            of(COLLECTED[study], family) for of in (size_tables.sizes_family_table, size_tables.sizes_later_table)
        )
        return {(title, at): verdict for table in tables for title, at, *_, verdict in rows_of(table)}
    records = results.joined(COLLECTED, "question-1-novels+question-2" if study == "question-2" else study)
    return {title: verdict for title, *_, verdict in rows_of(controls_tables.family_table(records, family, number))}


def test_all_differences_from_the_transformer_are_those_of_their_studies():
    table = rows_of(answer_tables.differences_table(results.joined(COLLECTED, NOVELS)))
    seen = {(arm, *place) for arm, *place, _, _, _ in table}
    assert len(seen) == len(table) == 12 + 2 + 5 + 5 + 3
    assert {tuple(place) for _, *place in seen} == {*PLACES}
    for title, *place, difference, _, verdict in table:
        study, family, changes, number = PLACES[tuple(place)]
        arm = title.strip("`")
        values = np.subtract(*(losses(study, name, number, **changes) for name in (arm, "transformer")))
        assert len(values) == int(place[3])
        assert [*map(float, difference.split(" ± "))] == pytest.approx(interval_text(values), abs=6e-4)
        cells = [", ".join([name, *(f"{n}={v}" for n, v in changes.items())]) for name in (arm, "transformer")]
        key = " − ".join(f"`{cell}`" for cell in cells)
        if study == "question-4":
            key = (f"`{arm}` − `transformer`", f"{place[2]} tokens per parameter")
        assert verdict == verdicts(study, family, number).get(key, "not planned")


def test_the_main_differences_are_rows_of_all_differences_with_one_row_per_setting():
    records = results.joined(COLLECTED, NOVELS)
    of_page, of_appendix = map(
        rows_of, (of(records) for of in (answer_tables.main_differences_table, answer_tables.differences_table))
    )
    assert [row for row in of_appendix if row in of_page] == of_page
    assert len({(arm, *place[:-1]) for arm, *place, _, _, _ in of_page}) == len(of_page) == 6 + 1 + 3 + 3
    assert {size for _, _, size, *_ in of_page} == {"150,000", "210,000"}


def test_the_differences_of_the_second_map_are_those_of_their_studies():
    muon = {place: of for place, of in PLACES.items() if "Muon" in place[0]}
    places = {place: of for place, of in PLACES.items() if place[0] in ("novels", "source code") or "32" in place[0]}
    records = results.joined(COLLECTED, f"{NOVELS}+question-2-zero")
    table = rows_of(answer_tables.second_map_table(records))
    assert {tuple(place) for *place, _, _ in table} == {*places, *muon}
    assert len(table) == 11
    for *place, difference, verdict in table:
        study, family, changes, number = PLACES[tuple(place)]
        if "Muon" in place[0]:
            study, family = "question-2+question-2-zero", "muon-subtraction"
        own, other = (
            [x for name in study.split("+") for x in losses(name, arm, number, **changes)]
            for arm in ("diff", "zero-norm")
        )
        assert [*map(float, difference.split(" ± "))] == pytest.approx(interval_text(np.subtract(own, other)), abs=6e-4)
        cells = [", ".join([name, *(f"{n}={v}" for n, v in changes.items())]) for name in ("diff", "zero-norm")]
        key = " − ".join(f"`{cell}`" for cell in cells)
        if study == "question-4":
            key = ("`diff` − `zero-norm`", f"{place[2]} tokens per parameter")
        assert verdict == verdicts(study, family, number).get(key, "not planned")


def test_the_worth_in_that_table_is_read_from_a_fitted_curve():
    """Only runs with the recipe of the curve have a worth."""
    tokens = np.array([0.740352, 2.960384, 11.84256])
    curve = [np.mean(losses("question-4", "transformer", steps=str(at))) for at in (723, 2891, 11565)]
    start, exact = [1.9, 0.5, 0.5], {"xtol": 1e-15, "ftol": 1e-15, "gtol": 1e-15}
    _, scale, power = scipy.optimize.least_squares(
        lambda p: p[0] + p[1] * tokens ** -p[2] - np.array(curve), start, **exact
    ).x
    at_tokens = {"5": tokens[0], "14": 2.048, "20": tokens[1], "80": tokens[2]}
    checked = 0
    for _, recipe, size, per_parameter, _, difference, worth, _ in rows_of(
        answer_tables.differences_table(results.joined(COLLECTED, NOVELS))
    ):
        assert (worth != "–") == (recipe == "novels")
        if recipe == "novels" and size == "150,000":
            trained = at_tokens[per_parameter]
            loss = scale * trained**-power + float(difference.split(" ± ")[0])
            # The table shows three decimals of the difference, and two of the worth.
            assert float(worth.split()[0]) == pytest.approx((loss / scale) ** (-1 / power) / trained, abs=0.012)
            checked += 1
    assert checked == 5 + 2 + 3 + 3


@pytest.mark.parametrize(("name", "optimizer"), [("AdamW", {}), ("Muon", MUON)])
def test_the_table_of_warm_ups_has_the_differences_of_each_optimizer(name, optimizer):
    def cell(arm, warmup):
        studies = ("question-1-novels", "question-2", "question-2-zero")
        return np.array([x for study in studies for x in losses(study, arm, **optimizer, **warmup)])

    diff, short_diff, other, short_other = (cell(arm, w) for arm in ("diff", "transformer") for w in ({}, SHORT))
    zero, short_zero = (cell("zero-norm", warmup) for warmup in ({}, SHORT))
    differences = [diff - other, short_diff - short_other, short_diff - short_other - (diff - other)]
    differences += [short_other - other, short_diff - diff, diff - zero]
    differences += [short_diff - short_zero] if len(short_zero) else []
    records = results.joined(COLLECTED, "question-1-novels+question-2+question-2-zero")
    table = answer_tables.warmup_table(records)
    first = 1 + 2 * [*answer_tables.OPTIMIZERS].index(name)
    for row, values in zip(rows_of(table), differences, strict=False):
        assert [*map(float, row[first].split(" ± "))] == pytest.approx(interval_text(values), abs=6e-4)
    assert (rows_of(table)[-1][first] == "not run") == (name == "AdamW")
    # The rows of the appendix's families, in the order of this table; no plan has a test of the second one.
    family = [row[-1] for row in rows_of(controls_tables.family_table(records, "warmup"))]
    of_transformer, of_diff, change, whole = family[:4] if name == "AdamW" else family[4:]
    zero_family = "norm-or-gain" if name == "AdamW" else "muon-subtraction"
    with_zero = [
        row[-1] for row in rows_of(controls_tables.family_table(records, zero_family)) if "zero-norm" in row[0]
    ]
    with_zero = [with_zero[0], ""] if name == "AdamW" else with_zero
    assert [row[first + 1] for row in rows_of(table)] == [
        whole, "not planned", change, of_transformer, of_diff, *with_zero
    ]  # fmt: skip


def test_counts_of_solved_runs_are_marked_by_their_tuning():
    records = [r for study in RECALL for r in COLLECTED[study] + COLLECTED[f"{study}-tuning"]]
    table = rows_of(recall_tables.distractors_table(records))
    longer = ("recall-63", "5000")
    for title, *cells in table:
        for cell, (task, steps) in zip(
            cells, [("recall", None), ("recall-31", None), ("recall-63", None), longer], strict=True
        ):
            of_cell = [r for r in records if (r["task"], r["arm"]) == (task, title.strip("`"))]
            runs = [r for r in of_cell if r["changes"].get("train.steps") == steps]
            assert (cell == "not run") == (not runs)
            if runs:
                solved = [r["numbers"]["exact_match/retrieval"] >= 0.9 for r in runs if r["seed"] != 100]
                best = max(r["numbers"]["exact_match/retrieval"] for r in runs if r["seed"] == 100)
                gain = {r["changes"].get("model.post_scale") for r in runs if r["seed"] != 100}
                marks = ("†" if best < 0.9 else "") + ("‡" if gain & {"1", "8"} else "")
                assert cell == f"{sum(solved)} of {len(solved)} {marks}".rstrip()
    marked = {mark: sum(mark in cell for row in table for cell in row) for mark in "†‡"}
    assert marked == {"†": 6, "‡": 3}


def test_a_count_without_runs_of_its_tuning_is_refused():
    with pytest.raises(AssertionError, match="diff: no runs of its tuning"):
        recall_tables.marked_count(COLLECTED["question-1-recall"], "diff")
