"""Coordination of several processes that train one model: start, barriers, agreement and stop.

The functions use the coordination service of `jax.distributed`, a server in process 0 with barriers and a key-value
store. Process 0 must end last, because JAX aborts the other processes when the service ends.
"""

import argparse
import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import jax
from jax._src import distributed  # For the coordination service's client, which has no public name.
from jax.experimental import multihost_utils

from difftx.config import MultihostConfig
from difftx.errors import RunError, UserError, explained, install_hint, printable, shown
from difftx.json_files import json_sha256
from difftx.parallel import heartbeat, rendezvous
from difftx.parallel.heartbeat import host_and_pid, service, unmonitored

REPEAT_SECONDS = 1.0
_calls = itertools.count()  # Numbers of the barriers and of the calls of `decide_on_primary`.


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `start` reads."""
    group = parser.add_argument_group("several processes", "run the same command on every host; see docs/operations.md")
    group.add_argument("--distributed", action="store_true", help="join the processes of the Slurm, GKE or TPU job")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0, outside of such a job")
    group.add_argument("--processes", type=int, help="number of processes, with --coordinator")
    group.add_argument("--process", type=int, help="index of this process, from 0, with --coordinator")


def start(flags: argparse.Namespace, config: MultihostConfig) -> None:
    """Join the other processes, if there are any, and look for devices."""
    join(flags, config)
    require_devices()


def join(flags: argparse.Namespace, config: MultihostConfig) -> None:
    """Join the other processes, if there are any. JAX does not look for devices yet. Wrong flags raise `UserError`.

    If not all processes join within `multihost.initialization_timeout_seconds`, the process ends with exit code 2.
    """
    given = [value is not None for value in (flags.coordinator, flags.processes, flags.process)]
    if any(given) and not all(given):
        raise UserError("--coordinator=HOST:PORT, --processes=N and --process=I belong together; give all three")
    if not flags.distributed and flags.coordinator is None:
        _require_single_process()
        return
    timeout = config.initialization_timeout_seconds
    try:
        address, count, index = flags.coordinator, flags.processes, flags.process
        if address is None:
            address, count, index = rendezvous.place_in_job(timeout)
        gpus = rendezvous.local_gpus(rendezvous.meet(address, count, index, timeout), index)
        jax.distributed.initialize(
            address,
            count,
            index,
            gpus if "JAX_LOCAL_DEVICE_IDS" not in os.environ else None,
            cluster_detection_method="deactivate",
            initialization_timeout=timeout,
            heartbeat_timeout_seconds=heartbeat.JAX_FACTOR * config.heartbeat_timeout_seconds,
            shutdown_timeout_seconds=heartbeat.JAX_FACTOR * config.heartbeat_timeout_seconds,
        )
    except (ValueError, RuntimeError, OSError) as error:
        raise UserError(f"this process cannot join the others: {str(error).splitlines()[0]}") from error
    if distributed.global_state.num_processes > 1:
        heartbeat.start(config.heartbeat_timeout_seconds)


def require_devices() -> None:
    """Raise `UserError` if JAX finds no device of the platforms that JAX_PLATFORMS names."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX 0.12 raises AssertionError if the plugin is missing.
        asked = os.environ.get("JAX_PLATFORMS", "")
        why = f" ({str(error).splitlines()[0]})" if str(error) else ""
        name = "let this host resolve its own name, " if service() is not None else ""
        raise UserError(
            f"JAX_PLATFORMS={asked}: JAX has no device of that platform here{why}; {name}unset JAX_PLATFORMS or set it "
            f"to cpu, or install JAX's plugin: {install_hint('cuda')} (for TPUs: tpu)"
        ) from error


def is_primary() -> bool:
    """Return whether this is process 0, the primary process. Only it writes shared files and messages."""
    return jax.process_index() == 0


def print_on_primary(text: str) -> None:
    """Print a text from the primary process, with control characters escaped."""
    if is_primary():
        print(printable(text), flush=True)


def barrier(name: str, timeout_seconds: float) -> None:
    """Wait until all processes have reached this barrier. All processes must call the same barriers in the same order.

    If not all processes come in time, or the barrier fails, raise a `TimeoutError` that names the absent processes.
    """
    _exchange(name, "", timeout_seconds)


def _exchange(name: str, text: str, timeout_seconds: float) -> list[str]:
    """Return the texts of all processes, in their order, in every process. This is a barrier."""
    if jax.process_count() == 1:
        return [text]
    number = next(_calls)  # The coordination service accepts each name only once.
    folder = f"difftx/barrier/{number}/{name}"
    _publish(folder, text)
    try:
        service().wait_at_barrier(f"difftx {number} {name}", int(timeout_seconds * 1000))
    except Exception as error:  # Report the absent processes after any error.
        present = _published(folder)
        heartbeat.wait_for_others_to_end()
        absent = ", ".join(str(process) for process in range(jax.process_count()) if process not in present)
        why = f"process {absent} of {jax.process_count()} did not come within {timeout_seconds:g} s"
        raise TimeoutError(f"barrier {name!r}: {why if absent else error}") from error
    return [published for _, published in sorted(_published(folder).items())]


def decide_on_primary(decide: Callable[[], Any], timeout_seconds: float) -> Any:
    """Call `decide` in process 0 only, and return its result, a JSON value, in every process.

    All processes must make the same calls in the same order. If `decide` raises an error that `explained` converts to
    a `UserError` or `RunError`, every process raises that error.
    """
    if jax.process_count() == 1:
        return decide()
    client, key = service(), f"difftx/decision/{next(_calls)}"
    if is_primary():
        try:
            answer = {"value": decide()}
        except Exception as error:
            explanation = explained(error)
            if explanation is None:
                raise
            answer = {"failure": [isinstance(explanation, UserError), str(explanation)]}
        client.key_value_set(key, json.dumps(answer))
    with unmonitored():
        answer = json.loads(client.blocking_key_value_get(key, int(timeout_seconds * 1000)))
    if "failure" in answer:
        is_mistake, text = answer["failure"]
        if is_mistake:
            raise UserError(text)
        # Wait for the other processes here, because JAX would abort them if process 0 ended first.
        jax.distributed.shutdown()
        raise RunError(text)
    return answer["value"]


def gather(what: str, value: Any, timeout_seconds: float) -> list[Any]:
    """Return the values of all processes, JSON values, in the order of the processes, in every process."""
    try:
        return [json.loads(text) for text in _exchange(what, json.dumps(value), timeout_seconds)]
    except TimeoutError as error:
        raise RunError(str(error)) from error


def together(name: str, action: Callable[[], Any], timeout_seconds: float) -> list[Any]:
    """Call `action` in every process, and return the results, JSON values, in the order of the processes.

    After an error in one process, raise an error in all processes. Safe to call from a thread, if `name` is unique
    among all calls.
    """
    if jax.process_count() == 1:
        return [action()]
    error = None
    try:
        notice = {"value": action()}
    except Exception as raised:  # The other processes must learn of any error.
        error, notice = raised, {"failure": f"process {jax.process_index()}: {type(raised).__name__}: {raised}"}
    folder = f"difftx/together/{name}"
    _publish(folder, json.dumps(notice))
    timeout = int(timeout_seconds * 1000)
    texts = [service().blocking_key_value_get(f"{folder}/{i}", timeout) for i in range(jax.process_count())]
    if error is not None:
        raise error
    notices = [json.loads(text) for text in texts]
    if failures := [notice["failure"] for notice in notices if "failure" in notice]:
        raise RunError(failures[0])
    return [notice["value"] for notice in notices]


def agree[T](what: str, make: Callable[[], T], describe: Callable[[T], Mapping[str, Any]], timeout_seconds: float) -> T:
    """Call `make` in every process, and return its result if `describe` returns equal fields in all processes.

    The fields are names and JSON values. Each process publishes the SHA-256 of its fields. If the hashes differ, two
    processes publish the fields themselves, and all raise a `UserError` that names a field. If `make` fails in one
    process, all processes raise an error, because they would hang forever in a later collective. They raise a
    `UserError` if `make` raised one, else a `RunError`. `what` names the comparison in messages.
    """
    if jax.process_count() == 1:
        return make()
    notice: dict[str, Any] = {"who": f"process {jax.process_index()} of {jax.process_count()} ({host_and_pid()})"}
    failure: Exception | None = None
    made: Any = None
    fields: Mapping[str, Any] = {}
    try:
        made = make()
        fields = describe(made)
        notice["sha256"] = json_sha256(fields)
    except Exception as error:  # The other processes must learn of any error.
        failure, explanation = error, explained(error)
        text = str(explanation) if explanation else f"{type(error).__name__}: {error}"
        notice["failure"] = [isinstance(explanation, UserError), text]
    try:
        notices = gather(f"agreement on {what}", notice, timeout_seconds)
    finally:
        if failure is not None:
            raise failure
    for other in notices:
        if "failure" in other:
            is_mistake, text = other["failure"]
            raise (UserError if is_mistake else RunError)(f"{other['who']}: {text}")
    different = [process for process, other in enumerate(notices) if other["sha256"] != notices[0]["sha256"]]
    if different:
        who = notices[different[0]]["who"] + (f" and {len(different) - 1} more" if different[1:] else "")
        difference = _first_difference(fields, different[0], timeout_seconds)
        raise UserError(f"{who}: {difference}; start every process with the same command, packages and data")
    return made


class Interrupt:
    """A record of SIGTERM or Ctrl-C to any process, which the training loop checks between steps.

    A second signal takes effect immediately, unless it arrives within `REPEAT_SECONDS`: job schedulers often signal
    a process twice, through its process group and directly. Once the work is saved, further signals have no effect,
    because they would change the exit code.
    """

    def __init__(self):
        self._received: float | None = None  # Time of the first signal, from `time.monotonic`.
        self._agreed = False  # Whether several processes have agreed to stop.
        self._ignores_signals = False  # True once the work is saved, when the process is about to end.
        # With several processes, JAX itself handles SIGTERM and makes all processes stop after the same step.
        self._numbers = (signal.SIGTERM, signal.SIGINT) if jax.process_count() == 1 else (signal.SIGINT,)
        self._previous = {number: signal.signal(number, self._receive) for number in self._numbers}

    def requested(self, step: int) -> bool:
        """Return whether to stop after `step`. All processes must call this for every step, and get the same result."""
        if jax.process_count() == 1:
            return self._received is not None
        if not self._agreed and multihost_utils.reached_preemption_sync_point(step):
            self._agreed = True
            # JAX has handled the first SIGTERM and would ignore a second one.
            self._received = self._received or time.monotonic()
            signal.signal(signal.SIGTERM, self._receive)
            self._previous[signal.SIGTERM] = signal.SIG_DFL
        return self._agreed

    def ignore_further_signals(self) -> None:
        """Ignore further signals, because the process ends soon, and a signal would change its exit code."""
        self._ignores_signals = True

    def close(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received is None:
            self._received = time.monotonic()
            if jax.process_count() > 1:
                signal.raise_signal(signal.SIGTERM)  # JAX's handler tells all processes to stop after the same step.
        elif not self._ignores_signals and time.monotonic() - self._received > REPEAT_SECONDS:
            self.close()
            signal.raise_signal(number)


def _publish(folder: str, text: str) -> None:
    service().key_value_set(f"{folder}/{jax.process_index()}", text)


def _published(folder: str) -> dict[int, str]:
    """Return the texts that processes have published in `folder`, by index of the process."""
    return {int(key.rsplit("/", 1)[1]): text for key, text in service().key_value_dir_get(folder)}


def _first_difference(fields: Mapping[str, Any], other: int, timeout_seconds: float) -> str:
    """Return a text on the first field that differs between processes 0 and `other`. All processes must call this."""
    mine = fields if jax.process_index() in (0, other) else None
    everywhere = gather("fields", mine, timeout_seconds)
    old, new = everywhere[0], everywhere[other]
    first, *rest = [name for name in old | new if old.get(name) != new.get(name)]
    more = f" (and {len(rest)} more fields)" if rest else ""
    return f"{first}={shown(new.get(first))}, but process 0 has {shown(old.get(first))}{more}"


def _require_single_process() -> None:
    """Raise `UserError` if the command runs on one host of a pod, or once per Slurm task, without --distributed."""
    # The variable may contain a sentence instead of host names.
    hosts = [host for host in os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if host and " " not in host]
    tasks = int(os.environ.get("SLURM_NTASKS", "1")) if "SLURM_PROCID" in os.environ else 1
    what, count = ("a TPU pod of", len(hosts)) if len(hosts) > 1 else ("a Slurm job of", tasks)
    # Slurm sets the other variables for the batch script too, which runs once.
    srun = "write srun before the command, " if count == tasks and "SLURM_STEP_NODELIST" not in os.environ else ""
    if count > 1:
        raise UserError(
            f"this is one of {what} {count} processes, but it was started alone: {srun}add --distributed, and start "
            "the same command on all of them"
        )
