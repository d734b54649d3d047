"""Training throughput of both architectures, interleaved in one process.

python benchmarks/throughput.py --config=configs/quickstart.py [--rounds=5] [--steps=3] [--config.field=value …]

Prints tokens/s (median of the rounds), the ratio to the Transformer, model FLOP/s and MFU where the device's peak is
known, and how long the train step compiles with 2 and with 24 layers.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from pathlib import Path

import jax
import numpy as np
import rich.console
import rich.table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from difftx.config import Config
from difftx.config_reader import load_config, split_overrides
from difftx.data.loader import Batch, make_batch
from difftx.errors import run_command
from difftx.model.flops import PEAK_FLOPS, flops_per_token
from difftx.parallel.layout import Layout
from difftx.parallel.mesh import check_divisible, make_mesh
from difftx.training.state import TrainState, init_state, make_train_step

ARCHITECTURES = ("transformer", "diff")
DEPTHS = (2, 24)


@dataclasses.dataclass
class Contestant:
    """A compiled train step and what it runs on."""

    config: Config
    mesh: jax.sharding.Mesh
    step: jax.stages.Compiled
    state: TrainState
    batch: Batch
    compile_seconds: float
    rates: list[float] = dataclasses.field(default_factory=list)  # tokens/s of each round

    def run(self, steps: int) -> None:
        """Run `steps` updates and note the rate."""
        with jax.set_mesh(self.mesh):
            start = time.perf_counter()
            for _ in range(steps):
                self.state, _ = self.step(self.state, self.batch)
            jax.block_until_ready(self.state)
        self.rates.append(self.config.train.global_batch_tokens * steps / (time.perf_counter() - start))


def prepare(config: Config) -> Contestant:
    """Compile the train step of a config for all devices here, on random tokens."""
    mesh = make_mesh(config.mesh)
    check_divisible(config, mesh)
    shape = (config.batch_rows, config.data.sequence_length + 1)
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, shape, dtype=np.int32)
    rows = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "loss_mask": np.ones(tokens[:, 1:].shape, np.float32)}
    with jax.set_mesh(mesh):
        batch = make_batch(rows, config.batch_rows, jax.NamedSharding(mesh, Layout().act_BT))
        state = jax.jit(lambda: init_state(config))()
        start = time.perf_counter()
        step = jax.jit(make_train_step(config), donate_argnums=0).lower(state, batch).compile()
    return Contestant(config, mesh, step, state, batch, time.perf_counter() - start)


def measure(spec: str, overrides: dict[str, str], rounds: int, steps: int) -> None:
    """Compile both, then run `steps` of each in turn, `rounds` times; print the table."""
    path = spec.partition(":")[0]
    contestants = [prepare(load_config(f"{path}:{name}", overrides)) for name in ARCHITECTURES]
    for contestant in contestants:
        contestant.run(steps)  # Warm-up.
        contestant.rates.clear()
    for _ in range(rounds):
        for contestant in contestants:
            contestant.run(steps)
    console = rich.console.Console(width=120)
    console.print(format_table(spec, contestants, f"medians of {rounds} rounds of {steps}"))
    console.print("model FLOPs a token = 6 N + 12 L T d (causal: 6 L T d); MFU = model FLOP/s / (devices × peak)")
    for contestant in contestants:
        model = contestant.config.model
        seconds = []
        for layers in DEPTHS:
            deep = dataclasses.replace(model, num_layers=layers)
            seconds.append(prepare(dataclasses.replace(contestant.config, model=deep)).compile_seconds)
        console.print(
            f"{model.architecture}: compiles in {seconds[0]:.1f} s with {DEPTHS[0]} layers, "
            f"{seconds[1]:.1f} s with {DEPTHS[1]} ({seconds[1] / seconds[0]:.2f}×)"
        )


def format_table(spec: str, contestants: list[Contestant], how: str) -> rich.table.Table:
    """Return the rates side by side; the first contestant is the measure of the ratio."""
    device = jax.devices()[0].device_kind
    table = rich.table.Table(title=f"{spec}, {len(jax.devices())} × {device}, {how}")
    for column in (
        "architecture",
        "tokens/s",
        "min … max",
        "ratio",
        "model FLOP/s",
        "MFU",
        "MFU causal",
        "compile s",
    ):
        table.add_column(column, justify="left" if column == "architecture" else "right")
    for c in contestants:
        rate = statistics.median(c.rates)
        ratio = statistics.median(a / b for a, b in zip(c.rates, contestants[0].rates, strict=True))
        flops = [flops_per_token(c.config.model, c.config.data.sequence_length, causal=h) * rate for h in (False, True)]
        peak = PEAK_FLOPS.get(device)
        table.add_row(
            c.config.model.architecture,
            f"{rate:,.0f}",
            f"{min(c.rates):,.0f} … {max(c.rates):,.0f}",
            f"{ratio:.3f}",
            f"{flops[0]:.3g}",
            *(f"{f / (peak * c.mesh.size):.1%}" if peak else "-" for f in flops),
            f"{c.compile_seconds:.1f}",
        )
    return table


def main() -> int:
    """Read the flags and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, metavar="FILE.py")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    args, rest = parser.parse_known_args()
    measure(args.config, split_overrides(rest, "config"), args.rounds, args.steps)
    return 0


if __name__ == "__main__":
    run_command(main)
