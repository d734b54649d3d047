"""Wall time of a run by section, measured with a fake clock that the tests advance."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from difftx.config import LoggingConfig
from difftx.training.goodput import SECTIONS, Goodput, format_goodput
from difftx.training.metrics import MetricsWriter, read_metrics

QUIET = LoggingConfig(every_steps=1, trackers=())

NUMBERS = {"loss": 2.5, "tokens": 256, "tokens_per_second": 1e3}  # Other required fields of a train row.


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Attempt:
    """One process of a run: it starts at a step, trains, saves, and ends or is killed."""

    def __init__(self, clock, workdir, start):
        self.clock, self.goodput = clock, Goodput(clock.now, clock)
        clock.now += 3.0
        with self.goodput.section("restore"):
            clock.now += 2.0
        self.goodput.resume(workdir / "metrics.jsonl", start)
        self.writer = MetricsWriter(workdir, QUIET, start)
        self.step = start
        self.report()
        self.goodput.switch("train")

    def report(self):
        self.writer.write("goodput", self.step, self.goodput.row())

    def train(self, steps, seconds=10.0, wait=1.0):
        for _ in range(steps):
            with self.goodput.section("data_wait"):
                self.clock.now += wait
            self.clock.now += seconds - wait
            self.step += 1
            self.writer.write("train", self.step, NUMBERS | {"step_seconds": seconds})

    def save(self, seconds=5.0):
        self.report()
        with self.goodput.section("save"):
            self.clock.now += seconds


def newest(workdir):
    return [row for row in read_metrics(workdir / "metrics.jsonl") if row["split"] == "goodput"][-1]


def seconds(row):
    return {name: row[f"{name}_seconds"] for name in SECTIONS if row[f"{name}_seconds"]}


def test_sections_add_up_after_a_kill(tmp_path):
    clock = Clock()
    first = Attempt(clock, tmp_path, 0)
    first.train(4)
    first.save()
    first.train(3)  # Killed here: the second attempt starts at step 4.
    clock.now += 500.0  # No process trains.
    second = Attempt(clock, tmp_path, 4)
    assert seconds(newest(tmp_path)) == {"train": 36, "data_wait": 4, "init": 6, "restore": 4, "lost_work": 30}
    second.train(4)
    second.save()
    second.report()
    row = newest(tmp_path)
    assert seconds(row) == {"train": 72, "data_wait": 8, "init": 6, "restore": 4, "save": 5, "lost_work": 30}
    # The 5 s of the first attempt's save are missing. They belong to no step, and the process was killed before it
    # wrote another goodput row.
    assert row["wall_seconds"] == sum(seconds(row).values()) == clock.now - 1000.0 - 500.0 - 5.0
    assert row["goodput"] == 72 / row["wall_seconds"]


def test_attempts_whose_steps_are_all_lost_are_counted(tmp_path):
    clock = Clock()
    first = Attempt(clock, tmp_path, 0)
    first.train(4)
    first.save()
    for _ in range(3):
        again = Attempt(clock, tmp_path, 4)
        again.train(2)
    last = Attempt(clock, tmp_path, 0)  # All checkpoints are gone.
    row = last.goodput.row()
    assert seconds(row) == {"init": 15, "restore": 10, "lost_work": 40 + 3 * 20}


def test_steps_without_rows_are_counted(tmp_path):
    """A train row that is written every ten steps stands for ten steps."""
    clock = Clock()
    first = Attempt(clock, tmp_path, 0)
    first.writer.write("train", 10, NUMBERS | {"step_seconds": 2.0})
    first.writer.write("train", 20, NUMBERS | {"step_seconds": 2.0})
    second = Attempt(clock, tmp_path, 0)
    assert second.goodput.row()["lost_work_seconds"] == 40.0


@settings(max_examples=100, deadline=None, database=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(SECTIONS)), st.floats(0, 100), st.booleans()), max_size=30))
def test_any_order_of_sections_adds_up(events):
    clock, expected = Clock(), dict.fromkeys(SECTIONS, 0.0)
    goodput = Goodput(clock.now, clock)
    current = "init"
    for name, duration, nested in events:
        if nested:
            with goodput.section(name):
                clock.now += duration
            expected[name] += duration
        else:
            goodput.switch(name)
            current = name
        clock.now += 1.0
        expected[current] += 1.0
    row = goodput.row()
    assert {name: row[f"{name}_seconds"] for name in SECTIONS} == pytest.approx(expected)
    assert row["wall_seconds"] == pytest.approx(clock.now - 1000.0) == pytest.approx(sum(expected.values()))


def test_a_line_shows_the_wall_time_and_its_shares(tmp_path):
    attempt = Attempt(Clock(), tmp_path, 0)
    attempt.train(2)
    line = format_goodput(attempt.goodput.row())
    assert line.startswith("wall time of the run: 25.0 s: training steps 72.0%, waiting for data ")
    assert all(f" {text} " in line for text in SECTIONS.values())
