"""Load a checkpoint's model for generation. The run's training data is not needed."""

import argparse
from collections.abc import Callable, Mapping

import jax

from difftx.config import Config
from difftx.config.build import override
from difftx.errors import UserError
from difftx.inference.decode import LanguageModel
from difftx.parallel import multihost
from difftx.parallel.mesh import make_mesh
from difftx.training.checkpoint.checkpointer import Checkpoints
from difftx.training.checkpoint.manifest import Manifest, WeightsPart
from difftx.training.checkpoint.reading import Checkpoint, open_checkpoint, open_tokenizer
from difftx.training.checkpoint.restoring import restore_params
from difftx.training.fit import check_model, fit
from difftx.training.run import agree_on_command, read_config


def load(
    checkpoints: Checkpoints,
    step: int | None,
    overrides: Mapping[str, str],
    processes: argparse.Namespace,
    part: WeightsPart = "params",
) -> LanguageModel:
    """Connect to the other processes, if any, and load the model of a checkpoint.

    `read_checkpoint` explains `step`. `overrides` changes the run's config, as in `{"mesh.tensor": "4"}`. `processes`
    holds all flags of the command, including those for several processes. `part` selects the parameters or their
    moving average.
    """
    run_config = fit(override(read_config(checkpoints.workdir), overrides))
    multihost.start(processes, run_config.multihost)
    agree_on_command(run_config, processes)
    return load_model(checkpoints, step, run_config, make_mesh(run_config.mesh), part)[0]


def load_model(
    checkpoints: Checkpoints, step: int | None, run_config: Config, mesh: jax.sharding.Mesh, part: WeightsPart
) -> tuple[LanguageModel, Checkpoint]:
    """Load the model of a checkpoint onto the mesh of `run_config`. `load` explains the other arguments."""

    def read(checkpoint: Checkpoint) -> tuple[LanguageModel, Checkpoint]:
        check_model(checkpoint.config, mesh)
        config, tokenizer = multihost.agree(
            "the tokenizer",
            lambda: open_tokenizer(checkpoint),
            lambda found: {"vocabulary of data.tokenizer": found[1].fingerprint},
            run_config.multihost.barrier_timeout_seconds,
        )
        params = restore_params(checkpoint.manifest, config, mesh, part)
        return LanguageModel(config, mesh, params, tokenizer), checkpoint

    return read_checkpoint(checkpoints, step, run_config, read, flag="--workdir", part=part)


def read_checkpoint[T](
    checkpoints: Checkpoints,
    step: int | None,
    run_config: Config,
    read: Callable[[Checkpoint], T],
    *,
    flag: str,
    part: WeightsPart,
) -> T:
    """Call `read` with the checkpoint of `step`, or with the newest valid checkpoint if `step` is None.

    `run_config` is the run's config with the command's overrides. `part` selects the parameters or their moving
    average. `flag` is the command's flag for the run, for error messages.
    """

    def read_opened(manifest: Manifest) -> T:
        return read(open_checkpoint(manifest, run_config, part))

    if step is not None:
        checkpoints.require_valid(step)
        return read_opened(checkpoints.read(step))
    if (result := checkpoints.read_newest(read_opened)) is None:
        raise UserError(f"{flag}={checkpoints.workdir}: no checkpoint there yet")
    return result
