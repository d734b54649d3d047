"""The command `difftx tokenizer train --input=… --vocab_size=… --out=DIR`: byte-level BPE from your own text.

It writes a tokenizer.json and a tokenizer_config.json, for `data.tokenizer` and for transformers. Before the merges,
text is split with the pattern of cl100k_base.
"""

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence

from difftx.commands.flags import Parser, PathFlag, add_extension_flag, prepare_process
from difftx.data.prepare.readers import Document, Fields, sources_of
from difftx.data.tokenizer import END_OF_TEXT
from difftx.data.tokenizer_files import BYTE_LEVEL, CONFIG, EXTRA, SPLIT, TOKENIZER
from difftx.data.tokenizers import load_tokenizer
from difftx.errors import UserError, import_extra, printable
from difftx.files import is_taken, make_folder, new_folder, require_writable, write_atomically
from difftx.progress import Work

SMALLEST = 257  # Every byte and <|endoftext|>.
SAMPLE_BYTES = 4 * 2**20  # Encode about this much text to measure bytes per token.


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


def train_tokenizer(options: argparse.Namespace) -> None:
    """Train on the input, write the files, and print the mean number of bytes per token."""
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
    sources, fields = sources_of(options.input, valid=False, first_index=0), Fields(options.text_field, None)
    documents, size, sample = 0, 0, []

    def texts() -> Iterator[str]:
        nonlocal documents, size
        for unit in itertools.chain.from_iterable(source.units(fields) for source in sources):
            for document in unit.content.documents(fields):
                if isinstance(document, UserError):
                    raise document
                assert isinstance(document, Document)
                if size < SAMPLE_BYTES:
                    sample.append(document.text)
                documents, size = documents + 1, size + len(document.text.encode())
                yield document.text
            advance(unit.input_bytes)

    with Work() as work, work.task("reading", max(1, sum(source.size for source in sources))) as advance:
        tokenizer.train_from_iterator(texts(), trainer)
    if not size:
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
    tokens = sum(len(trained.encode_to_numpy(text)) for text in sample)
    corpus = f"{documents:,} documents of {size / 1e6:,.1f} MB"
    print(printable(f"{options.out}: {trained.n_vocab:,} tokens{few}; trained on {corpus}"))
    ratio = sum(len(text.encode()) for text in sample) / tokens
    print(f"{ratio:.3f} bytes per token of the first {len(sample):,} documents")
