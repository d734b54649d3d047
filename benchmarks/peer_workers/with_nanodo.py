"""Worker of benchmarks/peers.py: the Transformer of google-deepmind/nanodo, which has learned positions and a GELU."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from nanodo.model import DoConfig, TransformerDo
from worker import Task, serve


def main() -> None:
    """Serve the task: fields `model` (the arguments of nanodo's `DoConfig`), `rows`, `length` and `optimizer`."""
    task = Task()
    model = TransformerDo(DoConfig(**task.model, fsdp_enabled=False))
    tokens = np.random.default_rng(0).integers(0, task.model["V"], (256, task.length), np.int32)
    settings = task.optimizer
    adamw = optax.adamw(settings["lr"], b2=settings["b2"], weight_decay=settings["weight_decay"])
    optimizer = optax.chain(optax.clip_by_global_norm(settings["clip_norm"]), adamw)

    def loss(params, tokens_BL):
        logits_BLV = model.apply(params, tokens_BL)
        nll_BL = optax.softmax_cross_entropy_with_integer_labels(logits_BLV, jnp.roll(tokens_BL, -1, axis=1))
        return jnp.mean(nll_BL)

    @jax.jit
    def initial():
        params = model.init(jax.random.key(0), jnp.asarray(tokens[:1]))
        return params, optimizer.init(params)

    @jax.jit(donate_argnums=(0, 1))
    def step(params, opt_state, tokens_BL):
        value, gradients = jax.value_and_grad(loss)(params, tokens_BL)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    state = initial()
    rng = np.random.default_rng(1)

    def train(steps: int) -> None:
        nonlocal state
        for _ in range(steps):
            *state, _ = step(*state, tokens[rng.integers(0, len(tokens), task.rows)])
        jax.block_until_ready(state)

    serve(train, None, sum(leaf.size for leaf in jax.tree.leaves(state[0])))


main()
