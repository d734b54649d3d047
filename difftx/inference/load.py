"""Loading of a checkpoint's model for generation, without the data of the run."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path

import jax

from difftx.config import Config
from difftx.config.build import override
from difftx.data.tokenizer import fingerprint
from difftx.errors import UserError
from difftx.inference.decode import LanguageModel
from difftx.parallel import multihost
from difftx.parallel.mesh import check_model_divisible, make_mesh
from difftx.training.checkpoint.checkpointer import Checkpointer, restore_params
from difftx.training.checkpoint.reading import Checkpoint, open_checkpoint, open_tokenizer
from difftx.training.run import agree_on_command, read_config
from difftx.training.state import init_state


def load(workdir: Path, step: int | None, overrides: Mapping[str, str], processes: argparse.Namespace) -> LanguageModel:
    """Return the model of a run's checkpoint; `step` = None selects the newest checkpoint that verifies.

    Args:
        workdir: Directory of the run.
        step: Step of the checkpoint.
        overrides: Changes to the run's config, such as `{"mesh.tensor": "4"}`.
        processes: All flags of the command, including those of `multihost`.

    Raises:
        UserError: the checkpoint does not exist, or does not fit the devices or the tokenizer.
    """
    now = override(read_config(workdir), overrides)
    multihost.start(processes, now.multihost)
    agree_on_command(now, processes)
    mesh = make_mesh(now.mesh)

    def read(checkpoint: Checkpoint) -> LanguageModel:
        check_model_divisible(checkpoint.config, mesh)
        config, tokenizer = multihost.agree(
            "the tokenizer",
            lambda: open_tokenizer(checkpoint),
            lambda found: {"vocabulary of data.tokenizer": fingerprint(found[1])},
            now.multihost.barrier_timeout_seconds,
        )
        with jax.set_mesh(mesh):
            abstract = jax.eval_shape(lambda: init_state(config).params)
            params = restore_params(checkpoint.folder, abstract, mesh)
        checkpoint.require_unchanged()
        return LanguageModel(config, mesh, params, tokenizer)

    return read_checkpoint(workdir, step, now, read, flag="--workdir")


def read_checkpoint[T](workdir: Path, step: int | None, now: Config, read: Callable[[Checkpoint], T], flag: str) -> T:
    """Return the result of `read` on a run's checkpoint; `step` = None selects the newest checkpoint that verifies.

    If training deletes the newest checkpoint meanwhile, `read` is called again with the one that is then the newest.

    Args:
        workdir: Directory of the run.
        step: Step of the checkpoint.
        now: Config of the run directory, with the command's overrides.
        read: Function that reads the checkpoint.
        flag: Flag that names `workdir`, for messages.

    Raises:
        UserError: the checkpoint does not exist.
    """
    checkpointer = Checkpointer(workdir)

    def read_step(step: int) -> T:
        return read(open_checkpoint(checkpointer.folder / str(step), now))

    if step is not None:
        return read_step(checkpointer.verified(step))
    result = checkpointer.read_newest(read_step)
    if result is None:
        raise UserError(f"{flag}={workdir}: no checkpoint there yet")
    return result
