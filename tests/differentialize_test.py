"""The commands of docs/differentialize.md, on tiny models."""

import json
import re
import shutil

import pytest
from conftest import TINY, write_text
from helpers.interop_folders import FIXTURES
from helpers.pages import page_commands, run_command

COMMANDS = page_commands("differentialize.md")
LENGTH = "256"  # As in the recipe quickstart.
SHORT = {
    "train.steps": "8",
    "train.global_batch_tokens": "4096",
    "optimizer.warmup_steps": "2",
    "optimizer.learning_rate": "0.004",
    "checkpoint.every_steps": "4",
    "eval.every_steps": "4",
    "eval.loss_tokens": "4096",
    "logging.every_steps": "1",
    "logging.trackers": "",
}
FIELDS = {  # Recipe of a command → fields of the config.
    "quickstart": TINY | SHORT | {"data.path": "text.txt", "data.sequence_length": LENGTH, "model.num_heads": "4"},
    "differentialize:": SHORT,
    "differentialize": {
        "data.tokenizer": "bytes",
        "data.path": "text.txt",
        "data.sequence_length": "64",
        "model.compute_dtype": "float32",
    },
}
NEEDLE = ["--eval.needle.samples=1", "--eval.needle.depths=0.5", "--eval.needle.new_tokens=8"]


@pytest.fixture
def page_folder(tmp_path):
    """A folder with text and a model in Hugging Face's format."""
    write_text(tmp_path / "text.txt")
    (tmp_path / "runs").mkdir()
    shutil.copytree(FIXTURES / "llama3", tmp_path / "models" / "llama")
    return tmp_path


def run(page_folder, line, *more):
    """Execute a command of the page with tiny sizes, and return its output."""
    recipe = re.search(r"--config=(\w+:?)", line)
    fields = FIELDS["quickstart" if "quickstart" in line else recipe[1]] if recipe else {}
    flags = [f"--config.{name}={value}" for name, value in fields.items()]  # Also override fields that the line sets.
    return run_command(page_folder, line, *flags, *(NEEDLE if "needle" in line else []), *more)


def rows(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def numbers(workdir, suite, step):
    return json.loads((workdir / "evals" / suite / f"{step}.json").read_text())["numbers"]


def test_the_page_has_the_expected_numbers_of_commands():
    assert [len(lines) for lines in COMMANDS] == [4, 2, 2, 2, 1, 3, 1]


@pytest.mark.long
def test_a_run_is_converted_checked_trained_and_evaluated(page_folder):
    (train, zero_branch, dex, split), _, check, continued, (distilled,), evaluate, (export,) = COMMANDS
    runs = page_folder / "runs"
    run(page_folder, train)
    said = run(page_folder, zero_branch)
    # Each of the two layers gets W_Q2 and W_K2, four λ vectors, and the progress.
    before, added, after = (
        int(n.replace(",", "")) for n in re.search(r"parameters: (\S+) in .*, (\S+) added, (\S+) now", said).groups()
    )
    assert (added, after) == (2 * (2 * 32 * 32 + 4 * 8 + 1), before + added)
    assert "the function is preserved: logits of" in said
    said = run(page_folder, dex)
    assert "heads of highest entropy: 2 of 4 in each layer" in said
    assert "the function is preserved: logits of" in said
    assert "the function is not preserved: logits of" in run(page_folder, split)

    for line in check:
        run(page_folder, line)
    assert numbers(runs / "zero_branch", "loss", 0)["loss"] == pytest.approx(
        numbers(runs / "transformer", "loss", 8)["loss"], rel=1e-6
    )
    run(page_folder, continued[0], "--config.model.zero_branch.anneal_steps=4")
    for line in (continued[1], distilled, *evaluate):
        run(page_folder, line)
    steps = [row for row in rows(runs / "zero_branch-trained") if row["split"] == "train"]
    shares = [row["lambda"][0] / steps[4]["lambda"][0] for row in steps]
    assert shares == pytest.approx([0, 0.25, 0.5, 0.75, 1, 1, 1, 1], abs=0.05)
    kl = [row["teacher_kl"] for row in rows(runs / "zero_branch-distilled") if row["split"] == "train"]
    assert abs(kl[0]) < 1e-4 < kl[-1]  # The conversion preserves the function.
    trained = [numbers(runs / f"{name}-trained", "loss", 8)["loss"] for name in ("zero_branch", "transformer")]
    assert max(trained) < numbers(runs / "transformer", "loss", 8)["loss"] - 0.01
    assert trained[0] != pytest.approx(trained[1], rel=1e-5)
    assert {"logits_top_1", "hidden_top_1"} <= numbers(runs / "zero_branch-trained", "outliers", 8).keys()
    assert (runs / "report.html").is_file()
    for name in ("dex", "split"):
        run(page_folder, continued[0].replace("zero_branch", name))
    for name in ("zero_branch", "dex", "split"):
        run(page_folder, export.replace("zero_branch", name))
        assert (runs / f"{name}-hf" / "model.safetensors").is_file()


@pytest.mark.long
def test_a_folder_of_hugging_face_is_converted_and_trained(page_folder):
    zero_branch, transformer = COMMANDS[1]
    assert "the function is preserved" in run(page_folder, zero_branch)
    assert "a run of step 0, transformer: 3 layers" in run(page_folder, transformer)
    run(page_folder, COMMANDS[3][0].replace("runs/zero_branch", "runs/llama-zero_branch"))
    run(page_folder, COMMANDS[3][1].replace("runs/transformer", "runs/llama"))
    losses = [
        [row["loss"] for row in rows(page_folder / "runs" / f"{name}-trained") if row["split"] == "train"]
        for name in ("llama-zero_branch", "llama")
    ]
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-5)
    assert max(loss[-1] for loss in losses) < losses[0][0] - 0.1
