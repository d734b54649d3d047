"""`difftx prepare` from bucket to bucket, as a user calls it."""

import dataclasses
import gzip
import json
import lzma
import os
import signal
import subprocess
import time

import pytest
from conftest import ROOT, child_environment
from helpers.buckets import environment, in_ci_with
from helpers.command_server import commands
from helpers.data_prepare import COMMAND, ENVIRONMENT, PREPARE, tree

from difftx.commands import prepare as command
from difftx.data.prepare import assembly
from difftx.data.prepare import job as job_module
from difftx.data.prepare.job import Job, open_job
from difftx.data.prepare.readers import Fields, sources_of
from difftx.data.records import zstd
from difftx.data.store import read_meta, write_meta
from difftx.errors import RunError, UserError
from difftx.storage import objects
from difftx.storage.lock import BucketLock
from difftx.storage.paths import is_bucket

SECRET = "a-secret-that-nothing-writes"
FLAGS = ["--valid_fraction=0.2", "--shard_tokens=9000", "--workers=1"]


def files_of(folder):
    """Return the content of every file or object below a folder, by name."""
    if not is_bucket(folder):
        return tree(folder)
    return {name: objects.read(folder / name).content for name in objects.describe_below(folder)}


def put(path, content):
    if is_bucket(path):
        objects.write(path, content)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def lines(name, count=150):
    return "".join(json.dumps({"text": f"{name} {i} " * 9}) + "\n" for i in range(count)).encode()


def inputs(tmp_path):
    """Return the content of a file of each format, by file name."""
    found = {
        "a.txt": b"plain text\n" * 50,
        "b.jsonl": lines("b"),
        "deep/c.jsonl.gz": gzip.compress(lines("c"), mtime=0),
    }
    found |= {
        "d.jsonl.zst": zstd.compress(lines("d")),
        "e.ndjson.xz": lzma.compress(lines("e")),
        "f.txt.gz": gzip.compress(b"f" * 99),
    }
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        return found
    table = pyarrow.table({"text": [f"parquet {i} " * 9 for i in range(3000)], "other": list(range(3000))})
    parquet.write_table(table, tmp_path / "table", row_group_size=500)
    return found | {"g.parquet": (tmp_path / "table").read_bytes(), ".hidden.txt": b"hidden"}


def prepare(*flags, secret="x"):
    result = commands().run([*PREPARE, *flags], environment=child_environment(1) | secrets(secret))
    assert SECRET not in result.stdout + result.stderr
    return result


def secrets(value):
    return {"AWS_SECRET_ACCESS_KEY": value, "AWS_SESSION_TOKEN": value, "GOOGLE_AUTH_TOKEN_FOR_TESTING": value}


def splits(content):
    """Return the splits of a store and its other files, without the paths and times of the input in meta.json."""
    meta = json.loads(content.pop("meta.json"))
    return meta["splits"], content


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Return input files of each format by name, and the folder of the store that they make on a local disk."""
    folder = tmp_path_factory.mktemp("reference")
    content = inputs(folder)
    for name, data in content.items():
        put(folder / "in" / name, data)
    result = prepare(f"--input={folder}/in", f"--out={folder}/store", *FLAGS)
    assert result.returncode == 0, result.stderr
    return content, folder / "store"


@in_ci_with("gs")
def test_every_format_makes_the_same_store_everywhere(bucket, reference):
    """The stores on a local disk and in buckets are equal. No file, object or line of output contains credentials."""
    content, store = reference
    folder = bucket.folder()
    for name, data in content.items():
        put(folder / "in" / name, data)
    made = prepare(f"--input={folder}/in", f"--out={folder}/store", *FLAGS, secret=SECRET)
    assert made.returncode == 0, made.stderr
    remote = files_of(folder / "store")
    assert splits(remote) == splits(files_of(store))
    assert len(remote) > 10
    assert all(SECRET.encode() not in data for data in files_of(folder).values())


@in_ci_with("s3")
def test_a_finished_store_is_kept(bucket):
    folder = bucket.folder()
    for name in "ab":
        put(folder / "in" / f"{name}.jsonl", lines(name))
    flags = [f"--out={folder}/store", *FLAGS]
    made = prepare(f"--input={folder}/in", *flags)
    assert made.returncode == 0, made.stderr
    before = files_of(folder / "store")
    again = prepare(f"--input={folder}/in", *flags)
    assert (again.returncode, again.stdout) == (0, made.stdout)
    other = prepare(f"--input={folder}/in/b.jsonl", *flags)
    assert other.returncode == 2
    assert "holds a store of other source.input" in other.stderr
    assert files_of(folder / "store") == before


@in_ci_with("gs")
def test_reads_of_units_and_small_texts_overlap(bucket):
    """In sequence, two requests of 0.3 s per object would take twice as long as the limit."""
    folder, count = bucket.folder(), 24
    for number in range(count):
        put(folder / "texts" / f"{number:02d}.txt", b"a small text")
        put(folder / "lines" / f"{number:02d}.jsonl", lines(f"{number}", 3))
    job = dataclasses.replace(job_in(folder), valid_fraction=0.0, shard_tokens=10**6)
    [texts] = sources_of(f"{folder}/texts", valid=False, first_index=0)
    sources = sources_of(f"{folder}/lines", valid=False, first_index=0)
    for unit in assembly.units_to_do(job, sources, assembly.finished_units(job, sources)):
        assembly.encode_unit(job, unit)

    def seconds(read):
        bucket.plan(kinds=["slow"], pattern="^GET ")
        began = time.monotonic()
        found = read()
        bucket.plan()
        assert time.monotonic() - began < count * 0.3
        return found

    [unit] = seconds(lambda: list(texts.units(job.fields)))
    assert [file.name for file, _ in unit.content.files] == [f"{number:02d}.txt" for number in range(count)]
    plan = seconds(lambda: assembly.make_plan(job, sources))
    [shard] = plan.shards
    assert [file.name[:5] for file, _ in shard.selections] == [f"{number:05d}" for number in range(count)]
    seconds(lambda: assembly.write_shard(job, shard))


def test_mistakes_are_one_line(bucket):
    folder = bucket.folder()
    put(folder / "in" / "a.txt", b"text")
    put(folder / "other" / "file", b"x")
    for flags, message in (
        ([f"--input={folder}/out", f"--out={folder}/store"], f"--input='{folder}/out': no such file, no such folder"),
        ([f"--input={folder}/in/*.gz", f"--out={folder}/store"], "no file matches it as a glob"),
        ([f"--input={folder}", f"--out={folder}/store"], "lies in the input"),
        ([f"--input={folder}/in", f"--out={bucket.scheme}://"], "no bucket is named"),
        (["--input=ftp://a/b", f"--out={folder}/store"], "stores of type ftp are not supported"),
    ):
        with pytest.raises(UserError) as error:
            command.main(["--tokenizer=bytes", *flags])
        assert message in str(error.value)
    job = dataclasses.replace(job_in(folder), out=folder / "other")
    with pytest.raises(UserError, match="not empty, and no unfinished store"), open_job(job, {}):
        pass


def corpus_of(folder):
    """Write forty files, each a unit, and return flags that read them."""
    for number in range(40):
        put(folder / "in" / f"{number:02d}.jsonl", lines(f"file {number}", 20))
    return [f"--input={folder}/in", "--valid_fraction=0.1", "--shard_tokens=9000"]


@in_ci_with("gs")
def test_a_killed_prepare_resumes(bucket):
    """Kill the command and its workers when 15 objects exist."""
    folder = bucket.folder()
    flags = corpus_of(folder)
    reference = prepare(*flags, f"--out={folder}/reference", "--workers=1")
    assert reference.returncode == 0, reference.stderr
    words, environment_ = (
        [*COMMAND, *flags, f"--out={folder}/store", "--workers=2"],
        environment(bucket.scheme, bucket.proxy),
    )
    process = subprocess.Popen(
        words,
        env=ENVIRONMENT | environment_,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    while process.poll() is None and len(objects.describe_below(folder / "store")) < 15:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert "meta.json" not in objects.describe_below(folder / "store")
    assert prepare(*flags, f"--out={folder}/store").returncode == 0
    assert splits(files_of(folder / "store")) == splits(files_of(folder / "reference"))


@in_ci_with("s3")
def test_faults_do_not_change_the_store(bucket):
    """At least 60 seeded faults during a `prepare` from bucket to bucket do not change the store."""
    folder = bucket.folder()
    flags = corpus_of(folder)
    assert prepare(*flags, f"--out={folder}/reference").returncode == 0
    kinds = ["429", "500", "503", "reset", "lost", "slow", "cut"]
    bucket.plan(kinds=kinds, rate=0.12, in_a_row=1, seed=1)
    result = prepare(*flags, f"--out={folder}/store")
    assert result.returncode == 0, result.stderr
    assert sum(bucket.plan()["faults"].values()) >= 60
    assert splits(files_of(folder / "store")) == splits(files_of(folder / "reference"))


def job_in(folder):
    fields = {name: None for name in ("valid_input", "end_of_text")}
    return Job(
        input=f"{folder}/in",
        out=folder / "store",
        tokenizer="bytes",
        fields=Fields("text", None),
        valid_fraction=0.1,
        shard_tokens=100,
        skip_unreadable=False,
        workers=1,
        **fields,
    )


def test_one_prepare_per_folder(bucket, monkeypatch):
    monkeypatch.setattr(job_module, "TAKEOVER_SECONDS", 1.0)
    job = job_in(bucket.folder())
    with (
        BucketLock(job.work / ".lock", "--out", takeover_seconds=1.0, wait_seconds=0),
        pytest.raises(UserError, match="is at work there"),
        open_job(job, {}),
    ):
        pass
    with open_job(job, {}) as owner:
        owner.check()
        other = {"id": "x", "host": "h", "pid": 1, "takeover_seconds": 1}
        objects.write(job.work / ".lock", json.dumps({"owner": other}).encode())
        time.sleep(1.5)
        with pytest.raises(RunError, match="process 1 on h has taken this folder over"):
            owner.check()


def test_a_finished_store_is_not_replaced_by_a_late_process(bucket, reference):
    folder, meta = bucket.folder(), read_meta(reference[1])
    write_meta(folder, meta)
    write_meta(folder, meta)  # The retry of a request whose reply was lost.
    with pytest.raises(RunError, match="another process has finished another store there"):
        write_meta(folder, meta | {"empty": 7})
    assert read_meta(folder) == meta
