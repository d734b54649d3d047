"""AdamW with a linear warm-up and a linear decay."""

from typing import Any

import jax
import optax

from difftx.config import Config

NOT_DECAYED = ("scale", "lambda_query_Gd", "lambda_key_Gd", "sink_H")  # Norm gains, λ vectors, sinks.


def learning_rate(config: Config) -> optax.Schedule:
    """Return update number, from 0, → learning rate: peak after the warm-up, `final_learning_rate` after the end."""
    c = config.optimizer
    decay = optax.linear_schedule(c.learning_rate, c.final_learning_rate, config.train.steps - c.warmup_steps)
    if c.warmup_steps == 0:
        return decay
    # lr (n + 1) / warmup_steps: update 0 learns already.
    warmup = optax.linear_schedule(c.learning_rate / c.warmup_steps, c.learning_rate, c.warmup_steps - 1)
    return optax.join_schedules([warmup, decay], [c.warmup_steps])


def updates_made(opt_state: Any) -> jax.Array:
    """Return the number of updates, which the learning rate follows; a step that was skipped made none."""
    return optax.tree.get(opt_state, "count", filtering=lambda path, _: "ScaleByScheduleState" in str(path))


def decay_mask(params: Any) -> Any:
    """Return the tree of which parameters are decayed: projections and embeddings."""

    def decayed(path: tuple[Any, ...], _: jax.Array) -> bool:
        return path[-1].key not in NOT_DECAYED

    return jax.tree_util.tree_map_with_path(decayed, params)


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """Return clipping by global norm, if configured, and AdamW (arXiv 1711.05101)."""
    c = config.optimizer
    adamw = optax.adamw(
        learning_rate(config),
        b1=c.b1,
        b2=c.b2,
        eps=c.eps,
        weight_decay=c.weight_decay,
        mask=decay_mask,
    )
    return adamw if c.clip_norm is None else optax.chain(optax.clip_by_global_norm(c.clip_norm), adamw)
