"""The command `difftx tokenizer train --input=… --vocab_size=… --out=DIR`: byte-level BPE from your own text.

The folder has a tokenizer.json and a tokenizer_config.json, for `data.tokenizer` and for transformers. The pattern that
splits text before the merges is that of cl100k_base.
"""

import argparse
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence

from difftx.commands.flags import Parser, PathFlag, add_extension_flag, prepare_process
from difftx.data.prepare.readers import Document, Fields, Source, sources_of
from difftx.data.tokenizer import END_OF_TEXT
from difftx.data.tokenizer_files import BYTE_LEVEL, CONFIG, EXTRA, SPLIT, TOKENIZER
from difftx.data.tokenizers import load_tokenizer
from difftx.errors import UserError, import_extra, printable
from difftx.files import is_taken, make_folder, new_folder, require_writable, write_atomically
from difftx.progress import Work

SMALLEST = 257  # Every byte and <|endoftext|>.
HELD_OUT = 5  # Documents are not trained on if the first byte of their hash is less than this: 2 % of them.
SAMPLE_BYTES = 4 * 2**20  # About this much text of each kind is encoded to measure bytes per token.


def main(arguments: Sequence[str]) -> int:
    """Read the flags and train. Exit codes: 0 done, 2 bad input, 1 any other error."""
    parser = Parser("difftx tokenizer", "Make tokenizers.")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="train byte-level BPE")
    train.add_argument("--input", required=True, help="as --input of difftx prepare, also in a bucket")
    train.add_argument("--vocab_size", required=True, type=int, help="number of tokens, special tokens included")
    train.add_argument("--out", required=True, action=PathFlag, help="new folder, also in a bucket")
    train.add_argument("--text_field", default="text", help="field of JSON lines and tables (%(default)s)")
    train.add_argument("--special_token", action="append", default=[], metavar="NAME", help="may be repeated")
    add_extension_flag(train)
    options = parser.parse_args(arguments)
    prepare_process(options)
    _check(options)
    train_tokenizer(options)
    return 0


def _check(options: argparse.Namespace) -> None:
    special = [END_OF_TEXT, *options.special_token]
    if options.vocab_size < (least := SMALLEST + len(options.special_token)):
        raise UserError(f"--vocab_size={options.vocab_size}: 256 bytes and the special tokens need at least {least}")
    if len(set(special)) != len(special) or "" in special:
        raise UserError(
            f"--special_token={','.join(options.special_token)}: names must differ, also from {END_OF_TEXT}"
        )
    if is_taken(options.out, TOKENIZER):
        raise UserError(f"--out={options.out} exists already; name a new folder")
    require_writable(options.out)


class _Texts:
    """The documents of the input, with samples of those that are trained on and of those that are held out."""

    def __init__(self, sources: Sequence[Source], fields: Fields):
        self._sources, self._fields = sources, fields
        self.samples: dict[str, list[str]] = {"held-out": [], "training": []}
        self.documents = self.bytes = 0  # Documents and bytes that are trained on.

    def training(self) -> Iterator[str]:
        """Yield the text of every document that is not held out. The first document with text never is."""
        left, first = dict.fromkeys(self.samples, SAMPLE_BYTES), b""
        with Work() as work, work.task("reading", max(1, sum(source.size for source in self._sources))) as advance:
            for unit in itertools.chain.from_iterable(source.units(self._fields) for source in self._sources):
                for document in unit.content.documents(self._fields):
                    if isinstance(document, UserError):
                        raise document
                    assert isinstance(document, Document)
                    first = first or document.utf8
                    # Equal documents are held out together.
                    is_chosen = document.utf8 != first and hashlib.sha256(document.utf8).digest()[0] < HELD_OUT
                    is_held_out = is_chosen and left["held-out"] > 0
                    kind = "held-out" if is_held_out else "training"
                    if left[kind] > 0:
                        self.samples[kind].append(document.text)
                        left[kind] -= len(document.utf8)
                    if not is_held_out:
                        self.documents += 1
                        self.bytes += len(document.utf8)
                        yield document.text
                advance(unit.input_bytes)


def train_tokenizer(options: argparse.Namespace) -> None:
    """Train on the input, write the files, and print how many bytes of held-out text a token stands for."""
    library = import_extra("tokenizers", EXTRA)
    special = [END_OF_TEXT, *options.special_token]
    shell = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None}
    shell |= {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPLIT, BYTE_LEVEL]}, "post_processor": None}
    shell |= {"decoder": BYTE_LEVEL, "model": {"type": "BPE", "vocab": {}, "merges": []}}
    tokenizer = library.Tokenizer.from_str(json.dumps(shell))
    trainer = library.trainers.BpeTrainer(
        vocab_size=options.vocab_size,
        special_tokens=special,
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = _Texts(sources_of(options.input, valid=False, first_index=0), Fields(options.text_field, None))
    tokenizer.train_from_iterator(texts.training(), trainer)
    if not texts.bytes:
        raise UserError(f"--input={options.input}: there is no text")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    make_folder(options.out.parent)
    with new_folder(options.out, TOKENIZER) as folder:
        write_atomically(folder / TOKENIZER, tokenizer.to_str() + "\n")
        write_atomically(folder / CONFIG, json.dumps(settings, indent=2) + "\n")
    trained = load_tokenizer(str(options.out), field="--out")
    few = "" if trained.n_vocab == options.vocab_size else ", because the text has no more pairs"
    corpus = f"{texts.documents:,} documents of {texts.bytes / 1e6:,.1f} MB"
    print(printable(f"{options.out}: {trained.n_vocab:,} tokens{few}; trained on {corpus}"))
    for kind, sample in texts.samples.items():
        if size := sum(len(text.encode()) for text in sample):
            tokens = sum(len(trained.encode_to_numpy(text)) for text in sample)
            print(f"{kind} text: {size / tokens:.3f} bytes per token ({size:,} bytes of {len(sample):,} documents)")
        else:
            print(f"{kind} text: none, because the input has too few documents")
