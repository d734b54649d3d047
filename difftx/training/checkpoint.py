"""Checkpoints of a run: train state, loader state and config, saved by orbax in the background, read if they verify.

A save goes into a folder of another name. When every process has written its part, process 0 reads all files back,
writes the manifest beside them, and orbax gives the folder its name, the step: so a folder of that name was whole once.
Process 0 alone checks, renames and deletes, on the file system that all processes share; the others are told.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from difftx.config import CheckpointConfig, Config
from difftx.config.build import config_from_dict
from difftx.errors import RunError, UnreadableError, UserError
from difftx.files import json_sha256, list_folder, read_json
from difftx.parallel.multihost import decided_by_lead, is_lead, say
from difftx.registry import require_names
from difftx.training.manifest import (
    MANIFEST,
    damage,
    describe_arrays,
    quarantined_in,
    read_manifest,
    steps_in,
    write_manifest,
)
from difftx.training.retention import (
    quarantine,
    quarantine_order,
    remove,
    remove_leftovers,
    rename,
    steps_to_keep,
)
from difftx.training.state import TrainState

# Until process 0 has read a checkpoint: the monitor notices earlier that it is gone.
DECISION_SECONDS = 24 * 3600.0
CONFIG_FILE = "config/metadata"  # As orbax's JsonCheckpointHandler names it.


class Checkpointer:
    """The checkpoints in `<workdir>/checkpoints`, one folder a step."""

    def __init__(self, workdir: Path, config: CheckpointConfig | None = None, *, save_seconds: int | None = None):
        """Open the folder.

        Args:
            workdir: of the run.
            config: to train; None: only to read. A reader changes nothing.
            save_seconds: that a save may take until it counts as failed, as where another process has failed in it;
                None: orbax's 20 minutes.
        """
        self.folder = workdir.resolve() / "checkpoints"
        self._workdir, self._config = workdir, config
        self._orbax = _open_orbax(self._finish_folder, save_seconds)
        self._background = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._saving: tuple[int, concurrent.futures.Future[None]] | None = None
        self._unfinished = self.folder  # What orbax calls the folder of the save in progress,
        self._describe: Callable[[Path], None] | None = None  # and what writes its manifest.
        self._verified: set[int] = set()  # Steps that this process has restored or saved.
        self._failures = 0  # Of saves, in a row.
        self._attempt = ""
        if config is not None:
            # Each attempt trains with a checkpointer of its own, so that its id and a step identify parameters.
            self._attempt = decided_by_lead(lambda: uuid.uuid4().hex, DECISION_SECONDS)
            decided_by_lead(self._make_folder, DECISION_SECONDS)

    # ── Reading ──

    def steps(self) -> list[int]:
        """Return the steps that have a folder, ascending, whether it verifies or not."""
        return steps_in(self.folder)

    def newest(self) -> int | None:
        """Return the newest step that verifies; None if there never was a checkpoint.

        In training, what does not verify is renamed, so that it is in nobody's way and not lost. If no checkpoint
        verifies, training verifies the quarantined ones again, and takes the newest that verifies back.

        Raises:
            UserError: there are checkpoints, but none verifies.
            UnreadableError: a checkpoint that would be used cannot be read; it is not renamed.
        """
        self._settle()
        step = decided_by_lead(self.find_newest, DECISION_SECONDS)
        if step is not None:
            self._verified.add(step)
        return step

    def verified(self, step: int) -> int:
        """Return `step`.

        Raises:
            UserError: there is no such checkpoint, or it does not verify.
            UnreadableError: it cannot be read.
        """
        decided_by_lead(lambda: self._require_verified(step), DECISION_SECONDS)
        return step

    def restore(self, step: int, abstract: TrainState, mesh: jax.sharding.Mesh) -> tuple[TrainState, dict[str, Any]]:
        """Return the train state, in the shards of `abstract` on `mesh`, and the loader's state.

        Raises:
            UserError: the checkpoint's arrays are not those of `abstract`.
            UnreadableError: it cannot be read.
        """
        folder, wanted = self.folder / str(step), _on_mesh(_as_tree(abstract), mesh)
        saved = _check_arrays(folder, wanted)
        if saved:
            raise UserError(f"{folder}: {next(iter(saved))} has no place in this config's train state")
        args = ocp.args.Composite(state=ocp.args.StandardRestore(wanted), loader=ocp.args.JsonRestore())
        with _reading(folder):
            restored = self._orbax.restore(folder, args=args)
        return TrainState(**restored["state"]), restored["loader"]

    def config(self, step: int) -> Config:
        """Return the config that the checkpoint was trained with."""
        return config_of(self.folder / str(step))

    def weights_id(self, step: int) -> str:
        """Return the identity of this attempt's parameters after `step`, which the checkpoint's manifest records."""
        return f"{self._attempt}/{step}"

    def find_newest(self) -> int | None:
        """Do what `newest` says in this process alone."""
        if self._config is not None and (leftovers := remove_leftovers(self.folder)):
            say(f"{self.folder}: removed {', '.join(leftovers)}: a save or a removal was not finished")
        reasons, quarantined = [], quarantined_in(self.folder)
        for step in reversed(self.steps()):
            why = self._damage(step)
            if why is None:
                return step
            if self._config is None and not (self.folder / str(step)).exists():
                say(f"checkpoint {self.folder / str(step)} was deleted while it was read; looking for the newest again")
                return self.find_newest()
            reasons.append(f"{step}: {why}")
            fate = "skipped" if self._config is None else f"renamed {quarantine(self.folder / str(step)).name}"
            say(f"checkpoint {self.folder / str(step)} does not verify: {why}; {fate}")
        if self._config is not None and (step := self._take_back(quarantined)) is not None:
            return step
        if reasons := reasons or [path.name for path in quarantined]:
            raise UserError(
                f"{self.folder}: there are checkpoints, but none verifies ({'; '.join(reasons)}); "
                "restore one from a copy, or use a new --workdir"
            )
        return None

    def _make_folder(self) -> None:
        if not list_folder(self.folder):  # It may be a file, or a link to a disk that is not mounted.
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise RunError(f"{self.folder} cannot be made: {error.strerror}") from error

    def _take_back(self, quarantined: Sequence[Path]) -> int | None:
        """Rename the newest quarantined checkpoint that verifies to its step, and return the step.

        Called only if no checkpoint verifies. While there is one, the quarantined ones stay aside: a user may have put
        them there to continue from an earlier step, and the metrics after that step have been dropped.
        """
        unreadable = []
        for path in sorted(quarantined, key=quarantine_order, reverse=True):
            step, _ = quarantine_order(path)
            try:
                why = damage(path, step=step, content=True)
            except UnreadableError as error:
                unreadable.append(error)
                continue
            if why is None:
                rename(path, self.folder / str(step))
                say(f"checkpoint {path} verifies, and no other does; renamed {step}")
                return step
        if unreadable:
            raise UnreadableError(
                f"{unreadable[0]}; no other checkpoint verifies: run the same command again once it can be read, "
                "restore a checkpoint from a copy, or use a new --workdir"
            )
        return None

    def _damage(self, step: int) -> str | None:
        content = self._config is None or self._config.verify == "checksums"
        try:
            return damage(self.folder / str(step), step=step, content=content)
        except UnreadableError as error:
            raise UnreadableError(
                f"{error}; nothing was renamed: run the same command again once it can be read, or put the checkpoint "
                f"aside: python -m difftx checkpoint quarantine --workdir={self._workdir} --step={step}"
            ) from error

    def _require_verified(self, step: int) -> None:
        steps = self.steps()
        if step not in steps:
            raise UserError(
                f"step {step}: no such checkpoint; {self.folder} has {', '.join(map(str, steps)) or 'none'}"
            )
        if why := self._damage(step):
            raise UserError(
                f"step {step}: the checkpoint does not verify: {why}; {self.folder} has {', '.join(map(str, steps))}"
            )

    # ── Writing ──

    def save(self, state: TrainState, loader: dict[str, Any], config: Config) -> None:
        """Start to save under the state's step; returns when the arrays may be donated. Waits for an earlier save.

        Raises:
            RunError: so many saves in a row have failed that the run must end.
        """
        self._settle()
        step = int(jax.device_get(state.step))
        if step in self._verified:
            return
        tree = _as_tree(state)
        arrays = describe_arrays(tree)
        self._unfinished = self.folder / f"{step}{ocp.step.TMP_DIR_SUFFIX}"
        self._describe = lambda folder: write_manifest(
            folder, step, self.weights_id(step), arrays, config, loader["signature"]
        )
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(tree),
            loader=ocp.args.JsonSave(loader),
            config=ocp.args.JsonSave(json.loads(config.to_json())),
        )
        try:
            self._orbax.save(self.folder / str(step), args=args, force=True)
        except Exception as error:  # Whatever orbax calls its errors, the run can do without this checkpoint.
            self._note_failure(step, error)
            return
        self._saving = step, self._background.submit(self._finish, step)

    def check(self) -> None:
        """Report a save in the background that has failed meanwhile; never waits.

        Raises:
            RunError: so many in a row have failed that the run must end.
        """
        if self._saving is not None and self._saving[1].done():
            self._settle()

    def save_and_wait(self, state: TrainState, loader: dict[str, Any], config: Config) -> None:
        """Save, again if that fails, and return when the checkpoint is on disk.

        Raises:
            RunError: so many saves in a row have failed that the run must end.
        """
        self._settle()
        step = int(jax.device_get(state.step))
        while not decided_by_lead(lambda: step in self._verified, DECISION_SECONDS):
            self.save(state, loader, config)
            self._settle()

    def close(self) -> None:
        """Wait until a save that was begun is on disk.

        Raises:
            RunError: it has failed.
        """
        self._settle()
        self._background.shutdown()
        self._orbax.close()
        if self._failures:
            raise RunError(f"{self.folder}: the last checkpoint was not saved")

    def _finish_folder(self) -> None:
        """In orbax's thread of process 0, when every process has written its part and before the folder is named."""
        assert self._describe is not None
        self._describe(self._unfinished)

    def _finish(self, step: int) -> None:
        """In a thread: wait for orbax, which reports here what failed in its own, and delete what need not be kept."""
        self._orbax.wait_until_finished()
        if self._config is None or not is_lead():
            return
        try:
            steps = [other for other in self.steps() if other <= step]
            kept = steps_to_keep(self._config, steps, self._workdir)
            remove(self.folder / str(other) for other in steps if other not in kept)
        # The save has succeeded; that old checkpoints stay as well is not a failure.
        except (OSError, UserError, UnreadableError) as error:
            say(f"old checkpoints stay: {error}")

    def _settle(self) -> None:
        """Wait for the save in progress and take note of how it ended."""
        if self._saving is None:
            return
        (step, job), self._saving = self._saving, None
        error = job.exception()
        if error is not None:
            self._note_failure(step, error)
            return
        self._verified.add(step)
        self._failures = 0

    def _note_failure(self, step: int, error: BaseException) -> None:
        assert self._config is not None
        if is_lead():  # Where the disk is full, the rest of a save must not keep it so.
            shutil.rmtree(self._unfinished, ignore_errors=True)
        self._failures += 1
        limit = self._config.max_failed_saves
        why = f"{type(error).__name__}: {(str(error) or '?').splitlines()[0]}"
        text = f"checkpoint of step {step} was not saved, failure {self._failures} of {limit} in a row: {why}"
        if self._failures >= limit:
            raise RunError(f"{text}; earlier checkpoints are untouched (checkpoint.max_failed_saves={limit})")
        print(text, flush=True)


def config_of(folder: Path) -> Config:
    """Return the config that the checkpoint in `folder` was trained with.

    Raises:
        UserError: it cannot be read, is not the one of the checkpoint's manifest, or requires an extension that is not
            loaded.
    """
    path = folder / CONFIG_FILE
    raw = read_json(path)
    manifest = read_manifest(folder)
    if json_sha256(raw) != manifest.config_sha256:
        raise UserError(f"{path}: the file is corrupt: its SHA-256 is not the config_sha256 of {folder / MANIFEST}")
    require_names(manifest.extensions, str(folder))
    return config_from_dict(raw)


def restore_params(folder: Path, params: Any, mesh: jax.sharding.Mesh) -> Any:
    """Return the parameters of the verified checkpoint in `folder`, in the shards of the abstract `params` on `mesh`.

    Raises:
        UserError: the checkpoint's arrays are not those of `params`.
    """
    wanted = _on_mesh({"params": params}, mesh)
    if more := [name for name in _check_arrays(folder, wanted) if name.startswith("params/")]:
        raise UserError(f"{folder}: {more[0]} has no place in this config's model")
    restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
    args = ocp.args.PyTreeRestore(wanted, restore_args=restore_args, partial_restore=True)
    with _reading(folder), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        return reader.restore(folder / "state", args=args)["params"]


@contextlib.contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Turn a read error of orbax or tensorstore, after the checkpoint has verified, into an `UnreadableError`."""
    try:
        yield
    except (OSError, ValueError) as error:
        code = re.search(r"os_error_code='(\d+)'", str(error))  # In the text of tensorstore's ValueError.
        number = error.errno if isinstance(error, OSError) else code and int(code[1])
        if number is None or isinstance(error, FileNotFoundError):
            raise
        why = os.strerror(number)
        raise UnreadableError(f"{folder} cannot be read: {why}; run the same command again") from error


def _open_orbax(before_commit: Callable[[], None], save_seconds: int | None) -> ocp.AsyncCheckpointer:
    """Return orbax's checkpointer; its CheckpointManager would take any folder with a number for a checkpoint."""
    handler = ocp.CompositeCheckpointHandler(
        state=ocp.StandardCheckpointHandler(), loader=ocp.JsonCheckpointHandler(), config=ocp.JsonCheckpointHandler()
    )
    options = ocp.AsyncOptions(post_finalization_callback=before_commit)
    if save_seconds is not None:
        options.timeout_secs = save_seconds
    return ocp.AsyncCheckpointer(handler, async_options=options)


def _check_arrays(folder: Path, wanted: Any) -> list[str]:
    """Compare with the manifest first: orbax's own error for a mismatch names no array, and dtypes it casts.

    Returns:
        The names of arrays in the checkpoint that are not wanted.

    Raises:
        UserError: a wanted one is missing, or has another shape or dtype.
    """
    saved = dict(read_manifest(folder).arrays)
    # Parameters first: the user knows them, and their moments differ with them.
    arrays = sorted(describe_arrays(wanted).items(), key=lambda item: not item[0].startswith("params/"))
    for name, (shape, dtype) in arrays:
        if saved.pop(name, None) != (shape, dtype):
            raise UserError(
                f"{folder}: {name} is not {shape} {dtype} there; "
                "model or optimizer was configured otherwise: restore that config, or start a new --workdir"
            )
    return list(saved)


def _as_tree(state: TrainState) -> dict[str, Any]:
    return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}


def _on_mesh(tree: Any, mesh: jax.sharding.Mesh) -> Any:
    """Give abstract arrays their place on real devices; scalars carry no sharding of their own."""

    def place(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = leaf.sharding.spec if leaf.sharding is not None else jax.P()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.NamedSharding(mesh, spec))

    return jax.tree.map(place, tree)
