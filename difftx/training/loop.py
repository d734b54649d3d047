"""The training loop."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from difftx import kernels
from difftx.data.loader import Loader
from difftx.errors import EXIT_PREEMPTED
from difftx.model.flops import PEAK_FLOPS, flops_per_token
from difftx.parallel.multihost import Interrupt, Monitor, barrier, is_lead, say
from difftx.training.checkpoint import Checkpointer
from difftx.training.metrics import MetricsWriter, Progress
from difftx.training.resume import starting_state
from difftx.training.run import Run
from difftx.training.state import Metrics, make_train_step

Evaluate = Callable[[Run, Any, int, Sequence[str]], Mapping[str, Any]]


def train(run: Run, evaluate: Evaluate, *, allow_config_change: bool = False) -> int:
    """Train from the newest checkpoint, or from the start, to the last step.

    Args:
        run: config, mesh and data.
        evaluate: `difftx.evals.evaluate`, called every `eval.every_steps` with `eval.suites`.
        allow_config_change: go on from a checkpoint though the config is not that of its run.

    Returns:
        0, or 75 if SIGTERM or Ctrl-C came: a checkpoint was saved and the same command continues.
    """
    interrupt = Interrupt()
    try:
        if run.config.model.architecture == "diff":
            kernels.check_gradients(run.config.model.d_head)
        with run.lock(), Monitor(run.config.multihost) as monitor, jax.set_mesh(run.mesh):
            return _train(run, evaluate, interrupt, monitor, allow_config_change)
    finally:
        interrupt.close()


def _train(run: Run, evaluate: Evaluate, interrupt: Interrupt, monitor: Monitor, allow_config_change: bool) -> int:
    config, steps = run.config, run.config.train.steps
    patience = config.multihost.barrier_timeout_seconds

    # ── State: the workdir's newest checkpoint, else other weights, else a fresh start ──
    checkpointer = Checkpointer(run.workdir, config.checkpoint)
    loader = Loader(
        run.data.examples,
        rows=config.batch_rows,
        prefetch_batches=config.data.prefetch_batches,
        sharding=run.batch_sharding,
        signature=run.data.signature,
    )
    state, start = starting_state(run, checkpointer, loader, allow_config_change=allow_config_change)
    if is_lead():
        run.write_description()
    writer = MetricsWriter(run.workdir, config.logging, start, enabled=is_lead())
    barrier("start", patience)

    step_fn = jax.jit(make_train_step(config), donate_argnums=0)

    with Progress(steps, start, enabled=is_lead()) as progress:
        progress.note(f"{run.workdir}: attempt {writer.attempt}, from step {start} to {steps}")
        reporter = Reporter(run, writer, progress)
        step = start

        # ── Steps ──
        while step < steps and not interrupt.requested(step):
            waited = time.perf_counter()
            batch = next(loader)
            data_wait = time.perf_counter() - waited
            # A value that slips from the host into the step, or back, would stall every device: make it an error.
            with jax.transfer_guard("disallow"):
                state, metrics = step_fn(state, batch)
            step += 1
            monitor.beat(step)
            reporter.push(step, metrics, data_wait)
            checkpointer.check()

            if step % config.eval.every_steps == 0 or step == steps:
                barrier(f"evaluation after step {step}", patience)
                reporter.flush()
                for suite, result in evaluate(run, state.params, step, config.eval.suites).items():
                    writer.write("valid", step, {"suite": suite, **result.numbers})
                    shown = "  ".join(f"{name} {value:.4g}" for name, value in result.numbers.items())
                    progress.note(f"step {step}  {suite}: {shown}")
                reporter.restart_clock()
            if step % config.checkpoint.every_steps == 0:
                barrier(f"checkpoint of step {step}", patience)
                reporter.flush()  # Before the save: what a checkpoint has behind it is in metrics.jsonl.
                checkpointer.save(state, loader.state(), config)
                reporter.restart_clock()

        # ── End: the last step, or a signal ──
        reporter.flush()
        checkpointer.save_and_wait(state, loader.state(), config)

    checkpointer.close()
    writer.close()
    if step < steps:
        say(f"stopped by a signal at step {step}, checkpoint saved; run the same command again to continue")
        return EXIT_PREEMPTED
    return 0


class Reporter:
    """Reports each step one step late: metrics are fetched after the next step was dispatched, so nothing waits."""

    def __init__(self, run: Run, writer: MetricsWriter, progress: Progress):
        self._config, self._writer, self._progress = run.config, writer, progress
        model, length = run.config.model, run.config.data.sequence_length
        peak = PEAK_FLOPS.get(run.mesh.devices.flat[0].device_kind)
        self._mfu_per_rate = {
            name: flops_per_token(model, length, causal=causal) / (peak * run.mesh.size)
            for name, causal in (("mfu", False), ("mfu_causal", True))
            if peak is not None
        }
        self._pending: tuple[int, Metrics, float] | None = None
        self._last = time.perf_counter()

    def push(self, step: int, metrics: Metrics, data_wait: float) -> None:
        """Report the step before, and hold this one."""
        self.flush()
        self._pending = (step, metrics, data_wait)

    def flush(self) -> None:
        """Report the step that is held, when its metrics have arrived.

        Raises:
            FloatingPointError: its loss is not finite.
        """
        if self._pending is None:
            return
        (step, metrics, data_wait), self._pending = self._pending, None
        row = self._row(step, jax.device_get(metrics), data_wait)
        if step % self._config.logging.every_steps == 0 or step == self._config.train.steps:
            self._writer.write("train", step, row)
        self._progress.update(step, row)
        if not math.isfinite(row["loss"]):
            raise FloatingPointError(f"step {step}: the loss is {row['loss']}; metrics are in {self._writer.path}")

    def restart_clock(self) -> None:
        """Leave the time since the last row out of the next one."""
        self._last = time.perf_counter()

    def _row(self, step: int, metrics: Mapping[str, Any], data_wait: float) -> dict[str, Any]:
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        batch_tokens = self._config.train.global_batch_tokens
        rate = batch_tokens / seconds
        return {
            **metrics,
            "tokens": step * batch_tokens,
            "tokens_per_second": rate,
            "step_seconds": seconds,
            "data_wait_seconds": data_wait,
            **{name: factor * rate for name, factor in self._mfu_per_rate.items()},
        }
