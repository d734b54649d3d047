"""docs/results.md, docs/exploratory.md and README.md state the numbers that docs/results.json has from the runs."""

import json
import re
import statistics

import pytest
from conftest import ROOT
from helpers.report_runs import write_run

from benchmarks import optimizer_study, results, results_figures, results_tables
from difftx.config.recipes import load_config
from difftx.errors import UserError

COLLECTED = json.loads(results.COLLECTED.read_text())
PAGE = (ROOT / "docs" / "exploratory.md").read_text()
AUDIT = ROOT / "benchmarks" / "records" / "2026-11-22_gain.md"


@pytest.mark.parametrize(("template", "page"), results.PAGES.items(), ids=lambda path: path.name)
def test_pages_are_what_the_runs_make_of_their_templates(template, page):
    rendered = results.render(COLLECTED, template.read_text())
    assert rendered == page.read_text(), "run `python benchmarks/results.py render`, and read what changed"


def test_the_readme_is_what_the_runs_make_of_the_summary():
    readme = results.README.read_text()
    assert results.with_summary(readme, COLLECTED) == readme, "run `python benchmarks/results.py render`"
    own = readme.partition("## Does it work?")[2].partition(results.SUMMARY_MARKERS[0])[0]
    assert not re.findall(r"\d\.\d{2,}", own)


@pytest.mark.parametrize("template", [*results.PAGES, results.SUMMARY], ids=lambda path: path.name)
def test_templates_have_no_result_of_their_own(template):
    """Results have three decimals: such a number in the prose is an audit's, and its record has it."""
    text = re.sub(r"`[^`]*`|^    .*$|\{\{.*?\}\}|arXiv \S+", "", template.read_text(), flags=re.MULTILINE)
    audited = re.findall(r"\d\.\d{2,}", AUDIT.read_text())
    assert set(re.findall(r"\d\.\d{2,}", text)) <= set(audited)
    # A mean over seeds describes outcomes of one mode only.
    assert not re.findall(r"\{\{(?:mean|difference) \S+ recall", template.read_text())


# Computed here from docs/results.json, without benchmarks/results_tables.py.
def of_arm(task, arm, number="loss/bits_per_byte", study="arms"):
    runs = {r["seed"]: r["numbers"][number] for r in COLLECTED[study] if (r["task"], r["arm"]) == (task, arm)}
    return [runs[seed] for seed in (0, 1, 2)]


def contrast(arm, reference, number="loss/bits_per_byte"):
    """Return mean and half-width of the 95 % interval of the paired differences on books."""
    return interval(of_arm("books", arm, number), of_arm("books", reference, number))


def interval(own, other):
    values = [a - b for a, b in zip(own, other, strict=True)]
    return statistics.fmean(values), 4.302653 * statistics.stdev(values) / 3**0.5


@pytest.mark.parametrize(
    ("arm", "reference"),
    [
        ("diff", "transformer"),
        ("transformer-8x256-norm", "transformer-8x256"),
        ("diff", "diff-no_norm"),
        ("diff", "transformer-8x256-norm"),
        ("diff-no_norm", "transformer-8x256"),
        ("diff-no_norm", "transformer"),
        ("diff_v2", "transformer"),
        ("diff_v2", "transformer-8x256"),
    ],
)
def test_contrasts_are_printed_with_their_intervals(arm, reference):
    mean, half = contrast(arm, reference)
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| {arm} − {reference} |"))
    assert row.endswith(f"| {mean:+.3f} ± {half:.3f} | {'yes' if abs(mean) <= half else 'no'} |")
    prose = " ".join(PAGE.partition("## Books")[0].split())
    assert f"{mean:+.3f} ± {half:.3f}" in prose
    assert f"`{arm}` − `{reference}`" in prose


def converted(arm):
    """Return mean and half-width of an arm's differences from the Transformer that was trained on, on books."""
    return interval(*(of_arm("books-0.8m", name, study="differential") for name in (arm, "transformer")))


@pytest.mark.parametrize("arm", ["zero-branch", "dex", "split"])
def test_the_study_of_converted_models_has_its_contrasts(arm):
    """Each arm has the rate that is best on the tuned seed, and its tried rates include half and twice that."""
    mean, half = converted(arm)
    prose = " ".join(PAGE.partition("## From a Transformer")[2].split())
    assert re.search(rf"`{arm}` − `transformer` (is )?{re.escape(f'{mean:+.3f} ± {half:.3f}')}", prose)
    for task in ("books-0.8m", "recall", "recall-easy"):
        runs, tried = (
            [r for r in COLLECTED[study] if (r["task"], r["arm"]) == (task, arm)]
            for study in ("differential", "differential-rates")
        )
        assert {r["seed"] for r in tried} == {3}
        best = min(tried, key=lambda r: r["numbers"]["loss/loss"])["learning_rate"]
        assert {r["learning_rate"] for r in runs} == {best}
        assert {best / 2, best * 2} <= {r["learning_rate"] for r in tried}


def changes(task, arm, number, plain):
    """Return one number minus another of the same run, for each seed of the study of caches."""
    return [a - b for a, b in zip(*(of_arm(task, arm, name, "cache") for name in (number, plain)), strict=True)]


def change_contrast(task, number, plain):
    """Return mean and half-width of what compression changes in `diff`, minus what it changes in the Transformer."""
    reference = {"books-0.8m": "transformer", "recall": "transformer-8x256-norm"}[task]
    return interval(*(changes(task, arm, number, plain) for arm in ("diff", reference)))


@pytest.mark.parametrize("task", ["books-0.8m", "recall"])
@pytest.mark.parametrize("number", ["loss_loss", "exact_match_accuracy", "recall_ar_hit_loss"])
def test_the_study_of_caches_has_its_differences(task, number):
    """The loss with each cache minus that with the whole one, for each arm, and the contrast of the two arms."""
    section = PAGE.partition("## Compressed caches")[2].partition("## What was not run")[0]
    for arm in {r["arm"] for r in COLLECTED["cache"] if r["task"] == task}:
        first = next(r["numbers"] for r in COLLECTED["cache"] if r["task"] == task)
        for name in (n.removeprefix(f"cache/{number}_") for n in first if n.startswith(f"cache/{number}_")):
            own, whole = (of_arm(task, arm, f"cache/{number}_{cache}", "cache") for cache in (name, "whole"))
            mean, half = interval(own, whole)
            decimals = 3 if abs(mean) < 10 else 2
            assert name == "whole" or f"{mean:.{decimals}f} ± {half:.{decimals}f}" in section
            mean, half = change_contrast(task, f"cache/{number}_{name}", f"cache/{number}_whole")
            assert name == "whole" or f"{mean:+.4f} ± {half:.4f}" in section


@pytest.mark.parametrize("page", ["docs/exploratory.md", "README.md"])
@pytest.mark.parametrize("arm", ["diff", "transformer", "transformer-8x256-norm"])
def test_recall_is_reported_as_runs_that_solved_it(page, arm):
    count = sum(share >= 0.9 for share in of_arm("recall", arm, "exact_match/retrieval"))
    text = " ".join((ROOT / page).read_text().split())
    assert re.search(rf"`{arm}`( solved it)? in {count} of 3", text)


def best(study, **wanted):
    """Return the least bits per byte of a study over its learning rates, of the runs with these changes."""
    return min(
        r["numbers"]["loss/bits_per_byte"]
        for r in COLLECTED[study]
        if (r["task"], r["arm"]) == ("books", wanted.get("arm", "diff"))
        and {n: v for n, v in r["changes"].items() if n != "optimizer.learning_rate"}
        == {n.replace("__", "."): v for n, v in wanted.items() if n != "arm"}
    )


def has_initialisation(r, init, zero):
    return (r["changes"]["model.init"], r["changes"]["model.zero_init_output"]) == (init, zero)


def best_initialisation_everywhere():
    cells = {}
    for study in ("init", "init-short"):
        for r in COLLECTED[study]:
            cells.setdefault((study, r["arm"], r["learning_rate"]), []).append(r)
    tops = [min(runs, key=lambda r: r["numbers"]["loss/bits_per_byte"]) for runs in cells.values()]
    return len(tops) == 8 and all(has_initialisation(r, "fan_in", "true") for r in tops)


def transformer_ahead_from_all_four():
    return all(
        best("init", arm="transformer", model__init=init, model__zero_init_output=zero)
        < best("init", arm="diff", model__init=init, model__zero_init_output=zero)
        for init in ("fan_in", "normal")
        for zero in ("true", "false")
    )


def recall_rates(rate):
    return [
        r["numbers"]["exact_match/retrieval"]
        for r in COLLECTED["rates"]
        if (r["task"], r["learning_rate"]) == ("recall", rate)
    ]


SMALL, LARGE, EARLY, LATE = "books", "books-0.8m", 512_000, 2_048_000


def grown(task, arm, tokens):
    """Return what an arm has more than the Transformer, each at its best rate, one seed."""
    own, other = (
        min(
            r["numbers"]["loss/bits_per_byte"]
            for r in COLLECTED["sizes"]
            if (r["task"], r["arm"], r["tokens"]) == (task, name, tokens)
        )
        for name in (arm, "transformer")
    )
    return own - other


WHOLE = "cache/loss_loss_whole"


def of_cell(arm, optimizer, warmup):
    """Return the losses of a cell of the study of warm-up and optimizers, by seed."""
    fields = {"muon": {"optimizer.name": "muon"}, "adamw": {}}.get(
        optimizer, {"optimizer.name": "muon", "optimizer.muon.split": "groups"}
    )
    found = {
        r["seed"]: r["numbers"]["loss/bits_per_byte"]
        for r in COLLECTED["optimizers"]
        if r["arm"] == arm
        and float(r["changes"]["optimizer.warmup_fraction"]) == warmup
        and {name: value for name, value in r["changes"].items() if "muon" in value or "muon" in name} == fields
    }
    assert set(found) == {0, 1, 2}
    return [found[seed] for seed in sorted(found)]


def warmup_gain(arm, optimizer):
    """Return mean and half-width of the loss with a warm-up of 1 % minus that with 50 %."""
    return interval(of_cell(arm, optimizer, 0.01), of_cell(arm, optimizer, 0.5))


def behind(optimizer, warmup):
    """Return mean and half-width of diff's loss minus the Transformer's."""
    return interval(of_cell("diff", optimizer, warmup), of_cell("transformer", optimizer, warmup))


def lowest(task, arm):
    """Return the smallest mean over seeds of an arm of the study of transfer, and its learning rate."""
    found = {}
    for r in COLLECTED["transfer"]:
        if (r["task"], r["arm"]) == (task, arm):
            found.setdefault(r["learning_rate"], []).append(r["numbers"]["loss/bits_per_byte"])
    loss, rate = min((statistics.fmean(losses), rate) for rate, losses in found.items())
    assert {rate / 2, rate * 2} <= {round(tried, 6) for tried in found}  # The best rate is between two others.
    return loss, rate


def rate_at(task, arm):
    return lowest(task, arm)[1]


def easy(study):
    """Return the records of recall-easy."""
    return [r for r in COLLECTED[study] if r["task"] == "recall-easy"]


CACHE_CLAIMS = {
    "Neither interval holds zero: `diff` loses more to rounding": lambda: all(
        mean > half
        for mean, half in (
            change_contrast("books-0.8m", "cache/loss_loss_4_bits", WHOLE),
            change_contrast("books-0.8m", "quantize/loss_loss_4_bits", "quantize/loss_loss_16_bits"),
        )
    ),
    "in 8 bits** add less than a thousandth to either loss, on both tasks": lambda: all(
        abs(change) < 0.001
        for r in COLLECTED["cache"]
        for change in changes(r["task"], r["arm"], "cache/loss_loss_8_bits", WHOLE)
    ),
    "on books this adds less than a thousandth to either loss": lambda: all(
        abs(change) < 0.001
        for arm in ("diff", "transformer")
        for change in changes("books-0.8m", arm, "cache/loss_loss_64_tokens", WHOLE)
    ),
    "On recall both models lose every fourth answer": lambda: all(
        -0.3 < change < -0.2
        for r in COLLECTED["cache"]
        if r["task"] == "recall"
        for change in changes(
            "recall", r["arm"], "cache/exact_match_accuracy_16_tokens", "cache/exact_match_accuracy_whole"
        )
    ),
}

# What the page says in words, and how docs/results.json shows it.
CLAIMS = CACHE_CLAIMS | {
    "The intervals of `zero-branch` and `dex` hold zero, and `split` is behind": lambda: (
        all(abs(mean) <= half for mean, half in map(converted, ("zero-branch", "dex")))
        and converted("split")[0] > converted("split")[1]
    ),
    "Without µP the best rate does not transfer": lambda: all(
        rate_at("0.1m", name) >= 4 * rate_at("3m", name) for name in ("transformer", "diff")
    ),
    "With µP and CompleteP it transfers within a factor of two": lambda: all(
        0.4 < rate_at("3m", f"{name}-mup") / rate_at("0.1m", name) < 2.1 for name in ("transformer", "diff")
    ),
    "At its own best rate, each 3M model has a lower loss without µP than with it": lambda: all(
        lowest("3m", name)[0] < lowest("3m", f"{name}-mup")[0] for name in ("transformer", "diff")
    ),
    "without µP than with it, by about a hundredth of the loss": lambda: all(
        0.005 < lowest("3m", f"{name}-mup")[0] / lowest("3m", name)[0] - 1 < 0.015 for name in ("transformer", "diff")
    ),
    "With Muon this difference is less than a fifth of AdamW's": lambda: all(
        0 < warmup_gain("diff", name)[0] < warmup_gain("diff", "adamw")[0] / 5 for name in ("muon", "muon-groups")
    ),
    "With AdamW the differential model needs the long warm-up": lambda: (
        warmup_gain("diff", "adamw")[0] > warmup_gain("diff", "adamw")[1]
        and warmup_gain("diff", "adamw")[0] > 4 * warmup_gain("transformer", "adamw")[0]
    ),
    "With AdamW the differential model is behind the Transformer; with Muon both intervals hold zero": lambda: all(
        (behind(optimizer, warmup)[0] > behind(optimizer, warmup)[1]) == (optimizer == "adamw")
        for optimizer in ("adamw", "muon")
        for warmup in (0.01, 0.5)
    ),
    "Muon has the lower loss for all three models at every warm-up": lambda: all(
        statistics.fmean(of_cell(arm, "muon", warmup)) < statistics.fmean(of_cell(arm, "adamw", warmup))
        for arm in ("transformer", "diff", "diff_v2")
        for warmup in (0.01, 0.05, 0.2, 0.5)
    ),
    "The runs that do not solve it are those of seed 0, whose Transformer had learned least": lambda: (
        {r["seed"] for r in easy("differential") if not results_tables.is_solved(r)} == {0}
        and min(easy("differential-start"), key=lambda r: r["numbers"]["exact_match/retrieval"])["seed"] == 0
    ),
    "the two arms with such a run have twice the learning rate of the others": lambda: (
        {(r["arm"], r["learning_rate"]) for r in easy("differential")}
        == {("transformer", 0.01), ("dex", 0.01), ("zero-branch", 0.005), ("split", 0.005)}
        and {r["arm"] for r in easy("differential") if not results_tables.is_solved(r)} == {"transformer", "dex"}
    ),
    "All six differences of the subtraction's two contrasts are positive, but both intervals hold zero": lambda: (
        all(
            a > b
            for arm, reference in (("diff", "transformer-8x256-norm"), ("diff-no_norm", "transformer-8x256"))
            for a, b in zip(of_arm("books", arm), of_arm("books", reference), strict=True)
        )
        and all(
            abs(mean) <= half
            for mean, half in (
                contrast("diff", "transformer-8x256-norm"),
                contrast("diff-no_norm", "transformer-8x256"),
            )
        )
    ),
    "gives the two about equal parts; adding the subtraction first gives the norm the larger part": lambda: (
        abs(contrast("transformer-8x256-norm", "transformer-8x256")[0] - contrast("diff", "transformer-8x256-norm")[0])
        < 0.01
        and contrast("diff", "diff-no_norm")[0] > 2 * contrast("diff-no_norm", "transformer-8x256")[0]
    ),
    "Without the head norm no arm differs from the Transformer by more than its interval": lambda: all(
        abs(mean) <= half for mean, half in (contrast(a, "transformer") for a in ("diff-no_norm", "diff_v2"))
    ),
    "at `1e-2` no arm solves the task": lambda: len(recall_rates(0.01)) == 8 and max(recall_rates(0.01)) < 0.9,
    "At other learning rates, below, two runs of 32 end in between": lambda: (
        len(shares := [share for rate in (0.00125, 0.0025, 0.005, 0.01) for share in recall_rates(rate)]) == 32
        and sum(0.2 < share < 0.9 for share in shares) == 2
    ),
    "The better rate of the short warm-up is the lowest that was tried": lambda: all(
        min(
            (r for r in COLLECTED["settings"] if r["arm"] == arm and r["changes"].get("optimizer.warmup_steps") == "5"),
            key=lambda r: r["numbers"]["loss/bits_per_byte"],
        )["learning_rate"]
        == 0.004
        for arm in ("diff", "transformer")
    ),
    "all three arms of the last table of Recall answer nearly all questions at the better of two rates": lambda: all(
        max(r["numbers"]["exact_match/retrieval"] for r in COLLECTED["recall-easy"] if r["arm"] == arm) > 0.99
        for arm in ("transformer", "diff-no_norm", "diff_v2")
    ),
    "Fewer heads than eight, or four, change the loss by about a hundredth or less": lambda: all(
        abs(best("settings", arm=arm, model__num_heads=count) - best("settings", arm=arm)) < 0.011
        for arm, count in (("transformer", "2"), ("transformer", "4"), ("diff", "1"), ("diff", "2"))
    ),
    "is the best of four for both architectures, at both rates and both warm-ups": best_initialisation_everywhere,
    "With the long warm-up the Transformer is ahead from all four": transformer_ahead_from_all_four,
    "Both intervals hold zero; they are wide compared with the differences of Table 6": lambda: all(
        max(abs(mean), 0.004 / 0.693 * 5) <= half
        for mean, half in (contrast(a, "diff") for a in ("diff-lambda_0.8", "diff-lambda_0.5"))
    ),
    "are not smaller in the differential model here": lambda: all(
        contrast("diff", "transformer", f"outliers/{name}_top_1")[0] > 0 for name in ("logits", "hidden")
    ),
    "The three arms with the largest hidden states have twice these two's learning rate and no norm": lambda: (
        {
            "transformer-8x256",
            "diff-no_norm",
            "diff_v2",
        }
        == set(
            sorted(
                {r["arm"] for r in COLLECTED["arms"]},
                key=lambda arm: statistics.fmean(of_arm("books", arm, "outliers/hidden_top_1")),
            )[-3:]
        )
    ),
    "the differential model still trails, and V2 is ahead in some rows and behind in others": lambda: (
        min(grown(*run) for run in ((SMALL, "diff", LATE), (LARGE, "diff", EARLY), (LARGE, "diff", LATE))) > 0
        and min(grown(SMALL, "diff_v2", LATE), grown(LARGE, "diff_v2", LATE)) > 0
        and max(contrast("diff_v2", "transformer")[0], grown(LARGE, "diff_v2", EARLY)) < 0
    ),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_words_of_the_page_follow_from_the_runs(claim):
    assert claim in " ".join(PAGE.split())
    assert CLAIMS[claim]()


@pytest.mark.parametrize("arm", dict.fromkeys(r["arm"] for r in COLLECTED["arms"]))
@pytest.mark.parametrize("task", ["books", "recall"])
def test_every_arm_has_three_seeds_and_as_many_parameters_and_tokens(task, arm):
    own, reference = (
        [r for r in COLLECTED["arms"] if (r["task"], r["arm"]) == (task, name)] for name in (arm, "transformer")
    )
    assert {r["seed"] for r in own} == {r["seed"] for r in reference} == {0, 1, 2}
    assert {r["tokens"] for r in own} == {r["tokens"] for r in reference}
    assert own[0]["parameters"] == pytest.approx(reference[0]["parameters"], rel=0.01)


@pytest.mark.parametrize("arm", dict.fromkeys(r["arm"] for r in COLLECTED["arms"]))
@pytest.mark.parametrize("task", ["books", "recall"])
def test_learning_rates_of_the_config_are_the_best_of_those_tried(task, arm):
    tried = [r for r in COLLECTED["rates"] if (r["task"], r["arm"]) == (task, arm)]
    best = min(tried, key=lambda r: r["numbers"]["loss/loss"])["learning_rate"]
    config = load_config(str(ROOT / "configs" / f"toy.py:{task}-{arm}"), {})
    [used] = {r["learning_rate"] for r in COLLECTED["arms"] if (r["task"], r["arm"]) == (task, arm)}
    assert len(tried) > 1
    assert best == used == config.optimizer.learning_rate


def test_intervals_are_those_of_a_table_of_students_t():
    values = [3.1, 3.4, 3.2]
    mean, half = results_tables.estimate(values)
    assert mean == pytest.approx(statistics.fmean(values))
    assert half == pytest.approx(4.302653 * statistics.stdev(values) / 3**0.5, rel=1e-6)  # Two degrees of freedom.
    assert results_tables.estimate([2.0]) == (2.0, None)


@pytest.fixture
def sweep(tmp_path):
    """Return a function: make the folder of a finished sweep of recall, whose accuracies are given by arm and seed."""

    def make(accuracies):
        runs = []
        for (arm, seed), accuracy in accuracies.items():
            spec, name = f"configs/toy.py:recall-{arm}", f"recall-{arm}-seed{seed}"
            fields = {"train.seed": str(seed), "data.seed": str(seed), "optimizer.learning_rate": "0.02"}
            short = {"train.steps": "2", "optimizer.warmup_steps": "1"}
            workdir = write_run(tmp_path / name, load_config(str(ROOT / spec), fields | short), layers=2)
            with (workdir / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"split": "goodput", "step": 2, "attempt": 1, "wall_seconds": 60.04}) + "\n")
            sets = {"retrieval": {"accuracy": accuracy}, "mqar": {"accuracy": accuracy + 0.05}}
            for suite, result in (
                ("loss", {"numbers": {"loss": 1 - accuracy}}),
                ("exact_match", {"numbers": {"accuracy": accuracy + 0.025}, "details": {"sets": sets}}),
            ):
                path = workdir / "evals" / suite / "2.json"
                path.parent.mkdir(parents=True)
                path.write_text(json.dumps(result))
            flags = [f"--config={spec}", f"--workdir={workdir}", *(f"--config.{n}={v}" for n, v in fields.items())]
            runs.append({"name": name, "flags": flags, "state": "done"})
        grid = {"task": ["recall"], "optimizer.learning_rate": ["0.02"]}
        description = {"config": "configs/toy.py", "grid": grid, "overrides": {"data.path": "/here/alone"}}
        (tmp_path / "sweep.json").write_text(json.dumps({**description, "runs": runs}))
        return tmp_path

    return make


ACCURACIES = {(arm, seed): base + seed / 10 for arm, base in (("diff", 0.5), ("transformer", 0.25)) for seed in (0, 1)}


def test_a_sweep_becomes_records_and_these_a_table(sweep):
    records = results.collect([sweep(ACCURACIES)])
    first = records[0]
    assert (first["task"], first["arm"], first["seed"], first["wall_seconds"]) == ("recall", "diff", 0, 60.0)
    assert first["changes"] == {"optimizer.learning_rate": "0.02"}
    accuracies = {"exact_match/accuracy": 0.525, "exact_match/retrieval": 0.5, "exact_match/mqar": 0.55}
    assert first["numbers"] == {"loss/loss": 0.5, **accuracies, "lambda/1": 0.2, "lambda/2": 0.22}
    assert first["sweep"].endswith("--grid task=recall optimizer.learning_rate=0.02")
    assert "/here/alone" not in json.dumps(records)
    page = results.render({"mine": records}, "{{arms mine recall}}\nmore by {{difference mine recall diff loss/loss}}")
    assert "| diff | 115,456 | 0.02 | 0 of 2 | 0.500, 0.600 | 0.550, 0.650 | 0.500, 0.400 |" in page
    assert "| transformer | 115,264 | 0.02 | 0 of 2 | 0.250, 0.350 | 0.300, 0.400 | 0.750, 0.650 |" in page
    assert "4 runs of 1,024 tokens, seeds 0, 1; 4 minutes" in page
    assert page.endswith("more by -0.250 ± 0.000")
    other = [{**r, "learning_rate": 0.01, "numbers": {n: x / 2 for n, x in r["numbers"].items()}} for r in records]
    rates = {
        number: results_tables.rates_table(other + records, "recall", number)
        for number in ("loss/loss", "exact_match/mqar")
    }
    assert "| diff | **0.225 ± 0.318** | 0.450 ± 0.635 |" in rates["loss/loss"]
    assert "| diff | 0.300 ± 0.318 | **0.600 ± 0.635** |" in rates["exact_match/mqar"]


def test_sizes_and_lengths_of_training_are_rows_and_every_arm_has_its_best_rate():
    def record(task, tokens, arm, rate, seed, value):
        numbers = {"loss/loss": value}
        run = {"task": task, "tokens": tokens, "arm": arm, "learning_rate": rate, "seed": seed, "numbers": numbers}
        return run | {
            "parameters": {"set": 10, "set-large": 90, "other": 50}[task],
            "sweep": "",
            "hardware": "",
            "commit": "",
            "jax": "",
            "wall_seconds": 0,
        }

    records = [
        record("set-large", 500, "transformer", 0.1, 0, 3.0),
        record("set-large", 500, "diff", 0.1, 0, 2.5),
        record("set", 700, "transformer", 0.1, 0, 4.0),
        record("set", 700, "transformer", 0.2, 0, 3.5),
        record("set", 700, "transformer", 0.2, 1, 3.7),
        record("set", 700, "diff", 0.1, 0, 3.6),
        record("set", 700, "diff", 0.1, 1, 3.8),
        record("set", 700, "diff", 0.2, 0, 9.0),
        record("set", 700, "sink", 0.2, 0, 9.0),
        record("other", 700, "diff", 0.2, 0, 9.0),
    ]
    halves = {"a": records[:3], "b": records[3:]}
    assert results.render(halves, "{{growth a+b set loss/loss diff diff_v2}}").splitlines()[2:4] == [
        "| 10 | 700 | 3.600 ± 1.271 (0.2) | +0.100 ± 0.000 (0.1) |  |",
        "| 90 | 500 | 3.000 (0.1) | -0.500 (0.1) |  |",
    ]


def test_the_best_rate_is_that_of_the_smallest_mean(tmp_path):
    def record(arm, rate, seed, value):
        numbers = {"loss/bits_per_byte": value}
        return {"task": "3m", "arm": arm, "seed": seed, "learning_rate": rate, "numbers": numbers}

    records = [record("diff-mup", *at) for at in ((2e-3, 0, 3.0), (1e-3, 1, 1.0), (1e-3, 0, 6.0), (2e-3, 1, 3.0))]
    page = results.render({"mine": records}, "{{best_rate mine 3m diff-mup loss/bits_per_byte}}")
    assert page == "0.002"
    assert results.render({"mine": records}, "{{by_rate mine 3m diff-mup loss/bits_per_byte}}") == (
        "3.500 ± 31.766 at 0.001, 3.000 ± 0.000 at 0.002"
    )
    lines = [
        r | {"task": task, "arm": arm + end}
        for r in records
        for arm in ("transformer", "diff")
        for task, end in (("0.1m", ""), ("3m", ""), ("3m", "-mup"))
    ]
    results_figures.draw_transfer(lines, tmp_path / "results_transfer")
    assert (tmp_path / "results_transfer.png").stat().st_size > 10_000


def test_cells_of_the_optimizer_study_become_a_table_and_contrasts(tmp_path):
    def record(cell, seed):
        warmup = {"optimizer.warmup_fraction": f"{cell.warmup:g}", "optimizer.learning_rate": "0.02"}
        effect = {"adamw": 1.0, "muon": 0.5, "muon-groups": 0.25}[cell.optimizer] * (cell.warmup == 0.01)
        value = {"transformer": 2.0, "diff": 3.0, "diff_v2": 4.0}[cell.arm] + effect * (1 + seed / 10) + seed / 100
        own = {"seed": seed, "numbers": {"loss/bits_per_byte": value}, "learning_rate": 0.02}
        changes = {**warmup, **optimizer_study.OPTIMIZERS[cell.optimizer]}
        return {"task": "books", "arm": cell.arm, "changes": changes, "tokens": 5, "wall_seconds": 0} | own

    rest = dict.fromkeys(("sweep", "hardware", "commit", "jax"), "")
    records = [record(cell, seed) | rest for cell in optimizer_study.cells() for seed in (1, 0)]
    assert len(records) == 2 * 7 * 4
    lines = results.render({"mine": records}, "{{optimizers mine}}").splitlines()
    # The interval of two seeds is their mean ± 12.706 · |a - b| / 2.
    assert "| AdamW | diff | 4.055 ± 0.699 (0.02) | 3.005 ± 0.064 (0.02) |" in lines[3]
    assert lines[3].endswith("| 3.005 ± 0.064 (0.02) | +1.050 ± 0.635 |")
    template = (
        "{{arms_difference mine muon 0.01 diff transformer}}, {{warmup_gain mine muon-groups diff}}, "
        "{{gain_difference mine diff adamw muon}}"
    )
    assert results.render({"mine": records}, template) == "+1.000 ± 0.000, +0.262 ± 0.159, +0.525 ± 0.318"
    results_figures.draw_optimizers(records, tmp_path / "results_optimizers")
    assert (tmp_path / "results_optimizers.png").stat().st_size > 10_000


def test_new_runs_are_compared_with_the_stated_intervals(capsys):
    def record(arm, seed, value):
        return {"task": "books", "arm": arm, "seed": seed, "numbers": dict.fromkeys(results.COMPARED["books"], value)}

    records = [record(arm, seed, value + seed / 10) for arm, value in (("a", 2), ("b", 3)) for seed in (0, 1)]
    assert results.compare(records, records) == 0
    assert "6 of 6 results agree" in capsys.readouterr().out
    shifted = [record(r["arm"], r["seed"], value + 0.7) for r in records for value in set(r["numbers"].values())]
    assert results.compare(shifted, records) == 1
    assert capsys.readouterr().out.count("| NO |") == 6
    assert results.compare(records[:2], records) == 1  # b was not run.


def test_new_runs_of_recall_are_compared_by_how_many_solved_it(capsys):
    def record(arm, seed, value):
        return {"task": "recall", "arm": arm, "seed": seed, "numbers": {"exact_match/retrieval": value}}

    def runs(**shares):
        return [record(arm, seed, value) for arm, values in shares.items() for seed, value in enumerate(values)]

    committed = runs(all=[0.97, 0.93], none=[0.1, 0.2], some=[0.95, 0.1])
    assert results.compare(runs(all=[1.0], none=[0.0, 0.89], some=[0.1, 0.1]), committed) == 0
    assert "| recall | some | solved | 1 of 2 | 0 of 2 | yes |" in capsys.readouterr().out
    assert results.compare(runs(all=[1.0, 0.1], none=[0.9, 0.1], some=[]), committed) == 1
    assert capsys.readouterr().out.count("| NO |") == 3


def test_what_is_not_finished_or_not_there_is_said(sweep):
    folder = sweep(ACCURACIES)
    with pytest.raises(UserError, match=r"no sweep\.json"):
        results.collect([folder / "recall-diff-seed0"])
    (folder / "sweep.json").write_text((folder / "sweep.json").read_text().replace("done", "stopped"))
    with pytest.raises(UserError, match="recall-diff-seed0 is not finished"):
        results.collect([folder])
    for place, message in (("{{arm mine}}", "no such place"), ("{{arms yours recall}}", "no such study")):
        with pytest.raises(UserError, match=message):
            results.render({"mine": []}, place)
