"""Throughput of the data pipeline without training.

python benchmarks/data.py [--store=DIR --tokenizer=NAME] [--rows=64] [--sequence_length=4096] [--rounds=7]

Prints a table of tokens/s of batches from a store, on the host and placed on the device as in training.
The numbers are medians over interleaved rounds in one process. Without --store, the script writes 64 M tokens of random
documents (lognormal lengths, median 400) to a temporary folder. It also prints the time to pack 10 M such documents.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import rich.table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.console_tables import console, median_and_range, numbers_table
from difftx.config import MeshConfig
from difftx.config.recipes import load_config
from difftx.data.loader import HostBatches, Loader
from difftx.data.packing import best_fit
from difftx.data.sources import load_sources
from difftx.data.store import FORMAT, sha256_of, shard_file, write_meta
from difftx.data.tokenizers import load_tokenizer
from difftx.parallel.layout import Layout
from difftx.parallel.mesh import make_mesh

BASE = Path(__file__).resolve().parent.parent / "configs" / "base.py"
BATCHES = 20  # Batches per round.
VOCABULARY = 100_277  # Size of cl100k_base; its tokens need 4 bytes.
SHARD_TOKENS = 2**23
SHARDS = {"train": 8, "valid": 1}  # Split → number of shards.
MEDIAN_DOCUMENT_TOKENS = 400  # Approximate median of `random_lengths`.
PACKED_DOCUMENTS = 10_000_000

# In values of fields, STORE stands for the folder of the token store.
TWO_SOURCES = '[{"name": "a", "path": "STORE", "weight": 0.7}, {"name": "b", "path": "STORE", "weight": 0.3}]'
MASKED = {"data.document_mask": "true"}
PACKED = MASKED | {"data.packing": "best_fit"}
# Name of a way to make rows → fields of the config.
ROW_SETTINGS = {
    "concat": {"data.path": "STORE"},
    "concat, document mask": {"data.path": "STORE"} | MASKED,
    "best_fit, document mask": {"data.path": "STORE"} | PACKED,
    "two sources, best_fit, document mask": {"data.sources": TWO_SOURCES} | PACKED,
    "two sources up-sampled, best_fit, document mask": {"data.sources": TWO_SOURCES}
    | PACKED
    | {"data.upsampling.longer_than_tokens": "4096", "data.upsampling.share": "0.7"},
}


class Stages(NamedTuple):
    """Functions that produce the next batch."""

    host: Callable[[], object]  # Up to an array on the host.
    device: Callable[[], object]  # Up to an array that is placed on the device.


class Seconds(NamedTuple):
    """Seconds of each round, of `Stages`."""

    host: list[float]
    device: list[float]


def measure_loader(args: argparse.Namespace) -> dict[str, Seconds]:
    """Return the seconds of each round for each entry of `ROW_SETTINGS`."""
    with tempfile.TemporaryDirectory() as folder:
        store = args.store
        if store is None:
            store = Path(folder) / "store"
            write_store(store)
        stages_by_name = {name: make_batches(changes, store, args, folder) for name, changes in ROW_SETTINGS.items()}
        seconds = {name: Seconds([], []) for name in stages_by_name}
        for _ in range(args.rounds + 1):
            for name, stages in stages_by_name.items():
                seconds[name].host.append(timed(stages.host))
                seconds[name].device.append(timed(stages.device))
    # The first round fills the page cache and the prefetch buffers.
    return {name: Seconds(host[1:], device[1:]) for name, (host, device) in seconds.items()}


def loader_table(seconds: dict[str, Seconds], args: argparse.Namespace) -> rich.table.Table:
    """Return a table of M tokens/s, from the seconds that `measure_loader` returns."""
    title = (
        f"rows of {args.sequence_length:,} tokens, {args.rows} per batch; {os.cpu_count()} CPUs, "
        f"load {os.getloadavg()[0]:.1f}; M tokens/s, median (worst … best of {args.rounds})"
    )
    table = numbers_table(title, ("rows", "on the host", "placed"))
    round_tokens = BATCHES * args.rows * args.sequence_length
    for name, seconds_by_stage in seconds.items():
        rates_by_stage = ([round_tokens / elapsed / 1e6 for elapsed in rounds] for rounds in seconds_by_stage)
        table.add_row(name, *(median_and_range(rates, ".1f") for rates in rates_by_stage))
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


def make_batches(changes: dict[str, str], store: Path, args: argparse.Namespace, folder: str) -> Stages:
    """Return the functions that produce the next batch.

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
    on_host = HostBatches(sources.examples, args.rows, np.arange(args.rows)).iterator(prefetch)
    placed = Loader(
        sources,
        batch_rows=args.rows,
        prefetch_batches=prefetch,
        sharding=jax.NamedSharding(mesh, Layout().act_BT),
        vocab_size=config.model.embeddings,
    )
    return Stages(host=lambda: next(on_host), device=lambda: jax.block_until_ready(next(placed)))


def timed(advance: Callable[[], object]) -> float:
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
    """Print tokens/s of each entry of `ROW_SETTINGS`, then the time to pack documents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, help="folder of `difftx prepare`")
    parser.add_argument("--tokenizer", default="bytes", help="tokenizer of --store (%(default)s)")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--sequence_length", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    console(120).print(loader_table(measure_loader(args), args))
    print(packing_line(args.sequence_length))


if __name__ == "__main__":
    main()
