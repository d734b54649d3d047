"""`difftx prepare` from a Hugging Face Hub of this machine, with real requests, kills and faults."""

import contextlib
import functools
import io
import json
import random
import time

import pytest
from helpers.command_server import commands
from helpers.data_prepare import tree
from helpers.hub_server import hub_environment

from difftx.data.prepare import readers
from difftx.data.prepare.readers import Fields, Source
from difftx.data.store import read_meta
from difftx.storage import hub
from difftx.storage.hub import HubFile

pytest.importorskip("huggingface_hub", reason="needs the extra hub")
ROWS, GROUP = 1200, 200  # Rows per file, and per row group.
FLAGS = ["--tokenizer=bytes", "--workers=1", "--valid_fraction=0.1", "--shard_tokens=100000"]


@pytest.fixture
def prepare(run_with_hub):
    return functools.partial(run_with_hub, "difftx", "prepare", *FLAGS)


def texts(seed):
    random_ = random.Random(seed)
    return [" ".join(str(random_.randrange(10**9)) for _ in range(60)) for _ in range(ROWS)]


@pytest.fixture(scope="module")
def tables():
    """Return two files of Parquet with a large column that is not text, by path."""
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra parquet")
    parquet = pytest.importorskip("pyarrow.parquet")

    def table(seed):
        pages = [random.Random(f"{seed} {row}").randbytes(900).hex() for row in range(ROWS)]
        file = io.BytesIO()
        parquet.write_table(pyarrow.table({"html": pages, "text": texts(seed)}), file, row_group_size=GROUP)
        return file.getvalue()

    return {f"data/{seed}.parquet": table(seed) for seed in range(2)}


def chunks(content):
    """Return start and end of the text of each row group."""
    parquet = pytest.importorskip("pyarrow.parquet")
    metadata = parquet.ParquetFile(io.BytesIO(content)).metadata
    columns = [metadata.row_group(index).column(1) for index in range(metadata.num_row_groups)]
    starts = [each.dictionary_page_offset or each.data_page_offset for each in columns]
    return [(start, start + each.total_compressed_size) for start, each in zip(starts, columns, strict=True)]


def splits(store):
    """Return the splits of a store and its other files, without the names and times of the input in meta.json."""
    content = tree(store)
    return json.loads(content.pop("meta.json"))["splits"], content


def write_files(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


LONG = pytest.mark.long


@LONG
@pytest.mark.parametrize("tokens", [400_000, None])
def test_little_more_is_fetched_than_the_text_that_the_store_holds(hub_server, prepare, tables, tmp_path, tokens):
    commit = hub_server.add("datasets", "org/tables", tables | {"README.md": b"# A data set"})
    most = [] if tokens is None else [f"--max_tokens={tokens:.0e}"]
    made = prepare("--input=hf://datasets/org/tables@main/**/*.parquet", f"--out={tmp_path}/store", *most)
    assert made.returncode == 0, made.stderr
    # Brute force: the row groups of which the store needs a part.
    lengths = [len(text) + 1 for seed in range(2) for text in texts(seed)]
    ends = [sum(lengths[: row + 1]) for row in range(len(lengths))]
    needed_rows = len(lengths) if tokens is None else next(row for row, end in enumerate(ends) if end > tokens) + 1
    text_chunks = {name: chunks(content) for name, content in tables.items()}
    all_chunks = [chunk for each in text_chunks.values() for chunk in each]
    needed = sum(end - start for start, end in all_chunks[: -(-needed_rows // GROUP)])
    assert needed <= hub_server.fetched <= 1.2 * needed
    assert hub_server.fetched < 0.4 * sum(map(len, tables.values()))
    # Each range lies in text, or is the end of a file.
    for name, start, end in hub_server.ranges:
        assert end == len(tables[name]) or any(a <= start and end <= b for a, b in text_chunks[name]), (start, end)
    counts = read_meta(tmp_path / "store")["splits"]
    assert sum(each["documents"] for each in counts.values()) == (needed_rows if tokens is None else needed_rows - 1)
    assert read_meta(tmp_path / "store")["source"]["input_commit"] == commit
    write_files(tmp_path / "in", tables)
    local = prepare(f"--input={tmp_path}/in", f"--out={tmp_path}/local", *most)
    assert local.returncode == 0, local.stderr
    assert splits(tmp_path / "store") == splits(tmp_path / "local")


@LONG
def test_a_killed_call_resumes_at_its_commit_and_fetches_only_the_rest(hub_server, prepare, tables, tmp_path):
    commit = hub_server.add("datasets", "org/kill", tables)
    command = ["difftx", "prepare", *FLAGS, "--input=hf://datasets/org/kill/**/*.parquet", "--max_tokens=900000"]
    environment = hub_environment(hub_server, tmp_path / "home")
    sound = commands().run([*command, f"--out={tmp_path}/sound"], environment=environment)
    assert sound.returncode == 0, sound.stderr
    once = hub_server.fetched
    fetched = []
    for ranges in (4, 4, None):
        hub_server.reset()
        hub_server.pause_after = ranges
        started = commands().start(
            [*command, f"--out={tmp_path}/out"], environment=environment, stderr=tmp_path / "err"
        )
        if ranges is None:
            assert started.wait() == 0, (tmp_path / "err").read_text()
        else:
            assert hub_server.paused.wait(60)
            units = tmp_path / "out" / ".prepare" / "units"
            count = -1  # Wait until the worker has tokenised what was fetched.
            while count < (count := len(list(units.glob("*.npz")))) or not count:
                time.sleep(0.5)
            started.kill()
            started.wait()
            hub_server.resumed.set()
        fetched.append(hub_server.fetched)
        hub_server.add("datasets", "org/kill", {"data/other.parquet": tables["data/1.parquet"]})  # The branch moves on.
    assert splits(tmp_path / "out") == splits(tmp_path / "sound")
    assert read_meta(tmp_path / "out")["source"]["input_commit"] == commit
    # Each call repeats the end of a file and, at most, the row groups that were in progress.
    assert fetched[-1] < 0.7 * once
    assert sum(fetched) < 1.7 * once
    # The finished store is of the commit of its first call. Another store is of the branch's.
    hub_server.reset()
    again = commands().run([*command, f"--out={tmp_path}/out"], environment=environment)
    assert again.returncode == 0, again.stderr
    assert not hub_server.ranges
    other = commands().run([*command, f"--out={tmp_path}/other"], environment=environment)
    assert other.returncode == 0, other.stderr
    assert read_meta(tmp_path / "other")["source"]["input_commit"] != commit


def test_lines_and_texts_of_both_inputs(hub_server, prepare, tmp_path):
    lines = b"".join(json.dumps({"text": f"line {row} " * 9}).encode() + b"\n" for row in range(500))
    files = {"train/a b.jsonl": lines, "train/b.txt": b"plain text " * 50, "valid/v.txt": b"held out " * 50}
    hub_server.add("datasets", "org/lines", files | {"train/.hidden": b"x"}, branch="refs/pr/1")
    address = "hf://datasets/org/lines@refs/pr/1"
    made = prepare(f"--input={address}/train/**", f"--valid_input={address}/valid/v.txt", f"--out={tmp_path}/store")
    assert made.returncode == 0, made.stderr
    write_files(tmp_path, files)
    local = prepare(f"--input={tmp_path}/train", f"--valid_input={tmp_path}/valid", f"--out={tmp_path}/local")
    assert local.returncode == 0, local.stderr
    assert splits(tmp_path / "store") == splits(tmp_path / "local")
    source = read_meta(tmp_path / "store")["source"]
    assert source["input_commit"] == source["valid_input_commit"]


def test_a_busy_hub_is_asked_again_and_a_short_reply_is_refused(hub_server, prepare, tmp_path):
    hub_server.add("datasets", "org/busy", {"a.txt": b"one text " * 99})
    hub_server.faults = {"resolve": [503, 429]}
    flags = ["--input=hf://datasets/org/busy/a.txt", f"--out={tmp_path}/store"]
    assert prepare(*flags).returncode == 0
    hub_server.reset()
    hub_server.faults = {"resolve": lambda data: data[:-1]}
    short = prepare(*flags[:1], f"--out={tmp_path}/other")
    assert short.returncode == 1
    assert "the hub sent 890 bytes in place of bytes 0 to 891; run the same command again" in short.stderr


def test_a_large_row_group_is_read_by_parts(monkeypatch):
    """A writer may put millions of rows into a row group. Little more of it is read than a unit needs."""
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra parquet")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = io.BytesIO()
    table = pyarrow.table({"text": texts(0) * 8})
    parquet.write_table(table, file, row_group_size=ROWS * 4, data_page_size=2**16, use_dictionary=False)
    content, reads = file.getvalue(), []

    class Counted(io.BytesIO):
        def read(self, size=-1):
            reads.append(size)
            return super().read(size)

    monkeypatch.setattr(hub, "HubReader", lambda _: Counted(content))
    monkeypatch.setattr(hub, "REQUEST_BYTES", 2**17)
    monkeypatch.setattr(readers, "UNIT_BYTES", 2**18)
    name = HubFile("org/name", "0" * 40, "a.parquet", len(content), "")
    source = Source(0, "parquet", (name,), len(content), False)
    units = source.units(Fields("text", None))
    first = next(units)
    assert sum(reads) < 0.2 * len(content)  # Two units, a request more, and the end of the file.
    rest = [first, *units]
    reads.clear()
    last = next(iter(source.units(Fields("text", None), rest[-1].end - len(rest[-1].content.rows), len(rest) - 1)))
    assert last.content == rest[-1].content
    assert sum(reads) < 0.6 * len(content)  # The first row group is passed over.


# --input after hf://, faults or variables, and the part of the line that names field, value and fix.
REFUSED = {
    "no name": ("datasets/org", {}, "write hf://datasets/ORG/NAME@REVISION/PATTERN, such as"),
    "unknown": ("datasets/org/none/**", {}, "the hub shows no org/none to this account; check the name, or log"),
    "revision": ("datasets/org/bad@v9/**", {}, "org/bad has no revision 'v9'; name a branch, a tag or a commit"),
    "pattern": ("datasets/org/bad/**/*.csv", {}, "no file of commit "),
    "gated": ("datasets/org/bad/**", {"tree": "GatedRepo"}, "access to org/bad is restricted; accept its terms on"),
    "forbidden": ("datasets/org/bad/a.txt", {"resolve": 401}, "(HTTP 401); log in with `hf auth login`, and check"),
    "broken hub": ("datasets/org/bad/**", {"api/datasets": 500}, "the hub cannot be used (HTTP 500); run the same c"),
    "damaged page": ("datasets/org/bad/flipped.parquet", {}, "flipped.parquet: not readable as Parquet (could not ve"),
    "offline": ("datasets/org/bad/**", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE forbids requests to the hub; unset"),
    "no network": ("datasets/org/bad/**", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "the hub cannot be used (["),
}


@pytest.fixture(scope="module")
def bad(hub_server):
    """Add a repository with a broken file."""
    files = {"a.txt": b"text of 18 letters"}
    with contextlib.suppress(pytest.skip.Exception):
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        file = io.BytesIO()
        parquet.write_table(pyarrow.table({"text": texts(0)}), file, write_page_checksum=True, compression="none")
        flipped = bytearray(file.getvalue())
        flipped[len(flipped) // 2] ^= 1
        files |= {"flipped.parquet": bytes(flipped)}
    hub_server.add("datasets", "org/bad", files)
    return files


@LONG
@pytest.mark.parametrize("case", REFUSED)
def test_a_broken_data_set_ends_in_one_line(prepare, hub_server, bad, tmp_path, case):
    address, faults, message = REFUSED[case]
    if address.endswith(".parquet") and address.rpartition("/")[2] not in bad:
        pytest.skip("needs the extra parquet")
    changes = {name: value for name, value in faults.items() if name.startswith("HF_")}
    hub_server.faults = {} if changes else faults
    result = prepare(f"--input=hf://{address}", f"--out={tmp_path}/store", **changes)
    assert result.returncode in (1, 2), result.stderr
    assert "Traceback" not in result.stderr
    [line] = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert message in line
    assert not (tmp_path / "store" / "meta.json").exists()
