"""The manifest of a checkpoint, `manifest.json`, which lists all files and arrays of the checkpoint."""

import concurrent.futures
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import jax
import xxhash

from difftx.config import Config
from difftx.errors import UserError
from difftx.files import (
    check_link,
    json_sha256,
    list_folder,
    read_json,
    retry_read,
    schema_error,
    size_of,
    with_sha256,
    without_sha256,
    write_atomically,
)
from difftx.registry import loaded_extensions

FORMAT = 4  # Version of the format. Increase it if difftx can no longer read older checkpoints.
MANIFEST = "manifest.json"
QUARANTINED = ".quarantined"  # Part of the folder name of a quarantined checkpoint.
# Files that must exist. Orbax writes them after the manifest, so the manifest has no checksums of them.
COMMIT_MARKERS = ("commit_success.txt", "_CHECKPOINT_METADATA")
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tiktoken", "numpy")
WeightsPart = Literal["params", "ema"]  # Part of a train state with weights: the parameters, or their average.
THREADS = min(8, os.cpu_count() or 1)  # Threads compute checksums in parallel, because xxhash releases the GIL.
EXTENSIONS_SHAPE = [{"path": str, "sha256": str}]
SHAPE = {
    "format": int,
    "step": int,
    "weights": str,
    "config_sha256": str,
    "data": dict,
    "packages": {str: str},
    "extensions": EXTENSIONS_SHAPE,
    "arrays": {str: {"shape": [int], "dtype": str}},
    "files": {str: {"bytes": int, "xxh3": str}},
}


class OtherFormatError(UserError):
    """An error for a checkpoint of another version of difftx, which must not be quarantined as corrupt."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint's `manifest.json`."""

    sha256: str  # SHA-256 of the manifest's other fields. It differs between any two checkpoints.
    step: int
    weights: str  # Identifier of the parameters, "<attempt>/<step>". Equal identifiers mean equal parameters.
    config_sha256: str
    data: dict[str, Any]  # Signature of the training data: sources, tokenizer, rows and order.
    packages: dict[str, str]
    extensions: list[dict[str, str]]  # Path and SHA-256 of each loaded extension.
    arrays: dict[str, tuple[tuple[int, ...], str]]  # Path in the train state → shape and dtype.
    files: dict[str, tuple[int, str]]  # Path in the folder → size in bytes, and XXH3-128 in hexadecimal.


def array_name(path: tuple[Any, ...]) -> str:
    """Return the name of an array, such as "params/embedding", from its path in a tree."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def describe_arrays(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the shape and dtype of each array of a tree, by name."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {array_name(path): (tuple(leaf.shape), str(leaf.dtype)) for path, leaf in leaves}


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that can change the numbers of a run."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def write_manifest(
    folder: Path, step: int, weights: str, arrays: dict[str, Any], config: Config, data: dict[str, Any]
) -> None:
    """Write the manifest of the checkpoint in `folder`, with the checksums of all its files."""
    markers = {folder / name for name in COMMIT_MARKERS}
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path not in markers)
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        checksums = list(pool.map(xxh3_of, files))
    content = {
        "format": FORMAT,
        "step": step,
        "weights": weights,
        "config_sha256": json_sha256(json.loads(config.to_json())),
        "data": data,
        "packages": package_versions(),
        "extensions": list(map(dataclasses.asdict, loaded_extensions())),
        "arrays": {name: {"shape": list(shape), "dtype": dtype} for name, (shape, dtype) in arrays.items()},
        "files": {
            path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "xxh3": checksum}
            for path, checksum in zip(files, checksums, strict=True)
        },
    }
    write_atomically(folder / MANIFEST, json.dumps(with_sha256(content), indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Return a checkpoint's manifest. Raise `UserError` if it is absent or corrupt, or names a file elsewhere."""
    try:
        return _read_manifest(folder)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from error


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    if size_of(path) is None:
        check_link(folder)
        raise UserError(f"no {MANIFEST}")
    signed = read_json(path)
    raw = without_sha256(signed)
    if raw is None:
        raise UserError(f"{MANIFEST} is damaged: its SHA-256 is not that of its text")
    if type(raw.get("format")) is int and raw["format"] != FORMAT:
        raise OtherFormatError(
            f"{MANIFEST} has format {raw['format']}, not {FORMAT}: another version of difftx wrote it; use that "
            "version, or another --workdir"
        )
    if why := schema_error(raw, SHAPE):
        raise UserError(f"{MANIFEST}: {why}")
    arrays = {name: (tuple(array["shape"]), array["dtype"]) for name, array in raw["arrays"].items()}
    files = {name: (file["bytes"], file["xxh3"]) for name, file in raw["files"].items()}
    _check_inside(folder, files)
    others = {name: raw[name] for name in ("step", "weights", "config_sha256", "data", "packages", "extensions")}
    return Manifest(sha256=signed["sha256"], arrays=arrays, files=files, **others)


def why_invalid(folder: Path, *, step: int | None = None, content: bool) -> str | None:
    """Return why the checkpoint in `folder` is invalid, for example because it is not of step `step`, or None.

    Compare the sizes of the files with the manifest, and if `content` is True also their checksums. Raise
    `UnreadableError` if a file cannot be read, and `OtherFormatError` for a checkpoint of another version of difftx.
    """
    try:
        manifest = _read_manifest(folder)
        if step is not None and manifest.step != step:
            return f"{MANIFEST} is that of step {manifest.step}"
        return _damaged_file(folder, manifest, content=content)
    except OtherFormatError as error:
        raise OtherFormatError(f"{folder}: {error}") from error
    except UserError as error:
        return str(error)
    except (FileNotFoundError, NotADirectoryError) as error:  # The file has just been deleted.
        return f"{error.filename} is missing"


def _damaged_file(folder: Path, manifest: Manifest, *, content: bool) -> str | None:
    sizes = {name: size for name, (size, _) in manifest.files.items()}
    for name in (*COMMIT_MARKERS, *sizes):
        found = size_of(folder / name)
        if found is None:
            return f"{name} is missing"
        if found != sizes.get(name, found):
            return f"{name} has {found} bytes, not {sizes[name]}"
    if content:
        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            checksums = pool.map(xxh3_of, (folder / name for name in manifest.files))
            for (name, (_, expected)), checksum in zip(manifest.files.items(), checksums, strict=True):
                if checksum != expected:
                    return f"{name} is damaged: its XXH3 is {checksum}, not {expected}"
    return None


def xxh3_of(file: Path) -> str:
    """Return the XXH3-128 of a file in hexadecimal. It detects corruption, but not deliberate changes."""

    def read() -> str:
        with file.open("rb", buffering=0) as stream:
            return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()

    return retry_read(file, read)


def steps_in(folder: Path) -> list[int]:
    """Return the steps with a folder in a run's `checkpoints`, in ascending order. Their checkpoints may be corrupt."""
    # A symbolic link counts even if its target is absent. Otherwise a run would silently resume from an older step.
    found = list_folder(folder).items()
    return sorted(int(name) for name, is_folder in found if is_folder and re.fullmatch(r"0|[1-9][0-9]{0,17}", name))


def quarantined_in(folder: Path) -> list[Path]:
    """Return the folders of the checkpoints that training or a user has quarantined."""
    return sorted(folder / name for name in list_folder(folder) if QUARANTINED in name)


def _check_inside(folder: Path, names: Iterable[str]) -> None:
    """Raise `UserError` if a file name leads out of the folder. The folder itself may be a symbolic link."""
    real = os.path.realpath(folder)
    for name in names:
        path = PurePosixPath(name)
        try:
            inside = os.path.realpath(folder / name).startswith(f"{real}{os.sep}")
        except ValueError:  # The name is invalid, for example because of a null character.
            inside = False
        if not inside or path.is_absolute() or ".." in path.parts:
            raise UserError(f"{MANIFEST} names {name!r}, which is not a file of this folder")
