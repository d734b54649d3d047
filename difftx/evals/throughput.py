"""Suite `throughput`: tokens/s of a Transformer and a Differential Transformer (Table 7 of the paper)."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from difftx.config import Config
from difftx.config.model import default_specific_fields
from difftx.data.loader import Batch
from difftx.data.packing import PackedRows
from difftx.data.store import TokenStore
from difftx.errors import UserError
from difftx.evals.evaluation import Evaluation
from difftx.evals.result import Number, Result
from difftx.evals.suite import Suite
from difftx.model.architectures import check_attention
from difftx.training.fit import fit
from difftx.training.loss import batch_loss
from difftx.training.state import graph, init_params, jit_init

COMPARED = ("transformer", "diff")  # The first is the baseline.
WARM_UP_STEPS = 2
ATTENTION_OF_BOTH = ("auto", "reference", "xla", "cudnn")


def evaluate(evaluation: Evaluation) -> Result:
    """Time the model and its counterpart in turn on a microbatch of random tokens."""
    run, settings = evaluation.run, evaluation.run.config.eval
    random = random_rows(run.config, run.microbatch_rows)
    (batch,) = evaluation.batches(random, random.tokens, "random tokens")
    configs, params = pair(run.config), {}
    for name, config in configs.items():
        fit(config, run.mesh)
        params[name] = evaluation.params if config == run.config else jit_init(init_params, config)
    numbers, details = {}, {}
    for kind in ("forward", "forward_backward"):
        rounds = evaluation.work.track(range(settings.throughput_rounds), kind, settings.throughput_rounds)
        calls = {name: _compiled(config, kind, params[name], batch) for name, config in configs.items()}
        rates = rates_in_turn(calls, rounds, settings.throughput_steps, random.tokens)
        ratio = median_ratio(rates["diff"], rates["transformer"])
        for name in COMPARED:
            rate = Number(statistics.median(rates[name]), "tokens per second", "higher")
            numbers[f"{kind}_{name}_tokens_per_second"] = rate
        numbers[f"{kind}_throughput_drop_percent"] = Number(100 * (1 - ratio), "%", "lower")
        numbers[f"{kind}_time_rise_percent"] = Number(100 * (1 / ratio - 1), "%", "lower")
        details[kind] = rates
    measured = {
        "device": run.mesh.devices.flat[0].device_kind,
        "devices": run.mesh.size,
        "rows": run.microbatch_rows,
        "sequence_length": run.config.data.sequence_length,
    }
    return Result(numbers=numbers, details={"tokens_per_second": details, **measured})


def pair(config: Config) -> dict[str, Config]:
    """Return the configs of a diff model and its matched Transformer by architecture. One of them is `config`.

    Raise `UserError` if `config` has another architecture.
    """
    if config.model.architecture not in COMPARED:
        raise UserError(
            f"model.architecture={config.model.architecture!r}: Table 7 compares {' and '.join(COMPARED)}; "
            "do not run the suite 'throughput' on this run"
        )
    both = {c.model.architecture: c for c in (config, counterpart(config))}
    return {name: both[name] for name in COMPARED}


def counterpart(config: Config) -> Config:
    """Return the config of the other architecture with the same size: one diff head replaces two Transformer heads."""
    model = config.model
    other = "transformer" if model.architecture == "diff" else "diff"
    for field in ("num_heads", "num_kv_heads"):
        if other == "diff" and (getattr(model, field) or 0) % 2:
            raise UserError(
                f"model.{field}={getattr(model, field)}: the differential counterpart has half as many heads, so the "
                "number must be even; remove 'throughput' from the suites, and 'counterpart' from "
                "eval.gradients.at_initialization"
            )
    factor, implementation = 2 if other == "transformer" else 0.5, model.attention_implementation
    changed = dataclasses.replace(
        model,
        architecture=other,
        num_heads=int(model.num_heads * factor),
        num_kv_heads=model.num_kv_heads and int(model.num_kv_heads * factor),
        head_norm="rms_affine" if other == "diff" else "none",
        attention_implementation=implementation if implementation in ATTENTION_OF_BOTH else "auto",
        **default_specific_fields(),
        extensions=(),
    )
    check_attention(changed)
    return dataclasses.replace(config, model=changed)


def random_rows(config: Config, rows: int) -> PackedRows:
    """Return rows of random tokens. Equal arguments give equal rows."""
    length = config.data.sequence_length
    tokens = np.random.default_rng(0).integers(0, config.model.embeddings, rows * length + 1, dtype=np.uint32)
    store = TokenStore(tokens, np.array([0, len(tokens)], np.uint64))
    return PackedRows(store, sequence_length=length, packing="concat", document_mask=False)


def rates_in_turn(
    calls: Mapping[str, Callable[[], Any]], rounds: Iterable[Any], steps: int, tokens: int
) -> dict[str, list[float]]:
    """Return the tokens/s of each function in each round. Each call of a function processes `tokens` tokens.

    A round calls each function `steps` times in turn, so that a temporary slowdown affects all functions. As in the
    training loop, a call is dispatched before the result of the previous call is awaited.
    """
    rates = {name: [] for name in calls}
    for _ in rounds:
        for name, call in calls.items():
            start, pending = time.perf_counter(), None
            for _ in range(steps):
                pending, last = call(), pending
                jax.block_until_ready(last)
            jax.block_until_ready(pending)
            rates[name].append(steps * tokens / (time.perf_counter() - start))
    return rates


def median_ratio(rates: Sequence[float], baseline: Sequence[float]) -> float:
    """Return the median over rounds of the ratio of `rates` to `baseline`."""
    return statistics.median(a / b for a, b in zip(rates, baseline, strict=True))


def _compiled(config: Config, kind: str, params: Any, batch: Batch) -> Callable[[], Any]:
    graphdef = graph(config)

    def nll(params: Any, batch: Batch) -> jax.Array:
        return batch_loss(nnx.merge(graphdef, params), batch)[0]

    function = nll if kind == "forward" else jax.value_and_grad(nll)
    step = jax.jit(function).lower(params, batch).compile()
    for _ in range(WARM_UP_STEPS):
        jax.block_until_ready(step(params, batch))
    return lambda: step(params, batch)


SUITE = Suite(
    evaluate=evaluate,
    check=lambda run: pair(run.config),
    measures_device=True,
    quantizable=False,
    title="Throughput",
    explanation="Speed of the model and of its counterpart on the same rows. Rise and drop are those of the "
    "differential model relative to its Transformer.",
)
