"""Rules that hold for all suites: independence of mesh and batch, settings and requirements."""

import dataclasses
import hashlib
import json
import re

import jax
import numpy as np
import pytest
from conftest import ROOT, suite_config
from golden.inputs import write_all
from helpers.cases import marked
from helpers.evals_params import one_device, params_of
from helpers.evals_results import LOSS_SUITES, flat

from difftx.commands.prepare import main as prepare
from difftx.config import flag
from difftx.errors import UserError
from difftx.evals import SUITES, explanation_of
from difftx.evals import run as evals
from difftx.evals.result import Number, Result, format_value, read_numbers
from difftx.evals.suite import Suite
from difftx.parallel.mesh import make_mesh
from difftx.progress import Work
from difftx.training.run import Run

BUILT_IN = [name for name, suite in SUITES.items() if suite.evaluate.__module__.startswith("difftx.")]
SMALL_TASK = {"data__synthetic__vocab_size": 64, "data__synthetic__pairs": 4}
QUICK = {"loss", "recall", "position", "sample", "outliers", "quantize", "test"}  # The other suites compile more.


@pytest.mark.long
@pytest.mark.parametrize(
    ("packing", "rows", "axes"),
    [
        ("concat", 8, {"fsdp": 4, "tensor": 2}),
        pytest.param("best_fit", 4, {"data": 2, "fsdp": 2, "context": 2}, marks=pytest.mark.exhaustive),
        ("best_fit", 1, {"context": 8, "context_method": "zigzag"}),  # More devices than heads.
    ],
)
def test_results_depend_neither_on_mesh_nor_on_batch(config, text_file, tmp_path, packing, rows, axes):
    def results(devices, rows, **axes):
        changes = {f"mesh__{axis}": size for axis, size in axes.items()}
        packed = {"data__packing": packing, "data__document_mask": packing == "best_fit"}
        made = config(
            data__path=text_file,
            data__cache_path=tmp_path / "cache",
            eval__loss_tokens=21 * 32,
            eval__position_documents=5,
            train__global_batch_tokens=rows * 32,
            **packed,
            **changes,
        )
        run = Run.open(made, tmp_path / f"{devices}-{rows}", make_mesh(made.mesh, jax.devices()[:devices]))
        found = evals.evaluate(run, params_of(run), 0, LOSS_SUITES)
        return flat({name: dataclasses.asdict(result) for name, result in found.items()})

    expected = results(1, 3)
    assert len(expected) > 60
    np.testing.assert_allclose(results(8, rows, **axes), expected, rtol=1e-6)


class Watched:
    """A group of the config that records which of its fields are read."""

    def __init__(self, group):
        self._group, self.read = group, set()

    def __getattr__(self, name):
        self.read.add(name)
        return getattr(self._group, name)


@pytest.fixture(scope="module")
def text_run(tmp_path_factory):
    """Return a run with data for every suite of text, whose settings make the suites short."""
    folder = tmp_path_factory.mktemp("watched")
    (folder / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(8000)))
    write_all(folder)
    flags = [f"--input={folder}/text.txt", f"--out={folder}/test", "--tokenizer=bytes", "--valid_fraction=0"]
    assert prepare([*flags, "--workers=1"]) == 0
    trec = {"name": "trec", "train": f"{folder}/icl_train.jsonl", "test": f"{folder}/icl_test.jsonl", "text": "text"}
    trec |= {"label": "label", "text_word": "Question", "label_word": "Type"}
    news = {"name": "news", "path": f"{folder}/towns.jsonl", "kind": "summarisation", "document": "context"}
    news |= {"question": None, "answers": "summary", "new_tokens": 4}
    sums = {"name": "gsm8k", "format": "gsm8k", "test": f"{folder}/gsm8k_test.jsonl", "train_format": None}
    fields = {
        "loss_tokens": 1024, "position_documents": 2, "sample_tokens": 4, "throughput_rounds": 1, "throughput_steps": 1,
        "needle.samples": 1, "needle.depths": 0.5, "needle.new_tokens": 4,
        "needle.cases": json.dumps([{"needles": 1, "queries": 1}]),
        "attention.samples": 1, "attention.needles": 1,
        "icl.tasks": json.dumps([trec]), "icl.shots": 1, "icl.questions": 2, "icl.permutations": 1,
        "hallucination.sets": json.dumps([news]), "hallucination.samples": 1,
        "harness.tasks": "boolq", "harness.data_path": folder / "harness", "harness.limit": 1, "harness.num_fewshot": 0,
        "math.tasks": json.dumps([sums | {"train": f"{folder}/gsm8k_train.jsonl"}]), "math.questions": 1,
        "math.shots": 1, "math.new_tokens": 4,
        "outliers.tokens": 512, "gradients.tokens": 512, "gradients.at_initialization": "as_configured",
        "quantize.bits": "16", "test.path": folder / "test",
    }  # fmt: skip
    changes = {f"eval.{name}": value for name, value in fields.items()}
    sizes = {"mesh.fsdp": 1, "model.num_layers": 1, "train.global_batch_tokens": 1024}
    return Run.open(suite_config(folder, 512, **sizes, **changes), folder, one_device())


@pytest.mark.parametrize("suite", marked(SUITES, fast=QUICK))
def test_every_field_that_a_suite_reads_is_one_of_its_settings(config, tmp_path, text_run, suite):
    if module := {"harness": "lm_eval", "math": "math_verify"}.get(suite):
        pytest.importorskip(module, reason="the extra `eval` is not installed")
    run = text_run
    if suite == "exact_match":
        run = Run.open(config(data__path="synthetic:mqar", **SMALL_TASK), tmp_path, one_device())
    params = params_of(run)
    watched = Watched(run.config.eval)
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, eval=watched))
    watched.read.clear()  # Forget the fields that the checks of the config read.
    with jax.set_mesh(run.mesh):
        result = SUITES[suite].evaluate(evals.Evaluation(run, params, Work(enabled=False)))
    assert result.numbers
    assert watched.read - {"__class__"} == set(evals.fields_of(text_run.config, suite))
    for name, number in result.numbers.items():
        assert (number.unit, number.better or "") == measure_of(suite, name), name
    if suite not in (
        "harness",
        "hallucination",
        "quantize",
        "cache",
        "test",
    ):  # Here, they have only some of their numbers.
        forms = [pattern for pattern, _, _ in documented(suite)]
        assert [form for form in forms if not any(map(form.fullmatch, result.numbers))] == []


def test_requirements_of_a_suite_are_checked_before_it_runs(config, text_file, tmp_path):
    text = Run.open(config("transformer", data__path=text_file, mesh__fsdp=8, model__num_heads=1), tmp_path)
    task = Run.open(config(data__path="synthetic:mqar", mesh__fsdp=8, **SMALL_TASK), tmp_path)
    evals.check_run(text, ["loss", "recall", "position", "sample"])
    evals.check_run(task, ["loss", "exact_match", "throughput"])
    reasons = (
        r"no data path is a synthetic|num_heads=1|no validation set is text|eval.needle.lengths|"
        r"eval.icl.tasks is empty|eval.hallucination.sets is empty|eval.attention.length"
    )
    unfit = (
        (text, ["exact_match", "throughput", "needle", "icl", "hallucination", "attention"]),
        (task, ["recall", "position", "sample", "needle"]),
    )
    for run, suites in unfit:
        for suite in suites:
            with pytest.raises(UserError, match=reasons):
                evals.check_run(run, ["loss", suite])
            with pytest.raises(UserError):
                evals.evaluate(run, None, 0, [suite])


def test_a_result_of_another_revision_or_validation_set_is_not_reused(config, text_file, tmp_path, monkeypatch):
    """A suite that runs others, as `quantize` runs `loss` here, also depends on their revisions."""
    chosen = config(data__path=text_file, eval__quantize__suites="loss", eval__quantize__bits="16")
    run = Run.open(chosen, tmp_path, one_device())
    evals.evaluate(run, params_of(run), 0, ["loss", "quantize"])
    assert evals.stored_result(run, "quantize", 0) is not None
    other = dataclasses.replace(run.data, valid={"valid": run.data.train["train"]})
    assert evals.stored_result(dataclasses.replace(run, data=other), "quantize", 0) is None
    loss = SUITES["loss"]
    monkeypatch.setitem(SUITES._entries, "loss", dataclasses.replace(loss, revision=loss.revision + 1))
    assert [evals.stored_result(run, suite, 0) for suite in ("loss", "quantize")] == [None, None]


def test_a_result_says_what_its_numbers_are(config, text_file, tmp_path, monkeypatch):
    """The report shows it also without the extension of the suite. Values of NumPy and JAX are written as JSON."""
    numbers = {"a_size": Number(np.float32(2), "metres", "higher", chance=np.int64(1)), "jax": jax.numpy.float32(0.25)}
    result = Result(numbers=numbers, details={"rows": np.arange(3), "mean": np.float32(0.5)})
    monkeypatch.setitem(SUITES._entries, "own", Suite(evaluate=lambda _: result))
    run = Run.open(config(data__path=text_file), tmp_path, one_device())
    evals.evaluate(run, None, 0, ["own"])
    stored = evals.stored_result(run, "own", 0)
    assert stored["numbers"] == {"a_size": 2.0, "jax": 0.25}
    assert stored["details"] == {"rows": [0, 1, 2], "mean": 0.5}
    assert stored["measures"] == {
        "a_size": {"unit": "metres", "better": "higher", "label": "a size", "chance": 1},
        "jax": {"unit": "", "better": None, "label": "jax", "chance": None},
    }
    assert {name: vars(number) for name, number in read_numbers(stored).items()} == stored["measures"]
    with pytest.raises(UserError, match="better='low'; use 'lower', 'higher' or None"):
        Number(1.0, better="low")
    with pytest.raises(UserError, match=r"Result.numbers\['a'\]=array\(\[1\.\]\) is not a number"):
        Result(numbers={"a": np.ones(1)})
    broken = Result(numbers={}, details={"set": {1}})
    monkeypatch.setitem(SUITES._entries, "own", Suite(evaluate=lambda _: broken))
    with pytest.raises(UserError, match=r"a suite contain \{1\}, which is not JSON"):
        evals.evaluate(run, None, 0, ["own"])


def test_a_field_of_an_extension_can_be_a_path_of_files(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class OwnConfig:
        path: flag.Location[str] = ""
        size: int = 3

    def contents(**files):
        for name, text in files.items():
            (tmp_path / "folder").mkdir(exist_ok=True)
            (tmp_path / "folder" / name).write_text(text)
        return evals.with_contents(OwnConfig, {"path": str(tmp_path / "folder"), "size": 3}, ["path", "size"])

    assert contents() == {"path": str(tmp_path / "folder"), "size": 3}  # There is no such file yet.
    first = contents(a="1", b="2")
    assert contents(a="1", b="2") == first
    assert first["path"] == {name: hashlib.sha256(text).hexdigest() for name, text in (("a", b"1"), ("b", b"2"))}
    assert contents(b="3")["path"] != first["path"]
    (tmp_path / "folder" / "a").rename(tmp_path / "folder" / "c")  # Names in a folder have a meaning.
    assert contents(b="2")["path"].keys() == {"b", "c"}


PARTS = {"suite": f"(?P<suite>{'|'.join(SUITES)})", "number": "(?P<number>.+)", "compression": r"(?:whole|\d+_\w+)"}


def documented(suite):
    """Return a suite's rows of the table in docs/suites.md: form of a name as a pattern, unit, better direction."""
    for line in (ROOT / "docs" / "suites.md").read_text().splitlines():
        if match := re.fullmatch(rf"\| `{suite}` \| (`.+`) \| (.*?) *\| (.*?) *\|", line):
            for form in re.findall("`(.+?)`", match[1]):
                pattern = re.sub("<([^>]+)>", lambda part: PARTS.get(part[1], ".+"), form)
                yield re.compile(pattern), match[2], match[3]


def measure_of(suite, number):
    """Return the documented unit and direction of a number. Numbers of inner suites have theirs."""
    match, unit, better = next((m, u, b) for pattern, u, b in documented(suite) if (m := pattern.fullmatch(number)))
    return measure_of(**match.groupdict()) if match.groupdict() else (unit, better)


def test_every_suite_is_explained(monkeypatch):
    for name in BUILT_IN:
        title, text = explanation_of(name)
        assert (title, text) == (SUITES[name].title, SUITES[name].explanation)
        assert title
        assert text.endswith(".")
    assert explanation_of("removed") == ("removed", "")
    monkeypatch.setitem(SUITES._entries, "plain", Suite(evaluate=SUITES["loss"].evaluate))
    text = "Score each validation set. The numbers are unweighted means over sets."
    assert explanation_of("plain") == ("plain", text)


def test_values_are_shown_with_at_most_five_digits():
    shown = [format_value(value) for value in (None, 3, 3.0, 0.123456789, 12345.678, 1234567.8, True, "a", 1e16)]
    assert shown == ["–", "3", "3", "0.12346", "12,346", "1.235e+06", "True", "a", "1e+16"]
