"""Requests of checkpoints in buckets, the checksums that stores list, and requests that fail."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.training_checkpoints import LOADER, flip_a_bit, largest_file, restored, state_at

from difftx.errors import UnreadableError
from difftx.training.checkpoint import arrays, manifest
from difftx.training.checkpoint.checkpointer import Checkpointer, Checkpoints
from difftx.training.checkpoint.manifest import read_manifest, why_invalid
from difftx.training.checkpoint.restoring import restore_state
from difftx.training.state import TrainState


@pytest.fixture
def folder(bucket):
    return bucket.folder()


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
        reader, newest = Checkpoints(writer.folder.parent), max(writer.steps())
        bucket.plan(kinds=kinds, rate=0.35, in_a_row=3, seed=100 + i, pattern="^((?!prefix=).)*$", limit=12)
        try:
            state, loader = restored(reader, newest, mesh_of()), reader.read(newest).loader
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
    contents = read_manifest(writer.folder / "10").contents
    bucket.plan()
    store = arrays.open_array(contents, "params/w")
    np.testing.assert_array_equal(arrays.read_part(contents, store), values)
    whole = bucket.plan()["bytes"]["read"]
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
        np.testing.assert_array_equal(
            restore_state(read_manifest(writer.folder / "10"), wanted, other).params["w"], values
        )
        assert bucket.plan()["bytes"]["read"] < 1.3 * whole


def test_entity_tags_that_are_not_checksums(trainer, config, monkeypatch):
    """Checkpoints are verified by their content if the ETags of S3 are not MD5s.

    This is the case in a bucket with KMS keys, and after another program has uploaded a copy in parts.
    """
    writer, describe = trainer(), manifest.describe_below
    if str(writer.folder).startswith("gs"):
        pytest.skip("Google Cloud Storage lists CRC32Cs")
    writer.save(random_state(10), LOADER, config())
    writer.wait()

    def described(folder):
        return {name: found._replace(version=f'"{found.size:032x}"') for name, found in describe(folder).items()}

    monkeypatch.setattr(manifest, "describe_below", described)
    assert why_invalid(writer.folder / "10", step=10, content=True) is None
    writer.save(random_state(20), LOADER, config())
    writer.close()
    assert algorithms(writer.folder / "20") == {"xxh3"}
    for step in (10, 20):
        assert why_invalid(writer.folder / str(step), step=step, content=True) is None
        flip_a_bit(largest_file(writer.folder / str(step)))
        assert "is corrupt" in why_invalid(writer.folder / str(step), step=step, content=True)


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
    arrays.write_shards(folder / arrays.STATE, shards)
    opened = arrays.open_array(folder, "params/a")
    for request in (
        lambda: arrays.open_array(folder, "params/a"),
        lambda: arrays.read_part(folder, opened, 0),
        lambda: arrays.write_shards(bucket.folder(), shards),
    ):
        for kind in ("400", "503"):
            bucket.plan(kinds=[kind])
            with pytest.raises(UnreadableError, match=r"cannot be (read|written): ") as caught:
                request()
            assert "session-token" not in str(caught.value)
