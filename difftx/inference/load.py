"""Loading of a checkpoint's model for generation. The data of the run is not read."""

import argparse
from collections.abc import Mapping
from pathlib import Path

import jax

from difftx.config.build import override
from difftx.data.tokenizer import fingerprint
from difftx.errors import UserError
from difftx.inference.decode import LanguageModel
from difftx.parallel import multihost
from difftx.parallel.mesh import check_model_divisible, make_mesh
from difftx.training.agreement import agree_on_command
from difftx.training.checkpoint.checkpointer import Checkpointer, restore_params
from difftx.training.checkpoint.reading import open_checkpoint, open_tokenizer, read_newest
from difftx.training.run import read_config
from difftx.training.state import init_state


def load(workdir: Path, step: int | None, overrides: Mapping[str, str], processes: argparse.Namespace) -> LanguageModel:
    """Return the model of one checkpoint of a run.

    Args:
        workdir: Directory of the run.
        step: Step of the checkpoint. None selects the newest checkpoint that verifies.
        overrides: Changes to the run's config, such as `{"mesh.tensor": "4"}`.
        processes: All flags of the command, including those of `multihost`.

    Raises:
        UserError: the checkpoint does not exist, or does not fit the devices or the tokenizer.
    """
    now = override(read_config(workdir), overrides)
    multihost.start(processes, now.multihost)
    agree_on_command(now, processes)
    mesh = make_mesh(now.mesh)
    checkpointer = Checkpointer(workdir)

    def load_step(step: int) -> LanguageModel:
        checkpoint = open_checkpoint(checkpointer.folder / str(step), now)
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

    if step is not None:
        return load_step(checkpointer.verified(step))
    model = read_newest(checkpointer, load_step)
    if model is None:
        raise UserError(f"--workdir={workdir}: no checkpoint there yet")
    return model
