"""Throughput of the data pipeline without training.

python benchmarks/data.py loader [--store=DIR --tokenizer=NAME] [--rows=64] [--sequence_length=4096] [--rounds=7]

`loader` prints a table of tokens/s of batches from a memory-mapped store, on the host and placed on the device as in
training, as medians over interleaved rounds in one process. Without --store, it writes 64 M tokens of random documents
(lognormal lengths, median 400) to a temporary folder. It also prints the time to pack 10 M such documents.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import rich.table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.console_tables import console, median_and_range, numbers_table
from difftx.config import MeshConfig
from difftx.config.recipes import load_config
from difftx.data.loader import HostSlice, Loader, host_batches
from difftx.data.packing import best_fit
from difftx.data.sources import load_sources
from difftx.data.store import FORMAT, sha256_of, shard_file, write_meta
from difftx.data.tokenizer import load_tokenizer
from difftx.parallel.layout import Layout
from difftx.parallel.mesh import make_mesh

BASE = Path(__file__).resolve().parent.parent / "configs" / "base.py"
BATCHES = 20  # Batches per round.
VOCABULARY = 100_277  # Of cl100k_base, so that tokens need 4 bytes.
SHARD_TOKENS = 2**23
SHARDS = {"train": 8, "valid": 1}  # Split → number of shards.
MEDIAN_DOCUMENT_TOKENS = 400  # Approximate median of `random_lengths`.
PACKED_DOCUMENTS = 10_000_000

# In values of fields, STORE stands for the folder of the token store.
TWO_SOURCES = '[{"name": "a", "path": "STORE", "weight": 0.7}, {"name": "b", "path": "STORE", "weight": 0.3}]'
MASKED = {"data.document_mask": "true"}
PACKED = MASKED | {"data.packing": "best_fit"}
# Name of a way to make rows → fields of the config.
CONTESTANTS = {
    "concat": {"data.path": "STORE"},
    "concat, document mask": {"data.path": "STORE"} | MASKED,
    "best_fit, document mask": {"data.path": "STORE"} | PACKED,
    "two sources, best_fit, document mask": {"data.sources": TWO_SOURCES} | PACKED,
    "two sources up-sampled, best_fit, document mask": {"data.sources": TWO_SOURCES}
    | PACKED
    | {"data.upsampling.longer_than_tokens": "4096", "data.upsampling.share": "0.7"},
}


def print_loader(args: argparse.Namespace) -> None:
    """Print tokens/s of each entry of `CONTESTANTS`, then the time to pack documents."""
    console(120).print(loader_table(measure_loader(args), args))
    print(packing_line(args.sequence_length))


def measure_loader(args: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Return for each entry of `CONTESTANTS` the seconds of each round, on the host and then placed on the device."""
    with tempfile.TemporaryDirectory() as folder:
        store = args.store
        if store is None:
            store = Path(folder) / "store"
            write_store(store)
        batches = {name: make_batches(changes, store, args, folder) for name, changes in CONTESTANTS.items()}
        seconds: dict[str, list[list[float]]] = {name: [[], []] for name in batches}
        for _ in range(args.rounds + 1):
            for name, both in batches.items():
                for index, advance in enumerate(both):
                    seconds[name][index].append(timed(advance))
    # The first round fills the page cache and the prefetch buffers.
    return {name: [of_rounds[1:] for of_rounds in both] for name, both in seconds.items()}


def loader_table(seconds: dict[str, list[list[float]]], args: argparse.Namespace) -> rich.table.Table:
    """Return a table of M tokens/s, from the seconds that `measure_loader` returns."""
    title = (
        f"rows of {args.sequence_length:,} tokens, {args.rows} per batch; {os.cpu_count()} CPUs, "
        f"load {os.getloadavg()[0]:.1f}; M tokens/s, median (worst … best of {args.rounds})"
    )
    table = numbers_table(title, ("rows", "on the host", "placed"))
    round_tokens = BATCHES * args.rows * args.sequence_length
    for name, both in seconds.items():
        rates = ([round_tokens / elapsed / 1e6 for elapsed in of_rounds] for of_rounds in both)
        table.add_row(name, *(median_and_range(of_rounds, ".1f") for of_rounds in rates))
    return table


def packing_line(sequence_length: int) -> str:
    """Pack random documents into rows, and return a line with the seconds and the share of padding."""
    lengths = random_lengths(np.random.default_rng(0), PACKED_DOCUMENTS)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    start = time.perf_counter()
    rows = len(best_fit(offsets, sequence_length))
    seconds = time.perf_counter() - start
    padding = 1 - offsets[-1] / (rows * sequence_length)
    return f"best_fit: {PACKED_DOCUMENTS:,} documents into {rows:,} rows in {seconds:.1f} s, {padding:.4%} padding"


def make_batches(changes: dict[str, str], store: Path, args: argparse.Namespace, folder: str) -> list[Callable]:
    """Return two functions that produce the next batch: one on the host, one on the device.

    Args:
        changes: Fields of the config, in whose values STORE stands for `store`.
        store: Folder of the token store.
        args: Flags of the command.
        folder: Folder of the loader's cache.
    """
    config = load_config(
        str(BASE),
        {name: text.replace("STORE", str(store)) for name, text in changes.items()}
        | {
            "data.tokenizer": args.tokenizer,
            "data.sequence_length": str(args.sequence_length),
            "data.cache_path": folder,
            "train.global_batch_tokens": str(args.rows * args.sequence_length),
        },
    )
    sources = load_sources(config.data, load_tokenizer(args.tokenizer))
    for note in sources.notes:
        print(note)
    mesh = make_mesh(
        MeshConfig(data=1, fsdp=1, context=1, tensor=1, context_method="heads", slices=1, preset="none"),
        devices=jax.devices()[:1],
    )
    prefetch = config.data.prefetch_batches
    on_host = host_batches(HostSlice(sources.examples, args.rows, np.arange(args.rows)), prefetch)
    placed = Loader(
        sources.examples,
        batch_rows=args.rows,
        prefetch_batches=prefetch,
        sharding=jax.NamedSharding(mesh, Layout().act_BT),
        signature={},
        vocab_size=config.model.embeddings,
        where=sources.where,
    )
    return [lambda: next(on_host), lambda: jax.block_until_ready(next(placed))]


def timed(advance: Callable) -> float:
    """Return the seconds that a round of `BATCHES` batches takes."""
    start = time.perf_counter()
    for _ in range(BATCHES):
        advance()
    return time.perf_counter() - start


def write_store(folder: Path) -> None:
    """Write a token store of random documents."""
    rng = np.random.default_rng(0)
    splits = {}
    for split, count in SHARDS.items():
        (folder / split).mkdir(parents=True)
        shards: list[dict[str, Any]] = []
        for index in range(count):
            tokens, offsets = (shard_file(folder, split, index, kind) for kind in ("tokens", "offsets"))
            ends = np.cumsum(random_lengths(rng, SHARD_TOKENS // MEDIAN_DOCUMENT_TOKENS))
            starts = np.concatenate([[0], ends[ends < SHARD_TOKENS], [SHARD_TOKENS]]).astype("<u8")
            rng.integers(0, VOCABULARY, SHARD_TOKENS, np.uint32).tofile(tokens)
            starts.tofile(offsets)
            sha256 = {"tokens": sha256_of(tokens), "offsets": sha256_of(offsets)}
            shards.append({"tokens": SHARD_TOKENS, "documents": len(starts) - 1, "bytes": 0, "sha256": sha256})
        sums = {name: sum(shard[name] for shard in shards) for name in ("documents", "tokens", "bytes")}
        splits[split] = {**sums, "duplicates": 0, "shards": shards}
    encoding = load_tokenizer("bytes")
    tokenizer = {"name": "bytes", "vocabulary_sha256": encoding.fingerprint}
    tokenizer |= {"vocab_size": encoding.n_vocab, "end_of_text": encoding.eot_token}
    meta = {"format": FORMAT, "dtype": "uint32", "tokenizer": tokenizer, "empty": 0, "skipped": 0, "splits": splits}
    write_meta(folder, meta)


def random_lengths(rng: np.random.Generator, documents: int) -> np.ndarray:
    """Return random document lengths in tokens, long-tailed like those of web pages. Their median is exp(6) = 403."""
    return np.exp(rng.normal(6, 1.2, documents)).astype(np.int64) + 1


def main() -> None:
    """Parse the flags and run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    loader = commands.add_parser("loader", help="tokens/s of the loader")
    loader.set_defaults(run=print_loader)
    loader.add_argument("--store", type=Path, help="folder of `difftx prepare`")
    loader.add_argument("--tokenizer", default="bytes", help="tokenizer of --store (%(default)s)")
    loader.add_argument("--rows", type=int, default=64)
    loader.add_argument("--sequence_length", type=int, default=4096)
    loader.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
