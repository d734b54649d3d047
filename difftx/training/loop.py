"""The training loop, which starts again from an earlier checkpoint after too many bad steps."""

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
import rich

from difftx.data.loader import Loader
from difftx.errors import EXIT_FAILED, EXIT_PREEMPTED
from difftx.files import resolved
from difftx.json_files import JsonLines, with_sha256
from difftx.model.flops import PEAK_FLOPS, flops_per_token
from difftx.parallel.heartbeat import Monitor
from difftx.parallel.multihost import Interrupt, agree, barrier, decide_on_primary, is_primary, print_on_primary
from difftx.progress import Advance, Work
from difftx.training.checkpoint.checkpointer import Checkpointer
from difftx.training.goodput import Goodput, format_goodput
from difftx.training.guards import Guard, Rewind, act_on_bad_steps, log
from difftx.training.lambda_range import LAMBDA_SPLIT, LambdaRange, lambda_warning
from difftx.training.metrics import MetricsWriter, read_newest_metrics
from difftx.training.profile import StepTracer, out_of_memory
from difftx.training.resume import data_state, rewind, starting_state
from difftx.training.run import Run
from difftx.training.state import Metrics, make_train_step

PROGRESS_LABEL = "{what} {done}/{total}"
# Path in `evals/` of a suite's result, journal or figure, of a step.
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
    """Train from the newest checkpoint, or from the start, to the last step, and return the exit code.

    `evaluate` is `difftx.evals.evaluate`, called every `eval.every_steps`, and `exports` the module
    `difftx.interop.exports`, used every `checkpoint.export_every_steps`. They are arguments, because these packages
    import this one. `began` is the result of `time.perf_counter()` at the start of the process. The exit code is
    `EXIT_PREEMPTED` after a signal, and `EXIT_FAILED` after too many bad steps. Raise `RunError` if a device has no
    more memory.
    """
    interrupt = Interrupt()
    try:
        run.check_records()
        with run.lock() as run, Monitor(run.config.multihost) as monitor, jax.set_mesh(run.mesh):
            session = Session(
                run=run,
                evaluate=evaluate,
                exports=exports,
                train_step=jax.jit(make_train_step(run.config), donate_argnums=0),
                journal=JsonLines(run.files / "journal.jsonl", run.owner),
                interrupt=interrupt,
                monitor=monitor,
                allow_config_change=allow_config_change,
            )
            code = Attempt(session, Goodput(time.perf_counter() if began is None else began)).train()
            while code is None:
                code = Attempt(session, Goodput(time.perf_counter()), is_first=False).train()
            return code
    except jax.errors.JaxRuntimeError as error:
        if explanation := out_of_memory(run, error):
            raise explanation from error
        raise
    finally:
        interrupt.close()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Session:
    """The objects that all attempts at training in this process share."""

    run: Run
    evaluate: Callable[..., Mapping[str, Any]]
    exports: ModuleType | None
    train_step: jax.stages.Wrapped  # The result of `make_train_step`, jitted.
    journal: JsonLines  # Rewinds and stops, for people.
    interrupt: Interrupt
    monitor: Monitor
    allow_config_change: bool


class Attempt:
    """Training from a checkpoint, or from the start, until the last step, a signal or too many bad steps."""

    def __init__(self, session: Session, goodput: Goodput, *, is_first: bool = True):
        """Restore or create the state. `is_first` is False after a rewind in this process."""
        self._session, self._goodput, self._config = session, goodput, session.run.config
        self._barrier_timeout = self._config.multihost.barrier_timeout_seconds
        self._is_first = is_first
        self._open_objects()
        self._restore()
        self._record_start()
        self._first_example = self._loader.state()["examples"]
        require_equal_replicas(self._state.params, "start", self._barrier_timeout)

    def _open_objects(self) -> None:
        """Open the checkpoints and the data of the run, and create the guard. `_restore` sets their states."""
        run, config = self._session.run, self._config
        self._checkpointer = Checkpointer(
            run.workdir,
            config.checkpoint,
            save_seconds=self._barrier_timeout,
            owner=run.owner,
            run_id=run.run_id,
        )
        self._loader = Loader(
            run.data.examples,
            batch_rows=config.batch_rows,
            prefetch_batches=config.data.prefetch_batches,
            threads=run.data.threads,
            sharding=run.batch_sharding,
            signature=run.data.signature,
            vocab_size=config.model.embeddings,
            where=run.data.where,
        )
        self._guard = Guard(config.guards)

    def _restore(self) -> None:
        """Set the state and the step to start from: those of a checkpoint, or new ones."""
        session = self._session
        steps = decide_on_primary(self._checkpointer.steps, self._barrier_timeout)
        with self._goodput.section("restore" if steps else "init"):
            self._state, self._start, self._source_weights = starting_state(
                session.run,
                self._checkpointer,
                self._loader,
                self._guard,
                allow_config_change=session.allow_config_change,
            )
        self._step = self._start
        session.monitor.beat(self._start)

    def _record_start(self) -> None:
        """Write the files of the run, and open those of the metrics without the steps after the start."""
        session, config, folder = self._session, self._config, self._session.run.files
        if is_primary():
            session.run.write_files(self._source_weights)
            # Read goodput before the writer is created, because the writer deletes the rows of later steps.
            self._goodput.resume(folder / "metrics.jsonl", self._start)
        self._writer = MetricsWriter(
            folder,
            config.logging,
            self._start,
            enabled=is_primary(),
            owner=session.run.owner,
            run_id=session.run.run_id,
            address=str(resolved(session.run.workdir)),
            run_config=json.loads(config.to_json()),
        )
        if is_primary():
            session.run.owner.check()
            remove_later_evaluations(folder, self._start)
            log(session.journal, self._guard)
            session.run.owner.push()
        self._tracer = StepTracer(folder, config.logging, enabled=is_primary())

    def train(self) -> int | None:
        """Train, and return the exit code, or None after a rewind, with which the next attempt begins."""
        config, steps, interrupt = self._config, self._config.train.steps, self._session.interrupt
        display = Work(enabled=is_primary(), is_output=True)
        with display, contextlib.ExitStack() as stack:
            stack.callback(self._tracer.stop)
            attempt = self._writer.attempt
            display.note(f"{self._session.run.workdir}: attempt {attempt}, from step {self._start} to {steps}")
            self._write_goodput()
            if self._is_first and self._start < steps:
                self._compile(display)
            self._goodput.switch("train")
            task = display.task("step", steps, done=self._start, label=PROGRESS_LABEL, line=PROGRESS_LINE)
            reporter = Reporter(self._session.run, self._writer, display, stack.enter_context(task), self._guard)
            self._export(reporter, display, only_if_absent=True)
            while self._step < steps and self._guard.tripped is None and not interrupt.requested(self._step):
                self._take_step(reporter)
                if self._step % config.eval.every_steps == 0 or self._step == steps:
                    self._evaluate(reporter, display)
                if self._step % config.checkpoint.every_steps == 0:
                    self._save(reporter)
                    self._export(reporter, display)
            reporter.flush()
            self._goodput.switch("save")
            # The last step is saved even if it is bad, because a run is finished once it has that step's checkpoint.
            should_save = self._guard.last_step_is_good or (self._step == steps and self._guard.tripped is None)
            if should_save:
                require_equal_replicas(self._state.params, "last checkpoint", self._barrier_timeout)
                self._checkpointer.save_and_wait(self._state, self._data_state(), config)
                interrupt.ignore_further_signals()
            self._checkpointer.wait()
        return self._finish(saved=should_save)

    def _compile(self, display: Work) -> None:
        """Compile the train step in all processes, before one of them runs it and waits for the others."""
        with self._goodput.section("compile"), display.wait("compiling the train step (first time only)"):
            self._session.train_step.lower(self._state, self._loader.abstract_batch()).compile()
            # Compilation may take much longer in one process. The heartbeat detects a process that died or froze.
            barrier("compiled train step", max(self._barrier_timeout, self._config.multihost.watchdog_seconds))
        self._session.monitor.beat(self._start)

    def _take_step(self, reporter: "Reporter") -> None:
        waited = time.perf_counter()
        with self._goodput.section("data_wait"):
            batch = next(self._loader)
        data_wait = time.perf_counter() - waited
        self._tracer.start(self._step + 1, reporter.wait)
        # Raise an error for an accidental transfer between host and device, because it would stall all devices.
        with jax.transfer_guard("disallow"), jax.profiler.StepTraceAnnotation("train", step_num=self._step + 1):
            self._state, metrics = self._session.train_step(self._state, batch)
        self._step += 1
        self._session.monitor.beat(self._step)
        reporter.push(self._step, metrics, self._loader.tokens, data_wait)
        self._tracer.stop_after_last(self._step, reporter.wait)
        self._checkpointer.record_finished_save()

    def _evaluate(self, reporter: "Reporter", display: Work) -> None:
        session, step = self._session, self._step
        barrier(f"evaluation after step {step}", self._barrier_timeout)
        reporter.flush()
        with self._goodput.section("eval"):
            # The watchdog takes progress of the evaluation as a sign of life.
            work = Work(enabled=False, on_advance=functools.partial(session.monitor.beat, step))
            suites = self._config.eval.suites if self._guard.tripped is None else ()
            weights = self._checkpointer.weights_id(step)
            session.run.owner.check()
            try:
                results = session.evaluate(session.run, self._state.params, step, suites, work, weights)
            except Exception:
                self._save_after_failed_evaluation(display)
                raise
        session.monitor.beat(step)
        for suite, result in results.items():
            self._writer.write("valid", step, {"suite": suite, **result.numbers})
            shown = "  ".join(f"{name} {value:.4g}" for name, value in result.numbers.items())
            display.note(f"step {step}  {suite}: {shown}")
        self._write_goodput()
        reporter.restart_clock()

    def _save_after_failed_evaluation(self, display: Work) -> None:
        """Save this step, because a restart from an earlier checkpoint would fail at the same evaluation again.

        Do nothing with several processes: a save needs all of them, and the processes that have not failed still wait
        in the evaluation.
        """
        if jax.process_count() == 1 and self._guard.last_step_is_good:
            self._checkpointer.save_and_wait(self._state, self._data_state(), self._config)
            display.note(
                f"step {self._step}: the evaluation failed; its checkpoint is saved, so a restart continues after it"
            )

    def _save(self, reporter: "Reporter") -> None:
        require_equal_replicas(self._state.params, f"checkpoint of step {self._step}", self._barrier_timeout)
        # Flush before the save, so that metrics.jsonl has all steps up to the checkpoint.
        reporter.flush()
        self._write_goodput()
        self._guard.note_regular_step(self._step)
        if self._guard.last_step_is_good:
            with self._goodput.section("save"):
                self._checkpointer.save(self._state, self._data_state(), self._config)
        reporter.restart_clock()

    def _export(self, reporter: "Reporter", display: Work, *, only_if_absent: bool = False) -> None:
        """Wait until this step's checkpoint is on disk, and export it, if the step has an export.

        At the start, the export is absent if an earlier process ended between the save and the export.
        """
        session, step, every_steps = self._session, self._step, self._config.checkpoint.export_every_steps
        is_exported = every_steps is not None and step > 0 and step % every_steps == 0
        exports = session.exports if is_exported and self._guard.last_step_is_good else None
        if exports is None or (only_if_absent and exports.exists(session.run, step)):
            return
        with self._goodput.section("save"):
            self._checkpointer.save_and_wait(self._state, self._data_state(), self._config)
            session.monitor.beat(step)
            display.note(f"step {step}  {exports.write(session.run, step)}")
        session.monitor.beat(step)
        reporter.restart_clock()

    def _finish(self, *, saved: bool) -> int | None:
        """Report how the attempt ended, and return the exit code, or None after a rewind."""
        config, guard, step = self._config, self._guard, self._step
        code = 0 if step == config.train.steps else EXIT_PREEMPTED
        if guard.tripped is not None:
            # The loop may have taken steps after the last bad one, because metrics arrive a step late.
            consumed = self._first_example + (guard.tripped.last - self._start) * config.batch_rows
            code = self._act_on_bad_steps(consumed)
        elif step < config.train.steps:
            what = "checkpoint saved" if saved else "nothing saved between bad steps"
            print_on_primary(f"stopped by a signal at step {step}, {what}; run the same command again to continue")
        row = self._write_goodput()
        self._writer.close()
        self._checkpointer.close()
        if is_primary() and code is not None:
            rich.print(format_goodput(row))
        return code

    def _act_on_bad_steps(self, examples: int) -> int | None:
        """Rewind and return None, or record that the run stops and return the exit code."""
        session, attempt = self._session, self._writer.attempt
        decision = act_on_bad_steps(
            self._guard, config=self._config, checkpointer=self._checkpointer, examples=examples, attempt=attempt
        )
        if isinstance(decision, Rewind):
            del self._state  # The start of the run may need its memory.
            rewind(session.run, self._checkpointer, self._guard, decision, self._source_weights)
            return None
        if is_primary():
            session.journal.append([with_sha256(decision)])
        return EXIT_FAILED

    def _data_state(self) -> dict[str, Any]:
        return data_state(self._session.run, self._loader, self._guard, self._source_weights)

    def _write_goodput(self) -> dict[str, float]:
        row = self._goodput.row()
        self._writer.write("goodput", self._step, row)
        return row


@jax.jit
def _sum_of_bits(params: Any) -> jax.Array:
    """Return the sum of float32 arrays as integers, modulo 2³². Each replica computes its own."""
    return jnp.sum(jnp.stack([jnp.sum(jax.lax.bitcast_convert_type(x, jnp.uint32)) for x in jax.tree.leaves(params)]))


def require_equal_replicas(params: Any, when: str, timeout_seconds: float) -> None:
    """Wait for all processes, and raise `UserError` in all of them if they have different replicas of the parameters.

    XLA assumes that replicas are equal, and never compares them.
    """
    if jax.process_count() > 1:
        sums = sorted({int(shard.data) for shard in _sum_of_bits(params).addressable_shards})
        agree(when, lambda: sums, lambda sums: {f"weights at the {when}, sum of bits": sums}, timeout_seconds)


class Reporter:
    """A reporter of metrics.

    It fetches the metrics of a step after the next step has been dispatched, so that no device waits for the host.
    """

    def __init__(self, run: Run, writer: MetricsWriter, display: Work, advance: Advance, guard: Guard):
        self._config, self._writer, self._guard = run.config, writer, guard
        self._display, self._advance = display, advance
        model, length = run.config.model, run.config.data.sequence_length
        peak = PEAK_FLOPS.get(run.mesh.devices.flat[0].device_kind)
        # Name of the metric → MFU per token/s. Empty if the peak of the device is not known.
        self._mfu_per_token_rate = {
            name: flops_per_token(model, length, causal=causal) / (peak * run.mesh.size)
            for name, causal in (("mfu", False), ("mfu_causal", True))
            if peak is not None
        }
        self._lambda_range = LambdaRange(read_newest_metrics(writer.path) if is_primary() else ())
        self._pending: tuple[int, Metrics, int, float] | None = None
        self._last = time.perf_counter()

    def push(self, step: int, metrics: Metrics, tokens: int, data_wait: float) -> None:
        """Report the previous step, and store the metrics of this one. `tokens` counts those of all steps so far."""
        self.flush()
        self._pending = (step, metrics, tokens, data_wait)

    def flush(self) -> None:
        """Wait for the stored metrics, report them, and let the guard decide whether the step is bad."""
        if self._pending is None:
            return
        (step, metrics, tokens, data_wait), self._pending = self._pending, None
        row = self._row(jax.device_get(metrics), tokens, data_wait)
        self._guard.observe(step, float(row["loss"]), skipped=bool(row["skipped"]))
        # Write a row for each bad step, whatever `logging.every_steps` is.
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
        """Do not count the time until now in the duration of the next step."""
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
    """Delete the results in `evals/` of steps after `step`, because these steps are trained again.

    Files of other names, and files behind links, are not difftx's.
    """
    evals = folder / "evals"
    if evals.is_symlink():
        return
    for parent, _, files in evals.walk():
        for file in (parent / name for name in files):
            found = RESULT_FILE.fullmatch(file.relative_to(evals).as_posix())
            if found and int(found[1]) > step:
                file.unlink()
                with contextlib.suppress(OSError):  # A folder of figures is deleted with its last figure.
                    file.parent.rmdir()
