"""Choice of the next token from its logits."""
# Axes in names and shapes: B = rows, V = vocabulary, N = candidates with the most likely first

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from difftx.errors import UserError

# Largest temperature and penalty. In float32, logits times or divided by one of each are finite.
LARGEST = 1e15


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings for the choice of tokens. They apply in the order of the fields, as in Hugging Face's `generate`.

    As an argument of a compiled function, the numbers except `top_k` are arrays, so that one program serves all their
    values. The program depends on `top_k`, on which settings are None, and on whether the most likely token is chosen.
    """

    # Lowers the logits of tokens that occur in the row: positive logits are divided by the penalty, negative ones
    # multiplied. (Section 4.1 of arXiv 1909.05858 divides both, which raises negative logits.) None: no penalty.
    repetition_penalty: float | None
    temperature: float  # Divides the logits. Below 1 / LARGEST, the most likely token is chosen in any case.
    top_k: int | None  # Keeps this many of the most likely tokens. None: all.
    top_p: float | None  # Keeps the fewest most likely tokens whose probabilities sum to top_p or more. None or 1: all.

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
        if self.top_p == 1:  # Because of rounding, the sum of probabilities may exceed 1 before the last token.
            object.__setattr__(self, "top_p", None)

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is chosen. A temperature that is traced is positive."""
        return not isinstance(self.temperature, jax.Array) and self.temperature < 1 / LARGEST

    def tree_flatten(self) -> tuple[tuple[float | None, ...], tuple[bool, int | None]]:
        if self.is_greedy:
            return (self.repetition_penalty, None, None), (True, None)
        return (self.repetition_penalty, self.temperature, self.top_p), (False, self.top_k)

    @classmethod
    def tree_unflatten(cls, static: tuple[bool, int | None], numbers: tuple[Any, ...]) -> "Sampling":
        is_greedy, top_k = static
        penalty, temperature, top_p = numbers
        sampling = object.__new__(cls)  # Without the checks, which a traced number cannot pass.
        values = {"repetition_penalty": penalty, "temperature": 0.0 if is_greedy else temperature}
        for name, value in (values | {"top_k": top_k, "top_p": top_p}).items():
            object.__setattr__(sampling, name, value)
        return sampling


GREEDY = Sampling(repetition_penalty=None, temperature=0.0, top_k=None, top_p=None)


def derived_seed(seed: int, index: int) -> int:
    """Return the seed, below 2**32, of sample `index`: a hash, so that other seeds have other samples."""
    return int(np.random.SeedSequence([seed, index]).generate_state(1)[0])


def choose(
    logits_BV: jax.Array, sampling: Sampling, *, seen_BV: jax.Array, seed_B: jax.Array, count_B: jax.Array
) -> jax.Array:
    """Return the next token of each row, int32 `[B]`.

    `seen_BV` marks the tokens to which the repetition penalty applies. Tokens with a logit of -inf are never chosen. A
    row's sample depends only on its logits, its seed and `count_B`, the number of tokens that it drew before.
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
    """Return the candidates' logits over temperature (-inf if top_p excludes them) and token ids, both `[B, N]`."""
    logits_BV = logits_BV / sampling.temperature
    top_p = sampling.top_p
    if sampling.top_k is None and top_p is None:
        return logits_BV, jnp.broadcast_to(jnp.arange(logits_BV.shape[1]), logits_BV.shape)
    # `jax.lax.top_k` sorts equally likely tokens by ascending id.
    logits_BN, token_BN = jax.lax.top_k(logits_BV, min(sampling.top_k or logits_BV.shape[1], logits_BV.shape[1]))
    if top_p is not None:
        p_BN = jax.nn.softmax(logits_BN, axis=-1)
        before_BN = jnp.cumsum(p_BN, axis=-1) - p_BN
        logits_BN = jnp.where(before_BN < top_p, logits_BN, -jnp.inf)
    return logits_BN, token_BN
