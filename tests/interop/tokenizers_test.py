"""Export and import of tokenizer.json. parity_test.py compares its token ids with those of the library."""

import dataclasses
import json
import shutil

import pytest
from helpers.interop_folders import FIXTURES, export, import_, parameters, words_file
from helpers.tokenizer_files import prefixed_bytes_folder

from difftx.data.tokenizer import END_OF_TEXT
from difftx.data.tokenizers import load_tokenizer
from difftx.errors import UserError
from difftx.inference.decode import LanguageModel
from difftx.inference.generate import Request, generate
from difftx.inference.sampling import GREEDY
from difftx.interop import tokenizers
from difftx.training.run import read_config

LLAMA = FIXTURES / "llama"


def with_json(tmp_path, raw):
    folder = tmp_path / "model"
    shutil.copytree(LLAMA, folder)
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    return folder


def test_exported_bytes_are_recognised(tmp_path, capsys):
    workdir = import_(LLAMA, tmp_path / "run")
    assert (
        "has no tokenizer.json or tokenizer.model; data.tokenizer='bytes' stays, and must be the model's"
        in capsys.readouterr().out
    )
    raw = json.loads((export(workdir, tmp_path / "hf") / "tokenizer.json").read_text())
    assert raw["model"]["vocab"]["Ġ"] == ord(" ")
    assert raw["added_tokens"][0]["id"] == 256
    again = import_(tmp_path / "hf", tmp_path / "again", "--config.data.tokenizer=no_such_encoding.tiktoken")
    assert read_config(again).data.tokenizer == "bytes"


def test_own_vocabulary_file_is_recognised_or_copied(tmp_path):
    pytest.importorskip("tokenizers", reason="needs the extra tokenizers")
    configured = str(words_file(tmp_path / "words.tiktoken"))
    encoding = load_tokenizer(configured)
    folder = with_json(tmp_path, tokenizers.tokenizer_json(encoding, "words.tiktoken"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END_OF_TEXT}))
    (new := tmp_path / "new").mkdir()  # It becomes `run` later.
    name, _, note = tokenizers.import_tokenizer(folder, new, tmp_path / "run", configured, None)
    assert name == configured
    assert "that of the model" in note
    name, _, note = tokenizers.import_tokenizer(folder, new, tmp_path / "run", "bytes", None)
    new.rename(tmp_path / "run")
    assert note == f"tokenizer: copied, data.tokenizer={name!r}"
    text = "the other thing, in the end 123"
    assert load_tokenizer(name).encode_ordinary(text) == encoding.encode_ordinary(text)


@pytest.mark.long
def test_a_model_without_embeddings_of_unused_special_tokens(tmp_path, mesh_of):
    """transformers loads such folders too. The model has 260 embeddings, and [PAD] is token 260."""
    pytest.importorskip("tokenizers", reason="needs the extra tokenizers")
    folder = prefixed_bytes_folder(tmp_path / "tokenizer")
    shutil.copytree(LLAMA, folder, dirs_exist_ok=True)
    settings = {"bos_token": "<s>", "eos_token": "</s>", "extra_special_tokens": ["<a>", "<b>", "[PAD]"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config, params = parameters(import_(folder, tmp_path / "run"), mesh_of())
    lm = LanguageModel(config, mesh_of(), params, load_tokenizer(config.data.tokenizer))
    assert (config.model.vocab_size, lm.tokenizer.n_vocab) == (260, 261)
    request = Request(prompt=lm.tokenizer.encode_prompt("[PAD]"), new_tokens=8, seed=0)
    assert all(token < 260 for token in generate(lm, [request], GREEDY)[0].tokens)
    chat = dataclasses.replace(request, prompt=lm.tokenizer.encode_chat("[PAD]"))
    with pytest.raises(UserError, match="prompt 0 has token id 260, but the model has only 260 embeddings"):
        generate(lm, [chat], GREEDY)
    with pytest.raises(UserError, match="vocab_size=260 is less than the 261 tokens"):
        import_(folder, tmp_path / "needed", "--config.data.end_of_text=[PAD]")


def test_every_split_of_a_token_is_a_merge(tmp_path):
    encoding = load_tokenizer(str(words_file(tmp_path / "words.tiktoken")))
    merges = tokenizers.tokenizer_json(encoding, "words.tiktoken")["model"]["merges"]
    assert [m for m in merges if "".join(m) == "Ġthe"] == [["Ġ", "the"], ["Ġth", "e"]]
    assert merges[0] == ["t", "h"]


@pytest.mark.parametrize(
    "change", [lambda raw: raw["model"].update(type="Unigram"), lambda raw: raw["model"].pop("vocab")]
)
def test_different_tokenizer_is_not_recognised(tmp_path, change):
    pytest.importorskip("tokenizers", reason="needs the extra tokenizers")
    configured = str(words_file(tmp_path / "words.tiktoken"))
    raw = tokenizers.tokenizer_json(load_tokenizer(configured), configured)
    change(raw)
    (run := tmp_path / "run").mkdir()
    name, _, note = tokenizers.import_tokenizer(with_json(tmp_path, raw), run, run, configured, None)
    assert name == configured
    assert note.startswith("tokenizer: not imported: data.tokenizer=")
    assert f"data.tokenizer={configured!r} stays, but its ids mean other text" in note
    assert not list(run.iterdir())
