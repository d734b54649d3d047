"""tokenizer.json files and SentencePiece models as data.tokenizer. tokenizer_parity_test.py compares ids."""

import json
import re
import shutil

import numpy as np
import pytest
from helpers.tokenizer_files import (
    FAMILIES,
    SPECIAL,
    TEMPLATE,
    byte_level_folder,
    random_strings,
    sentencepiece_model,
    write_settings,
)

from difftx.commands import tokenizer as tokenizer_command
from difftx.data.chat_template import ChatTemplate
from difftx.data.sources import load_sources
from difftx.data.tokenizers import load_tokenizer, padded_size, with_vocabulary
from difftx.errors import UserError
from difftx.inference.generate import TextStream
from difftx.training.fit import fit

pytest.importorskip("tokenizers", reason="make test installs the extra tokenizers")
sentencepiece = pytest.importorskip("sentencepiece", reason="make test installs the extra tokenizers")


SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
PREPEND = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, SPACES]}
WORD_PIECE = {"type": "WordPiece", "prefix": "##", "cleanup": True}


def edited(folder, name, change):
    """Change the object in a JSON file."""
    value = json.loads((folder / name).read_text())
    change(value)
    (folder / name).write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("model_type", "normalization", "byte_fallback"),
    [("bpe", "identity", True), ("unigram", "nmt_nfkc", True), ("bpe", "nfkc", False)],
)
def test_a_sentencepiece_model_is_read_as_the_library_reads_it(tmp_path, model_type, normalization, byte_fallback):
    options = {"normalization": normalization, "byte_fallback": byte_fallback}
    path = sentencepiece_model(tmp_path / "own.model", model_type, **options)
    theirs, ours = sentencepiece.SentencePieceProcessor(model_file=str(path)), load_tokenizer(str(path))
    assert (ours.n_vocab, ours.eot_token, ours.prefix) == (theirs.get_piece_size(), theirs.eos_id(), ())
    for text in random_strings(1000):
        ids = theirs.encode(text)
        assert ours.encode_ordinary(text) == ids
        if byte_fallback:
            assert ours.decode(ids) == theirs.decode(ids)
            # Encoded in two parts, the text has the same characters.
            half = len(text) // 2
            parts = [*ours.encode_ordinary(text[:half]), *ours.encode_ordinary(text[half:], continues=True)]
            if normalization == "identity" and "▁" not in text and half:
                assert ours.decode(parts) == text


@pytest.mark.parametrize("family", [*FAMILIES, "sentencepiece"])
def test_streamed_tokens_give_the_text(family, tmp_path):
    """Characters that take several tokens are held back until they are complete."""
    if family == "sentencepiece":
        tokenizer = load_tokenizer(str(sentencepiece_model(tmp_path / "own.model", "bpe")))
    else:
        tokenizer = load_tokenizer(str(FAMILIES[family](tmp_path / "tokenizer")))
    values, compared = tokenizer.token_bytes, 0
    for text in random_strings(300):
        ids = tokenizer.encode_ordinary(text)
        stream = TextStream(tokenizer, ())
        streamed = "".join(map(stream.add, ids)) + stream.finish()
        # Tokens such as <unk> are not text, and only the decoding of a whole text removes a space in front.
        if all(values[id_] for id_ in ids):
            decoded = tokenizer.decode(ids)
            assert streamed in (decoded, f" {decoded}")
            compared += 1
    assert compared > (10 if family == "Unigram" else 290)


def test_a_text_that_continues_another_has_no_space_in_front(tmp_path):
    folders = [make(tmp_path / family) for family, make in FAMILIES.items()]
    # A normalizer puts the space in front, as in the tokenizer.json of Llama 2.
    folders.append(FAMILIES["BPE with byte fallback"](tmp_path / "Llama 2"))
    edited(folders[-1], "tokenizer.json", lambda value: value.update(normalizer=PREPEND, pre_tokenizer=None))
    for folder in folders:
        tokenizer = load_tokenizer(str(folder))
        values = tokenizer.token_bytes
        for text in ("the", " the", "\nthe"):
            ids = tokenizer.encode_ordinary(text, continues=True)
            if folder.name != "Unigram" or "\n" not in text:
                assert b"".join(values[id_] for id_ in ids) == text.encode(), folder.name


def test_half_a_surrogate_pair_is_encoded_as_the_replacement_character(tmp_path):
    tokenizers = [load_tokenizer(str(byte_level_folder(tmp_path / "json")))]
    tokenizers.append(load_tokenizer(str(sentencepiece_model(tmp_path / "own.model", "bpe"))))
    for tokenizer in (*tokenizers, load_tokenizer("bytes")):
        assert tokenizer.encode_ordinary("a\ud83db") == tokenizer.encode_ordinary("a\ufffdb")


def test_special_tokens_are_ordinary_text_except_in_chats(tmp_path):
    tokenizer = load_tokenizer(str(byte_level_folder(tmp_path / "json")))
    text = "a</s><|user|>"
    assert tokenizer.encode_chat(text)[-2:] == [tokenizer.eot_token, tokenizer.encode_chat("<|user|>")[0]]
    assert tokenizer.decode(tokenizer.encode_ordinary(text)) == text
    assert tokenizer.eot_token not in tokenizer.encode_ordinary(text)
    assert tokenizer.token_bytes[tokenizer.eot_token] == b""


def test_fingerprint_depends_only_on_the_content(tmp_path):
    folder = byte_level_folder(tmp_path / "json")
    shutil.copytree(folder, tmp_path / "moved")
    shutil.copytree(folder, tmp_path / "other")
    edited(tmp_path / "other", "tokenizer_config.json", lambda value: value.update(eos_token="<s>"))
    prints = [load_tokenizer(str(tmp_path / name)).fingerprint for name in ("json", "moved", "other")]
    assert prints[0] == prints[1] != prints[2]
    assert load_tokenizer(str(folder / "tokenizer.json")).fingerprint == prints[0]


SETTINGS = "tokenizer_config.json"


@pytest.mark.parametrize(
    ("name", "content", "message"),  # Content: text, None for no file, or a change of the object in it.
    [
        ("tokenizer.json", None, "the folder has neither tokenizer.json nor tokenizer.model"),
        ("tokenizer.json", "{}", "not a tokenizer.json that `tokenizers` reads"),
        ("tokenizer.json", "{", "line 1 is not JSON"),
        ("tokenizer.json", "[]", "not a tokenizer.json that `tokenizers` reads"),
        ("tokenizer.json", {"decoder": WORD_PIECE}, "its decoder is WordPiece"),
        (SETTINGS, "[]", "expected an object with settings"),
        (SETTINGS, {"added_tokens_decoder": [1]}, "its files are not those of a tokenizer"),
        (SETTINGS, None, r"no file names its end-of-text token \(eos_token\); set data.end_of_text"),
        ("chat_template.jinja", "{% if %}", "the chat template is not valid"),
    ],
)
def test_invalid_tokenizer_files_are_rejected(tmp_path, name, content, message):
    folder = byte_level_folder(tmp_path / "json")
    if isinstance(content, dict):
        edited(folder, name, lambda value: value.update(content))
    else:
        (folder / name).unlink() if content is None else (folder / name).write_text(content)
    with pytest.raises(UserError, match=message) as error:
        load_tokenizer(str(folder))
    assert str(folder) in str(error.value)


def test_the_end_of_text_can_be_given(tmp_path):
    folder = byte_level_folder(tmp_path / "json")
    (folder / "tokenizer_config.json").unlink()
    assert load_tokenizer(str(folder), end_of_text="</s>").eot_token == 1
    with pytest.raises(UserError, match="the end-of-text token 'no such token!' is not in the vocabulary"):
        load_tokenizer(str(folder), end_of_text="no such token!")
    with pytest.raises(UserError, match=r"data.end_of_text='x': data.tokenizer='bytes' has its own"):
        load_tokenizer("bytes", end_of_text="x")


def test_the_vocabulary_size_is_derived(tmp_path, config):
    tokenizer = load_tokenizer(str(byte_level_folder(tmp_path / "json")))
    c = config(model__vocab_size="none", data__tokenizer=tmp_path / "json")
    assert c.model.vocab_size is None
    derived = with_vocabulary(c)
    assert derived.model.vocab_size == padded_size(tokenizer) == -(-tokenizer.n_vocab // 128) * 128
    fit(derived, tokenizer=tokenizer)
    assert with_vocabulary(derived) is derived
    with pytest.raises(AssertionError, match="with_vocabulary"):
        _ = c.model.embeddings


def test_documents_of_text_files_start_with_the_prefix_tokens(tmp_path, config):
    FAMILIES["BPE with byte fallback"](tmp_path / "json")
    (tmp_path / "text.txt").write_text("".join(f"line {i}: the end of it\n" for i in range(9000)))
    c = config(data__tokenizer=tmp_path / "json", data__path=tmp_path / "text.txt", model__vocab_size=1024)
    tokenizer = load_tokenizer(c.data.tokenizer)
    store = load_sources(c.data, tokenizer).train["train"].store
    tokens = store.slice(0, len(store))
    assert (tokens[store.offsets[:-1].astype(int)] == tokenizer.prefix[0]).all()
    assert (tokens[store.offsets[1:].astype(int) - 1] == tokenizer.eot_token).all()


def test_a_tokenizer_is_trained(tmp_path, capsys):
    lines = [json.dumps({"text": text}) for text in (f"{i} squared is {i * i}; the root is {i}." for i in range(3000))]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    flags = ["train", f"--input={tmp_path / 'text.jsonl'}", "--vocab_size=400", "--special_token=<|user|>"]
    for name in ("new/a", "b"):  # Also in a folder that does not exist yet.
        assert tokenizer_command.main([*flags, f"--out={tmp_path / name}"]) == 0
    said = capsys.readouterr().out
    assert (tmp_path / "new/a" / "tokenizer.json").read_bytes() == (tmp_path / "b" / "tokenizer.json").read_bytes()
    tokenizer = load_tokenizer(str(tmp_path / "new/a"))
    assert (tokenizer.n_vocab, tokenizer.eot_token) == (400, 0)
    assert tokenizer.encode_chat("<|user|>") == [1]
    for text in random_strings(300):  # Bytes are tokens, so no text is lost.
        assert tokenizer.decode(tokenizer.encode_ordinary(text)) == text
    assert "trained on 3,000 documents" in said
    assert float(re.search(r"([\d.]+) bytes per token of the first 3,000 documents", said)[1]) > 2
    with pytest.raises(UserError, match="exists already"):
        tokenizer_command.main([*flags, f"--out={tmp_path / 'b'}"])
    with pytest.raises(UserError, match="--vocab_size=100: 256 bytes and the special tokens need at least 257"):
        tokenizer_command.main(["train", "--input=x", "--vocab_size=100", f"--out={tmp_path / 'c'}"])


MESSAGES = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]


def template(text=TEMPLATE):
    return ChatTemplate(text, {"eos_token": "</s>"}, "own")


def test_each_message_of_the_assistant_is_a_turn():
    conversation = [*MESSAGES, {"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]
    first, second = template().turns(conversation)
    assert first == ("<|user|>1+1</s>\n<|assistant|>", "2</s>\n")
    assert second == ("<|user|>1+1</s>\n<|assistant|>2</s>\n<|user|>2+2</s>\n<|assistant|>", "4</s>\n")


def test_a_first_message_of_the_assistant_is_only_a_part_of_the_prompts():
    """A model is never prompted with no message, and many templates read the first message."""
    text = "{% if messages[0]['role'] == 'system' %}!{% endif %}" + TEMPLATE
    [turn] = template(text).turns([{"role": "assistant", "content": "Hello"}, *MESSAGES])
    assert turn == ("<|assistant|>Hello</s>\n<|user|>1+1</s>\n<|assistant|>", "2</s>\n")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "not a list of at least one message"),
        ([*MESSAGES, None], "message 3 is not an object with role and content"),
        ([MESSAGES[1]], "no message has the role assistant after the first"),
    ],
)
def test_conversations_without_a_target_are_refused(messages, message):
    with pytest.raises(UserError, match=message):
        template().turns(messages)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses the messages: roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "refuses the messages: access to attribute '__class__'"),
        ("{{ [1, 2] | random }}", "No filter named 'random'"),
        ("{{ lipsum() }}", "'lipsum' is undefined"),
        ("{% for m in messages %}{{ messages | length }}{% endfor %}", "cannot be told from its prompt"),
    ],
)
def test_templates_run_in_a_sandbox_and_must_extend_the_prompt(text, message):
    with pytest.raises(UserError, match=message):
        template(text).turns(MESSAGES)


def test_a_template_has_the_functions_of_transformers():
    text = "{{ {'b': '<é>', 'a': 1} | tojson }}{% generation %}{{ strftime_now('%Y') | length }}{% endgeneration %}"
    assert template(text).render(MESSAGES, add_generation_prompt=False) == '{"b": "<é>", "a": 1}4'


def test_settings_of_a_sentencepiece_folder(tmp_path):
    sentencepiece_model(tmp_path / "tokenizer.model", "bpe")
    write_settings(tmp_path, add_bos_token=True)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.prefix == (1,)
    write_settings(tmp_path, add_bos_token=False)
    without = load_tokenizer(str(tmp_path))
    assert (without.prefix, without.eot_token) == ((), tokenizer.eot_token)
    assert without.fingerprint != tokenizer.fingerprint
    ids = tokenizer.encode_chat(f"{SPECIAL[1]}the</s>the")
    # No piece has the space in front that SentencePiece adds to a text.
    assert b"".join(tokenizer.token_bytes[id_] for id_ in ids) == b"thethe"
    assert tokenizer.decode(ids) == f"{SPECIAL[1]}the</s>the"
    assert np.sum(np.array(ids) == tokenizer.eot_token) == 1
