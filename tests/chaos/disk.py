"""Verification and corruption of a run's checkpoints as files, without code of difftx."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

import xxhash

MANIFEST = "manifest.json"
MARKERS = ("commit_success.txt", "_CHECKPOINT_METADATA")  # They must exist. Their content is not read.
UNFINISHED = ".orbax-checkpoint-tmp"

Digests = dict[str, str]  # Path in a folder → SHA-256.


def digests(folder: Path) -> Digests:
    """Return the digests of the files in a folder. Files that are deleted meanwhile are omitted."""
    found = {}
    for path in sorted(folder.rglob("*")):
        try:
            if path.is_file():
                found[path.relative_to(folder).as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()
        except FileNotFoundError:
            continue
    return found


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal()) if folder.exists() else []


def quarantined(folder: Path) -> dict[Path, int]:
    """Return the paths of the quarantined checkpoints, and the step of each."""
    paths = folder.glob("*.quarantined*") if folder.exists() else []
    return {path: int(path.name.partition(".")[0]) for path in paths}


def verifies(folder: Path, step: int | None = None) -> bool:
    """Return whether a checkpoint verifies, as docs/files.md defines it. By default, its step is its name."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        recorded = manifest.pop("sha256")
        if hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest() != recorded:
            return False
        step = int(folder.name) if step is None else step
        if manifest["step"] != step or not all((folder / marker).is_file() for marker in MARKERS):
            return False
        for name, file in manifest["files"].items():
            content = (folder / name).read_bytes()
            if (len(content), xxhash.xxh3_128_hexdigest(content)) != (file["bytes"], file["xxh3"]):
                return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return bool(manifest["files"])


def checkpoints_with_right_sizes(folder: Path) -> list[int]:
    """Return the steps whose manifest can be read, and whose files all exist and have the recorded sizes."""
    steps = []
    for step in steps_in(folder):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            manifest = json.loads((folder / str(step) / MANIFEST).read_bytes())
            sizes = {name: file["bytes"] for name, file in manifest["files"].items()}
            markers = all((folder / str(step) / marker).is_file() for marker in MARKERS)
            if markers and all((folder / str(step) / name).stat().st_size == size for name, size in sizes.items()):
                steps.append(step)
    return steps


def verified_contents(folder: Path) -> dict[int, Digests]:
    """Return step → content of every checkpoint that verifies."""
    before = {step: digests(folder / str(step)) for step in steps_in(folder) if verifies(folder / str(step))}
    # During training, retention may delete a checkpoint while it is being read.
    return {step: content for step, content in before.items() if digests(folder / str(step)) == content}


def read_when_verifying(checkpoint: Path, random: Random) -> Path:
    """Pick a file that the verification of a checkpoint reads: the manifest, or one that it names."""
    files = sorted(json.loads((checkpoint / MANIFEST).read_bytes())["files"])
    return checkpoint / random.choice([MANIFEST, random.choice(files)])


@contextlib.contextmanager
def without_permissions(paths: Sequence[Path]) -> Iterator[None]:
    """Remove all permissions of files within the block. Restore them even if the files were renamed meanwhile."""
    with contextlib.ExitStack() as stack:
        for path in paths:
            file = stack.enter_context(path.open("rb")).fileno()
            stack.callback(os.fchmod, file, os.fstat(file).st_mode)
            os.fchmod(file, 0)
        yield


# ── Corruption of a folder of checkpoints. Each function describes what it did. ──


def flip_bit(path: Path, random: Random) -> str:
    content = bytearray(path.read_bytes())
    position = random.randrange(len(content) * 8)
    content[position // 8] ^= 1 << position % 8
    path.write_bytes(content)
    return f"bit {position % 8} of byte {position // 8} of {path.name}"


def _file_in(checkpoint: Path, random: Random) -> Path:
    """Pick the manifest, the file with the arrays, or any file, each with a probability of one third."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.stat().st_size)
    largest = max(files, key=lambda path: path.stat().st_size)
    return random.choice([checkpoint / MANIFEST, largest, random.choice(files)])


def _flipped_bit(folder: Path, step: int, random: Random) -> str:
    path = _file_in(folder / str(step), random)
    return f"{path.relative_to(folder)}: {flip_bit(path, random)}"


def _truncated_file(folder: Path, step: int, random: Random) -> str:
    path = _file_in(folder / str(step), random)
    size = random.randrange(path.stat().st_size)
    with path.open("r+b") as file:
        file.truncate(size)
    return f"{path.relative_to(folder)} truncated to {size} bytes"


def _removed_file(folder: Path, step: int, random: Random) -> str:
    path = _file_in(folder / str(step), random)
    path.unlink()
    return f"{path.relative_to(folder)} removed"


def _removed_marker(folder: Path, step: int, random: Random) -> str:
    path = folder / str(step) / random.choice(MARKERS)
    path.unlink()
    return f"{path.relative_to(folder)} removed"


def _removed_manifest(folder: Path, step: int, random: Random) -> str:
    (folder / str(step) / MANIFEST).unlink()
    return f"{step}/{MANIFEST} removed"


def _empty_step(folder: Path, step: int, random: Random) -> str:
    path = folder / str(step + random.randrange(1, 100)) / random.choice(["", "state"])
    path.mkdir(parents=True, exist_ok=True)
    return f"{path.relative_to(folder)} made, empty"


def _part_of(source: Path, target: Path, random: Random) -> None:
    for path in sorted(source.rglob("*")):
        if path.is_file() and random.random() < 0.5:
            (target / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / path.relative_to(source))
    target.mkdir(exist_ok=True)


def _leftover_of_a_save(folder: Path, step: int, random: Random) -> str:
    target = folder / f"{step + random.randrange(0, 20)}{UNFINISHED}"
    _part_of(folder / str(step), target, random)
    return f"{target.name} left with a part of {step}"


def _leftover_of_a_removal(folder: Path, step: int, random: Random) -> str:
    target = folder / f"{random.randrange(step)}.removed"
    _part_of(folder / str(step), target, random)
    return f"{target.name} left with a part of {step}"


def _wrong_name(folder: Path, step: int, random: Random) -> str:
    later = step + random.randrange(1, 100)
    shutil.copytree(folder / str(step), folder / str(later))
    return f"{step} copied to {later}"


def _symlinked(folder: Path, step: int, random: Random) -> str:
    """Move a checkpoint to another folder, as onto a larger disk, and leave a link."""
    target = folder.parent / "elsewhere" / f"{random.randrange(10**9)}" / str(step)
    target.parent.mkdir(parents=True)
    shutil.move((folder / str(step)).resolve(), target)
    (folder / str(step)).unlink(missing_ok=True)  # It may have been a link already.
    (folder / str(step)).symlink_to(target)
    return f"{step} moved to {target}"


def _all_corrupt(folder: Path, step: int, random: Random) -> str:
    how = [_flipped_bit, _truncated_file, _removed_file, _removed_marker, _removed_manifest]
    what = []
    for each in steps_in(folder):
        while verifies(folder / str(each)):  # A flip in a commit marker does no harm.
            what.append(random.choice(how)(folder, each, random))
    return "; ".join(what)


CORRUPTIONS: dict[str, Callable[[Path, int, Random], str]] = {
    "flipped bit": _flipped_bit,
    "truncated file": _truncated_file,
    "removed file": _removed_file,
    "removed commit marker": _removed_marker,
    "removed manifest": _removed_manifest,
    "empty step folder": _empty_step,
    "leftover of a save": _leftover_of_a_save,
    "leftover of a removal": _leftover_of_a_removal,
    "checkpoint under another step": _wrong_name,
    "all checkpoints corrupt": _all_corrupt,
    "symlinked step": _symlinked,
}
