"""Commands for token stores: difftx data verify DIR, data show DIR --row N, data bigrams DIR --out=FILE."""

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import rich.console
import rich.text

from difftx.commands.flags import CountFlag, Parser, PathFlag
from difftx.data.bigrams import write_bigrams
from difftx.data.store import SPLITS, file_problems, open_store, read_meta, shard_file
from difftx.data.tokenizers import load_tokenizer
from difftx.errors import UserError, printable
from difftx.files import list_folder, open_file, require_local_paths, require_writable_file
from difftx.progress import Work
from difftx.storage.paths import AnyPath, is_bucket, path_of

DOCUMENT_STYLES = ("cyan", "yellow")  # Alternate, so that neighbouring documents differ.


def main(arguments: Sequence[str]) -> int:
    """Run `data verify`, `data show` or `data bigrams`."""
    parser = Parser("difftx data", "Inspect token stores.")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("verify", help="read every file and compare it with meta.json")
    check.add_argument("folder", action=PathFlag)
    show = commands.add_parser("show", help="print a row, decoded")
    show.add_argument("folder", action=PathFlag)
    show.add_argument("--row", type=int, required=True, help="row i consists of tokens i T … i T + T - 1")
    show.add_argument("--split", choices=SPLITS, default="train")
    show.add_argument("--sequence_length", action=CountFlag, default=2048, help="T (%(default)s)")
    show.add_argument("--tokenizer", help="path of the store's tokenizer, if it has moved")
    count = commands.add_parser("bigrams", help="count successive tokens, for the suite recall")
    count.add_argument("folders", nargs="+", metavar="folder")
    count.add_argument("--out", type=Path, required=True, metavar="FILE", help="file to write, for eval.bigrams_path")
    rarer = "leave out rarer bigrams; up to the suite's limit + 1"
    count.add_argument("--min_count", action=CountFlag, default=1, help=rarer)
    options = parser.parse_args(arguments)
    require_local_paths(options)
    if options.command == "bigrams":
        folders = [path_of("folder", folder) for folder in options.folders]
        count_bigrams(folders, options.out, options.min_count)
    elif options.command == "verify":
        verify(options.folder)
    else:
        show_row(options.folder, options)
    return 0


def verify(folder: AnyPath) -> None:
    """Compare every file of a store with meta.json. Print its counts, or print all problems and raise `UserError`."""
    meta = read_meta(folder)
    problems = []
    for split in SPLITS:
        problems += file_problems(folder, meta, split, content=True)
        shards = meta["splits"][split]["shards"]
        known = {shard_file(folder, split, i, kind) for i, shard in enumerate(shards) for kind in shard["sha256"]}
        others = {folder / split / name for name in list_folder(folder / split)} - known
        problems += [f"{file}: does not belong to this store" for file in sorted(others)]
    if problems:
        print(*map(printable, problems), sep="\n")
        raise UserError(f"{folder}: {len(problems)} problems, the first: {problems[0]}")
    for split in SPLITS:
        counts = meta["splits"][split]
        shards, documents, tokens = len(counts["shards"]), counts["documents"], counts["tokens"]
        print(f"{split}: {shards} shards, {documents:,} documents, {tokens:,} tokens")
    print(f"{folder}: every file is as it was written, by its SHA-256")


def show_row(folder: AnyPath, options: argparse.Namespace) -> None:
    """Print the text of a row, with a title above each document, and documents in alternating colours."""
    split, row, sequence_length = options.split, options.row, options.sequence_length
    store = open_store(folder, split)
    meta = read_meta(folder)
    rows = -(-len(store) // sequence_length)
    if not 0 <= row < rows:
        raise UserError(f"--row={row}: {split} has rows 0 … {rows - 1} of --sequence_length={sequence_length}")
    name, end_of_text = options.tokenizer or meta["tokenizer"]["name"], meta["tokenizer"].get("end_of_text_name")
    tokenizer = load_tokenizer(name, field="--tokenizer", end_of_text=end_of_text)
    if tokenizer.fingerprint != meta["tokenizer"]["vocabulary_sha256"]:
        raise UserError(f"--tokenizer={tokenizer.name}: {folder} has another vocabulary, {meta['tokenizer']['name']!r}")
    start, stop = row * sequence_length, min((row + 1) * sequence_length, len(store))
    first = int(np.searchsorted(store.offsets, np.uint64(start), side="right")) - 1
    last = int(np.searchsorted(store.offsets, np.uint64(stop), side="left"))
    console = rich.console.Console(soft_wrap=True, highlight=False)
    for document in range(first, last):
        begin, end = int(store.offsets[document]), int(store.offsets[document + 1])
        ids = store.slice(max(begin, start), min(end, stop))
        name = _document_id(folder, meta, split, document)
        title = f"document {document}" if name is None else f"document {document} ({name})"
        where = f"tokens {max(begin, start) - begin} … {min(end, stop) - begin - 1} of {end - begin}"
        console.print(rich.text.Text(printable(f"── {title}, {where} ──"), style="bold reverse"))
        text = tokenizer.decode(ids.tolist())
        console.print(rich.text.Text(printable(text), style=DOCUMENT_STYLES[document % 2]))


def count_bigrams(folders: Sequence[AnyPath], out: Path, min_count: int) -> None:
    """Count the bigrams in the training documents of all stores, and write the counts to one file."""
    stores = [open_store(folder, "train") for folder in folders]
    tokenizers = [read_meta(folder)["tokenizer"] for folder in folders]
    first = tokenizers[0]
    for folder, tokenizer in zip(folders, tokenizers, strict=True):
        if tokenizer["vocabulary_sha256"] != first["vocabulary_sha256"]:
            raise UserError(
                f"{folder}: tokenizer {tokenizer['name']!r}, but {folders[0]} has {first['name']!r} with another "
                "vocabulary; count stores of one vocabulary together"
            )
    if not out.parent.is_dir() or out.is_dir():
        raise UserError(f"--out={out}: name a file in a folder that exists")
    require_writable_file(out)
    paths = [str(folder if is_bucket(folder) else folder.resolve()) for folder in folders]
    description = {
        "tokenizer": {key: first[key] for key in ("name", "vocabulary_sha256")},
        "stores": [{"path": p, "sha256": store.fingerprint} for p, store in zip(paths, stores, strict=True)],
    }
    with Work() as work:
        header = write_bigrams(stores, out, min_count=min_count, description=description, work=work)
    print(
        f"{out}: {header['bigrams']:,} bigrams that occur at least {min_count:,} times; "
        f"{header['occurrences']:,} occurrences of any in {header['tokens']:,} tokens"
    )


def _document_id(folder: AnyPath, meta: dict[str, Any], split: str, document: int) -> str | None:
    for index, shard in enumerate(meta["splits"][split]["shards"]):
        if document < shard["documents"]:
            if "ids" not in shard["sha256"]:
                return None
            with open_file(shard_file(folder, split, index, "ids")) as lines:
                return json.loads(next(itertools.islice(lines, document, None)))
        document -= shard["documents"]
    return None
