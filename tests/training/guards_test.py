"""Skipped updates, spikes, rewinds and stops, in this process, on data with bad examples."""

import copy
import json
import random

import jax
import numpy as np
import pytest
from conftest import replace
from helpers.training_checkpoints import flip_a_bit, largest_file

from difftx.config import GuardsConfig
from difftx.data.loader import Loader
from difftx.data.sources import load_sources
from difftx.data.tokenizers import load_tokenizer
from difftx.errors import EXIT_FAILED, EXIT_PREEMPTED, UserError
from difftx.files import UNLOCKED
from difftx.report.curves import training_losses
from difftx.report.runs import match_runs
from difftx.training import loop
from difftx.training.checkpoint import protocol
from difftx.training.checkpoint.checkpointer import Checkpointer, Checkpoints
from difftx.training.checkpoint.manifest import quarantined_in, read_manifest
from difftx.training.checkpoint.protocol import quarantine
from difftx.training.checkpoint.restoring import restore_state
from difftx.training.guards import Guard, rewind_target
from difftx.training.metrics import MetricsWriter, read_metrics
from difftx.training.run import Run, read_run_manifest
from difftx.training.state import init_state, make_train_step

ROWS = 8  # Examples per step.
STEPS = 16


class Examples:
    """A run's examples. The batches in `nan` give a loss that is not a number, those in `spike` a high loss.

    The batches in `empty` have no token that counts in the loss.
    """

    def __init__(self, examples, nan=(), spike=(), empty=()):
        self._examples, self._nan, self._spike, self._empty = examples, set(nan), set(spike), set(empty)

    def __len__(self):
        return len(self._examples)

    def __getitem__(self, index):
        row, batch = dict(self._examples[index]), index // ROWS
        if batch in self._nan:
            row["loss_mask"] = row["loss_mask"] * np.float32("nan")
        if batch in self._empty:
            row["loss_mask"] = row["loss_mask"] * np.float32(0)
        if batch in self._spike:
            row["targets"] = np.full_like(row["targets"], 263)  # A token that does not occur in the text.
        return row


def evaluate(run, params, step, suites, work, weights):
    return {}


@pytest.fixture(scope="module", autouse=True)
def step_of():
    """Return a cached `make_train_step`, which the loop uses too. Configs with equal steps compile only once."""
    made = {}

    def step_of(config, teacher=None):
        assert teacher is None
        assert config.optimizer.schedule == "constant"  # Otherwise the step depends on the number of steps.
        key = (config.model, config.optimizer, replace(config, "train", steps=0).train, config.data.sequence_length)
        return made.setdefault(key, make_train_step(config))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "make_train_step", step_of)
        yield step_of


@pytest.fixture
def open_run(config, mesh_of, text_file, tmp_path):
    """Return a function from the name of a workdir, bad batches, mesh axes and config overrides to a run."""

    def make(name, nan=(), spike=(), axes=None, empty=(), **overrides):
        options = {
            "data__path": text_file,
            "train__steps": STEPS,
            "optimizer__schedule": "constant",
            "checkpoint__every_steps": 4,
            "checkpoint__keep": 20,
            "eval__every_steps": 100,
            "logging__trackers": "",
            "guards__max_skipped": 3,
            "guards__skip_steps": 2,
        }
        c = config(**(options | overrides))
        tokenizer = load_tokenizer(c.data.tokenizer)
        run = Run(c, tmp_path / name, mesh_of(**(axes or {})), tokenizer, load_sources(c.data, tokenizer))
        vars(run.data)["examples"] = Examples(run.data.examples, nan, spike, empty)  # A cached property.
        return run

    return make


def train(run, **options):
    return loop.train(run, evaluate, **options)


def train_rows(run):
    rows = [row for row in read_metrics(run.workdir / "metrics.jsonl") if row["split"] == "train"]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return rows


def losses(run):
    return [row["loss"] for row in train_rows(run)]


def events(run):
    """Return the rows of rewinds and stops."""
    return [row for row in read_metrics(run.workdir / "metrics.jsonl") if row["split"] in ("rewind", "stop")]


def final_state(run):
    with jax.set_mesh(run.mesh):
        abstract = jax.eval_shape(lambda: init_state(run.config))
        return restore_state(
            read_manifest(run.workdir / "checkpoints" / str(run.config.train.steps)), abstract, run.mesh
        )


@pytest.fixture
def brute_force(step_of):
    """Return a function from a run and indices of batches to the losses and last state of steps on these batches."""

    def take_steps(run, batches):
        loader = loader_of(run)
        losses = []
        with jax.set_mesh(run.mesh):
            step = jax.jit(step_of(run.config), donate_argnums=0)
            state = jax.jit(lambda: init_state(run.config))()
            for batch in batches:
                loader.restore({"examples": batch * ROWS, "tokens": 0, "signature": {}})
                state, metrics = step(state, next(loader))
                losses.append(None if metrics["skipped"] else float(metrics["loss"]))
        return losses, state

    return take_steps


def loader_of(run):
    sources = copy.copy(run.data)  # With its examples, unlike `dataclasses.replace`.
    vars(sources)["signature"] = {}
    return Loader(
        sources,
        batch_rows=ROWS,
        prefetch_batches=1,
        sharding=run.batch_sharding,
        vocab_size=run.config.model.vocab_size,
    )


@pytest.mark.long
def test_few_bad_steps_are_skipped_and_the_run_continues(open_run, capsys, brute_force):
    run = open_run("run", nan={5, 7, 8, 13}, logging__every_steps=6)
    assert train(run) == 0
    rows = [row for row in read_metrics(run.workdir / "metrics.jsonl") if row["split"] == "train"]
    assert [row["step"] for row in rows] == [6, 8, 9, 12, 14, 16]
    assert [row["skipped"] for row in rows] == [1, 1, 1, 0, 1, 0]
    assert rows[0]["loss"] is None
    assert events(run) == []
    # Step 8 was bad, so it has no checkpoint.
    assert Checkpoints(run.workdir).steps() == [4, 12, 16]
    assert "step 6: loss nan, gradient norm nan: update skipped" in capsys.readouterr().out
    expected, state = brute_force(run, range(STEPS))
    assert [row["loss"] for row in rows] == [expected[row["step"] - 1] for row in rows]
    jax.tree.map(np.testing.assert_array_equal, final_state(run), state)


def test_rewind_skips_the_batches_of_bad_steps(open_run, capsys, brute_force):
    """Steps 10 to 12 are bad. The run rewinds to step 8 and continues after 12 + 2 batches.

    Step 13 has already started and is discarded.
    """
    run = open_run("run", nan={9, 10, 11})
    result_of_lost_step = run.workdir / "evals" / "loss" / "12.json"
    result_of_lost_step.parent.mkdir(parents=True)
    result_of_lost_step.touch()
    assert train(run) == 0
    assert not result_of_lost_step.exists()
    order = [*range(8), *range(14, 22)]
    expected, state = brute_force(run, order)
    assert losses(run) == expected
    jax.tree.map(np.testing.assert_array_equal, final_state(run), state)
    (entry,) = events(run)
    assert entry == {
        "split": "rewind",
        "step": 8,
        "reason": "3 updates skipped, loss or gradient not finite",
        "bad_steps": [10, 12],
        "attempt": 2,
        "skipped_examples": [8 * ROWS, 14 * ROWS],
        "rewinds": 1,
    }
    rows = train_rows(run)
    assert [row["attempt"] for row in rows] == [1] * 8 + [2] * 8
    assert [row["tokens"] for row in rows] == [256 * step for step in range(1, STEPS + 1)]
    message = "steps 10 to 12: 3 updates skipped, loss or gradient not finite; rewinding to step 8"
    assert message in capsys.readouterr().out


@pytest.mark.long
def test_run_can_rewind_to_its_start_and_repeatedly(open_run, brute_force):
    run = open_run("run", nan={1, 2, 3, 7, 8, 9, 21, 22, 23}, guards__max_rewinds=4)
    assert train(run) == 0
    # The first rewind skips batches 0 to 5. Steps 2 to 4 are bad again, so the second one skips those to 11. Step 10
    # then has batch 21, which is bad, so the third one goes back to step 8, and skips batches 20 to 25.
    assert [(e["step"], e["skipped_examples"], e["rewinds"]) for e in events(run)] == [
        (0, [0, 6 * ROWS], 1),
        (0, [0, 12 * ROWS], 2),
        (8, [20 * ROWS, 26 * ROWS], 3),
    ]
    assert losses(run) == brute_force(run, [*range(12, 20), *range(26, 34)])[0]


def test_a_rewind_to_the_start_is_that_of_its_config_and_data(open_run, capsys):
    """The run fails after its rewind to step 0. The same config continues there, and another one is refused."""
    bad = {"nan": range(1, 10_000), "guards__max_rewinds": 1}
    run = open_run("run", **bad)
    assert train(run) == EXIT_FAILED
    line = "error: steps 1 to 3: 3 updates skipped, loss or gradient not finite; stopped, rewound before: 1"
    assert capsys.readouterr().err == f"{line} (guards.max_rewinds=1)\n"
    before = {path: path.read_bytes() for path in run.workdir.rglob("*") if path.is_file()}
    other = {"optimizer__learning_rate": 0.5, "train__steps": 15, "data__seed": 3, "mesh__preset": "none"}
    with pytest.raises(UserError, match="changed since the checkpoint of step 0: ") as error:
        train(open_run("run", **bad | other))
    learning_rate = run.config.optimizer.learning_rate
    assert f"optimizer.learning_rate: {learning_rate} → 0.5, data.seed: 0 → 3; restore" in str(error.value)
    assert {path: path.read_bytes() for path in run.workdir.rglob("*") if path.is_file()} == before
    assert train(open_run("run", **bad, train__steps=15)) == EXIT_FAILED
    assert [entry["split"] for entry in events(run)] == ["rewind", "stop", "stop"]


@pytest.mark.long
def test_on_bad_steps_stop_ends_every_attempt(open_run, capsys, brute_force):
    run = open_run("run", nan={9, 10, 11}, guards__on_bad_steps="stop")
    for _ in range(2):
        assert train(run) == EXIT_FAILED
        assert "error: steps 10 to 12: 3 updates skipped" in capsys.readouterr().err
    assert Checkpoints(run.workdir).steps() == [4, 8]
    assert [row["skipped"] for row in train_rows(run)][9:12] == [1, 1, 1]
    other = open_run("run", nan={9, 10, 11})  # With guards.on_bad_steps=rewind, the run continues.
    assert train(other) == 0
    assert losses(other) == brute_force(other, [*range(8), *range(14, 22)])[0]


SPIKES = {
    "spike": {9, 10, 11},
    "guards__spike_threshold": 2.0,
    "guards__spike_window_steps": 6,
    "guards__spike_patience_steps": 3,
}


@pytest.mark.long
def test_spikes_cause_a_rewind(open_run, brute_force):
    run = open_run("run", **SPIKES)
    assert train(run) == 0
    (entry,) = events(run)
    assert (entry["step"], entry["bad_steps"]) == (8, [10, 12])
    assert entry["reason"] == "3 losses far above the median"
    assert losses(run) == brute_force(run, [*range(8), *range(14, 22)])[0]


@pytest.fixture(scope="module")
def known():
    return {}


@pytest.fixture
def uninterrupted(known, open_run):
    """Return a function from options of `open_run` to losses, windows and last state of an uninterrupted run."""

    def train_uninterrupted(**options):
        key = repr(options)
        if key not in known:
            run = open_run("uninterrupted", **options)
            assert train(run) == 0
            known[key] = (losses(run), windows(run), final_state(run))
        return known[key]

    return train_uninterrupted


def windows(run):
    return [entry["skipped_examples"] for entry in events(run)]


class StopAfter:
    """Stand-in for the loop's `Interrupt`, with a signal after `calls` steps."""

    def __init__(self, calls):
        self._calls = calls

    def requested(self, step):
        self._calls -= 1
        return self._calls < 0

    def close(self):
        pass


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "stopped"), [("nan", 9), ("nan", 11), pytest.param("nan", 13, marks=pytest.mark.exhaustive), ("spike", 11)]
)
def test_stopped_run_resumes_bit_for_bit(open_run, uninterrupted, monkeypatch, kind, stopped):
    """Stop before the bad steps, between them, or after the rewind.

    A stop before the bad steps leaves a checkpoint, which the rewind deletes.
    """
    options = SPIKES if kind == "spike" else {"nan": {5, 9, 10, 11, 17}}
    run = open_run("run", **options)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "Interrupt", lambda: StopAfter(stopped))
        assert train(run) == EXIT_PREEMPTED
    assert train(run) == 0
    expected_losses, expected_windows, expected_state = uninterrupted(**options)
    assert losses(run) == expected_losses
    assert windows(run) == expected_windows
    jax.tree.map(np.testing.assert_array_equal, final_state(run), expected_state)


class Killed(BaseException):
    """Stand-in for SIGKILL, which no `except Exception` catches."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("first", "place"), [(8, "remove"), (8, "amend"), (8, "write"), (1, "save_and_wait"), (1, "amend"), (1, "write")]
)
def test_run_killed_during_a_rewind_resumes_bit_for_bit(open_run, uninterrupted, monkeypatch, first, place):
    options = {"nan": {first, first + 1, first + 2}}
    run = open_run("run", **options)

    def kill(*_, **__):
        raise Killed

    def kill_at_rewind(writer, split, *args, write=MetricsWriter.write):
        return kill() if split == "rewind" else write(writer, split, *args)

    with monkeypatch.context() as patch:
        where = {"write": MetricsWriter, "save_and_wait": Checkpointer}.get(place, protocol)
        patch.setattr(where, place, kill_at_rewind if place == "write" else kill)
        with pytest.raises(Killed):
            train(run)
    assert train(run) == 0
    assert (losses(run), windows(run)) == uninterrupted(**options)[:2]


@pytest.mark.long
def test_a_batch_without_a_counted_token_has_no_loss(open_run, capsys):
    run = open_run("run", empty={5, 10})
    assert train(run) == 0
    assert [row["step"] for row in train_rows(run) if row["loss"] is None and row["skipped"]] == [6, 11]
    printed = capsys.readouterr().out
    assert "step 6: loss nan, gradient norm 0.0: update skipped (no token of the batch counts in the loss)\n" in printed
    (record,) = match_runs(str(run.workdir), "curves")
    assert np.flatnonzero(np.isnan(training_losses(record)[1])).tolist() == [5, 10]


@pytest.mark.long
def test_another_batch_size_continues_after_a_rewind(open_run):
    run = open_run("run", nan={9, 10, 11})
    assert train(run) == 0
    half = open_run("run", train__steps=20, train__global_batch_tokens=ROWS // 2 * 32)
    assert train(half, allow_config_change=True) == 0
    assert read_manifest(half.workdir / "checkpoints" / "20").loader["examples"] == 22 * ROWS + 4 * ROWS // 2
    # The skipped examples do not count, and each batch counts with its own size, in every row and in reports.
    by_step = [ROWS * 32 * min(step, 16) + ROWS * 16 * max(step - 16, 0) for step in range(1, 21)]
    assert [row["tokens"] for row in read_metrics(half.workdir / "metrics.jsonl") if row["split"] == "train"] == by_step
    (record,) = match_runs(str(half.workdir), "curves")
    assert record.tokens == by_step[-1]
    assert record.progress(range(1, 21))["tokens"] == by_step
    # An evaluation between two rows, or after the last one, which the logging may leave out.
    record.rows[:] = [row for row in record.rows if row["step"] in (8, 16, 18)]
    assert record.progress(range(1, 21))["tokens"] == by_step


def test_a_rewind_restores_the_newest_step_before_the_bad_steps():
    assert rewind_target([12, 8, 4], 14, 4, from_zero=True) == 12
    assert rewind_target([12, 8, 4], 13, 4, from_zero=True) == 8
    assert rewind_target([], 14, 4, from_zero=True) is None
    assert rewind_target([], 5, 4, from_zero=True) == 0
    assert rewind_target([4], 5, 4, from_zero=True) == 0
    assert rewind_target([4], 6, 4, from_zero=True) == 4
    assert rewind_target([12], 13, 4, from_zero=True) is None
    assert rewind_target([], 4, 4, from_zero=False) is None
    assert rewind_target([12, 8], 11, 4, from_zero=False) == 8


@pytest.fixture
def train_until(open_run, monkeypatch):
    """Return a function from a step and options of `open_run` to a run that a signal has stopped after that step.

    `first` is the step with which the run begins if it has no checkpoint.
    """

    def train_until(step, name="run", first=0, **options):
        run = open_run(name, **options)
        start = Checkpoints(run.workdir).newest() or first
        with monkeypatch.context() as patch:
            patch.setattr(loop, "Interrupt", lambda: StopAfter(step - start))
            assert train(run) == EXIT_PREEMPTED
        return run

    return train_until


@pytest.mark.long
def test_a_run_records_the_weights_with_which_it_began(train_until):
    """The run of `checkpoint.init_from` trains on, so that it has other weights at each start of the second run."""
    base = train_until(4, "base")
    began = read_manifest(base.workdir / "checkpoints" / "4").weights
    for step in (2, 5):
        run = train_until(step, checkpoint__init_from=base.workdir)
        assert read_run_manifest(run.workdir)["source_weights"] == began
        train_until(4 + step, "base")
    train_until(6, checkpoint__init_from=base.workdir)
    assert read_run_manifest(run.workdir)["source_weights"] == began
    assert "source_weights" not in read_run_manifest(base.workdir)
    branch = train_until(8, "branch", 6, checkpoint__branch_from=run.workdir)
    assert read_run_manifest(branch.workdir)["source_weights"] == began


@pytest.mark.long
def test_a_rewind_to_the_start_keeps_its_weights(open_run, train_until, uninterrupted, monkeypatch):
    """The run of `checkpoint.init_from` trains on after the rewind, before the run resumes."""
    base = train_until(4, "base")
    run = open_run("run", nan={1, 2, 3}, checkpoint__init_from=base.workdir)

    def kill(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(protocol, "amend", kill)
        with pytest.raises(Killed):
            train(run)
    began = read_manifest(base.workdir / "checkpoints" / "4").weights
    train_until(8, "base")
    assert train(run) == 0
    assert read_run_manifest(run.workdir)["source_weights"] == began
    assert [entry["step"] for entry in events(run)] == [0]
    other = open_run("other", nan={1, 2, 3}, checkpoint__init_from=base.workdir / "checkpoints" / "4")
    assert train(other) == 0
    assert losses(run) == losses(other)


# Cases: interval and last step of each start but the last one, interval of the last one, index of the first bad batch,
# checkpoints that are kept, the step of the rewind or None for a stop, and the checkpoints when the run stops.
INTERVALS = {
    "lowered": ([(4, 12)], 5, 12, 20, 8, None),
    "raised and lowered": ([(4, 12), (50, 14)], 7, 15, 20, 12, None),
    "raised, and signals before the bad steps": ([(4, 12), (50, 14), (50, 15)], 50, 17, 1, 12, None),
    "raised, and the only checkpoint is right before the bad steps": ([(4, 12)], 50, 12, 1, None, [12]),
    "raised": ([(4, 12)], 50, 13, 20, 12, None),
    "raised early": ([(4, 4)], 50, 4, 20, 0, None),
    "raised before the first checkpoint": ([(4, 3)], 50, 9, 20, 0, None),
    "lowered before the first checkpoint": ([(50, 9)], 4, 9, 20, None, [9]),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "lowered" else pytest.mark.long) for n in INTERVALS])
def test_a_rewind_after_changes_of_the_interval(open_run, train_until, name):
    starts, interval, bad, keep, target, stopped = INTERVALS[name]
    options = {"nan": set(range(bad, bad + 3)), "train__steps": 24, "checkpoint__keep": keep}
    for every_steps, step in starts:
        train_until(step, checkpoint__every_steps=every_steps, **options)
    run = open_run("run", checkpoint__every_steps=interval, **options)
    assert train(run) == (EXIT_FAILED if target is None else 0)
    (entry,) = events(run)
    assert (entry["split"], entry["bad_steps"]) == ("stop" if target is None else "rewind", [bad + 1, bad + 3])
    if target is None:
        assert Checkpoints(run.workdir).steps() == stopped
    else:
        assert entry["step"] == target


@pytest.mark.parametrize(
    ("bad", "keep", "target"),
    [
        (7, 1, 6),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in ((8, 20, 6), (9, 20, 8), (6, 20, None), (8, 1, None))
        ),
    ],
)
def test_a_branch_rewinds_to_the_checkpoint_that_it_began_with(open_run, train_until, brute_force, bad, keep, target):
    """The branch begins with step 6, which is not a multiple of checkpoint.every_steps=4. A signal stops it after 7."""
    source = train_until(6).workdir
    options = {"checkpoint__branch_from": str(source), "checkpoint__keep": keep, "nan": {bad, bad + 1, bad + 2}}
    if bad > 6:
        train_until(7, name="branch", first=6, **options)
    run = open_run("branch", **options)
    assert train(run) == (EXIT_FAILED if target is None else 0)
    (entry,) = events(run)
    assert (entry["split"], entry["bad_steps"]) == ("stop" if target is None else "rewind", [bad + 1, bad + 3])
    if target is not None:
        assert entry["step"] == target
        rows = [row for row in read_metrics(run.workdir / "metrics.jsonl") if row["split"] == "train"]
        expected = brute_force(run, [*range(target), *range(bad + 5, bad + 5 + STEPS - target)])[0]
        assert [row["loss"] for row in rows] == expected[6:]


@pytest.mark.long
def test_a_run_without_its_regular_checkpoints_does_not_return_to_its_start(open_run, train_until, capsys):
    """Only the checkpoint of a signal is left, and the run has had regular ones before it."""
    train_until(9)
    run = train_until(10, checkpoint__every_steps=50)
    for step in (4, 8, 9):
        quarantine(UNLOCKED, run.workdir / "checkpoints" / str(step))
    run = open_run("run", nan={12, 13, 14}, checkpoint__every_steps=50)
    assert train(run) == EXIT_FAILED
    assert "stopped, no regular checkpoint from before step 12 is left" in capsys.readouterr().err
    assert Checkpoints(run.workdir).steps() == [10]


@pytest.mark.long
def test_a_rewind_quarantines_a_corrupt_checkpoint_and_uses_the_one_before(open_run, train_until):
    run = train_until(14)
    flip_a_bit(largest_file(run.workdir / "checkpoints" / "12"))
    run = open_run("run", nan={14, 15, 16}, train__steps=20)
    assert train(run) == 0
    assert [entry["step"] for entry in events(run)] == [8]
    assert [path.parent.name for path in quarantined_in(run.workdir / "checkpoints")] == ["12"]


def test_a_save_that_failed_before_the_bad_steps_does_not_prevent_the_rewind(
    open_run, monkeypatch, brute_force, capsys
):
    """The save after step 8 fails once, and steps 10 to 12 are bad."""
    describe_files, failed = protocol.describe_files, []

    def fail_once(folder, *known):
        if "checkpoints/8/" in str(folder) and not failed:
            failed.append(folder)
            raise OSError(28, "No space left on device")
        return describe_files(folder, *known)

    monkeypatch.setattr(protocol, "describe_files", fail_once)
    run = open_run("run", nan={9, 10, 11})
    assert train(run) == 0
    assert "checkpoint of step 8 was not saved, failure 1 of 3 in a row" in capsys.readouterr().out
    assert [entry["step"] for entry in events(run)] == [4]
    assert losses(run) == brute_force(run, [*range(4), *range(14, 26)])[0]
    assert Checkpoints(run.workdir).steps() == [4, 8, 12, 16]


def oracle(losses, config):
    """Return the first and last bad step when the guard first trips, computed with numpy over lists, or None.

    A loss of None stands for a skipped update.
    """
    good, bad = [], []
    for step, loss in enumerate(losses, 1):
        window = np.array(good[-config.spike_window_steps :], np.float64)
        spike = False
        if loss is not None and config.spike_threshold is not None and len(window) == config.spike_window_steps:
            spread = 1.4826 * np.median(np.abs(window - np.median(window)))
            spike = spread > 0 and (loss - np.median(window)) > config.spike_threshold * spread
        if loss is None or spike:
            bad.append((step, loss))
        else:
            good.append(loss)
            bad = []
        skipped = sum(loss is None for _, loss in bad)
        if skipped >= config.max_skipped or len(bad) - skipped >= config.spike_patience_steps:
            return bad[0][0], step
    return None


def guards_config(**changes):
    defaults = {
        "on_bad_steps": "rewind",
        "max_skipped": 3,
        "skip_steps": 0,
        "max_rewinds": 1,
        "spike_threshold": 4.0,
        "spike_window_steps": 5,
        "spike_patience_steps": 2,
    }
    return GuardsConfig(**(defaults | changes))


def first_trip(losses, config, saved_at=None):
    guard = Guard(config)
    for step, loss in enumerate(losses, 1):
        guard.observe(step, float("nan") if loss is None else loss, skipped=loss is None)
        if guard.tripped is not None:
            return guard.tripped.first, guard.tripped.last
        if saved_at is not None and step >= saved_at and guard.last_step_is_good:
            state, guard, saved_at = json.loads(json.dumps(guard.state())), Guard(config), None
            guard.restore(state)
    return None


def test_guard_agrees_with_the_oracle_also_after_a_restart():
    draw = random.Random(0)
    for _ in range(1000):
        kinds = (lambda: None, lambda: draw.uniform(0, 3), lambda: draw.choice([2.0, 2.1, 50.0, 60.0]))
        losses = [draw.choice(kinds)() for _ in range(draw.randrange(41))]
        config = guards_config(
            spike_window_steps=draw.randint(1, 8),
            spike_patience_steps=draw.randint(1, 4),
            max_skipped=draw.randint(1, 4),
            spike_threshold=draw.choice([None, 1.0, 6.0]),
        )
        expected = oracle(losses, config)
        assert first_trip(losses, config) == expected
        assert first_trip(losses, config, draw.randint(1, 40)) == expected
