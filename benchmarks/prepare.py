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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import rich.table
import tiktoken

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.console_tables import console, numbers_table
from difftx.data.prepare.readers import Document, Fields, sources_of
from difftx.data.store import read_meta

ROOT = Path(__file__).resolve().parent.parent


class Times(NamedTuple):
    """Times of one call."""

    wall: float  # Seconds.
    cpu: float  # Seconds of all processes and threads.


def read_texts(patterns: Iterable[str]) -> list[str]:
    """Return the texts of all documents in files, as `difftx prepare` reads them."""
    fields = Fields("text", None)
    texts = []
    for pattern in patterns:
        for source in sources_of(pattern, valid=False, first_index=0):
            for unit in source.units(fields):
                texts += [d.text for d in unit.content.documents(fields) if isinstance(d, Document)]
    return texts


def print_comparison(args: argparse.Namespace) -> None:
    """Measure tiktoken and `difftx prepare` in turn, and print times and the numbers of documents and tokens."""
    texts = read_texts(filter(None, (args.valid_input, args.input)))
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
    input_text = f"{len(texts)} documents, {megabytes:.1f} MB, {args.tokenizer}"
    title = f"{input_text}; {cores} cores, load {os.getloadavg()[0]:.1f}; medians of {args.rounds}"
    console(120).print(times_table(title, rounds, megabytes, counts["tiktoken"] / 1e6))
    for kind, name in (("wall", "wall"), ("cpu", "CPU")):
        ratios = sorted(getattr(bare_times, kind) / getattr(own_times, kind) for bare_times, own_times in rounds)
        each = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"speed of prepare / tiktoken, {name} time: {statistics.median(ratios):.3f} ({each})")
    for split, count in counts["store"].items():
        print(f"{split}: {count['documents']} documents, {count['tokens'] - count['documents']:,} tokens of text")
    print(f"tiktoken: {counts['tiktoken']:,} tokens")


def times_table(
    title: str, rounds: Sequence[tuple[Times, Times]], megabytes: float, million_tokens: float
) -> rich.table.Table:
    """Return a table of the medians of tiktoken and `difftx prepare`; the sizes are those of the whole input."""
    table = numbers_table(title, ("", "wall s", "MB/s", "M tokens/s", "CPU s", "MB per CPU s"))
    names = ("tiktoken.encode_ordinary_batch", "difftx prepare")
    for name, times in zip(names, zip(*rounds, strict=True), strict=True):
        wall, cpu = (statistics.median(of_rounds) for of_rounds in zip(*times, strict=True))
        cells = (wall, megabytes / wall, million_tokens / wall, cpu, megabytes / cpu)
        table.add_row(name, *(f"{cell:.2f}" for cell in cells))
    return table


def timed(call: Callable[[], None]) -> Times:
    """Return the times of a call, in this process and its children."""
    start, cpu_start = time.perf_counter(), processor_seconds()
    call()
    return Times(time.perf_counter() - start, processor_seconds() - cpu_start)


def processor_seconds() -> float:
    """Return the processor seconds so far of this process and of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> None:
    """Parse the flags and run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", required=True, help="file or pattern of files, as for `difftx prepare`")
    parser.add_argument("--valid_input", help="the same for validation text")
    parser.add_argument("--tokenizer", default="cl100k_base")
    parser.add_argument("--rounds", type=int, default=5)
    print_comparison(parser.parse_args())


if __name__ == "__main__":
    main()
