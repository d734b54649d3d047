"""Compute a model's parameter shapes and parameter counts without allocating arrays."""

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx

from difftx.config import ModelConfig
from difftx.model.decoder import Decoder
from difftx.parallel.layout import Layout
from difftx.parallel.mesh import AXES


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Parameter counts of a model by kind."""

    embedding: int  # Parameters in the input embedding, plus those of the unembedding if the two are not tied.
    projections: int  # Parameters in the attention and MLP matrices of all layers.
    vectors: int  # Parameters in norm gains, biases, λ vectors, attention sinks and constants.

    @property
    def total(self) -> int:
        return self.embedding + self.projections + self.vectors


@functools.cache
def abstract_parameters(config: ModelConfig) -> nnx.State:
    """Return the shapes, dtypes and metadata of a `Decoder`'s parameters."""
    with one_abstract_device():
        return nnx.state(nnx.eval_shape(lambda: Decoder(config, Layout(), rngs=nnx.Rngs(0))))


@contextlib.contextmanager
def one_abstract_device() -> Iterator[None]:
    """Set a mesh of one abstract device, so that the shapes do not depend on the caller's mesh."""
    axis_types = (jax.sharding.AxisType.Explicit,) * len(AXES)
    one_device = jax.sharding.AbstractMesh((1,) * len(AXES), AXES, axis_types=axis_types)
    # JAX refuses to replace a mesh by one of another size, so set an empty mesh in between.
    no_mesh = jax.sharding.AbstractMesh((), ())
    with jax.sharding.use_abstract_mesh(no_mesh), jax.sharding.use_abstract_mesh(one_device):
        yield


def parameter_metadata(config: ModelConfig, name: str, default: Any) -> Any:
    """Return a tree with the value of the metadata field `name` for each parameter, or `default` where it is not set.

    `layers.py` sets these fields:
    - `is_vector`: True for parameters without weight decay, such as norm gains.
    - `is_lambda`: True for λ vectors.
    - `is_constant`: True for parameters that training does not change.
    - `is_progress`: True for scalars that grow from 0 to 1 over `anneal_steps` updates.
    - `matrix_axes`: two tuples of negative integers, the input axes and the output axes of a linear map.
    """
    values = jax.tree.map(
        lambda variable: variable.get_metadata().get(name, default),
        abstract_parameters(config),
        is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
    )
    return nnx.to_pure_dict(values)


def vector_mask(config: ModelConfig) -> Any:
    """Return a tree with a bool per parameter: True if it has no weight decay, like a norm gain."""
    return parameter_metadata(config, "is_vector", False)


def count_parameters(config: ModelConfig) -> Parameters:
    """Return the parameter counts of a `Decoder` by kind."""
    sizes = jax.tree.map(lambda leaf: leaf.size, nnx.to_pure_dict(abstract_parameters(config)))
    vectors = sum(jax.tree.leaves(jax.tree.map(operator.mul, sizes, vector_mask(config))))
    embedding = sizes["embedding_VD"] + sizes.get("unembedding_VD", 0)
    return Parameters(embedding, sum(jax.tree.leaves(sizes)) - vectors - embedding, vectors)
