"""Choice of the next token from its logits."""
#   B = rows, V = vocabulary, N = candidates, most likely first

import dataclasses

import jax
import jax.numpy as jnp

from difftx.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings of generation. They apply in the order of the fields, as in Hugging Face's `generate`."""

    # Lowers the logits of tokens that occur in the row (arXiv 1909.05858, §4.1): divides positive ones and, unlike the
    # paper, multiplies negative ones, which division would increase. None: no penalty.
    repetition_penalty: float | None
    temperature: float  # 0: the most likely token; top_k and top_p have no effect.
    top_k: int | None  # Largest number of candidates. None: all tokens.
    top_p: float | None  # Fewest most likely candidates whose probabilities sum to at least top_p. None or 1: all.

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature={self.temperature} must be 0, for the most likely token, or positive")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k={self.top_k} must be at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} must be more than 0 and at most 1")
        if self.repetition_penalty is not None and not 0 < self.repetition_penalty < float("inf"):
            raise UserError(f"repetition_penalty={self.repetition_penalty} must be positive; 1 changes nothing")


GREEDY = Sampling(repetition_penalty=None, temperature=0.0, top_k=None, top_p=None)


def choose(
    logits_BV: jax.Array, sampling: Sampling, *, seen_BV: jax.Array, seed_B: jax.Array, count_B: jax.Array
) -> jax.Array:
    """Return the next token of each row, int32 `[B]`.

    Tokens with a logit of -inf are never chosen. `seen_BV` marks the tokens that occur in a row. A row's sample depends
    on its logits, its seed and `count_B`, the number of tokens drawn before, but not on other rows.
    """
    if sampling.repetition_penalty is not None:
        penalty = sampling.repetition_penalty
        lower_BV = jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
        logits_BV = jnp.where(seen_BV, lower_BV, logits_BV)
    if sampling.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    logits_BN, token_BN = candidates(logits_BV, sampling)

    def noise_of(seed: jax.Array, count: jax.Array) -> jax.Array:
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), count), logits_BN.shape[1:])

    drawn_B1 = jnp.argmax(logits_BN + jax.vmap(noise_of)(seed_B, count_B), axis=-1)[:, None]
    return jnp.take_along_axis(token_BN, drawn_B1, axis=1)[:, 0].astype(jnp.int32)


def candidates(logits_BV: jax.Array, sampling: Sampling) -> tuple[jax.Array, jax.Array]:
    """Return the candidates' logits over temperature, -inf for excluded tokens, and their token ids, both `[B, N]`."""
    logits_BV = logits_BV / sampling.temperature
    # A top_p of 1 keeps all tokens. Rounding can make the sum of probabilities exceed 1 before the last one.
    top_p = None if sampling.top_p == 1 else sampling.top_p
    if sampling.top_k is None and top_p is None:
        return logits_BV, jnp.broadcast_to(jnp.arange(logits_BV.shape[1]), logits_BV.shape)
    # `top_k` sorts equally likely tokens by ascending id.
    logits_BN, token_BN = jax.lax.top_k(logits_BV, min(sampling.top_k or logits_BV.shape[1], logits_BV.shape[1]))
    if top_p is not None:
        p_BN = jax.nn.softmax(logits_BN, axis=-1)
        before_BN = jnp.cumsum(p_BN, axis=-1) - p_BN
        logits_BN = jnp.where(before_BN < top_p, logits_BN, -jnp.inf)
    return logits_BN, token_BN
