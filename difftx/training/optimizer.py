"""Registries of optimizers and learning-rate schedules, the built-in schedules, and AdamW."""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from difftx.config import Config
from difftx.errors import UserError
from difftx.registry import Registry
from difftx.training.parametrization import adam_eps, check_parametrization, rate_factors
from difftx.training.trainable import metadata

# Each entry maps a config to an optax schedule: update index (from 0) → learning rate.
SCHEDULES: Registry[Callable[[Config], optax.Schedule]] = Registry(
    "schedule", {name: f"difftx.training.optimizer:{name}" for name in ("linear", "cosine", "constant", "wsd")}
)
# Each entry takes the config, the schedule and a mask of the parameters with weight decay. It returns an optimizer.
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


def linear(config: Config) -> optax.Schedule:
    """Return linear warm-up, then linear decay to `final_learning_rate` after the last step."""
    c = config.optimizer
    decay = optax.linear_schedule(c.learning_rate, c.final_learning_rate, config.train.steps - config.warmup_steps)
    return _after_warmup(config, decay)


def cosine(config: Config) -> optax.Schedule:
    """Return linear warm-up, then cosine decay to `final_learning_rate` after the last step."""
    c = config.optimizer
    steps, final = config.train.steps - config.warmup_steps, c.final_learning_rate / c.learning_rate
    return _after_warmup(config, optax.cosine_decay_schedule(c.learning_rate, steps, alpha=final))


def constant(config: Config) -> optax.Schedule:
    """Return linear warm-up, then the constant peak learning rate."""
    return _after_warmup(config, optax.constant_schedule(config.optimizer.learning_rate))


def wsd(config: Config) -> optax.Schedule:
    """Return linear warm-up, constant peak learning rate, then decay in the last steps ("WSD", arXiv 2404.06395).

    The decay has `config.decay_steps` steps and the shape `optimizer.decay_shape`.
    """
    c, decay_steps = config.optimizer, config.decay_steps
    stable_steps = config.train.steps - config.warmup_steps - decay_steps
    if stable_steps < 0:
        raise UserError(
            f"train.steps={config.train.steps} has no room for {config.warmup_steps} steps of warm-up and "
            f"{decay_steps} of decay; lower optimizer.warmup_steps or optimizer.decay_steps"
        )

    def decay(count: jax.typing.ArrayLike) -> jax.Array:
        t = jnp.clip(count / decay_steps, 0.0, 1.0)
        fall = jnp.sqrt(t) if c.decay_shape == "sqrt" else t
        return c.learning_rate + (c.final_learning_rate - c.learning_rate) * fall

    stable = optax.constant_schedule(c.learning_rate)
    return _after_warmup(config, optax.join_schedules([stable, decay], [stable_steps]))


def _after_warmup(config: Config, schedule: optax.Schedule) -> optax.Schedule:
    """Prepend linear warm-up to `schedule`, which counts updates from the end of the warm-up."""
    rate, steps = config.optimizer.learning_rate, config.warmup_steps
    if steps == 0:
        return schedule
    # Update n has the learning rate lr (n + 1) / warmup_steps, so the rate of update 0 is not 0.
    warmup = optax.linear_schedule(rate / steps, rate, steps - 1)
    return optax.join_schedules([warmup, schedule], [steps])


def learning_rate(config: Config) -> optax.Schedule:
    """Return the schedule that `optimizer.schedule` names."""
    return SCHEDULES[config.optimizer.schedule](config)


def make_optimizer(config: Config, decayed: Any = None) -> optax.GradientTransformation:
    """Return the configured optimizer. If `optimizer.clip_norm` is set, clip gradients first.

    λ vectors have a learning-rate factor and a weight decay of their own. The parameters of `layers.constant` do not
    change, and those of `layers.progress` grow. `decayed` is a tree of booleans that selects the parameters with weight
    decay, by default all except vectors.
    """
    check_parametrization(config)
    c = config.optimizer
    decayed = decay_mask(config) if decayed is None else decayed
    optimizer = OPTIMIZERS[c.name](config, schedule := learning_rate(config), decayed)
    if c.moment_dtype == "bfloat16":
        optimizer = _in_bfloat16(optimizer)
    factor, decay = c.lambda_learning_rate_factor, c.lambda_weight_decay
    if factor != 1 or decay:
        is_lambda = metadata(config, "is_lambda", False)
        if factor != 1:
            optimizer = optax.chain(optimizer, optax.masked(optax.scale(factor), is_lambda))
        if decay:
            shrink = optax.add_decayed_weights(lambda count: -factor * decay * schedule(count), is_lambda)
            optimizer = optax.chain(optimizer, shrink)
    if hasattr(config.model.own, "anneal_steps"):
        optimizer = optax.chain(optimizer, _prescribed_updates(config))
    return optimizer if c.clip_norm is None else optax.chain(optax.clip_by_global_norm(c.clip_norm), optimizer)


def _in_bfloat16(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Wrap an optimizer to keep its moments in bfloat16. It still computes in float32.

    The random numbers for rounding only depend on the number of updates, so a resumed run repeats them.
    """

    def init(params: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16) if _is_moment(x) else x, optimizer.init(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        key = jax.random.fold_in(jax.random.key(0), updates_made(state))
        state = jax.tree.map(lambda x: x.astype(jnp.float32) if _is_moment(x) else x, state)
        updates, state = optimizer.update(updates, state, params)
        leaves, structure = jax.tree.flatten(state)
        rounded = [
            stochastically_rounded(x, jax.random.fold_in(key, number)) if _is_moment(x) else x
            for number, x in enumerate(leaves)
        ]
        return updates, structure.unflatten(rounded)

    return optax.GradientTransformation(init, update)


def _is_moment(x: jax.Array) -> bool:
    return x.ndim > 0 and jnp.issubdtype(x.dtype, jnp.floating)


def stochastically_rounded(x: jax.Array, key: jax.Array) -> jax.Array:
    """Round each float32 number to a neighbour in bfloat16, at random, so that the expected value is the number.

    Rounding to nearest would stop a moving average with b2 = 0.999: an update changes it by 0.1 % of its distance from
    the squared gradient, but neighbours in bfloat16 are 0.4 to 0.8 % apart.
    """
    # Dropping the lower 16 bits of a float32 rounds it towards 0. A carry from the lower bits rounds it away from 0.
    noise = jax.random.bits(key, x.shape, jnp.uint16, out_sharding=jax.typeof(x).sharding)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + noise.astype(jnp.uint32)
    return jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)


def _prescribed_updates(config: Config) -> optax.GradientTransformation:
    """Replace the updates of parameters that do not follow a gradient.

    The new updates only depend on the parameters, so a run that starts from another run's weights continues their
    progress.
    """
    is_constant = metadata(config, "is_constant", False)
    is_progress = metadata(config, "is_progress", False)

    def update(update: jax.Array, param: jax.Array, is_constant: bool, is_progress: bool) -> jax.Array:
        if is_progress:
            return jnp.minimum(1 / config.model.own.anneal_steps, 1 - param)
        return jnp.zeros_like(param) if is_constant else update

    return optax.stateless(lambda updates, params: jax.tree.map(update, updates, params, is_constant, is_progress))


def decay_mask(config: Config) -> Any:
    """Return a tree of booleans: True for parameters with weight decay, which are projections and embeddings."""
    return jax.tree.map(operator.not_, metadata(config, "is_vector", False))


def updates_made(opt_state: Any) -> jax.Array:
    """Return the number of updates so far, without skipped ones. It determines the learning rate."""
    return optax.tree.get(opt_state, "count", filtering=lambda path, _: "ScaleByScheduleState" in str(path))
