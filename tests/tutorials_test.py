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
    "logging.trackers": "",
    "logging.every_steps": "1",
    "data.path": "text.txt",
}
EXECUTED = {  # Page → number of commands in its bash blocks.
    "getting-started.md": 4,
    "evaluate.md": 9,
    "concepts/differential-attention.md": 1,
    "tutorials/own-text.md": 11,
    "tutorials/huggingface.md": 6,
    "tutorials/chat.md": 7,
    "tutorials/compare.md": 9,
    "tutorials/report.md": 1,
    "tutorials/pod.md": 5,
}


def lines_of(page):
    return [line for lines in page_commands(page) for line in lines]


def run(page_folder, line, **fields):
    """Execute a command of a page on a tiny model, and return its output."""
    if line.startswith("mkdir"):
        (page_folder / "runs").mkdir()
        return ""
    small = SHORT | {name.replace("__", "."): value for name, value in fields.items()}
    is_small = re.match(r"difftx (train|sweep|plan|doctor) ", line) and "by_size" not in line and "scaling" not in line
    return run_command(page_folder, line, fields=small if is_small else {})


@pytest.fixture
def page_folder(tmp_path):
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
    others = {"differentialize.md", "extend.md"}  # Other tests execute the commands of these pages.
    with_commands = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md") if blocks(page, "bash")}
    assert with_commands == set(EXECUTED) | others


@pytest.mark.long
def test_the_commands_of_getting_started_train_generate_and_report(page_folder):
    train, evaluate, generate, report = lines_of("getting-started.md")
    run(page_folder, train, data__sequence_length="64")
    assert "loss" in run(page_folder, evaluate)
    assert run(page_folder, generate).startswith("def main(")
    assert run(page_folder, report).endswith("\nruns/first/report.html\n")


@pytest.mark.long
def test_the_commands_of_own_text_train_on_text_config_and_corpus(page_folder):
    for name, text in named_files("tutorials/own-text.md").items():
        (page_folder / name).write_text(text)
    dry, train, generate, longer, printed, own, by_size, *corpus = lines_of("tutorials/own-text.md")
    assert "parameters" in run(page_folder, dry)
    assert not (page_folder / "runs").exists()
    run(page_folder, train)
    assert run(page_folder, generate).startswith("The ")
    run(page_folder, longer.replace("800", "8"))
    assert len(losses(page_folder / "runs" / "mine")) == 8
    config = json.loads(run(page_folder, printed))
    assert (config["optimizer"]["learning_rate"], config["data"]["path"]) == (2e-3, "text.txt")
    run(page_folder, own)
    assert re.search(r"2[45],\d{3},\d{3} parameters", run(page_folder, by_size))
    prepare, verify, show, train = corpus
    run(page_folder, prepare)
    assert "train" in run(page_folder, verify)
    assert "squar" in run(page_folder, show)
    run(page_folder, train)
    assert len(losses(page_folder / "runs" / "corpus")) == 6


@pytest.mark.long
def test_the_commands_of_huggingface_import_train_and_export(page_folder):
    pytest.importorskip("tokenizers", reason="make test-long installs the extra tokenizers")
    from tokenizers import ByteLevelBPETokenizer

    shutil.copytree(FIXTURES / "llama3", page_folder / "models" / "llama")
    size = json.loads((page_folder / "models" / "llama" / "config.json").read_text())["vocab_size"]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train([str(page_folder / "text.txt")], vocab_size=size, special_tokens=["<|endoftext|>"])
    tokenizer.save(str(page_folder / "models" / "llama" / "tokenizer.json"))
    (page_folder / "models" / "llama" / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    prepare, mkdir, convert, evaluate, train, export = lines_of("tutorials/huggingface.md")
    for line in (prepare, mkdir):
        run(page_folder, line)
    sizes = {"data.sequence_length": "64", "model.compute_dtype": "float32", "eval.loss_tokens": "256"}
    run_command(page_folder, convert, fields=sizes)
    assert "loss" in run(page_folder, evaluate)
    short = {"train.steps": "4", "train.global_batch_tokens": "512", "optimizer.warmup_steps": "2", "mesh.fsdp": "1"}
    run_command(page_folder, train, "--config.optimizer.learning_rate=0.004", fields=short)
    run(page_folder, export)
    assert json.loads((page_folder / "llama-hf" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert (page_folder / "llama-hf" / "tokenizer.json").read_text()


@pytest.mark.long
def test_the_commands_of_chat_lead_from_a_file_to_a_conversation(page_folder):
    pytest.importorskip("tokenizers", reason="make test-long installs the extra tokenizers")
    train_tokenizer, prepare, train, prepare_chats, show, train_chats, chat = lines_of("tutorials/chat.md")
    (template,), (example,) = (blocks("tutorials/chat.md", kind) for kind in ("jinja", "json"))
    assert re.search(r"tokenizer: \d+ tokens.*; trained on 1 documents", run(page_folder, train_tokenizer))
    (page_folder / "tokenizer" / "chat_template.jinja").write_text(template.removesuffix("\n"))
    (page_folder / "chats.jsonl").write_text("".join(example.replace("2", str(i)) for i in range(200)))
    small = {"data.sequence_length": "64", "train.global_batch_tokens": "512"}
    for line in (prepare, prepare_chats):
        run(page_folder, line)
    assert "And 3+3?" in run(page_folder, show)
    for line in (train, train_chats):
        run_command(page_folder, line, fields=SHORT | small)
    assert len(losses(page_folder / "runs" / "chat")) == 6
    size = json.loads((page_folder / "runs" / "chat" / "config.json").read_text())["model"]["vocab_size"]
    assert size % 128 == 0
    said = run_command(page_folder, chat, typed="2+3\n/temperature 0\n/tokens 5\n3+3\n/bad\n").splitlines()
    assert said[0] == "A conversation; /help lists the commands"
    assert said[-1].startswith("error: /bad: no such command")


@pytest.mark.long
def test_the_commands_of_compare_and_report_write_their_files(page_folder):
    *pair, sweep, seeds, scaling = lines_of("tutorials/compare.md")
    for line in pair:
        run(page_folder, line, data__sequence_length="256", train__global_batch_tokens="1024")
    assert (page_folder / "figures" / "curves.png").is_file()
    details = json.loads((page_folder / "runs" / "pair" / "diff" / "evals" / "attention" / "6.json").read_text())[
        "details"
    ]
    assert len(details["by_layer"]["cosine_answer"]) == 2  # The cosine of A1 and A2 in each layer.
    run(page_folder, *lines_of("tutorials/report.md"))
    assert (page_folder / "report.html").is_file()
    run(page_folder, sweep)
    run(page_folder, seeds)
    assert "transformer-seed2" in (page_folder / "seeds.html").read_text()
    (table,) = blocks("tutorials/compare.md", "csv")
    (page_folder / "points.csv").write_text(table)
    assert "95 %" in run(page_folder, scaling)


@pytest.mark.long
def test_the_commands_of_evaluate_write_results_of_suites_and_steps(page_folder):
    listing, suites, every_step, report, *others = lines_of("evaluate.md")
    assert "position" in run(page_folder, listing)
    run(page_folder, "difftx train --config=quickstart:diff --workdir=runs/mine", checkpoint__every_steps="3")
    for line in (suites, every_step, report):
        run(page_folder, line)
    steps = {path.name for path in (page_folder / "runs" / "mine" / "evals" / "loss").glob("*.json")}
    assert steps >= {"3.json", "6.json"}
    for line in others:
        run(page_folder, line, data__sequence_length="256", train__global_batch_tokens="1024")
    assert {"recall", "needle"} <= {path.name for path in (page_folder / "runs" / "corpus" / "evals").iterdir()}


@pytest.mark.long
def test_the_commands_of_pod_plan_sweep_and_write_a_slurm_job(page_folder):
    plan, doctor, sweep, train, checkpoints = lines_of("tutorials/pod.md")
    assert "memory" in run(page_folder, plan, mesh__fsdp="8").lower()
    run(page_folder, doctor)
    run(page_folder, sweep)
    jobs = [line.partition(" ")[2] for b in blocks("tutorials/pod.md", "console") for line in b.splitlines()]
    (job,) = (name for name in jobs if name.endswith(".sbatch"))
    assert "--nodes=4" in (page_folder / job).read_text()
    run(page_folder, train)
    assert "6" in run(page_folder, checkpoints)


@pytest.mark.long
def test_the_command_of_differential_attention_trains_another_architecture(page_folder):
    (line,) = lines_of("concepts/differential-attention.md")
    run(page_folder, line)
    assert np.isfinite(losses(page_folder / "runs" / "diff_v2")).all()


@pytest.mark.long
def test_the_notebook_trains_both_models_and_draws_them(tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat", reason="make docs installs the extra docs")
    nbclient = pytest.importorskip("nbclient", reason="make docs installs the extra docs")
    notebook = nbformat.read(DOCS / "first-model.ipynb", as_version=4)
    assert not any("subprocess" in cell.source for cell in notebook.cells)
    (setting,) = (cell for cell in notebook.cells if cell.source.startswith("STEPS = "))
    setting.source = 'STEPS = 6\nFIELDS = {"model": {"d_model": 32}, "loss_tokens": 512}'
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # A reader of the notebook has installed difftx.
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    printed = "".join(output.get("text", "") for output in outputs)
    for name in ("diff", "transformer"):
        workdir = tmp_path / "runs" / "notebook" / name
        assert len(losses(workdir)) == 6
        (loss,) = re.findall(rf"^{name} +loss +([0-9.]+) +nats per token$", printed, re.MULTILINE)
        stored = json.loads((workdir / "evals" / "loss" / "6.json").read_text())["numbers"]["loss"]
        assert loss == f"{stored:.5g}"
