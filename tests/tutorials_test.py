"""The commands of docs/getting-started.md, docs/evaluate.md, docs/concepts/ and docs/tutorials/, on tiny models."""

import json
import re
import shutil

import numpy as np
import pytest
from conftest import ROOT, TINY, write_text
from helpers.interop_folders import FIXTURES
from helpers.pages import DOCS, blocks, named_files, page_commands, run_command

SHORT = TINY | {
    "eval.loss_tokens": "256",
    "eval.sample_tokens": "4",
    "logging.tensorboard": "false",
    "logging.every_steps": "1",
    "data.path": "text.txt",
}
EXECUTED = {  # Page → number of commands in its bash blocks.
    "getting-started.md": 4,
    "evaluate.md": 9,
    "concepts/differential-attention.md": 1,
    "tutorials/own-text.md": 11,
    "tutorials/huggingface.md": 6,
    "tutorials/compare.md": 9,
    "tutorials/report.md": 1,
    "tutorials/pod.md": 5,
}


def lines_of(page):
    return [line for lines in page_commands(page) for line in lines]


def run(place, line, **fields):
    """Execute a command of a page on a tiny model, and return its output."""
    if line.startswith("mkdir"):
        (place / "runs").mkdir()
        return ""
    small = SHORT | {name.replace("__", "."): value for name, value in fields.items()}
    is_small = re.match(r"difftx (train|sweep|plan|doctor) ", line) and "by_size" not in line and "scaling" not in line
    return run_command(place, line, fields=small if is_small else {})


@pytest.fixture
def place(tmp_path):
    """A folder with the files that the pages name."""
    text = write_text(tmp_path / "text.txt").read_text()
    (tmp_path / "corpus").mkdir()
    documents = [text[start : start + 400] for start in range(0, 80_000, 400)]
    (tmp_path / "corpus" / "a.jsonl").write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
    return tmp_path


def losses(workdir):
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if row["split"] == "train"]


def test_pages_with_commands_are_executed():
    assert {page: len(lines_of(page)) for page in EXECUTED} == EXECUTED
    others = {"differentialize.md", "tokenizers.md", "extend.md"}  # Other tests execute the commands of these pages.
    with_commands = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md") if blocks(page, "bash")}
    assert with_commands == set(EXECUTED) | others


@pytest.mark.long
def test_the_commands_of_getting_started_train_generate_and_report(place):
    train, evaluate, generate, report = lines_of("getting-started.md")
    run(place, train, data__sequence_length="64")
    assert "loss" in run(place, evaluate)
    assert run(place, generate).startswith("def main(")
    assert run(place, report) == "runs/first/report.html\n"


@pytest.mark.long
def test_the_commands_of_own_text_train_on_text_config_and_corpus(place):
    for name, text in named_files("tutorials/own-text.md").items():
        (place / name).write_text(text)
    dry, train, generate, longer, printed, own, by_size, *corpus = lines_of("tutorials/own-text.md")
    assert "parameters" in run(place, dry)
    assert not (place / "runs").exists()
    run(place, train)
    assert run(place, generate).startswith("The ")
    run(place, longer.replace("800", "8"))
    assert len(losses(place / "runs" / "mine")) == 8
    config = json.loads(run(place, printed))
    assert (config["optimizer"]["learning_rate"], config["data"]["path"]) == (2e-3, "text.txt")
    run(place, own)
    assert re.search(r"2[45],\d{3},\d{3} parameters", run(place, by_size))
    prepare, verify, show, train = corpus
    run(place, prepare)
    assert "train" in run(place, verify)
    assert "squar" in run(place, show)
    run(place, train)
    assert len(losses(place / "runs" / "corpus")) == 6


@pytest.mark.long
def test_the_commands_of_huggingface_import_train_and_export(place):
    pytest.importorskip("tokenizers", reason="make test-long installs the extra tokenizers")
    from tokenizers import ByteLevelBPETokenizer

    shutil.copytree(FIXTURES / "llama3", place / "models" / "llama")
    size = json.loads((place / "models" / "llama" / "config.json").read_text())["vocab_size"]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train([str(place / "text.txt")], vocab_size=size, special_tokens=["<|endoftext|>"])
    tokenizer.save(str(place / "models" / "llama" / "tokenizer.json"))
    (place / "models" / "llama" / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    prepare, mkdir, convert, evaluate, train, export = lines_of("tutorials/huggingface.md")
    for line in (prepare, mkdir):
        run(place, line)
    sizes = {"data.sequence_length": "64", "model.compute_dtype": "float32", "eval.loss_tokens": "256"}
    run_command(place, convert, fields=sizes)
    assert "loss" in run(place, evaluate)
    short = {"train.steps": "4", "train.global_batch_tokens": "512", "optimizer.warmup_steps": "2", "mesh.fsdp": "1"}
    run_command(place, train, "--config.optimizer.learning_rate=0.004", fields=short)
    run(place, export)
    assert json.loads((place / "llama-hf" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert (place / "llama-hf" / "tokenizer.json").read_text()


@pytest.mark.long
def test_the_commands_of_compare_and_report_write_their_files(place):
    *pair, sweep, seeds, scaling = lines_of("tutorials/compare.md")
    for line in pair:
        run(place, line, data__sequence_length="256", train__global_batch_tokens="1024")
    assert (place / "figures" / "curves.png").is_file()
    details = json.loads((place / "runs" / "pair" / "diff" / "evals" / "attention" / "6.json").read_text())["details"]
    assert len(details["by_layer"]["cosine_answer"]) == 2  # The cosine of A1 and A2 in each layer.
    run(place, *lines_of("tutorials/report.md"))
    assert (place / "report.html").is_file()
    run(place, sweep)
    run(place, seeds)
    assert "transformer-seed2" in (place / "seeds.html").read_text()
    (table,) = blocks("tutorials/compare.md", "csv")
    (place / "points.csv").write_text(table)
    assert "95 %" in run(place, scaling)


@pytest.mark.long
def test_the_commands_of_evaluate_write_results_of_suites_and_steps(place):
    listing, suites, every_step, report, *others = lines_of("evaluate.md")
    assert "position" in run(place, listing)
    run(place, "difftx train --config=quickstart:diff --workdir=runs/mine", checkpoint__every_steps="3")
    for line in (suites, every_step, report):
        run(place, line)
    steps = {path.name for path in (place / "runs" / "mine" / "evals" / "loss").glob("*.json")}
    assert steps >= {"3.json", "6.json"}
    for line in others:
        run(place, line, data__sequence_length="256", train__global_batch_tokens="1024")
    assert {"recall", "needle"} <= {path.name for path in (place / "runs" / "corpus" / "evals").iterdir()}


@pytest.mark.long
def test_the_commands_of_pod_plan_sweep_and_write_a_slurm_job(place):
    plan, doctor, sweep, train, checkpoints = lines_of("tutorials/pod.md")
    assert "memory" in run(place, plan, mesh__fsdp="8").lower()
    run(place, doctor)
    run(place, sweep)
    jobs = [line.partition(" ")[2] for b in blocks("tutorials/pod.md", "console") for line in b.splitlines()]
    (job,) = (name for name in jobs if name.endswith(".sbatch"))
    assert "--nodes=4" in (place / job).read_text()
    run(place, train)
    assert "6" in run(place, checkpoints)


@pytest.mark.long
def test_the_command_of_differential_attention_trains_another_architecture(place):
    (line,) = lines_of("concepts/differential-attention.md")
    run(place, line)
    assert np.isfinite(losses(place / "runs" / "diff_v2")).all()


@pytest.mark.long
def test_the_notebook_trains_both_models_and_draws_them(tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat", reason="make docs installs the extra docs")
    nbclient = pytest.importorskip("nbclient", reason="make docs installs the extra docs")
    notebook = nbformat.read(DOCS / "first-model.ipynb", as_version=4)
    (setting,) = (cell for cell in notebook.cells if cell.source.startswith("STEPS = "))
    setting.source = 'STEPS = 6\nSIZES = ["--config.model.d_model=32", "--config.eval.loss_tokens=512"]'
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # A reader of the notebook has installed difftx.
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert len(losses(tmp_path / "runs" / "notebook" / "transformer")) == 6
    assert (tmp_path / "runs" / "notebook" / "diff" / "report.html").is_file()
