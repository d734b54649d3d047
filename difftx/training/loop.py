"""The training loop. After too many bad steps, it starts again from an earlier checkpoint."""

import contextlib
import dataclasses
import functools
import json
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from difftx.errors import EXIT_FAILED, EXIT_PREEMPTED
from difftx.files import resolved
from difftx.model.attention import LARGEST_LOGITS
from difftx.model.flops import PEAK_FLOPS, flops_per_token
from difftx.parallel.heartbeat import Monitor
from difftx.parallel.multihost import (
    Interrupt,
    Notice,
    agree,
    barrier,
    decide_on_primary,
    is_primary,
    print_on_primary,
    process_count,
)
from difftx.progress import Advance, Work
from difftx.training.checkpoint.checkpointer import Checkpointer
from difftx.training.goodput import Goodput, format_goodput
from difftx.training.guards import Guard
from difftx.training.lambda_range import LAMBDA_SPLIT, LambdaRange, lambda_warning
from difftx.training.metrics import MetricsWriter, read_newest_metrics
from difftx.training.profile import StepTracer, out_of_memory
from difftx.training.resume import restore
from difftx.training.run import Run
from difftx.training.state import Metrics, make_train_step
from difftx.training.teacher import Teacher, read_teacher
from difftx.training.trainable import merged

PROGRESS_LABEL = "{what} {done}/{total}"
# Paths below `evals/` that belong to one step: results, journals of items, and figures.
RESULT_FILE = re.compile(r"[^/]+/(\d+)(\.ema)?(\.json|(\.\w+)?\.items\.jsonl|/[^/]+\.(png|svg))")
PROGRESS_LINE = "{what} {done}/{total}  {text}  {seconds:.0f} s left"


def train(
    run: Run,
    evaluate: Callable[..., Mapping[str, Any]],
    exports: ModuleType | None = None,
    *,
    began: float | None = None,
    allow_config_change: bool = False,
) -> int:
    """Train from the newest checkpoint, or from the start, to the last step. Return the exit code.

    `evaluate` is `difftx.evals.evaluate`, called every `eval.every_steps`. `exports` is the module
    `difftx.interop.exports`, called every `checkpoint.export_every_steps`. Both are parameters because their packages
    import this one. `began` is the value of `time.perf_counter()` at the start of the process. The exit code is
    `EXIT_PREEMPTED` after a signal, and `EXIT_FAILED` after too many bad steps. Raise `RunError` if a device runs out
    of memory.
    """
    interrupt = Interrupt()
    try:
        run.check_records()
        with run.lock() as run, Monitor(run.config.multihost) as monitor, jax.set_mesh(run.mesh):
            if (teacher := read_teacher(run)) is not None:
                run = dataclasses.replace(run, teacher=teacher.weights)
            training = Training(run, teacher, evaluate, exports, interrupt, monitor, allow_config_change)
            return training.run_to_end(time.perf_counter() if began is None else began)
    except jax.errors.JaxRuntimeError as error:
        if explanation := out_of_memory(run, error):
            raise explanation from error
        raise
    finally:
        interrupt.close()


class Training:
    """Train one run in this process: restore, take steps, evaluate and save until the run ends or is stopped.

    After a rewind, it restores the newest checkpoint, just as a new process would.
    """

    def __init__(
        self,
        run: Run,
        teacher: Teacher | None,
        evaluate: Callable[..., Mapping[str, Any]],
        exports: ModuleType | None,
        interrupt: Interrupt,
        monitor: Monitor,
        allow_config_change: bool,
    ):
        self._run, self._config, self._evaluate_suites, self._exports = run, run.config, evaluate, exports
        self._interrupt, self._monitor, self._allow_config_change = interrupt, monitor, allow_config_change
        self._barrier_timeout = run.config.multihost.barrier_timeout_seconds
        config, params = (None, ()) if teacher is None else (teacher.config, (teacher.params,))
        self._train_step, self._teacher = jax.jit(make_train_step(run.config, config), donate_argnums=0), params

    def run_to_end(self, began: float) -> int:
        """Train to the end, and return the exit code. `began` is the value of `time.perf_counter()` at the start."""
        self._begin(began)
        if self._start < self._config.train.steps:
            self._compile()
        while (code := self._train()) is None:
            self._begin(time.perf_counter())
        return code

    def _begin(self, began: float) -> None:
        """Restore or create the state, write the run's files, and drop metrics and results of steps after the start."""
        run, config = self._run, self._config
        self._goodput = Goodput(began)
        self._checkpointer = Checkpointer(
            run.workdir,
            config.checkpoint,
            save_seconds=self._barrier_timeout,
            owner=run.owner,
            run_id=run.run_id,
            on_saved=run.note_save,
        )
        steps = decide_on_primary(self._checkpointer.steps, self._barrier_timeout)
        with self._goodput.section("restore" if steps else "init"):
            self._state = restore(run, self._checkpointer, allow_config_change=self._allow_config_change)
        self._start = self._state.step
        self._monitor.beat(self._start)
        if is_primary():
            run.write_files(self._state.source_weights, has_saved=bool(steps) or self._start > 0)
            # Read these rows before the writer is created, because it deletes the rows of later steps.
            self._goodput.resume(run.files / "metrics.jsonl", self._start)
        self._writer = MetricsWriter(
            run.files,
            config.logging,
            self._start,
            enabled=is_primary(),
            owner=run.owner,
            run_id=run.run_id,
            address=str(resolved(run.workdir)),
            run_config=json.loads(config.to_json()),
        )
        if is_primary():
            run.owner.check()
            remove_later_evaluations(run.files, self._start)
            # The newest rewind has no row yet. An earlier row may have been dropped because it was corrupt.
            for rewind in self._state.guard.rewinds:
                if {"split": "rewind", **rewind} not in self._writer.events:
                    self._writer.write("rewind", rewind["step"], rewind)
            run.owner.push()
        self._tracer = StepTracer(run.files, config.logging, enabled=is_primary())
        require_equal_replicas(self._state.train.params, "start", self._barrier_timeout)
        attempt = f"attempt {self._writer.attempt}, from step {self._start} to {config.train.steps}"
        print_on_primary(f"{run.workdir}: {attempt}")
        self._write_goodput()

    def _compile(self) -> None:
        """Compile the train step in all processes before one of them runs it and waits for the others."""
        display = Work(enabled=is_primary(), is_output=True)
        with display, self._goodput.section("compile"), display.wait("compiling the train step (first time only)"):
            self._train_step.lower(self._state.train, self._state.loader.abstract_batch(), *self._teacher).compile()
            # Compilation may take much longer in one process than in another, so wait for as long as the watchdog. The
            # heartbeat detects a process that died or hangs.
            barrier("compiled train step", max(self._barrier_timeout, self._config.multihost.watchdog_seconds))
        self._monitor.beat(self._start)

    def _train(self) -> int | None:
        """Take steps until the run ends or is stopped. Return the exit code, or None after a rewind."""
        config, steps, interrupt, state = self._config, self._config.train.steps, self._interrupt, self._state
        guard = state.guard
        display = Work(enabled=is_primary(), is_output=True)
        with display, contextlib.ExitStack() as stack:
            stack.callback(self._tracer.stop)
            self._goodput.switch("train")
            task = display.task("step", steps, done=self._start, label=PROGRESS_LABEL, line=PROGRESS_LINE)
            reporter = Reporter(self._run, self._writer, display, stack.enter_context(task), guard)
            self._export(reporter, display, only_if_absent=True)
            rolling = Notice()
            while state.step < steps and guard.tripped is None and not interrupt.requested(state.step):
                self._take_step(reporter)
                if state.step % config.eval.every_steps == 0 or state.step == steps:
                    self._evaluate(reporter, display)
                is_due = config.checkpoint.every_minutes and rolling.takes_effect(self._checkpointer.is_due, state.step)
                if state.step % config.checkpoint.every_steps == 0:
                    self._save(reporter)
                    self._export(reporter, display)
                elif is_due and state.step < steps:
                    self._save(reporter, rolling=True)
            reporter.flush()
            self._goodput.switch("save")
            # Save the last step even if it is bad: a run counts as finished once this checkpoint exists.
            should_save = guard.last_step_is_good or (state.step == steps and guard.tripped is None)
            if should_save:
                require_equal_replicas(state.train.params, "last checkpoint", self._barrier_timeout)
                state.save(wait=True)
                interrupt.ignores_signals = True
            self._checkpointer.wait()
        return self._finish(saved=should_save)

    def _take_step(self, reporter: "Reporter") -> None:
        state, waited = self._state, time.perf_counter()
        with self._goodput.section("data_wait"):
            batch = next(state.loader)
        data_wait = time.perf_counter() - waited
        self._tracer.start(state.step + 1, reporter.wait)
        # Forbid implicit transfers between host and device, because they would stall all devices.
        with jax.transfer_guard("disallow"), jax.profiler.StepTraceAnnotation("train", step_num=state.step + 1):
            state.train, metrics = self._train_step(state.train, batch, *self._teacher)
        state.step += 1
        self._monitor.beat(state.step)
        reporter.push(state.step, metrics, state.loader.tokens, data_wait)
        self._tracer.stop_after_last(state.step, reporter.wait)
        self._checkpointer.record_finished_save()

    def _evaluate(self, reporter: "Reporter", display: Work) -> None:
        state, step = self._state, self._state.step
        barrier(f"evaluation after step {step}", self._barrier_timeout)
        reporter.flush()
        with self._goodput.section("eval"):
            # Progress of the evaluation counts as a heartbeat.
            work = Work(enabled=False, on_advance=functools.partial(self._monitor.beat, step))
            suites = self._config.eval.suites if state.guard.tripped is None else ()
            weights = self._checkpointer.weights_id(step)
            self._run.owner.check()
            try:
                params = merged(state.train.params, self._config.train)
                results = self._evaluate_suites(self._run, params, step, suites, work, weights)
            except Exception:
                # Save this step, because a restart from an earlier checkpoint would fail at the same evaluation again.
                # With several processes, do not save: those that have not failed still wait in the evaluation and
                # cannot take part.
                if jax.process_count() == 1 and state.guard.last_step_is_good:
                    state.save(wait=True)
                    saved = "the evaluation failed; its checkpoint is saved, so a restart continues after it"
                    display.note(f"step {step}: {saved}")
                raise
        self._monitor.beat(step)
        for suite, result in results.items():
            self._writer.write("valid", step, {"suite": suite, **result.numbers})
            shown = "  ".join(f"{name} {value:.4g}" for name, value in result.numbers.items())
            display.note(f"step {step}  {suite}: {shown}")
        self._write_goodput()
        reporter.restart_clock()

    def _save(self, reporter: "Reporter", *, rolling: bool = False) -> None:
        state, step = self._state, self._state.step
        require_equal_replicas(state.train.params, f"checkpoint of step {step}", self._barrier_timeout)
        # Flush first, so that metrics.jsonl has all steps up to the checkpoint.
        reporter.flush()
        self._write_goodput()
        if state.guard.first_regular is None and not rolling:
            state.guard.first_regular = step
        if state.guard.last_step_is_good:
            with self._goodput.section("save"):
                state.save(rolling=rolling)
        reporter.restart_clock()

    def _export(self, reporter: "Reporter", display: Work, *, only_if_absent: bool = False) -> None:
        """Export this step if an export is due. First wait until its checkpoint is on disk.

        `only_if_absent` is for the start of an attempt: the previous one may have ended between the save and the
        export.
        """
        step, every_steps = self._state.step, self._config.checkpoint.export_every_steps
        is_exported = every_steps is not None and step > 0 and step % every_steps == 0
        exports = self._exports if is_exported and self._state.guard.last_step_is_good else None
        if exports is None or (only_if_absent and exports.exists(self._run, step)):
            return
        with self._goodput.section("save"):
            self._state.save(wait=True)
            self._monitor.beat(step)
            display.note(f"step {step}  {exports.write(self._run, step)}")
        self._monitor.beat(step)
        reporter.restart_clock()

    def _finish(self, *, saved: bool) -> int | None:
        """Report how the training ended. Return the exit code, or None after a rewind."""
        step, steps = self._state.step, self._config.train.steps
        code = 0 if step == steps else EXIT_PREEMPTED
        if self._state.guard.tripped is not None:
            stop = self._state.act_on_bad_steps(self._writer.attempt)
            code = None if stop is None else EXIT_FAILED
            if stop is not None:
                self._writer.write("stop", stop["step"], stop)
        elif step < steps:
            what = "checkpoint saved" if saved else "nothing saved between bad steps"
            print_on_primary(f"stopped by a signal at step {step}, {what}; run the same command again to continue")
        row = self._write_goodput()
        self._writer.close()
        self._checkpointer.close()
        if code is not None:
            print_on_primary(format_goodput(row))
        return code

    def _write_goodput(self) -> dict[str, float]:
        row = self._goodput.row()
        self._writer.write("goodput", self._state.step, row)
        return row


@jax.jit
def _sum_of_bits(params: Any) -> jax.Array:
    """Return the sum of the bits of all float32 parameters, modulo 2³². Each replica computes its own sum."""
    return jnp.sum(jnp.stack([jnp.sum(jax.lax.bitcast_convert_type(x, jnp.uint32)) for x in jax.tree.leaves(params)]))


def require_equal_replicas(params: Any, when: str, timeout_seconds: float) -> None:
    """Compare the replicas of the parameters between processes. Raise `UserError` in all of them if any differ.

    All processes must call this. XLA assumes that replicas are equal, and never compares them.
    """
    if process_count() > 1:
        sums = sorted({int(shard.data) for shard in _sum_of_bits(params).addressable_shards})
        agree(when, lambda: sums, lambda sums: {f"weights at the {when}, sum of bits": sums}, timeout_seconds)


class Reporter:
    """Report the metrics of each step.

    The metrics of a step are fetched after the next step has been dispatched, so that no device waits for the host.
    """

    def __init__(self, run: Run, writer: MetricsWriter, display: Work, advance: Advance, guard: Guard):
        self._config, self._writer, self._guard = run.config, writer, guard
        self._display, self._advance = display, advance
        model, length = run.config.model, run.config.data.sequence_length
        peak = PEAK_FLOPS.get(run.mesh.devices.flat[0].device_kind)
        # Metric → MFU per token/s. Empty if the peak FLOPS of the device are unknown.
        self._mfu_per_token_rate = {
            name: flops_per_token(model, length, causal=causal) / (peak * run.mesh.size)
            for name, causal in (("mfu", False), ("mfu_causal", True))
            if peak is not None
        }
        self._lambda_range = LambdaRange(read_newest_metrics(writer.path) if is_primary() else ())
        self._pending: tuple[int, Metrics, int, float] | None = None
        self._last = time.perf_counter()

    def push(self, step: int, metrics: Metrics, tokens: int, data_wait: float) -> None:
        """Report the previous step, then store this step's metrics. `tokens` counts the tokens of all steps so far."""
        self.flush()
        self._pending = (step, metrics, tokens, data_wait)

    def flush(self) -> None:
        """Wait for the stored metrics, report them, and tell the guard, which decides whether the step is bad."""
        if self._pending is None:
            return
        (step, metrics, tokens, data_wait), self._pending = self._pending, None
        row = self._row(jax.device_get(metrics), tokens, data_wait)
        if not self._config.logging.watches(step):
            row.pop(LARGEST_LOGITS, None)
        self._guard.observe(step, float(row["loss"]), skipped=bool(row["skipped"]))
        # Log every bad step, even if `logging.every_steps` would skip it.
        is_logged = step % self._config.logging.every_steps == 0 or step == self._config.train.steps
        if is_logged or not self._guard.last_step_is_good:
            self._writer.write("train", step, row)
        for layer in self._lambda_range.observe(row.get("lambda", ())):
            value = float(row["lambda"][layer - 1])
            self._writer.write(LAMBDA_SPLIT, step, {"layer": layer, "value": value})
            self._display.note(lambda_warning(step, layer, value))
        speed = f"{row['tokens_per_second']:,.0f} tokens/s"
        self._advance(1, f"loss {row['loss']:.4f}  grad {row['grad_norm']:.2f}  {speed}")
        if row["skipped"]:
            empty = " (no token of the batch counts in the loss)" if row["grad_norm"] == 0 else ""
            norms = f"loss {row['loss']}, gradient norm {row['grad_norm']}"
            self._display.note(f"step {step}: {norms}: update skipped{empty}")

    def wait(self) -> None:
        """Wait until the devices have finished the last step."""
        if self._pending is not None:
            jax.block_until_ready(self._pending[1])

    def restart_clock(self) -> None:
        """Leave the time until now out of the next step's duration."""
        self._last = time.perf_counter()

    def _row(self, metrics: Mapping[str, Any], tokens: int, data_wait: float) -> dict[str, Any]:
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        rate = self._config.train.global_batch_tokens / seconds
        return {
            **metrics,
            "tokens": tokens,
            "tokens_per_second": rate,
            "step_seconds": seconds,
            "data_wait_seconds": data_wait,
            **{name: factor * rate for name, factor in self._mfu_per_token_rate.items()},
        }


def remove_later_evaluations(folder: Path, step: int) -> None:
    """Delete the results in `evals/` of steps after `step`, because these steps will be trained again.

    Keep files with unknown names, because difftx did not write them.
    """
    evals = folder / "evals"
    for parent, _, files in evals.walk():
        for file in (parent / name for name in files):
            found = RESULT_FILE.fullmatch(file.relative_to(evals).as_posix())
            if found and int(found[1]) > step:
                file.unlink()
                with contextlib.suppress(OSError):  # Delete a folder of figures together with its last figure.
                    file.parent.rmdir()
