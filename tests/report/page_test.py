"""The report's page: its text, and its behaviour in a browser."""

import contextlib
import dataclasses
import html
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.report_runs import tiny, write_result, write_run

from difftx.errors import UNPRINTABLE, UserError
from difftx.evals import SUITES
from difftx.evals import run as evals
from difftx.evals.result import Number, Result
from difftx.evals.suite import Suite
from difftx.registry import Registry
from difftx.report.arms import arms_of
from difftx.report.curves import thinned
from difftx.report.page import write_page
from difftx.report.panels import Cell
from difftx.report.runs import read_runs
from difftx.report.suites import option_notes, suite_sections
from difftx.training.run import Run

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CHROMIUM_FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
CHROMIUM_FLAGS += ["--disable-background-networking", "--disable-component-update"]
STEPS = 10_000
EVIL = "<img src=x onerror=window.pwned=1></script><script>window.pwned=1</script>"
LINES = {"kind": "line", "name": "position", "title": f"Loss by position {EVIL}", "x_label": "position"}
LINES |= {"y_label": "nats", "log_x": True}
SERIES = {"name": EVIL, "x": [1, 10, 100], "y": [3, 2, 1], "low": [2.5, 1.5, 0.5], "high": [3.5, 2.5, 1.5]}
LINES["series"] = [SERIES]


def heatmap(name, title, x_label, x, y_label, y, values, value_label):
    labels = {"x_label": x_label, "x": x, "y_label": y_label, "y": y, "value_label": value_label}
    return {"kind": "heatmap", "name": name, "title": title, "values": values, **labels}


FOUND = [[0.125, 0.25], [0.5, None], [0.75, 1.0]]
NEEDLE = heatmap(
    "needle", "Needles found", "context", ["8K", "64K"], "depth", ["0 %", "50 %", "100 %"], FOUND, "accuracy"
)
TOKENS = list(range(256))
WEIGHTS = [[0.5 if i >= j else None for j in TOKENS] for i in TOKENS]
ATTENTION = heatmap("map", "A1 - λ A2", "key", TOKENS, "query", TOKENS, WEIGHTS, "weight")


def write_everything(workdir, architecture, offset):
    """Write a run with everything that a report can show, and with malicious names and texts."""
    config = tiny(architecture, train__steps=STEPS, model__num_layers=28)
    spike = STEPS // 2 + 1
    write_run(
        workdir,
        config,
        loss=lambda step: 9.0 if step == spike else 1 + offset + 4 / step**0.4,
        layers=28 if architecture == "diff" else 0,
        valid_every=1000,
        skipped_step=spike,
    )
    goodput = {"train_seconds": 80.0, "data_wait_seconds": 5.0, "save_seconds": 15.0, "wall_seconds": 100.0}
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"split": "goodput", "step": STEPS, "attempt": 1, **goodput}) + "\n")
        rewind = {"split": "rewind", "step": 3000, "attempt": 1, "reason": EVIL, "bad_steps": [3005, 3007]}
        file.write(json.dumps(rewind | {"skipped_examples": [1, 2], "rewinds": 1}) + "\n")
    for step in (STEPS // 2, STEPS):
        write_result(workdir, "loss", step, {"loss": 2.0 + offset + 100 / step, "bits_per_byte": 0.5 + offset})
    write_result(workdir, "position", STEPS, {"nll": 1.5 + offset}, [LINES])
    write_result(workdir, "needle", STEPS, {"accuracy": 0.5}, [NEEDLE])
    write_result(workdir, "attention", STEPS, {"sink": 0.25}, [ATTENTION])
    samples = [{"prompt": EVIL, "completion": f"</pre>{EVIL} of {architecture}"}]
    write_result(workdir, "sample", STEPS, {"new_tokens": 20.0}, details={"samples": samples})
    losses = {"ar_hit_loss": 3.0 - offset, "others_loss": 1.0 + offset}
    measured = {name: Number(value, "nats per token", "lower") for name, value in losses.items()}
    write_result(workdir, "recall", STEPS, measured)
    return workdir


def page_of(workdirs, out):
    write_page(workdirs, out)
    return out.read_text()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    runs = [
        write_everything(folder / "diff", "diff", 0.0),
        write_everything(folder / "trans<script>window.pwned=1<script>", "transformer", 0.5),
    ]
    write_page(runs, folder / "report.html")
    return folder / "report.html"


@pytest.fixture
def without_figures(monkeypatch):
    """Draw no figures, which takes longer than everything else on a page."""
    monkeypatch.setattr("difftx.report.page.page_figure", lambda *_: ("", {}))


@contextlib.contextmanager
def browser(file, tmp_path, **options):
    """Open a page in Chromium. Yield it after its figures are drawn, with the console's messages and the requests."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install '.[browser]'")
    if CHROMIUM is None:
        pytest.skip("needs a Chromium: apt-get install chromium")
    messages, requests = [], []
    with playwright.sync_playwright() as driver:
        context = driver.chromium.launch_persistent_context(
            str(tmp_path / "profile"), executable_path=CHROMIUM, args=CHROMIUM_FLAGS, **options
        )
        try:
            context.set_default_timeout(120_000)  # Milliseconds. The machine may be busy.
            page = context.new_page()
            page.on("console", lambda message: messages.append((message.type, message.text)))
            page.on("pageerror", lambda error: messages.append(("error", str(error))))
            page.on("request", lambda request: requests.append(request.url))
            page.goto(file.as_uri())
            yield page, messages, requests
        finally:
            context.close()


def tooltip(page):
    page.locator(".tip:visible").first.wait_for()
    return page.locator(".tip:visible div").all_inner_texts()


def check_order(page):
    """Check that the verdict is first, then the suites and the training, and that provenance is last."""
    sections = page.locator("body > section").evaluate_all("all => all.map(s => [s.id, s.getBoundingClientRect().top])")
    assert [name for name, _ in sections] == ["verdict", "suites", "training", "provenance"]
    assert [top for _, top in sections] == sorted(top for _, top in sections)
    headline = page.locator("#verdict h2").inner_text()
    assert headline.startswith("diff has a lower validation loss on stdlib than trans<script>window.pwned=1<script>: ")
    assert page.locator("[id=suite-loss]").count() == 0  # The numbers of the suite `loss` are only in the verdict.


PAIR = ["trans<script>window.pwned=1<script>", "diff"]


@pytest.mark.long
def test_figures_have_tooltips_and_no_text_of_a_file_becomes_code(report, tmp_path):
    with browser(report, tmp_path, viewport={"width": 1200, "height": 900}) as (page, messages, requests):
        assert requests == [report.as_uri()]
        assert page.evaluate("window.pwned") is None  # No text from a file has become code.
        page.locator("details").evaluate_all("all => all.forEach(e => { e.open = true })")
        titles = page.locator("article:visible :is(h3, h4)").all_inner_texts()
        for part in ("Loss of valid", "Loss by position", "Needles found", "A1 - λ A2", "λ of each layer", "Gradient"):
            assert any(part in title for title in titles), part
        figure = page.locator("article:visible .figure").first
        box = figure.bounding_box()
        assert box["height"] > 200
        figure.hover(position={"x": box["width"] / 2, "y": 100})
        first, *values = tooltip(page)
        assert float(first.replace(",", "")) > 0
        losses = dict(value.rsplit(": ", 1) for value in values)  # The names are not parsed as HTML.
        assert 1 < float(losses[f"{PAIR[1]}, training"]) < float(losses[f"{PAIR[0]}, training"])
        # The lines that the figure draws have the colours of the legend, and a tap on a name hides its lines.
        buttons = page.locator("article:visible .legend button")
        buttons.first.click()
        figure.hover(position={"x": box["width"] / 2, "y": 101})
        assert not [value for value in tooltip(page) if value.startswith("trans")]
        assert figure.locator("svg .series-0").first.is_hidden()
        assert figure.locator("svg .series-3").first.is_visible()

        check_order(page)
        needle = page.locator("article", has_text="Needles found").first.locator(".figure")
        needle.scroll_into_view_if_needed()
        needle.hover(position={"x": 130, "y": 60})
        assert tooltip(page) == ["8K, 0 %", "0.125"]
        assert [text for kind, text in messages if kind in ("error", "warning")] == []


@pytest.mark.long
def test_figures_and_tables_can_be_chosen_with_a_keyboard(report, tmp_path):
    with browser(report, tmp_path, viewport={"width": 1200, "height": 900}) as (page, messages, _):
        focused = "() => [document.activeElement.tagName, document.activeElement.className]"
        reached = []
        for _ in range(60):
            page.keyboard.press("Tab")
            reached.append(tuple(page.evaluate(focused)))
        assert reached[0][0] == "A"
        # Links, choices, values as tables, names of lines, scrolling tables and figures.
        assert {"A", "INPUT", "SUMMARY", "BUTTON", "DIV"} <= {tag for tag, _ in reached}
        assert ("DIV", "figure") in reached
        shown = page.locator(".losses article:visible")
        assert shown.count() == 1
        page.locator("#against-tokens").focus()
        page.keyboard.press("ArrowRight")
        assert "against-flops axes-linear" in shown.first.get_attribute("class")
        page.locator("#axes-linear").focus()
        page.keyboard.press("ArrowRight")
        assert "against-flops axes-log" in shown.first.get_attribute("class")
        assert shown.count() == 1
        shown.locator(".figure").focus()
        for key, index in (("ArrowRight", 0), ("ArrowRight", 1), ("End", -1), ("Home", 0)):
            page.keyboard.press(key)
            xs = shown.locator("script").evaluate(
                "e => [...new Set(JSON.parse(e.textContent).lines.flatMap(line => line.x))].sort((a, b) => a - b)"
            )
            assert float(tooltip(page)[0].replace(",", "")) == pytest.approx(xs[index], rel=1e-4)
        page.keyboard.press("Escape")
        assert page.locator(".tip:visible").count() == 0
        shown.locator("summary").press("Enter")
        shown.locator("table").wait_for()
        rows = shown.locator("tr").evaluate_all("rows => rows.map(row => [...row.cells].map(cell => cell.innerText))")
        assert rows[0] == ["training FLOPs", f"{PAIR[0]}, training", PAIR[0], "diff, training", "diff"]
        # The first validation is at step 1000. The models' FLOPs differ slightly, and each has a loss in the last row.
        assert (len(rows), rows[1][2], rows[1][4]) == (13, "–", "–")
        assert [float(text) for text in rows[-1][1:]] == pytest.approx([1.6, 2.51, 1.1, 2.01], abs=0.1)
        assert [text for kind, text in messages if kind == "error"] == []


@pytest.mark.long
def test_the_page_is_small_self_contained_and_complete(report):
    text = report.read_text()
    assert len(text.encode()) < 800_000
    assert "default-src 'none'" in text
    for code in ("<img src=x", "<script>window.pwned", "</script><script>window"):
        assert code not in text
    ids = re.findall(r' id="([^"]*)"', text)
    assert len(ids) == len(set(ids))  # The clip paths of one figure do not apply to another.
    assert "model.architecture" in text  # Differs between the configs.
    assert '<td class="better" colspan="1">−0.500 (−33.33%) <span class="word">better</span></td>' in text
    assert '<td class="worse" colspan="1">+0.500 (+20.00%) <span class="word">worse</span></td>' in text
    assert "0123abc" in text
    assert "2 × cpu; mesh fsdp 2" in text


def test_a_run_of_one_step_without_evaluations_has_a_page(tmp_path):
    workdir = write_run(tmp_path / "run", tiny("diff", train__steps=1))
    text = page_of([workdir], workdir / "report.html")
    assert "Only the validation loss has been evaluated yet." in text
    assert "stdlib is the source code of Python&#39;s standard library." in text
    for absent in ("Where the time went", "Fields in which the configs differ", "weights at the"):
        assert absent not in text


@pytest.mark.usefixtures("without_figures")
def test_provenance_has_the_commands_the_kernel_and_the_first_weights(tmp_path):
    run, out = write_run(tmp_path / "run", tiny("diff", train__steps=1)), tmp_path / "page.html"
    manifest = json.loads((run / "manifest.json").read_text())
    manifest |= {"attention_kernel": "pallas_gpu", "source_weights": "0ab1/300"}
    manifest["command"] = "difftx train --config='a b.py' --workdir=x"
    (run / "manifest.json").write_text(json.dumps(manifest))
    write_result(run, "position", 1, {"loss": 1.0})
    text = page_of([run], out)
    for row in ("attention kernel pallas_gpu", "weights at the start 0ab1/300"):
        assert row in re.sub(r"(<[^>]*>|\s)+", " ", text)
    commands = html.unescape(re.search(r"<summary>Commands</summary>\n<pre>(.*?)</pre>", text, re.S)[1])
    assert commands.splitlines() == [
        "difftx train --config='a b.py' --workdir=x",
        f"difftx eval --workdir={run} --suite=position",
        f"difftx report --workdir={run} --out={out}",
    ]


def numbers_of(text):
    """Return the table of numbers of a page, and the words of its rows."""
    table = re.search(r'<table class="numbers">(.*?)</table>', text, re.DOTALL)[1]
    rows = re.findall(r"<tr>(.*?)</tr>", table, re.DOTALL)
    return table, [re.sub(r"<[^>]+>", " ", row).split() for row in rows]


@pytest.mark.usefixtures("without_figures")
def test_the_table_of_two_runs_has_the_difference_of_the_verdict(tmp_path):
    """The difference has its interval beside it, and a value that is equal has a single cell.

    The Transformer is the baseline, although it is named second. The verdict and the table have the same difference.
    """
    runs = [write_run(tmp_path / name, tiny(name, train__steps=6)) for name in ("diff", "transformer")]
    noise = np.random.default_rng(0).normal(0, 0.01, (2, 20))
    for run, loss, of_blocks in zip(runs, (2.5, 2.0), noise, strict=True):
        blocks = {"nats": (100 * (loss + of_blocks)).tolist(), "tokens": [100] * 20, "targets_sha256": "a"}
        write_result(run, "loss", 6, {"loss": loss}, details={"sets": {"valid": {"blocks": blocks}}})
    text = page_of(runs, tmp_path / "report.html")
    table, rows = numbers_of(text)
    found = {" ".join(row[:2]): row for row in rows}
    assert rows[0] == ["transformer", "diff"]
    assert found["validation loss"][-2:] == ["2.000", "2.500"]
    change = " ".join(found["difference from"][6:])
    assert change.startswith("– +0.500 (+25.00%), +0.4")
    value, interval = change.removeprefix("– ").split(", ")
    assert f"In nats per token, diff − transformer = {value}, with a 95 % interval of {interval}," in text
    assert found["training tokens"] == ["training", "tokens", "12,288"]
    assert found["speed of"][-1].startswith("350")  # The median of 100, 200, …, 600.
    assert '<td class="shared" colspan="2">12,288</td>' in table
    # The head norm is a part of the method, and not an inequality of the comparison.
    assert found["head norm"][-2:] == ["none", "rms_affine"]
    assert "unequal" not in text


@pytest.mark.usefixtures("without_figures")
def test_different_tokenizers_compare_by_bits_per_byte_only(tmp_path):
    runs = [
        write_run(tmp_path / name, tiny("diff", train__steps=6, eval__loss_tokens=tokens), tokenizer=tokenizer * 64)
        for name, tokenizer, tokens in (("one", "a", 512), ("two", "b", 1024))
    ]
    for run, loss in zip(runs, (2.0, 3.0), strict=True):
        write_result(run, "loss", 6, {"loss": loss, "bits_per_byte": loss / 4})
        write_result(run, "position", 6, {"loss": loss}, options={"samples": loss})
    text = page_of(runs, tmp_path / "report.html")
    # The notes of `data_notes` and of `option_notes` are on the page too.
    for note in (
        "have different tokenizers",
        "differ in eval.loss_tokens: 512 and 1,024",
        "differ in samples: 2.0 and",
    ):
        assert f"one and two {note}" in text
    assert "Training loss" not in text
    assert (
        "one has a lower validation loss on stdlib than two: 0.5000 and 0.7500 bits per byte (one run each; lower is"
        in text
    )
    assert "+1.00 (" not in text


def test_results_with_other_settings_are_named_and_have_no_difference(tmp_path, monkeypatch):
    """`evaluate` records the settings of each result. Runs with equal settings compare."""
    copies = {"train__steps": 3, "data__path": "synthetic:copy", "data__synthetic__vocab_size": 130}
    runs = {}
    # "again" is of the same model as "base", and its result is no part of the mean.
    for name, accuracy, samples in (("base", 0.5, 50), ("same", 0.25, 50), ("few", 0.75, 5), ("again", 0.75, 5)):
        decay = {"base": 0.1, "same": 0.2, "few": 0.3, "again": 0.1}[name]
        config = tiny("diff", **copies, eval__needle__samples=samples, optimizer__weight_decay=decay)
        runs[name] = write_run(tmp_path / name, config)
        numbers = {"accuracy": Number(accuracy, "share", "higher")}
        needle = Suite(evaluate=lambda _, numbers=numbers: Result(numbers=numbers), reads=("needle",))
        monkeypatch.setattr("difftx.evals.run.SUITES", Registry("suite", {"needle": needle}))
        evals.evaluate(Run.open(config, runs[name]), None, 3, ["needle"])
    records = read_runs(list(runs.values()))
    assert [note.partition(", so")[0] for note in option_notes(records)] == [
        f"base and {name} differ in eval.needle.samples: 50 and 5" for name in ("few", "again")
    ]
    arms = arms_of(records)
    (section,) = suite_sections(arms, dict.fromkeys((arm.name for arm in arms), "red"), comparable=True)
    ((_, *cells),) = section.numbers.rows
    assert cells == ["0.5000", "0.2500", "0.7500", Cell("−0.250", "worse"), "–"]


SUITE_FILES = {  # Suite → fields of its files in a folder. The one with "w" is written.
    "needle": {"eval.needle.haystack": "{}/w.txt"},
    "icl": {
        "eval.icl.tasks": '({{"name": "a", "train": "{0}/w.jsonl", "test": "{0}/x.jsonl", "text": "t", "label": "l", '
        '"text_word": "T", "label_word": "L"}},)'
    },
    "test": {"eval.test.path": "{}/w"},
    "harness": {"eval.harness.data_path": "{}", "eval.harness.tasks": "w"},
    "recall": {"eval.bigrams_path": "{}/w.bigrams"},
}
WRITTEN = {"test": "w/meta.json", "needle": "w.txt", "recall": "w.bigrams", "harness": "w_test.jsonl"}


@pytest.mark.parametrize("suite", SUITE_FILES)
def test_equal_files_at_other_paths_are_the_same_settings_and_other_files_are_not(tmp_path, monkeypatch, suite):
    stub = dataclasses.replace(SUITES[suite], evaluate=lambda _: Result(numbers={"accuracy": 0.5}))
    monkeypatch.setattr("difftx.evals.run.SUITES", Registry("suite", {suite: stub, "loss": SUITES["loss"]}))
    for name, text in (("a", "1\n2"), ("b", "1\n2"), ("c", "3\n2")):
        folder = tmp_path / "files" / name
        file = folder / WRITTEN.get(suite, "w.jsonl")
        file.parent.mkdir(parents=True)
        file.write_text(text)
        (folder / "x.jsonl").write_text("x")
        fields = {field: value.format(folder) for field, value in SUITE_FILES[suite].items()}
        synthetic = {"data__path": "synthetic:copy", "data__synthetic__vocab_size": 130}
        config = tiny("diff", train__steps=3, **synthetic, **fields)
        evals.evaluate(Run.open(config, write_run(tmp_path / name, config)), None, 3, [suite])

    assert option_notes(read_runs([tmp_path / "a", tmp_path / "b"])) == []
    (note,) = option_notes(read_runs([tmp_path / "a", tmp_path / "c"]))
    results = (tmp_path / name / "evals" / suite / "3.json" for name in "abc")
    settings = [json.loads(result.read_text())["settings"] for result in results]
    assert settings[0] == settings[1] != settings[2]
    (field,) = SUITE_FILES[suite].keys() - {"eval.harness.tasks"}
    assert re.search(rf'{field}\S*: .*"[0-9a-f]{{12}}….*so their results of suite {suite} are not comparable', note)


@pytest.mark.usefixtures("without_figures")
def test_mistakes_are_named_and_no_page_is_written(tmp_path):
    run = write_run(tmp_path / "run", tiny("diff", train__steps=3))
    with pytest.raises(UserError, match=r"no config\.json there, so it is not a run"):
        write_page([tmp_path / "none"], tmp_path / "report.html")
    with pytest.raises(UserError, match="a run is named twice"):
        write_page([run, Path(f"{run}/")], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.usefixtures("without_figures")
def test_control_characters_are_escaped(tmp_path):
    """Control characters are escaped in folder names, samples and reasons of rewinds."""
    hostile = "x\x1b]0;t\x07 \x9b31m \u202e \ud800"
    run = write_run(tmp_path / "run\x1b[31m\u202e", tiny("diff", train__steps=3))
    with (run / "metrics.jsonl").open("a") as file:
        stop = {"split": "stop", "step": 2, "attempt": 1, "reason": hostile, "bad_steps": [1, 2]}
        file.write(json.dumps(stop) + "\n")
    write_result(run, "sample", 3, {}, details={"samples": [{"prompt": hostile, "completion": hostile}]})
    page = page_of([run], tmp_path / "page.html")
    assert not UNPRINTABLE.search(page)
    assert page.count(r"x\x1b]0;t\x07 \x9b31m \u202e \ud800") == 3
    assert r"run\x1b[31m\u202e" in page


def test_thinning_keeps_spikes_and_ends():
    values = np.sin(np.arange(10_000) / 500)
    values[[1234, 7777]] = 50, -50
    values[3000] = np.nan
    kept = thinned(values, 200)
    assert len(kept) <= 200
    assert {0, 1234, 7777, 9999} <= set(kept)
    assert list(kept) == sorted(kept)
    assert list(thinned(values[:100], 200)) == list(range(100))
