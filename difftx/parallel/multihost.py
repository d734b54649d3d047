"""Several processes that train one model: how they start, wait for each other, stop, and notice that one is missing.

The engine is JAX's own, `jax.distributed`, and its coordination service: a server in process 0 with barriers and a
key-value store. A collective that one process never enters hangs the others for ever and says nothing
(jax issue 38503), so each process runs a `Monitor`.
"""

import argparse
import dataclasses
import faulthandler
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

import jax
from jax._src import distributed  # The coordination service's client: jax has no public name for it.
from jax.experimental import multihost_utils

from difftx.config import MultihostConfig
from difftx.errors import EXIT_BAD_INPUT, RunError, UserError, explained, install_hint, printable

REPEAT_SECONDS = 1.0
_decisions = itertools.count()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `start` reads."""
    group = parser.add_argument_group("several processes", "the same command on every host; see docs/operations.md")
    group.add_argument("--distributed", action="store_true", help="one of many; Slurm, GKE or Cloud TPU say which")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0, where nothing says it")
    group.add_argument("--processes", type=int, help="number of processes, with --coordinator")
    group.add_argument("--process", type=int, help="number of this process, from 0, with --coordinator")


def start(flags: argparse.Namespace, config: MultihostConfig) -> None:
    """Join the other processes, if there are any, before JAX looks for devices.

    Ends the process with exit code 2 when not all came within `multihost.initialization_timeout_seconds`.

    Raises:
        UserError: flags are missing or wrong.
    """
    by_hand = (flags.coordinator, flags.processes, flags.process)
    if any(value is not None for value in by_hand) and None in by_hand:
        raise UserError("--coordinator=HOST:PORT, --processes=N and --process=I belong together; give all three")
    if not flags.distributed and flags.coordinator is None:
        _refuse_a_lone_start()
        _require_devices()
        return
    # CPU devices have collectives only through a library; other devices do not read this.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    timeout = config.initialization_timeout_seconds
    # JAX aborts with a stack dump when its own timeout is over, and cannot be stopped from that: be earlier.
    patience = threading.Timer(timeout, _give_up_start, [timeout])
    patience.daemon = True
    patience.start()
    try:
        jax.distributed.initialize(
            flags.coordinator,
            flags.processes,
            flags.process,
            initialization_timeout=timeout + 60,
            heartbeat_timeout_seconds=config.heartbeat_timeout_seconds,
            shutdown_timeout_seconds=config.heartbeat_timeout_seconds,
        )
    except (ValueError, RuntimeError) as error:
        raise UserError(f"the processes could not be joined: {str(error).splitlines()[0]}") from error
    finally:
        patience.cancel()
    _require_devices()


def _require_devices() -> None:
    """Raise `UserError` where JAX finds no device of the platforms that JAX_PLATFORMS names."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX 0.12 asserts where it lacks the plugin.
        asked = os.environ.get("JAX_PLATFORMS", "")
        why = f" ({str(error).splitlines()[0]})" if str(error) else ""
        raise UserError(
            f"JAX_PLATFORMS={asked}: JAX has no device of that platform here{why}; unset JAX_PLATFORMS or set it to "
            f"cpu, or install JAX's plugin: {install_hint('cuda')} (for TPUs: tpu)"
        ) from error


def is_lead() -> bool:
    """Whether this process writes the files and the lines that need to be written once."""
    return jax.process_index() == 0


def say(text: str) -> None:
    """Print from one process, control characters as escapes."""
    if is_lead():
        print(printable(text), flush=True)


def barrier(name: str, timeout_seconds: float) -> None:
    """Wait until every process is at the barrier `name`; each name is used once.

    Raises:
        TimeoutError: not all came in time; says which.
    """
    if jax.process_count() == 1:
        return
    client, folder = _service(), f"difftx/barrier/{name}"
    client.key_value_set(f"{folder}/{jax.process_index()}", _who_am_i())
    try:
        client.wait_at_barrier(f"difftx {name}", int(timeout_seconds * 1000))
    except Exception as error:  # Whatever the service calls its errors, the list of who came is what helps.
        here = {int(key.rsplit("/", 1)[1]) for key, _ in client.key_value_dir_get(folder)}
        absent = [str(process) for process in range(jax.process_count()) if process not in here]
        raise TimeoutError(
            f"barrier {name!r}: process {', '.join(absent)} of {jax.process_count()} did not come within "
            f"{timeout_seconds:g} s"
            if absent
            else f"barrier {name!r}: {error}"
        ) from error


def decided_by_lead(decide: Callable[[], Any], timeout_seconds: float) -> Any:
    """Return what `decide` returns, as JSON, in process 0, where alone it is called; the others wait for the answer.

    All processes must ask the same questions in the same order.

    Raises:
        UserError: `decide` raised it; in every process.
        RunError: `decide` raised it; in every process.
    """
    if jax.process_count() == 1:
        return decide()
    client, key = _service(), f"difftx/decision/{next(_decisions)}"
    if is_lead():
        try:
            answer = {"value": decide()}
        except UserError as error:
            answer = {"mistake": str(error)}
        except RunError as error:
            answer = {"failure": str(error)}
        client.key_value_set(key, json.dumps(answer))
    answer = json.loads(client.blocking_key_value_get(key, int(timeout_seconds * 1000)))
    if "mistake" in answer:
        raise UserError(answer["mistake"])
    if "failure" in answer:
        # After a RunError a process ends immediately. If process 0 did so first, JAX would abort the other processes.
        jax.distributed.shutdown()
        raise RunError(answer["failure"])
    return answer["value"]


class Interrupt:
    """Notes a SIGTERM or Ctrl-C to any process; the loop asks for it between steps. A later one acts at once.

    What comes within a second of the first is the same request: who stops a job often signals a process twice, by its
    group and by itself, and Linux repeats the signal at a parent's death for each of the parent's threads.
    """

    def __init__(self):
        self._received: float | None = None  # time.monotonic() of the first.
        self._agreed = False  # Several processes: that they stop after the step that was asked about.
        # With several processes JAX listens for SIGTERM itself, and lets all of them stop after the same step.
        self._numbers = (signal.SIGTERM, signal.SIGINT) if jax.process_count() == 1 else (signal.SIGINT,)
        self._previous = {number: signal.signal(number, self._receive) for number in self._numbers}

    def requested(self, step: int) -> bool:
        """Whether to stop after `step`; all processes must ask about every step, and get the same answer."""
        if jax.process_count() == 1:
            return self._received is not None
        if not self._agreed and multihost_utils.reached_preemption_sync_point(step):
            self._agreed = True
            # JAX has seen the first SIGTERM and would take no notice of another.
            self._received = self._received or time.monotonic()
            signal.signal(signal.SIGTERM, self._receive)
            self._previous[signal.SIGTERM] = signal.SIG_DFL
        return self._agreed

    def close(self) -> None:
        """Put the earlier handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received is None:
            self._received = time.monotonic()
            if jax.process_count() > 1:
                signal.raise_signal(signal.SIGTERM)
        elif time.monotonic() - self._received > REPEAT_SECONDS:
            self.close()
            signal.raise_signal(number)


@dataclasses.dataclass
class Peer:
    """What another process last said of itself."""

    text: str
    heard: float  # time.monotonic() of when its text last changed.


class Monitor:
    """A thread that ends this process, saying why, when it makes no progress or another process has gone silent.

    As a context manager it also says who has gone when an error ends the block, which is how a collective ends when one
    of the processes in it has died.
    """

    def __init__(self, config: MultihostConfig):
        self._config = config
        self._period = min(config.barrier_timeout_seconds / 20, config.heartbeat_timeout_seconds / 10)
        self._step, self._beat = 0, time.monotonic()
        self._peers: dict[int, Peer] = {}
        self._coordinator_heard = time.monotonic()
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._watch, name="difftx monitor", daemon=True)]
        if jax.process_count() > 1:  # A thread of its own: where process 0 is frozen, a call to it does not return.
            self._threads.append(threading.Thread(target=self._talk, name="difftx heartbeat", daemon=True))
        for thread in self._threads:
            thread.start()

    def beat(self, step: int) -> None:
        """Note that this process got as far as `step`."""
        self._step, self._beat = step, time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if error is not None and jax.process_count() > 1 and explained(error) is None:
            # At once: on the way out JAX would wait for the processes that are no more.
            traceback.print_exception(error)
            time.sleep(3 * self._period)
            self._give_up("; ".join(self.silent_peers(2 * self._period)) or f"{type(error).__name__}: {error}")
        self._ended.set()
        for thread in self._threads:
            thread.join(self._config.barrier_timeout_seconds)

    def silent_peers(self, seconds: float) -> list[str]:
        """Return the processes that have said nothing for so long, in words."""
        now = time.monotonic()
        silence = now - self._coordinator_heard
        if jax.process_index() != 0 and silence > seconds:  # It is through process 0 that the others are heard.
            where = distributed.global_state.coordinator_address
            return [f"process 0, the coordinator at {where}, has been silent for {silence:.0f} s"]
        return [
            f"process {process} of {jax.process_count()} ({peer.text.partition(' tick')[0]}) has been silent for "
            f"{now - peer.heard:.0f} s"
            for process, peer in sorted(self._peers.items())
            if now - peer.heard > seconds
        ]

    def _watch(self) -> None:
        while not self._ended.wait(self._period):
            if jax.process_count() > 1 and (silent := self.silent_peers(self._config.barrier_timeout_seconds)):
                self._give_up("; ".join(silent))
            stuck = time.monotonic() - self._beat
            if stuck > self._config.watchdog_seconds:
                self._give_up(
                    f"no step finished for {stuck:.0f} s after step {self._step} (multihost.watchdog_seconds="
                    f"{self._config.watchdog_seconds})"
                )

    def _talk(self) -> None:
        for tick in itertools.count():
            if self._ended.wait(self._period):
                return
            self._exchange(tick)

    def _exchange(self, tick: int) -> None:
        """Say that this process lives, and listen to the others."""
        client, me = _service(), jax.process_index()
        try:
            client.key_value_set(f"difftx/alive/{me}", f"{_who_am_i()} at step {self._step} tick {tick}", True)
            heard = client.key_value_dir_get("difftx/alive")
        except Exception as error:  # One lost message is no lost process, whatever the service calls it.
            silence = time.monotonic() - self._coordinator_heard
            if silence > self._config.heartbeat_timeout_seconds and not self._ended.is_set():
                where = distributed.global_state.coordinator_address
                self._give_up(f"process 0, the coordinator at {where}, is gone: {str(error)[:200]}")
            return
        self._coordinator_heard = time.monotonic()
        for key, text in heard:
            process = int(key.rsplit("/", 1)[1])
            if process != me and (process not in self._peers or self._peers[process].text != text):
                self._peers[process] = Peer(text, time.monotonic())

    def _give_up(self, reason: str) -> None:
        """End the process at once: its main thread is inside a call that never returns."""
        print(f"error: process {jax.process_index()} stops: {reason}; stacks of all threads:", file=sys.stderr)
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _service() -> Any:
    """Return this process's client of the coordination service."""
    return distributed.global_state.client


def _who_am_i() -> str:
    return f"{socket.gethostname()}, pid {os.getpid()}"


def _refuse_a_lone_start() -> None:
    """Notice the usual mistake: the command was started on one host of a pod, or once a task without --distributed."""
    # JAX may have put a sentence there instead of names.
    hosts = [host for host in os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if host and " " not in host]
    tasks = int(os.environ.get("SLURM_NTASKS", "1")) if "SLURM_PROCID" in os.environ else 1
    what, count = ("a TPU pod of", len(hosts)) if len(hosts) > 1 else ("a Slurm step of", tasks)
    if count > 1:
        raise UserError(
            f"this is one of {what} {count} processes, started as if it were alone: add --distributed, and start the "
            "same command on all of them"
        )


def _give_up_start(timeout: int) -> None:
    state = distributed.global_state
    address = state.coordinator_address or "an unknown coordinator"
    here = f"process {state.process_id}"
    if state.process_id == 0:
        why = "other processes did not come; start the same command on every host"
    elif _answers(address):
        why = "process 0 is there, others are not; start the same command on every host"
    else:
        why = "process 0 does not answer there; start it, or open the port"
    print(
        f"error: {here} waited {timeout} s (multihost.initialization_timeout_seconds) at {address}: {why}",
        file=sys.stderr,
        flush=True,
    )
    os._exit(EXIT_BAD_INPUT)


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
    except (OSError, ValueError):
        return False
    return True
