"""Compare the speed of difftx on this machine with transformers on torch, and with nanodo's Transformer.

python benchmarks/peers.py [--sizes=quickstart,19m] [--rounds=7] [--steps=N] [--torch=.venv-parity/bin/python]
    [--nanodo=FOLDER] [--only=NAME,…] [--isa=avx2]
python benchmarks/peers.py --sizes=gpu --only=difftx,torch.compile --torch=PYTHON    # on a GPU

Each model has a process of its own. The processes take turns, so a change in the machine's speed affects all of them:
in each round, each process trains and then generates, while the others are stopped. All models have the same shapes,
float32 weights and activations, AdamW with weight decay and clipping, random tokens, and the same number of threads.
The first round is not counted. difftx's processes ask Linux for huge pages, as its commands do. With
GLIBC_TUNABLES=glibc.malloc.hugetlb=1 all processes do. --isa=avx2 tells XLA, oneDNN and torch to use AVX2 only, as on
most laptops.

In the size "gpu", activations are bfloat16. The processes only train, one after the other, because not all models fit
in the memory of one GPU.

`make .venv-parity/.installed` installs torch and transformers, and --nanodo names a clone of nanodo. The benchmark
prints the peers that it cannot find.

The table of a size has the tokens/s of training, of a prompt of 2,048 tokens until its first new token, and of
generation (one row, with a cache, 256 tokens after a prompt of 16), ratios to difftx's model of the same architecture,
the peak resident memory, and the time from the start of the process to the end of its first step. transformers
generates with its default cache in eager mode, and with a static cache if compiled. On a GPU, the memory is that of
the device.
"""

import argparse
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import rich.console
import rich.table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.console_tables import median_and_range, numbers_table
from difftx.config import Config
from difftx.config.recipes import load_config
from difftx.console import HUGE_PAGES, VARIABLE
from difftx.interop import huggingface
from difftx.interop.fields import config_json

ROOT = Path(__file__).resolve().parents[1]
WORKERS = Path(__file__).parent / "peer_workers"
LONG_PROMPT = 2048
PROMPT_TOKENS = 16
NEW_TOKENS = 256
# Switches of XLA, of oneDNN and MKL below torch, and of torch's own kernels.
ISAS = {
    "avx2": {
        "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
    }
}
EXTENSIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
SHAPES = {"data.sequence_length": "256", "train.global_batch_tokens": "2048"}
RANDOM = {"data.path": "none", "data.tokenizer": "bytes"}
SMALL = {"model.compute_dtype": "float32", "model.remat": "none"} | RANDOM
# Table 9's widths and row length, with a third of its layers, so that torch's step fits in 80 GB too.
THIRD = {"model.num_layers": "9", "data.sequence_length": "4096", "train.global_batch_tokens": "8192"} | RANDOM
BFLOAT16 = {"model.compute_dtype": "bfloat16", "data.path": "none"}


@dataclasses.dataclass(frozen=True)
class Size:
    """Models of one size."""

    recipe: str  # With a place for the architecture.
    changes: dict[str, str]  # Fields that differ from the recipe and `SHAPES`.
    steps: int  # Of a round.
    platform: str = "cpu"
    take_turns: bool = True  # All models run at the same time, and generate too.


SIZES = {
    "quickstart": Size("configs/quickstart.py:{}", {"data.path": "none"}, 20),
    "19m": Size("configs/small.py:books-20m-{}", SMALL, 2),
    "gpu": Size("configs/diff_3b.py:{}", THIRD, 5, platform="cuda", take_turns=False),
    "dry": Size("configs/quickstart.py:{}", BFLOAT16, 1, take_turns=False),  # Tests `gpu` on a CPU.
}


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A model and the command that runs it."""

    name: str
    architecture: str
    command: tuple[str, ...]  # Without the task, which is its last argument.
    task: dict[str, Any]  # What the worker trains and generates, as benchmarks/peer_workers read it.


class Worker:
    """The process of a contestant, and its times."""

    def __init__(self, contestant: Contestant, variables: dict[str, str]):
        self.contestant = contestant
        self.train_rates: list[float] = []  # Tokens/s of each round.
        self.prompt_rates: list[float] = []  # Tokens/s of a prompt, in each round.
        self.generate_rates: list[float] = []  # New tokens/s of each round.
        self.peak_bytes = 0  # Peak resident memory.
        began = time.perf_counter()
        platforms = "cpu" if contestant.task["platform"] == "cpu" else "cuda,cpu"
        environment = os.environ | {"JAX_PLATFORMS": platforms, "JAX_ENABLE_COMPILATION_CACHE": "false"} | variables
        if path := contestant.task.get("path"):
            environment["PYTHONPATH"] = path
        command = [*contestant.command, json.dumps(contestant.task)]
        # stderr is inherited, because only the worker's messages explain a failure.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
        )
        first = self._answer()
        self.first_step_seconds = time.perf_counter() - began
        self.parameters, self.generates = first["parameters"], first["generates"]
        self._process.send_signal(signal.SIGSTOP)

    def ask(self, verb: str, *counts: int) -> dict[str, Any]:
        """Send one line to the worker, such as "train 20", and return its answer. It is stopped before and after."""
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        print(verb, *counts, file=self._process.stdin, flush=True)
        answer = self._answer()
        self._process.send_signal(signal.SIGSTOP)
        return answer

    def rate(self, tokens: int, verb: str, *counts: int) -> float:
        """Return the tokens/s of an order of so many tokens."""
        return tokens / self.ask(verb, *counts)["seconds"]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self.contestant.name}: the worker ended with {self._process.wait()}; see its lines above")
        return json.loads(line)


def contestants(size: str, torch: Path, nanodo: Path | None) -> list[Contestant]:
    """Return all models of a size that can run on this machine."""
    spec, changes, platform = SIZES[size].recipe, SIZES[size].changes, SIZES[size].platform
    has_torch = _runs_torch(torch, platform)
    if not has_torch:
        print(
            f"transformers: --torch={torch} has no torch for {platform}; run make .venv-parity/.installed",
            file=sys.stderr,
        )
    if nanodo is None:
        print("nanodo: name a clone of it with --nanodo=FOLDER", file=sys.stderr)
    found = []
    for architecture in ("diff", "transformer"):
        overrides = SHAPES | changes
        config = load_config(str(ROOT / spec.format(architecture)), overrides)
        ours = {"config": str(ROOT / spec.format(architecture)), "overrides": overrides}
        shared = _shared(config) | {"platform": platform}
        huge_pages = f"{VARIABLE}={os.environ.get(VARIABLE, HUGE_PAGES)}"
        python = ("env", huge_pages, sys.executable, str(WORKERS / "with_difftx.py"))
        found.append(Contestant(f"difftx {architecture}", architecture, python, shared | ours))
        if has_torch:
            model = config_json(huggingface, config, end_of_text=0)
            name = model["architectures"][0].removesuffix("ForCausalLM")
            command = (str(torch), str(WORKERS / "with_transformers.py"))
            for compiled in (False, True):
                task = shared | {"model": model, "compile": compiled}
                how = "torch.compile" if compiled else "eager"
                found.append(Contestant(f"transformers {name}, {how}", architecture, command, task))
        if architecture == "transformer" and nanodo is not None:
            command = (sys.executable, str(WORKERS / "with_nanodo.py"))
            found.append(Contestant("nanodo", architecture, command, shared | _nanodo_task(config, nanodo)))
    return found


def _runs_torch(python: Path, platform: str) -> bool:
    """Return whether a Python has transformers, and torch for a platform."""
    code = f"import torch, transformers; torch.zeros(1, device={platform!r})"
    return python.exists() and subprocess.run([python, "-c", code], capture_output=True).returncode == 0


def _shared(config: Config) -> dict[str, Any]:
    """Return the part of a task that all contestants of a size have in common."""
    optimizer = config.optimizer
    settings = {
        "lr": optimizer.learning_rate,
        "b2": optimizer.b2,
        "weight_decay": optimizer.weight_decay,
        "clip_norm": optimizer.clip_norm,
    }
    return {
        "rows": config.batch_rows,
        "length": config.data.sequence_length,
        "dtype": config.model.compute_dtype,
        "threads": len(os.sched_getaffinity(0)),
        "optimizer": settings,
    }


def _nanodo_task(config: Config, folder: Path) -> dict[str, Any]:
    model = config.model
    # nanodo's MLP has two matrices in place of three, so that it has as many parameters at 1.5 times the width.
    sizes = {"D": model.d_model, "H": model.num_heads, "L": config.data.sequence_length, "N": model.num_layers}
    return {"path": str(folder), "model": sizes | {"V": model.embeddings, "F": 3 * model.mlp_dim // 2}}


def measure(
    size: str, entries: list[Contestant], *, rounds: int, steps: int, variables: dict[str, str]
) -> list[Worker]:
    """Start all workers one after another, with more environment variables, and let them take turns."""
    generates = SIZES[size].take_turns
    workers: list[Worker] = []
    try:
        for contestant in entries:
            workers.append(Worker(contestant, variables))
            print(f"{size}: {contestant.name} started", file=sys.stderr, flush=True)
        tokens = entries[0].task["rows"] * entries[0].task["length"]
        for number in range(rounds + 1):
            for worker in workers[number % len(workers) :] + workers[: number % len(workers)]:
                count = steps if number else 2  # The round before the first one warms up, and is not counted.
                rates = [(worker.train_rates, worker.rate(tokens * count, "train", count))]
                if generates and worker.generates:
                    rates.append((worker.prompt_rates, worker.rate(LONG_PROMPT, "generate", LONG_PROMPT, 1)))
                    rates.append(
                        (worker.generate_rates, worker.rate(NEW_TOKENS, "generate", PROMPT_TOKENS, NEW_TOKENS))
                    )
                for collected, rate in rates if number else ():
                    collected.append(rate)
            print(f"{size}: round {number} of {rounds}", file=sys.stderr, flush=True)
        for worker in workers:
            worker.peak_bytes = worker.ask("memory")["peak_bytes"]
    finally:
        for worker in workers:
            worker.close()
    return workers


def _ratio(numerators: list[float], denominators: list[float]) -> str:
    """Return the median of the ratios of paired rounds, or "-" if one of the models did not run."""
    if not (numerators and denominators):
        return "-"
    return f"{statistics.median(a / b for a, b in zip(numerators, denominators, strict=True)):.2f}"


def _rate(rates: list[float]) -> str:
    return median_and_range(rates, ",.0f") if rates else "-"


def format_table(title: str, workers: list[Worker]) -> rich.table.Table:
    """Return one row per contestant. A ratio is the median over rounds of difftx's tokens/s divided by the row's."""
    columns = (
        "model",
        "parameters",
        "training tokens/s (range)",
        "difftx ÷ it",
        "prompt tokens/s (range)",
        "difftx ÷ it",
        "generation tokens/s (range)",
        "difftx ÷ it",
        "peak memory MiB",
        "first step s",
    )
    table = numbers_table(title, columns)
    ours = {w.contestant.architecture: w for w in workers if w.contestant.name.startswith("difftx")}
    for worker in workers:
        own = ours.get(worker.contestant.architecture, worker)
        table.add_row(
            worker.contestant.name,
            f"{worker.parameters:,}",
            _rate(worker.train_rates),
            _ratio(own.train_rates, worker.train_rates),
            _rate(worker.prompt_rates),
            _ratio(own.prompt_rates, worker.prompt_rates),
            _rate(worker.generate_rates),
            _ratio(own.generate_rates, worker.generate_rates),
            f"{worker.peak_bytes / 2**20:,.0f}",
            f"{worker.first_step_seconds:.1f}",
        )
    return table


def main() -> int:
    """Parse the flags and run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="quickstart,19m")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, help="steps of a round (default: by size)")
    parser.add_argument("--torch", type=Path, default=ROOT / ".venv-parity/bin/python", help="Python with transformers")
    parser.add_argument("--nanodo", type=Path, help="folder of a clone of nanodo")
    parser.add_argument("--isa", choices=ISAS, help="the newest vector extension to use (default: all that there are)")
    parser.add_argument("--only", help="only models whose names contain one of these texts")
    args = parser.parse_args()
    variables = ISAS.get(args.isa, {})
    flags = Path("/proc/cpuinfo").read_text().split()
    extensions = args.isa or "+".join(name for name in EXTENSIONS if name in flags)
    console = rich.console.Console(width=220)
    for size in args.sizes.split(","):
        entries = contestants(size, args.torch, args.nanodo)
        if args.only:
            entries = [entry for entry in entries if any(part in entry.name for part in args.only.split(","))]
        steps = args.steps or SIZES[size].steps
        load = os.getloadavg()[0]
        groups = [entries] if SIZES[size].take_turns else [[entry] for entry in entries]
        workers = []
        for group in groups:
            workers += measure(size, group, rounds=args.rounds, steps=steps, variables=variables)
            if len(groups) > 1:  # The process may be stopped before the table.
                worker = workers[-1]
                print(f"{worker.contestant.name}: {statistics.median(worker.train_rates):,.0f} tokens/s", flush=True)
        task = entries[0].task
        where = f"{task['threads']} threads with {extensions}" if task["platform"] == "cpu" else task["platform"]
        shape = f"{task['rows']} rows of {task['length']}, {task['dtype']}, {where}"
        title = f"{size}: {shape}; median of {args.rounds} rounds of {steps} steps; load before {load:.1f}"
        console.print(format_table(title, workers))
        ours = {worker.contestant.architecture: worker for worker in workers if "difftx" in worker.contestant.name}
        if {"diff", "transformer"} <= ours.keys():
            diff, transformer = ours["diff"], ours["transformer"]
            training = _ratio(diff.train_rates, transformer.train_rates)
            prompt = _ratio(diff.prompt_rates, transformer.prompt_rates)
            generation = _ratio(diff.generate_rates, transformer.generate_rates)
            console.print(f"difftx, diff ÷ transformer: training {training}, prompt {prompt}, generation {generation}")
    return 0


if __name__ == "__main__":
    sys.exit(main())  # Not by `run_command`, which would give huge pages to all workers.
