"""Save and restore the state of a run, and check how the config changed since the checkpoint."""

import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

import jax

from difftx.config import Config, ModelConfig
from difftx.config.fields import Effect, Flag, fields_with, flat, marks, values_of
from difftx.data.loader import Loader, signature_changes
from difftx.data.mixture import begun
from difftx.errors import UserError, shown
from difftx.files import resolved, size_of, source_sha256
from difftx.parallel.multihost import barrier, decide_on_primary, is_primary, print_on_primary
from difftx.registry import changed_extensions
from difftx.storage.paths import path_of
from difftx.training.checkpoint import protocol
from difftx.training.checkpoint.checkpointer import Checkpointer, Checkpoints
from difftx.training.checkpoint.manifest import MANIFEST, Manifest, package_versions, read_manifest, why_invalid
from difftx.training.checkpoint.restoring import config_of, restore_params, restore_state
from difftx.training.checkpoint.retention import ROLLING
from difftx.training.guards import Guard, decide
from difftx.training.run import Run
from difftx.training.state import TrainState, init_state, jit_init


@dataclasses.dataclass(frozen=True)
class Change:
    """A field with different values in two configs."""

    field: str  # Full name, such as "train.steps".
    old: object
    new: object
    marks: frozenset[Effect | Flag]  # What the field affects, and its flags.

    def __str__(self) -> str:
        return f"{self.field}: {self.old} → {self.new}"

    @property
    def is_neutral(self) -> bool:
        """True if the change does not affect the result of training, except by rounding."""
        return self.has(Effect.EVALUATION, Effect.ROUNDING, Effect.NOTHING)

    @property
    def is_safe(self) -> bool:
        """Whether a run may resume with the new value."""
        return self.is_neutral or self.has(Flag.RESUME)

    def has(self, *any_of: Effect | Flag) -> bool:
        """Return whether the field has any of these marks."""
        return not self.marks.isdisjoint(any_of)


def changed_fields(old: Config, new: Config) -> list[Change]:
    """Return the fields that differ between two configs."""
    before, after = flat(values_of(old)), flat(values_of(new))
    changed = {name: (before.get(name), value) for name, value in after.items() if before.get(name) != value}
    return [Change(name, *changed[name], of_field) for name, of_field in marks(Config) if name in changed]


@dataclasses.dataclass
class RunState:
    """Everything that a checkpoint holds. A run restored from it continues as if it had never stopped."""

    run: Run
    checkpointer: Checkpointer
    train: TrainState
    step: int  # The step that `train` has reached.
    loader: Loader
    guard: Guard
    source_weights: str | None  # Identifier of the parameters from `checkpoint.init_from`, or None for new ones.

    def save(self, *, wait: bool = False, rolling: bool = False) -> None:
        """Save a checkpoint, in the background unless `wait` is True. The next save replaces a `rolling` checkpoint."""
        data = self.loader.state() | {"guard": self.guard.state(), "source_weights": self.source_weights}
        data |= {"teacher": self.run.teacher} if self.run.teacher is not None else {}
        data |= {"valid": self.run.data.valid_fingerprints} | ({ROLLING: True} if rolling else {})
        save = self.checkpointer.save_and_wait if wait else self.checkpointer.save
        save(self.train, data, self.run.config)

    def act_on_bad_steps(self, attempt: int) -> dict[str, Any] | None:
        """Rewind and return None, or return the final row for metrics.jsonl if the run must end.

        A rewind deletes all later checkpoints, and sets the data position of the earlier one to after the bad steps.
        All processes must call this after the guard has tripped and the last save has ended. Do not use this object
        afterwards.
        """
        bad, config, checkpointer = self.guard.tripped, self.run.config, self.checkpointer
        assert bad is not None
        # The run may be some steps past the last bad one, because metrics arrive one step late.
        examples = self.loader.state()["examples"] - (self.step - bad.last) * config.batch_rows
        decision = decide(self.guard, config, checkpointer, examples, attempt)
        if isinstance(decision, dict):
            return decision
        step = decision.step
        del self.train  # Free this memory: a rewind to the start of the run creates a new state.
        if not decide_on_primary(lambda: step in checkpointer.steps()):
            start = _initial(self.run, checkpointer)
            if start.source_weights != self.source_weights:
                raise UserError(
                    f"checkpoint.init_from={config.checkpoint.init_from}: has other weights than at the start of this "
                    "run, so the run cannot return to its start; use a new --workdir"
                )
            start.save(wait=True)
        if is_primary():
            # If the run is killed here, it resumes from an older checkpoint and reaches the same bad steps again.
            owner, folder = self.run.owner, checkpointer.folder
            for later in (other for other in reversed(checkpointer.steps()) if other > step):
                protocol.remove(owner, folder / str(later))
            protocol.amend(owner, folder / str(step), lambda loader: decision.apply(loader, self.guard.rewinds))
        barrier(f"rewind {len(self.guard.rewinds) + 1}", config.multihost.barrier_timeout_seconds)
        return None


def restore(run: Run, checkpointer: Checkpointer, *, allow_config_change: bool) -> RunState:
    """Return the state with which the run continues."""
    # Use the first source that exists:
    #   1. The newest valid checkpoint in the run's workdir. If checkpoints exist but none is valid, raise an error.
    #   2. `checkpoint.branch_from`: a checkpoint of another run, as if it were one of this run.
    #   3. `checkpoint.init_from`: only the parameters of another run. Steps and data start from the beginning.
    #   4. New parameters from `train.seed`.
    source = run.config.checkpoint
    resume = functools.partial(_resume, run, checkpointer, allow_config_change=allow_config_change)
    if (step := checkpointer.newest()) is not None:
        return resume(checkpointer.read(step))
    decide_on_primary(run.require_none_saved)
    if source.branch_from is not None:
        state = read_source("checkpoint.branch_from", source.branch_from, resume)
        # Save now, because the other run may delete its checkpoint, or have a newer one at the next start.
        state.save(wait=True)
        return state
    return _initial(run, checkpointer)


def _loader(run: Run) -> Loader:
    return Loader(
        run.data,
        batch_rows=run.config.batch_rows,
        prefetch_batches=run.config.data.prefetch_batches,
        sharding=run.batch_sharding,
        vocab_size=run.config.model.embeddings,
    )


def _initial(run: Run, checkpointer: Checkpointer) -> RunState:
    """Return the state at step 0, with new parameters or those of `checkpoint.init_from`."""
    state, weights = jit_init(init_state, run.config), None
    if (source := run.config.checkpoint.init_from) is not None:
        params, weights = read_source("checkpoint.init_from", source, functools.partial(_params_in, run))
        state = dataclasses.replace(state, params=state.params | params)  # Adapters are new.
    return RunState(run, checkpointer, state, 0, _loader(run), Guard(run.config.guards), weights)


def _resume(run: Run, checkpointer: Checkpointer, manifest: Manifest, *, allow_config_change: bool) -> RunState:
    """Return the state in a checkpoint of this run, or of the run that this one branches from."""
    step, folder = manifest.step, manifest.folder
    is_branch = folder.parent != checkpointer.folder
    source = f"checkpoint.branch_from={run.config.checkpoint.branch_from}" if is_branch else str(run.workdir)
    _require_resumable(manifest, run, source, is_branch=is_branch)
    _print_other_code(manifest)
    refused = [f"extension {change}" for change in changed_extensions(manifest.extensions, str(folder))]
    if allow_config_change:
        for change in refused:
            print_on_primary(f"changed since the checkpoint: {change} (not safe)")
    if allow_config_change or not refused:  # A changed extension may reject the config of the checkpoint.
        allowed = (Flag.BRANCH, Effect.START) if is_branch else ()
        trained = config_of(manifest)
        examples = step * trained.batch_rows  # More after a rewind, which skips some. `Loader.restore` compares again.
        data_changes = signature_changes(*(begun(s, examples) for s in (manifest.data, run.data.signature)))
        refused += _report_changes(trained, run.config, data_changes, allowed, print_unsafe=allow_config_change)
    if refused and not allow_config_change:
        otherwise = "" if is_branch else "use a new --workdir, "
        raise UserError(
            f"{source}: changed since the checkpoint of step {step}: {', '.join(refused)}; "
            f"restore what changed, {otherwise}or continue nevertheless with --allow_config_change"
        )
    abstract = jax.eval_shape(lambda: init_state(run.config))
    state, loader_state = restore_state(manifest, abstract, run.mesh), manifest.loader
    if not allow_config_change and loader_state.get("teacher") != run.teacher:
        raise UserError(
            f"train.teacher={run.config.train.teacher}: has other weights than the teacher up to step {step}; name the "
            "checkpoint of that teacher, or continue nevertheless with --allow_config_change"
        )
    valid = run.data.valid_fingerprints
    for change in signature_changes(loader_state["valid"], valid):
        # A branch has no results of earlier steps in its workdir.
        has_best = run.config.checkpoint.keep_best is not None and not is_branch
        best = ", and checkpoint.keep_best compares only later ones" if has_best else ""
        print_on_primary(
            f"changed since the checkpoint: validation set {change} (allowed, but losses on it up to step {step} "
            f"cannot be compared with later ones{best})"
        )
    if allow_config_change:
        loader_state = loader_state | {"signature": run.data.signature}
    loader, guard = _loader(run), Guard(run.config.guards)
    loader.restore(loader_state)
    guard.restore(loader_state["guard"])
    if is_branch:
        guard.first_regular = step
        print_on_primary(f"branch of {folder}")
    return RunState(run, checkpointer, state, step, loader, guard, loader_state["source_weights"])


def _require_resumable(manifest: Manifest, run: Run, source: str, *, is_branch: bool) -> None:
    """Raise `UserError` if the checkpoint only has weights, or if its step is greater than `train.steps`.

    `source` names the checkpoint's run in the message.
    """
    step, steps = manifest.step, run.config.train.steps
    if not any(name.startswith("opt_state/") for name in manifest.arrays):
        weights = run.config.checkpoint.branch_from if is_branch else run.workdir
        raise UserError(
            f"{source}: its checkpoint has weights alone, from difftx convert; use a new --workdir with "
            f"--config.checkpoint.init_from={weights}"
        )
    if not is_branch and step > steps:
        raise UserError(
            f"{source}: train.steps={steps} is less than the step of the run's newest checkpoint, "
            f"{step}; set train.steps to at least {step}, or use a new --workdir"
        )
    if is_branch and step >= steps:
        raise UserError(
            f"{source}: {manifest.folder} is of step {step}, and train.steps={steps} counts the steps from the "
            f"start of that run; set train.steps to more than {step}"
        )


def _print_other_code(manifest: Manifest) -> None:
    """Print which package versions changed since the checkpoint, and whether the source files of difftx did."""
    for name, version in package_versions().items():
        if (before := manifest.packages.get(name, version)) != version:
            print_on_primary(f"{name}: {before} → {version}, since the checkpoint of step {manifest.step}")
    if manifest.source_sha256 != (source := source_sha256()):
        change = f"{shown(manifest.source_sha256)} → {shown(source)}"
        print_on_primary(f"source files of difftx (SHA-256): {change}, since the checkpoint of step {manifest.step}")


def _report_changes(
    old: Config,
    new: Config,
    data_changes: list[str],
    allowed: tuple[Effect | Flag, ...],
    *,
    print_unsafe: bool,
) -> list[str]:
    """Print the safe changes of the config, and return the unsafe changes of config and data.

    A change is safe if `Change.is_safe` is True, or if its field has a mark in `allowed`. With `print_unsafe`, also
    print the unsafe changes.
    """
    refused, data_fields = [], []
    for change in changed_fields(old, new):
        # A `data` field may change while the data stays the same. Only the data's signature shows this.
        is_data = change.field.startswith("data.") and not change.is_safe
        safe = change.is_safe or change.has(*allowed) or (is_data and not data_changes)
        text = str(change)
        if change.has(Effect.START) and not safe:
            origin = old.checkpoint.branch_from or old.checkpoint.init_from or "new parameters"
            text += f", without effect on this run, which started from {origin}"
        if safe or print_unsafe:  # If unsafe changes are not printed here, the error message lists them.
            verdict = "safe" if safe else "not safe"
            if change.field == "train.steps" and new.optimizer.schedule != "constant":
                verdict = f"allowed; the learning rate may jump, because it now follows {new.train.steps} steps"
            elif change.field.startswith("eval.") and new.checkpoint.keep_best is not None:
                verdict = "safe; checkpoint.keep_best compares only results with equal settings of its suite"
            print_on_primary(f"changed since the checkpoint: {text} ({verdict})")
        if not safe:
            (data_fields if is_data else refused).append(text)
    return refused + (data_fields or [f"data, {change}" for change in data_changes])


def read_source[T](field: str, source: str, read: Callable[[Manifest], T]) -> T:
    """Return `read(manifest)` for the checkpoint that a config field names, by the checkpoint's folder or its run."""
    path, name = path_of(field, source), f"{field}={source}"

    def is_checkpoint() -> bool:
        if size_of(path / MANIFEST) is None or size_of(path / "config.json") is not None:  # A run has both.
            return False
        if why := why_invalid(path, content=True):
            raise UserError(f"{name}: the checkpoint does not verify: {why}")
        return True

    if decide_on_primary(is_checkpoint):
        return read(read_manifest(resolved(path)))
    found = Checkpoints(path).read_newest(read)
    if found is None:
        raise UserError(
            f"{name}: neither a run with checkpoints nor a checkpoint's folder; `difftx convert` imports other models"
        )
    return found


def _params_in(run: Run, manifest: Manifest) -> tuple[object, str]:
    """Return a checkpoint's parameters and their identifier."""
    folder = manifest.folder
    if manifest.data.get("tokenizer") != run.data.signature["tokenizer"]:
        raise UserError(
            f"checkpoint.init_from={run.config.checkpoint.init_from}: {folder} was trained with another tokenizer than "
            f"data.tokenizer={run.config.data.tokenizer!r}; use that one"
        )
    # With other factors for the residual branches and logits, the same weights are a different model.
    model = manifest.config["model"]
    for name in ("mup_base_width", "mup_base_layers"):
        theirs, ours = model.get(name), getattr(run.config.model, name)
        if theirs != ours:
            raise UserError(
                f"checkpoint.init_from={run.config.checkpoint.init_from}: {folder} has model.{name}={theirs}, and this "
                f"model {ours}; use the same"
            )
    params = restore_params(manifest, run.config, run.mesh)
    print_on_primary(f"parameters from {folder}")
    before, after = flat(model), flat(json.loads(run.config.to_json())["model"])
    names = [name for name in fields_with(ModelConfig, Effect.FUNCTION) if before.get(name) != after.get(name)]
    changes = [f"model.{name}: {before.get(name)} → {after.get(name)}" for name in names]
    changes += [f"extension {change}" for change in changed_extensions(manifest.extensions, str(folder))]
    for change in changes:
        print_on_primary(f"{change}, other than in the run of the parameters")
    return params, manifest.weights
