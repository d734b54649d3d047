"""Read, write and verify the manifest of a checkpoint: `checkpoints/<step>/manifest.json`.

A checkpoint exists if and only if its manifest exists. The manifest holds the config and the state of the data loader
and guard, and lists the array files, which are stored in a folder next to it. While a checkpoint is being saved or
removed, the file `manifest.json` is a note that says so.
"""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import re
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import xxhash

from difftx.config import Config, TrainConfig
from difftx.errors import UnreadableError, UserError, import_extra
from difftx.files import (
    check_link,
    describe_below,
    list_folder,
    open_file,
    read_file,
    retry_read,
    source_sha256,
    stored,
)
from difftx.json_files import read_json, schema_error, with_sha256, without_sha256
from difftx.model.lora import LORA
from difftx.parallel.heartbeat import report_progress
from difftx.registry import EXTENSIONS_SHAPE
from difftx.storage import objects
from difftx.storage.paths import AnyPath, is_bucket

FORMAT = 5  # Version of the format. Increase it when difftx can no longer read older checkpoints.
MANIFEST = "manifest.json"
QUARANTINED = re.compile(r"quarantined-[0-9a-f]+\.json")  # Name of the manifest of a quarantined checkpoint.
STEP_FOLDER = re.compile(r"0|[1-9][0-9]{0,17}")
UNFINISHED = "unfinished"  # Field of the note that replaces the manifest during a save or a removal.
# Packages whose versions a manifest records, in addition to the installed `ACCELERATOR_PACKAGES`.
RECORDED_PACKAGES = ("jax", "jaxlib", "flax", "optax", "tensorstore", "grain", "tiktoken", "numpy")
# Plugins and libraries of accelerators. A manifest records the versions of the installed ones.
ACCELERATOR_PACKAGES = ("jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "libtpu")
WeightsPart = Literal["params", "ema"]  # Weights in a train state: the parameters, or their average.
PART_BYTES = 2**20  # To compute a checksum, read a file in blocks of this size.
THREADS = min(8, os.cpu_count() or 1)  # Threads that compute checksums, because xxhash releases the GIL.
MANIFEST_SCHEMA = {
    "format": int,
    "step": int,
    "weights": str,
    "config": dict,
    "loader": {"signature": dict},
    "contents": str,
    "packages": {str: str},
    "source_sha256": str,
    "extensions": EXTENSIONS_SHAPE,
    "arrays": {str: {"shape": [int], "dtype": str}},
    "files": {str: {"bytes": int}},
}


class OtherFormatError(UserError):
    """The checkpoint was written by another version of difftx. It is not corrupt, so do not quarantine it."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """A stored checkpoint, as described by its `manifest.json`. Functions take it instead of a path."""

    folder: AnyPath  # Folder of the step, which contains `manifest.json`.
    sha256: str  # SHA-256 of the other fields of the manifest. Unique to each checkpoint.
    step: int
    weights: str  # Identifier of the parameters, "<attempt>/<step>". Equal identifiers mean equal parameters.
    config: dict[str, Any]  # Values of the training config.
    loader: dict[str, Any]  # State of the data loader and the guard, see `RunState.save`.
    packages: dict[str, str]
    source_sha256: str  # Hash of the source files of difftx.
    extensions: list[dict[str, str]]  # Path and SHA-256 of each extension that the config uses.
    arrays: dict[str, tuple[tuple[int, ...], str]]  # Path in the train state → shape and dtype.
    files: dict[str, tuple[int, str, str]]  # Path in `contents` → size in bytes, name of the checksum, checksum.
    contents: AnyPath  # Folder of the array files, a subfolder of `folder`. Each save has its own.
    run_id: str | None  # Identity of the run that saved the checkpoint. None for an imported checkpoint.

    @property
    def data(self) -> dict[str, Any]:
        """Signature of the training data: sources, tokenizer, rows and order."""
        return self.loader["signature"]


def adapters_of(checkpoint: Manifest, part: WeightsPart) -> dict[str, Any]:
    """Return `train.lora_rank` and `train.lora_alpha` of the checkpoint's adapters. The rank is None if it has none."""
    has_adapters = any(name.startswith(f"{part}/{LORA}/") for name in checkpoint.arrays)
    fields = {"lora_rank": None, "lora_alpha": TrainConfig.lora_alpha}
    return fields | {name: checkpoint.config["train"][name] for name in fields if has_adapters}


def array_name(path: tuple[Any, ...]) -> str:
    """Return the name of an array, such as "params/embedding", for its path in a tree."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def describe_arrays(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the shape and dtype of each array of a tree, by name."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {array_name(path): (tuple(leaf.shape), str(leaf.dtype)) for path, leaf in leaves}


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that can change numerical results."""
    versions = {name: importlib.metadata.version(name) for name in RECORDED_PACKAGES}
    for name in ACCELERATOR_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def manifest_text(
    files: dict[str, Any],
    *,
    step: int,
    weights: str,
    run_id: str | None,
    arrays: dict[str, Any],
    config: Config,
    loader: dict[str, Any],
    contents: str,
) -> str:
    """Return the text of a manifest. `files` is the result of `describe_files`."""
    content = {
        "format": FORMAT,
        "step": step,
        "weights": weights,
        "run_id": run_id,
        "config": json.loads(config.to_json()),
        "loader": loader,
        "packages": package_versions(),
        "source_sha256": source_sha256(),
        "extensions": list(map(dataclasses.asdict, config.used_extensions)),
        "arrays": {name: {"shape": list(shape), "dtype": dtype} for name, (shape, dtype) in arrays.items()},
        "contents": contents,
        "files": files,
    }
    return json.dumps(with_sha256(content), indent=1) + "\n"


def describe_files(folder: AnyPath, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the manifest entries of all files below `folder`, with their checksums.

    Files in `known` keep their entry. For the rest, take the checksum from the object store's listing. If there is
    none, as on a disk, read the file and compute its XXH3-128.
    """
    described, entries = describe_below(folder), dict(known or {})
    unknown = [name for name in described if name not in entries]
    # An ETag is the MD5 of the content, unless the store encrypts objects with KMS keys. To find out, compute the MD5
    # of the smallest object.
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
    """Read the manifest in `folder`. Raise `UserError` if it is missing or corrupt."""
    try:
        return _read_manifest(folder)
    except UserError as error:
        raise UserError(f"{folder}: {error}") from error


def _read_manifest(folder: AnyPath) -> Manifest:
    path = folder / MANIFEST
    if (content := read_file(path)) is None:
        if not is_bucket(folder):
            check_link(folder)
        raise UserError(f"no {MANIFEST}")
    signed = read_json(path, content)
    if is_note(content):
        raise UserError("its save or its removal was not finished, or is not yet")
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
    others: dict[str, Any] = {field.name: raw.get(field.name) for field in dataclasses.fields(Manifest)}
    others |= {"folder": folder, "contents": folder / raw["contents"], "sha256": signed["sha256"]}
    return Manifest(**others | {"arrays": arrays, "files": files})


def note(contents: str) -> bytes:
    """Return the note that replaces `manifest.json` during a save to the folder `contents`. "" stands for a removal."""
    return json.dumps({UNFINISHED: contents, "id": uuid.uuid4().hex}).encode()


def is_note(content: bytes) -> bool:
    """Return whether a `manifest.json` with this content marks an unfinished save or removal."""
    try:
        found = json.loads(content)
    except ValueError:
        return False
    return isinstance(found, dict) and UNFINISHED in found


def why_invalid(folder: AnyPath, *, step: int | None = None, run_id: str | None = None, content: bool) -> str | None:
    """Return why the checkpoint in `folder` is invalid, or None. The arguments and errors are those of `verified`."""
    try:
        verified(folder, step=step, run_id=run_id, content=content)
    except OtherFormatError:
        raise
    except UserError as error:
        return str(error)
    return None


def verified(folder: AnyPath, *, step: int | None = None, run_id: str | None = None, content: bool) -> Manifest:
    """Verify the checkpoint in `folder` and return its manifest.

    Raise `UserError` if it is invalid or is not of step `step` and run `run_id`. Compare the file sizes with the
    manifest, and if `content` is True also the checksums. Raise `UnreadableError` if a file cannot be read, and
    `OtherFormatError` if another version of difftx wrote the checkpoint.
    """
    try:
        manifest = _read_manifest(folder)
        if step is not None and manifest.step != step:
            raise UserError(f"{MANIFEST} is that of step {manifest.step}")
        if None not in (run_id, manifest.run_id) and manifest.run_id != run_id:
            raise UserError(f"another run saved it: its run_id is {manifest.run_id}, not {run_id}")
        _check_files(manifest, content=content)
    except OtherFormatError as error:
        raise OtherFormatError(f"{folder}: {error}") from error
    except (FileNotFoundError, NotADirectoryError) as error:  # The file has just been deleted.
        raise UserError(f"{error.filename} is missing") from error
    return manifest


def _check_files(manifest: Manifest, *, content: bool) -> None:
    contents = manifest.contents
    listed = describe_below(contents)
    for name, (size, _, _) in manifest.files.items():
        if name not in listed:
            raise UserError(f"{name} is missing")
        if listed[name].size != size:
            raise UserError(f"{name} has {listed[name].size} bytes, not {size}")
    if content:

        def checksum_of(name: str) -> str:
            _, algorithm, right = manifest.files[name]
            if _listed(algorithm, listed[name]) == right:
                return right
            # If another program uploaded the object in parts, its ETag is not the MD5.
            return _checksum_of(algorithm, contents / name)

        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            checksums = pool.map(checksum_of, manifest.files)
            for (name, (_, algorithm, right)), checksum in zip(manifest.files.items(), checksums, strict=True):
                if checksum != right:
                    raise UserError(f"{name} is corrupt: its {algorithm.upper()} is {checksum}, not {right}")


def _listed(algorithm: str, description: objects.Description) -> str | None:
    """Return an object's checksum from the listing of its store, or None if the listing does not include it."""
    if algorithm == "crc32c" and description.crc32c is not None:
        return f"{description.crc32c:08x}"
    etag = description.version.strip('"')
    return etag if algorithm == "md5" and re.fullmatch("[0-9a-f]{32}", etag) else None


def _checksum_of(algorithm: str, file: AnyPath) -> str:
    """Return a file's checksum in hexadecimal. It detects corruption, but not deliberate changes.

    `algorithm` is "xxh3" for XXH3-128, "crc32c" as in Google Cloud Storage, or "md5" as in S3.
    """

    def read() -> str:
        digest = new_digest()
        with open_file(file) as stream:
            while part := stream.read(PART_BYTES):  # `hashlib.file_digest` passes other types than `bytes`.
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
    """Return the steps with a checkpoint in a run's `checkpoints` folder, ascending. The checkpoints may be corrupt.

    Steps without a manifest, or with an unfinished save or removal, are left out.
    """
    folders = step_folders(folder)
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        pairs = zip(folders, pool.map(_is_checkpoint, folders), strict=True)
        return [int(step.name) for step, is_checkpoint in pairs if is_checkpoint]


def step_folders(folder: AnyPath) -> list[AnyPath]:
    """Return all step folders in a run's `checkpoints` folder, in ascending order, even those without a checkpoint."""
    # Include broken symbolic links. If they were ignored, a run would silently resume from an older step.
    names = [name for name, is_folder in list_folder(folder).items() if is_folder and STEP_FOLDER.fullmatch(name)]
    return [folder / name for name in sorted(names, key=int)]


def _is_checkpoint(folder: AnyPath) -> bool:
    try:
        found = stored(folder / MANIFEST)
        if found is None and not is_bucket(folder):
            check_link(folder)
        return found is not None and not is_note(found.content)
    except UnreadableError:  # `why_invalid` raises the error again.
        return True


def unreferenced(folder: AnyPath) -> list[str]:
    """Return the names in a step's folder to which no manifest refers.

    Return none if a manifest is corrupt, because the files may be all that is left of a checkpoint.
    """
    # The order of these requests matters, because other processes may write at the same time. A save writes its note
    # before its files, so read the manifest after listing the files. A quarantine writes its own manifest before it
    # deletes the original, so list quarantined manifests last.
    names = list_folder(folder)
    found = [stored(folder / MANIFEST)]
    quarantined = list(filter(QUARANTINED.fullmatch, list_folder(folder)))
    found += [stored(folder / name) for name in quarantined]
    used = {MANIFEST, *quarantined}
    for each in filter(None, found):
        try:
            content = json.loads(each.content)
            contents = content[UNFINISHED if UNFINISHED in content else "contents"]
            if UNFINISHED not in content and contents not in names:
                return []
            used.add(contents)
        except (ValueError, TypeError, KeyError):
            return []
    return [name for name in names if name not in used]


def quarantined_in(folder: AnyPath) -> list[AnyPath]:
    """Return the manifests of all quarantined checkpoints, in the order of their steps."""
    folders = step_folders(folder)
    return [step / name for step in folders for name in sorted(filter(QUARANTINED.fullmatch, list_folder(step)))]
