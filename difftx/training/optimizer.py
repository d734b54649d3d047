"""Registries of optimizers and learning-rate schedules, AdamW, and what all optimizers share."""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from difftx.config import Config
from difftx.model.abstract import parameter_metadata, vector_mask
from difftx.registry import Registry
from difftx.training.parametrization import adam_eps, check_parametrization, rate_factors

# An entry returns an optax schedule, which maps an update's index, from 0, to the learning rate.
SCHEDULES: Registry[Callable[[Config], optax.Schedule]] = Registry(
    "schedule", {name: f"difftx.training.schedules:{name}" for name in ("linear", "cosine", "constant", "wsd")}
)
# An entry returns an optimizer, given the config, the schedule and a mask of the parameters with weight decay.
OPTIMIZERS: Registry[Callable[[Config, optax.Schedule, Any], optax.GradientTransformation]] = Registry(
    "optimizer", {"adamw": "difftx.training.optimizer:adamw", "muon": "difftx.training.muon:muon"}
)


def adamw(config: Config, schedule: optax.Schedule, decayed: Any) -> optax.GradientTransformation:
    """Return AdamW (arXiv 1711.05101)."""
    c = config.optimizer
    return optax.chain(
        optax.scale_by_adam(b1=c.b1, b2=c.b2, eps=adam_eps(config)),
        *rate_factors(config, exponent=1),
        optax.add_decayed_weights(c.weight_decay, decayed),
        optax.scale_by_learning_rate(schedule),
    )


def learning_rate(config: Config) -> optax.Schedule:
    """Return the schedule that `optimizer.schedule` names."""
    return SCHEDULES[config.optimizer.schedule](config)


def make_optimizer(config: Config, decayed: Any = None) -> optax.GradientTransformation:
    """Return the configured optimizer, preceded by clipping to `optimizer.clip_norm` if that is set.

    λ vectors have a factor on their learning rate and a weight decay of their own. The parameters of `layers.constant`
    do not change, and those of `layers.progress` grow. `decayed` is a tree of booleans that selects the parameters with
    `optimizer.weight_decay`, by default all except vectors.
    """
    check_parametrization(config)
    c = config.optimizer
    decayed = decay_mask(config) if decayed is None else decayed
    optimizer = OPTIMIZERS[c.name](config, schedule := learning_rate(config), decayed)
    factor, decay = c.lambda_learning_rate_factor, c.lambda_weight_decay
    if factor != 1 or decay:
        is_lambda = parameter_metadata(config.model, "is_lambda", False)
        if factor != 1:
            optimizer = optax.chain(optimizer, optax.masked(optax.scale(factor), is_lambda))
        if decay:
            shrink = optax.add_decayed_weights(lambda count: -factor * decay * schedule(count), is_lambda)
            optimizer = optax.chain(optimizer, shrink)
    if hasattr(config.model.own, "anneal_steps"):
        optimizer = optax.chain(optimizer, _prescribed_updates(config))
    return optimizer if c.clip_norm is None else optax.chain(optax.clip_by_global_norm(c.clip_norm), optimizer)


def _prescribed_updates(config: Config) -> optax.GradientTransformation:
    """Replace the updates of parameters that do not follow a gradient.

    They depend on the parameters alone, so a run that starts from the weights of another run continues its progress.
    """
    is_constant = parameter_metadata(config.model, "is_constant", False)
    is_progress = parameter_metadata(config.model, "is_progress", False)

    def update(update: jax.Array, param: jax.Array, is_constant: bool, is_progress: bool) -> jax.Array:
        if is_progress:
            return jnp.minimum(1 / config.model.own.anneal_steps, 1 - param)
        return jnp.zeros_like(param) if is_constant else update

    return optax.stateless(lambda updates, params: jax.tree.map(update, updates, params, is_constant, is_progress))


def decay_mask(config: Config) -> Any:
    """Return a tree of booleans that selects the parameters with weight decay: projections and embeddings."""
    return jax.tree.map(operator.not_, vector_mask(config.model))


def updates_made(opt_state: Any) -> jax.Array:
    """Return the number of updates so far, which determines the learning rate. Skipped updates do not count."""
    return optax.tree.get(opt_state, "count", filtering=lambda path, _: "ScaleByScheduleState" in str(path))
