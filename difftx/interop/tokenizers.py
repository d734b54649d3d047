"""tokenizer.json of Hugging Face's tokenizers, from encodings of tiktoken and back where they mean the same.

Both merge bytes by rank. tiktoken merges any two neighbours whose text is a token; a tokenizer.json lists the pairs, so
it must list every cut of each token in two. Before that, cl100k_base's pattern cuts text into pieces, or nothing does.
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
from difftx.files import misfit, read_json, write_atomically

FILE = "tokenizer.json"
CL100K = "cl100k_base"
# cl100k_base's pattern without possessive quantifiers, which the engine of tokenizers reads otherwise.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
SPLIT = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
SHAPE = {"model": {"type": str, "vocab": {str: int}, "merges": list}, "added_tokens": [{"id": int, "content": str}]}
# Bytes that are no printable characters of Latin-1 stand as characters from 256 on, as in GPT-2's files.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
CHARACTERS = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + i) for i, byte in enumerate(_OTHERS)}
BYTES_OF = {character: byte for byte, character in CHARACTERS.items()}


def export_tokenizer(config: Config, encoding: tiktoken.Encoding, folder: Path) -> str:
    """Write tokenizer.json and tokenizer_config.json, if they can be; return what to tell the user."""
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
    """Return the config with the tokenizer of a folder, and what to tell the user.

    Args:
        source: folder of the model.
        folder: of the run that is made, for a .tiktoken file.
        out: its name later.
        config: of the run; its tokenizer stays where the model's is the same or does not convert.
    """
    name, path = config.data.tokenizer, source / FILE
    if not path.is_file():
        return (
            config,
            f"tokenizer: {source} has no {FILE}; data.tokenizer={name!r} stays, and must be the model's",
        )
    theirs = read_json(path)
    why = "it is not of byte-level BPE with cl100k_base's pattern"
    if misfit(theirs, SHAPE) is None and theirs.get("normalizer") is None:
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
    """Return a tokenizer.json of `encoding`, which is `data.tokenizer` = `name`."""
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
            "unk_token": None,  # nosec B105: a token of text, no password
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,  # tiktoken too looks a whole piece up first.
            "vocab": {_text(value): rank for value, rank in ranks.items()},
            "merges": [[_text(left), _text(right)] for left, right in _merges(ranks)],
        },
    }


def _is_convertible(name: str) -> bool:
    return name in (BYTES, CL100K) or name.endswith(".tiktoken")


def _is_same(name: str, raw: dict[str, Any]) -> bool:
    """Whether `data.tokenizer` = `name` is a tokenizer.json; one that cannot be had is not."""
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
    """Return the cuts of each token into two tokens, tokens in the order of their ranks."""
    merges = []
    for value in sorted(ranks, key=ranks.__getitem__):
        cuts = [(value[:i], value[i:]) for i in range(1, len(value))]
        known = [cut for cut in cuts if cut[0] in ranks and cut[1] in ranks]
        merges += sorted(known, key=lambda cut: (ranks[cut[0]], ranks[cut[1]]))
    return merges


def _text(value: bytes) -> str:
    return "".join(map(CHARACTERS.__getitem__, value))


def _parts(raw: dict[str, Any]) -> tuple[Any, ...]:
    """Return what decides which ids a text gets."""
    model = raw["model"]
    # Older files have "left right" in place of ["left", "right"].
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
