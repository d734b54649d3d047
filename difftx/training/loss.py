"""The negative log-likelihood of the next token."""
#   B = batch, T = tokens, V = entries of the vocabulary

import jax
import jax.numpy as jnp

from difftx.data.loader import Batch
from difftx.model.decoder import Decoder


def token_nll(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Return -log p(target), nats, float32 `[B, T]`.

    The target's logit is picked by comparison, not by indexing: it works on a vocabulary cut over devices.
    """
    logits_BTV = logits_BTV.astype(jnp.float32)
    is_target_BTV = jnp.arange(logits_BTV.shape[-1]) == targets_BT[..., None]
    target_logit_BT = jnp.sum(jnp.where(is_target_BTV, logits_BTV, 0.0), axis=-1)
    return jax.nn.logsumexp(logits_BTV, axis=-1) - target_logit_BT


def batch_nll(model: Decoder, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the summed nll of the counted targets, nats, and the model's per-layer statistics."""
    logits_BTV, stats = model(batch.tokens_BT, positions_BT=batch.positions_BT, segment_ids_BT=batch.segment_ids_BT)
    return jnp.sum(token_nll(logits_BTV, batch.targets_BT) * batch.loss_mask_BT), stats
