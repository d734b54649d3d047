"""The command `difftx chat`, which compiles its programs once, whatever the user enters."""

import dataclasses
import json

import numpy as np
import pytest
from helpers.inference_models import language_model

from difftx.commands import generate as generate_command
from difftx.commands.chat import converse
from difftx.data.chat_template import ChatTemplate
from difftx.data.tokenizers import load_tokenizer
from difftx.errors import UserError
from difftx.inference import decode, load
from difftx.inference.generate import Request, generate
from difftx.inference.sampling import GREEDY, Sampling

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
HOT = Sampling(repetition_penalty=None, temperature=0.8, top_k=None, top_p=None)


def said(lm, *lines, **options):
    pieces = []
    converse(lm, lines, pieces.append, **options)
    return pieces


def alone(lm, prompt, seed, tokens=8, sampling=HOT):
    request = Request(prompt=prompt, new_tokens=tokens, seed=seed)
    return generate(lm, [request], sampling)[0].text


@pytest.mark.long
def test_nothing_is_compiled_after_the_first_answer(config, mesh_of):
    lm = language_model(config, mesh_of())
    said(lm, "/tokens 40", "/top_p 0.9", "the first line")
    first = programs()
    said(lm, "/tokens 40", "/top_p 0.9", "another", "/temperature 0.3", "line", "/top_p 0.5", "/seed 9", "line")
    assert programs() == first


def programs():
    """Return the number of programs that were compiled for each step of generation."""
    return [step._cache_size() for step in (decode.new_cache, decode._prefill_chunk, decode._decode_block)]


@pytest.mark.long
def test_answers_are_those_of_generate_and_settings_hold(config, mesh_of):
    lm = language_model(config, mesh_of())
    pieces = said(lm, "/tokens 8", "/seed 3", "é 1", "é 1", "/temperature 0", "é 1")
    text = "".join(pieces)
    prompt = list("é 1".encode())
    later = int(np.random.SeedSequence([3, 1]).generate_state(1)[0])
    expected = [alone(lm, prompt, 3), alone(lm, prompt, later), alone(lm, prompt, 5, sampling=GREEDY)]
    assert text == "".join(answer + "\n" * (not answer.endswith("\n")) for answer in expected)
    assert expected[0] != expected[1]


def with_template(lm):
    tokenizer = load_tokenizer("bytes")
    tokenizer.chat_template = ChatTemplate(TEMPLATE, {}, "bytes")
    return dataclasses.replace(lm, tokenizer=tokenizer)


def test_a_conversation_is_written_by_the_template(config, mesh_of):
    lm = with_template(language_model(config, mesh_of()))
    answers = "".join(said(lm, "/tokens 4", "/temperature 0", "a", "b", "/reset", "a", system="S"))
    first = alone(lm, list(b"[system]S[user]a[assistant]"), 0, tokens=4, sampling=GREEDY)
    asked = f"[system]S[user]a[assistant]{first.rstrip()}[user]b[assistant]".encode()
    second = alone(lm, list(asked), 0, tokens=4, sampling=GREEDY)
    lines = [text + "\n" * (not text.endswith("\n")) for text in (first, second, first)]
    assert answers == "".join(lines)


def test_answers_are_streamed_and_ctrl_c_ends_one_but_not_the_loop(config, mesh_of):
    lm = language_model(config, mesh_of())
    streamed = said(lm, "/tokens 100", "/temperature 0", "a")
    assert len(streamed) > 4  # Pieces of at most 16 tokens.
    pieces = []

    def write(text):
        pieces.append(text)
        if len(pieces) == 1:
            raise KeyboardInterrupt

    converse(lm, ["/tokens 100", "/temperature 0", "a", "/tokens 4", "a"], write)
    whole = alone(lm, list(b"a"), 0, tokens=100, sampling=GREEDY)
    assert "".join(streamed).removesuffix("\n") == whole.removesuffix("\n")
    assert pieces[0] == streamed[0]
    after = alone(lm, list(b"a"), 0, tokens=4, sampling=GREEDY)
    assert "".join(pieces[1:]).endswith(after + "\n" * (not after.endswith("\n")))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/temperature hot", "error: /temperature='hot': expected a number\n"),
        ("/temperature -1", "error: temperature=-1.0 must be 0"),
        ("/top_p 2", "error: top_p=2.0 must be more than 0"),
        ("/tokens none", "error: /tokens='none': expected an integer\n"),
        ("/seed 5000000000", "error: /seed=5000000000 must lie in 0 …"),
        ("/topp 1", "error: /topp: no such command. Did you mean 'top_p'?\n"),
        ("x" * 200, "error: the line has 200 tokens, and the model's context data.sequence_length=128; shorten it"),
    ],
)
def test_mistakes_are_one_line_and_the_loop_continues(config, mesh_of, line, message):
    lm = language_model(config, mesh_of())
    answer, helped = said(lm, line, "", "/help", "/quit", "/seed x")
    assert answer.startswith(message)
    assert helped.startswith("/temperature")


@pytest.mark.long
def test_a_file_of_conversations_is_completed_as_the_template_writes_them(config, mesh_of, tmp_path, monkeypatch):
    plain = language_model(config, mesh_of())
    monkeypatch.setattr(load, "load", lambda *_: plain)
    message = {"role": "user", "content": "a"}
    lines = [{"messages": [message]}, {"prompt": "[user]a[assistant]", "id": 1}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out.jsonl"
    flags = [f"--prompts={tmp_path / 'prompts.jsonl'}", f"--out={out}", "--temperature=0", "--new_tokens=4"]
    with pytest.raises(UserError, match=r"prompts\.jsonl: line 1: messages needs a chat template, and the tokenizer"):
        generate_command.main([f"--workdir={tmp_path}", *flags])
    monkeypatch.setattr(load, "load", lambda *_: with_template(plain))
    assert generate_command.main([f"--workdir={tmp_path}", *flags]) == 0
    first, second = map(json.loads, out.read_text().splitlines())
    assert (first["messages"], second["id"]) == ([message], 1)
    assert first["completion"] == second["completion"] != ""
    (tmp_path / "prompts.jsonl").write_text('{"messages": "a"}')
    with pytest.raises(UserError, match="line 1: messages: not a list of at least one message"):
        generate_command.main([f"--workdir={tmp_path}", *flags])
