"""The manifest of a checkpoint, `manifest.json`, which lists all files and arrays of the checkpoint."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Literal

import jax
import xxhash

from difftx.config import Config
from difftx.errors import UserError, import_extra
from difftx.files import (
    check_link,
    list_folder,
    open_file,
    read_file,
    retry_read,
    size_of,
    source_sha256,
    write_atomically,
)
from difftx.json_files import json_sha256, read_json, schema_error, with_sha256, without_sha256
from difftx.parallel.heartbeat import report_progress
from difftx.storage import objects
from difftx.storage.paths import AnyPath, is_bucket

if TYPE_CHECKING:
    from etils import epath

FORMAT = 4  # Version of the format. Increase it if difftx can no longer read older checkpoints.
MANIFEST = "manifest.json"
# Paths of the config and of the state of the data loader in a checkpoint, as orbax's JsonCheckpointHandler names them.
CONFIG_FILE, LOADER_FILE = "config/metadata", "loader/metadata"
QUARANTINED = ".quarantined"  # Part of the folder name of a quarantined checkpoint.
QUARANTINED_FOLDER = re.compile(rf"(\d+){re.escape(QUARANTINED)}(?:\.(\d+))?")
# Part of the name of an object in a step's folder that contains the manifest of a quarantined checkpoint.
QUARANTINED_MANIFEST = "quarantined-"
RESERVED = "writing"  # Field of the object at the path of a manifest in a bucket, during a save.
# Files that must exist. Orbax writes them after the manifest, so the manifest has no checksums of them.
COMMIT_MARKERS = ("commit_success.txt", "_CHECKPOINT_METADATA")
SOURCE_FOLDER = Path(__file__).parents[2]  # The folder of the source files of difftx.
# Packages whose versions a manifest records, in addition to the installed ones of `ACCELERATOR_PACKAGES`.
RECORDED_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tiktoken", "numpy")
# Plugins and libraries of accelerators, of which a machine has some.
ACCELERATOR_PACKAGES = ("jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "libtpu")
WeightsPart = Literal["params", "ema"]  # Part of a train state with weights: the parameters, or their average.
PART_BYTES = 2**20  # Size of the parts of a file that are read at a time for its checksum.
THREADS = min(8, os.cpu_count() or 1)  # Threads compute checksums in parallel, because xxhash releases the GIL.
EXTENSIONS_SHAPE = [{"path": str, "sha256": str}]
MANIFEST_SCHEMA = {
    "format": int,
    "step": int,
    "weights": str,
    "config_sha256": str,
    "data": dict,
    "packages": {str: str},
    "source_sha256": str,
    "extensions": EXTENSIONS_SHAPE,
    "arrays": {str: {"shape": [int], "dtype": str}},
    "files": {str: {"bytes": int}},
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
    source_sha256: str  # Hash of the source files of difftx.
    extensions: list[dict[str, str]]  # Path and SHA-256 of each extension that the config uses.
    arrays: dict[str, tuple[tuple[int, ...], str]]  # Path in the train state → shape and dtype.
    files: dict[str, tuple[int, str, str]]  # Path in the folder → size in bytes, name of the checksum, checksum.
    contents: str  # Folder of the files in the checkpoint's folder. It is "" on local disks.
    run_id: str | None  # Identity of the run that saved the checkpoint. None if the checkpoint was imported.


def array_name(path: tuple[Any, ...]) -> str:
    """Return the name of an array, such as "params/embedding", from its path in a tree."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def describe_arrays(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the shape and dtype of each array of a tree, by name."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {array_name(path): (tuple(leaf.shape), str(leaf.dtype)) for path, leaf in leaves}


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that can change the numbers of a run."""
    versions = {name: importlib.metadata.version(name) for name in RECORDED_PACKAGES}
    for name in ACCELERATOR_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def write_manifest(folder: Path, describe: Callable[[dict[str, Any]], str]) -> None:
    """Write the manifest of the checkpoint in `folder`. `describe` returns its text for the checksums of all files."""
    markers = {folder / name for name in COMMIT_MARKERS}
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path not in markers)
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        checksums = list(pool.map(functools.partial(_checksum_of, "xxh3"), files))
    described = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "xxh3": checksum}
        for path, checksum in zip(files, checksums, strict=True)
    }
    write_atomically(folder / MANIFEST, describe(described))


def manifest_text(
    step: int,
    weights: str,
    arrays: dict[str, Any],
    config: Config,
    data: dict[str, Any],
    run_id: str | None,
    files: dict[str, Any],
    contents: str = "",
) -> str:
    """Return the text of a manifest.

    `files` has its entries for files. `contents` is the folder of the files, see `Manifest.contents`.
    """
    content = {
        "format": FORMAT,
        "step": step,
        "weights": weights,
        "run_id": run_id,
        "config_sha256": json_sha256(json.loads(config.to_json())),
        "data": data,
        "packages": package_versions(),
        "source_sha256": source_sha256(SOURCE_FOLDER),
        "extensions": list(map(dataclasses.asdict, config.used_extensions)),
        "arrays": {name: {"shape": list(shape), "dtype": dtype} for name, (shape, dtype) in arrays.items()},
        "files": files,
    }
    if contents:
        content["contents"] = contents
    return json.dumps(with_sha256(content), indent=1) + "\n"


def describe_objects(folder: "epath.Path", known: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the manifest entries of all objects below a folder, with their checksums.

    Objects that have an entry in `known` keep that entry. The checksums of all other objects come from the store's
    listing. If the listing has none of an object, read the object back and compute its XXH3-128.
    """
    described, entries = objects.describe_below(folder), dict(known or {})
    unknown = [name for name in described if name not in entries]
    # An ETag is the MD5 of the content unless the store encrypts objects with KMS keys. Check this with the smallest
    # object.
    with_md5 = [name for name in unknown if _listed("md5", described[name])]
    smallest = min(with_md5, key=lambda name: described[name].size, default=None)
    lists_md5 = smallest is not None and _listed("md5", described[smallest]) == _checksum_of("md5", folder / smallest)

    def checksum_of(name: str) -> dict[str, str]:
        for algorithm in ("crc32c", "md5") if lists_md5 else ("crc32c",):
            if (listed := _listed(algorithm, described[name])) is not None:
                return {algorithm: listed}
        return {"xxh3": _checksum_of("xxh3", folder / name)}

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        for name, checksum in zip(unknown, pool.map(checksum_of, unknown), strict=True):
            entries[name] = {"bytes": described[name].size} | checksum
    return entries


def read_manifest(folder: AnyPath) -> Manifest:
    """Return a checkpoint's manifest. Raise `UserError` if it is absent or corrupt, or names a file elsewhere."""
    try:
        return _read_manifest(folder)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from error


def _read_manifest(folder: AnyPath) -> Manifest:
    path = folder / MANIFEST
    content = None if not is_bucket(path) and size_of(path) is None else read_file(path)
    if content is None:
        if not is_bucket(folder):
            check_link(folder)
        raise UserError(f"no {MANIFEST}")
    signed = read_json(path, content)
    if is_reservation(content):
        raise UserError(f"the save was not finished, or is not yet: {MANIFEST} reserves the folder")
    raw = without_sha256(signed)
    if raw is None:
        raise UserError(f"{MANIFEST} is corrupt: its SHA-256 is not that of its text")
    if type(raw.get("format")) is int and raw["format"] != FORMAT:
        raise OtherFormatError(
            f"{MANIFEST} has format {raw['format']}, not {FORMAT}: another version of difftx wrote it; use that "
            "version, or another --workdir"
        )
    if why := schema_error(raw, MANIFEST_SCHEMA):
        raise UserError(f"{MANIFEST}: {why}")
    arrays = {name: (tuple(array["shape"]), array["dtype"]) for name, array in raw["arrays"].items()}
    files = {}
    for name, file in raw["files"].items():
        algorithm = next((each for each in ("xxh3", "crc32c", "md5") if isinstance(file.get(each), str)), None)
        if algorithm is None:
            raise UserError(f"{MANIFEST}: files.{name}: no 'xxh3'")
        files[name] = file["bytes"], algorithm, file[algorithm]
    contents = raw.get("contents", "")
    if not isinstance(contents, str) or not re.fullmatch(r"[\w-]*", contents):
        raise UserError(f"{MANIFEST}: contents: not the name of a folder")
    _check_inside(folder, files)
    names = ("step", "weights", "config_sha256", "data", "packages", "source_sha256", "extensions")
    others: dict[str, Any] = {name: raw[name] for name in names} | {"run_id": raw.get("run_id")}
    return Manifest(sha256=signed["sha256"], arrays=arrays, files=files, contents=contents, **others)


def is_reservation(content: bytes) -> bool:
    """Return whether the object at the path of a manifest says that a save is in progress, or was not finished."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and list(found) == [RESERVED]


def contents_of(folder: AnyPath) -> AnyPath:
    """Return the folder that has the files of the checkpoint in `folder`."""
    contents = read_manifest(folder).contents
    return folder / contents if contents else folder


def why_invalid(folder: AnyPath, *, step: int | None = None, run_id: str | None = None, content: bool) -> str | None:
    """Return why the checkpoint in `folder` is invalid, for example not of step `step` or of run `run_id`, or None.

    Compare the sizes of the files with the manifest, and if `content` is True also their checksums. Raise
    `UnreadableError` if a file cannot be read, and `OtherFormatError` for a checkpoint of another version of difftx.
    """
    try:
        manifest = _read_manifest(folder)
        if step is not None and manifest.step != step:
            return f"{MANIFEST} is that of step {manifest.step}"
        if None not in (run_id, manifest.run_id) and manifest.run_id != run_id:
            return f"another run saved it: its run_id is {manifest.run_id}, not {run_id}"
        return _why_files_invalid(folder, manifest, content=content)
    except OtherFormatError as error:
        raise OtherFormatError(f"{folder}: {error}") from error
    except UserError as error:
        return str(error)
    except (FileNotFoundError, NotADirectoryError) as error:  # The file has just been deleted.
        return f"{error.filename} is missing"


def _why_files_invalid(folder: AnyPath, manifest: Manifest, *, content: bool) -> str | None:
    expected = {name: size for name, (size, _, _) in manifest.files.items()}
    if not manifest.contents:
        expected = dict.fromkeys(COMMIT_MARKERS) | expected
    listed = objects.describe_below(folder) if is_bucket(folder) else None

    def actual_size_of(name: str) -> int | None:
        if listed is None:
            return size_of(folder / name)
        return listed[name].size if name in listed else None

    for name, size in expected.items():
        actual_size = actual_size_of(name)
        if actual_size is None:
            return f"{name} is missing"
        if size is not None and actual_size != size:
            return f"{name} has {actual_size} bytes, not {size}"
    if content:

        def checksum_of(name: str) -> str:
            _, algorithm, right = manifest.files[name]
            if listed is not None and _listed(algorithm, listed[name]) == right:
                return right
            # Other programs may have copied the object in parts, and its ETag is then not the MD5.
            return _checksum_of(algorithm, folder / name)

        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            checksums = pool.map(checksum_of, manifest.files)
            for (name, (_, algorithm, right)), checksum in zip(manifest.files.items(), checksums, strict=True):
                if checksum != right:
                    return f"{name} is corrupt: its {algorithm.upper()} is {checksum}, not {right}"
    return None


def _listed(algorithm: str, description: objects.Description) -> str | None:
    """Return the checksum of an object in the listing of its store, or None if the listing cannot have it."""
    if algorithm == "crc32c" and description.crc32c is not None:
        return f"{description.crc32c:08x}"
    etag = description.version.strip('"')
    return etag if algorithm == "md5" and re.fullmatch("[0-9a-f]{32}", etag) else None


def _checksum_of(algorithm: str, file: AnyPath) -> str:
    """Return a checksum of a file in hexadecimal, which detects corruption, but not deliberate changes.

    "xxh3" is the XXH3-128, and "crc32c" and "md5" are those of Google Cloud Storage and of S3.
    """

    def read() -> str:
        digest = new_digest()
        with open_file(file) as stream:
            while part := stream.read(PART_BYTES):  # The CRC32C takes `bytes` only, which hashlib.file_digest lacks.
                digest.update(part)
                report_progress()
        return digest.digest().hex()

    new_digest: Callable[[], Any] = {
        "xxh3": lambda: xxhash.xxh3_128(),
        "md5": lambda: hashlib.md5(usedforsecurity=False),
        "crc32c": lambda: import_extra("google_crc32c", "gcs").Checksum(),
    }[algorithm]
    return read() if is_bucket(file) else retry_read(file, read)


def steps_in(folder: AnyPath) -> list[int]:
    """Return the steps with a folder in a run's `checkpoints`, in ascending order. Their checkpoints may be corrupt.

    In a bucket, only a step with a manifest counts, and not one that is being saved.
    """
    # A symbolic link counts even if its target is absent. Otherwise a run would silently resume from an older step.
    entries = list_folder(folder).items()
    steps = sorted(int(name) for name, is_folder in entries if is_folder and re.fullmatch(r"0|[1-9][0-9]{0,17}", name))
    if not is_bucket(folder):
        return steps
    manifests = objects.read_all(folder / str(step) / MANIFEST for step in steps)
    pairs = zip(steps, manifests, strict=True)
    return [step for step, stored in pairs if stored is not None and not is_reservation(stored.content)]


def quarantined_in(folder: AnyPath) -> list[AnyPath]:
    """Return the folders of the checkpoints that training or a user has quarantined. In a bucket, return manifests."""
    if is_bucket(folder):
        form = re.compile(rf"\d+/{QUARANTINED_MANIFEST}[0-9a-f]+\.json")
        return [folder / name for name in objects.list_below(folder) if form.fullmatch(name)]
    return sorted(folder / name for name in list_folder(folder) if QUARANTINED_FOLDER.fullmatch(name))


def _check_inside(folder: AnyPath, names: Iterable[str]) -> None:
    """Raise `UserError` if a file name leads out of the folder. The folder itself may be a symbolic link."""
    real = os.path.realpath("/" if is_bucket(folder) else folder)
    for name in names:
        path = PurePosixPath(name)
        try:
            inside = is_bucket(folder) or os.path.realpath(folder / name).startswith(f"{real}{os.sep}")
        except ValueError:  # The name is invalid, for example because of a null character.
            inside = False
        if not inside or path.is_absolute() or ".." in path.parts:
            raise UserError(f"{MANIFEST} names {name!r}, which is not a file of this folder")
