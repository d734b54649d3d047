"""Export and import tokenizers, and convert tiktoken encodings to Hugging Face's tokenizer.json.

Both formats merge bytes in the order of the tokens' ranks. tiktoken merges any two neighbours that form a token.
tokenizer.json lists the pairs to merge, so the conversion lists every split of each token into two tokens. A tokenizer
can be converted if it splits text by cl100k_base's pattern before merging, or does not split text.
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
# Pre-tokenizers of Qwen 2. Its pattern is cl100k_base's, except that every digit is split off.
QWEN_SPLIT = [SPLIT | {"pattern": {"Regex": PATTERN.replace("{1,3}", "")}}, BYTE_LEVEL]
GENERATION = "generation_config.json"
# Settings that `export_tokenizer` writes. A folder with other settings, such as a chat template, is copied instead.
SETTINGS = {"tokenizer_class", "eos_token", "model_max_length", "clean_up_tokenization_spaces"}
COPY = "tokenizer"  # Subfolder of a run directory for the tokenizer files of an imported model.


def export_tokenizer(config: Config, tokenizer: Tokenizer, folder: Path, model_type: str | None) -> str:
    """Write the tokenizer's files, unless transformers would encode texts differently. Return a message for the user.

    `model_type` is the field of the model's config.json, or None if it has no such field.
    """
    name = config.data.tokenizer
    # For this model type, transformers always splits text as for Qwen 2, whatever class the settings name.
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

    If the model's tokenizer is "bytes" or the configured tokenizer `name`, return that. If not, copy the tokenizer's
    files to `folder`, which is later renamed to `out`, and return the path of the copy. If the files cannot be read,
    return `name`. If `end_of_text` is set, the files must have this end-of-text token.
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
    except UserError as error:  # For example, a library or the end-of-text token is missing.
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
    """Return the first of `names` (values of `data.tokenizer`) that equals the tokenizer in a model folder, or None."""
    is_plain = settings.keys() <= SETTINGS and settings.get("eos_token", END_OF_TEXT) == END_OF_TEXT
    if not is_plain or not (source / TOKENIZER).is_file():
        return None
    theirs = read_json(source / TOKENIZER)
    return next((name for name in names if _is_same(name, theirs)), None)


def open_tokenizer(source: Path) -> tuple[str, Tokenizer]:
    """Return the value of `data.tokenizer` for the tokenizer in a model folder, and the tokenizer.

    The value may be the path of the folder. Raise `UserError` if difftx cannot read a tokenizer in the folder.
    """
    known = known_tokenizer(source, tokenizer_files.read_settings(source), BYTES)
    return known or str(source), load_tokenizer(known or str(source))


def _other_ends(source: Path, tokenizer: Tokenizer) -> str:
    """Return a note if transformers ends texts at tokens other than difftx's end-of-text token, else ""."""
    found, end = tokenizer_files.read_object(source / GENERATION).get("eos_token_id"), tokenizer.eot_token
    ends = [id_ for id_ in (found if isinstance(found, list) else [found]) if id_ in range(tokenizer.n_vocab)]
    names = [repr(tokenizer.decode([id_])) for id_ in (*ends, end)]
    note = (
        f". {GENERATION} ends texts at {', '.join(names[:-1])}, but difftx ends them at {names[-1]}; to change that, "
    )
    return f"{note}import again with --config.data.end_of_text=NAME" if {*ends} - {end} else ""


def has_tokenizer(folder: Path) -> bool:
    """Return whether a model folder contains tokenizer files."""
    return any((folder / file).is_file() for file in (TOKENIZER, MODEL))


def tokenizer_json(tokenizer: TiktokenTokenizer, name: str) -> dict[str, Any]:
    """Return the content of a tokenizer.json. `name` is the value of `data.tokenizer` for this tokenizer."""
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
            "ignore_merges": True,  # As in tiktoken, a word that is in the vocabulary becomes one token.
            "vocab": {_text(value): rank for value, rank in ranks.items()},
            "merges": [[_text(left), _text(right)] for left, right in _merges(ranks)],
        },
    }


def _copy_files(tokenizer: FileTokenizer, folder: Path) -> None:
    """Copy a tokenizer's files to a folder, with the file names that `load_files` expects."""
    folder.mkdir(exist_ok=True)
    source = tokenizer.path.parent
    main = MODEL if tokenizer.path.suffix == ".model" else TOKENIZER
    for file in (tokenizer.path, *(source / name for name in tokenizer_files.FILES if name not in (MODEL, TOKENIZER))):
        if file.is_file():
            shutil.copyfile(file, folder / (main if file == tokenizer.path else file.name))


def _splits_as_qwen(content: Mapping[str, Any]) -> bool:
    """Return whether a tokenizer.json normalizes and splits texts in the same way as Qwen 2's."""
    steps = (content.get("pre_tokenizer") or {}).get("pretokenizers", [])
    # Ignore trim_offsets, which does not change token ids.
    theirs, ours = ([step | {"trim_offsets": True} for step in part] for part in (steps, QWEN_SPLIT))
    return content.get("normalizer") == {"type": "NFC"} and theirs == ours


def _is_convertible(name: str) -> bool:
    return name in (BYTES, CL100K) or name.endswith(".tiktoken")


def _is_same(name: str, raw: Any) -> bool:
    """Return whether the tokenizer `name` can be loaded and its export would be the tokenizer.json `raw`."""
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
