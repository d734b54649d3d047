"""The manifest of a checkpoint: `manifest.json`, written last, lists what a usable checkpoint must contain."""

import concurrent.futures
import dataclasses
import importlib.metadata
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

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

FORMAT = 4  # Format of a checkpoint. Increase it when this version cannot read older checkpoints.
MANIFEST = "manifest.json"
QUARANTINED = ".quarantined"  # Part of the name of a quarantined checkpoint.
# Orbax writes these files after the manifest, which therefore has no checksums of them. They must exist.
COMMIT_MARKERS = ("commit_success.txt", "_CHECKPOINT_METADATA")
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tiktoken", "numpy")
BLOCK_BYTES = 2**22
THREADS = min(8, os.cpu_count() or 1)  # xxhash releases the GIL.
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
    """A checkpoint that another version of difftx wrote. It is not corrupt, so nothing may rename it."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint's `manifest.json`."""

    sha256: str  # Hash of the manifest itself. Different checkpoints have different hashes.
    step: int
    weights: str  # Identifier of the parameters, "<attempt>/<step>". Equal only for equal parameters.
    config_sha256: str
    data: dict[str, Any]  # The loader's signature: sources, tokenizer, rows, order.
    packages: dict[str, str]
    extensions: list[dict[str, str]]  # Path and SHA-256 of each file that the training loaded with --extension.
    arrays: dict[str, tuple[tuple[int, ...], str]]  # Path in the train state → shape, dtype.
    files: dict[str, tuple[int, str]]  # Path in the folder → size in bytes, XXH3-128 in hexadecimal.


def array_name(path: tuple[Any, ...]) -> str:
    """Return the name of a leaf, such as "params/embedding", from its path in a tree."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def describe_arrays(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the shape and dtype of each array of a tree by name, as in `Manifest.arrays`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {array_name(path): (tuple(leaf.shape), str(leaf.dtype)) for path, leaf in leaves}


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that a run's numbers depend on."""
    return {name: importlib.metadata.version(name) for name in PACKAGES}


def write_manifest(
    folder: Path, step: int, weights: str, arrays: dict[str, Any], config: Config, data: dict[str, Any]
) -> None:
    """Write the manifest of `folder`, with the checksums of all files in it and its subfolders."""
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
    """Return a checkpoint's manifest. Raise `UserError` if it is missing or corrupt, or names a file elsewhere."""
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
    """Return why the checkpoint in `folder` does not verify, or None if it does.

    A checkpoint does not verify if a file of its manifest is absent or has other contents.

    Args:
        folder: Folder of one checkpoint.
        step: Step that the manifest must have. None accepts any step.
        content: Compare the checksums of the files in addition to their presence and sizes.

    Raises:
        UnreadableError: a file or folder of the checkpoint cannot be read, so its contents may be intact.
        OtherFormatError: another version of difftx wrote the checkpoint.
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
    except (FileNotFoundError, NotADirectoryError) as error:  # The file was deleted after its size was read.
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
    """Return the XXH3-128 of a file, in hexadecimal. XXH3 detects corruption, but not forgery."""

    def read() -> str:
        digest, block = xxhash.xxh3_128(), bytearray(BLOCK_BYTES)
        with file.open("rb", buffering=0) as stream:
            while count := stream.readinto(block):
                digest.update(memoryview(block)[:count])
        return digest.hexdigest()

    return retry_read(file, read)


def steps_in(folder: Path) -> list[int]:
    """Return the steps with a folder in a run's `checkpoints`, ascending, including steps that do not verify.

    A symbolic link counts even if its target does not exist. Otherwise a run would silently resume from an older step.
    """
    found = list_folder(folder).items()
    return sorted(int(name) for name, is_folder in found if is_folder and re.fullmatch(r"0|[1-9][0-9]{0,17}", name))


def quarantined_in(folder: Path) -> list[Path]:
    """Return the folders of the checkpoints that training or a user has quarantined."""
    return sorted(folder / name for name in list_folder(folder) if QUARANTINED in name)


def _check_inside(folder: Path, names: Iterable[str]) -> None:
    """Raise `UserError` if a file name leads outside of the folder, which may itself be a symbolic link."""
    real = os.path.realpath(folder)
    for name in names:
        path = PurePosixPath(name)
        try:
            inside = os.path.realpath(folder / name).startswith(f"{real}{os.sep}")
        except ValueError:  # No file can have this name.
            inside = False
        if not inside or path.is_absolute() or ".." in path.parts:
            raise UserError(f"{MANIFEST} names {name!r}, which is not a file of this folder")
