"""Learning-rate schedules: a linear warm-up to the peak learning rate, and what follows it."""

import jax
import jax.numpy as jnp
import optax

from difftx.config import Config
from difftx.errors import UserError


def linear(config: Config) -> optax.Schedule:
    """Return a warm-up, followed by a linear decay to `final_learning_rate` after the last step."""
    c = config.optimizer
    decay = optax.linear_schedule(c.learning_rate, c.final_learning_rate, config.train.steps - config.warmup_steps)
    return _after_warmup(config, decay)


def cosine(config: Config) -> optax.Schedule:
    """Return a warm-up, followed by half a period of a cosine down to `final_learning_rate` after the last step."""
    c = config.optimizer
    steps, final = config.train.steps - config.warmup_steps, c.final_learning_rate / c.learning_rate
    return _after_warmup(config, optax.cosine_decay_schedule(c.learning_rate, steps, alpha=final))


def constant(config: Config) -> optax.Schedule:
    """Return a warm-up, followed by the peak learning rate."""
    return _after_warmup(config, optax.constant_schedule(config.optimizer.learning_rate))


def wsd(config: Config) -> optax.Schedule:
    """Return a warm-up, the peak learning rate, and a decay in the last steps ("WSD", arXiv 2404.06395).

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
    """Return the warm-up, followed by `schedule`, which counts updates from the end of the warm-up."""
    rate, steps = config.optimizer.learning_rate, config.warmup_steps
    if steps == 0:
        return schedule
    # Update n of the warm-up has the learning rate lr (n + 1) / warmup_steps, so that the rate of update 0 is not 0.
    warmup = optax.linear_schedule(rate / steps, rate, steps - 1)
    return optax.join_schedules([warmup, schedule], [steps])
