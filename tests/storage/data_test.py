"""Token stores in buckets, compared with the same stores on a local disk."""

import itertools
import json
import os
import random
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import ROOT, TINY
from helpers.buckets import in_ci_with
from helpers.command_server import commands
from helpers.data_prepare import PREPARE, tree

from difftx.commands.data import main as data_command
from difftx.config.recipes import load_config
from difftx.data import blocks
from difftx.data.blocks import BLOCK_BYTES
from difftx.data.loader import Loader, ordered_batches
from difftx.data.sources import load_corpus, load_sources
from difftx.data.store import open_store, read_meta
from difftx.data.tokenizers import load_tokenizer
from difftx.errors import UnreadableError, UserError
from difftx.json_files import JsonLines
from difftx.parallel.layout import Layout
from difftx.storage import objects
from difftx.storage.paths import is_bucket

FAULTS = ["429", "500", "503", "reset", "lost", "slow", "cut"]
ROWS, LENGTH = 16, 64


@pytest.fixture(scope="module")
def local_store(tmp_path_factory):
    """Return a store with four training shards of ten blocks each, and a fifth of one block."""
    folder = tmp_path_factory.mktemp("local")
    noise = random.Random(0)
    lines = [json.dumps({"text": f"{i} {noise.randbytes(noise.randrange(400)).hex()}", "id": i}) for i in range(900)]
    (folder / "in.jsonl").write_text("\n".join(lines))
    flags = ["--shard_tokens=80000", "--valid_fraction=0.1", "--workers=1", "--id_field=id"]
    command = [sys.executable, "-m", *PREPARE, f"--input={folder}/in.jsonl", f"--out={folder}/store", *flags]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    return folder / "store"


@pytest.fixture
def store(bucket, local_store):
    """Return a copy of `local_store` in a bucket."""
    return copied(local_store, bucket.folder() / "store")


def copied(source, target):
    for name, content in tree(source).items():
        if is_bucket(target):
            objects.write(target / name, content)
        else:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes(content)
    return target


def config(path, cache, **changes):
    """Return the data config of a store, with a small cache."""
    fields = TINY | {"data.tokenizer": "bytes", "data.sequence_length": str(LENGTH), "data.path": str(path)}
    fields |= {"data.cache_path": str(cache), "data.cache_mib": "1", "train.global_batch_tokens": str(2**20)}
    fields |= {f"data.{name}": value for name, value in changes.items()}
    return load_config("quickstart:diff", fields).data


def loader_of(data_config, mesh):
    sources = load_sources(data_config, load_tokenizer("bytes"))
    return Loader(
        sources, batch_rows=ROWS, prefetch_batches=1, sharding=jax.NamedSharding(mesh, Layout().act_BT), vocab_size=257
    )


def equal(batches, others):
    for batch, other in zip(batches, others, strict=True):
        for a, b in zip(jax.tree.leaves(batch), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("changes", [{}, {"packing": "best_fit", "document_mask": "true"}])
def test_batches_are_those_of_a_local_store(local_store, store, mesh_of, tmp_path, changes):
    local, remote = (loader_of(config(path, tmp_path, **changes), mesh_of()) for path in (local_store, store))
    assert remote.state() == local.state()
    whole = list(itertools.islice(local, 6))
    equal(itertools.islice(remote, 4), whole[:4])
    again = loader_of(config(store, tmp_path, **changes), mesh_of())
    again.restore(json.loads(json.dumps(remote.state())))
    equal(itertools.islice(again, 2), whole[4:])
    options = {"batch_rows": 4, "limit_tokens": 10**9, "vocab_size": 257, "sharding": remote._sharding}
    found = [load_sources(config(path, tmp_path, **changes), load_tokenizer("bytes")) for path in (local_store, store)]
    equal(*(ordered_batches(sources.valid["valid"], **options) for sources in found))


def test_requests_of_a_start_and_of_steps(bucket, local_store, store, mesh_of, tmp_path):
    """A step reads the blocks of its rows, except for those that another step, run or process of the host has read."""
    shards = {split: len(read_meta(local_store)["splits"][split]["shards"]) for split in ("train", "valid")}
    tokens = [file.stat().st_size for file in (local_store / "train").glob("*.tokens")]
    loader_of(config(store, tmp_path / "other"), mesh_of())  # The first request to a bucket may need further requests.
    bucket.plan()
    loader = loader_of(config(store, tmp_path), mesh_of())
    start = bucket.plan()
    assert start["requests"]["read"] == 4 + 2 * sum(shards.values())  # Four of `meta.json`, two per shard.
    pages = sum(
        -(-5 * count // 3) for count in shards.values()
    )  # At most five files per shard, and three per page of the proxy.
    # On a busy machine, gcsfs sends up to three requests more for the same calls.
    assert start["requests"]["list"] + start["requests"]["describe"] <= pages + (12 if bucket.scheme == "gs" else 9)
    assert start["bytes"]["read"] < 0.1 * sum(tokens)
    for _ in range(40):  # Until every block has been read.
        next(loader)
    found = bucket.plan()
    assert found["requests"].keys() == {"read"}
    assert found["bytes"]["read"] < 1.5 * sum(tokens)  # Two threads may read the same block.
    next(loader)
    assert bucket.plan()["requests"] == {}
    again = loader_of(config(store, tmp_path), mesh_of())
    bucket.plan()
    for _ in range(5):
        next(again)
    assert bucket.plan()["requests"] == {}


READER = """
import random, sys
import numpy as np
from difftx.data.store import open_store
local = open_store(sys.argv[1], "train")
store = open_store(sys.argv[2], "train", cache_path=sys.argv[3], cache_mib=1)
for each in store._objects:
    each._cache._slots = int(sys.argv[4])
random_ = random.Random(int(sys.argv[5]))
for _ in range(60):
    start = random_.randrange(len(local))
    stop = min(len(local), start + random_.randrange(20_000))
    np.testing.assert_array_equal(store.slice(start, stop), local.slice(start, stop))
"""


@pytest.mark.long
def test_processes_share_a_cache_that_is_never_larger_than_its_limit(local_store, store, tmp_path):
    """Two processes evict each other's blocks from a cache of six blocks."""
    commands = [
        [sys.executable, "-c", READER, str(local_store), str(store), str(tmp_path), "6", str(seed)] for seed in (1, 2)
    ]
    processes = [subprocess.Popen(command, cwd=ROOT) for command in commands]
    file, largest = tmp_path / blocks.CACHE_FILE, 0
    while any(process.poll() is None for process in processes):
        if file.exists():
            largest = max(largest, file.stat().st_size, 512 * file.stat().st_blocks)
    assert [process.wait() for process in processes] == [0, 0]
    assert largest == 6 * BLOCK_BYTES


def test_a_smaller_limit_shortens_the_cache(tmp_path):
    cache = blocks.BlockCache(tmp_path, 10 * BLOCK_BYTES)
    for slot in (8, 19):  # Slot 19 is slot 9 of 10.
        cache.write(slot, bytes(BLOCK_BYTES))
    assert (tmp_path / blocks.CACHE_FILE).stat().st_size == 10 * BLOCK_BYTES
    blocks.BlockCache(tmp_path, 3 * BLOCK_BYTES)
    assert (tmp_path / blocks.CACHE_FILE).stat().st_size == 3 * BLOCK_BYTES
    assert cache.read(9) == b""  # `cache` is that of a process with a larger limit.
    with pytest.raises(UserError, match=r"data\.cache_path: /proc/absent/blocks cannot be written"):
        blocks.BlockCache(ROOT.__class__("/proc/absent"), 10**6)


def test_a_corrupt_cache_is_not_used(local_store, store, tmp_path):
    local, remote = open_store(local_store, "train"), open_store(store, "train", cache_path=str(tmp_path), cache_mib=1)
    np.testing.assert_array_equal(remote.slice(0, len(remote)), local.slice(0, len(local)))
    with (tmp_path / blocks.CACHE_FILE).open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        for position in range(0, size, BLOCK_BYTES // 2):
            file.seek(position)
            file.write(b"broken")
    np.testing.assert_array_equal(remote.slice(0, len(remote)), local.slice(0, len(local)))


def test_a_full_disk_is_not_fatal(local_store, store, tmp_path, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(blocks.os, "pwrite", full)
    local, remote = open_store(local_store, "train"), open_store(store, "train", cache_path=str(tmp_path))
    for start in (0, 50_000):
        np.testing.assert_array_equal(remote.slice(start, start + 30_000), local.slice(start, start + 30_000))
    [line] = capsys.readouterr().err.splitlines()
    assert "cannot be written (No space left on device); blocks are read from the bucket each time" in line


@pytest.mark.long
def test_faults_change_no_token(bucket, local_store, store, tmp_path, quick_retries, monkeypatch):
    """Read slices under at least 60 seeded faults, including truncated bodies."""
    monkeypatch.setattr(objects, "REREAD_SECONDS", (0.0,) * 8)
    local, met, random_ = open_store(local_store, "train"), 0, random.Random(0)
    for seed in range(100):
        remote = open_store(store, "train", cache_path=str(tmp_path / str(seed)), cache_mib=1)
        bucket.plan(kinds=FAULTS, rate=0.4, in_a_row=2, seed=seed)
        start = random_.randrange(len(local) - 40_000)
        np.testing.assert_array_equal(remote.slice(start, start + 40_000), local.slice(start, start + 40_000))
        np.testing.assert_array_equal(remote.offsets, local.offsets)
        met += sum(bucket.plan()["faults"].values())
        if met >= 60:
            return
    pytest.fail(f"only {met} faults")


@pytest.mark.parametrize("kind", ["cut", "short", "503"])
def test_faults_that_do_not_end_give_one_line(bucket, store, tmp_path, quick_retries, monkeypatch, kind):
    monkeypatch.setattr(objects, "REREAD_SECONDS", (0.0,))
    remote = open_store(store, "train", cache_path=str(tmp_path))
    bucket.plan(kinds=[kind])
    with pytest.raises((UserError, UnreadableError), match=r"train/00000\.tokens") as error:
        remote.slice(0, 10)
    assert len(str(error.value).splitlines()) == 1
    bucket.plan()
    assert len(remote.slice(0, 10)) == 10


def test_a_changed_object_is_refused(store, local_store, tmp_path, monkeypatch):
    monkeypatch.setattr(objects, "REREAD_SECONDS", (0.0,))

    def opened(number):
        return open_store(store, "train", cache_path=str(tmp_path / str(number)))

    before = opened(0)
    assert len(before.slice(0, 10)) == 10
    content = bytearray(objects.read(store / "train" / "00001.tokens").content)
    content[20_000] ^= 1
    objects.write(store / "train" / "00001.tokens", bytes(content))
    for remote in (before, opened(1)):
        assert len(remote.slice(0, 10)) == 10
        with pytest.raises(
            UserError, match=r"00001\.tokens: changed since the store was opened, or corrupt: bytes from 16384"
        ):
            remote.slice(0, len(remote))
    with pytest.raises(UserError, match=r"00001\.tokens: corrupt, its SHA-256 is not that in meta\.json"):
        open_store(store, "train", cache_path=str(tmp_path), verify=True)
    objects.write(
        store / "train" / "00001.offsets", bytes(len(objects.read(store / "train" / "00001.offsets").content))
    )
    with pytest.raises(UserError, match=r"00001\.offsets: corrupt or replaced"):
        _ = opened(2).offsets
    objects.write(store / "train" / "00001.tokens", bytes(content[:-2]))
    with pytest.raises(UserError, match=r"00001\.tokens: \d+ bytes, meta\.json says"):
        opened(3)
    objects.delete([store / "meta.json"])
    with pytest.raises(UserError, match=r"no meta\.json, so it is not a finished token store"):
        opened(4)


def test_data_commands_give_the_same_results_on_a_local_copy(store, local_store, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for command in (["verify"], ["show", "--row=3", "--sequence_length=100"]):
        shown = []
        for folder in (store, local_store):
            assert data_command([*command, str(folder)]) == 0
            shown.append(capsys.readouterr().out.replace(str(folder), "FOLDER"))
        assert shown[0] == shown[1]
    for name, folder in (("a", store), ("b", local_store)):
        assert data_command(["bigrams", str(folder), f"--out={tmp_path / name}"]) == 0
    a, b = ((tmp_path / name).read_bytes().partition(b"\n")[2] for name in "ab")
    assert a == b
    objects.write(store / "train" / "00099.tokens", b"")
    with pytest.raises(UserError, match=r"00099\.tokens: does not belong to this store"):
        data_command(["verify", str(store)])


def test_text_in_a_bucket_is_the_same_corpus(bucket, tmp_path):
    folder = bucket.folder()
    for number in range(3):
        text = "".join(f"line {i} of {number}\n" for i in range(5000))
        objects.write(folder / "deep" / f"{number}.txt", text.encode())
        (tmp_path / f"{number}.txt").write_text(text)
    objects.write(folder / "deep" / ".hidden.txt", b"hidden")
    local = load_corpus(f"{tmp_path}/*.txt", config(tmp_path, tmp_path), load_tokenizer("bytes"))
    for pattern in (f"{folder}/deep/*.txt", f"{folder}/**/?.txt"):
        remote = load_corpus(pattern, config(pattern, tmp_path), load_tokenizer("bytes"))
        assert [store.fingerprint for store in remote] == [store.fingerprint for store in local]
    with pytest.raises(UserError, match=r"no file matches it as a glob"):
        load_corpus(f"{folder}/*.text", config(folder, tmp_path), load_tokenizer("bytes"))
    with pytest.raises(UserError, match=r"deep: no meta\.json, so it is not a finished token store"):
        load_corpus(f"{folder}/deep", config(folder, tmp_path), load_tokenizer("bytes"))


@in_ci_with("s3")
def test_training_is_equal_on_stores_in_a_bucket_and_on_a_local_disk(bucket, local_store, store, tmp_path):
    """Losses are equal bit for bit. The training describes, lists and reads objects, and sends no other requests."""
    rows = []
    for name, path in (("local", local_store), ("bucket", store)):
        fields = TINY | {"data.tokenizer": "bytes", "data.path": path, "data.cache_path": tmp_path / "cache"}
        command = ["difftx", "train", "--config=quickstart:diff", f"--workdir={tmp_path / name}"]
        bucket.plan()
        result = commands().run([*command, *(f"--config.{field}={value}" for field, value in fields.items())])
        assert result.returncode == 0, result.stderr
        assert "Traceback" not in result.stderr
        rows.append(JsonLines(tmp_path / name / "metrics.jsonl").read({"step": int, "loss": float}))
        found = bucket.plan()
    assert [(row["step"], row["loss"]) for row in rows[0]] == [(row["step"], row["loss"]) for row in rows[1]]
    assert len(rows[0]) >= 6
    assert found["requests"].keys() == {"describe", "list", "read"}
