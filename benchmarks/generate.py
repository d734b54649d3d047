"""Tokens/s of generation: with the cache against without, Diff against the Transformer, and by tokens before.

python benchmarks/generate.py [--config=configs/quickstart.py] [--new_tokens=512] [--rounds=5] [--config.field=value …]

Both architectures in one process, in turns, greedy, from random parameters; the text never ends before its limit.
Without the cache: one pass over the whole window for each new token, all of them under one jit.
"""

import argparse
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

from difftx.config_reader import load_config, split_overrides
from difftx.data.tokenizer import load_tokenizer
from difftx.errors import run_command
from difftx.inference import decode
from difftx.inference.decode import LanguageModel, Tokens
from difftx.inference.sampling import GREEDY
from difftx.parallel.mesh import make_mesh
from difftx.training.state import graph, init_state

ARCHITECTURES = ("transformer", "diff")
PROMPT_TOKENS = 16


def load(spec: str, overrides: dict[str, str], architecture: str) -> LanguageModel:
    """Return a model with random parameters that never ends a text."""
    config = load_config(f"{spec}:{architecture}", overrides)
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        params = jax.jit(lambda: init_state(config).params)()
    lm = LanguageModel(config, mesh, params, load_tokenizer(config.data.tokenizer))
    lm.allowed[lm.tokenizer.eot_token] = False
    return lm


def with_cache(lm: LanguageModel, rows: int, new_tokens: int) -> list[tuple[int, float]]:
    """Return (tokens made before it, its seconds) for each block of new tokens."""
    prompts = Tokens.of([[1] * PROMPT_TOKENS] * rows, rows, decode.SMALLEST_CHUNK)
    limit_B = np.full(rows, new_tokens)
    state = decode.prefill(lm, prompts, chunk=decode.SMALLEST_CHUNK, seed_B=np.zeros(rows), limit_B=limit_B)
    jax.block_until_ready(state)
    blocks = []
    for made in range(0, new_tokens, decode.BLOCK_TOKENS):
        start = time.perf_counter()
        state = decode.with_room(lm, state, PROMPT_TOKENS + made + decode.BLOCK_TOKENS)
        state, _ = decode.next_tokens(lm, state, GREEDY)
        blocks.append((made, time.perf_counter() - start))
    return blocks


@functools.cache
def whole_window(lm_config) -> Callable:
    """Return the program that makes tokens without a cache."""
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
    """Return seconds a token, over `tokens` of the last of `new_tokens`: each costs the same."""
    window = PROMPT_TOKENS + new_tokens
    tokens_BT = decode.put(lm.mesh, np.ones((rows, window), np.int32))
    run = whole_window(lm.config)
    run(lm.params, tokens_BT, window - 1, 1).block_until_ready()
    start = time.perf_counter()
    run(lm.params, tokens_BT, window - tokens, tokens).block_until_ready()
    return (time.perf_counter() - start) / tokens


def measure(models: dict[str, LanguageModel], *, rows: int, new_tokens: int, rounds: int, console) -> None:
    """Run both in turns and print the tables."""
    seconds: dict[str, list[list[tuple[int, float]]]] = {name: [] for name in models}
    slow: dict[str, list[float]] = {name: [] for name in models}
    for number in range(rounds + 1):  # The first compiles.
        for name, lm in models.items():
            with jax.set_mesh(lm.mesh):
                blocks, whole = with_cache(lm, rows, new_tokens), without_cache(lm, rows, new_tokens, 32)
            if number:
                seconds[name].append(blocks)
                slow[name].append(whole)
    totals = {name: [sum(s for _, s in blocks) / new_tokens for blocks in runs] for name, runs in seconds.items()}
    load = os.getloadavg()[0]
    title = f"{rows} rows, {new_tokens} new tokens; load {load:.1f}; median (best … worst of {rounds}), ms a token"
    table = rich.table.Table(title=title)
    for column in ("architecture", "with cache", "tokens/s", "ratio", "without", "faster by"):
        table.add_column(column, justify="left" if column == "architecture" else "right")
    for name, values in totals.items():
        ratio = statistics.median(a / b for a, b in zip(totals[ARCHITECTURES[0]], values, strict=True))
        gain = statistics.median(a / b for a, b in zip(slow[name], values, strict=True))
        rate = rows / statistics.median(values)
        table.add_row(name, _spread(values), f"{rate:,.0f}", f"{ratio:.3f}", _spread(slow[name]), f"{gain:.1f}×")
    console.print(table)
    table = rich.table.Table(title="ms a token by tokens made before (median of the rounds)")
    table.add_column("tokens before")
    for name in models:
        table.add_column(name, justify="right")
    marks = [m for m in range(0, new_tokens, max(decode.BLOCK_TOKENS, new_tokens // 8))]
    for mark in marks:
        medians = [
            statistics.median(
                s for blocks in seconds[name] for made, s in blocks if mark <= made < mark + new_tokens // 8
            )
            for name in models
        ]
        table.add_row(str(mark), *(f"{1e3 * s / decode.BLOCK_TOKENS:.3f}" for s in medians))
    console.print(table)


def _spread(seconds: list[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.3f} ({1e3 * min(seconds):.3f} … {1e3 * max(seconds):.3f})"


def main() -> int:
    """Read the flags and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/quickstart.py", metavar="FILE.py", help="takes the architecture")
    parser.add_argument("--new_tokens", type=int, default=512)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    args, rest = parser.parse_known_args()
    overrides = split_overrides(rest, "config")
    models = {name: load(args.config, overrides, name) for name in ARCHITECTURES}
    console = rich.console.Console(width=140)
    measure(models, rows=args.rows, new_tokens=args.new_tokens, rounds=args.rounds, console=console)
    return 0


if __name__ == "__main__":
    run_command(main)
