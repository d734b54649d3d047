"""Prompts of suites with a tokenizer that begins each text with a special token, as that of Llama does."""

import dataclasses
import itertools
import json
import re
import types

import pytest
from conftest import suite_config
from helpers.evals_examples import examples, task_of, write_lines
from helpers.tokenizer_files import prefixed_bytes_folder

from difftx.config.build import override
from difftx.evals.attention.suite import prompts_of
from difftx.evals.evaluation import Evaluation
from difftx.evals.icl import IclTask
from difftx.evals.needle.prompts import NeedlePrompts
from difftx.inference.score import Score
from difftx.progress import Work
from difftx.training.run import Run

pytest.importorskip("tokenizers")

NEEDLE = re.compile(r"\nThe magic number for \w+ is \d{7}\.\n")
WINDOW = 1024


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a tokenizer, short texts to train on, and the files of a task of `icl`."""
    folder = tmp_path_factory.mktemp("prefix")
    prefixed_bytes_folder(folder / "tokenizer")
    for i in range(60):
        (folder / f"{i}.txt").write_text(f"Chapter {i} has {i * 37} pages! It is about {i * i}. " * (3 + i % 5))
    write_lines(folder / "train.jsonl.gz", examples(200, 0))
    write_lines(folder / "test.jsonl", examples(60, 1))
    return folder


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    changes = {"data.path": folder / "*.txt", "data.tokenizer": folder / "tokenizer", "data.valid_fraction": 0.5}
    changes |= {"eval.icl.tasks": json.dumps([task_of(folder)]), "eval.icl.questions": 20}
    return Run.open(suite_config(folder, WINDOW, **changes), tmp_path_factory.mktemp("run"))


def test_documents_begin_with_the_token(run):
    assert list(run.tokenizer.prefix) == run.tokenizer.encode_prompt("")
    assert list(run.data.valid["valid"][0]["tokens"]).count(*run.tokenizer.prefix) > 1


@pytest.mark.parametrize("prompts_of", [NeedlePrompts, prompts_of], ids=["needle", "attention"])
def test_the_token_begins_each_needle_prompt_and_is_not_in_the_haystack(run, prompts_of):
    prompts, [first] = prompts_of(run), run.tokenizer.prefix
    for prompt in map(prompts.prompt, prompts.items):
        assert prompt.tokens[0] == first
        assert prompt.tokens.count(first) == 1
        assert len(prompt.tokens) == prompt.item.length - run.config.eval.needle.new_tokens
        for start, stop in (*prompt.asked, *prompt.others):
            assert NEEDLE.fullmatch(run.tokenizer.decode(prompt.tokens[start:stop]))
        if prompt.item.depth == 0:
            assert min(prompt.asked)[0] == 1
        question = run.tokenizer.decode(prompt.tokens[slice(*prompt.question)])
        assert question.startswith("\n\nQuestion: What ")


def test_the_token_begins_the_demonstrations_and_takes_room(run):
    task, [first] = IclTask(run, run.config.eval.icl.tasks[0]), run.tokenizer.prefix
    plain = IclTask(dataclasses.replace(run, tokenizer=without_prefix(run.tokenizer)), run.config.eval.icl.tasks[0])
    for item in task.items:
        for prompt in task.prompts(item):
            assert prompt.context[0] == first
            assert [*prompt.context, *prompt.question].count(first) == 1
    contexts = [each.prompts(each.items[0])[0].context for each in (task, plain)]
    assert contexts[0] == (first, *contexts[1])
    # The last token of a label is only a target.
    prompts = task.prompts(task.items[-1])
    longest = max(len(p.context) + len(p.question) for p in prompts) + max(map(len, task.labels))
    for window, shots in ((longest - 1, task.most_shots), (longest - 2, task.most_shots - 1)):
        sizes = {"data.sequence_length": str(window), "train.global_batch_tokens": str(window)}
        narrow = dataclasses.replace(run, config=override(run.config, sizes))
        assert IclTask(narrow, run.config.eval.icl.tasks[0]).most_shots == shots


@pytest.mark.long
def test_the_token_begins_each_request_of_lm_eval_once(run, monkeypatch):
    pytest.importorskip("lm_eval")
    transformers = pytest.importorskip("transformers")
    from lm_eval.api.instance import Instance

    from difftx.evals.harness import model as harness_model

    asked = []

    def score_all(evaluation, pairs, *, what):
        asked.extend(pairs)
        return [Score(0.0, True)] * len(pairs)

    monkeypatch.setattr(harness_model, "score_all", score_all)
    monkeypatch.setattr(harness_model, "complete_all", lambda evaluation, requests, *, what: requests)
    model = harness_model.HarnessModel(Evaluation(run, None, Work(enabled=False)))
    [first] = run.tokenizer.prefix
    ids = lambda text: tuple(run.tokenizer.encode_ordinary(text))  # noqa: E731

    def request(kind, *arguments):
        return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)

    model.loglikelihood([request("loglikelihood", *pair) for pair in (("Q: a\nA:", " b"), ("", "b c"), ("a ", "b"))])
    assert asked == [((first, *ids("Q: a\nA:")), ids(" b")), ((first,), ids("b c")), ((first, *ids("a")), ids(" b"))]

    asked.clear()
    text = "0123456789" * (WINDOW // 5)
    model.loglikelihood_rolling([request("loglikelihood_rolling", text)])
    # lm-eval's models of Hugging Face score what the tokenizer returns, after the bos token.
    theirs = transformers.AutoTokenizer.from_pretrained(run.config.data.tokenizer)
    encoded = theirs(text)["input_ids"]
    assert [token for _, tokens in asked for token in tokens] == encoded
    assert asked[0] == ((theirs.bos_token_id,), tuple(encoded[:WINDOW]))
    assert not any(first in tokens for tokens in itertools.chain(*asked[1:]))

    options = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}
    found = model.generate_until([request("generate_until", context, options) for context in ("1 + 1 =", "")])
    assert [each.prompt for each in found] == [(first, *ids("1 + 1 =")), (first,)]
    assert {each.stop for each in found} == {("\n", theirs.eos_token)}


def without_prefix(tokenizer):
    """Return a tokenizer with the same ids that begins no text with a special token."""
    names = ("eot_token", "encode_ordinary", "encode_to_numpy", "decode", "token_bytes")
    return types.SimpleNamespace(prefix=(), **{name: getattr(tokenizer, name) for name in names})
