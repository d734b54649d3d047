"""The training loop."""

import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import jax

from difftx.data.loader import Loader
from difftx.errors import EXIT_PREEMPTED
from difftx.model.flops import PEAK_FLOPS, flops_per_token
from difftx.training.checkpoint import Checkpointer
from difftx.training.metrics import MetricsWriter, Progress
from difftx.training.run import Run, changed_fields
from difftx.training.state import TrainState, init_state, make_train_step

Evaluate = Callable[[Run, Any, int, Sequence[str]], Mapping[str, Any]]


class Interrupt:
    """Remembers a SIGTERM; the loop asks for it between steps."""

    def __init__(self):
        self.received = False
        self._previous = signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True

    def close(self) -> None:
        """Put the earlier handler back."""
        signal.signal(signal.SIGTERM, self._previous)


def train(run: Run, evaluate: Evaluate) -> int:
    """Train from the newest checkpoint, or from the start, to the last step.

    Args:
        run: config, mesh and data.
        evaluate: `difftx.evals.evaluate`, called every `eval.every_steps` with `eval.suites`.

    Returns:
        0, or 75 if a SIGTERM came: a checkpoint was saved and the same command continues.
    """
    interrupt = Interrupt()
    try:
        with jax.set_mesh(run.mesh):
            return _train(run, evaluate, interrupt)
    finally:
        interrupt.close()


def _train(run: Run, evaluate: Evaluate, interrupt: Interrupt) -> int:
    config, steps = run.config, run.config.train.steps

    # ── State: the workdir's newest checkpoint, else a fresh start ──
    checkpointer = Checkpointer(run.workdir, config.checkpoint)
    loader = Loader(
        run.corpus.train,
        sequence_length=config.data.sequence_length,
        rows=config.batch_rows,
        seed=config.data.seed,
        prefetch_batches=config.data.prefetch_batches,
        sharding=run.batch_sharding,
        signature=run.signature,
        processes=jax.process_count(),
        process=jax.process_index(),
    )
    state, start = _restore_or_init(run, checkpointer, loader)
    run.write_description()
    writer = MetricsWriter(run.workdir, config.logging, start)

    # ── Compile ──
    step_fn = jax.jit(make_train_step(config), donate_argnums=0)
    meter = Meter(run)

    # ── Steps: metrics of one are read after the next was dispatched ──
    pending: tuple[int, Any, float] | None = None
    with Progress(steps, start) as progress:
        progress.note(f"{run.workdir}: attempt {writer.attempt}, from step {start} to {steps}")

        def report() -> None:
            nonlocal pending
            if pending is None:
                return
            (step, metrics, data_wait), pending = pending, None
            row = meter.row(step, jax.device_get(metrics), data_wait)
            if step % config.logging.every_steps == 0 or step == steps:
                writer.write("train", step, row)
            progress.update(step, row)
            if not math.isfinite(row["loss"]):
                raise FloatingPointError(
                    f"step {step}: the loss is {row['loss']}; metrics are in {writer.path}"
                )

        step = start
        while step < steps and not interrupt.received:
            waited = time.perf_counter()
            batch = next(loader)
            data_wait = time.perf_counter() - waited
            # A value that slips from the host into the step, or back, would stall every device: make it an error.
            with jax.transfer_guard("disallow"):
                state, metrics = step_fn(state, batch)
            report()
            step, pending = step + 1, (step + 1, metrics, data_wait)

            if step % config.eval.every_steps == 0 or step == steps:
                report()
                for suite, result in evaluate(run, state.params, step, config.eval.suites).items():
                    writer.write("valid", step, {"suite": suite, **result.numbers})
                    shown = "  ".join(
                        f"{name} {value:.4g}" for name, value in result.numbers.items()
                    )
                    progress.note(f"step {step}  {suite}: {shown}")
                meter.restart()
            if step % config.checkpoint.every_steps == 0:
                report()
                checkpointer.save(state, loader.state(), config)
                meter.restart()

        # ── End: the last step, or a SIGTERM ──
        report()
        checkpointer.save(state, loader.state(), config)

    checkpointer.close()
    writer.close()
    if step < steps:
        print(
            f"stopped by SIGTERM at step {step}, checkpoint saved; run the same command again to continue",
            flush=True,
        )
        return EXIT_PREEMPTED
    return 0


def _restore_or_init(
    run: Run, checkpointer: Checkpointer, loader: Loader
) -> tuple[TrainState, int]:
    step = checkpointer.newest()
    if step is None:
        return jax.jit(lambda: init_state(run.config))(), 0
    for change in changed_fields(checkpointer.config(step), run.config):
        print(f"changed since the checkpoint: {change}", flush=True)
    abstract = jax.eval_shape(lambda: init_state(run.config))
    state, loader_state = checkpointer.restore(step, abstract, run.mesh)
    loader.restore(loader_state)
    return state, step


class Meter:
    """Turns a step's metrics into a row: adds time, throughput and MFU."""

    def __init__(self, run: Run):
        config = run.config
        self._batch_tokens = config.train.global_batch_tokens
        peak = PEAK_FLOPS.get(run.mesh.devices.flat[0].device_kind)
        self._flops_per_peak = {
            name: flops_per_token(config.model, config.data.sequence_length, causal=causal)
            / (peak * run.mesh.size)
            for name, causal in (("mfu", False), ("mfu_causal", True))
            if peak is not None
        }
        self._last = time.perf_counter()

    def restart(self) -> None:
        """Leave the time since the last row out of the next one."""
        self._last = time.perf_counter()

    def row(self, step: int, metrics: Mapping[str, Any], data_wait: float) -> dict[str, Any]:
        """Return the row of `step`, whose metrics have just arrived; `tokens` is cumulative."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        tokens_per_second = self._batch_tokens / seconds
        return {
            **metrics,
            "tokens": step * self._batch_tokens,
            "tokens_per_second": tokens_per_second,
            "step_seconds": seconds,
            "data_wait_seconds": data_wait,
            **{name: flops * tokens_per_second for name, flops in self._flops_per_peak.items()},
        }
