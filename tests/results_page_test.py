"""Every claim of docs/results.md follows from docs/results.json, computed here without benchmarks/controls_tables.py."""

import json
import math
import statistics

import pytest
from conftest import ROOT

from benchmarks import controls_study, results
from difftx.configs import controls

COLLECTED = json.loads(results.COLLECTED.read_text())
PAGE = (ROOT / "docs" / "results.md").read_text()
PROSE = " ".join(PAGE.split())
LOSS = "test/loss_bits_per_byte"
T_975 = {5: 2.776445, 6: 2.570582, 10: 2.262157}  # Quantiles of Student's t, by the number of seeds.
FIRST, AGAIN, RECALL = "question-1-novels", "question-1-again", "question-1-recall"


def losses(study, arm, number=LOSS, **changes):
    """Return seed → loss of an arm with these changes."""
    wanted = {name.replace("__", "."): value for name, value in changes.items()}
    tuned = ("optimizer.learning_rate", *(["model.post_scale"] if arm.endswith("-gain") else []))
    return {
        r["seed"]: r["numbers"][number]
        for r in COLLECTED[study]
        if r["arm"] == arm and {n: v for n, v in r["changes"].items() if n not in tuned} == wanted
    }


def interval(values):
    """Return mean and half-width of the 95 % interval."""
    half = T_975[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), half


def contrast(study, one, other, number=LOSS):
    own, reference = losses(study, one, number), losses(study, other, number)
    assert own.keys() == reference.keys()
    return [own[seed] - reference[seed] for seed in sorted(own)]


def shown(values):
    mean, half = interval(values)
    return f"{mean:+.3f} ± {half:.3f}"


def row_of(one, other, section):
    """Return the cells of a contrast's row in a section of the page."""
    [line] = [line for line in section.splitlines() if line.startswith(f"| `{one}` − `{other}` |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def solved(study, arm, task="recall"):
    accuracies = [
        r["numbers"]["exact_match/retrieval"] for r in COLLECTED[study] if (r["arm"], r["task"]) == (arm, task)
    ]
    return sum(a >= 0.9 for a in accuracies), len(accuracies)


def fisher(one, other):
    """Return the p-value of Fisher's exact test, by enumeration."""
    (a, n), (b, m) = one, other
    chances = {k: math.comb(n, k) * math.comb(m, a + b - k) for k in range(max(0, a + b - m), min(n, a + b) + 1)}
    return sum(chance for chance in chances.values() if chance <= chances[a]) / sum(chances.values())


def corrected(p_values):
    """Return p-values after Holm's correction: by decreasing size, each times the number of those at least as large."""
    found, largest = {}, 0.0
    for rank, (p, name) in enumerate(sorted((p, name) for name, p in p_values.items())):
        largest = max(largest, min(1.0, p * (len(p_values) - rank)))
        found[name] = largest
    return found


NORM_OR_GAIN = [
    ("diff", "zero-norm"),
    ("diff-gain", "zero-gain"),
    ("diff", "diff-gain"),
    ("zero-norm", "zero-gain"),
    ("diff-gain", "diff-plain"),
    ("diff", "transformer"),
    ("diff", "transformer-gain"),
]


def section(start, end):
    return PAGE.partition(f"\n{start}\n")[2].partition(f"\n{end}\n")[0]


NOVELS_SECTION = section("### Novels", "### Recall")
RECALL_SECTION = section("### Recall", "### Wide heads")


@pytest.mark.parametrize(("study", "first"), [(AGAIN, True), (FIRST, False)])
def test_contrasts_of_question_1_have_their_intervals(study, first):
    """The table of the ten seeds stands first on the page, then that of the five."""
    tables = NOVELS_SECTION.partition("The first set, with five seeds")
    for one, other in NORM_OR_GAIN:
        if "diff-plain" in (one, other):
            continue
        values = contrast(study, one, other)
        cells = row_of(one, other, tables[0] if first else tables[2])
        assert cells[2] == shown(values)
        mean, half = interval(values)
        if abs(mean) < half:  # The uncorrected interval contains zero.
            assert cells[4] == "open"


def test_contrasts_of_recall_are_fishers_test_with_holms_correction():
    expected = corrected({pair: fisher(*(solved(RECALL, arm) for arm in pair)) for pair in NORM_OR_GAIN})
    for pair in NORM_OR_GAIN:
        cells = row_of(*pair, RECALL_SECTION)
        counts = ["{} of {}".format(*solved(RECALL, arm)) for arm in pair]
        assert cells[2:5] == [*counts, f"{expected[pair]:.3f}"]
        assert (cells[5] == "open") == (expected[pair] >= 0.05)


@pytest.mark.parametrize("task", ["novels", "recall"])
def test_the_recipe_has_what_the_tuned_seed_chose(task):
    """Rate and gain of each arm are those of its smallest validation loss, and the best rate is between two others."""
    study = f"question-1-{task}"
    for arm, fields in controls.TUNED[task].items():
        tries = [r for r in COLLECTED[f"{study}-tuning"] if r["arm"] == arm]
        assert {r["seed"] for r in tries} == {controls_study.TUNED_SEED}
        best = min(tries, key=lambda r: r["numbers"]["loss/loss"])
        rate = best["learning_rate"]
        assert {rate / 2, rate * 2} <= {round(r["learning_rate"], 8) for r in tries}
        gain = {"model.post_scale": float(best["changes"]["model.post_scale"])} if arm.endswith("-gain") else {}
        assert fields == {"optimizer.learning_rate": rate, **gain}
        reported = [r for r in COLLECTED[study] if r["arm"] == arm]
        assert {r["learning_rate"] for r in reported} == {rate}
        assert controls_study.TUNED_SEED not in {r["seed"] for r in reported}


def test_both_sets_of_question_1_have_other_seeds():
    assert set(losses(FIRST, "diff")) == set(range(10, 15))
    assert set(losses(AGAIN, "diff")) == set(range(20, 30))
