"""Streamed text, which must not depend on the boundaries of tokens."""

import itertools
import random
import types

import pytest

from difftx.inference.generate import TextStream


def random_tokens(data, seed):
    """Split bytes into tokens at random positions."""
    rng = random.Random(seed)
    ends = sorted(rng.sample(range(1, len(data)), rng.randint(0, len(data) - 1)))
    return [data[a:b] for a, b in itertools.pairwise([0, *ends, len(data)])]


def text_stream(tokens, stop=()):
    """Return a stream of tokens, which are bytes, or a special token's name as a str."""
    values = [token if isinstance(token, bytes) else b"" for token in tokens]
    return TextStream(types.SimpleNamespace(token_bytes=values, decode=lambda ids: tokens[ids[0]]), stop)


def stream(tokens, stop=()):
    text = text_stream(tokens, stop)
    pieces = []
    for token in range(len(tokens)):
        pieces.append(text.add(token))
        if text.stopped:
            break
    pieces.append(text.finish())
    assert "".join(pieces) == text.text
    return text, pieces


@pytest.mark.parametrize("seed", range(30))
def test_characters_are_whole_wherever_tokens_end(seed):
    data = "aé€😀\n".encode() + b"\xff\xe2\x82z" + "ü".encode()[:1]  # The second part is not UTF-8.
    text, pieces = stream(random_tokens(data, seed))
    assert text.text == data.decode(errors="replace")
    assert "\ufffd" not in "".join(pieces)[:5]


# Stop strings and the expected text, which ends before the stop string that is complete first. If several stop strings
# are complete at the same character, it ends before the longest.
STOPS = [
    (["\n\n"], "Q: one\nA: two"),
    (["A:"], "Q: one\n"),
    (["never"], "Q: one\nA: two\n\n\nQ: three aaab"),
    (["two\n\n", "wo"], "Q: one\nA: t"),
    (["o\n\n\n", "\n\nQ", "\n\n\nQ"], "Q: one\nA: tw"),
    (["aab"], "Q: one\nA: two\n\n\nQ: three a"),
    (["e aaab", "aaab"], "Q: one\nA: two\n\n\nQ: thre"),
]


@pytest.mark.parametrize(("stop", "expected"), STOPS)
def test_stop_strings_are_found_across_tokens(stop, expected):
    data = b"Q: one\nA: two\n\n\nQ: three aaab"
    for seed in range(50):
        text, _ = stream(random_tokens(data, seed), stop)
        assert text.text == expected
        assert text.stopped == (stop != ["never"])


def test_text_that_cannot_become_a_stop_string_is_not_held_back():
    text = text_stream([b"ab", b"c", b"x", b"abc"], ["abcd"])
    assert [text.add(i) for i in range(4)] == ["", "", "abcx", ""]
    assert text.finish() == "abc"


# Tokens, stop strings, the text and what follows the stop string in the text with names of special tokens.
SPECIAL_STOPS = [
    ([b"42", "<|im_end|>", b"\nuser"], ["<|im_end|>"], "42", 1),
    ([b"42\n", "<|im_end|>", b"\nus", b"er x"], ["\n<|im_end|>\nuser"], "42", 4),
    ([b"a", "<|a|>", "<|b|>", b"c"], ["<|a|><|b|>"], "a", 3),
    ([b"a", "<|a|>", b"b", "<|b|>", b"c"], ["<|a|><|b|>"], "abc", None),
    ([b"a", "<|e|>", "<|e|><|f|>", b"c"], ["<|e|><|f|>"], "a", 3),  # One name begins another.
    ([b"a<|im", b"_end|>b"], ["<|im_end|>"], "a", 2),  # Ordinary text with the name.
    ([b"x", "<|a|>", b"y<|", b"b"], ["|>y"], "x", 3),
    ([b"x a", "<|a|>", b"b", b"c"], ["ab"], "x ", 3),  # A string of the text without the names.
    ([b"x a", "<|a|>", b"bc"], ["<|a|>bc", "ab"], "x ", 3),
    ([b"\xe2\x82", "<|a|>", b"\xac!"], ["!"], "\u20ac", 3),
    ([b"a", "<|a|>", "<|a|>", b"c"], ["ab"], "ac", None),
]


@pytest.mark.parametrize(("tokens", "stop", "expected", "read"), SPECIAL_STOPS)
def test_names_of_special_tokens_are_searched_but_not_text(tokens, stop, expected, read):
    text, _ = stream(tokens, stop)
    assert (text.text, text.stopped) == (expected, read is not None)
    if text.stopped:
        assert not stream(tokens[: read - 1], stop)[0].stopped
