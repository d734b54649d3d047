"""Faults that interrupt real training processes at seeded random moments, and checks after each fault.

The driver uses only files, exit codes and output, and verifies checkpoints with its own code (disk.py). After each
fault it runs the same command again, and checks that

- the run resumes from the newest checkpoint that verifies, or stops with the documented exit code and line;
- no checkpoint that verified before is lost, except through retention, a rewind or the injected corruption;
- the numbers of every step equal those of an uninterrupted run bit for bit.
"""

import collections
import contextlib
import dataclasses
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from helpers.processes import Processes, newest_step
from helpers.unreadable import setpriv_prefix

from chaos import disk, records
from chaos.plan import CONFIGS, KEEP, STARTS, UNREADABLE, Episode, Layout, Plan

GIVE_UP_SECONDS = 600.0  # Time after which the driver gives up. The machine may be busy with other work.
BARRIER_TIMEOUT_SECONDS = 20  # Timeout of barriers and heartbeats.
DISK_MIB = 8
MAX_SKIPPED = 3  # Skipped updates in a row until a rewind.
# Exit codes of docs/files.md. The driver does not import difftx.errors, so that it notices if they change there.
DONE = 0
FAILED = 1
BAD_INPUT = 2
PREEMPTED = 75
ABORTED = -signal.SIGABRT  # JAX aborts a process when process 0 has exited.
# Errors that name the lost process: the first for process 0, the second for process 1.
MISSED = (
    r"process 0, the coordinator at .*, (is gone|has been silent)|process 0 of 2 \(.*\) has been silent",
    r"process 1 of 2 \(.*\) has been silent",
)
ALTERED = str(Path(__file__).with_name("altered.py"))


@dataclasses.dataclass
class Tally:
    """Outcomes and seconds by fault, and what the interrupted processes were doing."""

    outcomes: dict[str, collections.Counter] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(collections.Counter)
    )
    seconds: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    places: collections.Counter = dataclasses.field(default_factory=collections.Counter)

    @property
    def faults(self) -> int:
        return sum(counter.total() for counter in self.outcomes.values())

    def add(self, fault: str, outcome: str, seconds: float) -> None:
        self.outcomes[fault][outcome] += 1
        self.seconds[fault] += seconds

    def update(self, other: "Tally") -> None:
        for fault, counter in other.outcomes.items():
            self.outcomes[fault].update(counter)
        self.seconds.update(other.seconds)
        self.places.update(other.places)

    def table(self) -> str:
        lines = [f"{'fault':32} {'count':>5} {'seconds':>8}  outcomes"]
        for fault, counter in sorted(self.outcomes.items()):
            outcomes = ", ".join(f"{outcome} {count}" for outcome, count in counter.most_common())
            lines.append(f"{fault:32} {counter.total():5} {self.seconds[fault]:8.0f}  {outcomes}")
        lines.append(f"{'all':32} {self.faults:5} {self.seconds.total():8.0f}")
        places = ", ".join(f"{place} {count}" for place, count in self.places.most_common())
        return "\n".join([*lines, f"processes were interrupted in: {places}"])


def impossible_faults() -> dict[str, str]:
    """Return the faults that cannot be made on this machine, and why."""
    why = "root here, and setpriv cannot drop capabilities"
    return dict.fromkeys(UNREADABLE, why) if setpriv_prefix() is None else {}


def process_options(folder: Path, layout: Layout, nan: tuple[int, ...] = ()) -> dict:
    """Return the arguments of `Processes` for one layout, with bad batches, if any."""
    return {
        "count": layout.processes,
        "devices": layout.devices,
        "script": [ALTERED, ",".join(map(str, nan)), "train.py"] if nan else ["train.py"],
        "train__steps": layout.steps,
        "checkpoint__every_steps": layout.every_steps,
        "checkpoint__keep": KEEP,
        "eval__every_steps": layout.steps // 3,
        "logging__trackers": "tensorboard",
        "data__packing": "best_fit",
        "data__cache_path": folder / "cache",
        "guards__max_skipped": MAX_SKIPPED,
        "guards__skip_steps": 2,
        "guards__max_rewinds": 20,
        "multihost__barrier_timeout_seconds": BARRIER_TIMEOUT_SECONDS,
        "multihost__heartbeat_timeout_seconds": BARRIER_TIMEOUT_SECONDS,
        "multihost__initialization_timeout_seconds": 2 * BARRIER_TIMEOUT_SECONDS,
    }


def train_undisturbed(layout: Layout, nan: tuple[int, ...], text_file: Path, folder: Path) -> Path:
    """Train an uninterrupted run and return its workdir."""
    folder.mkdir(parents=True)
    processes = Processes(text_file, folder / "run", folder, **process_options(folder, layout, nan))
    for process in processes.running:
        code, text = processes.wait(process, GIVE_UP_SECONDS)
        assert code == DONE, text
    return folder / "run"


class Run:
    """A run that carries out a plan."""

    def __init__(self, plan: Plan, text_file: Path, folder: Path, uninterrupted: Path):
        self.plan, self.tally = plan, Tally()
        self._text_file, self._folder, self._uninterrupted = text_file, folder, uninterrupted
        self._workdir, self._random = folder / "run", Random(plan.seed)
        self._checkpoints = self._workdir / "checkpoints"
        self._process_options = process_options(folder, plan.layout, plan.nan)
        self._processes: Processes | None = None
        self._frozen: list[subprocess.Popen] = []
        self._starts = 0
        self._known: dict[int, disk.Digests] = {}  # Checkpoints that verified at the last check.
        self._rewinds = 0  # Number of rewinds in metrics.jsonl at the last check.
        self._small_disk: SmallDisk | None = None

    def carry_out(self) -> None:
        """Carry out the plan. Raise `AssertionError` if a check fails."""
        with self._clean_up():
            for episode in self.plan.episodes:
                if self._processes is None:
                    self._start()
                if not self._until(episode):
                    break  # The run ended before the fault could happen.
                self._interrupt(episode)
                if self._processes is None and episode.corruption is not None:
                    self._corrupt(episode.corruption)
            if self._processes is None:
                self._start()
            self._end()
        for _ in range(self.plan.stretches):
            self.tally.add("NaN in the data", "updates skipped, or the run rewound", 0)

    # ── Starting ──

    def _start(self, **options: Any) -> None:
        """Start the same command again. `options` are those of `Processes`."""
        expected = self._expected_step()
        logs = self._folder / f"start {self._starts:02}"
        logs.mkdir()
        self._starts += 1
        self._processes = Processes(self._text_file, self._workdir, logs, **self._process_options, **options)
        self._expected, self._checked = {expected}, False

    def _expected_step(self) -> int | None:
        """Return the step from which the run must resume, by the driver's own check, or None if the start must fail."""
        steps = disk.steps_in(self._checkpoints)
        verified = [step for step in steps if disk.verifies(self._checkpoints / str(step))]
        quarantined = disk.quarantined(self._checkpoints)
        has_saved = disk.json_of(self._workdir / "manifest.json").get("has_saved", False)
        return max(verified, default=None if steps or quarantined or has_saved else 0)

    def _check_start(self) -> None:
        """Compare the step at which the run started with the expected one, once it is in the log."""
        if self._checked or not (found := re.search(r"attempt \d+, from step (\d+) to", self._log())):
            return
        self._checked = True
        assert int(found[1]) in self._expected, f"started at step {found[1]}, not {self._expected}: {self._log()}"
        self._check_checkpoints()
        if not self.plan.nan:  # With bad batches, rewinds decide which rows stay.
            self._check_metrics(until=int(found[1]))

    def _log(self, process: int = 0) -> str:
        """Return what a process of the latest start has printed so far. The process may have ended."""
        path = self._folder / f"start {self._starts - 1:02}" / f"{process}.log"
        return path.read_text(errors="replace")

    # ── Moments ──

    def _wait(self, condition: Callable[[], bool], pause: float = 0.005) -> bool:
        """Return whether the condition came true before a process ended."""
        assert self._processes is not None
        deadline = time.monotonic() + GIVE_UP_SECONDS
        while not condition():
            if any(popen.poll() is not None for popen in self._processes.running.values()):
                return condition()
            assert time.monotonic() < deadline, f"nothing happens: {self._log()}"
            time.sleep(pause)
        return True

    def _until(self, episode: Episode) -> bool:
        """Wait for the moment of an episode. Return False if the run ended before it."""
        primary = self._processes.running[0]
        lock, metrics = self._workdir / ".lock", self._workdir / "metrics.jsonl"
        late = episode.moment not in STARTS
        delay = {"start": 4.0, "restore": 1.0, "compile": 1.0, "step": 0.1, "saving": 0.2, "naming": 0.01}
        seconds = self._random.uniform(0, delay.get(episode.moment, 0.02))
        reached = not late or self._wait(lambda: newest_step(metrics) >= episode.step)
        before = set(disk.steps_in(self._checkpoints))
        conditions: dict[str, Callable[[], bool]] = {
            "start": lambda: True,
            "restore": lambda: lock.exists() and f"process {primary.pid} " in lock.read_text(),
            "compile": lambda: "attempt " in self._log(),
            "step": lambda: True,
            "saving": lambda: bool(disk.unfinished(self._checkpoints)),
            "naming": lambda: any(self._checkpoints.glob(f"*/.{disk.MANIFEST}*")),
            "removing": lambda: bool(set(disk.steps_in(self._checkpoints)) - before),
        }
        reached = reached and self._wait(conditions[episode.moment], 0.001)
        if reached:
            time.sleep(seconds)
            self._check_start()
            return True
        return False

    def _place(self) -> str:
        """Describe what the processes are doing, by the files that exist so far."""
        if disk.unfinished(self._checkpoints):
            return "a save or a removal"
        if "attempt " not in self._log():
            primary = self._processes.running[0]
            lock = self._workdir / ".lock"
            locked = lock.exists() and f"process {primary.pid} " in lock.read_text()
            return "restoring" if locked else "starting"
        steps = [newest_step(self._workdir / "metrics.jsonl"), *self._expected]
        return "steps" if steps[0] > max(steps[1:]) else "compiling"

    # ── Faults ──

    def _interrupt(self, episode: Episode) -> None:
        began, running = time.monotonic(), self._processes.running
        self._check_checkpoints()
        place = self._place()
        interruption = episode.interruption
        if interruption.startswith("disk full"):
            outcome = self._fill_disk(relieve=interruption.endswith("free"))
        elif interruption == "SIGSTOP":
            outcome = self._pause(running[0])
        elif interruption.startswith("SIGSTOP"):
            outcome = self._freeze(running[self._random.randrange(2)], interruption.partition(", ")[2])
        elif interruption == "SIGKILL":
            for popen in running.values():
                popen.kill()
            outcome = self._ended({-signal.SIGKILL, DONE})
        elif interruption.startswith("SIGKILL of"):
            outcome = self._kill_one(int(interruption[-1]))
        else:
            outcome = self._terminate(to_all=interruption.endswith("all"))
        self.tally.add(episode.interruption, outcome, time.monotonic() - began)
        self.tally.places[place] += 1

    def _codes(self) -> list[int]:
        return [self._processes.wait(process, GIVE_UP_SECONDS)[0] for process in self._processes.running]

    def _ended(self, allowed: set[int]) -> str:
        """Wait until all processes have ended. Return their exit codes as text."""
        codes = self._codes()
        assert set(codes) <= allowed, f"exit codes {codes}, not {allowed}: {self._logs()}"
        self._check_start()
        if DONE in codes:
            newest = newest_step(self._workdir / "metrics.jsonl")
            assert newest == self.plan.layout.steps, f"exit codes {codes} at step {newest}: {self._logs()}"
        self._processes = None
        self._check_checkpoints()
        return f"exit {'/'.join(str(code) for code in codes)}"

    def _logs(self) -> str:
        return "\n".join(f"[{process}] {self._log(process)}" for process in self._processes.running)

    def _terminate(self, *, to_all: bool) -> str:
        running = self._processes.running
        for popen in running.values() if to_all else [self._random.choice(list(running.values()))]:
            popen.send_signal(signal.SIGTERM)
        codes, logs, log = self._codes(), self._logs(), self._log()
        if set(codes) == {PREEMPTED}:
            saved = max(disk.verified_contents(self._checkpoints), default=None)
            last = records.rows_of(self._workdir / "metrics.jsonl", "train")[-1:]
            if "nothing saved between bad steps" not in log and last:
                assert saved == last[0]["step"], f"exit 75 after step {last[0]['step']}, saved is {saved}: {log}"
        elif -signal.SIGTERM in codes:
            # Before and after the training loop, there is nothing to save.
            assert "attempt " not in log or "wall time of the run" in log, f"exit codes {codes}: {logs}"
        return self._ended(
            {PREEMPTED, DONE, -signal.SIGTERM} | ({FAILED, BAD_INPUT, ABORTED} if len(codes) > 1 else set())
        )

    def _kill_one(self, victim: int) -> str:
        self._processes.running[victim].kill()
        other = 1 - victim
        code, log = self._processes.wait(other, GIVE_UP_SECONDS)
        if code == FAILED:
            assert re.search(MISSED[victim], log), f"process {victim} was killed, and process {other} says: {log}"
        return self._ended({-signal.SIGKILL, FAILED, BAD_INPUT, DONE} | ({ABORTED} if victim == 0 else set()))

    def _pause(self, popen: subprocess.Popen) -> str:
        """Freeze the only process for a while. It must continue as if nothing had happened."""
        with self._stopped(popen):
            time.sleep(self._random.uniform(0.1, 1.5))
        return "resumed"

    @contextlib.contextmanager
    def _stopped(self, popen: subprocess.Popen) -> Iterator[None]:
        self._frozen.append(popen)
        popen.send_signal(signal.SIGSTOP)
        yield
        popen.send_signal(signal.SIGCONT)
        self._frozen.remove(popen)

    def _freeze(self, victim: subprocess.Popen, then: str) -> str:
        """Freeze one of two processes. The other must name it and end. Then kill the frozen one, or continue it."""
        running = self._processes.running
        number = next(process for process, popen in running.items() if popen is victim)
        with self._stopped(victim):
            code, log = self._processes.wait(1 - number, GIVE_UP_SECONDS)
            assert code in (FAILED, BAD_INPUT, ABORTED, DONE), f"process {number} was frozen, the other: {code} {log}"
            if code == FAILED:
                assert re.search(MISSED[number], log), f"process {number} was frozen, and the other says: {log}"
            if then == "killed":
                victim.kill()
            if then == "continued later":
                self._start()
                # A save that was frozen may still be committed.
                self._expected |= {int(path.name) for path in disk.unfinished(self._checkpoints)}
                time.sleep(self._random.uniform(0.5, 4))
        if then == "continued later":
            late = victim.wait(GIVE_UP_SECONDS)
            assert late != PREEMPTED, f"process {number}, which was frozen, ended with {late}"
            return f"exit {code}, the frozen one {late} while the next run started"
        return self._ended({FAILED, BAD_INPUT, ABORTED, DONE, -signal.SIGKILL})

    def _fill_disk(self, *, relieve: bool) -> str:
        """Leave less room than a checkpoint needs until the run ends or, with `relieve`, a save fails. Then free it."""
        disk_, primary = self._small_disk, self._processes.running[0]
        failed = len(re.findall("was not saved", self._log()))
        leave = (
            self._random.randrange(300_000) if self.plan.small_disk == "checkpoints" else self._random.randrange(9000)
        )
        deadline = time.monotonic() + GIVE_UP_SECONDS
        with disk_.full(primary.pid, leave) as fill:
            while primary.poll() is None and not (relieve and len(re.findall("was not saved", self._log())) > failed):
                assert time.monotonic() < deadline, self._log()
                fill()
                time.sleep(0.02)
        code = primary.poll()
        if code is None:
            return "not saved, then saved again"
        if code == DONE:
            return self._ended({DONE})
        lines = [line for line in self._log().splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, f"no one line for a full disk: {self._log()}"
        # Orbax may print a traceback of its own before that line. Writes that end after their save print nothing.
        assert "Traceback" not in self._log().partition(lines[0])[2], self._log()
        assert "Event loop is closed" not in self._log(), self._log()
        assert re.search(r"earlier checkpoints are untouched|No space left|File too large", lines[0]), lines
        return self._ended({FAILED})

    # ── Files ──

    def _corrupt(self, what: str) -> None:
        began = time.monotonic()
        if what in UNREADABLE:
            outcome = self._hide(what)
        elif what == CONFIGS:
            outcome = self._start_with_different_configs()
        else:
            outcome = self._corrupt_checkpoints(what)
        if outcome is not None:
            self.tally.add(what, outcome, time.monotonic() - began)

    def _corrupt_checkpoints(self, what: str) -> str | None:
        verified = sorted(disk.verified_contents(self._checkpoints))
        if not verified:
            return None
        step = self._random.choice([verified[-1], verified[-1], self._random.choice(verified)])
        copy = self._folder / "copy"
        shutil.copytree(self._checkpoints, copy)
        done = disk.CORRUPTIONS[what](self._checkpoints, step, self._random)
        print(f"{self.plan.name}: {what}: {done}", flush=True)
        corrupt = {
            step: disk.content_of(self._checkpoints / str(step))
            for step in disk.steps_in(self._checkpoints)
            if not disk.verifies(self._checkpoints / str(step))
        }
        # Changed checkpoints are not compared later.
        self._known = {s: c for s, c in self._known.items() if disk.content_of(self._checkpoints / str(s)) == c}
        newest = max(verified)
        if self._expected_step() is None:
            aside = disk.quarantined(self._checkpoints)
            self._start()
            self._refused("verifies" if disk.steps_in(self._checkpoints) or aside else "there is no checkpoint, but")
            # "Restore one from a copy."
            shutil.copytree(copy / str(newest), self._checkpoints / str(newest), dirs_exist_ok=True)
            outcome = "exit 2, restored from a copy, resumed"
        else:
            outcome = "resumed from the newest" if self._expected_step() == newest else "resumed from an earlier one"
        shutil.rmtree(copy)
        self._start()
        if not self._wait(lambda: "attempt " in self._log()):
            assert self._codes() == [DONE] * len(self._processes.running), f"after {what} ({done}): {self._logs()}"
        self._check_start()
        for number, content in corrupt.items():
            if number > max(self._expected):  # A start does not verify older checkpoints.
                now = disk.digests(self._checkpoints / str(number))
                kept = content.pop(disk.MANIFEST) in now.values() and content.items() <= now.items()
                assert kept, f"{number}, which is corrupt, was not put aside as it was: {self._log()}"
        return outcome

    def _hide(self, what: str) -> str | None:
        """Make files of checkpoints unreadable during a start, and check that no checkpoint is quarantined."""
        verified = sorted(disk.verified_contents(self._checkpoints))
        if not verified:
            return None
        path = disk.read_when_verifying(self._checkpoints / str(verified[-1]), self._random)
        aside = disk.quarantined(self._checkpoints)
        manifests = [self._checkpoints / str(step) / disk.MANIFEST for step in verified]
        with disk.without_permissions([path] if what == "unreadable file" else manifests):
            self._start(before=setpriv_prefix())
            self._codes()
        print(f"{self.plan.name}: {what}: {path.relative_to(self._workdir)}", flush=True)
        self._refused("cannot be read: Permission denied", FAILED)
        self._start()
        assert disk.quarantined(self._checkpoints) == aside, f"{what}: put aside: {self._logs()}"
        return "exit 1, readable again, resumed"

    def _start_with_different_configs(self) -> str:
        """Start process 1 with another learning rate. All processes must refuse to start and name the field."""
        self._start(own_flags={1: ["--config.optimizer.learning_rate=0.5"]})
        self._refused("optimizer.learning_rate")
        return "exit 2, same configs, resumed"

    def _refused(self, why: str, code: int = BAD_INPUT) -> None:
        """Assert that the start ends with the exit code and a one-line error that contains `why`."""
        codes = self._codes()
        assert codes == [code] * len(codes), f"exit codes {codes}, not {code}: {self._logs()}"
        for process in self._processes.running:
            errors = re.findall(r"^error: .*", self._log(process), re.MULTILINE)
            assert len(errors) == 1, self._log(process)
            assert why in errors[0], errors[0]
            assert "Traceback" not in self._log(process), self._log(process)
        self._processes = None
        self._check_checkpoints()

    def _check_metrics(self, *, until: int) -> None:
        records.check_metrics(self._workdir, self._uninterrupted, until=until)

    def _check_checkpoints(self) -> None:
        """Check that no checkpoint that verified is lost, and record those that verify now."""
        counted = len(records.rows_of(self._workdir / "metrics.jsonl", "rewind"))
        now = disk.verified_contents(self._checkpoints)
        complete = disk.checkpoints_with_right_sizes(self._checkpoints)
        # A running training may have rewound since `counted`. The next check takes that rewind into account again.
        new = [
            (entry["step"], entry["bad_steps"][0])
            for entry in records.rows_of(self._workdir / "metrics.jsonl", "rewind")[self._rewinds :]
        ]
        new += self._unrecorded_rewind(complete)
        back_to = min((target for target, _ in new), default=None)
        # Checkpoints that rewinds have deleted since the last check. Retention counted them until then.
        every = self.plan.layout.every_steps
        rewound = {step for target, bad in new for step in range(every, bad, every) if step > target}
        for step, content in self._known.items():
            # A rewind commits its target again, with another manifest.
            if now.get(step) == content or (back_to is not None and (step > back_to or step in now)):
                continue
            # Retention counts the checkpoints with all files, of the recorded sizes. A running training may have saved
            # one more, and removed this one, during this check.
            newer = {*disk.checkpoints_with_right_sizes(self._checkpoints), *rewound}
            if len([other for other in newer if other > step]) >= KEEP:
                continue
            names = sorted(path.name for path in self._checkpoints.iterdir())
            raise AssertionError(f"the checkpoint of step {step} verified, and is lost; there are {names}")
        self._known, self._rewinds = now, counted

    def _unrecorded_rewind(self, complete: list[int]) -> list[tuple[int, int]]:
        """Return the target and the first bad step of a rewind that has begun, and may have no row yet.

        A rewind deletes checkpoints before the next attempt writes its row. The log then shows the bad steps last.
        """
        attempt = self._log().rpartition("attempt ")[2]
        skipped = list(map(int, re.findall(r"step (\d+): .*: update skipped", attempt)))
        bad = skipped[-1:]
        while bad and bad[0] - 1 in skipped:
            bad.insert(0, bad[0] - 1)
        if len(bad) < MAX_SKIPPED:
            return []
        every = self.plan.layout.every_steps
        return [(max((step for step in complete if step % every == 0 and step + 1 < bad[0]), default=0), bad[0])]

    # ── The end ──

    def _end(self) -> None:
        codes = self._codes()
        assert codes == [DONE] * len(codes), f"exit codes {codes}: {self._logs()}"
        self._check_start()
        assert self._checked, self._log()
        self._check_checkpoints()
        targets = list(self._workdir.glob("elsewhere/*"))
        assert all(any(target.iterdir()) for target in targets), f"what a link led to is gone: {targets}"
        assert self.plan.layout.steps in self._known, f"no checkpoint of the last step: {list(self._known)}"
        self._check_metrics(until=self.plan.layout.steps)
        records.check_rewinds(self._workdir, self._uninterrupted)
        records.check_tensorboard(self._workdir, self._uninterrupted)

    @contextlib.contextmanager
    def _clean_up(self) -> Iterator[None]:
        if self.plan.small_disk is not None:
            place = self._workdir if self.plan.small_disk == "workdir" else self._checkpoints
            self._small_disk = SmallDisk(place)
        try:
            yield
        finally:
            if self._processes is not None:
                self._processes.kill()
            for popen in self._frozen:
                popen.kill()
                popen.wait()
            if self._small_disk is not None:
                self._small_disk.close()


class SmallDisk:
    """A folder that can fill up: a tmpfs of a few MiB or, where mounts are not allowed, a limit on file sizes."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True)
        self._folder = folder
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "difftx-chaos", str(folder)],
            capture_output=True,
            text=True,
        )
        self.mounted = done.returncode == 0
        if not self.mounted:
            print(f"NO TMPFS ({done.stderr.strip()}): in place of a full disk, files may not grow", file=sys.stderr)

    @contextlib.contextmanager
    def full(self, pid: int, leave: int) -> Iterator[Callable[[], None]]:
        """Leave room for `leave` bytes inside the block. The caller calls the yielded function repeatedly.

        Without a tmpfs, the files of process `pid` may not exceed 50,000 bytes instead.
        """
        if not self.mounted:
            before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (50_000, -1))
            yield lambda: None
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
            return
        ballast = self._folder / ".ballast"

        def fill() -> None:
            state = os.statvfs(self._folder)
            room = state.f_bavail * state.f_frsize - leave
            size = ballast.stat().st_size if ballast.exists() else 0
            if room > 0:
                with contextlib.suppress(OSError), ballast.open("ab") as file:
                    os.posix_fallocate(file.fileno(), size, room)

        yield fill
        ballast.unlink(missing_ok=True)

    def close(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self._folder)], check=True)
