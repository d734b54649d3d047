"""The suite hallucination: prompts, numbers for known answers, and resumption."""

import json
import re
import types

import numpy as np
import pytest
from conftest import suite_config
from helpers.chat_server import KEY, ChatServer
from helpers.evals_answers import Writer
from helpers.evals_examples import long_bench, set_of, write_lines

from difftx.config.build import override
from difftx.data.tokenizers import load_tokenizer
from difftx.errors import UserError
from difftx.evals import run as evals
from difftx.evals.hallucination.suite import HallucinationSet
from difftx.inference.sampling import GREEDY
from difftx.training.run import Run

QUESTION = re.compile(r"Document:\n(.*)\n\nQuestion: (.*)\nAnswer:$", re.DOTALL)
SUMMARY = re.compile(r"Document:\n(.*)\n\nSummary of the document:$", re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    write_lines(folder / "qa.jsonl.gz", long_bench(30))
    news = [{"text": record["context"], "summary": f"All about {record['answers'][0]}."} for record in long_bench(12)]
    write_lines(folder / "news.jsonl", news)
    (folder / "text.txt").write_text("".join(f"{i} squared is {i * i}.\n" for i in range(8000)))
    return folder


def config_of(folder, *sets, window=512, **changes):
    changes = {f"eval.{name.replace('__', '.')}": value for name, value in changes.items()}
    return suite_config(folder, window, **{"eval.hallucination.sets": json.dumps(sets or [set_of(folder)])} | changes)


def loaded(config):
    run = types.SimpleNamespace(config=config, tokenizer=load_tokenizer("bytes"))
    return [HallucinationSet(run, one) for one in config.eval.hallucination.sets]


def text_of(item):
    return bytes(item.tokens).decode()


def replace_model(monkeypatch, answer):
    """Answer by `answer(document, question)`, or `answer(document)` for a summary."""

    def of_prompt(text):
        return answer(*(QUESTION.search(text) or SUMMARY.search(text)).groups())

    return Writer(monkeypatch, of_prompt)


def town(document):
    return re.search(r"Town\d+", document)[0]


def evaluated(config, workdir):
    return evals.evaluate(Run.open(config, workdir), None, 3, ["hallucination"])["hallucination"]


def test_prompts_hold_document_and_question_and_samples_are_spread(folder):
    (qa,) = loaded(config_of(folder, hallucination__samples=10))
    (again,), (other,) = (
        loaded(config_of(folder, hallucination__samples=10, hallucination__seed=seed)) for seed in (0, 1)
    )
    records = long_bench(30)
    assert [item.id for item in again.items] == [item.id for item in qa.items] != [item.id for item in other.items]
    for item in qa.items:
        record = records[int(item.id.removeprefix("qa/"))]
        assert QUESTION.search(text_of(item)).groups() == (record["context"], record["input"])
        assert (item.references, item.cut, item.document) == (tuple(record["answers"]), False, record["context"])
    assert len({item.id for item in qa.items}) == 10 < len(loaded(config_of(folder))[0].items) == 30


@pytest.mark.parametrize("window", [200, 257, 300])
def test_long_documents_lose_their_middle_and_nothing_else(folder, window):
    (qa,) = loaded(config_of(folder, window=window))
    records = long_bench(30)
    for item in qa.items:
        record = records[int(item.id.removeprefix("qa/"))]
        document, question = QUESTION.search(text_of(item)).groups()
        assert question == record["input"]
        assert document == item.document
        whole = record["context"]
        assert item.cut is (len(whole) > len(document))
        if item.cut:
            assert len(item.tokens) + 16 == window
            half = len(document) // 2
            assert document == whole[: len(document) - half] + whole[-half:]
        else:
            assert document == whole
    assert any(item.cut for item in qa.items)


def test_numbers_of_known_answers(folder, tmp_path, monkeypatch):
    """Of 30 answers, 10 are correct, 10 wrong, 5 abstentions and 5 empty. Summaries are copied or made up."""
    replies = [*[None] * 10, *["in Rome"] * 10, *["I don't know."] * 5, *[""] * 5]

    def answer(document, question=None):
        if question is None:
            return document[:24] if "person 1" not in document.lower() else "Nothing that anybody would know of"
        reply = replies[int(re.search(r"person (\d+)", question)[1])]
        return town(document) if reply is None else reply

    model = replace_model(monkeypatch, answer)
    numbers = evaluated(config_of(folder, set_of(folder), set_of(folder, "news")), tmp_path).numbers
    assert set(model.options) == {(GREEDY, ("\n",)), (GREEDY, ("\n\n",))}
    right = np.mean([len(f"Town{i * 7}") for i in range(10)])
    expected = {
        "accuracy_by_offline_judge": 10 / 30,
        "accuracy_when_answered_by_offline_judge": 10 / 20,
        "answer_rate": 20 / 30,
        "abstention_rate": 5 / 30,
        "empty_rate": 5 / 30,
        "answer_tokens": (10 * right + 10 * len("in Rome") + 5 * len("I don't know.")) / 30,
        "answer_words": (10 * 1 + 10 * 2 + 5 * 3) / 30,
        "unfinished_rate": 0,
        # "in Rome" shares one word of two with the reference "in Town7", so its recall and F1 are 0.5.
        "f1": (10 * 1 + 10 * 0.5) / 30,
        "recall": (10 * 1 + 10 * 0.5) / 30,
        "documents_cut": 0,
        "reference_in_document": 1,
    }
    for name in ("qa", "question_answering"):
        found = {key.removeprefix(f"{name}_"): value for key, value in numbers.items() if key.startswith(f"{name}_")}
        assert found == pytest.approx(expected)
    made_up = 3 / 12  # Persons 1, 10 and 11.
    assert numbers["news_accuracy_by_offline_judge"] == pytest.approx(1 - made_up)
    assert numbers["news_answer_rate"] == 1
    assert numbers["news_unfinished_rate"] == 1
    assert {"news_rouge_l", "summarisation_recall"} < numbers.keys()
    assert not {"news_f1", "news_reference_in_document", "qa_rouge_l"} & numbers.keys()


def test_endpoint_judges_only_answers_that_are_not_empty(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    replace_model(monkeypatch, lambda document, question: "" if "person 2" in question else town(document))
    with ChatServer() as server:
        reach = {"judge__base_url": server.url, "hallucination__judge_model": "gpt-4o"}
        config = config_of(folder, **reach)
        result = evaluated(config, tmp_path)
        assert len(server.asked) == 19  # The answers about persons 2 and 20 to 29 are empty.
        assert result.numbers["qa_accuracy_by_judge_gpt_4o"] == pytest.approx(19 / 30)
        assert result.numbers["qa_accuracy_when_answered_by_judge_gpt_4o"] == 1
        assert "judge: gpt-4o" in result.charts[0].title
        assert result.details["tokens_in"] == 19 * 1000
        assert "offline" not in json.dumps(result.numbers) + result.charts[0].title
        # A result depends on the judge's model and its endpoint, but not on the pace of the requests.
        run = Run.open(override(config, {"eval.judge.concurrency": "1"}), tmp_path)
        assert evals.stored_result(run, "hallucination", 3)
        elsewhere = Run.open(override(config, {"eval.judge.base_url": "http://localhost:1/v1"}), tmp_path)
        assert evals.stored_result(elsewhere, "hallucination", 3) is None
        run = Run.open(override(config, {"eval.hallucination.judge_model": "none"}), tmp_path)
        assert evals.stored_result(run, "hallucination", 3) is None
        evaluated(config, tmp_path)
        assert len(server.asked) == 19
    assert all(KEY not in path.read_text() for path in tmp_path.rglob("*") if path.is_file())


GOOD = {"context": "Some text.", "input": "What?", "answers": ["This"]}


@pytest.mark.parametrize(
    ("records", "changes", "message"),
    [
        (None, {}, r"eval.hallucination.sets, qa.path=.*qa.jsonl: cannot be read"),
        ([GOOD, {"context": "a", "inputs": "b"}], {}, "line 2 has no field 'input'. Did you mean 'inputs'"),
        ([GOOD | {"context": " \n"}], {}, "line 1: context is only white space"),
        ([GOOD | {"context": {"title": ["a"]}}], {}, "line 1: context must be text, a list of texts, or have lists"),
        ([GOOD | {"context": {"title": ["a"], "sentences": []}}], {}, "1 titles and 0 lists of sentences"),
        ([GOOD | {"answers": []}], {}, r"line 1: answers=\[\] must be a text or a list of texts"),
        ([GOOD | {"answers": ["a", " "]}], {}, "line 1: answers=.* must be a text or a list of texts"),
        ([GOOD | {"input": "?" * 400}], {}, "line 1: question, .* new_tokens=16 leave 0 tokens of data.sequence_len"),
    ],
)
def test_mistakes_name_file_and_line(folder, tmp_path, records, changes, message):
    path = tmp_path / "qa.jsonl"
    if records is not None:
        write_lines(path, records)
    with pytest.raises(UserError, match=message):
        loaded(config_of(folder, set_of(folder, path=str(path), **changes)))


def test_a_judge_without_a_key_is_refused(folder, tmp_path, monkeypatch):
    config = config_of(folder)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    run = Run.open(override(config, {"eval.hallucination.judge_model": "gpt-4o"}), tmp_path)
    with pytest.raises(UserError, match=r"eval.judge.key_variable='OPENAI_API_KEY': this environment variable is not"):
        evals.check_run(run, ["hallucination"])
