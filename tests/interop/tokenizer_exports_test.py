"""Compare exported tokenizers with transformers' AutoTokenizer, which does not need torch, and import them again."""

import dataclasses
import json

import pytest
from helpers.interop_folders import words_file
from helpers.tokenizer_files import FAMILIES, TEMPLATE, random_strings, sentencepiece_model, write_settings

from difftx.data.tokenizer import END_OF_TEXT
from difftx.data.tokenizers import load_tokenizer
from difftx.errors import RunError, UserError
from difftx.interop import in_transformers, tokenizers

transformers = pytest.importorskip("transformers", reason="make test and make parity install it")
pytest.importorskip("sentencepiece", reason="make test installs the extra tokenizers")

CHAT = [{"role": "user", "content": "the end"}]


def sentencepiece_folder(folder):
    folder.mkdir()
    sentencepiece_model(folder / "tokenizer.model", "bpe")
    write_settings(folder)
    return folder


def exported(config, source, folder, end_of_text=None, model_type="llama"):
    """Return the message of an export, and the tokenizer that was exported."""
    data = dataclasses.replace(config().data, tokenizer=str(source), end_of_text=end_of_text)
    tokenizer = load_tokenizer(str(source), end_of_text=end_of_text)
    folder.mkdir()
    config_ = dataclasses.replace(config(), data=data)
    return tokenizers.export_tokenizer(config_, tokenizer, folder, model_type), tokenizer


@pytest.mark.parametrize("family", [*FAMILIES, "sentencepiece"])
@pytest.mark.parametrize("settings", [True, False])
def test_transformers_and_an_import_read_an_export_alike(config, tmp_path, family, settings):
    source = (FAMILIES | {"sentencepiece": sentencepiece_folder})[family](tmp_path / "tokenizer")
    if not settings:
        (source / "tokenizer_config.json").unlink()
    _, ours = exported(config, source, tmp_path / "export", None if settings else "</s>")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "export")
    assert (theirs.eos_token_id, len(theirs)) == (ours.eot_token, ours.n_vocab)
    compared = 0
    for text in random_strings(150):
        # LlamaTokenizer leaves out the space that SentencePiece adds before a space.
        if family != "sentencepiece" or not text.startswith((" ", "▁")):
            compared += 1
            ids = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            assert ours.encode_ordinary(text) == ids, repr(text)
            assert ours.decode(ids) == theirs.decode(ids), repr(text)
    assert compared > 120
    in_transformers.compare_tokenizer(tmp_path / "export", ours)
    (run := tmp_path / "run").mkdir()
    name, back, note = tokenizers.import_tokenizer(tmp_path / "export", run, run, "bytes", None)
    assert name == str(run / "tokenizer"), note
    assert load_tokenizer(name).fingerprint == back.fingerprint == ours.fingerprint


@pytest.mark.parametrize(
    ("kind", "options"), [("bpe", {"normalization": "nmt_nfkc"}), ("bpe", {"byte_fallback": False})]
)
def test_models_that_no_class_of_transformers_reads_alike_are_not_exported(config, tmp_path, kind, options):
    model = sentencepiece_model(tmp_path / "own.model", kind, **options)
    note, _ = exported(config, model, tmp_path / "export")
    assert note.startswith("tokenizer: not exported: transformers would encode texts differently")
    assert not list((tmp_path / "export").iterdir())


def test_another_tokenizer_in_the_folder_is_detected(config, tmp_path):
    _, ours = exported(config, sentencepiece_folder(tmp_path / "tokenizer"), tmp_path / "export")
    settings = json.loads((tmp_path / "export" / "tokenizer_config.json").read_text())
    (tmp_path / "export" / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<s>"}))
    with pytest.raises(RunError, match="end-of-text token of transformers' tokenizer is 1, and that of difftx is 2"):
        in_transformers.compare_tokenizer(tmp_path / "export", ours)
    (tmp_path / "export" / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T5Tokenizer"}))
    with pytest.raises(RunError, match=r"transformers' tokenizer encodes .* differently"):
        in_transformers.compare_tokenizer(tmp_path / "export", ours)


def put_bos_first(raw, settings):
    parts = [{"SpecialToken": {"id": END_OF_TEXT, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    end = raw["added_tokens"][0]["id"]
    special = {END_OF_TEXT: {"id": END_OF_TEXT, "ids": [end], "tokens": [END_OF_TEXT]}}
    raw["post_processor"] = {"type": "TemplateProcessing", "single": parts, "pair": parts, "special_tokens": special}


@pytest.mark.parametrize("name", ["bytes", "words.tiktoken"])
@pytest.mark.parametrize(
    "change",
    [
        put_bos_first,
        lambda raw, settings: settings.update(chat_template=TEMPLATE),
        lambda raw, settings: settings.update(eos_token="<|im_end|>", extra_special_tokens=["<|im_start|>"]),
        lambda raw, settings: raw["added_tokens"][0].update(special=False),
        lambda raw, settings: raw["added_tokens"][0].update(lstrip=True),
    ],
)
def test_an_import_keeps_the_template_and_the_first_and_last_tokens(tmp_path, name, change):
    known = name if name == "bytes" else str(words_file(tmp_path / name))
    raw, settings = tokenizers.tokenizer_json(load_tokenizer(known), name), {"eos_token": END_OF_TEXT}
    change(raw, settings)
    for folder in ("model", "run"):
        (tmp_path / folder).mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(raw))
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "model")
    imported, _, _ = tokenizers.import_tokenizer(tmp_path / "model", tmp_path / "run", tmp_path / "run", known, None)
    ours = load_tokenizer(imported)
    text = f"the {END_OF_TEXT} end"
    assert ours.encode_prompt(text) == theirs(text, split_special_tokens=True)["input_ids"]
    assert ours.encode_chat(text) == theirs(text, add_special_tokens=False)["input_ids"]
    assert (ours.eot_token, ours.n_vocab) == (theirs.eos_token_id, len(theirs))
    assert (ours.chat_template is None) == (theirs.chat_template is None)
    if ours.chat_template:
        ids = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
        assert ours.encode_messages(CHAT, "chat") == ids


@pytest.mark.parametrize(
    ("ends", "names"),
    [
        ([2, 1], "'<|system|>', '</s>', but difftx ends them at '</s>'; to change that, import again with"),
        (3, "'<|user|>', but difftx ends them at '</s>'"),
        ([1, 10**6, -1, "x"], None),
        (None, None),
    ],
)
def test_an_import_names_the_ends_of_the_generation_config(tmp_path, ends, names):
    folder = FAMILIES["byte-level BPE"](tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    (run := tmp_path / "run").mkdir()
    note = tokenizers.import_tokenizer(folder, run, run, "bytes", None)[2]
    assert f"generation_config.json ends texts at {names}" in note if names else "generation" not in note
    if names:
        assert note.endswith("--config.data.end_of_text=NAME")
        _, tokenizer, note = tokenizers.import_tokenizer(folder, tmp_path / "run", run, "bytes", "<|user|>")
        assert tokenizer.eot_token == 3
        assert ("generation" in note) == (ends != 3)


def test_an_imported_tokenizer_needs_its_end_of_text(tmp_path):
    """If the end-of-text token is missing, the import states this reason. data.end_of_text sets the token."""
    folder = FAMILIES["byte-level BPE"](tmp_path / "model")
    (folder / "tokenizer_config.json").unlink()
    (run := tmp_path / "run").mkdir()
    name, _, note = tokenizers.import_tokenizer(folder, run, run, "bytes", None)
    assert name == "bytes"
    assert "no file names its end-of-text token (eos_token); set data.end_of_text to its name" in note
    with pytest.raises(UserError, match="'none' is not in the vocabulary"):
        tokenizers.import_tokenizer(folder, run, run, "bytes", "none")
    name, tokenizer, note = tokenizers.import_tokenizer(folder, run, run, "bytes", "</s>")
    assert name == str(run / "tokenizer"), note
    assert tokenizer.eot_token == 1


def test_transformers_encodes_by_qwen_2_rules_in_qwen_2_folders(config, tmp_path):
    """Other tokenizers are not exported there, because transformers replaces "é" of two characters by one."""
    exported(config, "bytes", tmp_path / "llama")
    (tmp_path / "llama" / "config.json").write_text('{"model_type": "qwen2"}')
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "llama")
    assert theirs("e\u0301")["input_ids"] == list("é".encode()) != list("e\u0301".encode())
    message, _ = exported(config, "bytes", tmp_path / "qwen2", model_type="qwen2")
    assert message.startswith("tokenizer: not exported: transformers would encode texts by the rules of Qwen 2")
    assert not list((tmp_path / "qwen2").iterdir())


def test_only_a_tokenizer_that_splits_as_qwen_2_is_exported_for_it(config, tmp_path):
    """transformers' own Qwen2Tokenizer is exported. A variant with up to two digits per piece is not."""
    source = FAMILIES["byte-level BPE"](tmp_path / "tokenizer")
    model = json.loads((source / "tokenizer.json").read_text())["model"]
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    qwen = transformers.Qwen2Tokenizer(vocab=model["vocab"], merges=merges)
    (source / "tokenizer.json").write_text(qwen.backend_tokenizer.to_str())
    message, ours = exported(config, source, tmp_path / "qwen2", model_type="qwen2")
    assert message == f"tokenizer: the files of data.tokenizer={str(source)!r}"
    (tmp_path / "qwen2" / "config.json").write_text('{"model_type": "qwen2"}')
    in_transformers.compare_tokenizer(tmp_path / "qwen2", ours)
    content = json.loads((source / "tokenizer.json").read_text())
    split = content["pre_tokenizer"]["pretokenizers"][0]["pattern"]
    split["Regex"] = split["Regex"].replace(r"\p{N}|", r"\p{N}{1,2}|")
    (source / "tokenizer.json").write_text(json.dumps(content))
    message, _ = exported(config, source, tmp_path / "other", model_type="qwen2")
    assert message.startswith("tokenizer: not exported: transformers would encode texts by the rules of Qwen 2")
