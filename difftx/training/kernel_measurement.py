"""Time the attention kernels of a config.

A kernel may hang, or leave the device in a state in which every later call fails. On GPUs, a child process therefore
measures the kernels before this process opens the device. After a failure, a new child measures the remaining kernels.
A TPU belongs to one process, so this process itself measures there. If a kernel hangs on a TPU, this process exits with
code 1 and a message that suggests a fix.
"""

import importlib.metadata
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import jax

from difftx.config import Config
from difftx.errors import EXIT_FAILED, printable
from difftx.kernels import target
from difftx.kernels.measure import Workload, measure
from difftx.parallel import multihost
from difftx.registry import load_extensions, loaded_extensions
from difftx.training.workload import attention_workload

DEADLINE_SECONDS = 60.0  # Time for all kernels.
KERNEL_SECONDS = 25.0  # Time for one kernel, including its compilation.
Measured = tuple[dict[str, float], dict[str, str]]  # Milliseconds by kernel, and reasons for rejection by kernel.
Outcomes = dict[str, float | str]  # Milliseconds or the reason for rejection, by kernel.


def has_nvidia_gpu() -> bool:
    """Return whether this machine has the NVIDIA driver. Even if it does, JAX may use another platform."""
    return shutil.which("nvidia-smi") is not None


def gpu_identity() -> str | None:
    """Return the number, names and driver of the NVIDIA GPUs that JAX will use, or None. Do not open the devices."""
    platforms = os.environ.get("JAX_PLATFORMS", "").split(",")
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    if platforms[0] not in ("", "cuda", "gpu") or not has_nvidia_gpu() or not any("cuda" in p.name for p in plugins):
        return None
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    names = answer.stdout.strip().splitlines()
    return f"{len(names)} × {names[0]}" if answer.returncode == 0 and names else None


def measured(config: Config) -> Measured:
    """Measure the kernels of a config, and sort them by time. On GPUs, call this before JAX opens the devices."""
    outcomes = _measured_here(config) if gpu_identity() is None else _measured_by_children(config)
    milliseconds = {name: outcome for name, outcome in outcomes.items() if not isinstance(outcome, str)}
    rejected = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, str)}
    return dict(sorted(milliseconds.items(), key=lambda item: item[1])), rejected


def _measured_by_children(config: Config) -> Outcomes:
    """Measure the kernels in child processes. After a failure, a new child measures the remaining kernels."""
    context, deadline = multiprocessing.get_context("spawn"), time.monotonic() + DEADLINE_SECONDS
    outcomes: Outcomes = {}
    todo: list[str] | None = None
    extensions = [extension.path for extension in loaded_extensions()]
    # `jax.distributed` sets this if each process uses only some of the GPUs.
    devices = jax.config.read("jax_cuda_visible_devices")
    while todo is None or todo:
        pipe, end = context.Pipe(duplex=False)
        child = context.Process(
            target=_child, args=(end, config, extensions, devices, multihost.process_count(), todo), daemon=True
        )
        child.start()
        end.close()
        try:
            todo = _received(pipe, deadline)
            while todo:
                outcome = _received(pipe, min(deadline, time.monotonic() + KERNEL_SECONDS))
                if isinstance(outcome, str):
                    raise _FailedError(outcome)
                outcomes[todo.pop(0)] = outcome
        except _FailedError as error:
            if todo is None:
                print(printable(f"attention kernels cannot be measured: {error}"), file=sys.stderr, flush=True)
                break
            outcomes[todo.pop(0)] = str(error)
            if time.monotonic() > deadline:
                outcomes |= _not_tried(todo)
                break
        finally:
            child.kill()
            child.join()
    return outcomes


class _FailedError(Exception):
    """A kernel failed in a child process."""


def _received(pipe: Connection, deadline: float) -> Any:
    """Receive an object from a child. Raise `_FailedError` if the child ends or sends nothing until the deadline."""
    began = time.monotonic()
    try:
        if pipe.poll(max(0.0, deadline - began)):
            return pipe.recv()
    except (EOFError, OSError):
        raise _FailedError("the process that measured it crashed") from None
    raise _FailedError(f"it did not finish within {time.monotonic() - began:.0f} s")


def _child(
    end: Connection, config: Config, extensions: list[str], devices: str, processes: int, todo: list[str] | None
):
    """Send the names of the kernels to measure, then the outcome of each: milliseconds, or why it failed.

    Stop after the first failure, because another child measures the remaining kernels.
    """
    # Exit with the parent, so that a hung kernel does not keep the GPU.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    jax.config.update("jax_cuda_visible_devices", devices)
    load_extensions(extensions)
    workload = attention_workload(config, target.device_kind(), jax.local_device_count() * processes)
    names = workload.candidates() if todo is None else todo
    end.send(names)
    for name in names:
        outcome = _outcome(workload, name)
        end.send(outcome)
        if isinstance(outcome, str):
            return


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(EXIT_FAILED)


def _outcome(workload: Workload, name: str) -> float | str:
    """Measure a kernel. Return milliseconds, or the reason why it failed."""
    try:
        return measure(workload, name)
    except Exception as error:  # A kernel may raise any exception.
        return f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}"


def _measured_here(config: Config) -> Outcomes:
    """Measure the kernels in this process. If one hangs, exit with code 1 and a message that suggests a fix."""
    last_start = time.monotonic() + DEADLINE_SECONDS - KERNEL_SECONDS
    workload = attention_workload(config, target.device_kind(), jax.device_count())
    outcomes: Outcomes = {}
    running: list[str] = []
    watchdog = threading.Timer(DEADLINE_SECONDS, _abort, [running])
    watchdog.daemon = True
    watchdog.start()
    for name in workload.candidates():
        # The watchdog would also end the process for a kernel that is only slow to compile.
        if time.monotonic() > last_start:
            outcomes |= _not_tried([name])
            continue
        running[:] = [name]
        outcomes[name] = _outcome(workload, name)
    watchdog.cancel()
    return outcomes


def _not_tried(names: list[str]) -> Outcomes:
    # Keep "xla", which compiles on every device. If all kernels were rejected, none could run.
    return {name: f"not tried within {DEADLINE_SECONDS:.0f} s" for name in names if name != "xla"}


def _abort(running: list[str]) -> None:
    print(
        f"error: attention kernel {running[0]!r} did not finish before the deadline of {DEADLINE_SECONDS:.0f} s; name "
        "another one, such as model.attention_implementation=xla, or set train.kernel_choice=fixed",
        file=sys.stderr,
        flush=True,
    )
    os._exit(EXIT_FAILED)
