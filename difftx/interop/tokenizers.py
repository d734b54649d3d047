"""Export and import of tokenizers, and conversion of tiktoken encodings to Hugging Face's tokenizer.json.

Both formats merge bytes in the order of the tokens' ranks. tiktoken merges any two neighbours that form a token. A
tokenizer.json lists the pairs to merge, so it must list every split of each token into two tokens. A tokenizer can be
converted if it splits text by cl100k_base's pattern before the merges, or if it does not split text.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from difftx.config import Config
from difftx.data import tokenizer_files
from difftx.data.tokenizer import BYTES, END_OF_TEXT, TiktokenTokenizer, Tokenizer
from difftx.data.tokenizer_files import (
    BYTE_LEVEL,
    CONFIG,
    MODEL,
    PATTERN,
    SPLIT,
    TOKENIZER,
    FileTokenizer,
    JsonTokenizer,
)
from difftx.data.tokenizers import load_tokenizer
from difftx.errors import UnreadableError, UserError
from difftx.files import write_atomically
from difftx.json_files import read_json

CL100K = "cl100k_base"
# Pre-tokenizers of Qwen 2: cl100k_base's pattern, but each digit is a piece of its own.
QWEN_SPLIT = [SPLIT | {"pattern": {"Regex": PATTERN.replace("{1,3}", "")}}, BYTE_LEVEL]
GENERATION = "generation_config.json"
# Settings that `export_tokenizer` writes. Others, such as a chat template, need the copied files.
SETTINGS = {"tokenizer_class", "eos_token", "model_max_length", "clean_up_tokenization_spaces"}
COPY = "tokenizer"  # Folder of a run directory with the files of an imported model's tokenizer.


def export_tokenizer(config: Config, tokenizer: Tokenizer, folder: Path, model_type: str | None) -> str:
    """Write the tokenizer's files if transformers encodes texts identically with them. Return a message for the user.

    `model_type` is that of the model's config.json, if it has one.
    """
    name = config.data.tokenizer
    # transformers encodes by the rules of Qwen 2 in all folders of this type, whatever class the settings name.
    if model_type == "qwen2" and not (isinstance(tokenizer, JsonTokenizer) and _splits_as_qwen(tokenizer.content)):
        return (
            f"tokenizer: not exported: transformers would encode texts by the rules of Qwen 2, which are not those of "
            f"data.tokenizer={name!r}"
        )
    if isinstance(tokenizer, FileTokenizer):
        if tokenizer.transformers_class is None:
            return (
                f"tokenizer: not exported: transformers would encode texts differently with data.tokenizer={name!r}. "
                "Use the library sentencepiece with this file"
            )
        _copy_files(tokenizer, folder)
        settings = tokenizer_files.read_object(folder / CONFIG) | {"tokenizer_class": tokenizer.transformers_class}
        if (end := config.data.end_of_text) is not None:
            settings["eos_token"] = end
        write_atomically(folder / CONFIG, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
        return f"tokenizer: the files of data.tokenizer={name!r}"
    if not (isinstance(tokenizer, TiktokenTokenizer) and _is_convertible(name)):
        return f"tokenizer: not converted; only {BYTES}, {CL100K} and .tiktoken files can be. Use tiktoken's {name!r}"
    write_atomically(folder / TOKENIZER, json.dumps(tokenizer_json(tokenizer, name), ensure_ascii=False) + "\n")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "model_max_length": config.data.sequence_length,
        "clean_up_tokenization_spaces": False,
    }
    write_atomically(folder / CONFIG, json.dumps(settings, indent=2) + "\n")
    return f"tokenizer: {TOKENIZER} is data.tokenizer={name!r}"


def import_tokenizer(
    source: Path, folder: Path, out: str, name: str, end_of_text: str | None
) -> tuple[str, Tokenizer, str]:
    """Return the value of `data.tokenizer` for the model in `source`, the tokenizer, and a message for the user.

    The value is "bytes" or the configured `name` if that is the model's tokenizer. Otherwise, the tokenizer's files are
    copied to `folder`, which is later renamed to `out`. If they cannot be read, the value is `name`. If `end_of_text`
    is set, the files must be a tokenizer with this end-of-text token.
    """
    settings = tokenizer_files.read_settings(source)
    if not has_tokenizer(source):
        note = (
            f"tokenizer: {source} has no {TOKENIZER} or {MODEL}; data.tokenizer={name!r} stays, and must be the model's"
        )
        return name, load_tokenizer(name, end_of_text=end_of_text), note
    if end_of_text is None and (known := known_tokenizer(source, settings, BYTES, name)):
        return known, load_tokenizer(known), f"tokenizer: that of the model, data.tokenizer={known!r}"
    try:
        tokenizer = tokenizer_files.load_files(source, field="data.tokenizer", end_of_text=end_of_text)
    except UserError as error:  # Such as a missing library, or no end-of-text token.
        if end_of_text is not None:
            raise
        note = (
            f"tokenizer: not imported: {error}. data.tokenizer={name!r} stays, but its ids mean other text: generate "
            "and evaluate by token ids only, or set data.tokenizer to the model's tokenizer"
        )
        return name, load_tokenizer(name), note
    _copy_files(tokenizer, folder / COPY)
    kept = f"{out}/{COPY}"
    return kept, tokenizer, f"tokenizer: copied, data.tokenizer={kept!r}{_other_ends(source, tokenizer)}"


def known_tokenizer(source: Path, settings: Mapping[str, Any], *names: str) -> str | None:
    """Return the first of `names`, values of `data.tokenizer`, whose tokenizer a model folder has, or None."""
    is_plain = settings.keys() <= SETTINGS and settings.get("eos_token", END_OF_TEXT) == END_OF_TEXT
    if not is_plain or not (source / TOKENIZER).is_file():
        return None
    theirs = read_json(source / TOKENIZER)
    return next((name for name in names if _is_same(name, theirs)), None)


def open_tokenizer(source: Path) -> tuple[str, Tokenizer]:
    """Return the tokenizer of a model folder, and the value of `data.tokenizer` that names it while the folder exists.

    Raise `UserError` if the folder has none that difftx can read.
    """
    known = known_tokenizer(source, tokenizer_files.read_settings(source), BYTES)
    return known or str(source), load_tokenizer(known or str(source))


def _other_ends(source: Path, tokenizer: Tokenizer) -> str:
    """Return a sentence on the tokens at which transformers ends texts, if difftx's end of text is not the only one."""
    found, end = tokenizer_files.read_object(source / GENERATION).get("eos_token_id"), tokenizer.eot_token
    ends = [id_ for id_ in (found if isinstance(found, list) else [found]) if id_ in range(tokenizer.n_vocab)]
    names = [repr(tokenizer.decode([id_])) for id_ in (*ends, end)]
    note = (
        f". {GENERATION} ends texts at {', '.join(names[:-1])}, but difftx ends them at {names[-1]}; to change that, "
    )
    return f"{note}import again with --config.data.end_of_text=NAME" if {*ends} - {end} else ""


def has_tokenizer(folder: Path) -> bool:
    """Return whether a model folder has files of a tokenizer."""
    return any((folder / file).is_file() for file in (TOKENIZER, MODEL))


def tokenizer_json(tokenizer: TiktokenTokenizer, name: str) -> dict[str, Any]:
    """Return the content of a tokenizer.json for a tokenizer. `name` is its value of `data.tokenizer`."""
    encoding = tokenizer.encoding
    ranks = {value: rank for rank, value in enumerate(tokenizer.token_bytes) if value}
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


def _copy_files(tokenizer: FileTokenizer, folder: Path) -> None:
    """Copy the files of a tokenizer to a folder, with the names that `load_files` looks for."""
    folder.mkdir(exist_ok=True)
    source = tokenizer.path.parent
    main = MODEL if tokenizer.path.suffix == ".model" else TOKENIZER
    for file in (tokenizer.path, *(source / name for name in tokenizer_files.FILES if name not in (MODEL, TOKENIZER))):
        if file.is_file():
            shutil.copyfile(file, folder / (main if file == tokenizer.path else file.name))


def _splits_as_qwen(content: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer.json with this content normalizes and splits texts as Qwen 2's does."""
    steps = (content.get("pre_tokenizer") or {}).get("pretokenizers", [])
    # trim_offsets changes no token ids.
    theirs, ours = ([step | {"trim_offsets": True} for step in part] for part in (steps, QWEN_SPLIT))
    return content.get("normalizer") == {"type": "NFC"} and theirs == ours


def _is_convertible(name: str) -> bool:
    return name in (BYTES, CL100K) or name.endswith(".tiktoken")


def _is_same(name: str, raw: Any) -> bool:
    """Return whether the tokenizer `name` can be loaded and `raw` is the tokenizer.json that an export has of it."""
    if not _is_convertible(name):
        return False
    try:
        tokenizer = load_tokenizer(name)
    except (UserError, UnreadableError):
        return False
    return isinstance(tokenizer, TiktokenTokenizer) and tokenizer_json(tokenizer, name) == raw


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return every split of each token into two tokens, in the order of the tokens' ranks."""
    merges = []
    for value in sorted(ranks, key=ranks.__getitem__):
        splits = [(value[:i], value[i:]) for i in range(1, len(value))]
        known = [(left, right) for left, right in splits if left in ranks and right in ranks]
        merges += sorted(known, key=lambda split: (ranks[split[0]], ranks[split[1]]))
    return merges


def _text(value: bytes) -> str:
    return "".join(map(tokenizer_files.CHARACTERS.__getitem__, value))
