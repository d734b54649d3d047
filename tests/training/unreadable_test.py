"""Checkpoints that are unreadable, symbolic links or quarantined. None of this means that they are corrupt."""

import contextlib
import errno
import json
import os
import shutil

import pytest
from helpers.training_checkpoints import flip_a_bit, largest_file, names
from helpers.unreadable import needs_unprivileged, without_root_capabilities

from difftx import files
from difftx.commands.checkpoint import main as checkpoint_command
from difftx.errors import UnreadableError, UserError
from difftx.files import retry_read
from difftx.json_files import json_sha256
from difftx.training.checkpoint.checkpointer import Checkpoints
from difftx.training.checkpoint.manifest import MANIFEST, quarantined_in, read_manifest, steps_in, why_invalid
from difftx.training.run import write_run_files


@pytest.fixture
def impatient(monkeypatch):
    """Keep the number of attempts to read, but not the pauses between them."""
    monkeypatch.setattr(files, "RETRY_SECONDS", (0.0,) * len(files.RETRY_SECONDS))


@contextlib.contextmanager
def unreadable(*paths):
    """Take all permissions from files or folders within the block."""
    modes = [path.stat().st_mode for path in paths]
    for path in paths:
        path.chmod(0)
    try:
        with without_root_capabilities():
            yield
    finally:
        for path, mode in zip(paths, modes, strict=True):
            path.chmod(mode)


def quarantined(folder):
    """Return the steps of the quarantined checkpoints."""
    return [int(path.parent.name) for path in quarantined_in(folder)]


UNREADABLE = {
    "arrays": lambda folder: [largest_file(folder / "40")],
    "manifest": lambda folder: [folder / "40" / MANIFEST],
    "all manifests": lambda folder: [folder / step / MANIFEST for step in ("20", "40")],
    "folder in a step": lambda folder: [read_manifest(folder / "40").contents / "state"],
    "step": lambda folder: [folder / "40"],
    "folder of checkpoints": lambda folder: [folder],
}


@needs_unprivileged
@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable_checkpoint_is_neither_renamed_nor_skipped(saved_20_and_40, trainer, tmp_path, impatient, name):
    folder = saved_20_and_40
    reader = Checkpoints(tmp_path)
    questions = [
        trainer.newest,
        reader.newest,
        lambda: reader.require_valid(40),
        lambda: reader.read_newest(lambda step: step),
        lambda: checkpoint_command(["verify", f"--workdir={tmp_path}"]),
    ]
    with unreadable(*UNREADABLE[name](folder)):
        for question in questions:
            with pytest.raises(UnreadableError, match=r"(?s)cannot be read") as error:
                question()
            assert str(folder) in str(error.value)
            assert "\n" not in str(error.value)
        if name != "folder of checkpoints":
            with pytest.raises(UnreadableError, match=r"Permission denied .*checkpoint quarantine .* --step=40$"):
                trainer.newest()
    assert names(folder) == ["20", "40"]
    assert trainer.newest() == 40


@needs_unprivileged
def test_commands_report_unreadable_checkpoints_and_keep_them(saved, tmp_path, config, impatient, capsys):
    folder = saved(10, 20, 40)
    write_run_files(tmp_path, config())
    with unreadable(largest_file(folder / "40")):
        with pytest.raises(UnreadableError, match="1 of 3 checkpoints cannot be read: 40"):
            checkpoint_command(["verify", f"--workdir={tmp_path}"])
        assert "Permission denied" in capsys.readouterr().out
        assert checkpoint_command(["prune", "--keep=1", "--yes", f"--workdir={tmp_path}"]) == 0
    assert "40: kept, because it does not verify" in capsys.readouterr().out
    assert names(folder) == ["20", "40"]
    with unreadable(folder / "40" / MANIFEST):
        assert checkpoint_command(["ls", f"--workdir={tmp_path}"]) == 0
    listed = "".join(capsys.readouterr().out.split())  # The table wraps its lines.
    assert "Permissiondenied" in listed.replace("│", "")


def test_reads_are_retried_after_temporary_errors(tmp_path, impatient):
    for number in (errno.EIO, errno.ESTALE, errno.EACCES, errno.EMFILE, errno.ENFILE, errno.ELOOP, errno.ETIMEDOUT):
        failures = [OSError(number, os.strerror(number))] * len(files.RETRY_SECONDS)

        def read(failures=failures):
            if failures:
                raise failures.pop()
            return "content"

        assert retry_read(tmp_path, read) == "content"
        failures += [OSError(number, os.strerror(number))] * (len(files.RETRY_SECONDS) + 1)
        with pytest.raises(UnreadableError, match=f"cannot be read: {os.strerror(number)} \\(4 attempts in "):
            retry_read(tmp_path, read)


# ── Links ──


def moved(folder, step, elsewhere):
    """Move a checkpoint to another folder, as users do to another disk, and leave a link. Return the new path."""
    elsewhere.mkdir(exist_ok=True)
    shutil.move(folder / step, elsewhere / step)
    (folder / step).symlink_to(elsewhere / step)
    return elsewhere / step


def test_a_step_behind_a_link_is_used_and_only_the_link_is_deleted(saved, trainer, tmp_path, capsys):
    folder = saved(10, 20)
    target = moved(folder, "20", tmp_path / "elsewhere")
    assert trainer.newest() == Checkpoints(tmp_path).newest() == 20
    assert saved(30, 40, keep=1, every_steps=7) == folder
    assert names(folder) == ["40"]
    assert why_invalid(target, step=20, content=True) is None
    printed = capsys.readouterr().out
    assert f"20: the link is deleted; its target {target} stays" in printed


def test_corrupt_step_behind_a_link_is_quarantined_there(saved, trainer, tmp_path):
    folder = saved(10, 20)
    target = moved(folder, "20", tmp_path / "elsewhere")
    flip_a_bit(largest_file(target))
    assert trainer.newest() == 10
    assert (steps_in(folder), quarantined(folder)) == ([10], [20])
    assert (folder / "20").readlink() == target


def test_link_to_an_unmounted_disk_does_not_count_as_a_missing_checkpoint(saved, trainer, tmp_path):
    folder = saved(10, 20)
    target = moved(folder, "20", tmp_path / "elsewhere")
    target.parent.rename(tmp_path / "unmounted")
    for checkpointer in (trainer, Checkpoints(tmp_path)):
        with pytest.raises(
            UnreadableError, match=rf"20 cannot be read: it is a link to {target}, which does not exist"
        ):
            checkpointer.newest()
    (tmp_path / "unmounted").rename(target.parent)
    assert trainer.newest() == 20
    shutil.move(folder, tmp_path / "all")
    folder.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UnreadableError, match="which does not exist here"):
        Checkpoints(tmp_path).newest()


# ── Quarantine ──


@needs_unprivileged
def test_quarantine_command_resolves_a_permanent_read_error(saved_20_and_40, trainer, tmp_path, impatient):
    folder = saved_20_and_40
    bad = largest_file(folder / "40").relative_to(folder / "40")
    (folder / "40" / bad).chmod(0)
    with without_root_capabilities():
        with pytest.raises(UnreadableError):
            trainer.newest()
        assert checkpoint_command(["quarantine", f"--workdir={tmp_path}", "--step=40"]) == 0
        assert trainer.newest() == 20
    with pytest.raises(UserError, match=r"'40': no such checkpoint; .* has the steps 20$"):
        checkpoint_command(["quarantine", f"--workdir={tmp_path}", "--step=40"])


def test_a_checkpoint_of_another_format_is_refused_and_not_renamed(saved_20_and_40, trainer):
    folder = saved_20_and_40
    path = folder / "40" / MANIFEST
    content = json.loads(path.read_text())
    del content["sha256"]
    content["format"] -= 1
    del content["weights"]  # Another format may have other fields.
    path.write_text(json.dumps(content | {"sha256": json_sha256(content)}))
    with pytest.raises(
        UserError, match=r"/40: manifest.json has format \d, not \d: another version of difftx wrote it"
    ):
        trainer.newest()
    assert names(folder) == ["20", "40"]
