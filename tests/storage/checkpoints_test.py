"""Checkpoints in buckets: saves, retention, quarantine, crashes, late writers, and copies to local disks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import replace
from helpers.training_checkpoints import LOADER, state_at

from difftx import files
from difftx.errors import RunError, UnreadableError, UserError
from difftx.files import UNLOCKED, Owner
from difftx.storage import objects
from difftx.training.checkpoint import arrays
from difftx.training.checkpoint import bucket as protocol
from difftx.training.checkpoint.checkpointer import Checkpointer
from difftx.training.checkpoint.manifest import (
    MANIFEST,
    contents_of,
    is_reservation,
    quarantined_in,
    read_manifest,
    steps_in,
    why_invalid,
)
from difftx.training.checkpoint.retention import quarantine, remove, remove_leftovers
from difftx.training.state import TrainState


@pytest.fixture
def trainer(bucket, config):
    """Return a function that opens the checkpoints of one folder, as a restarted training does."""
    workdir = bucket.folder()

    def opened(**options):
        settings = replace(config(), "checkpoint", keep=2, every_steps=10).checkpoint
        return Checkpointer(workdir, settings, save_seconds=60, **options)

    return opened


@pytest.fixture
def save(config):
    def saved(checkpointer, *steps, size=3):
        for step in steps:
            checkpointer.save(state_at(step, size), LOADER, config())
            checkpointer.wait()

    return saved


def restored(checkpointer, step, mesh, size=3):
    return checkpointer.restore(step, jax.eval_shape(lambda: state_at(0, size)), mesh)


def check(checkpointer, step, mesh):
    assert checkpointer.newest() == step
    state, loader = restored(checkpointer, step, mesh)
    jax.tree.map(np.testing.assert_array_equal, state, state_at(step))
    assert loader == LOADER


def test_saves_retention_and_leftovers(bucket, trainer, save, mesh_of):
    writer = trainer()
    assert writer.newest() is None
    save(writer, 10, 20, 30)
    writer.close()
    assert writer.steps() == [20, 30]
    assert {name.partition("/")[0] for name in objects.list_below(writer.folder)} == {"20", "30"}
    objects.write(writer.folder / "40" / "abc-1" / "state" / "d" / "x", b"x")  # A save without a manifest yet.
    objects.write_if(writer.folder / "50" / MANIFEST, b'{"writing": "abc-2"}', None)
    objects.write(writer.folder / "30" / "abc-3" / "x", b"x")
    reader = Checkpointer(writer.folder.parent)
    check(reader, 30, mesh_of())
    assert steps_in(writer.folder) == [20, 30]
    check(trainer(), 30, mesh_of())
    left = objects.list_below(writer.folder)
    assert {name.partition("/")[0] for name in left} == {"20", "30"}
    assert not any("/abc-" in name for name in left)  # Random ids may contain "abc".


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
        state, _ = writer.restore(7, abstract, other)
        for name, (x, _) in values.items():
            np.testing.assert_array_equal(state.params[name], x)
            assert state.params[name].sharding.mesh == other
        np.testing.assert_array_equal(state.opt_state["mu"], values["w"][0])


def corrupt(path):
    content = bytearray(objects.read(path).content)
    content[len(content) // 2] ^= 1
    objects.write(path, bytes(content))


def largest(folder):
    return max(objects.describe_below(folder).items(), key=lambda item: item[1].size)[0]


def test_a_damaged_checkpoint_is_quarantined_and_saved_again(trainer, save, mesh_of, capsys):
    writer = trainer()
    save(writer, 10, 20)
    contents = contents_of(writer.folder / "20")
    corrupt(contents / largest(contents))
    assert "is corrupt: its " in why_invalid(writer.folder / "20", content=True)
    assert why_invalid(writer.folder / "20", content=False) is None
    again = trainer()
    check(again, 10, mesh_of())
    assert "is corrupt" in capsys.readouterr().out
    assert steps_in(writer.folder) == [10]
    (marker,) = quarantined_in(writer.folder)
    files_before = objects.list_below(contents)
    save(again, 20)
    check(trainer(), 20, mesh_of())
    assert quarantined_in(writer.folder) == [marker]
    assert objects.list_below(contents) == files_before  # The quarantined checkpoint is as it was.


def test_a_quarantined_checkpoint_is_taken_back_if_no_other_verifies(trainer, save, mesh_of, capsys):
    writer = trainer()
    save(writer, 10, 20)
    quarantine(writer.folder / "20")
    contents = contents_of(writer.folder / "10")
    objects.delete([contents / largest(contents)])
    check(trainer(), 20, mesh_of())
    assert "verifies, and no other does" in capsys.readouterr().out
    (marker,) = quarantined_in(writer.folder)
    assert marker.parent.name == "10"
    remove([marker])
    assert {name.partition("/")[0] for name in objects.list_below(writer.folder)} == {"20"}
    contents = contents_of(writer.folder / "20")
    objects.delete([contents / largest(contents)])
    for _ in range(2):
        with pytest.raises(UserError, match="there are checkpoints, but none verifies"):
            trainer().newest()


def test_a_kill_at_any_request_leaves_a_valid_checkpoint_or_none(trainer, save, mesh_of, config, monkeypatch):
    """Kill the process before the first, second, … request of a save."""
    first = trainer()
    save(first, 10)
    for requests in range(30):
        writer = trainer()
        assert writer.newest() == 10
        counted = iter(range(requests))

        def counting(request, counted=counted):
            def counted_request(*args):
                if next(counted, None) is None:
                    raise KeyboardInterrupt
                return request(*args)

            return counted_request

        with monkeypatch.context() as patch:
            for name in ("read", "write", "write_if", "describe_below", "delete"):
                patch.setattr(objects, name, counting(getattr(objects, name)))
            patch.setattr(arrays, "write_shards", counting(arrays.write_shards))
            writer.save(state_at(20), LOADER, config())
            died = isinstance(writer._saving[1].exception(), KeyboardInterrupt)
        after = trainer()
        if not died:
            check(after, 20, mesh_of())
            break
        found = after.newest()
        assert found in (10, 20)
        check(after, found, mesh_of())
        if found == 20:  # The kill came after the manifest, the last request of the save itself.
            remove([after.folder / "20"])
        assert {name.partition("/")[0] for name in objects.list_below(after.folder)} == {"10"}
    assert requests > 5


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
    arrays.write_shards(late._folder / late._contents, arrays.copy_shards(vars(state_at(5))))
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
    save(trainer(owner=Owner(owner_saves(20))), 20)
    assert "another process saves this checkpoint" in capsys.readouterr().out
    check(trainer(), 20, mesh_of())


@pytest.mark.parametrize("operation", ["leftovers", "quarantine", "retention"])
def test_a_late_removal_does_not_delete_the_next_owners_manifest(
    trainer, save, mesh_of, owner_saves, monkeypatch, operation
):
    writer = trainer()
    if operation == "leftovers":
        save(writer, 10)
        objects.write_if(writer.folder / "20" / MANIFEST, b'{"writing": "abc-1"}', None)
        read, interfere = objects.read, owner_saves(20)

        def read_and_freeze(path):
            found = read(path)
            if found is not None and is_reservation(found.content):
                interfere()
            return found

        monkeypatch.setattr(objects, "read", read_and_freeze)
        trainer().newest()
        step = 20
    elif operation == "quarantine":
        save(writer, 10, 20)
        contents = contents_of(writer.folder / "20")
        corrupt(contents / largest(contents))
        trainer(owner=Owner(owner_saves(20))).newest()
        step = 20
    else:
        save(writer, 10, 20)
        interfere = owner_saves(10)
        saved = writer.folder.parent / "saved.json"
        late = trainer(owner=Owner(lambda: interfere() if files.read_file(saved) == b'{"step": 30}\n' else None))
        save(late, 30)
        step = 10
    folder = writer.folder / str(step)
    assert why_invalid(folder, step=step, content=True) is None
    jax.tree.map(np.testing.assert_array_equal, restored(trainer(), step, mesh_of())[0], state_at(step))


@pytest.mark.parametrize("fault", ["lost reply", "another process failed"])
def test_a_commit_of_unknown_outcome_keeps_the_files(trainer, save, mesh_of, monkeypatch, capsys, fault):
    writer = trainer()
    save(writer, 10)
    write_if, exchange = objects.write_if, protocol.exchange

    def lose_reply(path, content, generation):
        written = write_if(path, content, generation)
        if not is_reservation(content):
            raise UnreadableError("all retries failed")
        return written

    def fail_elsewhere(name, *args):
        found = exchange(name, *args)
        if name.endswith(", manifest"):
            raise RunError("process 1: failed")
        return found

    with monkeypatch.context() as patch:
        if fault == "lost reply":
            patch.setattr(objects, "write_if", lose_reply)
        else:
            patch.setattr(protocol, "exchange", fail_elsewhere)
        save(writer, 20)
    assert "step 20 was not saved" in capsys.readouterr().out
    check(trainer(), 20, mesh_of())


def test_a_listing_without_the_manifest_deletes_nothing(trainer, save, mesh_of, monkeypatch):
    save(trainer(), 10)
    list_below = objects.list_below
    monkeypatch.setattr(objects, "list_below", lambda path: [n for n in list_below(path) if not n.endswith(MANIFEST)])
    check(trainer(), 10, mesh_of())


def test_a_quarantine_between_two_requests_of_a_start_keeps_the_files(trainer, save, mesh_of, monkeypatch):
    """A user quarantines a checkpoint while a training looks for files that no manifest refers to."""
    writer = trainer()
    save(writer, 10)
    list_below, folders = objects.list_below, [writer.folder / "10"]

    def list_and_quarantine(path):
        names = list_below(path)
        if path in folders:
            quarantine(folders.pop())
        return names

    monkeypatch.setattr(objects, "list_below", list_and_quarantine)
    remove_leftovers(writer.folder, UNLOCKED)
    assert not folders
    check(trainer(), 10, mesh_of())


def test_a_lost_lock_ends_the_saves(trainer, save, capsys):
    def lost():
        raise RunError("another process has the lock")

    writer = trainer(owner=Owner(lost))
    for _ in range(2):
        save(writer, 10)
        assert "step 10 was not saved, failure" in capsys.readouterr().out
    with pytest.raises(RunError, match=r"max_failed_saves=3"):
        save(writer, 10)
    assert objects.list_below(writer.folder) == []


@pytest.mark.long
def test_faults_during_saves_and_restores(bucket, trainer, save, mesh_of, quick_retries, capsys):
    """Under faults, a save writes the right values or fails, and a restore returns them or raises an error."""
    outcomes = {"saved": 0, "not saved": 0, "read": 0, "unreadable": 0}
    kinds = ["429", "500", "503", "reset", "lost", "cut", "short"]
    writer = trainer()
    save(writer, 0)
    for i in range(1, 16):
        # The pattern excludes listings: fsspec makes them, and s3fs waits for seconds after a fault.
        bucket.plan(kinds=kinds, rate=0.35, in_a_row=3, seed=i, pattern="^((?!prefix=).)*$", limit=12)
        writer._failures = 0
        save(writer, 10 * i)
        is_saved = 10 * i in writer._verified
        bucket.plan()
        outcomes["saved" if is_saved else "not saved"] += 1
        # After lost replies, a manifest may exist although its save failed.
        assert 10 * i in writer.steps() or not is_saved
        reader, newest = Checkpointer(writer.folder.parent), max(writer.steps())
        bucket.plan(kinds=kinds, rate=0.35, in_a_row=3, seed=100 + i, pattern="^((?!prefix=).)*$", limit=12)
        try:
            state, loader = restored(reader, newest, mesh_of())
        except UnreadableError:
            outcomes["unreadable"] += 1
        else:
            outcomes["read"] += 1
            jax.tree.map(np.testing.assert_array_equal, state, state_at(newest))
            assert loader == LOADER
        bucket.plan()
        assert why_invalid(writer.folder / str(newest), step=newest, content=True) is None
    assert outcomes["saved"] >= 10, outcomes
    assert outcomes["read"] >= 8, outcomes


def algorithms(folder):
    return {algorithm for _, algorithm, _ in read_manifest(folder).files.values()}


def random_state(step):
    return TrainState(jnp.int32(step), {"w": jax.random.normal(jax.random.key(step), (1000, 100))}, {})


def test_neither_a_save_nor_a_verification_reads_the_arrays(bucket, trainer, config):
    """The checksums that the store lists are sufficient."""
    writer = trainer()
    writer.newest()
    bucket.plan()
    writer.save(random_state(10), LOADER, config())
    writer.close()
    saved = bucket.plan()["bytes"]
    assert why_invalid(writer.folder / "10", step=10, content=True) is None
    verified = bucket.plan()["bytes"]
    assert saved["write"] > 300_000
    assert max(saved["read"], verified["read"]) < 30_000
    assert algorithms(writer.folder / "10") == {"crc32c" if bucket.scheme == "gs" else "md5"}


def test_a_restore_reads_only_the_chunks_of_its_devices(bucket, trainer, config, mesh_of):
    """Read a checkpoint of eight devices on other meshes, and parts of it, as one of several hosts does."""
    size = (1024, 256)
    values = np.random.default_rng(0).standard_normal(size).astype("float32")
    sharding = jax.NamedSharding(mesh_of(fsdp=8), jax.P("fsdp"))
    writer = trainer()
    writer.save(TrainState(jnp.int32(10), {"w": jax.device_put(values, sharding)}, {}), LOADER, config())
    writer.close()
    contents = contents_of(writer.folder / "10")
    bucket.plan()
    np.testing.assert_array_equal(arrays.read_arrays(contents, ["params/w"])["params/w"], values)
    whole = bucket.plan()["bytes"]["read"]
    store = arrays.open_array(contents, "params/w", cache_bytes=0)
    for region in (slice(0, 256), slice(300, 400)):
        bucket.plan()
        np.testing.assert_array_equal(store[region].read().result(), values[region])
        chunks = -(-region.stop // 128) - region.start // 128
        assert bucket.plan()["bytes"]["read"] < (chunks + 0.5) / 8 * whole
    assert whole > values.nbytes / 2
    for sizes in ({"fsdp": 4}, {"tensor": 8}):
        other = mesh_of(**sizes)
        abstract = jax.ShapeDtypeStruct(size, "float32", sharding=jax.NamedSharding(other, jax.P(*sizes)))
        bucket.plan()
        wanted = TrainState(jax.ShapeDtypeStruct((), "int32"), {"w": abstract}, {})
        np.testing.assert_array_equal(writer.restore(10, wanted, other)[0].params["w"], values)
        assert bucket.plan()["bytes"]["read"] < 1.3 * whole


def test_entity_tags_that_are_not_checksums(trainer, config, monkeypatch):
    """Checkpoints are verified by their content if the ETags of S3 are not MD5s.

    This is the case in a bucket with KMS keys, and after another program has uploaded a copy in parts.
    """
    writer, describe = trainer(), objects.describe_below
    if str(writer.folder).startswith("gs"):
        pytest.skip("Google Cloud Storage lists CRC32Cs")
    writer.save(random_state(10), LOADER, config())
    writer.wait()

    def described(folder):
        return {name: found._replace(version=f'"{found.size:032x}"') for name, found in describe(folder).items()}

    monkeypatch.setattr(objects, "describe_below", described)
    assert why_invalid(writer.folder / "10", step=10, content=True) is None
    writer.save(random_state(20), LOADER, config())
    writer.close()
    assert algorithms(writer.folder / "20") == {"xxh3"}
    for step in (10, 20):
        assert why_invalid(writer.folder / str(step), step=step, content=True) is None
        contents = contents_of(writer.folder / str(step))
        corrupt(contents / largest(contents))
        assert "is corrupt" in why_invalid(writer.folder / str(step), step=step, content=True)


def test_downloaded_checkpoint_is_valid_on_a_local_disk(bucket, trainer, save, mesh_of, tmp_path):
    writer = trainer()
    save(writer, 10)
    folder = tmp_path / "checkpoints" / "10"
    for name in objects.list_below(writer.folder / "10"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        objects.download(writer.folder / "10" / name, str(folder / name))
    local = Checkpointer(tmp_path)
    check(local, 10, mesh_of())
    data = max((path for path in folder.rglob("d/*")), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[5] ^= 1
    data.write_bytes(content)
    assert "is corrupt" in why_invalid(folder, content=True)


def test_a_local_checkpoint_in_a_bucket(bucket, config, mesh_of, tmp_path):
    """The checkpoints of a run that was imported, or copied from a disk, have the format of Orbax."""
    writer = Checkpointer(tmp_path, config().checkpoint)
    writer.save(state_at(10), LOADER, config())
    writer.close()
    workdir = bucket.folder()
    for path in (path for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()):
        files.upload(workdir / path.relative_to(tmp_path).as_posix(), path)
    owner = Checkpointer(workdir, config().checkpoint)
    check(owner, 10, mesh_of())
    assert why_invalid(owner.folder / "10", content=True) is None


def test_requests_of_a_save_and_a_restore(bucket, config, save, mesh_of):
    """The number of requests does not grow with the size of the arrays."""
    found = []
    for size in (3, 3, 300):  # The first save and restore of a process make more requests.
        writer = Checkpointer(bucket.folder(), config().checkpoint)
        writer.newest()
        bucket.plan()
        save(writer, 10, size=size)
        saved = bucket.plan()["requests"]
        restored(writer, 10, mesh_of(), size)
        found.append((saved, bucket.plan()["requests"]))
    for small, large in zip(found[1], found[2], strict=True):
        # Some reads are merged into one, depending on their timing.
        assert abs(sum(large.values()) - sum(small.values())) <= 5, found
    assert sum(found[0][0].values()) < 40, found
    assert sum(found[0][1].values()) < 20, found


def test_errors_of_arrays_do_not_quote_replies(bucket, quick_retries):
    """A reply of Amazon may contain the session token."""
    folder, values = bucket.folder(), np.zeros(2, np.float32)
    shards = {"params/a": arrays.Shards((2,), (2,), values.dtype, [((slice(0, 2),), values)])}
    arrays.write_shards(folder, shards)
    opened = arrays.open_array(folder, "params/a", cache_bytes=0)
    for request in (
        lambda: arrays.read_arrays(folder, ["params/a"]),
        lambda: arrays.open_array(folder, "params/a", cache_bytes=0),
        lambda: arrays.read_part(folder, opened, 0),
        lambda: arrays.write_shards(bucket.folder(), shards),
    ):
        for kind in ("400", "503"):
            bucket.plan(kinds=[kind])
            with pytest.raises(UnreadableError, match=r"cannot be (read|written): ") as caught:
                request()
            assert "session-token" not in str(caught.value)
