"""A heartbeat names the process that is silent, on a clock that advances only when a test advances it."""

import queue
from types import SimpleNamespace

import pytest

from difftx.parallel import heartbeat
from difftx.parallel.heartbeat import Heartbeat

TIMEOUT_SECONDS = 1


class Service:
    """A client of the coordination service. Process 0 has sent its last message; the service answers if `answers`."""

    def __init__(self):
        self.answers = True
        self.exchanges = queue.SimpleQueue()

    def key_value_set(self, key, value, allow_overwrite):
        pass

    def key_value_dir_get(self, key):
        self.exchanges.put(key)
        if not self.answers:
            raise TimeoutError
        return [(f"{key}/0", "host, pid 7 at step 3 tick 5"), (f"{key}/1", "host, pid 8 at step 3 tick 5")]

    def after_an_exchange(self):
        """Return when an exchange that began after this call has ended."""
        while not self.exchanges.empty():
            self.exchanges.get()
        for _ in range(2):  # The heartbeat has one exchange at a time, so the first ends before the second begins.
            self.exchanges.get(timeout=30)


@pytest.fixture
def process_1(monkeypatch):
    """Yield the clock and the service of the heartbeat of process 1 of 2, and the reasons for which it would end it."""
    clock, service, reasons = SimpleNamespace(now=0.0), Service(), queue.SimpleQueue()
    state = SimpleNamespace(process_id=1, num_processes=2, coordinator_address="host:1234", client=service)
    monkeypatch.setattr(heartbeat, "distributed", SimpleNamespace(global_state=state))
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(heartbeat, "_abort", reasons.put)
    started = Heartbeat(TIMEOUT_SECONDS)
    service.after_an_exchange()
    yield clock, service, reasons
    started._end()


@pytest.mark.parametrize("answered", [0.0, 0.2])
def test_a_frozen_process_0_is_named_as_the_coordinator(process_1, answered):
    """The service answered 0 or 0.2 s after the last message, as the phases of the two heartbeats have it."""
    clock, service, reasons = process_1
    clock.now = answered
    service.after_an_exchange()
    service.answers = False
    clock.now = TIMEOUT_SECONDS + 0.01
    expected = f"process 0, the coordinator at host:1234, has been silent for {clock.now - answered:.0f} s"
    assert reasons.get(timeout=30) == expected


def test_a_process_0_whose_service_answers_is_named_with_its_last_message(process_1):
    """The threads of the service do not need Python, so they answer while Python in process 0 is blocked."""
    clock, service, reasons = process_1
    for clock.now in (0.5, 1.0, 1.01):
        assert reasons.empty()
        service.after_an_exchange()
    assert reasons.get(timeout=30) == "process 0 of 2 (host, pid 7 at step 3) has been silent for 1 s"
