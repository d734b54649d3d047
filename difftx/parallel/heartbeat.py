"""How a process notices that another one has gone, or that it makes no progress itself.

A collective that one process never enters hangs the others for ever and says nothing (jax issue 38503). So each of
several processes runs a `Heartbeat` from its start, and a training a `Monitor`.
"""

import atexit
import dataclasses
import faulthandler
import itertools
import os
import socket
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Any, Self

from jax._src import distributed  # The coordination service's client: jax has no public name for it.

from difftx.config import MultihostConfig
from difftx.errors import explained

# JAX has a heartbeat too. It aborts the process (exit code 134) and names no host. JAX beats twice per timeout, so it
# may notice a frozen process after half of its timeout. With this multiple of our timeout, `Heartbeat` comes first.
JAX_FACTOR = 4
_heartbeat: "Heartbeat | None" = None  # Of this process; None where it is the only one.


def start(timeout_seconds: float) -> None:
    """Start this process's heartbeat, once it has joined the others."""
    global _heartbeat
    _heartbeat = Heartbeat(timeout_seconds)


def service() -> Any:
    """Return this process's client of the coordination service; None before it has joined and after it has left."""
    return distributed.global_state.client


def who_am_i() -> str:
    """Return host and process id."""
    return f"{socket.gethostname()}, pid {os.getpid()}"


def outlast_the_others() -> None:
    """Wait in process 0 until the others have ended too: its end ends the coordinator, and so JAX aborts the others."""
    if _heartbeat is not None and distributed.global_state.process_id == 0:
        time.sleep(3 * _heartbeat.period)


@dataclasses.dataclass
class Peer:
    """What another process last said of itself."""

    text: str
    heard: float  # time.monotonic() of when its text last changed.


class Heartbeat:
    """Threads that tell the other processes that this one lives, and end it when one of them has gone silent."""

    def __init__(self, timeout_seconds: float):
        self.period = timeout_seconds / 10
        self.step = 0  # That this process got to, for the others to know.
        state, now = distributed.global_state, time.monotonic()
        self._timeout, self._me, self._count = timeout_seconds, state.process_id, state.num_processes
        self._peers = {process: Peer("", now) for process in range(self._count) if process != self._me}
        self._coordinator_heard = now
        self._ended = threading.Event()
        # Two threads: where process 0 is frozen, a call to it does not return.
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._talk, self._watch)]
        for thread in self._threads:
            thread.start()
        # Python ends a daemon thread wherever it is at the exit. Inside of JAX's C++ that aborts the process.
        atexit.register(self._end)

    def silent_peers(self, seconds: float) -> list[str]:
        """Return the processes that have said nothing for so long, in words."""
        now = time.monotonic()
        silence = now - self._coordinator_heard
        if self._me != 0 and silence > seconds:  # It is through process 0 that the others are heard.
            where = distributed.global_state.coordinator_address
            return [f"process 0, the coordinator at {where}, has been silent for {silence:.0f} s"]
        return [
            f"process {process} of {self._count} ({peer.text.partition(' tick')[0] or 'since the start'}) has been "
            f"silent for {now - peer.heard:.0f} s"
            for process, peer in sorted(self._peers.items())
            if now - peer.heard > seconds
        ]

    def _end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(3 * self.period)  # A call to a frozen process 0 does not return.

    def _watch(self) -> None:
        while not self._ended.wait(self.period):
            if silent := self.silent_peers(self._timeout):
                _give_up("; ".join(silent))

    def _talk(self) -> None:
        for tick in itertools.count():
            self._exchange(tick)
            if self._ended.wait(self.period):
                return

    def _exchange(self, tick: int) -> None:
        """Say that this process lives, and listen to the others."""
        client = service()
        try:
            client.key_value_set(f"difftx/alive/{self._me}", f"{who_am_i()} at step {self.step} tick {tick}", True)
            heard = client.key_value_dir_get("difftx/alive")
        except Exception:  # One lost message is not a lost process, whatever the service calls it. `_watch` counts.
            return
        self._coordinator_heard = time.monotonic()
        for key, text in heard:
            process = int(key.rsplit("/", 1)[1])
            if process != self._me and self._peers[process].text != text:
                self._peers[process] = Peer(text, time.monotonic())


class Monitor:
    """A thread that ends this process, and prints its stacks, when it makes no progress.

    As a context manager it also says who has gone when an error ends the block, which is how a collective ends when one
    of the processes in it has died.
    """

    def __init__(self, config: MultihostConfig):
        self._config = config
        self._step, self._beat = 0, time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="difftx monitor", daemon=True)
        self._thread.start()

    def beat(self, step: int) -> None:
        """Note that this process got as far as `step`."""
        self._step, self._beat = step, time.monotonic()
        if _heartbeat is not None:
            _heartbeat.step = step

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if error is not None and _heartbeat is not None and explained(error) is None:
            # At once: on the way out JAX would wait for the processes that are no more.
            traceback.print_exception(error)
            time.sleep(3 * _heartbeat.period)
            _give_up("; ".join(_heartbeat.silent_peers(2 * _heartbeat.period)) or f"{type(error).__name__}: {error}")
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(self._config.watchdog_seconds / 20):
            stuck = time.monotonic() - self._beat
            if stuck > self._config.watchdog_seconds:
                _give_up(
                    f"no step finished for {stuck:.0f} s after step {self._step} (multihost.watchdog_seconds="
                    f"{self._config.watchdog_seconds})"
                )


def _give_up(reason: str) -> None:
    """End the process at once: its main thread is inside a call that never returns."""
    me = distributed.global_state.process_id
    print(f"error: process {me} stops: {reason}; stacks of all threads:", file=sys.stderr)
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
    sys.stdout.flush()
    sys.stderr.flush()
    outlast_the_others()
    os._exit(1)
