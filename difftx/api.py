"""The functions of `import difftx`, which train, load and evaluate models in Python like the commands of difftx."""

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from difftx import compilation_cache
from difftx.commands import train as command
from difftx.commands.evaluate import run_suites
from difftx.commands.flags import config_of
from difftx.config import MeshConfig
from difftx.config.build import named_fields
from difftx.errors import EXIT_PREEMPTED, RunError, UserError
from difftx.evals import check_suites
from difftx.evals.result import Number
from difftx.files import downloaded, require_writable, size_of
from difftx.inference.load import load_model
from difftx.inference.trained_run import TrainedRun
from difftx.interop.fields import CONFIG
from difftx.interop.runs import open_folder
from difftx.json_files import read_json
from difftx.parallel import multihost
from difftx.parallel.mesh import make_mesh
from difftx.registry import load_extensions
from difftx.storage.paths import path_of
from difftx.training.checkpoint.checkpointer import Checkpoints
from difftx.training.checkpoint.manifest import WeightsPart
from difftx.training.run import read_config

type PathLike = str | os.PathLike[str]


def load(
    path: PathLike,
    *,
    step: int | None = None,
    weights: WeightsPart = "params",
    extensions: Sequence[PathLike] = (),
) -> TrainedRun:
    """Load a model onto the first device. You can load several models at a time.

    Args:
        path: The directory of a run (`--workdir` of `difftx train`), or a model folder for transformers with its
            tokenizer, such as an export of `difftx convert`. It may be in a bucket.
        step: The step of the checkpoint. By default, the newest valid checkpoint is loaded.
        weights: "params", or "ema" for their moving average.
        extensions: The extension files that the run used, as for `--extension`.

    Raises:
        UserError: There is no such run or checkpoint, difftx cannot read the model in the folder, or an extension that
            the run needs is not given.
    """
    load_extensions(extensions)
    if isinstance(step, str):
        raise UserError(f"step={step!r}: expected an integer")
    folder = path_of("path", os.fspath(path))
    raw = read_json(folder / CONFIG) if size_of(folder / CONFIG) is not None else None
    if isinstance(raw, dict) and "architectures" in raw:
        if (step, weights) != (None, "params"):
            given = f"step={step}" if step is not None else f"weights={weights!r}"
            raise UserError(
                f"{given} selects a checkpoint of a run, and {folder} is the folder of a model; leave it out"
            )
        with downloaded(folder) as source:
            return TrainedRun(open_folder(source))
    config = dataclasses.replace(read_config(folder), mesh=MeshConfig(fsdp=1))
    mesh = make_mesh(config.mesh, jax.local_devices()[:1])
    run = Checkpoints(folder)
    lm, checkpoint = load_model(run, step, config, mesh, weights)
    return TrainedRun(lm, run, checkpoint)


def train(
    config: PathLike,
    workdir: PathLike,
    *,
    extensions: Sequence[PathLike] = (),
    allow_config_change: bool = False,
    **fields: Any,
) -> TrainedRun:
    """Train a model on all devices of this process, or resume a run, as `difftx train` does, and load the result.

    Args:
        config: Name or file of a recipe, or the config.json of a run, as for `--config`, such as "quickstart:diff".
        workdir: The directory of the run. If an earlier call or command has trained there, the run is resumed. It may
            be in a bucket.
        extensions: Your files with architectures, suites, …, as for `--extension`.
        allow_config_change: Whether to resume even if the model or the data have changed.
        fields: Fields of the config (docs/config.md), given by the last part of their names, as in `steps=200`, or in
            their groups, as in `model={"d_model": 64}`. Values may be texts, as on the command line.

    Raises:
        UserError: A field, the data or the workdir is not valid.
        RunError: A signal stopped the training (a checkpoint is saved, and the same call resumes the run), or the
            guards stopped it after too many bad steps.
    """
    began = time.perf_counter()
    if isinstance(config, Mapping):
        raise UserError('config: name a recipe, such as "quickstart:diff", and give fields as keyword arguments')
    load_extensions(extensions)
    folder = path_of("workdir", os.fspath(workdir))
    made = command.checked(config_of(os.fspath(config), named_fields(fields)))
    compilation_cache.enable(made.train.compilation_cache)
    require_writable(folder)
    code = command.train(made, folder, multihost.ALONE, began=began, allow_config_change=allow_config_change)
    if code == EXIT_PREEMPTED:
        raise RunError(f"{folder}: a signal stopped the training; call difftx.train again to continue")
    if code:
        raise RunError(
            f"{folder}: the training stopped after too many bad steps; metrics.jsonl has a row of split stop"
        )
    return load(folder)


def evaluate(
    run: TrainedRun, suites: str | Sequence[str], *, again: bool = False, **fields: Any
) -> dict[str, Mapping[str, Number]]:
    """Evaluate the checkpoint of a run on its device, as `difftx eval` does. Return the numbers by suite and name.

    Results are also written to `evals/` in the directory of the run. A suite is not run again if there is a result for
    the same weights and settings.

    Args:
        run: A run from `difftx.load` or `difftx.train`. Its training data must still exist.
        suites: Names of suites (docs/suites.md), such as "loss" or ["loss", "position"].
        again: Whether to run suites that already have a result.
        fields: Fields of the config group `eval`, such as `loss_tokens=4096` or `icl={"tasks": …}`.

    Raises:
        UserError: A suite or a field is not valid, the run is an exported folder, or the data have changed.
    """
    if not isinstance(run, TrainedRun):
        raise UserError(f"run={run!r}: expected a run, which difftx.load returns")
    names = suites.split(",") if isinstance(suites, str) else list(suites)
    check_suites(names)
    overrides = named_fields({"eval": fields})
    if run.workdir is None or run.step is None:
        raise UserError("run: an exported folder has no data to evaluate on; load the run that it was exported from")
    devices = list(run.model.embedding_VD.devices())
    options: dict[str, Any] = {"steps": str(run.step), "part": run.weights, "again": again, "devices": devices}
    (results,) = run_suites(Checkpoints(run.workdir), names, overrides, **options).values()
    return results
