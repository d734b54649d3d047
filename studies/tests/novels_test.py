"""studies/novels.py against a real HTTP server with tiny texts, and the committed list of files."""

import collections
import contextlib
import gzip
import hashlib
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from conftest import ROOT
from helpers.data_prepare import texts_of

from difftx.data.bigrams import as_bigrams, read_bigrams
from difftx.data.store import open_store
from difftx.data.tokenizers import load_tokenizer
from difftx.errors import EXIT_PREEMPTED, RunError, UserError
from studies import novels

# Name → content and split. The first file has a byte-order mark and Windows line ends, as the corpus has.
FILES = {
    "Ab_One_1850.txt": ("\ufeffOne.\r\n\r\nIt was a “first” novel.\r\n", "train"),
    "Ab_Two_1851.txt": ("Two.\n" * 50, "train"),
    "Cd_Three_1900.txt": ("Three.\n" * 60, "valid"),
    "Ef_Four_1920.txt": ("Four.\n" * 70, "test"),
}
CONTENT = {f"/corpus/{name}": text.encode() for name, (text, _) in FILES.items()}


# Fault → first bytes of the response, bytes that are repeated until the client leaves, and the pause between them.
ENDLESS = {
    "slow headers": (b"HTTP/1.1 200 OK\r\nSlow: ", b"x", 0.02),
    "slow body": (b"HTTP/1.1 200 OK\r\n\r\n", b"x", 0.02),
    "endless": (b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 2**16, 0.0),
}


class Server(contextlib.AbstractContextManager):
    """An HTTP server of `CONTENT`. If `behave(path, attempt)` returns a fault, the response has this fault."""

    def __init__(self, behave=lambda path, attempt: None):
        self.behave, self.asked, self.lock = behave, collections.Counter(), threading.Lock()
        self.release = threading.Event()

    def __enter__(self):
        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"owner": self}))
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,))
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.http.server_port}/corpus"
        return self

    def __exit__(self, *_):
        self.release.set()
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


class Handler(http.server.BaseHTTPRequestHandler):
    owner: Server

    def log_message(self, *_):
        pass

    def do_GET(self):
        with self.owner.lock:
            self.owner.asked[self.path] += 1
            attempt = self.owner.asked[self.path]
        wrong, content = self.owner.behave(self.path, attempt), CONTENT[self.path]
        if isinstance(wrong, int):
            self.send_error(wrong)
            return
        if wrong == "hangs":
            self.owner.release.wait(60)
            return
        if wrong in ENDLESS:
            first, later, pause = ENDLESS[wrong]
            with contextlib.suppress(OSError):
                self.wfile.write(first)
                while not self.owner.release.wait(pause):
                    self.wfile.write(later)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write({"truncated": content[:-3], "other": content.replace(b"e", b"3")}.get(wrong, content))


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(novels, "PAUSES", (0.01, 0.02, 0.03))


def write_list(tmp_path, url):
    entries = [
        {
            "name": name,
            "author": name.partition("_")[0],
            "bytes": len(text.encode()),
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
            "split": split,
        }
        for name, (text, split) in FILES.items()
    ]
    path = tmp_path / "list.json"
    path.write_text(json.dumps({"url": url, "files": entries}))
    return path


def fetch(tmp_path, url, *flags):
    return novels.main([f"--out={tmp_path / 'out'}", f"--list={write_list(tmp_path, url)}", *flags])


def rows(out, split):
    return [json.loads(line) for line in gzip.decompress((out / f"{split}.jsonl.gz").read_bytes()).splitlines()]


def contents(out):
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_fetches_and_writes_the_three_splits(tmp_path, capsys):
    out = tmp_path / "out"
    with Server() as server:
        assert fetch(tmp_path, server.url) == 0
        assert set(server.asked.values()) == {1}
        first = contents(out)
        assert fetch(tmp_path, "https://unused.invalid/corpus", f"--mirror={server.url}/") == 0
        assert server.asked.total() == len(FILES)  # The second call fetches nothing.
    assert "novels: 4, to fetch: 0 (0 MB)" in capsys.readouterr().out
    assert contents(out) == first
    assert all(first[f"{split}.jsonl.gz"][4:8] == bytes(4) for split in novels.SPLITS)  # No timestamp (RFC 1952).
    assert first.keys() == {f"files/{name}" for name in FILES} | {f"{s}.jsonl.gz" for s in novels.SPLITS} | {
        "record.json"
    }
    assert rows(out, "train") == [
        {"id": "Ab_One_1850", "author": "Ab", "text": "One.\n\nIt was a “first” novel.\n"},
        {"id": "Ab_Two_1851", "author": "Ab", "text": "Two.\n" * 50},
    ]
    assert [row["id"] for row in rows(out, "valid") + rows(out, "test")] == ["Cd_Three_1900", "Ef_Four_1920"]
    record = json.loads(first["record.json"])
    for split in novels.SPLITS:
        lines = gzip.decompress(first[f"{split}.jsonl.gz"])
        assert record[split]["sha256_of_lines"] == hashlib.sha256(lines).hexdigest()
        texts = {f"{row['id']}.txt": row["text"].encode() for row in rows(out, split)}
        assert record[split]["sha256_of_texts"] == {n: hashlib.sha256(text).hexdigest() for n, text in texts.items()}
        assert record[split]["bytes_of_text"] == sum(map(len, texts.values()))


def test_a_corrupt_file_is_fetched_again(tmp_path):
    with Server() as server:
        fetch(tmp_path, server.url)
        expected = contents(tmp_path / "out")
        (tmp_path / "out" / "files" / "Ab_Two_1851.txt").write_text("Two.\n" * 49)
        server.asked.clear()
        fetch(tmp_path, server.url)
        assert server.asked == {"/corpus/Ab_Two_1851.txt": 1}
    assert contents(tmp_path / "out") == expected


@pytest.mark.parametrize("wrong", [500, 503, 429, "truncated"])
def test_temporary_errors_are_retried(tmp_path, wrong):
    with Server(lambda path, attempt: wrong if "Three" in path and attempt < 4 else None) as server:
        assert fetch(tmp_path, server.url) == 0
        assert server.asked["/corpus/Cd_Three_1900.txt"] == 4
    assert rows(tmp_path / "out", "valid")[0]["text"] == "Three.\n" * 60


@pytest.mark.parametrize(
    ("wrong", "attempts", "why"),
    [
        (404, 1, r"cannot be .*HTTP Error 404: Not Found\).*--mirror.*--input"),
        (500, 4, "HTTP Error 500.*, 4 attempts"),
        ("truncated", 4, r"IncompleteRead\(417 bytes read, 3 more expected\), 4 attempts"),
        ("other", 1, "SHA-256 [0-9a-f]{64}, but expected [0-9a-f]{64}"),
        # Each byte of a slow server comes in time, and an endless answer would fill the memory.
        ("slow headers", 1, r"cannot be downloaded \(not complete after 0 s\)"),
        ("slow body", 1, r"cannot be downloaded \(not complete after 0 s\)"),
        ("endless", 1, r"more than the 420 bytes of the list; name another server with --mirror=URL"),
    ],
)
def test_a_failed_download_is_reported_and_the_next_call_resumes(tmp_path, monkeypatch, wrong, attempts, why):
    if wrong in ENDLESS:
        monkeypatch.setattr(novels, "FILE_SECONDS", 0.4)
    with Server(lambda path, attempt: wrong if "Three" in path else None) as server:
        with pytest.raises(RunError, match=rf"{server.url}/Cd_Three_1900.txt: .*{why}"):
            fetch(tmp_path, server.url)
        assert server.asked["/corpus/Cd_Three_1900.txt"] == attempts
        assert not list((tmp_path / "out").glob("*.*"))
        # The error cancels the downloads that have not started, so more than one file may be missing.
        missing = {name for name in FILES if not (tmp_path / "out" / "files" / name).exists()}
        assert "Cd_Three_1900.txt" in missing
        monkeypatch.setattr(novels, "FILE_SECONDS", 60)
        server.behave, before = lambda path, attempt: None, server.asked.copy()
        assert fetch(tmp_path, server.url) == 0
    assert server.asked - before == {f"/corpus/{name}": 1 for name in missing}


def command(tmp_path, *flags):
    script = "import sys; from studies import novels; from difftx.errors import run_command; novels.PAUSES = (0.01,);"
    script += "run_command(lambda: novels.main(sys.argv[1:]))"
    return [sys.executable, "-c", script, f"--out={tmp_path / 'out'}", *map(str, flags)]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, EXIT_PREEMPTED)])
def test_an_interrupted_command_resumes(tmp_path, number, code):
    """Complete files are kept, and the result equals that of an uninterrupted command."""
    with Server(lambda path, attempt: "hangs" if "Two" in path else None) as server:
        flags = [f"--list={write_list(tmp_path, server.url)}"]
        process = subprocess.Popen(
            command(tmp_path, *flags),
            cwd=ROOT,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # A shell ignores it in background jobs.
        )
        folder, deadline = tmp_path / "out" / "files", time.monotonic() + 60
        while not folder.is_dir() or len([p for p in folder.iterdir() if p.suffix == ".txt"]) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        time.sleep(2)  # The process handles the signal before the server closes the connection, which is an error too.
        server.release.set()
        errors = process.communicate(timeout=60)[1]
        assert process.returncode == code, errors
        assert not list((tmp_path / "out").glob("*.*"))
        (folder / f".Ab_Two_1851.txt.{os.uname().nodename}.{process.pid}").write_text("half")  # As after a kill.
        server.behave, before = lambda path, attempt: None, server.asked.copy()
        assert subprocess.run(command(tmp_path, *flags), cwd=ROOT).returncode == 0
        assert server.asked - before == {"/corpus/Ab_Two_1851.txt": 1}
        assert fetch(tmp_path / "..", server.url, f"--out={tmp_path / 'again'}") == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "again")


def own_texts(tmp_path, number):
    folder = tmp_path / "own"
    folder.mkdir()
    for i in range(number):
        (folder / f"Author{i % 7}_{i}.txt").write_text(f"Text {i}.\r\n")
    (folder / "notes.md").write_text("not a text")
    return folder


@pytest.mark.parametrize(("number", "held_out"), [(3, 1), (29, 1), (60, 3)])
def test_own_texts_are_split_by_the_hash_of_their_names(tmp_path, capsys, number, held_out):
    folder, out = own_texts(tmp_path, number), tmp_path / "out"
    assert novels.main([f"--input={folder}", f"--out={out}"]) == 0
    found = {split: [row["id"] for row in rows(out, split)] for split in novels.SPLITS}
    assert [len(found[split]) for split in ("test", "valid")] == [held_out, held_out]
    names = [name for of_split in found.values() for name in of_split]
    assert sorted(names) == sorted(path.stem for path in folder.glob("*.txt"))
    by_hash = sorted(names, key=lambda name: hashlib.sha256(f"{name}.txt".encode()).digest())
    assert set(by_hash[:held_out]) == set(found["test"])
    assert set(by_hash[held_out : 2 * held_out]) == set(found["valid"])
    printed = capsys.readouterr().out
    assert f"  test: {', '.join(f'{name}.txt' for name in sorted(found['test']))}\n" in printed
    assert rows(out, "test")[0]["text"].endswith(".\n")
    first = contents(out)
    novels.main([f"--input={folder}", f"--out={out}"])
    assert contents(out) == first


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--mirror=ftp://a/b"], "--mirror=ftp://a/b: write an address that starts with http"),
        (["--input=own", "--mirror=http://a"], "--input=own: nothing is fetched, so leave out --mirror and --list"),
        (["--input=nowhere"], "--input=nowhere: 0 .txt files; give at least 3"),
        (["--list=bad.json"], r"--list=bad.json: files\[0\]: no 'author'"),
        (["--list=outside.json"], r"--list=outside.json: .*'\.\./a.txt'.* needs a file name without folder"),
        (["--input=latin"], r"latin/c.txt: byte 1 is not UTF-8"),
    ],
)
def test_user_errors_are_reported_in_one_line(tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text(json.dumps({"url": "http://a", "files": [{"name": "a"}]}))
    entry = {"name": "../a.txt", "author": "a", "bytes": 1, "sha256": "0", "split": "train"}
    (tmp_path / "outside.json").write_text(json.dumps({"url": "http://a", "files": [entry]}))
    (tmp_path / "latin").mkdir()
    for name in "abc":
        (tmp_path / "latin" / f"{name}.txt").write_bytes(b"a\xe9" if name == "c" else b"a")
    with pytest.raises(UserError, match=message):
        novels.main([f"--out={tmp_path / 'out'}", *flags])


def test_the_committed_list_keeps_authors_apart():
    content = json.loads(novels.LIST.read_text())
    assert content["url"].endswith("/143e601875d70e195f2cc5ebd8b034609271194d/corpus")
    files = content["files"]
    assert len({entry["name"] for entry in files}) == len({entry["sha256"] for entry in files}) == len(files) == 95
    authors, size = collections.defaultdict(set), collections.Counter()
    for entry in files:
        assert entry["author"] == entry["name"].partition("_")[0]
        authors[entry["split"]].add(entry["author"])
        size[entry["split"]] += entry["bytes"]
    assert authors["test"] == {"Braddon", "Kipling", "Galsworthy"}
    assert authors["valid"] == {"Trollope", "Stevenson", "Chesterton"}
    assert not authors["train"] & (authors["test"] | authors["valid"])
    assert {"Anon", "Blackmore"} <= authors["train"]  # Both names are of the same author.
    assert all(5e6 < size[split] < 5.5e6 for split in ("test", "valid"))
    # Novels that are not in the public domain everywhere are left out (docs/reproducing.md).
    assert not [e["name"] for e in files if e["author"] == "Forster" or int(e["name"][-8:-4]) > 1930]


def test_validation_and_test_text_are_excerpts_of_all_novels_in_a_random_order(tmp_path, monkeypatch):
    """Another call writes the same excerpts. The training text keeps whole novels."""
    monkeypatch.setattr(novels, "EXCERPT", 100)
    texts = {name: "".join(f"{name} {line}\n" for line in range(300)) for name in ("A_1", "B_2", "C_3", "D_4")}
    split = {"A_1": "test", "B_2": "test", "C_3": "valid", "D_4": "train"}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text)
    listed = [novels.Novel(tmp_path / f"{name}.txt", name, split[name]) for name in texts]
    for out in ("out", "again"):
        (tmp_path / out).mkdir()
    novels.write_splits(listed, tmp_path / "out")
    found = {name: rows(tmp_path / "out", name) for name in ("train", "valid", "test")}
    assert [row["text"] for row in found["train"]] == [texts["D_4"]]
    for name in ("A_1", "B_2", "C_3"):
        excerpts = [row for row in found[split[name]] if row["author"] == name]
        excerpts.sort(key=lambda row: int(row["id"].partition(":")[2]))
        assert "".join(row["text"] for row in excerpts) == texts[name]
        assert {len(row["text"]) for row in excerpts[:-1]} == {100}
    first = [row["author"] for row in found["test"][:16]]
    assert 4 <= first.count("A_1") <= 12
    novels.write_splits(listed, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "out")


@pytest.mark.long
def test_make_novels_prepares_the_texts(tmp_path):
    """Run make in a folder of links to the source tree, and again after a change of the list."""
    for name in ("Makefile", ".venv", "studies", "difftx", "requirements.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    stores = tmp_path / "stores"

    def documents(store, split):
        return texts_of(open_store(stores / store, split))

    with Server() as server:
        listed = write_list(tmp_path, server.url)
        command = ["make", "--old-file=.venv/.installed", "novels", f"NOVELS=--list={listed}"]
        for texts in (["One.\n\nIt was a “first” novel.\n", "Two.\n" * 50], ["Two.\n" * 50]):
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            assert documents("novels", "train") == texts
            assert documents("novels", "valid") == ["Three.\n" * 60]
            assert documents("novels-test", "train") == ["Four.\n" * 70]
            counts = read_bigrams(stores / "novels.bigrams", load_tokenizer("bytes").fingerprint, field="")
            assert counts.of(as_bigrams(np.array([ord("T")]), np.array([ord("w")]))) == 50
            assert subprocess.run([*command, "--question"], cwd=tmp_path).returncode == 0  # Nothing is left to do.
            content = json.loads(listed.read_text())
            listed.write_text(json.dumps(content | {"files": content["files"][1:]}))
            (stores / "novels-text" / "record.json").unlink()
