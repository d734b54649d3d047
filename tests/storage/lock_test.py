"""The lock of a run in a bucket: real processes that are killed, frozen and resumed late, and simulated schedules."""

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
from conftest import ROOT
from helpers.buckets import in_ci_with

from difftx.errors import RunError, UnreadableError, UserError
from difftx.json_files import JsonLines
from difftx.run_files import pulled
from difftx.storage import lock as lock_module
from difftx.storage import objects
from difftx.storage.lock import BucketLock

TAKEOVER = 3.0

# Take the lock, write a row per command, and report each step on stdout. A command is a line on stdin.
OWNER = """
import sys
from difftx.errors import RunError, UnreadableError, UserError
from difftx.json_files import JsonLines
from difftx.run_files import small_files
from difftx.storage import lock
from difftx.storage.paths import path_of

folder, name, takeover = path_of("folder", sys.argv[1]), sys.argv[2], float(sys.argv[3])
try:
    with (
        lock.BucketLock(folder / ".lock", "--workdir=run", takeover_seconds=takeover, wait_seconds=0) as held,
        small_files(folder, held) as owner,
    ):
        log = JsonLines(owner.folder / "log.jsonl")
        print("owner", flush=True)
        for i, command in enumerate(sys.stdin):
            if command == "end\\n":
                break
            if command == "write without a check\\n":  # The process is frozen between its check and its write.
                owner.check = lambda: setattr(owner, "check", held.check)
            log.append([{"name": name, "row": i}])
            owner.push()
            print("wrote", flush=True)
    print("released", flush=True)
except (UserError, RunError) as error:
    print(f"error: {error}", flush=True)
"""


class Process:
    """A process that runs `OWNER`."""

    def __init__(self, folder, name, takeover=TAKEOVER):
        self._process = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(folder), name, str(takeover)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self):
        """Return the next line of output. Skip the message of a process that waits for the lock."""
        return next(line for line in iter(self._process.stdout.readline, "") if "waiting" not in line).strip()

    def say(self, command):
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        return self.line()

    def signal(self, number):
        self._process.send_signal(number)
        if number == signal.SIGSTOP:
            os.waitpid(self._process.pid, os.WUNTRACED)

    def close(self):
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGCONT)
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def start():
    with contextlib.ExitStack() as stack:

        def started(*args, **kwargs):
            process = Process(*args, **kwargs)
            stack.callback(process.close)
            return process

        yield started


def rows(folder):
    return [row["name"] for row in JsonLines(pulled(folder) / "log.jsonl").read()]


@in_ci_with("s3")
def test_a_second_process_waits_then_gives_up_or_takes_the_lock(bucket, start):
    folder = bucket.folder()
    first = start(folder, "first")
    assert first.line() == "owner"
    started = time.monotonic()
    second = start(folder, "second")
    assert second.line().startswith("error: --workdir=run: process ")
    assert time.monotonic() - started > TAKEOVER
    assert first.say("write") == "wrote"
    third = start(folder, "third")
    assert first.say("end") == "released"
    assert third.line() == "owner"
    assert third.say("write") == "wrote"
    assert rows(folder) == ["first", "third"]


@in_ci_with("gs")
def test_the_lock_of_a_killed_owner_is_taken_over(bucket, start):
    folder = bucket.folder()
    first = start(folder, "first", takeover=6.0)
    assert first.line() == "owner"
    assert first.say("write") == "wrote"
    first.signal(signal.SIGKILL)
    begun = time.monotonic()
    with BucketLock(folder / ".lock", "--workdir=run", takeover_seconds=6.0, wait_seconds=0) as held:
        waited = time.monotonic() - begun
        held.check()
    assert 5 < waited < 9


@in_ci_with("gs")
def test_a_frozen_owner_that_continues_late_does_not_write(bucket, start):
    folder = bucket.folder()
    first = start(folder, "first")
    assert first.line() == "owner"
    assert first.say("write") == "wrote"
    first.signal(signal.SIGSTOP)
    second = start(folder, "second")
    third = start(folder, "third")
    lines = {"second": second.line()[:5], "third": third.line()[:5]}
    assert sorted(lines.values()) == ["error", "owner"]
    (owner,) = (name for name, line in lines.items() if line == "owner")
    first.signal(signal.SIGCONT)
    assert "has taken this folder over" in first.say("write")
    assert {"second": second, "third": third}[owner].say("write") == "wrote"
    assert rows(folder) == ["first", owner]


@in_ci_with("s3")
def test_a_late_push_without_a_check_changes_nothing(bucket, start):
    """The owner is frozen between its check and its write."""
    folder = bucket.folder()
    first = start(folder, "first")
    assert first.line() == "owner"
    first.signal(signal.SIGSTOP)
    second = start(folder, "second")
    assert second.line() == "owner"
    assert second.say("write") == "wrote"
    first.signal(signal.SIGCONT)
    assert "has taken this folder over" in first.say("write without a check")
    assert second.say("write") == "wrote"
    assert rows(folder) == ["second", "second"]


def test_lock_check_after_release_raises(bucket):
    """After an error, a background save may outlive the `with` block of its lock."""
    with BucketLock(bucket.folder() / ".lock", "--workdir=run", takeover_seconds=60, wait_seconds=0) as held:
        held.check()
    with pytest.raises(RunError, match="has released the lock"):
        held.check()


@pytest.mark.parametrize(
    ("owner", "waiting", "read_seconds", "expected"),
    [
        # Reads that take half a second delay a takeover by one of them.
        (60.0, 60.0, 0.5, 60.8),
        # The owner renews six times within its own time, so a shorter time of the waiting process is not enough.
        (600.0, 60.0, 0.0, 600.5),
        (60.0, 600.0, 0.0, 600.5),
    ],
)
def test_a_lock_without_renewals_is_taken_over_after_the_longer_of_both_times(
    monkeypatch, owner, waiting, read_seconds, expected
):
    clock, store = types.SimpleNamespace(now=0.0), types.SimpleNamespace(content=None, written=None)

    def sleep(seconds):
        clock.now += seconds + 0.001

    def read(path):
        sleep(read_seconds)
        return None if store.content is None else objects.Stored(store.content, b"1")

    def write_if(path, content, generation):
        store.content, store.written = content, clock.now
        return b"1"

    store.read_verified, store.write_if = read, write_if
    monkeypatch.setattr(lock_module, "objects", store)
    monkeypatch.setattr(lock_module, "time", types.SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))
    monkeypatch.setattr(lock_module, "_now", lambda: clock.now)
    for takeover in (owner, waiting):
        clock.now = 0.0
        BucketLock(Path("run/.lock"), "--workdir=run", takeover_seconds=takeover, wait_seconds=0)._acquire()
    assert store.written == pytest.approx(expected, abs=0.5)


class Store:
    """In-memory store of one object with conditional writes, for schedules with thousands of requests."""

    def __init__(self, actors):
        self.content, self.generation, self._actors = None, 0, actors

    def read(self, path):
        self._actors.wait()
        return None if self.content is None else objects.Stored(self.content, b"%d" % self.generation)

    read_verified = read

    def write_if(self, path, content, generation):
        self._actors.wait()
        if generation != (None if self.content is None else b"%d" % self.generation):
            return None
        self.content, self.generation = content, self.generation + 1
        return b"%d" % self.generation


class Actors:
    """Simulated processes and their clock. One process runs at a time, until its next request or sleep."""

    def __init__(self, count):
        self.clock, self.store, self.checks = 0.0, Store(self), 0
        self.failures, self._over, self._ended = [], False, set()
        self._turns = [threading.Semaphore(0) for _ in range(count)]
        self._done, self._index = threading.Semaphore(0), threading.local()

    def play(self, schedule):
        """Run the actors in the order of a schedule. "tick" advances the clock by 0.3 of the takeover time."""
        threads = [threading.Thread(target=self._run, args=(index,)) for index in range(len(self._turns))]
        for thread in threads:
            thread.start()
        for turn in schedule:
            if turn == "tick":
                self.clock += 0.3 * TAKEOVER
            elif turn not in self._ended:
                self._turns[turn].release()
                self._done.acquire()
        self._over = True
        for turn in self._turns:
            turn.release()
        for thread in threads:
            thread.join()

    def wait(self, *_):
        """Let the other actors run until the schedule returns to this one."""
        if self._index.started:
            self._done.release()
        self._index.started = True
        self._turns[self._index.value].acquire()
        if self._over:
            raise SystemExit

    def _run(self, index):
        self._index.value, self._index.started = index, False
        lock = BucketLock(Path("run/.lock"), "--workdir=run", takeover_seconds=TAKEOVER, wait_seconds=10 * TAKEOVER)
        lock._me["host"] = str(index)
        try:
            lock._acquire()
            while True:
                lock.check()
                self.checks += 1
                if json.loads(self.store.content)["owner"]["id"] != lock._me["id"]:
                    self.failures.append(f"{index} would write without the lock")
                self.wait()
                if self.checks % 2:  # A heartbeat between two checks.
                    with lock._renewing:
                        lock._renew()
        except (UserError, RunError, SystemExit):
            pass
        finally:
            self._ended.add(index)
            if not self._over:
                self._done.release()


@pytest.fixture
def play(monkeypatch):
    """Return a function that plays a schedule and returns the number of successful checks."""

    def played(count, schedule):
        actors = Actors(count)
        clock = types.SimpleNamespace(monotonic=lambda: actors.clock, sleep=actors.wait)
        monkeypatch.setattr(lock_module, "objects", actors.store)
        monkeypatch.setattr(lock_module, "time", clock)
        monkeypatch.setattr(lock_module, "_now", lambda: actors.clock)
        actors.play(schedule)
        assert not actors.failures, (actors.failures, schedule)
        return actors.checks

    return played


def test_every_schedule_of_two_processes_has_one_writer(play, capsys):
    """Play all schedules of six turns after process 0 has taken the lock and process 1 has waited for some time."""
    turns = (0, 1, "tick")
    checks = sum(
        play(2, (0, 0, 1, "tick", "tick", "tick", *schedule)) for schedule in itertools.product(turns, repeat=6)
    )
    assert checks > 500


def test_faults_do_not_lose_the_lock(bucket, quick_retries, monkeypatch):
    """The owner keeps the lock if replies are lost and the reads that resolve the outcome are shortened."""
    monkeypatch.setattr(objects, "REREAD_SECONDS", (0.0,) * 6)
    with BucketLock(bucket.folder() / ".lock", "--workdir=run", takeover_seconds=60, wait_seconds=0) as held:
        for seed in range(25):
            bucket.plan(kinds=["lost", "short", "503", "cut"], rate=0.5, in_a_row=2, seed=seed)
            with held._renewing:
                held._renew()
            held.check()
        bucket.plan(kinds=["lost"], in_a_row=100)
        with held._renewing, pytest.raises(UnreadableError):
            held._renew()  # The write takes effect, although every reply is lost.
        bucket.plan()
        with held._renewing:
            held._renew()
        held.check()


def test_random_schedules_of_three_processes_have_one_writer(play, capsys):
    random_ = random.Random(0)
    checks = sum(play(3, random_.choices((0, 1, 2, "tick"), weights=(2, 3, 3, 2), k=40)) for _ in range(300))
    assert checks > 500
