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
NOTE = "unfinished"  # Field of what is in place of the manifest during a save or a removal.

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


def json_of(path: Path) -> dict:
    """Return the JSON object in a file, or an empty one."""
    try:
        content = json.loads(path.read_bytes())
        return content if isinstance(content, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}


def _step_folders(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.isdecimal()] if folder.exists() else []


def steps_in(folder: Path) -> list[int]:
    """Return the steps that have a manifest, and are neither being saved nor removed."""
    found = [path for path in _step_folders(folder) if (path / MANIFEST).exists()]
    return sorted(int(path.name) for path in found if NOTE not in json_of(path / MANIFEST))


def unfinished(folder: Path) -> list[Path]:
    """Return the folders of the steps that are being saved or removed."""
    return [path for path in _step_folders(folder) if NOTE in json_of(path / MANIFEST)]


def quarantined(folder: Path) -> dict[Path, int]:
    """Return the manifests of the quarantined checkpoints, and the step of each."""
    return {path: int(path.parent.name) for path in folder.glob("*/quarantined-*.json")}


def verifies(folder: Path, step: int | None = None, manifest_name: str = MANIFEST) -> bool:
    """Return whether a checkpoint verifies, as docs/files.md defines it. By default, its step is its name."""
    try:
        manifest = json.loads((folder / manifest_name).read_bytes())
        recorded = manifest.pop("sha256")
        if hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest() != recorded:
            return False
        if manifest["step"] != (int(folder.name) if step is None else step):
            return False
        for name, file in manifest["files"].items():
            content = (folder / manifest["contents"] / name).read_bytes()
            if (len(content), xxhash.xxh3_128_hexdigest(content)) != (file["bytes"], file["xxh3"]):
                return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return bool(manifest["files"])


def content_of(folder: Path) -> Digests:
    """Return the digests of the manifest of a step, and of the files to which it refers."""
    contents = json_of(folder / MANIFEST).get("contents")
    return {name: found for name, found in digests(folder).items() if name.partition("/")[0] in (MANIFEST, contents)}


def checkpoints_with_right_sizes(folder: Path) -> list[int]:
    """Return the steps whose manifest can be read, and whose files all exist and have the recorded sizes."""
    steps = []
    for step in steps_in(folder):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            manifest = json.loads((folder / str(step) / MANIFEST).read_bytes())
            sizes = {f"{manifest['contents']}/{name}": file["bytes"] for name, file in manifest["files"].items()}
            if all((folder / str(step) / name).stat().st_size == size for name, size in sizes.items()):
                steps.append(step)
    return steps


def verified_contents(folder: Path) -> dict[int, Digests]:
    """Return step → content of every checkpoint that verifies."""
    before = {step: content_of(folder / str(step)) for step in steps_in(folder) if verifies(folder / str(step))}
    # During training, retention may delete a checkpoint while it is being read.
    return {step: content for step, content in before.items() if content_of(folder / str(step)) == content}


def read_when_verifying(checkpoint: Path, random: Random) -> Path:
    """Pick a file that the verification of a checkpoint reads: the manifest, or one that it names."""
    manifest = json.loads((checkpoint / MANIFEST).read_bytes())
    return checkpoint / random.choice([MANIFEST, f"{manifest['contents']}/{random.choice(sorted(manifest['files']))}"])


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
    files = [checkpoint / name for name in sorted(content_of(checkpoint)) if (checkpoint / name).stat().st_size]
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
    return _leftover(folder, step, step + random.randrange(1, 20), random)


def _leftover_of_a_removal(folder: Path, step: int, random: Random) -> str:
    return _leftover(folder, step, random.randrange(step), random)


def _leftover(folder: Path, step: int, other: int, random: Random) -> str:
    """Leave a part of a checkpoint as another step, with a note in place of its manifest."""
    if (target := folder / str(other)).exists():
        return f"nothing done, because {target.name} exists"
    _part_of(folder / str(step), target, random)
    (target / MANIFEST).write_text(json.dumps({NOTE: ""}))
    return f"{target.name} left with a part of {step}"


def _wrong_name(folder: Path, step: int, random: Random) -> str:
    later = next(s for s in iter(lambda: step + random.randrange(1, 100), None) if not (folder / str(s)).exists())
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
    how = [_flipped_bit, _truncated_file, _removed_file, _removed_manifest]
    what = []
    for each in steps_in(folder):
        what.append(random.choice(how)(folder, each, random))
    return "; ".join(what)


CORRUPTIONS: dict[str, Callable[[Path, int, Random], str]] = {
    "flipped bit": _flipped_bit,
    "truncated file": _truncated_file,
    "removed file": _removed_file,
    "removed manifest": _removed_manifest,
    "empty step folder": _empty_step,
    "leftover of a save": _leftover_of_a_save,
    "leftover of a removal": _leftover_of_a_removal,
    "checkpoint under another step": _wrong_name,
    "all checkpoints corrupt": _all_corrupt,
    "symlinked step": _symlinked,
}
