"""Checkpoints on disks and in buckets: saves, retention, faults in files, kills, late writers, and copies.

The same tests run on a local disk, on Google Cloud Storage and on S3.
"""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from conftest import ROOT
from etils import epath
from helpers.training_checkpoints import LOADER, check, edit_manifest, flip_a_bit, largest_file, put, restored, state_at

from difftx.errors import RunError, UnreadableError, UserError
from difftx.files import UNLOCKED, Owner, describe_below, list_folder, read_file, remove_file, stored
from difftx.storage.paths import is_bucket
from difftx.training.checkpoint import arrays, protocol
from difftx.training.checkpoint.checkpointer import Checkpointer, Checkpoints
from difftx.training.checkpoint.manifest import (
    MANIFEST,
    is_note,
    note,
    quarantined_in,
    read_manifest,
    steps_in,
    why_invalid,
)
from difftx.training.checkpoint.restoring import restore_state
from difftx.training.state import TrainState


def test_saves_retention_and_leftovers(trainer, save, mesh_of, capsys):
    writer = trainer()
    assert writer.newest() is None
    save(writer, 10, 20, 30)
    writer.close()
    assert writer.steps() == [20, 30]
    assert set(list_folder(writer.folder)) == {"20", "30"}
    put(writer.folder / "40" / "abc-1" / "state" / "d" / "x", b"x")  # A save that was killed.
    put(writer.folder / "40" / MANIFEST, note("abc-1"))
    put(writer.folder / "50" / MANIFEST, note(""))  # A removal that was killed.
    put(writer.folder / "50" / "abc-2" / "x", b"x")
    put(writer.folder / "30" / "abc-3" / "x", b"x")  # A late write of a former owner.
    reader = Checkpoints(writer.folder.parent)
    check(reader, 30, mesh_of())
    assert steps_in(writer.folder) == [20, 30]
    assert set(list_folder(writer.folder)) == {"20", "30", "40", "50"}  # A reader leaves everything as it is.
    capsys.readouterr()
    check(trainer(), 30, mesh_of())
    assert "unfinished save or removal of step 30, 40, 50" in capsys.readouterr().out
    assert set(list_folder(writer.folder)) == {"20", "30"}
    assert not any("/abc-" in name for name in describe_below(writer.folder))  # Random ids may contain "abc".


def edit(change, sign=True):
    return lambda folder: edit_manifest(folder, change, sign)


# Fault in a step's folder → part of the reason.
FAULTS = {
    "flipped bit": (lambda f: flip_a_bit(largest_file(f)), "is corrupt: its "),
    "truncated": (lambda f: put(largest_file(f), read_file(largest_file(f))[:100]), "has 100 bytes, not"),
    "missing file": (lambda f: remove_file(largest_file(f)), " is missing"),
    "manifest truncated": (lambda f: put(f / MANIFEST, read_file(f / MANIFEST)[:200]), "is not JSON"),
    "manifest of garbage": (lambda f: put(f / MANIFEST, b"\xff\xfe\x00"), "not JSON"),
    "manifest changed": (edit(lambda m: m.update(step=3), sign=False), "manifest.json is corrupt"),
    "manifest of another step": (edit(lambda m: m.update(step=3)), "is that of step 3"),
    "manifest without files": (edit(lambda m: m.pop("files")), "the text: no 'files'"),
    "another run's": (edit(lambda m: m.update(run_id="b" * 32)), "another run saved it: its run_id is bbbb"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_corrupt_checkpoint_is_set_aside_and_the_one_before_is_used(trainer, save, mesh_of, capsys, name):
    """It stays as it was, and the step can be saved again."""
    fault, reason = FAULTS[name]
    first = trainer(run_id="a" * 32)
    save(first, 10, 20)
    folder = first.folder / "20"
    fault(folder)
    before, content = describe_below(folder), read_file(folder / MANIFEST)
    reader = Checkpoints(first.folder.parent, run_id="a" * 32)
    assert reader.newest() == 10
    with pytest.raises(UserError, match="step 20: the checkpoint does not verify"):
        reader.require_valid(20)
    with pytest.raises(UserError, match=r"step 30: no such checkpoint; .*checkpoints has 10, 20"):
        reader.require_valid(30)
    assert describe_below(folder).keys() == before.keys()
    writer = trainer(run_id="a" * 32)
    check(writer, 10, mesh_of())
    printed = capsys.readouterr().out
    assert reason in printed
    assert "its manifest is now quarantined-" in printed
    assert steps_in(writer.folder) == [10]
    (marker,) = quarantined_in(writer.folder)
    assert read_file(marker) == content
    assert describe_below(folder).keys() - {marker.name} == before.keys() - {MANIFEST}
    save(writer, 20)
    check(trainer(run_id="a" * 32), 20, mesh_of())
    assert before.keys() - {MANIFEST} <= describe_below(folder).keys()
    assert quarantined_in(writer.folder) == [marker]
    protocol.remove(UNLOCKED, marker)
    check(trainer(run_id="a" * 32), 20, mesh_of())
    assert len(list_folder(folder)) == 2


def test_files_without_a_manifest_are_no_checkpoint_and_stay(trainer, save):
    writer = trainer()
    save(writer, 10, 20)
    for step, before in ((20, 10), (10, None)):
        remove_file(writer.folder / str(step) / MANIFEST)
        kept = describe_below(writer.folder)
        assert trainer().newest() == before
        assert describe_below(writer.folder) == kept


def test_checkpoints_of_another_run_are_put_aside(trainer, save, capsys):
    owner, other = (trainer(run_id=digit * 32) for digit in "ab")
    save(owner, 10)
    save(other, 20)
    assert trainer(run_id="a" * 32).newest() == 10
    assert f"another run saved it: its run_id is {'b' * 32}, not {'a' * 32}" in capsys.readouterr().out
    protocol.remove(UNLOCKED, owner.folder / "10")
    with pytest.raises(UserError, match="there are checkpoints, but none verifies"):
        trainer(run_id="a" * 32).newest()
    assert [(marker.parent.name, steps_in(owner.folder)) for marker in quarantined_in(owner.folder)] == [("20", [])]


def test_arrays_are_restored_on_other_meshes(trainer, config, mesh_of, monkeypatch):
    """Restore arrays of eight devices, saved in chunks of at most 32 bytes, on one device and on other meshes."""
    monkeypatch.setattr(arrays, "CHUNK_BYTES", 32)  # A shard of "w" has 64 bytes.
    random_, mesh = np.random.default_rng(0), mesh_of(fsdp=4, tensor=2)
    values = {
        "w": (random_.standard_normal((16, 8)).astype("float32"), jax.P("fsdp", "tensor")),
        "v": (random_.standard_normal((3, 8)).astype(jnp.bfloat16), jax.P(None, "fsdp")),
        "n": (random_.integers(9, size=5).astype("int32"), jax.P()),
    }
    placed = {name: jax.device_put(x, jax.NamedSharding(mesh, spec)) for name, (x, spec) in values.items()}
    writer = trainer()
    writer.save(TrainState(jnp.int32(7), placed, {"mu": placed["w"]}), LOADER, config())
    writer.close()
    for other in (mesh_of(), mesh_of(fsdp=8), mesh_of(data=2, fsdp=2, tensor=2)):
        wanted = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(other, jax.P(*reversed(spec))))
            if x.ndim == 2 and name == "w"
            else jax.ShapeDtypeStruct(x.shape, x.dtype)
            for name, (x, spec) in values.items()
        }
        abstract = TrainState(jax.ShapeDtypeStruct((), "int32"), wanted, {"mu": wanted["w"]})
        state = restore_state(read_manifest(writer.folder / "7"), abstract, other)
        for name, (x, _) in values.items():
            np.testing.assert_array_equal(state.params[name], x)
            assert state.params[name].sharding.mesh == other
        np.testing.assert_array_equal(state.opt_state["mu"], values["w"][0])


def test_orbax_restores_the_arrays(trainer, save, tmp_path):
    writer = trainer()
    save(writer, 10)
    contents = read_manifest(writer.folder / "10").contents
    if str(contents).startswith("s3:"):  # orbax does not read s3://, but a copy.
        for name in describe_below(contents):
            put(tmp_path / name, read_file(contents / name))
        contents = tmp_path
    expected = state_at(10).parts()
    args = ocp.args.PyTreeRestore(expected, restore_args=ocp.checkpoint_utils.construct_restore_args(expected))
    found = ocp.PyTreeCheckpointHandler().restore(epath.Path(contents / "state"), args=args)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


WRITE_TO_A_FULL_DISK = """
import pathlib, resource, sys
import jax
from difftx.training.checkpoint import arrays
sharding = jax.NamedSharding(jax.make_mesh((4,), ("data",)), jax.P("data"))
tree = {f"a{i}": jax.device_put(jax.random.normal(jax.random.key(i), (400, 1000)), sharding) for i in range(12)}
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, -1))
try:
    arrays.start_write(pathlib.Path(sys.argv[1]), tree)()
except RuntimeError as error:
    print(error)
"""


@pytest.mark.long
def test_a_full_disk_ends_a_save_in_one_line(tmp_path):
    command = [sys.executable, "-B", "-c", WRITE_TO_A_FULL_DISK, tmp_path]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert (ended.stdout, ended.stderr) == (
        f"{tmp_path} cannot be written: File too large; run the same command again\n",
        "",
    )


# What a save, a quarantine or a removal asks of the storage, in the module that calls it.
REQUESTS = {
    protocol: ("stored", "unreferenced", "_delete", "describe_files"),
    Owner: ("write_if", "delete_if"),
    arrays: ("start_write",),
}


def test_a_kill_at_any_request_leaves_a_valid_checkpoint_or_none(trainer, save, mesh_of, config, monkeypatch):
    """Kill the process before the first, second, … request of a save and of the removal of an old checkpoint."""
    first = trainer()
    save(first, 10, 20)
    for requests in range(40):
        writer = trainer()
        assert writer.newest() == 20
        counted = iter(range(requests))

        def counting(request, counted=counted):
            def counted_request(*args):
                if next(counted, None) is None:
                    raise KeyboardInterrupt
                return request(*args)

            return counted_request

        with monkeypatch.context() as patch:
            for where, functions in REQUESTS.items():
                for name in functions:
                    patch.setattr(where, name, counting(getattr(where, name)))
            writer.save(state_at(30), LOADER, config())
            died = isinstance(writer._saving[1].exception(), KeyboardInterrupt)
        after = trainer()
        if not died:
            check(after, 30, mesh_of())
            break
        found = after.newest()
        assert found in (20, 30)
        check(after, found, mesh_of())
        assert set(list_folder(after.folder)) <= {"10", "20", str(found)}
        if found == 30:  # The kill came after the manifest.
            protocol.remove(UNLOCKED, after.folder / "30")
        if after.steps() == [20]:
            save(after, 10)
    assert requests > 10


def test_a_late_writer_cannot_commit_or_change_a_checkpoint(trainer, save, mesh_of, config, monkeypatch):
    """A process is frozen between its check and its commit. The next owner saves the same step."""
    frozen = trainer()
    save(frozen, 10)
    commit = protocol.Save._commit
    later = []
    monkeypatch.setattr(protocol.Save, "_commit", lambda self, text: later.append((self, text)))
    frozen.save(state_at(20), LOADER, config())
    assert frozen._saving[1].exception() is None
    monkeypatch.setattr(protocol.Save, "_commit", commit)
    owner = trainer()
    check(owner, 10, mesh_of())
    ((late, text),) = later
    with pytest.raises(RunError, match="another process has taken over this run"):
        late._commit(text)
    save(owner, 20)
    with pytest.raises(RunError, match="another process has taken over this run"):
        late._commit(text)
    arrays.start_write(late._folder / late._contents, vars(state_at(5)))()
    check(trainer(), 20, mesh_of())


@pytest.fixture
def owner_saves(trainer, save):
    """Return a function that makes a hook. At its first call, the hook lets another process take over and save a step.

    The hook is called where the owner of the lock is frozen, after a request or a check that has succeeded.
    """

    def made(step):
        waiting = [step]

        def interfere():
            if waiting:
                save(trainer(), waiting.pop())

        return interfere

    return made


def test_a_late_reservation_does_not_replace_a_manifest(trainer, save, mesh_of, owner_saves, capsys):
    save(trainer(), 10)
    save(trainer(owner=Owner(check=owner_saves(20))), 20)
    assert "another process saves this checkpoint" in capsys.readouterr().out
    check(trainer(), 20, mesh_of())


@pytest.mark.parametrize("operation", ["leftovers", "quarantine", "retention"])
def test_a_late_removal_does_not_delete_the_next_owners_manifest(
    trainer, save, mesh_of, owner_saves, monkeypatch, operation
):
    writer = trainer()
    if operation == "leftovers":
        save(writer, 10)
        put(writer.folder / "20" / MANIFEST, note("abc-1"))
        read, interfere = stored, owner_saves(20)

        def read_and_freeze(path):
            found = read(path)
            if found is not None and is_note(found.content):
                interfere()
            return found

        monkeypatch.setattr(protocol, "stored", read_and_freeze)
        trainer().newest()
        step = 20
    elif operation == "quarantine":
        if not is_bucket(writer.folder):
            pytest.skip("a process that is frozen keeps its lock of a disk")
        save(writer, 10, 20)
        flip_a_bit(largest_file(writer.folder / "20"))
        trainer(owner=Owner(check=owner_saves(20))).newest()
        step = 20
    else:
        save(writer, 10, 20)
        interfere = owner_saves(10)
        late = trainer(owner=Owner(check=lambda: interfere() if 30 in steps_in(writer.folder) else None))
        save(late, 30)
        step = 10
    folder = writer.folder / str(step)
    assert why_invalid(folder, step=step, content=True) is None
    jax.tree.map(np.testing.assert_array_equal, restored(trainer(), step, mesh_of()), state_at(step))


@pytest.mark.parametrize("fault", ["lost reply", "another process failed"])
def test_a_commit_of_unknown_outcome_keeps_the_files(trainer, save, mesh_of, monkeypatch, capsys, fault):
    writer = trainer()
    save(writer, 10)
    write_if, exchange = Owner.write_if, protocol.exchange

    def lose_reply(*args):
        written = write_if(*args)
        if not is_note(args[2]):
            raise UnreadableError("all retries failed")
        return written

    def fail_elsewhere(name, *args):
        found = exchange(name, *args)
        if name.endswith(", manifest"):
            raise RunError("process 1: failed")
        return found

    with monkeypatch.context() as patch:
        if fault == "lost reply":
            patch.setattr(Owner, "write_if", lose_reply)
        else:
            patch.setattr(protocol, "exchange", fail_elsewhere)
        save(writer, 20)
    assert "step 20 was not saved" in capsys.readouterr().out
    check(trainer(), 20, mesh_of())


def test_a_lost_lock_ends_the_saves(trainer, save):
    def lost():
        raise RunError("another process has the lock")

    writer = trainer(owner=Owner(check=lost))
    with pytest.raises(RunError, match="another process has the lock"):
        save(writer, 10)
    assert list_folder(writer.folder) == {}


def test_a_copy_elsewhere_is_a_checkpoint_there(bucket, trainer, save, mesh_of, tmp_path, config):
    """Copy a checkpoint to a bucket and back, as users do."""
    writer = trainer()
    save(writer, 10)
    copies = [writer.folder]
    for workdir in (bucket.folder(), tmp_path / "back"):
        for name in describe_below(copies[-1]):
            put(workdir / "checkpoints" / name, read_file(copies[-1] / name))
        copies.append(workdir / "checkpoints")
        check(Checkpointer(workdir, config().checkpoint), 10, mesh_of())
    flip_a_bit(largest_file(copies[-1] / "10"))
    assert "is corrupt" in why_invalid(copies[-1] / "10", content=True)
