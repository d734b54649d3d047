"""Sampling by running the whole window for every new token: short texts from small models."""
#   B = prompts, T = tokens of the window, V = vocabulary

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import P

from difftx.config import Config
from difftx.errors import UserError
from difftx.parallel.layout import BATCH, Layout
from difftx.parallel.mesh import batch_shards
from difftx.training.state import graph


def generate(
    config: Config,
    mesh: jax.sharding.Mesh,
    params: Any,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    temperature: float,
    seed: int,
    vocab_size: int,
) -> list[list[int]]:
    """Return `new_tokens` token ids after each prompt.

    Args:
        config: of the model.
        mesh: the current mesh.
        params: the model's parameters.
        prompts: token ids, at least one each.
        new_tokens: how many to add; prompt and new tokens must fit `data.sequence_length`.
        temperature: 0 takes the most likely token.
        seed: of the samples.
        vocab_size: ids from here on (padding of the embedding) are never produced.

    Raises:
        UserError: a prompt is empty, or too long for the window.
    """
    window = config.data.sequence_length
    for prompt in prompts:
        if not 1 <= len(prompt) <= window - new_tokens:
            raise UserError(
                f"a prompt of {len(prompt)} tokens and {new_tokens} new ones do not fit a window of "
                f"data.sequence_length={window}; a prompt needs 1 to {window - new_tokens} tokens here"
            )
    rows = -(-len(prompts) // batch_shards(mesh)) * batch_shards(mesh)
    tokens_BT = np.zeros((rows, window), np.int32)
    length_B = np.ones(rows, np.int32)
    for i, prompt in enumerate(prompts):
        tokens_BT[i, : len(prompt)] = prompt
        length_B[i] = len(prompt)
    tokens_BT = jax.device_put(tokens_BT, jax.NamedSharding(mesh, Layout().act_BT))
    length_B = jax.device_put(length_B, jax.NamedSharding(mesh, P(BATCH)))
    with jax.set_mesh(mesh):
        sample = _sampler(config, new_tokens, vocab_size)
        tokens_BT = np.asarray(sample(params, tokens_BT, length_B, jnp.float32(temperature), jax.random.key(seed)))
    return [tokens_BT[i, len(p) : len(p) + new_tokens].tolist() for i, p in enumerate(prompts)]


@functools.cache
def _sampler(config: Config, new_tokens: int, vocab_size: int):
    graphdef = graph(config)

    @jax.jit
    def sample(
        params: Any,
        tokens_BT: jax.Array,
        length_B: jax.Array,
        temperature: jax.Array,
        key: jax.Array,
    ):
        model = nnx.merge(graphdef, params)

        def next_token(i: jax.Array, tokens_BT: jax.Array) -> jax.Array:
            x_BTD, _ = model.hidden(tokens_BT)
            x_BTD = jax.sharding.reshard(x_BTD, P(BATCH, None, None))  # The last token is on one of `context`.
            last_B1 = (length_B + i - 1)[:, None]
            x_B1D = jnp.take_along_axis(x_BTD, last_B1[..., None], axis=1, mode="clip")
            logits_BV = jax.sharding.reshard(model.logits(x_B1D)[:, 0], P(BATCH, None))
            logits_BV = jnp.where(jnp.arange(logits_BV.shape[1]) < vocab_size, logits_BV, -jnp.inf)
            noise_BV = jax.random.gumbel(jax.random.fold_in(key, i), logits_BV.shape, out_sharding=P(BATCH, None))
            chosen_B = jnp.argmax(logits_BV + temperature * noise_BV, axis=-1).astype(jnp.int32)
            is_next_BT = jnp.arange(tokens_BT.shape[1]) == last_B1 + 1
            return jnp.where(is_next_BT, chosen_B[:, None], tokens_BT)

        # On every device: each process reads the result.
        return jax.sharding.reshard(jax.lax.fori_loop(0, new_tokens, next_token, tokens_BT), P())

    return sample
