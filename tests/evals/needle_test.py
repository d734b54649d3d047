"""The suite needle: prompts, scoring and settings."""

import json
import random
import re
import types

import pytest
import tiktoken
from conftest import ROOT, TINY
from helpers.evals_answers import Writer
from helpers.evals_results import chance_of
from hypothesis import given, settings
from hypothesis import strategies as st

from difftx.config.build import override
from difftx.config.recipes import load_config
from difftx.data.tokenizer import CL100K_PATTERN, END_OF_TEXT, TiktokenTokenizer
from difftx.data.tokenizers import load_tokenizer
from difftx.errors import UserError
from difftx.evals import run as evals
from difftx.evals.needle.prompts import TOLERANCE, NeedlePrompts
from difftx.evals.needle.suite import lwm_share_found, share_found
from difftx.inference.sampling import GREEDY
from difftx.training.run import Run

SENTENCE = re.compile(r"\nThe magic number for (\w+) is (\d{7})\.\n")
PROSE = "".join(
    f"Chapter {i} is about é and 日本. It has {i * 37} pages!\nAnd “{i}” — so it goes.  " for i in range(900)
)
MERGED = [b"  ", b"is", b" is", b"The", b" ma", b"gic", b". ", b".\n", b"\n\n", b"ag", "é".encode(), b"\xe6\x97", b"12"]
TOKENIZERS = {
    "bytes": load_tokenizer("bytes"),
    "merges": TiktokenTokenizer(
        tiktoken.Encoding(
            "merges",
            pat_str=CL100K_PATTERN,
            mergeable_ranks={bytes([i]): i for i in range(256)} | {value: 256 + i for i, value in enumerate(MERGED)},
            special_tokens={END_OF_TEXT: 256 + len(MERGED)},
        )
    ),
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    (folder / "prose.txt").write_text(PROSE)
    (folder / "short.txt").write_text("A short one. It is repeated. ")
    (folder / "endless.txt").write_text("".join(random.Random(0).choices("日本éab", k=9000)))  # No sentence ends.
    (folder / "empty.txt").write_text("")
    return folder


def fake_run(config, tokenizer="bytes", **changes):
    """Return an object with the attributes of a run that prompts use."""
    made = override(config, {f"eval.needle.{name}": str(value) for name, value in changes.items()})
    data = types.SimpleNamespace(valid={})
    return types.SimpleNamespace(config=made, tokenizer=TOKENIZERS[tokenizer], data=data)


def cases_of(*pairs):
    return json.dumps([{"needles": needles, "queries": queries} for needles, queries in pairs])


def all_prompts(run):
    prompts = NeedlePrompts(run)
    return [prompts.prompt(item) for item in prompts.items]


@pytest.fixture(scope="module")
def long():
    changes = {"data.sequence_length": "4096", "train.global_batch_tokens": "32768", "mesh.fsdp": "8"}
    return load_config(f"{ROOT}/configs/quickstart.py:diff", TINY | changes)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    text=st.sampled_from(["prose", "short", "endless"]),
    tokenizer=st.sampled_from(list(TOKENIZERS)),
    case=st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 2), (8, 1), (8, 8)]),
    length=st.integers(900, 4096),
    depth=st.floats(0, 1) | st.sampled_from([0.0, 1.0]),
)
def test_prompts_have_exact_length_and_needles_at_their_depth(long, texts, seed, text, tokenizer, case, length, depth):
    path = texts / f"{text}.txt"
    changes = {"haystack": path, "lengths": length, "depths": depth, "cases": cases_of(case), "samples": 1}
    run = fake_run(long, tokenizer, seed=seed, **changes)
    encoding, [prompt] = run.tokenizer, all_prompts(run)
    assert len(prompt.tokens) == length - run.config.eval.needle.new_tokens
    b"".join(encoding.token_bytes[token] for token in prompt.tokens).decode()  # No character is truncated.
    found = {}
    for start, stop in (*prompt.asked, *prompt.others):
        city, number = SENTENCE.fullmatch(encoding.decode(prompt.tokens[start:stop])).groups()
        found[city] = number
    assert (len(found), len(set(found.values())), len(prompt.asked)) == (case[0], case[0], case[1])

    start, stop = prompt.question
    assert stop == len(prompt.tokens)
    question = encoding.decode(prompt.tokens[start:])
    cities = re.findall(r"[A-Z][a-z]+", question.split(" for ")[1])[: case[1]]
    assert tuple(found[city] for city in cities) == prompt.numbers
    assert question.endswith(" are" if case[1] > 1 else f"The magic number for {cities[0]} is")

    hay, asked_at, done = [], [], 0
    for begin, end in sorted((*prompt.asked, *prompt.others)):
        hay += prompt.tokens[done:begin]
        asked_at += [len(hay)] if (begin, end) in prompt.asked else []
        done = end
    hay += prompt.tokens[done:start]
    source = path.read_text()
    assert encoding.decode(hay) in source * (3 * length // len(source) + 2)
    assert len(set(asked_at)) == 1
    assert abs(asked_at[0] - depth * len(hay)) <= max(TOLERANCE * len(hay), 4)
    if depth == 0:
        assert min(prompt.asked)[0] == 0
    if depth == 1:
        assert max(prompt.asked)[1] == start
    if text == "prose" and len(hay) > 700:
        # Sentence ends are at most 60 bytes apart, so that one is always near enough.
        before = encoding.decode(hay[: asked_at[0]])
        assert before == "" or re.search(r"[.!]\s*$|\n[ \t]*$", before)
        assert re.search(r"[.!\n]\s*$", encoding.decode(hay))


def test_samples_differ_and_depths_share_them(long, texts):
    run = fake_run(long, haystack=texts / "prose.txt", cases=cases_of((4, 2)), samples=5, lengths="1000,2000")
    prompts = NeedlePrompts(run)
    assert len({item.id for item in prompts.items}) == len(prompts.items) == 2 * 5 * 5
    by_sample, made = {}, [prompts.prompt(item) for item in prompts.items]
    for prompt in made:
        by_sample.setdefault((prompt.item.length, prompt.item.sample), set()).add(prompt.numbers)
    assert [len(numbers) for numbers in by_sample.values()] == [1] * 10
    assert len(set.union(*by_sample.values())) == 10
    assert all_prompts(run) == made


def replace_model(monkeypatch, answer):
    """Answer by `answer(text, numbers, cities)`: the prompt, the number of each city, and the queried cities."""

    def of_prompt(text):
        cities = re.findall(r"[A-Z][a-z]+", text.rpartition("Answer:")[2].split(" for ")[1])
        return answer(text, dict(SENTENCE.findall(text)), cities)

    return Writer(monkeypatch, of_prompt)


def evaluated(long, texts, tmp_path, **changes):
    text = {"data.path": str(texts / "prose.txt"), "data.valid_fraction": "0.5"}
    changes = {f"eval.needle.{name}": str(value) for name, value in changes.items()}
    run = Run.open(override(long, text | changes), tmp_path)
    return evals.evaluate(run, None, 3, ["needle"])["needle"]


def test_the_heatmap_has_depths_and_lengths_where_they_belong(long, texts, tmp_path, monkeypatch):
    """The model finds a number only in the first 40 % of a text, and none in a long text."""

    def answer(text, numbers, cities):
        before = text[: text.index(f"The magic number for {cities[0]} is {numbers[cities[0]]}")]
        return numbers[cities[0]] if len(text) < 2000 and len(before) / len(text) < 0.4 else "0000000"

    model = replace_model(monkeypatch, answer)
    result = evaluated(long, texts, tmp_path, cases=cases_of((2, 1)), lengths="4096,1500", samples=3)
    assert set(model.options) == {(GREEDY, ())}
    table, chart = result.charts
    assert (chart.x, chart.y) == (["1,500", "4,096"], ["0 %", "25 %", "50 %", "75 %", "100 %", "mean"])
    assert chart.values == [[1, 0], [1, 0], [0, 0], [0, 0], [0, 0], [0.4, 0]]
    assert (table.y, table.values) == (["N=2, R=1"], [[0.4, 0]])
    expected = {"accuracy": 0.2, "n2_r1_1500": 0.4, "n2_r1_4096": 0}
    assert result.numbers == expected | {f"{name}_lwm": value for name, value in expected.items()}
    assert chance_of(result) == dict.fromkeys(result.numbers, 0.0)


@pytest.mark.parametrize(
    ("text", "share", "lwm_share"),
    [
        (" 1234567 and 7654321.", 1, 1),
        ("1234567", 0.5, 0.5),
        ("12345678, 87654321", 0, 1),
        ("", 0, 0),
        ("7654321\n1234567", 1, 1),
        ("1,234,567", 0, 0),
    ],
)
def test_a_number_counts_if_it_stands_alone_and_for_lwm_anywhere(text, share, lwm_share):
    assert share_found(text, ["1234567", "7654321"]) == share
    assert lwm_share_found(text, ["1234567", "7654321"]) == lwm_share


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": 8192}, "8192 tokens are more than the model's context data.sequence_length=4096"),
        (
            {"lengths": 300, "cases": cases_of((8, 1))},
            "300 tokens do not hold 8 needles, .*new_tokens=32; use at least 495 ",
        ),
        ({"cases": cases_of((200, 1))}, "needles=200, and there are 76 cities"),
        ({"haystack": "none"}, "eval.needle.haystack is not set, and no validation set is text"),
        ({"haystack": "no/such.txt"}, "eval.needle.haystack='no/such.txt': no such file"),
        ({"haystack": "{texts}/empty.txt"}, "empty.txt': there is no text"),
        ({"haystack": "{texts}"}, "meta.json"),
    ],
)
def test_mistakes_are_named(long, texts, changes, message):
    changes = {"haystack": texts / "prose.txt"} | changes
    with pytest.raises(UserError, match=message):
        NeedlePrompts(
            fake_run(long, **{k: str(v).format(texts=texts) if k == "haystack" else v for k, v in changes.items()})
        )
