"""Runs that resume after corrupt, truncated or unfinished checkpoints, and after failed saves."""

import functools
import json
import os
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import replace, write_text
from helpers.model_layers import MUP
from helpers.training_checkpoints import LOADER, edit_manifest, flip_a_bit, largest_file, names, state_at

from difftx import registry
from difftx.config.build import override
from difftx.data.sources import Sources, load_sources
from difftx.data.tokenizers import load_tokenizer
from difftx.errors import RunError, UserError
from difftx.registry import Extension
from difftx.training.checkpoint import protocol
from difftx.training.checkpoint.checkpointer import Checkpointer, Checkpoints
from difftx.training.checkpoint.manifest import MANIFEST, describe_files
from difftx.training.resume import restore
from difftx.training.run import Run
from difftx.training.state import TrainState


def test_verify_sizes_misses_a_flipped_bit_but_not_a_truncated_file(saved_20_and_40, tmp_path, config):
    folder = saved_20_and_40
    flip_a_bit(largest_file(folder / "40"))
    by_size = replace(config(), "checkpoint", verify="sizes").checkpoint
    assert Checkpointer(tmp_path, by_size).newest() == 40
    os.truncate(largest_file(folder / "40"), 100)
    assert Checkpointer(tmp_path, by_size).newest() == 20


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        ({"keep": 2}, ["40", "50"]),
        ({"keep": 2, "every_steps": 20}, ["20", "40", "50"]),  # Checkpoints of other steps come from signals.
        ({"keep": 1, "keep_every_steps": 20}, ["20", "40", "50"]),
        ({"keep": 1, "keep_best": "loss/loss", "keep_best_mode": "min"}, ["30", "50"]),
        ({"keep": 1, "keep_best": "loss/loss", "keep_best_mode": "max"}, ["20", "50"]),
    ],
)
def test_retention_keeps_the_steps_of_its_rule(saved, tmp_path, rule, kept):
    evals = tmp_path / "evals" / "loss"
    evals.mkdir(parents=True)
    for step, loss in {10: 4.0, 20: 5.0, 30: 1.0, 40: None}.items():
        result = {"numbers": {"loss": loss}, "valid": None, "options": {"eval": {}}}
        (evals / f"{step}.json").write_text(json.dumps(result))
    assert names(saved(10, 20, 30, 40, 50, **rule)) == kept


def test_a_rolling_checkpoint_stays_until_the_next_checkpoint_is_complete(config, tmp_path, monkeypatch):
    """The clock is that of the test. Regular checkpoints are kept as without rolling ones between them."""
    c, now = config(checkpoint__keep=2, checkpoint__every_steps=10, checkpoint__every_minutes=5), [0.0]
    monkeypatch.setattr("difftx.training.checkpoint.checkpointer.time.monotonic", lambda: now[0])
    writer, seen, remove = Checkpointer(tmp_path, c.checkpoint), [], protocol.remove

    def removed(owner, folder):
        seen.append(names(folder.parent))
        remove(owner, folder)

    monkeypatch.setattr(protocol, "remove", removed)
    kept = []
    for step, is_rolling in ((10, False), (12, True), (14, True), (20, False), (22, True), (30, False), (31, True)):
        now[0] += 299
        assert not writer.is_due()
        now[0] += 1
        assert writer.is_due()
        writer.save_and_wait(state_at(step), LOADER | ({"rolling": True} if is_rolling else {}), c)
        kept.append(names(tmp_path / "checkpoints"))
    assert [" ".join(steps) for steps in kept] == ["10", "10 12", "10 14", "10 20", "10 20 22", "20 30", "20 30 31"]
    assert seen[0] == ["10", "12", "14"]  # The new one is complete before the old one is deleted.
    writer.close()
    assert Checkpointer(tmp_path, c.checkpoint).newest() == 31


@pytest.mark.parametrize(
    ("sets", "tokens", "kept"),
    [
        ("aaaa", (9, 9, 9, 9), ["20", "40"]),
        ("aaab", (9, 9, 9, 9), ["20", "40"]),  # Somebody has evaluated the newest step on another text.
        ("aaaa", (9, 9, 9, 8), ["20", "40"]),  # And here on fewer tokens.
        ("bbaa", (9, 9, 9, 9), ["30", "40"]),
        ("aaaa", (8, 8, 9, 9), ["30", "40"]),  # The run resumed with another `eval.loss_tokens`.
    ],
)
def test_the_best_checkpoint_is_one_of_those_that_the_run_itself_has_measured(config, tmp_path, sets, tokens, kept):
    c = config(checkpoint__keep=1, checkpoint__keep_best="loss/loss", eval__loss_tokens=9, eval__every_steps=10)
    evals = tmp_path / "evals" / "loss"
    evals.mkdir(parents=True)
    for step, loss, name, count in zip((10, 20, 30, 40), (2.0, 1.0, 3.0, 4.0), sets, tokens, strict=True):
        result = {"numbers": {"loss": loss}, "valid": {"valid": name}, "options": {"eval": {"loss_tokens": count}}}
        (evals / f"{step}.json").write_text(json.dumps(result))
    writer = Checkpointer(tmp_path, replace(c, "checkpoint", keep=9, keep_best=None).checkpoint)
    for step in (10, 20, 30):
        writer.save(state_at(step), LOADER | {"valid": {"valid": "a"}}, c)
    writer.close()
    writer = Checkpointer(tmp_path, c.checkpoint)
    writer.save_and_wait(state_at(40), LOADER | {"valid": {"valid": "a"}}, c)
    writer.close()
    assert names(tmp_path / "checkpoints") == kept


def test_checkpoint_with_a_missing_file_stays_and_is_not_counted(saved):
    folder = saved(10, 20, 30, keep=3)
    largest_file(folder / "20").unlink()
    assert names(saved(40, keep=3)) == ["10", "20", "30", "40"]
    assert names(saved(50, keep=3)) == ["20", "30", "40", "50"]


def test_unknown_number_in_keep_best_deletes_nothing_and_is_reported(saved, tmp_path, capsys):
    (tmp_path / "evals" / "loss").mkdir(parents=True)
    (tmp_path / "evals" / "loss" / "10.json").write_text('{"numbers": {"loss": 1.0}}')
    assert names(saved(10, 20, keep=1, keep_best="loss/los")) == ["10", "20"]
    assert "has no number 'los'; it has loss" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint__keep_best": "loss"}, "write SUITE/NUMBER"),
        ({"checkpoint__keep_best": "sample/x"}, "sample is not one of eval.suites"),
        ({"checkpoint__keep_best": "loss/loss", "eval__every_steps": 7}, "does not divide checkpoint.every_steps"),
        ({"checkpoint__max_failed_saves": 0}, "must be positive"),
    ],
)
def test_invalid_checkpoint_config_is_rejected(config, changes, message):
    with pytest.raises(UserError, match=message):
        config(**changes)


@pytest.fixture
def full_disk(monkeypatch):
    """Return a list. While it is not empty, writing manifests fails as on a full disk."""
    fails = []

    def write(*args):
        if fails:
            raise OSError(28, "No space left on device")
        return describe_files(*args)

    monkeypatch.setattr(protocol, "describe_files", write)
    return fails


def test_a_failed_save_is_reported_and_tried_again(config, tmp_path, capsys, full_disk):
    c = config()
    writer = Checkpointer(tmp_path, c.checkpoint)
    writer.save_and_wait(state_at(10), LOADER, c)
    full_disk.append(True)
    writer.save(state_at(20), LOADER, c)
    writer._saving[1].exception()  # Wait for the thread. The training loop calls `record_finished_save` after a step.
    writer.record_finished_save()
    told = capsys.readouterr().out
    assert "checkpoint of step 20 was not saved, failure 1 of 3 in a row: OSError: [Errno 28] No space left" in told
    assert names(tmp_path / "checkpoints") == ["10"]
    full_disk.clear()
    writer.save_and_wait(state_at(20), LOADER, c)
    full_disk.append(True)
    writer.save(state_at(30), LOADER, c)
    writer.close()
    assert "failure 1 of 3" in capsys.readouterr().out  # The successful save has reset the count.
    with pytest.raises(RunError, match=r"step 40 was not saved, failure 3 of 3 .*No space left on device"):
        Checkpointer(tmp_path, c.checkpoint).save_and_wait(state_at(40), LOADER, c)
    assert names(tmp_path / "checkpoints") == ["10", "20"]
    assert Checkpoints(tmp_path).newest() == 20


# ── Starting state of a run ──


@pytest.fixture(scope="module")
def begin(config, mesh_of, tmp_path_factory):
    """Return a function that starts a run in a workdir of a folder, and saves a checkpoint if `save`.

    The function returns the state, the step from which the run starts, and the number of consumed examples.
    """
    text_file = write_text(tmp_path_factory.mktemp("text") / "text.txt")

    def begin(folder, name, save=False, allow=False, **changes):
        base = {"data__path": text_file, "data__tokenizer": "bytes"}
        c = override(config(**base), {k.replace("__", "."): str(v) for k, v in changes.items()})
        encoding = load_tokenizer(c.data.tokenizer)
        run = Run(c, folder / name, mesh_of(), encoding, load_sources(c.data, encoding))
        checkpointer = Checkpointer(run.workdir, c.checkpoint)
        with jax.set_mesh(run.mesh):
            state = restore(run, checkpointer, allow_config_change=allow)
            begun = state.train, state.step, state.loader.state()["examples"]
            if save:
                next(state.loader)
                params = jax.tree.map(lambda x: x + 1, state.train.params)
                state.train = TrainState(jnp.int32(1), params, state.train.opt_state)
                state.save(wait=True)
        checkpointer.close()
        return state.train, *begun[1:]

    return begin


@pytest.fixture
def start(begin, tmp_path):
    """Return `begin` for the folder of the test."""
    return functools.partial(begin, tmp_path)


@pytest.fixture(scope="module")
def saved_run(begin, tmp_path_factory):
    """Return the folder of a run with the checkpoint of step 1."""
    folder = tmp_path_factory.mktemp("saved")
    begin(folder, "a", save=True)
    return folder / "a"


@pytest.fixture
def run_a(saved_run, tmp_path):
    """Return the test's own copy of the run, which is the workdir "a" of `start`."""
    return shutil.copytree(saved_run, tmp_path / "a")


@pytest.mark.long
def test_own_checkpoint_precedes_other_weights_and_new_parameters(start, tmp_path):
    theirs, step, _ = start("a", save=True)
    assert step == 0
    for source in (tmp_path / "a", tmp_path / "a" / "checkpoints" / "1"):
        state, step, examples = start(f"b{source.name}", train__seed=7, checkpoint__init_from=source)
        jax.tree.map(np.testing.assert_array_equal, state.params, theirs.params)
        assert (step, int(state.step), examples) == (0, 0, 0)
    own, _, _ = start("c", save=True, train__seed=9)
    state, step, examples = start("c", train__seed=9, checkpoint__init_from=tmp_path / "a", allow=True)
    jax.tree.map(np.testing.assert_array_equal, state, own)
    assert (step, examples) == (1, 8)


def test_parameters_of_another_model_are_named(start, tmp_path, capsys, monkeypatch):
    start("a", save=True, model__lambda_init=0.5)
    folder = tmp_path / "a" / "checkpoints" / "1"
    known = [{"path": "mine.py", "sha256": "0" * 64}]
    edit_manifest(folder, lambda manifest: manifest.update(extensions=known))
    loaded = {Path("mine.py"): Extension("mine.py", "1" * 64)}
    monkeypatch.setattr(registry, "_extensions", loaded)
    changes = {
        "model__rope_theta": 500_000.0,
        "model__rope_scaling__factor": 8.0,
        "model__window": 16,
        "model__post_scale": 0.2,
        # These do not change the outputs of given parameters.
        "model__zero_init_output": "true",
        "model__init": "normal",
        "model__remat": "full",
        "model__head_dim": 8,
    }
    capsys.readouterr()
    start("b", checkpoint__init_from=folder, **changes)
    assert capsys.readouterr().out.splitlines() == [
        f"parameters from {folder}",
        *(
            f"{change}, other than in the run of the parameters"
            for change in (
                "model.rope_theta: 10000.0 → 500000.0",
                "model.rope_scaling.factor: 1.0 → 8.0",
                "model.window: None → 16",
                "model.lambda_init: 0.5 → None",
                "model.post_scale: None → 0.2",
                "extension mine.py, or a module that it imports (SHA-256 000000000000… → 111111111111…)",
            )
        ),
    ]


def test_other_packages_and_source_files_than_those_of_the_checkpoint_are_printed(start, run_a, tmp_path, capsys):
    folder = tmp_path / "a" / "checkpoints" / "1"
    today = json.loads((folder / MANIFEST).read_text())
    source, packages = today["source_sha256"], today["packages"]
    old = packages | {"jax": "0.4.1", "a-package-of-old": "1"}
    since = "since the checkpoint of step 1"
    changes = [
        f"jax: 0.4.1 → {packages['jax']}, {since}",
        f"source files of difftx (SHA-256): 000000000000… → {source[:12]}…, {since}",
    ]
    for recorded, printed in (({}, []), ({"source_sha256": "0" * 64, "packages": old}, changes)):
        edit_manifest(folder, lambda m, recorded=recorded: m.update(recorded))
        capsys.readouterr()
        assert start("a")[1] == 1
        assert [line for line in capsys.readouterr().out.splitlines() if since in line] == printed


def test_another_origin_than_that_of_the_checkpoint_is_not_safe(start, run_a, tmp_path, capsys):
    message = f"checkpoint.init_from: None → {tmp_path}, without effect on this run, which started from new parameters"
    with pytest.raises(UserError, match=f"{message}; restore what changed"):
        start("a", checkpoint__init_from=tmp_path)
    start("a", checkpoint__init_from=tmp_path, allow=True)
    assert f"changed since the checkpoint: {message} (not safe)" in capsys.readouterr().out.splitlines()
    start("b", checkpoint__branch_from=tmp_path / "a")
    start("b", checkpoint__branch_from=tmp_path / "a")
    with pytest.raises(
        UserError, match=rf"branch_from: .*, without effect on this run, which started from {tmp_path}/a;"
    ):
        start("b", checkpoint__branch_from=tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__mlp_dim": 96}, r"params/blocks/mlp/down_FD is not \(2, 96, 32\) float32 there"),
        (MUP, r"init_from=.* has model\.mup_base_width=None, and this model 8; use the same"),
        ({"checkpoint__init_from": "nowhere"}, "init_from=nowhere: neither a run with checkpoints nor"),
        ({"checkpoint__init_from": "begun"}, "init_from=.*begun: neither a run with checkpoints nor .*convert`"),
        ({"checkpoint__init_from": "damaged"}, "init_from=.*damaged: the checkpoint does not verify: .* is missing"),
    ],
)
def test_incompatible_weights_are_rejected(start, run_a, tmp_path, changes, message):
    if changes.get("checkpoint__init_from") == "damaged":
        shutil.copytree(tmp_path / "a" / "checkpoints" / "1", tmp_path / "damaged")
        largest_file(tmp_path / "damaged").unlink()
        changes = {"checkpoint__init_from": tmp_path / "damaged"}
    if changes.get("checkpoint__init_from") == "begun":  # A run that has no checkpoint yet.
        (tmp_path / "begun").mkdir()
        for name in ("config.json", MANIFEST):
            (tmp_path / "begun" / name).write_text("{}")
        changes = {"checkpoint__init_from": tmp_path / "begun"}
    with pytest.raises(UserError, match=message):
        start("b", **({"checkpoint__init_from": tmp_path / "a"} | changes))
    assert not (tmp_path / "b" / "checkpoints").exists()


@pytest.mark.long
def test_weights_of_another_tokenizer_are_refused(start, run_a, tmp_path):
    edit_manifest(tmp_path / "a" / "checkpoints" / "1", lambda m: m["loader"]["signature"].update(tokenizer="another"))
    with pytest.raises(UserError, match="was trained with another tokenizer than data"):
        start("b", checkpoint__init_from=tmp_path / "a")


def test_another_setting_of_the_suites_is_printed_with_its_effect_on_the_best_checkpoint(start, run_a, capsys):
    for keep_best in ({}, {"checkpoint__keep_best": "loss/loss", "eval__every_steps": 1}):
        capsys.readouterr()
        start("a", eval__loss_tokens=64, **keep_best)
        (line,) = (line for line in capsys.readouterr().out.splitlines() if "eval.loss_tokens" in line)
        end = (
            "safe; checkpoint.keep_best compares only results with equal settings of its suite" if keep_best else "safe"
        )
        assert line.endswith(f" → 64 ({end})")


def test_another_validation_set_than_that_of_the_checkpoint_is_printed(start, run_a, tmp_path, capsys, monkeypatch):
    assert start("a")[1] == 1
    assert "validation" not in capsys.readouterr().out
    monkeypatch.setattr(Sources, "valid_fingerprints", {"valid": "0" * 64})
    assert start("a")[1] == 1
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "validation" in line)
    assert re.fullmatch(
        r"changed since the checkpoint: validation set valid [0-9a-f]{12}… → 000000000000… \(allowed, but losses on it "
        r"up to step 1 cannot be compared with later ones\)",
        line,
    )
    # The results of the source of a branch are elsewhere.
    for name, origin in (("b", {"checkpoint__branch_from": tmp_path / "a"}), ("a", {})):
        start(name, checkpoint__keep_best="loss/loss", eval__every_steps=1, **origin)
        (line,) = (line for line in capsys.readouterr().out.splitlines() if "validation set" in line)
        assert ("keep_best" in line) == (name == "a")


@pytest.mark.long
def test_safe_changes_pass_and_unsafe_ones_need_the_flag(start, run_a, tmp_path, text_file, capsys):
    moved = tmp_path / "moved.txt"
    shutil.copy(text_file, moved)
    safe = {
        "train__steps": 50,
        "train__accumulation": 2,
        "eval__every_steps": 3,
        "logging__every_steps": 7,
        "checkpoint__keep": 9,
        "model__remat": "full",
        "data__prefetch_batches": 9,
        "data__path": moved,
    }
    capsys.readouterr()
    assert start("a", **safe)[1] == 1
    printed = capsys.readouterr().out
    assert printed.count("(safe)") == len(safe) - 1
    assert "train.steps: 6 → 50 (allowed; the learning rate may jump, because it now follows 50 steps)" in printed
    assert "(not safe)" not in printed
    for unsafe, old in {
        ("optimizer__learning_rate", 0.5): None,
        ("train__seed", 4): "train.seed: 0 → 4",
        ("data__seed", 4): "data.seed: 0 → 4",
        ("train__global_batch_tokens", 128): "train.global_batch_tokens: 256 → 128",
        ("model__norm_eps", 1e-3): "model.norm_eps: 1e-05 → 0.001",
    }.items():
        changes = dict([unsafe])
        with pytest.raises(
            UserError, match=r"changed since the checkpoint of step 1: .*--allow_config_change$"
        ) as error:
            start("a", **changes)
        assert "\n" not in str(error.value)
        assert old is None or old in str(error.value)
        assert start("a", allow=True, **changes)[1] == 1
    moved.write_text(text_file.read_text() + "another line\n")
    with pytest.raises(UserError, match=r"data\.path: .*moved\.txt"):
        start("a", data__path=moved)
