"""Conversion between tiktoken encodings and Hugging Face's tokenizer.json, for tokenizers that both can represent.

Both formats merge bytes in the order of the tokens' ranks. tiktoken merges any two neighbours that form a token. A
tokenizer.json lists the pairs to merge, so it must list every split of each token into two tokens. A tokenizer can be
converted if it splits text by cl100k_base's pattern before the merges, or if it does not split text.
"""

import base64
import contextlib
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
# cl100k_base's pattern, without possessive quantifiers: the regex engine of `tokenizers` interprets them differently.
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
    """Write tokenizer.json and tokenizer_config.json if the tokenizer is convertible. Return a message for the user."""
    name = config.data.tokenizer
    if not _is_convertible(name):
        return f"tokenizer: not converted; only {BYTES}, {CL100K} and .tiktoken files can be. Use tiktoken's {name!r}"
    write_atomically(folder / FILE, json.dumps(tokenizer_json(encoding, name), ensure_ascii=False) + "\n")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "model_max_length": config.data.sequence_length,
        "clean_up_tokenization_spaces": False,
    }
    write_atomically(folder / "tokenizer_config.json", json.dumps(settings, indent=2) + "\n")
    return f"tokenizer: {FILE} is data.tokenizer={name!r}"


def import_tokenizer(source: Path, folder: Path, out: Path, name: str) -> tuple[str, str]:
    """Return the value of `data.tokenizer` for the model in `source`, and a message for the user.

    The value is "bytes" or the configured `name` if that is the model's tokenizer. Otherwise, a .tiktoken file is
    written to `folder`, which is later renamed to `out`. If the tokenizer cannot be converted, the value is `name`.
    """
    path = source / FILE
    if not path.is_file():
        return name, f"tokenizer: {source} has no {FILE}; data.tokenizer={name!r} stays, and must be the model's"
    theirs = read_json(path)
    if schema_error(theirs, SHAPE) is None and theirs.get("normalizer") is None:
        for known in (BYTES, name):
            if _is_same(known, theirs):
                return known, f"tokenizer: that of the model, data.tokenizer={known!r}"
        file = folder / "tokenizer.tiktoken"
        with contextlib.suppress(KeyError):  # Raised for a character that does not represent a byte.
            write_atomically(file, _ranks(theirs["model"]["vocab"]))
        if file.is_file() and _is_same(str(file), theirs):
            kept = str(out.absolute() / file.name)
            return kept, f"tokenizer: converted, data.tokenizer={kept!r}"
        file.unlink(missing_ok=True)
    return name, (
        f"tokenizer: not converted: {path} is not byte-level BPE with cl100k_base's pattern, merges by rank and "
        f"{END_OF_TEXT!r} last. data.tokenizer={name!r} stays, but its ids mean other text: generate and evaluate by "
        "token ids only, or set data.tokenizer to the model's tokenizer"
    )


def tokenizer_json(encoding: tiktoken.Encoding, name: str) -> dict[str, Any]:
    """Return the content of a tokenizer.json for `encoding`. `name` is its value of `data.tokenizer`."""
    ranks = {value: rank for rank, value in enumerate(token_bytes(encoding)) if value}
    special = {token: encoding.encode_single_token(token) for token in encoding.special_tokens_set}
    split = BYTE_LEVEL if name == BYTES else {"type": "Sequence", "pretokenizers": [SPLIT, BYTE_LEVEL]}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": rank, "content": token, **flags} for token, rank in sorted(special.items(), key=lambda item: item[1])
        ],
        "normalizer": None,
        "pre_tokenizer": split,
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
            "ignore_merges": True,  # As in tiktoken, a word in the vocabulary becomes one token without any merges.
            "vocab": {_text(value): rank for value, rank in ranks.items()},
            "merges": [[_text(left), _text(right)] for left, right in _merges(ranks)],
        },
    }


def _is_convertible(name: str) -> bool:
    return name in (BYTES, CL100K) or name.endswith(".tiktoken")


def _is_same(name: str, raw: dict[str, Any]) -> bool:
    """Return whether the tokenizer `name` can be loaded and equals `raw`, the content of a tokenizer.json."""
    if not _is_convertible(name):
        return False
    try:
        encoding = load_tokenizer(name)
    except UserError:
        return False
    return _parts(tokenizer_json(encoding, name)) == _parts(raw)


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return every split of each token into two tokens, in the order of the tokens' ranks."""
    merges = []
    for value in sorted(ranks, key=ranks.__getitem__):
        splits = [(value[:i], value[i:]) for i in range(1, len(value))]
        known = [(left, right) for left, right in splits if left in ranks and right in ranks]
        merges += sorted(known, key=lambda split: (ranks[split[0]], ranks[split[1]]))
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


def _ranks(vocabulary: dict[str, int]) -> str:
    """Return the content of a .tiktoken file with the vocabulary of a tokenizer.json."""
    return "".join(
        f"{base64.b64encode(bytes(BYTES_OF[character] for character in token)).decode()} {rank}\n"
        for token, rank in sorted(vocabulary.items(), key=lambda item: item[1])
        if token != END_OF_TEXT
    )
