"""Conversations in a store: the token ids of prompts and answers, and the tokens that count in the loss."""

import hashlib
import itertools
import json

import numpy as np
import pytest
from conftest import replace
from helpers.data_prepare import prepared, refused
from helpers.tokenizer_files import FAMILIES, TEMPLATE, sentencepiece_model, write_settings

from difftx.data.packing import PackedRows
from difftx.data.sources import load_corpus, open_split
from difftx.data.store import open_store, read_meta
from difftx.data.tokenizers import load_tokenizer
from difftx.errors import UserError

pytest.importorskip("tokenizers", reason="make test installs the extra tokenizers")
pytest.importorskip("sentencepiece", reason="make test installs the extra tokenizers")

CONVERSATIONS = [
    {
        "id": i,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": f"{i}+{i}"},
            {"role": "assistant", "content": str(2 * i)},
            {"role": "user", "content": "naïve 漢字?"},
            {"role": "assistant", "content": f"No {i}"},
        ],
    }
    for i in range(4)
]


def flags_of(tmp_path, tokenizer, records):
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, records)))
    flags = [f"--input={tmp_path / 'chats.jsonl'}", f"--tokenizer={tokenizer}", "--valid_fraction=0"]
    return [*flags, "--messages_field=messages"]


def store_of(tmp_path, tokenizer, records, *flags):
    prepared(tmp_path / "store", *flags_of(tmp_path, tokenizer, records), *flags)
    return open_store(tmp_path / "store", "train")


@pytest.mark.parametrize("family", ["byte-level BPE", "sentencepiece"])
def test_only_messages_of_the_assistant_count_in_the_loss(tmp_path, family):
    folder = tmp_path / "tokenizer"
    if family == "sentencepiece":
        folder.mkdir()
        sentencepiece_model(folder / "tokenizer.model", "bpe")
        write_settings(folder)
    else:
        FAMILIES[family](folder)
    store = store_of(tmp_path, folder, CONVERSATIONS, "--id_field=id")
    assert len(store.offsets) - 1 == len(CONVERSATIONS)
    encoding = load_tokenizer(str(folder))
    tokens, ranges = store.slice(0, len(store)).tolist(), store.counted.tolist()
    counted = [encoding.decode(tokens[start:stop]) for start, stop in ranges]
    assert counted == [text for i in range(4) for text in (f"{2 * i}</s>\n", f"No {i}</s>\n</s>")]
    for i, conversation in enumerate(CONVERSATIONS):
        first, document = conversation["messages"], int(store.offsets[i])
        for turn, (start, _) in enumerate(ranges[2 * i : 2 * i + 2]):
            # The tokens before each answer are those of its prompt in generation.
            text = encoding.chat_template.render(first[: 2 + 2 * turn], add_generation_prompt=True)
            assert tokens[document:start] == encoding.encode_chat(text)
    rows = PackedRows(store, sequence_length=128, packing="best_fit", document_mask=True)
    total = sum(row["loss_mask"].sum() for row in map(rows.__getitem__, range(len(rows))))
    assert total == sum(stop - start for start, stop in ranges)
    meta = read_meta(tmp_path / "store")
    assert meta["source"]["messages_field"] == "messages"
    assert set(meta["versions"]) == {"sentencepiece" if family == "sentencepiece" else "tokenizers"}


THINKS = TEMPLATE.replace(
    "message['content']", "(message.get('thinking', '') if loop.last else '') + message['content']"
)


def test_a_document_begins_where_an_answer_has_another_prompt_in_generation(tmp_path):
    """The template leaves the reasoning out of earlier answers, so the answers after one are apart from it."""
    folder = FAMILIES["byte-level BPE"](tmp_path / "tokenizer")
    (folder / "chat_template.jinja").write_text(THINKS)
    turns = [("1", {}), ("2", {"thinking": "so"}), ("3", {}), ("4", {})]
    messages = []
    for text, more in turns:
        messages += [{"role": "user", "content": "?"}, {"role": "assistant", "content": text, **more}]
    store = store_of(tmp_path, folder, [{"messages": messages}])
    encoding = load_tokenizer(str(folder))
    documents = [store.slice(a, b).tolist() for a, b in itertools.pairwise(store.offsets.tolist())]
    asked = [f"<|user|>?</s>\n<|assistant|>{text}</s>\n" for text in "1234"]
    assert list(map(encoding.decode, documents)) == [
        asked[0] + asked[1].replace("2", "so2") + "</s>",
        "".join(asked) + "</s>",
    ]
    counted = [encoding.decode(store.slice(a, b).tolist()) for a, b in store.counted.tolist()]
    assert counted == ["1</s>\n", "so2</s>\n</s>", "3</s>\n", "4</s>\n</s>"]


MARKED = (
    "{% for message in messages %}<|{{ message['role'] }}|>{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}\n{% endgeneration %}{% else %}"
    "{{ message['content'] + eos_token }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize("family", ["byte-level BPE", "BPE with byte fallback"])
def test_the_tokens_that_count_are_those_of_transformers(family, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = FAMILIES[family](tmp_path / "tokenizer")
    (folder / "chat_template.jinja").write_text(MARKED)
    store = store_of(tmp_path, folder, CONVERSATIONS)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    for i, conversation in enumerate(CONVERSATIONS):
        start, stop = map(int, store.offsets[i : i + 2])
        found = theirs.apply_chat_template(
            conversation["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        assert store.slice(start, stop).tolist() == [*found["input_ids"], theirs.eos_token_id]
        counted = store.counted.ravel().searchsorted(np.arange(start, stop), side="right") % 2
        assert counted.tolist() == [*found["assistant_masks"], 1]


def test_a_store_of_conversations_is_read_with_its_chat_template(tmp_path, config):
    """The template is the one with which the model is prompted, but it is not part of the vocabulary."""
    folder = FAMILIES["byte-level BPE"](tmp_path / "tokenizer")
    store_of(tmp_path, folder, CONVERSATIONS)
    path, data = str(tmp_path / "store"), replace(config(), "data", tokenizer=str(folder)).data
    assert len(open_split(data, path, "train", load_tokenizer(str(folder)))) > 0
    template = folder / "chat_template.jinja"
    known = hashlib.sha256(template.read_bytes()).hexdigest()[:12]
    template.write_text(template.read_text() + " ")
    other = hashlib.sha256(template.read_bytes()).hexdigest()[:12]
    for found in (f"the chat template {other}", "no chat template"):
        with pytest.raises(UserError) as error:
            load_corpus(path, data, load_tokenizer(str(folder)))
        assert (
            f"data.tokenizer={str(folder)!r} has {found}, and the store data.path={path!r} was written with {known}"
            in (str(error.value))
        )
        template.unlink(missing_ok=True)


DATED = "{{ strftime_now('%d %b %Y') }}{% for message in messages %}{{ message.content }}{% endfor %}"


def test_the_date_of_a_template_is_an_option_of_the_store(tmp_path):
    folder = FAMILIES["byte-level BPE"](tmp_path / "tokenizer")
    (folder / "chat_template.jinja").write_text(DATED)
    line = refused(tmp_path / "store", *flags_of(tmp_path, folder, CONVERSATIONS))
    assert "--date is missing, which the chat template of " in line
    store = store_of(tmp_path, folder, CONVERSATIONS, "--date=2024-02-29")
    prompt = load_tokenizer(str(folder)).decode(store.slice(0, int(store.counted[0, 0])).tolist())
    assert prompt == "29 Feb 2024Be brief.0+0"
    assert read_meta(tmp_path / "store")["source"]["date"] == "2024-02-29T00:00:00"
    line = refused(tmp_path / "other", "--input=text.txt", "--date=2024-02-29")
    assert "--date=2024-02-29: only chat templates write dates" in line


@pytest.mark.parametrize(
    ("record", "flags", "message"),
    [
        ({"messages": "hello"}, [], "line 1: messages: not a list of at least one message"),
        ({"text": "a"}, [], "line 1: no field 'messages'; its fields: 'text'; choose with --messages_field"),
        ({"messages": []}, ["--prompt_field=p"], "--messages_field and --prompt_field are both set"),
        ({"messages": []}, ["--tokenizer=bytes"], "--messages_field=messages needs a chat template"),
    ],
)
def test_invalid_conversations_and_flags_are_rejected(tmp_path, record, flags, message):
    folder = FAMILIES["byte-level BPE"](tmp_path / "tokenizer")
    assert message in refused(tmp_path / "store", *flags_of(tmp_path, folder, [record]), *flags)
