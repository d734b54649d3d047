"""Coordination of several processes that train one model: start, barriers, agreement and stop.

The functions use the coordination service of `jax.distributed`, a server in process 0 with barriers and a key-value
store. Process 0 must end last, because JAX aborts the other processes when the service ends.
"""

import argparse
import contextlib
import json
import os
import signal
import threading
import time
from collections import Counter
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
ALONE = argparse.Namespace(distributed=False, coordinator=None, processes=None, process=None)  # Flags of one process.
# Timeout of the other processes while the primary process decides, for example after it has read a checkpoint. If the
# primary process dies, the heartbeat ends them much earlier.
DECISION_SECONDS = 24 * 3600.0
_calls: Counter[str] = Counter()  # Number of the calls of `decide_on_primary`, and of `exchange` for each `what`.


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


def process_count() -> int:
    """Return the number of processes, without opening the devices, unlike `jax.process_count`."""
    return distributed.global_state.num_processes or 1


def is_primary() -> bool:
    """Return whether this is process 0, the primary process. Only it writes shared files and messages."""
    return not distributed.global_state.process_id


def print_on_primary(text: str) -> None:
    """Print a text from the primary process, with control characters escaped."""
    if is_primary():
        print(printable(text), flush=True)


def barrier(name: str, timeout_seconds: float) -> None:
    """Wait until all processes have reached this barrier. All processes must call the same barriers in the same order.

    If not all processes come in time, raise a `RunError` that names the absent processes.
    """
    exchange(f"barrier {name!r}", lambda: None, timeout_seconds)


def decide_on_primary(decide: Callable[[], Any], timeout_seconds: float = DECISION_SECONDS) -> Any:
    """Call `decide` in process 0 only, and return its result, a JSON value, in every process.

    All processes must make the same calls in the same order. If `decide` raises an error, all raise one, as after
    `exchange`.
    """
    try:
        return exchange("decision", lambda: decide() if is_primary() else None, timeout_seconds)[0]
    except RunError:
        if process_count() > 1:
            # Wait for the other processes here, because JAX would abort them if process 0 ended first.
            jax.distributed.shutdown()
        raise


def exchange(what: str, action: Callable[[], Any], timeout_seconds: float) -> list[Any]:
    """Call `action` in every process, and return the results, JSON values, in the order of the processes.

    If it fails in one process, all processes raise an error, because they would hang forever in a later collective: a
    `UserError` if `action` raised one, else a `RunError`. If not all processes come in time, raise a `RunError` that
    names the absent ones. All processes must make the calls of the same `what` in the same order. Safe to call from a
    thread, if no other thread uses its `what`.
    """
    if process_count() == 1:
        return [action()]
    _calls[what] += 1
    client, name = service(), f"difftx/{what}/{_calls[what]}"  # The service accepts each name only once.
    me, count = distributed.global_state.process_id, process_count()
    notice, error = _attempt(action, f"process {me} of {count} ({host_and_pid()}): ")
    client.key_value_set(f"{name}/{me}", notice)
    failure = None
    try:
        with unmonitored():
            client.wait_at_barrier(name, int(timeout_seconds * 1000))
    except Exception as raised:  # Report the absent processes after any error.
        failure = raised
    if error is not None:
        raise error
    notices = {int(key.rsplit("/", 1)[1]): json.loads(text) for key, text in client.key_value_dir_get(name)}
    if failure is not None:
        heartbeat.wait_for_others_to_end()
        absent = ", ".join(str(process) for process in range(count) if process not in notices)
        why = f"process {absent} of {count} did not come within {timeout_seconds:g} s"
        raise RunError(f"{what}: {why if absent else failure}") from failure
    for _, notice in sorted(notices.items()):
        if "failure" in notice:
            raise (UserError if notice["is_mistake"] else RunError)(notice["failure"])
    return [notice["value"] for _, notice in sorted(notices.items())]


def agree[T](what: str, make: Callable[[], T], describe: Callable[[T], Mapping[str, Any]], timeout_seconds: float) -> T:
    """Call `make` in every process, and return its result if `describe` returns equal fields in all processes.

    The fields are names and JSON values. The processes compare the SHA-256 of their fields. If these differ, two
    processes publish the fields themselves, and all raise a `UserError` that names a field. If `make` fails in one
    process, all raise an error, as after `exchange`. `what` names the comparison in messages.
    """
    if process_count() == 1:
        return make()
    made: list[T] = []
    fields: dict[str, Any] = {}

    def summary() -> list[str]:
        made.append(make())
        fields.update(describe(made[0]))
        return [json_sha256(fields), host_and_pid()]

    summaries = exchange(f"agreement on {what}", summary, timeout_seconds)
    if different := [process for process, (sha256, _) in enumerate(summaries) if sha256 != summaries[0][0]]:
        other, published = different[0], fields if distributed.global_state.process_id in (0, different[0]) else {}
        everywhere = exchange(f"fields of {what}", lambda: published, timeout_seconds)
        old, new = everywhere[0], everywhere[other]
        first = next(name for name in old | new if old.get(name) != new.get(name))
        who = f"process {other} of {len(summaries)} ({summaries[other][1]})"
        difference = f"{first}={shown(new.get(first))}, but process 0 has {shown(old.get(first))}"
        raise UserError(f"{who}: {difference}; start every process with the same command, packages and data")
    return made[0]


def _attempt(action: Callable[[], Any], who: str) -> tuple[str, Exception | None]:
    """Call `action`. Return its result or error as a text for the other processes, and the error, if there is one."""
    try:
        return json.dumps({"value": action()}), None
    except Exception as error:  # The other processes must learn of any error.
        explanation = explained(error)
        text = str(explanation) if explanation else f"{type(error).__name__}: {error}"
        return json.dumps({"failure": f"{who}{text}", "is_mistake": isinstance(explanation, UserError)}), error


class Notice:
    """A decision of the primary process that takes effect after the same step in all processes, without a barrier.

    A process ends step n + 2 only when step n + 1 has run everywhere, so it sees what the primary process published
    after step n.
    """

    def __init__(self):
        """Begin. All processes must do so as often as each other."""
        _calls["notice"] += 1
        self._name, self._made = f"difftx/notice/{_calls['notice']}", 0
        self._step: int | None = None  # Step after which the decision takes effect, if there is one.

    def takes_effect(self, decide: Callable[[], bool], step: int) -> bool:
        """Return whether a decision takes effect after this step. All processes must call this after every step.

        The primary process calls `decide` unless a decision is pending.
        """
        if jax.process_count() == 1:
            return decide()
        key = f"{self._name}/{self._made}"
        if self._step is None and is_primary() and decide():
            self._step = step + 2
            service().key_value_set(key, str(self._step))
        elif self._step is None and not is_primary():
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # There is no decision.
                self._step = int(service().key_value_try_get(key))
        if self._step is None or step < self._step:
            return False
        self._made, self._step = self._made + 1, None
        return True


class Interrupt:
    """A record of SIGTERM or Ctrl-C to any process, which the training loop checks between steps.

    A second signal takes effect immediately, unless it arrives within `REPEAT_SECONDS`: job schedulers often signal
    a process twice, through its process group and directly. Once the work is saved, further signals have no effect,
    because they would change the exit code.
    """

    def __init__(self):
        self._received: float | None = None  # Time of the first signal, from `time.monotonic`.
        self._agreed = False  # Whether several processes have agreed to stop.
        # Set this once the work is saved, because the process ends soon, and a signal would change its exit code.
        self.ignores_signals = False
        # With several processes, JAX itself handles SIGTERM and makes all processes stop after the same step.
        self._numbers = (signal.SIGTERM, signal.SIGINT) if jax.process_count() == 1 else (signal.SIGINT,)
        if threading.current_thread() is not threading.main_thread():  # Python handles signals in the main thread.
            self._numbers = ()
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

    def close(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received is None:
            self._received = time.monotonic()
            if jax.process_count() > 1:
                signal.raise_signal(signal.SIGTERM)  # JAX's handler tells all processes to stop after the same step.
        elif not self.ignores_signals and time.monotonic() - self._received > REPEAT_SECONDS:
            self.close()
            signal.raise_signal(number)


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
