"""Detection of processes that have died or that make no progress.

If one process never enters a collective, the other processes hang forever without a message (jax issue 38503).
Therefore, each process runs a `Heartbeat` if there are several, and each training process runs a `Monitor`. Both end
the process with exit code 1.
"""

import atexit
import contextlib
import faulthandler
import itertools
import math
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from jax._src import distributed  # For the coordination service's client, which has no public name.

from difftx.config import MultihostConfig
from difftx.errors import explained

# JAX's own heartbeat aborts the process without naming a host, in some cases after half of its timeout. Its timeout is
# this multiple of the timeout of `Heartbeat`, so that `Heartbeat` acts first.
JAX_FACTOR = 4
_heartbeat: "Heartbeat | None" = None  # Heartbeat of this process. None if this is the only process.
_monitor: "Monitor | None" = None  # Monitor of the training in this process, if there is one.


def start(timeout_seconds: float) -> None:
    """Start the heartbeat of this process after it has joined the other processes."""
    global _heartbeat
    _heartbeat = Heartbeat(timeout_seconds)


def report_progress() -> None:
    """Tell the monitor that this process makes progress, in an operation that may take longer than a step."""
    monitor = _monitor  # The main thread may end the training meanwhile.
    if monitor is not None:
        monitor.beat(monitor.step)


@contextlib.contextmanager
def unmonitored() -> Iterator[None]:
    """Suspend the monitor of this process in a block that waits for another process and has a timeout of its own."""
    if _monitor is not None:
        _monitor.suspend()
    try:
        yield
    finally:
        report_progress()


def service() -> Any:
    """Return this process's client of the coordination service, or None if there is only one process."""
    return distributed.global_state.client


def host_and_pid() -> str:
    """Return the host name and the id of this process."""
    return f"{socket.gethostname()}, pid {os.getpid()}"


def wait_for_others_to_end() -> None:
    """Wait in process 0 for the other processes to end.

    Process 0 runs the coordination service, and JAX would abort the other processes when the service ends.
    """
    if _heartbeat is not None and distributed.global_state.process_id == 0:
        time.sleep(3 * _heartbeat.period)


class Heartbeat:
    """Threads that send this process's heartbeat, and end this process when another process falls silent."""

    def __init__(self, timeout_seconds: float):
        self.period = timeout_seconds / 10
        self.step = 0  # Index of this process's last step. It is sent with the heartbeat.
        state, now = distributed.global_state, time.monotonic()
        self._timeout, self._me, self._count = timeout_seconds, state.process_id, state.num_processes
        # Last message of each other process, and the time at which this process received it.
        self._peers = {process: ("", now) for process in range(self._count) if process != self._me}
        self._coordinator_heard = now
        self._ended = threading.Event()
        # Two threads are needed, because a call to the service does not return while process 0 is frozen.
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._send, self._watch)]
        for thread in self._threads:
            thread.start()
        # End the threads before the interpreter exits: stopping them inside JAX's C++ code would abort the process.
        atexit.register(self._end)

    def silent_peers(self, seconds: float) -> list[str]:
        """Return a description of each process that has been silent for more than `seconds`."""
        now = time.monotonic()
        silent = {peer: (text, received) for peer, (text, received) in self._peers.items() if now - received > seconds}
        unanswered = now - self._coordinator_heard
        # All messages pass through process 0. If it does not answer, the other processes seem silent too. Its last
        # answer may be two periods newer than its last message, so half of the time is enough here.
        if 0 in silent and unanswered > seconds / 2:
            where = distributed.global_state.coordinator_address
            return [f"process 0, the coordinator at {where}, has been silent for {unanswered:.0f} s"]
        return [
            f"process {peer} of {self._count} ({text.partition(' tick')[0] or 'since the start'}) has been silent "
            f"for {now - received:.0f} s"
            for peer, (text, received) in sorted(silent.items())
        ]

    def _end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(3 * self.period)  # With a timeout, because a call hangs while process 0 is frozen.

    def _watch(self) -> None:
        while not self._ended.wait(self.period):
            if silent := self.silent_peers(self._timeout):
                _abort("; ".join(silent))

    def _send(self) -> None:
        """Send this process's messages, and read the messages of the other processes."""
        for tick in itertools.count():
            message, received = f"{host_and_pid()} at step {self.step} tick {tick}", []
            # One failed exchange is harmless; `_watch` ends the process after a longer silence.
            with contextlib.suppress(Exception):
                service().key_value_set(f"difftx/alive/{self._me}", message, True)
                received = service().key_value_dir_get("difftx/alive")
                self._coordinator_heard = time.monotonic()
            for key, text in received:
                process = int(key.rsplit("/", 1)[1])
                if process != self._me and self._peers[process][0] != text:
                    self._peers[process] = text, time.monotonic()
            if self._ended.wait(self.period):
                return


class Monitor:
    """A thread that prints all stacks and ends this process when the process makes no progress.

    As a context manager, the monitor also names the silent processes if an error ends the block, because a collective
    raises an error when another process has died.
    """

    def __init__(self, config: MultihostConfig):
        self._config = config
        self.step, self._beat = 0, time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="difftx monitor", daemon=True)
        self._thread.start()

    def beat(self, step: int) -> None:
        self.step, self._beat = step, time.monotonic()
        if _heartbeat is not None:
            _heartbeat.step = step

    def suspend(self) -> None:
        """Do not end the process before the next beat, however late it is."""
        self._beat = math.inf

    def __enter__(self) -> Self:
        global _monitor
        _monitor = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if error is not None and _heartbeat is not None and explained(error) is None:
            # End the process here, because a normal exit would wait in JAX for processes that no longer exist.
            traceback.print_exception(error)
            time.sleep(3 * _heartbeat.period)
            _abort("; ".join(_heartbeat.silent_peers(2 * _heartbeat.period)) or f"{type(error).__name__}: {error}")
        global _monitor
        _monitor = None
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(self._config.watchdog_seconds / 20):
            stuck = time.monotonic() - self._beat
            if stuck > self._config.watchdog_seconds:
                _abort(
                    f"no step finished for {stuck:.0f} s after step {self.step} (multihost.watchdog_seconds="
                    f"{self._config.watchdog_seconds})"
                )


def _abort(reason: str) -> None:
    """Print the reason and all stacks, and end the process, even if its main thread hangs."""
    me = distributed.global_state.process_id
    print(f"error: process {me} stops: {reason}; stacks of all threads:", file=sys.stderr)
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
    sys.stdout.flush()
    sys.stderr.flush()
    wait_for_others_to_end()
    os._exit(1)
