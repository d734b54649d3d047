"""Compare tokenizers that are loaded from files with transformers' fast tokenizers, which do not need torch."""

import itertools
import json
import random
import re

import pytest
from helpers.tokenizer_files import FAMILIES, SPECIAL, TEMPLATE, random_strings, sentencepiece_model, write_settings

from difftx.data.chat_template import REASONING
from difftx.data.tokenizers import load_tokenizer
from difftx.inference.generate import TextStream

transformers = pytest.importorskip("transformers", reason="make test and make parity install it")

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Héllo </s> 漢字\n", "name": None},
    {"role": "assistant", "content": "Hi!"},
    {"role": "user", "content": "Bye"},
]

BLOCKS = """\
{%- set names = namespace(count=0) %}
{{ bos_token }}
{% for message in messages %}
    {% if message.role == "system" %}
        {% continue %}
    {% endif %}
    {% set names.count = names.count + 1 %}
{{ names.count }} {{ message | tojson }} {% generation %}{{ message.content | trim }}{% endgeneration %}

{% endfor %}
{% if add_generation_prompt %}
<|assistant|>
{% endif %}
"""


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_ten_thousand_strings_are_encoded_and_decoded_as_by_transformers(family, tmp_path):
    folder = FAMILIES[family](tmp_path / "tokenizer")
    theirs, ours = transformers.PreTrainedTokenizerFast.from_pretrained(folder), load_tokenizer(str(folder))
    literal = transformers.PreTrainedTokenizerFast.from_pretrained(folder, split_special_tokens=True)
    assert (ours.n_vocab, ours.eot_token) == (len(theirs), theirs.eos_token_id)
    for number, text in enumerate(random_strings(10_000)):
        if number % 10 == 0:
            text += SPECIAL[number // 10 % 3] + text[:5]
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode_chat(text) == ids, repr(text)
        assert ours.decode(ids) == theirs.decode(ids), repr(text)
        ordinary = ours.encode_ordinary(text)
        assert ordinary == literal(text, add_special_tokens=False)["input_ids"], repr(text)
        if number % 10 == 0:
            assert ours.encode_prompt(text) == literal(text)["input_ids"], repr(text)
    assert (family == "BPE with byte fallback") == bool(ours.prefix)


@pytest.mark.parametrize("family", ["byte-level BPE", "BPE with byte fallback"])  # The second begins texts with <s>.
@pytest.mark.parametrize("settings", [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": False}])
def test_the_file_decides_on_the_first_token_whatever_the_settings_say(family, settings, tmp_path):
    folder = FAMILIES[family](tmp_path / "tokenizer")
    write_settings(folder, **settings)
    theirs, ours = transformers.PreTrainedTokenizerFast.from_pretrained(folder), load_tokenizer(str(folder))
    assert ours.encode_prompt("a text") == theirs("a text")["input_ids"]


@pytest.mark.parametrize("family", ["byte-level BPE", "Unigram"])
@pytest.mark.parametrize("name", ["</s>", "<|user|>"])
def test_tokens_that_settings_name_are_special_whatever_the_file_says(family, name, tmp_path):
    folder = FAMILIES[family](tmp_path / "tokenizer")
    raw = json.loads((folder / "tokenizer.json").read_text())
    next(token for token in raw["added_tokens"] if token["content"] == name).update(special=False, lstrip=True)
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    theirs, ours = transformers.PreTrainedTokenizerFast.from_pretrained(folder), load_tokenizer(str(folder))
    text, options = f"ab {name} c", {"add_special_tokens": False}
    assert ours.encode_chat(text) == theirs(text, **options)["input_ids"]
    assert ours.encode_ordinary(text) == theirs(text, split_special_tokens=True, **options)["input_ids"]


@pytest.mark.parametrize("family", ["byte-level BPE", "BPE with byte fallback"])
def test_texts_stop_where_lm_eval_stops_models_of_transformers(family, tmp_path):
    """Compare with lm-eval's `MultiTokenEOSCriteria` and `postprocess_generated_text`, written with theirs.decode.

    If a stop string has ordinary characters before a special token, lm-eval leaves these in the text, and difftx not.
    """
    folder = FAMILIES[family](tmp_path / "tokenizer")
    theirs, ours = transformers.PreTrainedTokenizerFast.from_pretrained(folder), load_tokenizer(str(folder))
    draw, stopped = random.Random(0), dict.fromkeys(("special", "ordinary", "both"), 0)
    for number, text in enumerate(random_strings(300)):
        parts = [part for part in re.findall(r"[^▁ ]{1,4}", text[:30])] or ["x"]
        after = [draw.choice([*SPECIAL, SPECIAL[0] + SPECIAL[1], ""]) for _ in parts]
        ids = theirs("the" + "".join(map("".join, zip(parts, after, strict=True))), add_special_tokens=False)[
            "input_ids"
        ]
        i, kind = draw.randrange(len(parts)), list(stopped)[number % 3]
        ordinary = "" if kind == "special" else parts[i][draw.randrange(len(parts[i])) :]
        stop = ordinary + ("" if kind == "ordinary" else after[i] or SPECIAL[2])
        # The criterion decodes special tokens too, and the text, which is cut afterwards, has none.
        read = next((n for n in range(1, len(ids) + 1) if stop in theirs.decode(ids[:n])), len(ids))
        expected = theirs.decode(ids[:read], skip_special_tokens=True).split(stop)[0]
        stream = TextStream(ours, [stop])
        found = "".join(map(stream.add, ids[:read])) + stream.finish()
        if stop in theirs.decode(ids[:read]):
            assert stream.stopped
            stopped[kind] += 1
            if kind == "both":
                expected = expected.removesuffix(ordinary)
        assert found.removeprefix(" ") == expected, (ids, stop)  # Only the decoding of a whole text removes the space.
    assert min(stopped.values()) > 40


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("template", [TEMPLATE, BLOCKS], ids=["line", "blocks"])
def test_conversations_are_rendered_as_by_transformers(family, prompt, template, tmp_path):
    folder = FAMILIES[family](tmp_path / "tokenizer")
    (folder / "chat_template.jinja").write_text(template)
    theirs, ours = transformers.PreTrainedTokenizerFast.from_pretrained(folder), load_tokenizer(str(folder))
    text = ours.chat_template.render(CONVERSATION, add_generation_prompt=prompt)
    assert text == theirs.apply_chat_template(CONVERSATION, tokenize=False, add_generation_prompt=prompt)
    ids = theirs.apply_chat_template(CONVERSATION, add_generation_prompt=prompt, return_dict=False)
    assert ours.encode_chat(text) == ids


@pytest.mark.parametrize("names", [names for n in range(4) for names in itertools.permutations(REASONING, n)])
def test_reasoning_has_the_names_of_transformers(names, tmp_path):
    """The order of the keys counts too, because templates may write a whole message as JSON."""
    message = {"role": "assistant", "content": "5"} | {name: f"by {name}" for name in names}
    conversations = [[message], [message | dict.fromkeys(names[:1])], [message | {"thinking": ""}]]
    folder = FAMILIES["byte-level BPE"](tmp_path / "tokenizer")
    (folder / "chat_template.jinja").write_text(
        "{{ messages | tojson }}{% if messages[0].thinking %}<think>{{ messages[0].thinking }}</think>{% endif %}"
    )
    theirs, ours = transformers.PreTrainedTokenizerFast.from_pretrained(folder), load_tokenizer(str(folder))
    for conversation in conversations:
        text = ours.chat_template.render(conversation, add_generation_prompt=False)
        assert text == theirs.apply_chat_template(conversation, tokenize=False)


def test_sentencepiece_model_encodes_as_llama_tokenizer(tmp_path):
    """Skip texts that begin with a space. The library adds another space before them, and LlamaTokenizer does not."""
    sentencepiece_model(tmp_path / "tokenizer.model", "bpe")
    write_settings(tmp_path)
    theirs, ours = transformers.LlamaTokenizer.from_pretrained(tmp_path), load_tokenizer(str(tmp_path))
    compared = 0
    for text in random_strings(2000):
        if not text.startswith((" ", "▁")):
            compared += 1
            ids = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            assert ours.encode_ordinary(text) == ids, repr(text)
            assert ours.decode(ids) == theirs.decode(ids), repr(text)
    assert compared > 1600
    text = ours.chat_template.render(CONVERSATION, add_generation_prompt=True)
    assert ours.encode_chat(text) == theirs(text, add_special_tokens=False)["input_ids"]
