"""The training loop."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import rich

from difftx import kernels
from difftx.config.architectures import ARCHITECTURES
from difftx.data.loader import Batch, Loader
from difftx.errors import EXIT_PREEMPTED
from difftx.model.flops import PEAK_FLOPS, flops_per_token
from difftx.parallel.heartbeat import Monitor
from difftx.parallel.multihost import Interrupt, barrier, decide_on_primary, is_primary, say
from difftx.progress import Work
from difftx.training.checkpoint.checkpointer import Checkpointer
from difftx.training.goodput import Goodput, format_goodput
from difftx.training.guards import Guard, Journal, Rewind, act_on_bad_steps
from difftx.training.lambda_range import SPLIT, LambdaRange, warning
from difftx.training.metrics import MetricsWriter, Progress, read_newest_metrics
from difftx.training.resume import starting_state
from difftx.training.run import Run
from difftx.training.state import Metrics, TrainState, make_train_step

Evaluate = Callable[[Run, Any, int, Sequence[str], Work, str], Mapping[str, Any]]


def train(run: Run, evaluate: Evaluate, *, began: float | None = None, allow_config_change: bool = False) -> int:
    """Train from the newest checkpoint, or from the start, to the last step.

    Args:
        run: Config, mesh and data.
        evaluate: `difftx.evals.evaluate`, called every `eval.every_steps` with `eval.suites`.
        began: `time.perf_counter()` at the start of the process. None uses the current time.
        allow_config_change: Resume although the config differs from the config of the checkpoint.

    Returns:
        The exit code: 0 after the last step; 75 after SIGTERM or Ctrl-C, when the same command resumes the run; 1 if
        the guards stopped the run.
    """
    interrupt = Interrupt()
    try:
        if ARCHITECTURES[run.config.model.architecture].kernel == "diff_attention":
            kernels.check_gradients(run.config.model.d_head)
        run.check_records()
        with run.lock(), Monitor(run.config.multihost) as monitor, jax.set_mesh(run.mesh):
            step_fn = jax.jit(make_train_step(run.config), donate_argnums=0)
            journal, outcome = Journal(run.workdir), None
            while not isinstance(outcome, int):
                goodput = Goodput(time.perf_counter() if began is None else began)
                outcome = _train(
                    run,
                    evaluate,
                    step_fn,
                    journal,
                    goodput,
                    interrupt,
                    monitor,
                    rewind=outcome,
                    allow_config_change=allow_config_change,
                )
                began = None
            return outcome
    finally:
        interrupt.close()


def _train(
    run: Run,
    evaluate: Evaluate,
    step_fn: Callable[[TrainState, Batch], tuple[TrainState, Metrics]],
    journal: Journal,
    goodput: Goodput,
    interrupt: Interrupt,
    monitor: Monitor,
    *,
    rewind: Rewind | None,
    allow_config_change: bool,
) -> int | Rewind:
    """Train until the last step, a signal or bad steps; return the exit code, or the rewind for the next call."""
    config, steps = run.config, run.config.train.steps
    patience = config.multihost.barrier_timeout_seconds

    # ── State: the workdir's newest checkpoint, else weights of another run, else new parameters ──
    checkpointer = Checkpointer(run.workdir, config.checkpoint, save_seconds=config.multihost.barrier_timeout_seconds)
    loader = Loader(
        run.data.examples,
        rows=config.batch_rows,
        prefetch_batches=config.data.prefetch_batches,
        sharding=run.batch_sharding,
        signature=run.data.signature,
        vocab_size=config.model.vocab_size,
        where=run.data.where,
    )
    guard = Guard(config.guards)
    with goodput.section("restore" if decide_on_primary(checkpointer.steps, patience) else "init"):
        state, start = starting_state(run, checkpointer, loader, guard, allow_config_change=allow_config_change)
    if is_primary():
        run.write_description()
        goodput.resume(run.workdir / "metrics.jsonl", start)
    writer = MetricsWriter(run.workdir, config.logging, start, enabled=is_primary())
    if rewind is not None:
        journal.add_rewind(rewind, start, loader.state()["examples"], writer.attempt)
    journal.resume(start, guard, loader)
    first_example = loader.state()["examples"]
    again = f", rewind {guard.rewinds}" if guard.rewinds else ""  # The name of each barrier must be unique.
    barrier(f"start{again}", patience)

    with Progress(steps, start, enabled=is_primary()) as progress:
        progress.note(f"{run.workdir}: attempt {writer.attempt}, from step {start} to {steps}")
        reporter = Reporter(run, writer, progress, guard)
        writer.write("goodput", start, goodput.row())
        step = start

        # ── Steps ──
        goodput.switch("compile" if rewind is None else "train")  # The first call of `step_fn` compiles it.
        while step < steps and guard.tripped is None and not interrupt.requested(step):
            waited = time.perf_counter()
            with goodput.section("data_wait"):
                batch = next(loader)
            data_wait = time.perf_counter() - waited
            # An accidental transfer between host and device would stall every device: make it an error.
            with jax.transfer_guard("disallow"):
                state, metrics = step_fn(state, batch)
            goodput.switch("train")
            step += 1
            monitor.beat(step)
            reporter.push(step, metrics, data_wait)
            checkpointer.check()

            if step % config.eval.every_steps == 0 or step == steps:
                barrier(f"evaluation after step {step}{again}", patience)
                reporter.flush()
                with goodput.section("eval"):
                    # Progress of the evaluation shows the watchdog that the process does not hang.
                    work = Work(enabled=False, on_advance=functools.partial(monitor.beat, step))
                    suites = config.eval.suites if guard.tripped is None else ()
                    results = evaluate(run, state.params, step, suites, work, checkpointer.weights_id(step))
                monitor.beat(step)
                for suite, result in results.items():
                    writer.write("valid", step, {"suite": suite, **result.numbers})
                    shown = "  ".join(f"{name} {value:.4g}" for name, value in result.numbers.items())
                    progress.note(f"step {step}  {suite}: {shown}")
                writer.write("goodput", step, goodput.row())
                reporter.restart_clock()
            if step % config.checkpoint.every_steps == 0:
                barrier(f"checkpoint of step {step}{again}", patience)
                reporter.flush()  # Before the save, so that metrics.jsonl has every step up to the checkpoint.
                writer.write("goodput", step, goodput.row())
                if guard.calm:
                    with goodput.section("save"):
                        checkpointer.save(state, loader.state() | {"guard": guard.state()}, config)
                reporter.restart_clock()

        # ── End: the last step, a signal, or bad steps ──
        reporter.flush()
        goodput.switch("save")
        saved = guard.calm or (step == steps and guard.tripped is None)
        if saved:
            checkpointer.save_and_wait(state, loader.state() | {"guard": guard.state()}, config)
        checkpointer.close()

    outcome: int | Rewind = 0 if step == steps else EXIT_PREEMPTED
    if guard.tripped is not None:
        consumed = first_example + (guard.tripped.last - start) * config.batch_rows
        outcome = act_on_bad_steps(guard, config, journal, checkpointer, consumed, writer.attempt)
    elif step < steps:
        what = "checkpoint saved" if saved else "nothing saved between bad steps"
        say(f"stopped by a signal at step {step}, {what}; run the same command again to continue")
    row = goodput.row()
    writer.write("goodput", step, row)
    writer.close()
    if is_primary() and isinstance(outcome, int):
        rich.print(format_goodput(row))
    return outcome


class Reporter:
    """A reporter of each step's metrics, one step late: it fetches them after the next step has been dispatched."""

    def __init__(self, run: Run, writer: MetricsWriter, progress: Progress, guard: Guard):
        self._config, self._writer, self._progress, self._guard = run.config, writer, progress, guard
        model, length = run.config.model, run.config.data.sequence_length
        peak = PEAK_FLOPS.get(run.mesh.devices.flat[0].device_kind)
        self._mfu_per_rate = {
            name: flops_per_token(model, length, causal=causal) / (peak * run.mesh.size)
            for name, causal in (("mfu", False), ("mfu_causal", True))
            if peak is not None
        }
        self._lambda_range = LambdaRange(read_newest_metrics(writer.path) if is_primary() else ())
        self._pending: tuple[int, Metrics, float] | None = None
        self._last = time.perf_counter()

    def push(self, step: int, metrics: Metrics, data_wait: float) -> None:
        """Report the previous step, and hold this one."""
        self.flush()
        self._pending = (step, metrics, data_wait)

    def flush(self) -> None:
        """Wait for the metrics of the held step, report them, and let the guard judge the step."""
        if self._pending is None:
            return
        (step, metrics, data_wait), self._pending = self._pending, None
        row = self._row(step, jax.device_get(metrics), data_wait)
        self._guard.observe(step, float(row["loss"]), skipped=bool(row["skipped"]))
        # Bad steps always have a row, whatever `logging.every_steps` is.
        if step % self._config.logging.every_steps == 0 or step == self._config.train.steps or not self._guard.calm:
            self._writer.write("train", step, row)
        for layer in self._lambda_range.observe(row.get("lambda", ())):  # Layers are numbered from 1.
            value = float(row["lambda"][layer - 1])
            self._writer.write(SPLIT, step, {"layer": layer, "value": value})
            self._progress.note(warning(step, layer, value))
        self._progress.update(step, row)
        if row["skipped"]:
            self._progress.note(f"step {step}: loss {row['loss']}, gradient norm {row['grad_norm']}: update skipped")

    def restart_clock(self) -> None:
        """Exclude the time since the last step from the duration of the next step."""
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
