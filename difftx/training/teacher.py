"""The teacher for distillation: the model of another run (`train.teacher`)."""

import dataclasses
from typing import Any

import jax

from difftx.config import Config
from difftx.errors import UserError
from difftx.model.abstract import vector_mask
from difftx.parallel.multihost import print_on_primary
from difftx.training.checkpoint.manifest import Manifest
from difftx.training.checkpoint.restoring import config_of, on_mesh, restore_params
from difftx.training.fit import check_model
from difftx.training.resume import read_source
from difftx.training.run import Run
from difftx.training.state import init_params

FIELD = "train.teacher"


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A model with constant parameters. They are sharded as in training, with matrices in the compute dtype."""

    config: Config
    params: Any
    weights: str  # Identifier of the parameters.


def read_teacher(run: Run) -> Teacher | None:
    """Load the teacher of a run, or return None if there is none. The run's mesh must be set."""
    source = run.config.train.teacher
    return None if source is None else read_source(FIELD, source, lambda manifest: _read(run, source, manifest))


def _read(run: Run, source: str, manifest: Manifest) -> Teacher:
    config, tokenizer = config_of(manifest), run.data.signature["tokenizer"]
    sizes = config.model.vocab_size, run.config.model.vocab_size
    if manifest.data.get("tokenizer") != tokenizer or sizes[0] != sizes[1]:
        raise UserError(
            f"{FIELD}={source}: was trained with another tokenizer than data.tokenizer={run.config.data.tokenizer!r}, "
            f"or has model.vocab_size={sizes[0]} in place of {sizes[1]}; use a teacher with the same vocabulary"
        )
    config = config.but(mesh={"context_method": run.config.mesh.context_method})
    check_model(config, run.mesh)
    params = jax.jit(_cast, static_argnums=0, donate_argnums=1)(config, restore_params(manifest, config, run.mesh))
    print_on_primary(f"teacher from {manifest.folder}")
    return Teacher(config, params, manifest.weights)


def abstract_teacher(config: Config, mesh: jax.sharding.Mesh) -> tuple[Config, Any] | None:
    """Return the config and the abstract parameters of a run's teacher. The mesh must be set."""
    if config.train.teacher is None:
        return None
    teacher = read_source(FIELD, config.train.teacher, config_of)
    return teacher, on_mesh(jax.eval_shape(lambda: _cast(teacher, init_params(teacher))), mesh)


def _cast(config: Config, params: Any) -> Any:
    dtype = config.model.compute_dtype
    return jax.tree.map(lambda x, is_vector: x if is_vector else x.astype(dtype), params, vector_mask(config.model))
