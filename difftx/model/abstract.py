"""Shapes and numbers of a model's parameters, computed without allocating them."""

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
    """Numbers of parameters of a model by kind."""

    embedding: int  # Number of parameters in the input embedding and, unless tied to it, in the unembedding.
    projections: int  # Number of parameters in the attention and MLP matrices of all layers.
    vectors: int  # Number of parameters in norm gains, biases, λ vectors, attention sinks and constants.

    @property
    def total(self) -> int:
        return self.embedding + self.projections + self.vectors


@functools.cache
def abstract_parameters(config: ModelConfig) -> nnx.State:
    """Return the shapes and dtypes of a `Decoder`'s parameters, with the metadata that the layers set."""
    with one_abstract_device():
        return nnx.state(nnx.eval_shape(lambda: Decoder(config, Layout(), rngs=nnx.Rngs(0))))


@contextlib.contextmanager
def one_abstract_device() -> Iterator[None]:
    """Set a mesh of one abstract device, on which shapes can be computed whatever mesh the caller has set."""
    axis_types = (jax.sharding.AxisType.Explicit,) * len(AXES)
    one_device = jax.sharding.AbstractMesh((1,) * len(AXES), AXES, axis_types=axis_types)
    # JAX can replace the caller's mesh by a mesh of another size only after an empty mesh.
    no_mesh = jax.sharding.AbstractMesh((), ())
    with jax.sharding.use_abstract_mesh(no_mesh), jax.sharding.use_abstract_mesh(one_device):
        yield


def parameter_metadata(config: ModelConfig, name: str, default: Any) -> Any:
    """Return the tree of parameters with the value of a metadata field of `layers.py`, or `default` if it is not set.

    - `is_vector`: True for parameters without weight decay, such as norm gains.
    - `is_lambda`: True for λ vectors.
    - `is_constant`: True for parameters that training does not change.
    - `is_progress`: True for scalars that grow from 0 to 1 over `anneal_steps` updates.
    - `matrix_axes`: the input axes and the output axes of a linear map, two tuples of negative integers.
    """
    values = jax.tree.map(
        lambda variable: variable.get_metadata().get(name, default),
        abstract_parameters(config),
        is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
    )
    return nnx.to_pure_dict(values)


def vector_mask(config: ModelConfig) -> Any:
    """Return the tree of parameters with True for those made by `layers.vector`, such as norm gains, else False."""
    return parameter_metadata(config, "is_vector", False)


def count_parameters(config: ModelConfig) -> Parameters:
    """Return the numbers of parameters of a `Decoder` by kind."""
    sizes = jax.tree.map(lambda leaf: leaf.size, nnx.to_pure_dict(abstract_parameters(config)))
    vectors = sum(jax.tree.leaves(jax.tree.map(operator.mul, sizes, vector_mask(config))))
    embedding = sizes["embedding_VD"] + sizes.get("unembedding_VD", 0)
    return Parameters(embedding, sum(jax.tree.leaves(sizes)) - vectors - embedding, vectors)
