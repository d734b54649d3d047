"""The local copy of a run's small files: what pushes write, kills during pushes, former owners, and readers."""

import contextlib
import json
import time

import pytest
from helpers.training_checkpoints import LOADER, state_at

from difftx import run_files
from difftx.errors import RunError, UnreadableError, UserError
from difftx.run_files import pulled, small_files
from difftx.storage import objects
from difftx.training.checkpoint.checkpointer import Checkpointer

REQUESTS = ("read", "read_verified", "write_if", "delete_if", "describe_files", "describe_below")


def contents(workdir):
    """Return the files of a run that a reader sees."""
    folder = pulled(workdir)
    return {
        path.relative_to(folder).as_posix(): path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def owned(workdir, check=lambda: None):
    """Return an owner that has pulled the files. It ends like that of a killed process."""
    owner = run_files._Copy(workdir)
    owner.check = check
    owner.pull("evals")
    return owner


def write(folder, **texts):
    for name, text in texts.items():
        path = folder / f"{name.replace('__', '/')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_push_writes_only_what_has_changed(bucket):
    workdir = bucket.folder()
    with small_files(workdir) as owner:
        write(owner.folder, config="1", manifest="1", evals__loss__20="1")
        (owner.folder / ".temporary").write_text("half")
        bucket.plan()
        owner.push()
        assert bucket.plan()["requests"]["write"] == 3
        owner.push()
        assert bucket.plan()["requests"] == {}
        write(owner.folder, config="2")
        owner.push()
        assert bucket.plan()["requests"] == {"write": 1}
        assert contents(workdir) == {"config.json": "2", "manifest.json": "1", "evals/loss/20.json": "1"}
        (owner.folder / "evals" / "loss" / "20.json").unlink()
        bucket.plan()
    assert bucket.plan()["requests"]["delete"] == 1
    assert contents(workdir) == {"config.json": "2", "manifest.json": "1"}


def test_a_resumed_run_and_a_reader_have_the_small_files(bucket):
    workdir = bucket.folder()
    texts = {"config.json": "1", "metrics.jsonl": "2", "evals/loss/20.json": "3", "evals/loss/20/chart.svg": "4"}
    for name in (*texts, "train.log", "tensorboard/1", "checkpoints/20/manifest.json", "checkpoints/20/a/b.json"):
        objects.write(workdir / name, texts.get(name, "5").encode())
    with small_files(workdir) as owner:
        found = {path for path in owner.folder.rglob("*") if path.is_file()}
        assert {path.relative_to(owner.folder).as_posix(): path.read_text() for path in found} == texts
    assert contents(workdir) == texts | {"checkpoints/20/manifest.json": "5"}
    objects.delete([workdir / "config.json"])
    objects.write(workdir / "metrics.jsonl", b"22")
    del texts["config.json"]
    assert contents(workdir) == texts | {"checkpoints/20/manifest.json": "5", "metrics.jsonl": "22"}


def test_messages_name_the_address(bucket):
    workdir = bucket.folder()
    assert str(UserError(f"{pulled(workdir) / 'metrics.jsonl'}: corrupt")) == f"{workdir}/metrics.jsonl: corrupt"


def test_a_kill_at_any_request_of_a_push_leaves_whole_files(bucket, monkeypatch):
    """Kill an owner before the first, second, … request of a push. The next one then makes the same changes."""
    before = {"manifest.json": "1", "config.json": "1", "evals/loss/1.json": "1", "evals/loss/2.json": "1"}
    after = {"manifest.json": "2", "config.json": "2", "evals/loss/1.json": "1", "metrics.json": "2"}

    def change(folder):
        write(folder, manifest="2", config="2", metrics="2")
        (folder / "evals" / "loss" / "2.json").unlink(missing_ok=True)

    for requests in range(10):
        workdir = bucket.folder()
        for name, text in before.items():
            objects.write(workdir / name, text.encode())
        owner = owned(workdir)
        change(owner.folder)
        counted = iter(range(requests))

        def killed(request, counted=counted):
            def counted_request(*args):
                if next(counted, None) is None:
                    raise KeyboardInterrupt
                return request(*args)

            return counted_request

        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            for name in REQUESTS:
                patch.setattr(objects, name, killed(getattr(objects, name)))
            owner.push()
            break
        found = contents(workdir)
        assert all(found.get(name) in (before.get(name), after.get(name)) for name in before | after), found
        assert found["manifest.json"] == "2" or found["config.json"] == "1"
        owner = owned(workdir)
        change(owner.folder)
        owner.push()
        assert contents(workdir) == after
    assert contents(workdir) == after
    assert requests == 4


@pytest.mark.parametrize("is_late", [True, False])
@pytest.mark.parametrize("change", ["replaced", "created", "deleted"])
def test_a_former_owner_does_not_change_the_files_of_the_next_one(bucket, change, is_late):
    """A process is frozen between its check and its write. It writes after or before the push of the next owner."""
    workdir, name = bucket.folder(), "b" if change == "created" else "a"
    objects.write(workdir / "a.json", b"1")
    checks = iter(["passed"])

    def check():
        if next(checks, None) is None:
            raise RunError("another process has taken this folder over")

    former = owned(workdir, check)
    next_ = owned(workdir)
    write(next_.folder, **{name: "next"})
    if change == "deleted":
        (former.folder / "a.json").unlink()
    else:
        write(former.folder, **{name: "former"})
    if is_late:
        next_.push()
    # A conditional delete that fails is not an error.
    with pytest.raises(RunError) if is_late and change != "deleted" else contextlib.nullcontext():
        former.push()
    next_.push()
    assert contents(workdir)[f"{name}.json"] == "next"


def test_rows_are_in_the_bucket_before_the_checkpoint(bucket, config, monkeypatch):
    """Whichever request of a save is the last one of a process, a checkpoint that exists has the rows before it."""
    workdir, order, write_if = bucket.folder(), [], objects.write_if
    monkeypatch.setattr(objects, "write_if", lambda path, *rest: (order.append(path.name), write_if(path, *rest))[1])
    with small_files(workdir) as owner:
        (owner.folder / "metrics.jsonl").write_text(json.dumps({"step": 10}) + "\n")
        saver = Checkpointer(workdir, config().checkpoint, save_seconds=60, owner=owner)
        saver.save_and_wait(state_at(10), LOADER, config())
    # First the note, and last the manifest.
    assert order == ["manifest.json", "metrics.jsonl", "manifest.json"]


def test_a_save_without_its_rows_fails(bucket, config, monkeypatch, capsys):
    workdir = bucket.folder()

    def fail(*_):
        raise UnreadableError("no reply")

    with small_files(workdir) as owner:
        monkeypatch.setattr(owner, "push", fail)
        saver = Checkpointer(workdir, config().checkpoint, save_seconds=60, owner=owner)
        saver.save(state_at(10), LOADER, config())
        saver.wait()
        assert saver.steps() == []
        monkeypatch.undo()
    assert "checkpoint of step 10 was not saved" in capsys.readouterr().out


def test_files_are_pushed_regularly_also_after_a_failure(bucket, monkeypatch):
    monkeypatch.setattr(run_files, "PUSH_SECONDS", 0.05)
    workdir, push, failures = bucket.folder(), run_files._Copy.push, [UnreadableError("no reply")]

    def fail_once(owner):
        if failures:
            raise failures.pop()
        push(owner)

    monkeypatch.setattr(run_files._Copy, "push", fail_once)
    with small_files(workdir) as owner:
        write(owner.folder, config="1")
        while objects.read(workdir / "config.json") is None:
            time.sleep(0.01)
    assert not failures


def test_rows_before_an_error_are_pushed(bucket):
    workdir = bucket.folder()
    with contextlib.suppress(ZeroDivisionError), small_files(workdir) as owner:
        write(owner.folder, config="1")
        raise ZeroDivisionError
    assert contents(workdir) == {"config.json": "1"}
