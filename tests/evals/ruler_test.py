"""lm-eval's RULER tasks with a tokenizer of difftx, local texts and no network."""

import json
import socket

import numpy as np
import pytest
from conftest import suite_config
from helpers.evals_params import params_from
from helpers.tokenizer_files import write_settings

from difftx.config.eval import HarnessConfig
from difftx.data.tokenizers import load_tokenizer
from difftx.errors import UserError
from difftx.evals import run as evals
from difftx.evals.harness.suite import load_tasks
from difftx.training.run import Run

for _package in ("lm_eval", "tokenizers", "transformers", "wonderwords"):
    pytest.importorskip(_package, reason="the extras eval, ruler and tokenizers are not installed")

pytestmark = pytest.mark.long

NIAH = {f"niah_{kind}": 128 for kind in ("single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3",
        "multiquery", "multivalue")}  # fmt: skip
GENERATED = NIAH | {"ruler_vt": 30, "ruler_cwe": 120, "ruler_fwe": 50, "ruler_qa_squad": 32, "ruler_qa_hotpot": 32}
LENGTH = 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the files of `eval.harness.ruler_path`, and a tokenizer of words, because 512 tokens are few."""
    import wonderwords
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("ruler")
    (folder / "essays.txt").write_text("".join(f"The river number {i} is long. It falls slowly. " for i in range(900)))
    punkt = folder / "tokenizers" / "punkt_tab" / "english"
    punkt.mkdir(parents=True)
    for name in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
        (punkt / name).write_text("")
    texts = [{"context": f"Town {i} has {i} bridges.", "qas": [{"question": f"How many has town {i}?", "is_impossible":
             False, "answers": [{"text": str(i)}]}]} for i in range(600)]  # fmt: skip
    (folder / "dev-v2.0.json").write_text(json.dumps({"data": [{"paragraphs": texts}]}))
    facts = [{"question": f"What is {i}?", "answer": f"{i}", "context": [[f"T{i}", [f"It is {i}. "]]]}
             for i in range(600)]  # fmt: skip
    (folder / "hotpot_dev_distractor_v1.json").write_text(json.dumps(facts))
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    special = ["<unk>", "<s>", "</s>"]
    alphabet = [chr(i) for i in range(33, 127)] + ["\n"]
    trainer = trainers.BpeTrainer(
        vocab_size=12_000, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    categories = wonderwords.RandomWord()._categories
    words = [word for kind in ("noun", "adjective", "verb") for word in categories[kind]]
    counts = [f" {i}." for i in range(200)]
    tokenizer.train_from_iterator([" ".join([*words, *counts]), (folder / "essays.txt").read_text()], trainer)
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    write_settings(folder / "tokenizer", extra_special_tokens=[])
    return folder


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("a task asks for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def settings(folder, *tasks, length=LENGTH):
    return HarnessConfig(tasks=tasks, ruler_lengths=(length,), ruler_path=str(folder))


def counter(folder):
    """Return a function that counts tokens with the library itself."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("task", [task for task in GENERATED if task != "ruler_vt"])
def test_prompts_have_exact_lengths(folder, task):
    _, tasks = load_tasks(settings(folder, task), load_tokenizer(str(folder / "tokenizer")))
    rows, count = list(tasks[task].test_docs()), counter(folder)
    assert len(rows) == 500
    for row in rows[:50]:
        # cwe and fwe count the beginning of the answer, which they then cut off.
        text = f"{row['input']} {row['gen_prefix']}" if task in ("ruler_cwe", "ruler_fwe") else row["input"]
        assert row["length"] == count(text) + GENERATED[task]
        assert row["length"] - (50 if task == "ruler_fwe" else 0) <= LENGTH  # fwe fills the length without its answer.


def test_vt_has_exact_lengths_or_is_refused_where_lm_eval_would_not_end(folder):
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    with pytest.raises(UserError, match=r"^eval\.harness\.ruler_lengths=512: ruler_vt needs up to \d+ tokens"):
        load_tasks(settings(folder, "ruler_vt"), tokenizer)
    _, tasks = load_tasks(settings(folder, "ruler_vt", length=1024), tokenizer)
    rows, count = list(tasks["ruler_vt"].test_docs()), counter(folder)
    for row in rows[:20]:
        # The length counts the example before the names in it are replaced by others.
        assert abs(row["length"] - count(f"{row['input']} {row['gen_prefix']}") - 30) < 30
        assert row["length"] <= 1024


def test_a_missing_file_is_named(folder, tmp_path):
    with pytest.raises(UserError, match=r"^eval\.harness\.ruler_path=\S+ has no dev-v2\.0\.json; "):
        load_tasks(settings(tmp_path, "ruler_qa_squad"), load_tokenizer(str(folder / "tokenizer")))


def test_a_model_answers(folder, tmp_path):
    (folder / "text.txt").write_text((folder / "essays.txt").read_text().replace("slowly. ", "slowly.\n"))
    tasks = ("niah_single_2", "ruler_qa_squad")
    changes = {"tasks": tasks, "ruler_lengths": (LENGTH,), "ruler_path": folder, "limit": 2}
    fields = {f"eval.harness.{name}": value for name, value in changes.items()}
    fields |= {"data.tokenizer": folder / "tokenizer", "model.vocab_size": "none"}
    run = Run.open(suite_config(folder, 2 * LENGTH, **fields), tmp_path)
    params = params_from(run, lambda name, shape: 0.1 * np.random.default_rng(0).normal(size=shape))
    result = evals.evaluate(run, params, 3, ["harness"])["harness"]
    assert {f"{task}_{LENGTH}" for task in tasks} <= result.numbers.keys()
    assert not any(name.endswith("_4096") for name in result.numbers)
