"""lm-eval's RULER tasks with a tokenizer of difftx, local texts and no network."""

import json
import re
import shutil
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

NIAH = ("single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3", "multiquery", "multivalue")
# Task → tokens to generate, shortest length of the test.
ESSAYS = tuple(kind for kind in NIAH if kind not in ("single_1", "multikey_2", "multikey_3"))  # Steps of 500 words.
TASKS = {f"niah_{kind}": (128, 1024 if kind in ESSAYS else 512) for kind in NIAH} | {
    "ruler_vt": (30, 1024),
    "ruler_cwe": (120, 1024),
    "ruler_fwe": (50, 512),
    "ruler_qa_squad": (32, 512),
    "ruler_qa_hotpot": (32, 512),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the files of `eval.harness.ruler_path`, and a tokenizer of words, because 512 tokens are few."""
    import wonderwords
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("ruler")
    (folder / "paul_graham_essays.txt").write_text(
        "".join(f"The river number {i} is long. It falls slowly. " for i in range(900))
    )
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
    tokenizer.train_from_iterator(
        [" ".join([*words, *counts]), (folder / "paul_graham_essays.txt").read_text()], trainer
    )
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


def load(folder, task, length, tokenizer=None):
    """Return the rows of a task."""
    settings = HarnessConfig(tasks=(task,), ruler_lengths=(length,), ruler_path=str(folder))
    _, tasks = load_tasks(settings, load_tokenizer(tokenizer or str(folder / "tokenizer")))
    return list(tasks[task].test_docs())


@pytest.mark.parametrize("task", TASKS)
def test_prompts_have_exact_lengths(folder, task):
    from tokenizers import Tokenizer

    generated, length = TASKS[task]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    rows = load(folder, task, length)
    assert len(rows) == 500
    for row in rows[:50]:
        # These three count the beginning of the answer. ruler_vt counts its example before it changes the names in it.
        counts_prefix = task in ("ruler_vt", "ruler_cwe", "ruler_fwe")
        text = f"{row['input']} {row['gen_prefix']}" if counts_prefix else row["input"]
        counted = len(tokenizer.encode(text, add_special_tokens=False).ids) + generated
        assert abs(row["length"] - counted) <= (30 if task == "ruler_vt" else 0)
        assert 0.6 * length < row["length"] - (generated if task == "ruler_fwe" else 0) <= length
    assert load(folder, task, length) == rows  # Each process of a run must ask the same questions.


@pytest.mark.parametrize(
    ("task", "length", "tokenizer", "message"),
    [
        ("ruler_vt", 512, None, r"at 512, ruler_vt has room for 12 tokens, but its shortest text has \d+ "),
        ("ruler_vt", 4096, "bytes", r"at 4096, ruler_vt has room for 500 tokens, but its shortest text has \d+ "),
        ("ruler_cwe", 512, None, r"at 512, ruler_cwe has room for 512 tokens, but its shortest text has \d+ "),
        ("ruler_fwe", 128, None, r"at 128, ruler_fwe has room for 128 tokens, but its shortest text has \d+ "),
        ("ruler", 512, None, r"at 512, ruler_vt "),
        ("niah_single_2", 512, None, r"at 512, no prompt of niah_single_2 has more than \d+ tokens"),
        ("niah_single_1", 128, None, r"\(128,\): niah_single_1: Could not generate any sample"),
        ("ruler_qa_squad", 64, None, r"\(64,\): ruler_qa_squad: Could not generate any QA sample"),
    ],
)
def test_lengths_without_room_are_refused(folder, task, length, tokenizer, message):
    """lm-eval itself searches forever for prompts of ruler_vt, ruler_cwe and ruler_fwe that are short enough."""
    with pytest.raises(UserError, match=rf"^eval\.harness\.ruler_lengths(: |=){message}"):
        load(folder, task, length, tokenizer)


@pytest.mark.parametrize(
    ("task", "missing"),
    [
        ("niah_single_1", "tokenizers/punkt_tab/english/abbrev_types.txt"),
        ("niah_single_2", "paul_graham_essays.txt"),
        ("ruler_qa_squad", "dev-v2.0.json"),
        ("ruler_qa_hotpot", "hotpot_dev_distractor_v1.json"),
    ],
)
def test_a_missing_file_is_named(folder, tmp_path, task, missing):
    shutil.copytree(folder, tmp_path / "copy", ignore=shutil.ignore_patterns(*missing.split("/")[:1]))
    with pytest.raises(UserError, match=rf"^eval\.harness\.ruler_path=\S+: no file {re.escape(missing)} \("):
        load(tmp_path / "copy", task, 512, str(folder / "tokenizer"))
    shutil.copytree(folder, tmp_path / "copy", dirs_exist_ok=True)
    assert load(tmp_path / "copy", task, 512)


def test_a_model_answers(folder, tmp_path):
    (folder / "text.txt").write_text((folder / "paul_graham_essays.txt").read_text().replace("slowly. ", "slowly.\n"))
    changes = {"tasks": tuple(TASKS), "ruler_lengths": (1024,), "ruler_path": folder, "limit": 2}
    fields = {f"eval.harness.{name}": value for name, value in changes.items()}
    fields |= {"data.tokenizer": folder / "tokenizer", "model.vocab_size": "none"}
    run = Run.open(suite_config(folder, 1280, **fields), tmp_path)
    params = params_from(run, lambda name, shape: 0.1 * np.random.default_rng(0).normal(size=shape))
    result = evals.evaluate(run, params, 3, ["harness"])["harness"]
    assert {name for name in result.numbers if not name.endswith("_stderr")} == {f"{task}_1024" for task in TASKS}
    assert all(0 <= number.value <= 1 and number.unit == "share" for number in result.numbers.values())
