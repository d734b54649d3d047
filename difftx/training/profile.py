"""Trace train steps, and profile device memory after an out-of-memory error."""

from collections.abc import Callable
from pathlib import Path

import jax

from difftx.config import LoggingConfig
from difftx.errors import RunError
from difftx.files import new_file
from difftx.training.run import Run


class StepTracer:
    """Trace the steps in `logging.profile_steps` to `<folder>/profile`, for xprof and Perfetto.

    Do nothing unless `enabled`. Each attempt of a run writes its own trace.
    """

    def __init__(self, folder: Path, config: LoggingConfig, *, enabled: bool):
        first, count = config.profile_steps or (0, 0)
        self._steps = range(first, first + count)
        self._folder, self._enabled, self._is_tracing = folder / "profile", enabled, False

    def start(self, step: int, wait: Callable[[], None]) -> None:
        """Start the trace if `step` is in the range. First call `wait`, which waits until the devices are idle."""
        if self._enabled and not self._is_tracing and step in self._steps:
            wait()
            options = jax.profiler.ProfileOptions()
            # Tracing all Python functions would slow down the measured steps.
            options.python_tracer_level = 0
            jax.profiler.start_trace(self._folder, create_perfetto_trace=True, profiler_options=options)
            self._is_tracing = True

    def stop_after_last(self, step: int, wait: Callable[[], None]) -> None:
        """Write the trace if `step` is the last one. First call `wait`, which waits until the devices are idle."""
        if self._is_tracing and step == self._steps[-1]:
            wait()
            self.stop()

    def stop(self) -> None:
        """Write the trace if one was started."""
        if self._is_tracing:
            self._is_tracing = False
            jax.profiler.stop_trace()


def out_of_memory(run: Run, error: jax.errors.JaxRuntimeError) -> RunError | None:
    """If `error` says that a device is out of memory, write a profile of the memory of this process's devices.

    Return an error that names the file. For any other `error`, return None.
    """
    message = str(error)
    if "RESOURCE_EXHAUSTED" not in message and "Out of memory" not in message:  # CPUs also report INTERNAL.
        return None
    path = run.workdir / f"device_memory-{jax.process_index()}.prof"
    with new_file(path) as file:
        file.write(jax.profiler.device_memory_profile())
    return RunError(
        f"{message.splitlines()[0]} {path} lists the arrays in the devices' memory; raise train.accumulation, lower "
        'train.global_batch_tokens, or set model.remat to full (see "Out of memory" in docs/operations.md)'
    )
