"""Suite `test`, compared with runs that validate on the test text, and eval.py with both texts."""

import json

import pytest
from helpers.evals_params import one_device, random_params
from helpers.evals_results import chance_of

from difftx.commands.data import main as data_command
from difftx.commands.prepare import main as prepare
from difftx.errors import UserError
from difftx.evals import held_out
from difftx.evals import run as evals
from difftx.training.run import Run

SUITES = ["loss", "recall", "position"]


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Return a folder with three token stores and counts of bigrams.

    The stores "valid" and "unseen" have the same training text, and "unseen" validates on the test text.
    """
    folder = tmp_path_factory.mktemp("stores")
    for name, unit in {"train": "squared", "valid": "cubed", "test": "doubled"}.items():
        lines = (json.dumps({"text": f"{i} {unit} is {i**3}.\n" * 9}) for i in range(60))
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    for store, files in {"valid": ("train", "valid"), "unseen": ("train", "test"), "test": ("test",)}.items():
        flags = [f"--input={folder / files[0]}.jsonl", f"--out={folder / store}", "--tokenizer=bytes", "--workers=1"]
        held_out = f"--valid_input={folder / files[1]}.jsonl" if files[1:] else "--valid_fraction=0"
        assert prepare([*flags, held_out]) == 0
    assert data_command(["bigrams", str(folder / "valid"), f"--out={folder / 'bigrams'}", "--min_count=1"]) == 0
    return folder


def open_run(config, stores, tmp_path, store="valid", **changes):
    fields = {"eval__loss_tokens": 512, "eval__position_documents": 8, "eval__recall_max_bigram_count": 60}
    fields |= {"eval__bigrams_path": stores / "bigrams", "data__cache_path": tmp_path / "cache"}
    return Run.open(config(data__path=stores / store, **fields | changes), tmp_path / store, one_device())


@pytest.mark.parametrize("packing", ["concat", pytest.param("best_fit", marks=pytest.mark.long)])
def test_the_numbers_are_those_of_a_run_that_validates_on_the_test_text(config, stores, tmp_path, packing):
    packed = {"data__packing": packing, "data__document_mask": packing == "best_fit"}
    on_test = {"eval__test__path": stores / "test", "eval__test__suites": ",".join(SUITES)}
    run = open_run(config, stores, tmp_path, **packed, **on_test)
    params = random_params(run)
    expected = evals.evaluate(open_run(config, stores, tmp_path, "unseen", **packed), params, 3, SUITES)
    valid = evals.evaluate(run, params, 3, SUITES)
    before = {suite: evals.result_path(run.workdir, suite, 3).read_bytes() for suite in SUITES}
    result = evals.evaluate(run, params, 3, ["test"])["test"]
    assert result.numbers == {f"{s}_{name}": x for s in SUITES for name, x in expected[s].numbers.items()}
    assert chance_of(result) == {f"{s}_{name}": x for s in SUITES for name, x in chance_of(expected[s]).items()}
    assert valid["loss"].numbers["loss"] != result.numbers["loss_loss"]
    assert result.details["loss"]["sets"]["test"] == expected["loss"].details["sets"]["valid"]
    assert [chart.name for chart in result.charts] == [f"test_{chart.name}" for chart in expected["position"].charts]
    # The results on the validation text are unchanged.
    assert {suite: evals.result_path(run.workdir, suite, 3).read_bytes() for suite in SUITES} == before


@pytest.mark.parametrize(
    ("path", "changes", "message"),
    [
        (None, {}, "suite 'test': eval.test.path is not set"),
        ("valid", {}, r"eval\.test\.path='.*valid': 60 documents .* held out for validation.* --valid_fraction=0"),
        ("test.jsonl", {}, r"test.jsonl: no meta.json, so it is not a finished token store"),
        ("test", {"data__sequence_length": 32_768}, r"eval\.test\.path=.*: only \d+ test tokens, less than a row"),
    ],
)
def test_mistakes_are_one_line_with_a_fix(config, stores, tmp_path, path, changes, message):
    (tmp_path / "long.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(30_000)))
    fields = {"eval__test__path": path and stores / path, "train__global_batch_tokens": 32_768}
    made = config(data__path=tmp_path / "long.txt", **{n: x for n, x in fields.items() if x is not None}, **changes)
    with pytest.raises(UserError, match=message):
        evals.check_run(Run.open(made, tmp_path, one_device()), ["test"])


def prepared(folder, name, lines, *flags):
    """Return the path of a store of documents."""
    (folder / f"{name}.jsonl").write_text("\n".join(lines))
    inputs = [f"--input={folder / name}.jsonl", f"--out={folder / name}", "--tokenizer=bytes", "--workers=1"]
    assert prepare([*inputs, *(flags or ["--valid_fraction=0"])]) == 0
    return folder / name


def test_the_inner_suites_are_checked_on_the_test_text(config, stores, tmp_path):
    """Suite position requires a document that is longer than a row. Only one of both texts has it."""
    long = [json.dumps({"text": " ".join(f"{i} halved {n}" for n in range(90))}) for i in range(3)]
    fields = {"data__sequence_length": 256, "train__global_batch_tokens": 2048, "eval__test__suites": "loss,position"}
    evals.check_run(
        open_run(config, stores, tmp_path, eval__test__path=prepared(tmp_path, "test", long), **fields), ["test"]
    )
    prepared(tmp_path, "valid", long, "--valid_fraction=0.34")
    run = open_run(config, tmp_path, tmp_path, eval__bigrams_path=None, eval__test__path=stores / "test", **fields)
    message = (
        r"eval\.test\.suites on the test text, eval\.test\.path=.*: suite 'position': no document to evaluate is longer"
    )
    with pytest.raises(UserError, match=message):
        evals.check_run(run, ["test"])


def test_training_documents_are_refused(config, stores, tmp_path, monkeypatch, capsys):
    """Documents 7 and 30 of the test text are also training documents, of which a run may repeat some."""
    train, other = ((stores / f"{name}.jsonl").read_text().splitlines() for name in ("train", "test"))
    mixed = prepared(tmp_path, "mixed", [*other[:7], train[50], *other[8:30], train[3], *other[31:]])
    resampled = {"data__upsampling__longer_than_tokens": 180, "data__upsampling__share": 0.9}
    evals.check_run(open_run(config, stores, tmp_path, eval__test__path=stores / "test"), ["test"])
    message = r"eval\.test\.path=.*: 2 of its 60 documents are also training documents, first its document 7 "
    for chunk_tokens, changes in ((1, {}), (1000, resampled), (2**22, {})):
        monkeypatch.setattr(held_out, "CHUNK_TOKENS", chunk_tokens)
        run = open_run(config, stores, tmp_path, eval__test__path=mixed, **changes)
        with pytest.raises(UserError, match=message):
            evals.check_run(run, ["test"])
    capsys.readouterr()
    monkeypatch.setattr(held_out, "MAX_COMPARED_TOKENS", 9)
    evals.check_run(run, ["test"])
    assert "not checked whether documents of eval.test.path are in the training text" in capsys.readouterr().out


def test_only_suites_of_text_run_on_the_test_text(config):
    with pytest.raises(UserError, match=r"eval\.test\.suites"):
        config(eval__test__suites="sample")
