"""Tokenizers from Hugging Face files: tokenizer.json or a SentencePiece model, and the settings next to them.

Settings are read as in transformers: tokenizer_config.json and special_tokens_map.json name the special tokens, and
chat_template.jinja is the chat template.
"""

import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from difftx.data.chat_template import ChatTemplate
from difftx.data.tokenizer import Tokenizer, without_surrogates
from difftx.errors import UserError, import_extra
from difftx.files import read_file
from difftx.json_files import json_sha256, read_json

EXTRA = "tokenizers"
TOKENIZER, MODEL, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja"
SPECIAL_TOKENS = "special_tokens_map.json"
FILES = (TOKENIZER, MODEL, CONFIG, SPECIAL_TOKENS, TEMPLATE)
# Keys of tokenizer_config.json that name a special token. They are also variables in chat templates.
NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
SPACE = "▁"  # U+2581, which stands for a space in SentencePiece tokens.
# cl100k_base's pattern without possessive quantifiers, which the regex engine of `tokenizers` interprets differently.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
SPLIT = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
# As in GPT-2's files, characters from 256 on stand for the bytes that are not printable Latin-1 characters.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
CHARACTERS = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + i) for i, byte in enumerate(_OTHERS)}
BYTES_OF = {character: byte for byte, character in CHARACTERS.items()}


def load_files(path: Path, *, field: str, end_of_text: str | None) -> "FileTokenizer":
    """Load a tokenizer from a tokenizer.json file, a SentencePiece model, or a folder with one of them.

    For `field` and `end_of_text`, see `load_tokenizer`.
    """
    name = f"{field}={str(path)!r}"
    if path.is_dir():
        found = [path / file for file in (TOKENIZER, MODEL) if (path / file).is_file()]
        if not found:
            raise UserError(f"{name}: the folder has neither {TOKENIZER} nor {MODEL}; put the tokenizer's files there")
        path = found[0]
    settings = read_settings(path.parent)
    family = SentencePieceTokenizer if path.suffix == ".model" else JsonTokenizer
    try:
        return family(path, settings, name, end_of_text)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{name}: its files are not those of a tokenizer ({error!r})") from error


def read_settings(folder: Path) -> dict[str, Any]:
    """Read tokenizer_config.json, and the files that override parts of it in transformers.

    Raise `UserError` if the settings name code. transformers would execute it, but difftx does not.
    """
    settings = read_object(folder / CONFIG)
    if (code := settings.get("auto_map")) is not None:
        raise UserError(
            f"{folder / CONFIG}: auto_map={code!r} names code of a tokenizer, and difftx executes no code of a folder; "
            "if the tokenizer encodes texts identically without it, remove auto_map from the file"
        )
    if "added_tokens_decoder" not in settings:
        settings |= read_object(folder / SPECIAL_TOKENS)
    if (template := read_file(folder / TEMPLATE)) is not None:
        settings["chat_template"] = template.decode()
    elif isinstance(templates := settings.get("chat_template"), list):  # Several named templates.
        settings["chat_template"] = {entry["name"]: entry["template"] for entry in templates}.get("default")
    return settings


def read_object(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file. Return an empty one if the file does not exist."""
    content = read_json(path) if path.is_file() else {}
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected an object with settings of a tokenizer")
    return content


class FileTokenizer(Tokenizer):
    """Base class for both families. Error messages begin with `field`, such as "data.tokenizer='/path'"."""

    # The transformers class that encodes all texts identically with the same files, if there is one.
    transformers_class: str | None

    def __init__(
        self, path: Path, settings: dict[str, Any], field: str, end_of_text: str | None, vocabulary: Mapping[str, int]
    ):
        """Look up the special tokens in `settings` and the end-of-text token. `vocabulary` has the id of each token."""
        self.name, self.path, self._vocabulary = str(path), path, vocabulary
        self.n_vocab = max(vocabulary.values(), default=-1) + 1
        name, fix = end_of_text or _content(settings.get("eos_token")), f"{field.partition('tokenizer')[0]}end_of_text"
        if name is None:
            raise UserError(f"{field}: no file names its end-of-text token (eos_token); set {fix} to its name")
        if name not in vocabulary:
            raise UserError(
                f"{field}: the end-of-text token {name!r} is not in the vocabulary; set {fix} to one that is"
            )
        self.eot_token = vocabulary[name]
        if (template := settings.get("chat_template")) is not None:
            names = {key: _content(settings[key]) for key in NAMED if settings.get(key)}
            self.chat_template = ChatTemplate(template, names, self.name)


class JsonTokenizer(FileTokenizer):
    """A tokenizer.json file, encoded by the library `tokenizers`."""

    library = "tokenizers"
    transformers_class = "PreTrainedTokenizerFast"

    def __init__(self, path: Path, settings: dict[str, Any], field: str, end_of_text: str | None):
        self.content, self._settings, self._field = read_json(path), settings, field
        self._library = import_extra("tokenizers", EXTRA)
        self._coders: dict[tuple[bool, bool], Any] = {}
        self._plain = self._coder(chat=True, continues=False)
        super().__init__(path, settings, field, end_of_text, self._plain.get_vocab(with_added_tokens=True))
        encoded = self._plain.encode("a")
        length = [*encoded.special_tokens_mask, 0].index(0)  # Number of special tokens before every text.
        self.prefix = tuple(encoded.ids[:length])
        self._bytes_of = self._byte_rule()

    def encode_ordinary(self, text: str, *, continues: bool = False) -> list[int]:
        return self._encode(text, chat=False, continues=continues)

    def encode_chat(self, text: str, *, continues: bool = False) -> list[int]:
        return self._encode(text, chat=True, continues=continues)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._plain.decode(tokens, skip_special_tokens=False)

    @functools.cached_property
    def token_bytes(self) -> list[bytes | None]:
        special = {token.content for token in self._plain.get_added_tokens_decoder().values() if token.special}
        values: list[bytes | None] = [None] * self.n_vocab
        for token, id_ in self._vocabulary.items():
            values[id_] = b"" if token in special or id_ == self.eot_token else self._bytes_of(token)
        return values

    @functools.cached_property
    def fingerprint(self) -> str:
        added = [str(token) for _, token in sorted(self._plain.get_added_tokens_decoder().items())]
        return json_sha256([self.content, added, self.eot_token])

    def _encode(self, text: str, *, chat: bool, continues: bool) -> list[int]:
        coder = self._coder(chat=chat, continues=continues)
        return coder.encode(without_surrogates(text), add_special_tokens=False).ids

    def _coder(self, *, chat: bool, continues: bool) -> Any:
        """Return the library's tokenizer. Only with `chat`, names of special tokens in the text become these tokens."""
        if (chat, continues) not in self._coders:
            coder = self._build(_without_leading_space(self.content) if continues else self.content)
            coder.encode_special_tokens = not chat
            self._coders[chat, continues] = coder
        return self._coders[chat, continues]

    def _build(self, raw: dict[str, Any]) -> Any:
        """Build the library's tokenizer from a tokenizer.json, and add the tokens listed in the settings."""
        try:
            coder = self._library.Tokenizer.from_str(json.dumps(raw))
        except Exception as error:  # The library raises plain `Exception`.
            raise UserError(f"{self._field}: not a tokenizer.json that `tokenizers` reads ({error})") from error
        coder.no_truncation()
        coder.no_padding()
        known = {repr(token) for token in coder.get_added_tokens_decoder().values()}
        entries = self._settings.get("added_tokens_decoder", {})
        listed = [self._added_token(entries[id_]) for id_ in sorted(entries, key=int)]
        coder.add_tokens([token for token in listed if repr(token) not in known])
        added = {token.content: token for token in coder.get_added_tokens_decoder().values()}
        named = {_content(self._settings.get(key)) for key in NAMED}  # Special even if tokenizer.json says otherwise.
        for entry in _special_entries(self._settings):
            token = added.get(_content(entry)) or self._added_token(entry)
            token.special = token.special or token.content in named
            coder.add_tokens([token])
        return coder

    def _added_token(self, entry: str | dict[str, Any]) -> Any:
        flags = {"content": entry} if isinstance(entry, str) else {k: v for k, v in entry.items() if k != "__type"}
        return self._library.AddedToken(**{"special": True} | flags)

    def _byte_rule(self) -> Callable[[str], bytes]:
        """Return a function from a token to its bytes within a text. The rule depends on the decoder."""
        kinds = {part["type"] for part in _parts(self.content.get("decoder"), "decoders")}
        if "ByteLevel" in kinds:
            return _byte_level
        if kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
            return _with_byte_fallback if "ByteFallback" in kinds else _with_spaces
        raise UserError(
            f"{self._field}: its decoder is {', '.join(sorted(kinds)) or 'missing'}, and difftx reads tokenizers of "
            "byte-level BPE and of SentencePiece; use one of these"
        )


class SentencePieceTokenizer(FileTokenizer):
    """A SentencePiece model, encoded by the library `sentencepiece`."""

    library = "sentencepiece"

    def __init__(self, path: Path, settings: dict[str, Any], field: str, end_of_text: str | None):
        library = import_extra("sentencepiece", EXTRA)
        description = import_extra("sentencepiece.sentencepiece_model_pb2", EXTRA).ModelProto()
        if (content := read_file(path)) is None:
            raise UserError(f"{field}: no such file")
        try:
            description.ParseFromString(content)
            self._model = library.SentencePieceProcessor(model_proto=content)
        except Exception as error:  # protobuf and the library raise several types of errors.
            raise UserError(f"{field}: not a SentencePiece model ({error})") from error
        trainer, normal = description.trainer_spec, description.normalizer_spec
        # LlamaTokenizer ignores these options of the model, and always merges as BPE does.
        options = (normal.name, normal.add_dummy_prefix, normal.remove_extra_whitespaces, normal.escape_whitespaces)
        is_bpe = trainer.model_type == trainer.BPE and trainer.byte_fallback and not trainer.treat_whitespace_as_suffix
        self.transformers_class = "LlamaTokenizer" if is_bpe and options == ("identity", True, False, True) else None
        # Text that continues another one gets no extra leading space, but keeps its own.
        normal.add_dummy_prefix = normal.remove_extra_whitespaces = False
        self._continuing = library.SentencePieceProcessor(model_proto=description.SerializeToString())
        ids = range(self._model.get_piece_size())
        pieces = [self._model.id_to_piece(id_) for id_ in ids]
        roles = {"bos": self._model.bos_id(), "eos": self._model.eos_id(), "unk": self._model.unk_id()}
        settings = {f"{role}_token": pieces[id_] for role, id_ in roles.items() if id_ >= 0} | settings
        added = {_content(token): int(id_) for id_, token in settings.get("added_tokens_decoder", {}).items()}
        vocabulary = {piece: id_ for id_, piece in enumerate(pieces)} | added
        super().__init__(path, settings, field, end_of_text, vocabulary)
        named = [_content(token) for token in _special_entries(settings) if _content(token) in vocabulary]
        controls = [pieces[id_] for id_ in ids if self._model.is_control(id_)]
        names = [*controls, *named, *added, *([end_of_text] if end_of_text else [])]
        self._special: dict[int, str] = {vocabulary[name]: name for name in names}
        longest_first = sorted(self._special.values(), key=lambda name: -len(name))
        self._names = re.compile("|".join(map(re.escape, longest_first)))
        if settings.get("add_bos_token"):
            self.prefix = (vocabulary[_content(settings["bos_token"])],)
        self._content = content

    def encode_ordinary(self, text: str, *, continues: bool = False) -> list[int]:
        return (self._continuing if continues else self._model).encode(without_surrogates(text))

    def encode_chat(self, text: str, *, continues: bool = False) -> list[int]:
        ids: list[int] = []
        end = 0
        for found in self._names.finditer(text):
            ids += self.encode_ordinary(text[end : found.start()], continues=continues or bool(ids))
            ids.append(self._vocabulary[found[0]])
            end = found.end()
        return ids + self.encode_ordinary(text[end:], continues=continues or bool(ids))

    def decode(self, tokens: Sequence[int]) -> str:
        text = ""
        for is_special, run in itertools.groupby(tokens, self._special.__contains__):
            if is_special:
                text += "".join(map(self._special.__getitem__, run))
            else:
                text += (self._continuing if text else self._model).decode(list(run))
        return text

    @functools.cached_property
    def token_bytes(self) -> list[bytes | None]:
        values: list[bytes | None] = [None] * self.n_vocab
        for piece, id_ in self._vocabulary.items():
            if id_ in self._special or self._model.is_unknown(id_):
                values[id_] = b""
            elif not self._model.is_unused(id_):
                values[id_] = _with_byte_fallback(piece) if self._model.is_byte(id_) else _with_spaces(piece)
        return values

    @functools.cached_property
    def fingerprint(self) -> str:
        prefix = [self.prefix] if self.prefix else []
        return json_sha256([self._content.hex(), sorted(self._special.items()), self.eot_token, *prefix])


def _special_entries(settings: Mapping[str, Any]) -> list[str | dict[str, Any]]:
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    named = [settings[key] for key in NAMED if settings.get(key)]
    return [*named, *(extra.values() if isinstance(extra, dict) else extra)]


def _content(token: Any) -> Any:
    """Return the text of a special token. Files write it as a string or as an object."""
    return token["content"] if isinstance(token, dict) else token


def _parts(component: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """Flatten a normalizer, pre-tokenizer or decoder into a list. `name` is the key of the parts of a sequence."""
    if component is None:
        return []
    if component["type"] != "Sequence":
        return [component]
    return [part for inner in component[name] for part in _parts(inner, name)]


def _without_leading_space(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the tokenizer.json, changed so that it does not put a space before a text."""
    normalizers = [part for part in _parts(raw.get("normalizer"), "normalizers") if part["type"] != "Prepend"]
    splitters = []
    for part in _parts(raw.get("pre_tokenizer"), "pretokenizers"):
        if part["type"] == "Metaspace":
            part = {k: v for k, v in part.items() if k != "add_prefix_space"} | {"prepend_scheme": "never"}
        elif part["type"] == "ByteLevel":
            part = part | {"add_prefix_space": False}
        splitters.append(part)
    return raw | {
        "normalizer": {"type": "Sequence", "normalizers": normalizers} if normalizers else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splitters} if splitters else None,
    }


def _byte_level(token: str) -> bytes:
    # Tokens added to the vocabulary are plain text.
    return bytes(map(BYTES_OF.__getitem__, token)) if all(c in BYTES_OF for c in token) else token.encode()


def _with_spaces(token: str) -> bytes:
    return token.replace(SPACE, " ").encode()


def _with_byte_fallback(token: str) -> bytes:
    return bytes.fromhex(found[1]) if (found := re.fullmatch("<0x([0-9A-F]{2})>", token)) else _with_spaces(token)
