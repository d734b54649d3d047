"""Sample the next token from its logits."""
# Axes in names and shapes: B = rows, V = vocabulary, N = candidates with the most likely first

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from difftx.errors import UserError

# Largest temperature and penalty. Multiplying or dividing float32 logits by both stays finite.
LARGEST = 1e15


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling settings. They are applied in the order of the fields, as in Hugging Face's `generate`.

    In a call of a jitted function, all numbers except `top_k` are traced, so changing them does not recompile. Changing
    `top_k`, whether a setting is None, or `is_greedy` recompiles.
    """

    # Lowers the logits of tokens that already occur in the row: positive logits are divided by the penalty, negative
    # logits multiplied. (arXiv 1909.05858, §4.1, divides both, which raises negative logits.) None: no penalty.
    repetition_penalty: float | None
    temperature: float  # Divides the logits. Below 1 / LARGEST, the most likely token is always chosen.
    top_k: int | None  # Number of most likely tokens to keep. None: all.
    top_p: float | None  # Keep the fewest most likely tokens with a total probability >= top_p. None or 1: all.

    def __post_init__(self):
        if not 0 <= self.temperature <= LARGEST:
            raise UserError(f"temperature={self.temperature} must be 0 (the most likely token) … {LARGEST:g}")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k={self.top_k} must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} must be more than 0 and at most 1")
        if self.repetition_penalty is not None and not 1 / LARGEST <= self.repetition_penalty <= LARGEST:
            raise UserError(
                f"repetition_penalty={self.repetition_penalty} must lie in {1 / LARGEST} … {LARGEST}; 1: off"
            )
        if self.top_p == 1:  # Rounding errors could make the cumulative probability reach 1 before the last token.
            object.__setattr__(self, "top_p", None)

    @property
    def is_greedy(self) -> bool:
        """Whether to always choose the most likely token. If the temperature is traced, it is positive."""
        return not isinstance(self.temperature, jax.Array) and self.temperature < 1 / LARGEST

    def tree_flatten(self) -> tuple[tuple[float | None, ...], tuple[bool, int | None]]:
        if self.is_greedy:
            return (self.repetition_penalty, None, None), (True, None)
        return (self.repetition_penalty, self.temperature, self.top_p), (False, self.top_k)

    @classmethod
    def tree_unflatten(cls, static: tuple[bool, int | None], numbers: tuple[Any, ...]) -> "Sampling":
        is_greedy, top_k = static
        penalty, temperature, top_p = numbers
        sampling = object.__new__(cls)  # Skip the checks, which do not accept traced numbers.
        values = {"repetition_penalty": penalty, "temperature": 0.0 if is_greedy else temperature}
        for name, value in (values | {"top_k": top_k, "top_p": top_p}).items():
            object.__setattr__(sampling, name, value)
        return sampling


GREEDY = Sampling(repetition_penalty=None, temperature=0.0, top_k=None, top_p=None)


def derived_seed(seed: int, index: int) -> int:
    """Hash `seed` and `index` to the seed of sample `index`, below 2**32."""
    return int(np.random.SeedSequence([seed, index]).generate_state(1)[0])


def choose(
    logits_BV: jax.Array, sampling: Sampling, *, seen_BV: jax.Array, seed_B: jax.Array, count_B: jax.Array
) -> jax.Array:
    """Return the next token of each row, int32 `[B]`.

    `seen_BV` marks the tokens to which the repetition penalty applies. Tokens with a logit of -inf are never chosen. A
    row's sample depends only on its logits, its seed and `count_B`, the number of tokens sampled in the row before.
    """
    if (penalty := sampling.repetition_penalty) is not None:
        lower_BV = jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
        logits_BV = jnp.where(seen_BV, lower_BV, logits_BV)
    if sampling.is_greedy:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    logits_BN, token_BN = candidates(logits_BV, sampling)

    def noise_of(seed: jax.Array, count: jax.Array) -> jax.Array:
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), count), logits_BN.shape[1:])

    drawn_B1 = jnp.argmax(logits_BN + jax.vmap(noise_of)(seed_B, count_B), axis=-1)[:, None]
    return jnp.take_along_axis(token_BN, drawn_B1, axis=1)[:, 0].astype(jnp.int32)


def candidates(logits_BV: jax.Array, sampling: Sampling) -> tuple[jax.Array, jax.Array]:
    """Return the logits divided by temperature and the ids of the candidates, `[B, N]`. If excluded: -inf."""
    logits_BV = logits_BV / sampling.temperature
    top_p = sampling.top_p
    if sampling.top_k is None and top_p is None:
        return logits_BV, jnp.broadcast_to(jnp.arange(logits_BV.shape[1]), logits_BV.shape)
    # `jax.lax.top_k` orders equally likely tokens by ascending id.
    logits_BN, token_BN = jax.lax.top_k(logits_BV, min(sampling.top_k or logits_BV.shape[1], logits_BV.shape[1]))
    if top_p is not None:
        p_BN = jax.nn.softmax(logits_BN, axis=-1)
        before_BN = jnp.cumsum(p_BN, axis=-1) - p_BN
        logits_BN = jnp.where(before_BN < top_p, logits_BN, -jnp.inf)
    return logits_BN, token_BN
