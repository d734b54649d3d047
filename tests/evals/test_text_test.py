"""Suite `test`, compared with runs that validate on the test text, and eval.py with both texts."""

import json

import pytest
from helpers.evals_params import one_device, random_params
from helpers.evals_results import chance_of

from difftx.commands.data import main as data_command
from difftx.commands.prepare import main as prepare
from difftx.errors import UserError
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


def test_only_suites_of_text_run_on_the_test_text(config):
    with pytest.raises(UserError, match=r"eval\.test\.suites"):
        config(eval__test__suites="sample")
