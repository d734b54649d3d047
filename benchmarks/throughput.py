"""Training throughput of a model and its counterpart, interleaved in one process (A B A B), on any mesh.

python benchmarks/throughput.py --config=configs/scaling.py:diff-2.8b [--rounds=5] [--steps=10] [--profile=DIR]
    [--depths] [--config.field=value …]

Prints tokens/s (median of the rounds), the ratio to the Transformer, percentiles of the step time, the time spent
waiting for data, model FLOP/s, compile times, and the MFU if the device's peak is known. --depths also compiles 2 and
24 layers. Rows are random tokens unless data.path is set; both come through the loader. --profile writes a trace of one
more round for `xprof` or Perfetto, with the scopes `attention`, `mlp`, `loss` and `optimizer`.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import rich.console
import rich.table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.console_tables import numbers_table
from difftx.commands.flags import Parser
from difftx.config import Config
from difftx.config.recipes import load_config
from difftx.data.loader import Batch, Loader
from difftx.data.sources import Sources, load_sources
from difftx.data.tokenizers import load_tokenizer
from difftx.errors import run_command
from difftx.evals.throughput import COMPARED, median_ratio, pair, random_rows
from difftx.model.flops import PEAK_FLOPS, flops_per_token
from difftx.parallel import multihost
from difftx.parallel.layout import Layout
from difftx.parallel.mesh import make_mesh
from difftx.training import kernel_choice
from difftx.training.fit import fit
from difftx.training.state import TrainState, init_state, make_train_step

DEPTHS = (2, 24)  # Numbers of layers that --depths compiles.
RANDOM_ROWS = 256  # Number of different rows of random tokens.


@dataclasses.dataclass
class Contestant:
    """A compiled train step with its state, its data and the measured times."""

    config: Config
    mesh: jax.sharding.Mesh
    step: jax.stages.Compiled
    state: TrainState
    batches: Iterator[Batch]
    compile_seconds: float
    rates: list[float] = dataclasses.field(default_factory=list)  # Tokens/s of each round.
    step_seconds: list[float] = dataclasses.field(default_factory=list)
    data_wait_seconds: list[float] = dataclasses.field(default_factory=list)

    def run(self, steps: int) -> None:
        """Run `steps` updates as the training loop does: dispatch a step, then wait for the previous step's metrics."""
        with jax.set_mesh(self.mesh):
            start = last = time.perf_counter()
            pending = None
            for _ in range(steps):
                waited = time.perf_counter()
                batch = next(self.batches)
                self.data_wait_seconds.append(time.perf_counter() - waited)
                self.state, metrics = self.step(self.state, batch)
                if pending is not None:
                    last = self._finished(pending, last)
                pending = metrics
            self._finished(pending, last)
        self.rates.append(self.config.train.global_batch_tokens * steps / (time.perf_counter() - start))

    def reset(self) -> None:
        """Discard the measured times."""
        self.rates.clear()
        self.step_seconds.clear()
        self.data_wait_seconds.clear()

    def _finished(self, metrics: dict[str, jax.Array] | None, last: float) -> float:
        """Wait for the metrics of a step, record the seconds since `last`, and return the time."""
        jax.block_until_ready(metrics)
        now = time.perf_counter()
        self.step_seconds.append(now - last)
        return now


def prepare(config: Config) -> Contestant:
    """Compile the train step of a config for all attached devices."""
    mesh = make_mesh(config.mesh)
    fit(config, mesh)
    with jax.set_mesh(mesh):
        batches = _batches(config, mesh)
        state = jax.jit(lambda: init_state(config))()
        start = time.perf_counter()
        step = jax.jit(make_train_step(config), donate_argnums=0).lower(state, next(batches)).compile()
    return Contestant(config, mesh, step, state, batches, time.perf_counter() - start)


def measure_and_print(spec: str, config: Config, *, rounds: int, steps: int, profile: Path | None) -> list[Contestant]:
    """Compile both models, run `steps` updates of each in turn for `rounds` rounds, and print the table.

    `profile` is a folder for traces of one more round.
    """
    contestants = [prepare(one) for one in pair(config).values()]
    for contestant in contestants:
        contestant.run(2)  # Warm-up.
        contestant.reset()
    for _ in range(rounds):
        for contestant in contestants:
            contestant.run(steps)
    if multihost.is_primary():
        console = rich.console.Console(width=160)
        console.print(format_table(spec, contestants, f"medians of {rounds} rounds of {steps}"))
        console.print(
            "model FLOPs per token = 6 N + 12 L T d_model (causal: 6 L T d_model); "
            "MFU = model FLOP/s / (devices × peak)"
        )
    if profile is not None:
        for contestant in contestants:
            with jax.profiler.trace(str(profile / contestant.config.model.architecture)):
                contestant.run(steps)
        multihost.print_on_primary(f"traces in {profile}/{{{','.join(COMPARED)}}}")
    return contestants


def print_compile_times(contestants: list[Contestant]) -> None:
    """Print the compile times of 2 and 24 layers, which are similar because a scanned layer is compiled once."""
    for contestant in contestants:
        model = contestant.config.model
        seconds = []
        for layers in DEPTHS:
            deep = dataclasses.replace(model, num_layers=layers)
            seconds.append(prepare(dataclasses.replace(contestant.config, model=deep)).compile_seconds)
        multihost.print_on_primary(
            f"{model.architecture}: compiles in {seconds[0]:.1f} s with {DEPTHS[0]} layers, "
            f"{seconds[1]:.1f} s with {DEPTHS[1]} ({seconds[1] / seconds[0]:.2f}×)"
        )


def format_table(spec: str, contestants: list[Contestant], how: str) -> rich.table.Table:
    """Return a table of the measured times; ratios are relative to the first contestant."""
    device, mesh = jax.devices()[0].device_kind, contestants[0].mesh
    shape = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    devices = f"{mesh.size} × {device}" + (f" ({shape})" if shape else "")
    columns = (
        "architecture",
        "tokens/s",
        "min … max",
        "ratio",
        "step ms p50 / p90 / p99",
        "data wait ms",
        "model FLOP/s",
        "MFU",
        "MFU causal",
        "compile s",
    )
    table = numbers_table(f"{spec}, {devices}, {how}", columns)
    for c in contestants:
        rate = statistics.median(c.rates)
        ratio = median_ratio(c.rates, contestants[0].rates)
        length = c.config.data.sequence_length
        flops = [flops_per_token(c.config.model, length, causal=causal) * rate for causal in (False, True)]
        peak = PEAK_FLOPS.get(device)
        table.add_row(
            c.config.model.architecture,
            f"{rate:,.0f}",
            f"{min(c.rates):,.0f} … {max(c.rates):,.0f}",
            f"{ratio:.3f}",
            " / ".join(f"{1e3 * t:.1f}" for t in np.percentile(c.step_seconds, [50, 90, 99])),
            f"{1e3 * statistics.median(c.data_wait_seconds):.2f}",
            f"{flops[0]:.3g}",
            *(f"{f / (peak * mesh.size):.1%}" if peak else "-" for f in flops),
            f"{c.compile_seconds:.1f}",
        )
    return table


def _batches(config: Config, mesh: jax.sharding.Mesh) -> Iterator[Batch]:
    """Return batches of the config's data, or of random tokens if it names none."""
    if config.data.path is None and not config.data.sources:
        rows = random_rows(config, RANDOM_ROWS)
        sources = Sources(config.data, train={"random": rows}, valid={}, signature={}, notes=())
    else:
        sources = load_sources(config.data, load_tokenizer(config.data.tokenizer))
    return Loader(
        sources,
        batch_rows=config.batch_rows,
        prefetch_batches=config.data.prefetch_batches,
        sharding=jax.NamedSharding(mesh, Layout().act_BT),
        vocab_size=config.model.embeddings,
    )


def main() -> int:
    """Parse the flags and run the benchmark."""
    parser = Parser(None, __doc__, "config", formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, metavar="FILE.py[:ARG]")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="steps of a round")
    parser.add_argument("--profile", type=Path, metavar="DIR", help="write profiler traces there")
    parser.add_argument("--depths", action="store_true", help="also compile 2 and 24 layers")
    multihost.add_flags(parser)
    args, rest = parser.parse_known_args()
    config = load_config(args.config, parser.overrides(rest))
    multihost.join(args, config.multihost)
    kernel_choice.choose(list(pair(config).values()), {})
    contestants = measure_and_print(args.config, config, rounds=args.rounds, steps=args.steps, profile=args.profile)
    if args.depths:
        print_compile_times(contestants)
    return 0


if __name__ == "__main__":
    run_command(main)
