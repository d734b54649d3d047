"""Meshes and parameters for tests of suites."""

import jax
import numpy as np

from difftx.config import MeshConfig
from difftx.parallel.mesh import make_mesh
from difftx.training.state import init_state

MESH_OF_ONE = MeshConfig(data=1, fsdp=1, context=1, tensor=1, context_method="heads", slices=1, preset="none")
INITIALIZED = {}


def one_device() -> jax.sharding.Mesh:
    return make_mesh(MESH_OF_ONE, jax.devices()[:1])


def params_of(run):
    """Return initial parameters, computed once per model and mesh, because they take longer to compile than a test."""
    key = (run.config.model, run.config.train.seed, run.mesh)
    if key not in INITIALIZED:
        with jax.set_mesh(run.mesh):
            INITIALIZED[key] = jax.jit(lambda: init_state(run.config).params)()
    return INITIALIZED[key]


def params_from(run, draw):
    """Return parameters whose values are `draw(path, shape)`, without compiling an initialisation."""
    with jax.set_mesh(run.mesh):
        shapes = jax.eval_shape(lambda: init_state(run.config).params)

    def put(path, leaf):
        value = draw(jax.tree_util.keystr(path), leaf.shape).astype(leaf.dtype)
        return jax.device_put(value, jax.NamedSharding(run.mesh, leaf.sharding.spec))

    return jax.tree.map_with_path(put, shapes)


def random_params(run):
    """Return random parameters, with gains around 1."""
    rng = np.random.default_rng(0)

    def draw(path, shape):
        mean, scale = (1.0, 0.1) if "scale" in path else (0.0, 0.3)
        return mean + scale * rng.normal(size=shape)

    return params_from(run, draw)
