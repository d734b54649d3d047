"""Speed of generation: with and without the cache, diff and the Transformer, and by position in the text.

python benchmarks/generate.py [--config=configs/quickstart.py] [--new_tokens=512] [--rounds=5] [--config.field=value …]

Both architectures run in one process, one block of tokens each in turn. They decode greedily from random parameters,
and no text ends early. Without the cache, each new token needs a pass over the whole window; one jitted program makes
all tokens.

Prints two tables of milliseconds per token: by architecture, and by the number of tokens generated before.
"""

import argparse
import dataclasses
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table
from flax import nnx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.console_tables import median_and_range, numbers_table
from difftx.commands.flags import Parser
from difftx.config.model import CacheConfig
from difftx.config.recipes import load_config
from difftx.data.tokenizers import load_tokenizer
from difftx.errors import run_command
from difftx.inference import decode
from difftx.inference.cache import capacity_for
from difftx.inference.decode import LanguageModel
from difftx.inference.sampling import GREEDY
from difftx.parallel.mesh import make_mesh
from difftx.training.state import graph, init_state

ARCHITECTURES = ("transformer", "diff")
PROMPT_TOKENS = 16
SLOW_TOKENS = 32  # Number of tokens whose generation without a cache is measured. All cost the same.

type BlocksOfRuns = dict[str, list[list[Block]]]  # Architecture → round → times of the blocks of new tokens.


def random_model(spec: str, overrides: dict[str, str], architecture: str) -> LanguageModel:
    """Return a model with random parameters, which never generates the end-of-text token."""
    config = load_config(f"{spec}:{architecture}", overrides)
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        params = jax.jit(lambda: init_state(config).params)()
    lm = LanguageModel(config, mesh, params, load_tokenizer(config.data.tokenizer))
    lm.allowed[lm.tokenizer.eot_token] = False
    return lm


@dataclasses.dataclass(frozen=True)
class Block:
    """Time of one block of `decode.BLOCK_TOKENS` new tokens."""

    made: int  # Number of tokens generated before the block.
    seconds: float  # Wall time.
    cpu_seconds: float  # Processor time of all threads; other programs on the machine do not add to it.


def with_cache(models: dict[str, LanguageModel], rows: int, new_tokens: int) -> dict[str, list[Block]]:
    """Return the times of every block of new tokens of each model; the models take turns after each block."""
    prompts = [[1] * PROMPT_TOKENS] * rows
    states = {}
    blocks: dict[str, list[Block]] = {name: [] for name in models}
    for name, lm in models.items():
        with jax.set_mesh(lm.mesh):
            state = decode.prefill(lm, prompts, seeds=[0] * rows, limits=[new_tokens] * rows)
            states[name] = jax.block_until_ready(state)
    for made in range(0, new_tokens, decode.BLOCK_TOKENS):
        for name, lm in models.items():
            with jax.set_mesh(lm.mesh):
                start, cpu_start = time.perf_counter(), time.process_time()
                room = PROMPT_TOKENS + made + decode.BLOCK_TOKENS
                states[name], _ = decode.next_tokens(lm, states[name], GREEDY, room=room)
                blocks[name].append(Block(made, time.perf_counter() - start, time.process_time() - cpu_start))
    return blocks


@functools.cache
def generator_without_cache(lm_config) -> Callable:
    """Return a jitted function that generates tokens without a cache, by a pass over the whole window per token."""
    graphdef = graph(lm_config)

    @jax.jit
    def run(params, tokens_BT, start, steps):
        def step(i, tokens_BT):
            x_BTD, _ = nnx.merge(graphdef, params).hidden(tokens_BT)
            x_B1D = jax.lax.dynamic_slice_in_dim(x_BTD, start + i - 1, 1, axis=1)
            token_B1 = jnp.argmax(nnx.merge(graphdef, params).logits(x_B1D), axis=-1).astype(jnp.int32)
            return jnp.where(jnp.arange(tokens_BT.shape[1]) == start + i, token_B1, tokens_BT)

        return jax.lax.fori_loop(0, steps, step, tokens_BT)

    return run


def without_cache(lm: LanguageModel, rows: int, new_tokens: int, tokens: int) -> float:
    """Return the seconds per token without a cache, measured on the last `tokens` of `new_tokens`.

    Every token costs the same, because each pass covers the whole window.
    """
    window = PROMPT_TOKENS + new_tokens
    tokens_BT = decode.put(lm.mesh, np.ones((rows, window), np.int32))
    run = generator_without_cache(lm.config)
    run(lm.params, tokens_BT, window - 1, 1).block_until_ready()
    start = time.perf_counter()
    run(lm.params, tokens_BT, window - tokens, tokens).block_until_ready()
    return (time.perf_counter() - start) / tokens


def measure(
    models: dict[str, LanguageModel], *, rows: int, new_tokens: int, rounds: int
) -> tuple[BlocksOfRuns, dict[str, list[float]]]:
    """Measure `rounds` rounds, after one round that compiles.

    Return for each architecture the times of blocks with the cache, and the seconds per token without it by round.
    """
    fast: BlocksOfRuns = {name: [] for name in models}
    slow: dict[str, list[float]] = {name: [] for name in models}
    for number in range(rounds + 1):
        blocks = with_cache(models, rows, new_tokens)
        for name, lm in models.items():
            with jax.set_mesh(lm.mesh):
                seconds = without_cache(lm, rows, new_tokens, SLOW_TOKENS)
            if number:
                fast[name].append(blocks[name])
                slow[name].append(seconds)
    return fast, slow


def architectures_table(
    title: str, fast: BlocksOfRuns, slow: dict[str, list[float]], rows: int, new_tokens: int
) -> rich.table.Table:
    """Return a table with a row for each architecture: times, and ratios of paired blocks to the first architecture."""
    columns = ("architecture", "with cache", "CPU", "tokens/s", "ratio", "CPU ratio", "without", "faster by")
    table = numbers_table(title, columns)
    first = [block for run in fast[ARCHITECTURES[0]] for block in run]
    for name, runs in fast.items():
        seconds = [sum(block.seconds for block in run) / new_tokens for run in runs]
        cpu = [sum(block.cpu_seconds for block in run) / new_tokens for run in runs]
        pairs = list(zip(first, (block for run in runs for block in run), strict=True))
        table.add_row(
            name,
            _milliseconds(seconds),
            _milliseconds(cpu),
            f"{rows / statistics.median(seconds):,.0f}",
            f"{statistics.median(a.seconds / b.seconds for a, b in pairs):.3f}",
            f"{statistics.median(a.cpu_seconds / b.cpu_seconds for a, b in pairs):.3f}",
            _milliseconds(slow[name]),
            f"{statistics.median(a / b for a, b in zip(slow[name], seconds, strict=True)):.1f}×",
        )
    return table


def positions_table(fast: BlocksOfRuns, new_tokens: int) -> rich.table.Table:
    """Return a table of the median times per token, by the number of tokens generated before."""
    title = "ms per token by tokens made before it, median: wall, CPU"
    table = numbers_table(title, ("tokens before", "slots", *fast))
    uncompressed = CacheConfig()
    step = max(decode.BLOCK_TOKENS, new_tokens // 8)
    for start in range(0, new_tokens, step):
        cells = []
        for runs in fast.values():
            blocks = [block for run in runs for block in run if start <= block.made < start + step]
            medians = (statistics.median(getattr(b, kind) for b in blocks) for kind in ("seconds", "cpu_seconds"))
            cells.append(", ".join(f"{1e3 * median / decode.BLOCK_TOKENS:.3f}" for median in medians))
        table.add_row(str(start), str(capacity_for(PROMPT_TOKENS + start + step, uncompressed)), *cells)
    return table


def _milliseconds(seconds: list[float]) -> str:
    return median_and_range([1e3 * value for value in seconds], ".3f")


def main() -> int:
    """Parse the flags and run the benchmark."""
    parser = Parser(None, __doc__, "config", formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/quickstart.py", metavar="FILE.py", help="takes the architecture")
    parser.add_argument("--new_tokens", type=int, default=512)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    args, rest = parser.parse_known_args()
    overrides = parser.overrides(rest)
    models = {name: random_model(args.config, overrides, name) for name in ARCHITECTURES}
    load_before, *_ = os.getloadavg()
    fast, slow = measure(models, rows=args.rows, new_tokens=args.new_tokens, rounds=args.rounds)
    load_average = f"load {load_before:.1f} … {os.getloadavg()[0]:.1f}"
    size = f"{args.rows} rows, {args.new_tokens} new tokens"
    title = f"{size}; {load_average}; ms per token, median (best … worst of {args.rounds})"
    console = rich.console.Console(width=160)
    console.print(architectures_table(title, fast, slow, args.rows, args.new_tokens))
    console.print("ratio: tokens/s to the Transformer's, median over pairs of blocks")
    console.print(positions_table(fast, args.new_tokens))
    return 0


if __name__ == "__main__":
    run_command(main)
