"""The model of a run's checkpoint, ready to generate; the run's data is not read."""

import argparse
from collections.abc import Mapping
from pathlib import Path

import jax
import tiktoken

from difftx.config import Config
from difftx.config_reader import override
from difftx.data.tokenizer import fingerprint, load_tokenizer
from difftx.errors import UserError
from difftx.inference.decode import LanguageModel
from difftx.parallel import multihost
from difftx.parallel.mesh import check_model_divisible, make_mesh
from difftx.training.agreement import agree_on_command
from difftx.training.checkpoint import Checkpointer, restore_params
from difftx.training.manifest import read_manifest
from difftx.training.run import read_config
from difftx.training.state import init_state


def load(workdir: Path, step: int | None, overrides: Mapping[str, str], processes: argparse.Namespace) -> LanguageModel:
    """Return the model of a step, or of the newest checkpoint that verifies.

    Args:
        workdir: of the run.
        step: of the checkpoint, or None.
        overrides: of the run's config, such as `{"mesh.tensor": "4"}`.
        processes: all flags of the command, with those of `multihost`.

    Raises:
        UserError: there is no such checkpoint, or it does not fit the devices or the tokenizer.
    """
    config = override(read_config(workdir), overrides)
    multihost.start(processes, config.multihost)
    agree_on_command(config, processes)
    mesh = make_mesh(config.mesh)
    check_model_divisible(config, mesh)
    tokenizer = multihost.agree(
        "the tokenizer",
        lambda: load_tokenizer(config.data.tokenizer),
        lambda tokenizer: {"vocabulary of data.tokenizer": fingerprint(tokenizer)},
        config.multihost.barrier_timeout_seconds,
    )
    checkpointer = Checkpointer(workdir)
    step = checkpointer.newest() if step is None else checkpointer.verified(step)
    if step is None:
        raise UserError(f"--workdir={workdir}: no checkpoint there yet")
    folder = checkpointer.folder / str(step)
    check_tokenizer(config, tokenizer, folder)
    with jax.set_mesh(mesh):
        abstract = jax.eval_shape(lambda: init_state(config).params)
        params = restore_params(folder, abstract, mesh)
    return LanguageModel(config, mesh, params, tokenizer)


def check_tokenizer(config: Config, tokenizer: tiktoken.Encoding, folder: Path) -> None:
    """Raise `UserError` where the checkpoint in `folder` has another vocabulary than the config's tokenizer."""
    if read_manifest(folder).data.get("tokenizer") != fingerprint(tokenizer):
        raise UserError(
            f"{folder} was trained with another vocabulary than data.tokenizer={config.data.tokenizer!r} has now; "
            "put the tokenizer's file back"
        )
