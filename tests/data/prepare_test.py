"""The command `difftx prepare`, called as users call it."""

import fcntl
import gzip
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest
from helpers.data_prepare import COMMAND, ENVIRONMENT, prepare, prepared, refused, texts_of, tree

from difftx.data.prepare import job
from difftx.data.store import open_store, read_meta
from difftx.data.tokenizers import load_tokenizer


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Return a folder of 40 files, one unit each, and its 1,000 texts, some empty and some duplicates across files."""
    folder = tmp_path_factory.mktemp("corpus")
    noise = random.Random(0)
    texts = [f"{i} {'naïve €😀 <|endoftext|>' * noise.randrange(9)}" for i in range(950)]
    texts += noise.choices(texts, k=40) + [""] * 10
    noise.shuffle(texts)
    for number, part in enumerate(itertools.batched(texts, 25)):
        lines = "".join(json.dumps({"text": t, "id": f"{number}/{i}"}) + "\n" for i, t in enumerate(part))
        (folder / f"{number:02d}.jsonl").write_text(lines)
    return folder, texts


@pytest.fixture(scope="module")
def flags(corpus):
    return [f"--input={corpus[0]}", "--id_field=id", "--valid_fraction=0.1", "--shard_tokens=8000"]


@pytest.fixture(scope="module")
def reference(flags, tmp_path_factory):
    out = tmp_path_factory.mktemp("reference") / "store"
    result = prepared(out, *flags)
    return out, result


def test_every_distinct_document_is_in_one_split_in_input_order(corpus, reference):
    out, result = reference
    train, valid = open_store(out, "train"), open_store(out, "valid")
    found = {"train": texts_of(train), "valid": texts_of(valid)}
    different = list(dict.fromkeys(text for text in corpus[1] if text))
    assert sorted(found["train"] + found["valid"]) == sorted(different)
    assert found["train"] == [t for t in different if t in set(found["train"])]
    assert 60 < len(found["valid"]) < 130  # A tenth of 950 is expected.
    meta = read_meta(out)
    assert len(meta["splits"]["train"]["shards"]) > 5
    for split, texts in found.items():
        counts = meta["splits"][split]
        assert counts["documents"] == len(texts)
        assert counts["bytes"] == sum(len(t.encode()) for t in texts)
        assert counts["tokens"] == counts["bytes"] + len(texts)
    assert sum(meta["splits"][split]["duplicates"] for split in found) == 40
    assert (meta["empty"], meta["skipped"]) == (10, 0)
    assert "40" not in result.stderr
    ids = [json.loads(line) for file in sorted((out / "train").glob("*.ids")) for line in file.open()]
    first = {}
    for number, text in enumerate(corpus[1]):
        first.setdefault(text, f"{number // 25}/{number % 25}")
    assert ids == [first[text] for text in found["train"]]


def test_prompts_are_kept_apart_from_answers(tmp_path):
    pairs = {f"What is {i} + {i}? ": f"It is {2 * i}." for i in range(200)}
    lines = [json.dumps({"question": q, "answer": a, "id": i}) for i, (q, a) in enumerate(pairs.items())]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    flags = ["--text_field=answer", "--prompt_field=question", "--id_field=id", "--shard_tokens=1000"]
    prepared(tmp_path / "store", f"--input={tmp_path / 'pairs.jsonl'}", *flags, "--valid_fraction=0.2")
    found = {}
    for split in ("train", "valid"):
        store = open_store(tmp_path / "store", split, verify=True)
        texts, prompts = texts_of(store), (store.counted[:, 0] - store.offsets[:-1]).tolist()
        assert store.counted[:, 1].tolist() == store.offsets[1:].tolist()
        found |= {text[:prompt]: text[prompt:] for text, prompt in zip(texts, prompts, strict=True)}
    assert found == pairs
    assert len(read_meta(tmp_path / "store")["splits"]["train"]["shards"]) > 2


@pytest.mark.long
def test_store_is_the_same_after_kills_at_ten_moments(flags, reference, tmp_path):
    """Kill the run at ten random numbers of finished files.

    The run writes one file for each of 40 units, then three counted files per shard.
    """
    out = tmp_path / "store"
    shards = sum(len(split["shards"]) for split in read_meta(reference[0])["splits"].values())
    moments = sorted(random.Random(1).sample(range(1, 40 + 3 * shards), 10))
    killed = 0
    for number, moment in enumerate(moments):
        process = subprocess.Popen(
            [*COMMAND, *flags, f"--out={out}", f"--workers={1 + number % 2}"],
            env=ENVIRONMENT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        wait_until(lambda p=process, m=moment: p.poll() is not None or finished_files(out) >= m)
        if number % 2:
            process.kill()  # The workers must exit by themselves.
        elif process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        if process.wait() == 0:  # The run ended before it could be killed.
            assert tree(out) == tree(reference[0])
            shutil.rmtree(out)
        else:
            assert process.returncode == -signal.SIGKILL
            killed += 1
            wait_until(lambda p=process: not group_lives(p.pid))
            assert not (out / "meta.json").exists()
    assert killed >= 5
    subprocess.run([*COMMAND, *flags, f"--out={out}", "--workers=3"], env=ENVIRONMENT, check=True)
    assert tree(out) == tree(reference[0])


def finished_files(out):
    kinds = (".npz", ".tokens", ".offsets", ".ids")
    names = [os.path.join(folder, name) for folder, _, files in os.walk(out) for name in files]
    return sum(name.endswith(kinds) for name in names)


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def group_lives(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.long
def test_run_stopped_by_a_signal_says_so_and_resumes(flags, reference, tmp_path):
    out = tmp_path / "store"
    process = subprocess.Popen([*COMMAND, *flags, f"--out={out}"], env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: process.poll() is not None or finished_files(out))
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 75, error
    assert "the same command resumes" in error
    assert "Traceback" not in error
    assert not (out / "meta.json").exists()
    prepared(out, *flags)
    assert tree(out) == tree(reference[0])
    finished = {f: f.stat().st_mtime_ns for f in out.rglob("*")}
    prepared(out, *flags)  # Nothing is left to do.
    assert {f: f.stat().st_mtime_ns for f in out.rglob("*")} == finished


@pytest.mark.usefixtures("tiktoken_cache")
@pytest.mark.parametrize("name", ["cl100k_base", "gpt2"])
def test_tokens_are_those_of_tiktoken(corpus, tmp_path, name):
    prepared(tmp_path / "store", f"--input={corpus[0]}", f"--tokenizer={name}", "--valid_fraction=0")
    store = open_store(tmp_path / "store", "train")
    encoding = load_tokenizer(name)
    different = list(dict.fromkeys(text for text in corpus[1] if text))
    expected = [[*ids, encoding.eot_token] for ids in map(encoding.encode_ordinary, different)]
    assert store.dtype == (np.uint32 if name == "cl100k_base" else np.uint16)
    assert store.slice(0, len(store)).tolist() == [i for ids in expected for i in ids]
    assert read_meta(tmp_path / "store")["tokenizer"]["name"] == name


def test_separate_validation_text_is_kept_out_of_training(tmp_path):
    (tmp_path / "valid.txt").write_text("held out")
    for name, text in {"a": "one", "b": "held out", "c": "two"}.items():
        (tmp_path / f"{name}.train").write_text(text)
    out = tmp_path / "store"
    prepared(out, f"--input={tmp_path}/*.train", f"--valid_input={tmp_path}/valid.txt", "--valid_fraction=0.9")
    assert texts_of(open_store(out, "train")) == ["one", "two"]
    assert texts_of(open_store(out, "valid")) == ["held out"]
    assert read_meta(out)["splits"]["train"]["duplicates"] == 1


def test_a_document_keeps_its_split_when_the_corpus_grows(corpus, reference, tmp_path):
    for file in sorted(corpus[0].iterdir())[:20]:
        shutil.copyfile(file, tmp_path / file.name)
    prepared(tmp_path / "store", f"--input={tmp_path}/*.jsonl", "--valid_fraction=0.1")
    for split in ("train", "valid"):
        assert set(texts_of(open_store(tmp_path / "store", split))) < set(texts_of(open_store(reference[0], split)))


def test_unreadable_documents_are_skipped_counted_and_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": \n{"text": "\xff"}\n{"text": "b"}\n')
    with gzip.open(tmp_path / "b.jsonl.gz", "wb") as file:
        file.write(random.Random(0).randbytes(5000).hex().encode())
    (tmp_path / "b.jsonl.gz").write_bytes((tmp_path / "b.jsonl.gz").read_bytes()[:-50])
    flags = [f"--input={tmp_path}/*.json*", "--valid_fraction=0"]
    out = tmp_path / "store"
    assert "a.jsonl: line 2: broken JSON" in refused(out, *flags)
    result = prepared(out, *flags, "--on_error=skip")
    assert texts_of(open_store(out, "train")) == ["a", "b"]
    assert read_meta(out)["skipped"] == 3
    assert "3 unreadable" in result.stdout
    named = (out / "skipped.txt").read_text().splitlines()
    assert len(named) == 3
    assert all(f"left out: {line}" in result.stderr for line in named)
    for line, message in zip(named, ["line 2: broken JSON", "line 3: byte 34", "is truncated"], strict=True):
        assert message in line


def test_a_process_that_gets_the_lock_after_another_has_finished_keeps_its_store(tmp_path, monkeypatch):
    """The other process finishes after this one has seen no store, and has not deleted the work folder yet."""
    (tmp_path / "a.txt").write_text("a" * 500)
    with monkeypatch.context() as patch:
        patch.setattr(job, "remove_folder", lambda folder: None)
        prepared(tmp_path / "store", f"--input={tmp_path}/a.txt")
    shard, work = tmp_path / "store/train/00000.tokens", tmp_path / "store/.prepare"
    before = shard.stat().st_mtime_ns
    answers = itertools.chain([False], itertools.repeat(True))
    monkeypatch.setattr(job, "is_store", lambda path: next(answers))
    prepared(tmp_path / "store", f"--input={tmp_path}/a.txt")
    assert (shard.stat().st_mtime_ns, work.exists()) == (before, False)


@pytest.mark.parametrize(
    ("name", "text", "flags", "message"),  # tests/data/readers_test.py has the lines and files that cannot be read.
    [
        ("none", None, [], "no such file"),
        ("latin.txt", "na\xefve", [], "latin.txt: byte 2 is not UTF-8; repair it, or leave such documents out"),
        ("one.txt", "1", ["--prompt_field=q"], "one.txt: a text file has no field 'q'; --prompt_field is for JSON"),
        (
            "one.csv",
            "text,id\na,1\n",
            ["--text_field=b"],
            "--text_field=b: {file} is read whole, without fields; give J",
        ),
        ("one.txt", "1", [], "one.txt: too short to hold some out; give more, or --valid_fraction=0"),
        ("one.jsonl", '{"text": "one"}', [], "1 different documents, and none is left to train on"),
        ("gap.jsonl", '{"text": ""}\n\n', [], "the input has no documents"),
        ("", None, [], "lies in the input"),
        ("cards", None, [], "the input has no documents"),
        ("one.txt", "1", ["--tokenizer=cl100k"], "--tokenizer='cl100k': no such encoding"),
        ("one.txt", "1", ["--tokenizer=no.tiktoken"], "--tokenizer='no.tiktoken': cannot be read"),
        ("one.txt", "1", ["--valid_fraction=1"], "--valid_fraction=1.0 must be at least 0 and less than 1"),
        ("one.txt", "1", ["--workers=0"], "--workers=0 must be positive"),
    ],
)
def test_bad_input_gives_exit_code_2_and_the_reason(tmp_path, name, text, flags, message):
    (tmp_path / "cards").mkdir()
    (tmp_path / "cards" / "README.md").write_text("of a data set")
    if text is not None:
        (tmp_path / name).write_text(text, "latin-1")
    message = message.replace("{file}", str(tmp_path / name))
    assert message in refused(tmp_path / "out", f"--input={tmp_path / name}", *flags)


def test_the_proposed_field_can_be_set_in_the_same_folder(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"content": "a"}\n{"content": "b"}\n')
    flags = f"--input={tmp_path / 'in.jsonl'}", "--valid_fraction=0.5"
    assert "choose with --text_field" in refused(tmp_path / "store", *flags)
    prepared(tmp_path / "store", *flags, "--text_field=content")


def test_unfinished_run_with_other_settings_is_rejected(corpus, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "good.jsonl").write_text('{"text": "c"}\n')
    out = tmp_path / "store"
    refused(out, f"--input={tmp_path}/*.jsonl")
    message = refused(out, f"--input={tmp_path}/*.jsonl", "--text_field=content")
    assert "text_field ('text', now 'content'): differs from the unfinished run" in message
    assert f"choose another --out, or delete {out}" in message
    shutil.rmtree(out)
    source.write_text('{"text": "a"}\n{"text": "b"}\n')
    with_lock = out / ".prepare"
    with_lock.mkdir(parents=True)
    with (with_lock / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another process is at work there" in refused(out, f"--input={source}")
    prepared(out, f"--input={source}")
    result = prepare(f"--out={out}", f"--input={source}", "--text_field=content")
    assert (result.returncode, "holds a store of other source.text_field" in result.stderr) == (2, True)
    assert "not empty, and no unfinished store" in refused(tmp_path, f"--input={source}")
