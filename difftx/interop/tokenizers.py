"""Conversion between tiktoken encodings and Hugging Face's tokenizer.json, for tokenizers that both can represent.

Both merge bytes by rank. tiktoken merges any two neighbours that form a token. A tokenizer.json lists the pairs to
merge, so it must list every split of each token into two tokens. Before the merges, text is split by cl100k_base's
pattern, or not at all.
"""

import base64
import dataclasses
import json
from pathlib import Path
from typing import Any

import tiktoken

from difftx.config import Config
from difftx.data.tokenizer import BYTES, END_OF_TEXT, load_tokenizer, token_bytes
from difftx.errors import UserError
from difftx.files import read_json, schema_error, write_atomically

FILE = "tokenizer.json"
CL100K = "cl100k_base"
# cl100k_base's pattern without possessive quantifiers, which the regex engine of `tokenizers` interprets differently.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
SPLIT = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
SHAPE = {"model": {"type": str, "vocab": {str: int}, "merges": list}, "added_tokens": [{"id": int, "content": str}]}
# As in GPT-2's files, characters from 256 on represent the bytes that are not printable Latin-1 characters.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
CHARACTERS = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + i) for i, byte in enumerate(_OTHERS)}
BYTES_OF = {character: byte for byte, character in CHARACTERS.items()}


def export_tokenizer(config: Config, encoding: tiktoken.Encoding, folder: Path) -> str:
    """Write tokenizer.json and tokenizer_config.json if the tokenizer converts; return a message for the user."""
    name = config.data.tokenizer
    if not _is_convertible(name):
        return f"tokenizer: not converted, only {BYTES}, {CL100K} and .tiktoken files are; use tiktoken's {name!r}"
    write_atomically(folder / FILE, json.dumps(tokenizer_json(encoding, name), ensure_ascii=False) + "\n")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "model_max_length": config.data.sequence_length,
        "clean_up_tokenization_spaces": False,
    }
    write_atomically(folder / "tokenizer_config.json", json.dumps(settings, indent=2) + "\n")
    return f"tokenizer: {FILE} is data.tokenizer={name!r}"


def import_tokenizer(source: Path, folder: Path, out: Path, config: Config) -> tuple[Config, str]:
    """Return the config with the tokenizer of a model's folder, and a message for the user.

    Args:
        source: Folder of the model.
        folder: Temporary folder of the new run, for a .tiktoken file.
        out: Final path of `folder`.
        config: Config of the run. Its tokenizer stays if it equals the model's, or if the model's cannot be converted.
    """
    name, path = config.data.tokenizer, source / FILE
    if not path.is_file():
        return (
            config,
            f"tokenizer: {source} has no {FILE}; data.tokenizer={name!r} stays, and must be the model's",
        )
    theirs = read_json(path)
    why = "it is not of byte-level BPE with cl100k_base's pattern"
    if schema_error(theirs, SHAPE) is None and theirs.get("normalizer") is None:
        for known in (BYTES, name):
            if _is_same(known, theirs):
                return _with_tokenizer(config, known), f"tokenizer: that of the model, data.tokenizer={known!r}"
        file = folder / "tokenizer.tiktoken"
        try:
            _write_ranks(file, theirs["model"]["vocab"])
            encoding = load_tokenizer(str(file))
        except (KeyError, UserError):
            file.unlink(missing_ok=True)
        else:
            if _parts(tokenizer_json(encoding, file.name)) == _parts(theirs):
                kept = str(out.absolute() / file.name)
                return _with_tokenizer(config, kept), f"tokenizer: converted, data.tokenizer={kept!r}"
            file.unlink()
            why = f"its merges, pattern or special tokens are not what a .tiktoken file can say ({END_OF_TEXT!r} last)"
    return config, (
        f"tokenizer: not converted: {path}: {why}. data.tokenizer={name!r} stays, and means other text: "
        "generate and evaluate by token ids only, or set data.tokenizer to the model's"
    )


def tokenizer_json(encoding: tiktoken.Encoding, name: str) -> dict[str, Any]:
    """Return the content of a tokenizer.json for `encoding`. `name` is its value of `data.tokenizer`."""
    ranks = {value: rank for rank, value in enumerate(token_bytes(encoding)) if value}
    special = {token: encoding.encode_single_token(token) for token in encoding.special_tokens_set}
    cut = BYTE_LEVEL if name == BYTES else {"type": "Sequence", "pretokenizers": [SPLIT, BYTE_LEVEL]}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": rank, "content": token, **flags} for token, rank in sorted(special.items(), key=lambda item: item[1])
        ],
        "normalizer": None,
        "pre_tokenizer": cut,
        "post_processor": None,
        "decoder": BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,  # nosec B105: a token of text, not a password
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,  # tiktoken, too, first looks up the whole piece.
            "vocab": {_text(value): rank for value, rank in ranks.items()},
            "merges": [[_text(left), _text(right)] for left, right in _merges(ranks)],
        },
    }


def _is_convertible(name: str) -> bool:
    return name in (BYTES, CL100K) or name.endswith(".tiktoken")


def _is_same(name: str, raw: dict[str, Any]) -> bool:
    """Return whether the tokenizer `name` (a value of `data.tokenizer`) can be loaded and equals a tokenizer.json."""
    if not _is_convertible(name):
        return False
    try:
        encoding = load_tokenizer(name)
    except UserError:
        return False
    return _parts(tokenizer_json(encoding, name)) == _parts(raw)


def _with_tokenizer(config: Config, name: str) -> Config:
    return dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=name))


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return every split of each token into two tokens, in the order of the tokens' ranks."""
    merges = []
    for value in sorted(ranks, key=ranks.__getitem__):
        cuts = [(value[:i], value[i:]) for i in range(1, len(value))]
        known = [cut for cut in cuts if cut[0] in ranks and cut[1] in ranks]
        merges += sorted(known, key=lambda cut: (ranks[cut[0]], ranks[cut[1]]))
    return merges


def _text(value: bytes) -> str:
    return "".join(map(CHARACTERS.__getitem__, value))


def _parts(raw: dict[str, Any]) -> tuple[Any, ...]:
    """Return the parts of a tokenizer.json that determine the token ids of a text."""
    model = raw["model"]
    # Older files write "left right" instead of ["left", "right"].
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    added = {token["content"]: token["id"] for token in raw["added_tokens"]}
    vocabulary = {token: rank for token, rank in model["vocab"].items() if token not in added}
    return model["type"], vocabulary, merges, added, raw.get("pre_tokenizer")


def _write_ranks(path: Path, vocabulary: dict[str, int]) -> None:
    lines = [
        f"{base64.b64encode(bytes(BYTES_OF[character] for character in token)).decode()} {rank}\n"
        for token, rank in sorted(vocabulary.items(), key=lambda item: item[1])
        if token != END_OF_TEXT
    ]
    write_atomically(path, "".join(lines))
