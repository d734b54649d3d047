"""What a model consists of, without its values: names, shapes and kinds of its parameters."""

import dataclasses
import functools
import math
from typing import Any

import jax
from flax import nnx

from difftx.config import ModelConfig
from difftx.model.decoder import Decoder
from difftx.parallel.layout import Layout
from difftx.parallel.mesh import AXES


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Numbers of parameters."""

    embedding: int  # One table if tied, else two.
    projections: int  # Matrices of all layers: attention and MLP.
    vectors: int  # Norm gains, λ vectors and sinks.

    @property
    def total(self) -> int:
        """All parameters."""
        return self.embedding + self.projections + self.vectors


@functools.cache
def abstract_parameters(config: ModelConfig) -> nnx.State:
    """Return the parameters of a `Decoder` as shapes and dtypes, with the metadata that its layers gave them."""
    axis_types = (jax.sharding.AxisType.Explicit,) * len(AXES)
    one_device = jax.sharding.AbstractMesh((1,) * len(AXES), AXES, axis_types=axis_types)
    # The caller may have set a mesh. JAX replaces it by one of another size only in two steps.
    no_mesh = jax.sharding.AbstractMesh((), ())
    with jax.sharding.use_abstract_mesh(no_mesh), jax.sharding.use_abstract_mesh(one_device):
        return nnx.state(nnx.eval_shape(lambda: Decoder(config, Layout(), rngs=nnx.Rngs(0))))


def vector_mask(config: ModelConfig) -> Any:
    """Return the tree of the parameters with True for vectors: they are not decayed and stay float32."""
    leaves = abstract_parameters(config)
    is_variable = {"is_leaf": lambda leaf: isinstance(leaf, nnx.Variable)}
    mask = jax.tree.map(lambda variable: variable.get_metadata().get("is_vector", False), leaves, **is_variable)
    return nnx.to_pure_dict(mask)


def count_parameters(config: ModelConfig) -> Parameters:
    """Count the parameters of a `Decoder`."""
    sizes = jax.tree.map(lambda leaf: math.prod(leaf.shape), nnx.to_pure_dict(abstract_parameters(config)))
    mask = vector_mask(config)
    vectors = sum(jax.tree.leaves(jax.tree.map(lambda size, is_vector: size * is_vector, sizes, mask)))
    embedding = sizes["embedding_VD"] + sizes.get("unembedding_VD", 0)
    projections = sum(jax.tree.leaves(sizes)) - vectors - embedding
    return Parameters(embedding, projections, vectors)
