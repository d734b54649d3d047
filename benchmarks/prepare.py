"""Speed of `difftx prepare` compared with bare tiktoken, in alternation on the same texts and cores.

python benchmarks/prepare.py --input=train.jsonl.gz [--valid_input=FILE] [--tokenizer=cl100k_base] [--rounds=5]

`difftx prepare` is timed from the start of its process until the store is finished, including the vocabulary,
decompression and fsync. tiktoken's `encode_ordinary_batch` is timed with the vocabulary and all texts in memory. The
tables show wall time and the processor time of all processes and threads, which other users of the machine affect less.
The numbers of tokens are printed for comparison.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rich.console
import rich.table
import tiktoken

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from difftx.data.prepare.readers import Document, Fields, sources_of
from difftx.data.store import read_meta

ROOT = Path(__file__).resolve().parent.parent


def measure(args: argparse.Namespace) -> None:
    """Print the times of both, and the numbers of documents and tokens."""
    fields = Fields("text", None)
    texts = []
    for pattern in filter(None, (args.valid_input, args.input)):
        for source in sources_of(pattern, valid=False, first_index=0):
            for unit in source.units(fields):
                texts += [d.text for d in unit.content.documents(fields) if isinstance(d, Document)]
    encoding = tiktoken.get_encoding(args.tokenizer)
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    cores = len(os.sched_getaffinity(0))
    counts: dict[str, Any] = {}

    def bare() -> None:
        counts["tiktoken"] = sum(map(len, encoding.encode_ordinary_batch(texts, num_threads=cores)))

    def ours() -> None:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "difftx", "prepare", f"--out={folder}/store", f"--workers={cores}"]
            flags = [f"--input={args.input}", f"--tokenizer={args.tokenizer}"]
            flags += [f"--valid_input={args.valid_input}"] if args.valid_input else []
            subprocess.run([*command, *flags], cwd=ROOT, check=True, capture_output=True)
            counts["store"] = read_meta(Path(folder) / "store")["splits"]

    rounds = [(timed(bare), timed(ours)) for _ in range(args.rounds)]
    what = f"{len(texts)} documents, {megabytes:.1f} MB, {args.tokenizer}"
    table = rich.table.Table(title=f"{what}; {cores} cores, load {os.getloadavg()[0]:.1f}; medians of {args.rounds}")
    for name in ("", "wall s", "MB/s", "M tokens/s", "CPU s", "MB per CPU s"):
        table.add_column(name, justify="right" if name else "left")
    for i, name in enumerate(("tiktoken.encode_ordinary_batch", "difftx prepare")):
        wall, cpu = (statistics.median(r[i][kind] for r in rounds) for kind in (0, 1))
        tokens = counts["tiktoken"] / 1e6
        table.add_row(name, *(f"{x:.2f}" for x in (wall, megabytes / wall, tokens / wall, cpu, megabytes / cpu)))
    console = rich.console.Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    for kind, what in enumerate(("wall", "CPU")):
        ratios = sorted(a[kind] / b[kind] for a, b in rounds)
        each = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"speed of prepare / tiktoken, {what} time: {statistics.median(ratios):.3f} ({each})")
    for split, count in counts["store"].items():
        print(f"{split}: {count['documents']} documents, {count['tokens'] - count['documents']:,} tokens of text")
    print(f"tiktoken: {counts['tiktoken']:,} tokens")


def timed(call: Callable[[], None]) -> tuple[float, float]:
    """Return the wall seconds of a call, and the processor seconds of this process and its children."""
    start, before = time.perf_counter(), processor_seconds()
    call()
    return time.perf_counter() - start, processor_seconds() - before


def processor_seconds() -> float:
    """Return the processor seconds so far of this process and of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> None:
    """Parse the flags and run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", required=True)
    parser.add_argument("--valid_input")
    parser.add_argument("--tokenizer", default="cl100k_base")
    parser.add_argument("--rounds", type=int, default=5)
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
