"""Verdicts of a judge model behind an endpoint that fails in many ways."""

import contextlib
import dataclasses
import json
import logging
import random
import threading
import time
import types

import pytest
from conftest import ROOT
from helpers.chat_server import KEY, ChatServer, completion

from difftx.config.recipes import load_config
from difftx.errors import RunError, UserError
from difftx.evals.hallucination import chat
from difftx.evals.hallucination.chat import ChatEndpoint
from difftx.evals.hallucination.judges import Case, JudgeModel, read_verdict
from difftx.progress import Work

CONFIG = load_config(f"{ROOT}/configs/quickstart.py:diff", {"eval.hallucination.judge_model": "gpt-4o-2024-08-06"}).eval
NO_WORK = Work(enabled=False)


def judge_of(server, folder, *, model="gpt-4o-2024-08-06", temperature=0.0, **changes):
    settings = dataclasses.replace(CONFIG.hallucination, judge_model=model, judge_temperature=temperature)
    reach = dataclasses.replace(CONFIG.judge, **{"base_url": server.url, "timeout_seconds": 20.0} | changes)
    return JudgeModel(settings, reach, folder / "verdicts.jsonl")


def case_of(number):
    """Return a case. Its answer is wrong for every third number."""
    wrong = number % 3 == 0
    return Case("question_answering", f"Text {number}.", f"What {number}?", (f"it {number}", "or so"),
                f"{'not ' if wrong else ''}it {number}")  # fmt: skip


CASES = [case_of(number) for number in range(24)]
EXPECTED = [number % 3 != 0 for number in range(24)]


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr(chat, "BACKOFF_SECONDS", 0.01)


def accurate(judge, cases=CASES):
    return [verdict.accurate for verdict in judge.verdicts(cases, "hotpotqa", NO_WORK)]


def entries(folder):
    return [json.loads(line) for line in (folder / "verdicts.jsonl").read_text().splitlines()]


def test_verdicts_come_from_the_endpoint_and_are_requested_once(tmp_path, capsys):
    """At most `concurrency` requests are under way."""
    together = threading.Barrier(3)
    with ChatServer(lambda number, prompt: together.wait(30) and None) as server:
        judge = judge_of(server, tmp_path, concurrency=3)
        assert accurate(judge, [*CASES, CASES[4]]) == [*EXPECTED, True]
        assert (len(server.asked), server.most) == (len(CASES), 3)
        assert "24 replies, 24,000 tokens in, 240 out\n" in capsys.readouterr().out
        assert judge.details()["tokens_in"] == 24_000
        assert accurate(judge_of(server, tmp_path, concurrency=1)) == EXPECTED
        assert "24 verdicts, 0 of them to be asked: 0 replies, 0 tokens in, 0 out\n" in capsys.readouterr().out
        assert len(server.asked) == len(CASES)
    assert all(entry["tokens_in"] == 1000 and json.loads(entry["reply"]) for entry in entries(tmp_path))
    first = server.asked[0]
    assert (first["model"], first["temperature"], len(first["messages"])) == ("gpt-4o-2024-08-06", 0, 1)
    assert all(part in first["messages"][0]["content"] for part in ("Text ", "What ", "- it ", "- or so"))


def test_another_case_model_temperature_or_endpoint_is_asked(tmp_path):
    """A slash at the end of the address makes no difference."""
    with ChatServer() as server, ChatServer(lambda *_: {"reply": completion('{"accurate": true}')}) as other:
        assert accurate(judge_of(server, tmp_path), CASES[:1]) == [False]
        changed = [CASES[0]._replace(document="Other."), CASES[0]._replace(answer="x"), CASES[0]._replace(question="?")]
        accurate(judge_of(server, tmp_path), changed)
        accurate(judge_of(server, tmp_path, model="o9"), CASES[:1])
        accurate(judge_of(server, tmp_path, temperature=None), CASES[:1])
        for _ in range(2):
            assert accurate(judge_of(other, tmp_path), CASES[:1]) == [True]
            assert accurate(judge_of(server, tmp_path, base_url=f"{server.url}/"), CASES[:1]) == [False]
        assert (len(server.asked), len(other.asked)) == (6, 1)
    assert "temperature" not in server.asked[-1]


FAULTS = [
    {"hang": True},
    {"drop": True},
    {"half": True},
    {"status": 429, "headers": {"Retry-After": "0"}},
    {"status": 429, "headers": {"Retry-After": "soon"}},
    {"status": 503, "reply": b"<html>busy, " + KEY.encode() + b"</html>"},
    {"status": 500, "reply": [1]},
    {"status": 529, "reply": {"error": "overloaded"}},
    {"reply": b'{"choices": [{"mess'},
    {"reply": b"\xff\xfe"},
    {"reply": {"choices": []}},
    {"reply": {"error": {"message": f"busy, {KEY}"}}},
    {"reply": completion(None)},
    {"reply": completion("Maybe.", usage=None)},
    {"reply": completion("It is accurate, I would say.")},
    {"reply": completion('{"accurate": "yes"}')},
    {"reply": completion('{"why": "' + KEY)},
]


def test_no_verdict_is_lost_with_a_faulty_endpoint(tmp_path, caplog, capfd):
    """Each question meets three faults, and then gets exactly one verdict."""
    caplog.set_level(logging.DEBUG)
    rng = random.Random(3)
    left = {number: rng.sample(FAULTS[1:], 3) for number in range(24)}
    for number, fault in enumerate(FAULTS):
        left[number][0] = fault

    def behave(number, prompt):
        question = int(prompt.split("Text ")[1].split(".")[0])
        return (left[question].pop() if left[question] else {}) | {"slow": rng.random() / 20}

    with ChatServer(behave) as server:
        judge = judge_of(server, tmp_path, timeout_seconds=2.0, concurrency=8)
        assert accurate(judge) == EXPECTED
        met = len(server.asked)
        assert met >= 4 * 24
        assert not any(left.values())
        assert accurate(judge_of(server, tmp_path)) == EXPECTED
        assert len(server.asked) == met
    noted = entries(tmp_path)
    assert sum(entry["accurate"] is not None for entry in noted) == 24
    assert len({entry["key"] for entry in noted}) == 24
    # Replies without a verdict were charged, too.
    assert judge.details()["replies"] == len(noted) > 24
    out, err = capfd.readouterr()
    assert KEY not in out + err + caplog.text + (tmp_path / "verdicts.jsonl").read_text()
    assert "(key)" in (tmp_path / "verdicts.jsonl").read_text()


class Killed(BaseException):
    pass


class Dying(Work):
    """A progress display that raises `Killed` after `after` verdicts."""

    def __init__(self, after):
        super().__init__(enabled=False)
        self.left = after

    @contextlib.contextmanager
    def task(self, what, total):
        def advance(parts):
            self.left -= parts
            if not self.left:
                raise Killed

        yield advance


def test_requests_in_flight_at_a_kill_are_recorded_and_the_rest_sent_later(tmp_path):
    with ChatServer() as server:
        for after in (1, 5):
            with pytest.raises(Killed):
                judge_of(server, tmp_path, concurrency=3).verdicts(CASES, "hotpotqa", Dying(after))
            assert len(entries(tmp_path)) == len(server.asked) < len(CASES)
        with (tmp_path / "verdicts.jsonl").open("a") as file:
            file.write('{"key": "half a li')
        assert accurate(judge_of(server, tmp_path)) == EXPECTED
        assert set(server.charged.values()) == {1}
        assert len(server.asked) == len(CASES)
        assert accurate(judge_of(server, tmp_path)) == EXPECTED
        assert len(server.asked) == len(CASES)


def test_persistent_failure_ends_the_suite_without_losing_verdicts(tmp_path, monkeypatch):
    def behave(number, prompt):
        return {"status": 503, "reply": {"error": {"message": f"down, Bearer {KEY}"}}} if "Text 20." in prompt else None

    with ChatServer(behave) as server:
        with pytest.raises(RunError, match=r"eval.judge.attempts=3 failed, the last: HTTP 503: down, Bearer \(key\)"):
            accurate(judge_of(server, tmp_path, attempts=3, concurrency=2))
        assert len(entries(tmp_path)) >= 18
        server.behave = lambda number, prompt: None
        assert accurate(judge_of(server, tmp_path)) == EXPECTED
        assert set(server.charged.values()) == {1}
        url = server.url
    with pytest.raises(RunError, match="attempts=2 failed, the last: ConnectError"):
        accurate(judge_of(types.SimpleNamespace(url=url), tmp_path / "none", attempts=2), CASES[:1])


def test_retry_after_is_respected(tmp_path):
    def behave(number, prompt):
        return {"status": 429, "headers": {"Retry-After": "1"}} if number == 0 else None

    with ChatServer(behave) as server:
        assert accurate(judge_of(server, tmp_path), CASES[:1]) == EXPECTED[:1]
        assert server.arrived[1] - server.arrived[0] >= 1


HOSTILE = "\x1b]0;title\x07 \x9b31m \x7f \u202e"


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"status": 404, "reply": {"error": {"message": f"no model for {KEY}"}}}, r"HTTP 404: no model for \(key"),
        ({"status": 404, "reply": {"error": {"message": HOSTILE}}}, r"\\x1b\]0;title\\x07 \\x9b31m \\x7f \\u202e"),
        ({"status": 422, "reply": b"-" * 190 + KEY.encode()}, r"HTTP 422: -{190}\(key\);"),
        ({"status": 400, "reply": b""}, "refuses the request: HTTP 400: no message; see eval.judge.base_url"),
        ({"status": 401}, r"refuses the key in the environment variable OPENAI_API_KEY \(HTTP 401\)"),
        ({"status": 307, "headers": {"Location": "{other}/chat/completions"}}, "refuses the request: HTTP 307"),
    ],
)
def test_permanent_errors_are_not_retried_and_show_no_key(tmp_path, capfd, caplog, how, message):
    """A redirect is not followed, because the key would go with it."""
    caplog.set_level(logging.DEBUG)
    with ChatServer() as other:
        headers = {name: text.replace("{other}", other.url) for name, text in how.get("headers", {}).items()}
        with ChatServer(lambda number, prompt: how | {"headers": headers}) as server:
            with pytest.raises(UserError, match=message) as error:
                accurate(judge_of(server, tmp_path, concurrency=2))
            assert len(server.asked) <= 2
        assert not other.asked
    assert str(error.value).isprintable()
    assert KEY not in str(error.value) + caplog.text + "".join(capfd.readouterr())
    assert not (tmp_path / "verdicts.jsonl").exists()


@pytest.mark.parametrize(
    ("url", "text", "message"),
    [
        ("http://judge.example/v1", KEY, r"base_url=http://.*: a key is sent over https, or over"),
        ("http://127.0.0.1.example/v1", KEY, r"base_url=http://.*: a key is sent over https, or over"),
        *(("https://judge.example/v1", text, "is not set to a key") for text in (None, " ", "sk-1 sk-2", "sk \u00e9")),
        ("http://localhost:1/v1", KEY, None),
        ("http://[::1]:8/v1", KEY, None),
    ],
)
def test_a_key_is_sent_only_over_https_or_within_this_machine(monkeypatch, url, text, message):
    monkeypatch.setenv("OPENAI_API_KEY", text) if text is not None else monkeypatch.delenv("OPENAI_API_KEY")
    settings = dataclasses.replace(CONFIG.judge, base_url=url)
    with contextlib.nullcontext() if message is None else pytest.raises(UserError, match=message):
        ChatEndpoint(settings)
    ChatEndpoint(dataclasses.replace(settings, key_variable=None))


def test_an_endpoint_that_needs_a_key_names_its_field(tmp_path):
    with ChatServer() as server, pytest.raises(UserError, match=r"without a key; set eval.judge.key_variable"):
        accurate(judge_of(server, tmp_path, key_variable=None))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        *((part, r"no complete answer within 0\.5 s") for part in ("header", "body", "unsized_body")),
        ("flood", "the response has more than 8 MiB"),
    ],
)
def test_a_response_that_does_not_end_is_aborted(tmp_path, part, message):
    with ChatServer(lambda number, prompt: {"drip": part}) as server:
        began = time.monotonic()
        with pytest.raises(RunError, match=f"attempts=1 failed, the last: {message}"):
            accurate(judge_of(server, tmp_path, attempts=1, timeout_seconds=20 if part == "flood" else 0.5), CASES[:1])
        assert part == "flood" or 0.5 <= time.monotonic() - began < 10
        assert server.reached.wait(10)  # The connection is closed, too.
    assert 1 < server.dripped < 32 * 2**20  # Socket buffers may hold data in flight.


HOSTILE = "\x1b]0;title\x07 \x9b31m \x7f \u202e"


@pytest.mark.parametrize(
    ("status", "shown"), [(404, f"{KEY[:9]}****{KEY[-7:]}"), (503, f"{KEY}{KEY[:6]}"), (200, KEY[:-1] + "!")]
)
def test_parts_of_the_key_are_masked_in_messages(tmp_path, status, shown):
    how = {"status": status, "reply": {"error": {"message": f"wrong key {shown}, {'x' * 99} {shown}"}}}
    masked = pytest.raises((UserError, RunError), match=r"wrong key \(key\)")
    with ChatServer(lambda number, prompt: how) as server, masked as error:
        accurate(judge_of(server, tmp_path, attempts=1), CASES[:1])
    text = str(error.value)
    assert not any(KEY[at : at + 6] in text for at in range(len(KEY) - 5))


@pytest.mark.parametrize("name", ["HOME", "DATABASE_URL", "KEYS", "MY_KEY_FILE"])
def test_only_variables_for_keys_are_sent(monkeypatch, name):
    monkeypatch.setenv(name, KEY)
    with pytest.raises(UserError, match=rf"key_variable='{name}': only a variable whose name ends in _KEY"):
        ChatEndpoint(dataclasses.replace(CONFIG.judge, key_variable=name))


def test_a_proxy_does_not_see_a_request_within_this_machine(tmp_path, monkeypatch):
    with ChatServer() as server, ChatServer() as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        assert accurate(judge_of(server, tmp_path), CASES[:2]) == EXPECTED[:2]
        assert (len(server.asked), len(proxy.asked)) == (2, 0)


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ('{"why": "so", "accurate": true}', (True, "so")),
        ('```json\n{"accurate": false}\n```', (False, "")),
        ('It quotes {"accurate": true}. {"why": {"a": 1}, "accurate": false} End {', (False, "{'a': 1}")),
        ('{"accurate": 1}', None),
        ('{"accurate": "true"}', None),
        ('{"accurate": true', None),
        ("[true]", None),
        ("", None),
    ],
)
def test_verdict_is_extracted_from_surrounding_text(text, verdict):
    assert read_verdict(text) == verdict
