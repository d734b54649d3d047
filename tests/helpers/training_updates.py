"""Updates of an optimizer with random parameters and gradients."""

import jax
import jax.numpy as jnp
import numpy as np

from difftx.training.optimizer import make_optimizer
from difftx.training.state import init_state


def shapes_of(c):
    """Return the parameters as `jax.ShapeDtypeStruct`s, with their shardings."""
    return jax.eval_shape(lambda: init_state(c)).params


def random_tree(shapes, seed):
    """Return random numbers of these shapes."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes)


def by_name(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.float64(leaf) for path, leaf in leaves}


def updated(c, mesh, updates):
    """Return the parameters before and after `updates` updates with random gradients, and the gradients, by name."""

    def on_mesh(tree):
        return jax.tree.map(lambda x, s: jax.device_put(x, jax.NamedSharding(mesh, s.sharding.spec)), tree, shapes)

    with jax.set_mesh(mesh):
        optimizer, shapes = make_optimizer(c), shapes_of(c)
        first = params = on_mesh(random_tree(shapes, 0))
        state = jax.jit(optimizer.init)(params)
        grads = [random_tree(shapes, 1 + n) for n in range(updates)]

        @jax.jit
        def update(grad, state, params):
            change, state = optimizer.update(grad, state, params)
            return jax.tree.map(jnp.add, params, change), state

        for grad in grads:
            params, state = update(on_mesh(grad), state, params)
    return by_name(first), by_name(params), [by_name(grad) for grad in grads]
