"""Tokenizers of three families, trained on this repository's pages, and random strings to encode."""

import functools
import io
import json
import random
from pathlib import Path

from conftest import ROOT

WORDS = ["the", " and", "'s", "'LL", "12345", "?!", "</p>", "def f(x):\n    return x[0]", "for (i = 0; i < n; ++i) {"]
SPACES = ["\n", "\r\n", "  ", "\t", " ", "\u00a0", "\u3000", "\u200b", "▁"]
SCRIPTS = ["é", "e\u0301", "ß", "ﬁ", "Ａ", "漢字", "العربية", "हिन्दी", "🙂", "👩\u200d👩\u200d👧", "…"]
CONTROLS = ["\x00", "\x07", "\x1b[0m", "\u202e"]
PIECES = [*WORDS, *SPACES, *SCRIPTS, *CONTROLS]
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|system|>", "<|user|>", "<|assistant|>"]


def random_strings(count, seed=0):
    """Yield strings of pieces and of characters of all planes, among them unassigned ones."""
    draw = random.Random(seed)
    for _ in range(count):
        parts = []
        for _ in range(draw.randrange(40)):
            ranges = [(1, 128), (1, 0xD800), (0xE000, 0x110000)]
            parts.append(draw.choice(PIECES) if draw.random() < 0.7 else chr(draw.randrange(*draw.choice(ranges))))
        yield "".join(parts)


def texts():
    """Return lines to train on: English, code and other scripts."""
    pages = [ROOT / "docs" / f"{name}.md" for name in ("design", "extend", "operations")]
    lines = [line for path in pages for line in path.read_text().splitlines() if line.strip()]
    return lines + (ROOT / "difftx" / "files.py").read_text().splitlines() + [" ".join(SCRIPTS)] * 20


def write_settings(folder: Path, **more):
    """Write tokenizer_config.json and a chat template."""
    settings = {"bos_token": "<s>", "eos_token": "</s>", "extra_special_tokens": SPECIAL} | more
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def sentencepiece_model(path: Path, model_type, **options):
    """Write a SentencePiece model that the library `sentencepiece` trains, once per process and set of options."""
    path.write_bytes(_trained_sentencepiece(model_type, **options))
    return path


@functools.cache
def _trained_sentencepiece(model_type, *, normalization="identity", byte_fallback=True, **options):
    import sentencepiece

    model, is_identity = io.BytesIO(), normalization == "identity"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts()),
        model_writer=model,
        vocab_size=800,
        model_type=model_type,
        byte_fallback=byte_fallback,
        character_coverage=0.99,
        normalization_rule_name=normalization,
        remove_extra_whitespaces=not is_identity,
        user_defined_symbols=SPECIAL,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


def family(train):
    """Return a function that writes a folder with the tokenizer.json of `train`, which is called once per process."""
    trained = functools.cache(train)

    def write(folder: Path):
        folder.mkdir()
        (folder / "tokenizer.json").write_text(trained())
        write_settings(folder)
        return folder

    return write


@family
def byte_level_folder():
    """Train byte-level BPE with the splits of GPT-2."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", *SPECIAL]
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer.to_str()


@family
def byte_fallback_folder():
    """Train BPE with ▁ for spaces and bytes for unknown characters, as in a tokenizer.json of Llama."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    special = ["<unk>", "<s>", "</s>", *SPECIAL]
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=[*special, *(f"<0x{i:02X}>" for i in range(256))], limit_alphabet=120,
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator([word for line in texts() for word in line.split()], trainer)
    raw = json.loads(tokenizer.to_str())
    raw["added_tokens"] = [token for token in raw["added_tokens"] if token["content"] in special]
    tokenizer = Tokenizer.from_str(json.dumps(raw))
    fallback = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(fallback)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer.to_str()


def prefixed_bytes_folder(folder: Path):
    """Write a tokenizer.json of single bytes that begins each text with <s>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    first = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[first])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder


@family
def unigram_folder():
    """Train a Unigram model on normalised text."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    special = ["<unk>", "<s>", "</s>", *SPECIAL]
    trainer = trainers.UnigramTrainer(vocab_size=600, special_tokens=special, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(texts()[::8], trainer)  # All lines would take seconds.
    return tokenizer.to_str()


FAMILIES = {
    "byte-level BPE": byte_level_folder,
    "BPE with byte fallback": byte_fallback_folder,
    "Unigram": unigram_folder,
}
