"""lm-eval's RULER tasks with a tokenizer of difftx, local texts and no network."""

import collections
import json
import random
import re
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
from difftx.evals.harness import ruler
from difftx.evals.harness.suite import load_tasks
from difftx.training.run import Run

for _package in ("lm_eval", "tokenizers", "transformers", "wonderwords"):
    pytest.importorskip(_package, reason="the extras eval, ruler and tokenizers are not installed")

pytestmark = pytest.mark.long

TASKS = (*ruler.NEEDLES, "ruler_vt", "ruler_cwe", "ruler_fwe", "ruler_qa_squad", "ruler_qa_hotpot")
LENGTH = 512
GENERATED = {"ruler_vt": 30, "ruler_cwe": 120, "ruler_fwe": 50, "ruler_qa_squad": 32, "ruler_qa_hotpot": 32}  # Tokens.
STEP = 48  # More tokens than the largest step of a haystack has, except for sentences with two uuids.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the files of `eval.harness.ruler_path`, and a tokenizer of words, because 512 tokens are few."""
    import wonderwords
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("ruler")
    (folder / "paul_graham_essays.txt").write_text(
        "".join(f"The river number {i} is long. It falls slowly. " for i in range(900))
    )
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


def load(folder, task, *lengths, tokenizer=None):
    """Return the questions of a task."""
    settings = HarnessConfig(tasks=(task,), ruler_lengths=lengths, ruler_path=str(folder))
    _, tasks = load_tasks(settings, load_tokenizer(tokenizer or str(folder / "tokenizer")))
    return list(tasks[task].test_docs())


def check_answers(task, row):
    """Compare the answers with the prompt."""
    text, answers = row["input"], row["outputs"]
    if task.startswith("niah_"):
        assert len(answers) == (4 if task in ("niah_multiquery", "niah_multivalue") else 1)
        keys = re.search(r"(?:magic \w+ for )(.*?) mentioned", row["gen_prefix"])[1].split(", ")
        for key in (key.removeprefix("and ") for key in keys):
            found = re.findall(rf"One of the special magic \w+ for {key} is: (\S+)\.", text)
            assert set(found) <= set(answers)
        assert all(f"is: {answer}." in text for answer in answers)
    elif task == "ruler_vt":
        question = text.rpartition("Memorize and track")[2]
        values = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", question))
        known = {re.search(r"assigned the value (\d+)", question)[1]}
        for _ in values:
            known |= {name for name, value in values.items() if value in known}
        assert known >= set(answers)
        assert len(answers) == len(values) == 5
    elif task == "ruler_cwe":
        counts = collections.Counter(re.findall(r"\d+\. (.+?)(?= \d+\. |\n)", text))
        assert {word for word, _ in counts.most_common(10)} == set(answers)
        assert min(counts[word] for word in answers) > max(n for word, n in counts.items() if word not in answers)
    elif task == "ruler_fwe":
        words = re.search(r"coded words\. (.*)\nQuestion", text)[1].split()
        counts = collections.Counter(word for word in words if word != "...")
        assert {word for word, _ in counts.most_common(3)} == set(answers)
        assert min(counts[word] for word in answers) > max(n for word, n in counts.items() if word not in answers)
    else:
        number = re.search(r"Question: \D*(\d+)\?", text)[1]
        assert answers == [number]
        assert re.search(rf"Town {number} has {number} bridges|It is {number}\.", text)


@pytest.mark.parametrize("task", TASKS)
def test_prompts_fill_a_length_and_have_their_answers(folder, monkeypatch, task):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    random.seed(5)
    expected = random.random()
    random.seed(5)
    monkeypatch.setattr(ruler, "PROMPTS", 100)
    rows = load(folder, task, LENGTH, LENGTH + 256)
    assert random.random() == expected  # The process's generator is as before.
    assert [row["max_length"] for row in rows] == [LENGTH] * 100 + [LENGTH + 256] * 100
    for row in rows:
        text = row["input"] + ("\n\n" if task == "ruler_cwe" else " ") + row["gen_prefix"]
        assert row["length"] == len(tokenizer.encode(text, add_special_tokens=False).ids) + GENERATED.get(task, 128)
        step = STEP * (2 if task == "niah_multikey_3" else 1)
        assert row["max_length"] - step < row["length"] <= row["max_length"]
        check_answers(task, row)
    assert len({row["input"] for row in rows}) == 200
    assert load(folder, task, LENGTH, LENGTH + 256) == rows  # Each process of a run must ask the same questions.


@pytest.mark.parametrize("task", ruler.NEEDLES)
def test_needles_are_those_of_lm_eval(monkeypatch, task):
    import nltk

    monkeypatch.setattr(nltk, "download", lambda _: None)
    from lm_eval.tasks.ruler import niah_utils

    monkeypatch.setattr(niah_utils, "get_tokenizer", lambda _: None)
    monkeypatch.setattr(niah_utils, "get_haystack", lambda type_haystack: type_haystack)
    monkeypatch.setattr(niah_utils, "download_dataset", list)
    monkeypatch.setattr(niah_utils, "generate_samples", lambda haystack, **options: options | {"haystack": haystack})
    (options,) = getattr(niah_utils, task)(max_seq_lengths=[LENGTH])
    haystack, keys, values, numbers = ruler.NEEDLES[task]
    counts = {name: value for name, value in options.items() if name.startswith("num_needle")}
    counts["num_needle_k"] = max(counts.get("num_needle_k", 1), counts.get("num_needle_q", 1))  # As its samplers do.
    assert {name: value for name, value in counts.items() if value > 1} == numbers
    assert [options[name] for name in ("type_haystack", "type_needle_k", "type_needle_v")] == [haystack, keys, values]


@pytest.mark.parametrize(
    ("task", "length", "tokenizer", "shortest"),
    [
        ("ruler_vt", 128, None, r"\d+ tokens with the 30 "),
        ("ruler_vt", 256, "bytes", r"\d+ tokens with the 30 "),
        ("ruler_cwe", 256, None, r"\d+ tokens with the 120 "),
        ("ruler_fwe", 128, None, r"\d+ tokens with the 50 "),
        ("ruler_qa_squad", 64, None, r"\d+ tokens with the 32 "),
        ("niah_single_1", 128, None, r"\d+ tokens with the 128 "),
        ("ruler", 128, None, r"\d+ tokens with the 128 "),
    ],
)
def test_lengths_without_room_are_refused(folder, task, length, tokenizer, shortest):
    """lm-eval itself searches forever for prompts of ruler_vt, ruler_cwe and ruler_fwe that are short enough."""
    name = "niah_single_1" if task == "ruler" else task
    message = rf"at {length}, no prompt of {name} fits: the shortest has {shortest}to generate;"
    with pytest.raises(UserError, match=rf"^eval\.harness\.ruler_lengths: {message}"):
        load(folder, task, length, tokenizer=tokenizer)


def test_questions_whose_documents_do_not_fit_are_left_out(folder, tmp_path):
    long = "Town 7 has 7 bridges. " + "It is an old town with many streets. " * 99
    texts = json.loads((folder / "dev-v2.0.json").read_text().replace("Town 7 has 7 bridges.", long))
    (tmp_path / "dev-v2.0.json").write_text(json.dumps(texts))
    rows = load(tmp_path, "ruler_qa_squad", LENGTH, tokenizer=str(folder / "tokenizer"))
    assert [row["index"] for row in rows] == [i for i in range(501) if i != 7]


@pytest.mark.parametrize(
    ("task", "missing"),
    [
        ("niah_single_2", "paul_graham_essays.txt"),
        ("ruler_qa_squad", "dev-v2.0.json"),
        ("ruler_qa_hotpot", "hotpot_dev_distractor_v1.json"),
    ],
)
def test_a_missing_file_is_named(folder, tmp_path, task, missing):
    with pytest.raises(UserError, match=rf"^eval\.harness\.ruler_path=\S+: no file {re.escape(missing)} \("):
        load(tmp_path, task, LENGTH, tokenizer=str(folder / "tokenizer"))


def test_a_model_answers(folder, tmp_path, monkeypatch):
    """The context of the model is as long as the prompts with their answers."""
    from difftx.evals.harness.model import HarnessModel

    monkeypatch.setattr(ruler, "PROMPTS", 2)
    requests = []

    def recorded(model, context, options, repeat):
        requests.append((context, options["max_gen_toks"]))
        return request_of(model, context, options, repeat)

    request_of = HarnessModel._generation_request
    monkeypatch.setattr(HarnessModel, "_generation_request", recorded)
    (folder / "text.txt").write_text(
        (folder / "paul_graham_essays.txt").read_text().replace("slowly. ", "slowly.\n") * 2
    )
    changes = {"tasks": "ruler", "ruler_lengths": (LENGTH,), "ruler_path": folder}
    fields = {f"eval.harness.{name}": value for name, value in changes.items()}
    fields |= {"data.tokenizer": folder / "tokenizer", "model.vocab_size": 12_000}
    run = Run.open(suite_config(folder, LENGTH, **fields), tmp_path)
    params = params_from(run, lambda name, shape: 0.1 * np.random.default_rng(0).normal(size=shape))
    result = evals.evaluate(run, params, 3, ["harness"])["harness"]
    names = {name for name in result.numbers if not name.endswith("_stderr") and not name.startswith("ruler_5")}
    assert names == {f"{task}_{LENGTH}" for task in TASKS}
    assert all(0 <= result.numbers[name] <= 1 and result.numbers[name].unit == "share" for name in names)
    lengths = [len(run.tokenizer.encode_prompt(context)) + generated for context, generated in requests]
    expected = [row["length"] for task in TASKS for row in load(folder, task, LENGTH)]
    assert sorted(lengths) == sorted(expected)
