"""Grouped differential attention."""
#   B = batch, T = tokens, H = signal heads, K = key/value heads, N = noise heads, R = H / N = signal heads per noise
#   head, Q = R + 1, G = 2 groups (A1 and A2), d = width of a query/key sub-head, E = width of a value head

import jax
import jax.numpy as jnp

from difftx.config.checks import divisor_below
from difftx.errors import UserError
from difftx.model.attention import DiffAttention, require_field

SIGNAL_HEADS = 3  # Signal heads per noise head. Motif-2-12.7B has 4, which fits fewer numbers of heads.


class GroupedDiffAttention(DiffAttention):
    """Grouped differential attention (arXiv 2510.06949), the attention of Motif-2-12.7B.

    head_i = (A1_i - λ A2_{i // R}) V. R = `signal_heads` signal heads subtract the attention weights of one shared
    noise head. Everything else is as in differential attention, which is the case R = 1.

    The query weight stores R signal queries and 1 noise query for each noise head. These R + 1 queries share keys and
    values, so that K divides N = H / R. Fused kernels require as many noise queries as signal queries, so the device
    computes A2 once per signal head. For R = 3, attention has 3.5 D² weights, and the MLP of a matched model is D / 6
    wider than the Transformer's.
    """

    fields = ("signal_heads", *DiffAttention.fields)

    @classmethod
    def check(cls, config):
        super().check(config)
        require_field(config, "signal_heads", "3")
        if config.num_heads % config.signal_heads:
            raise UserError(
                f"model.signal_heads={config.signal_heads} does not divide num_heads={config.num_heads}, which counts "
                f"all signal heads; use {divisor_below(config.signal_heads, config.num_heads)}, or other num_heads"
            )

    @classmethod
    def sub_heads(cls, config, num_heads):
        return num_heads + num_heads // (config.signal_heads or 1)

    @classmethod
    def kv_heads(cls, config):
        return config.num_heads // (config.signal_heads or 1)

    @classmethod
    def configure(cls, c, heads):
        """Set three signal heads per noise head, with as many queries in total as the Transformer."""
        super().configure(c, heads)
        c.model.num_heads = SIGNAL_HEADS * (heads // (SIGNAL_HEADS + 1))
        c.model.signal_heads = SIGNAL_HEADS

    @classmethod
    def query_shape(cls, config):
        """Return the sizes N and Q of the query weights: noise heads, and queries per noise head."""
        noise_heads = cls.kv_heads(config)
        return noise_heads, cls.query_heads(config) // noise_heads

    def project(self, x_BTD, angles):
        """Return queries `[B, T, H, 2, d]`, with noise queries repeated for each signal head, keys and values."""
        q_BTNQd, k_BTKGd, v_BTKE = super().project(x_BTD, angles)
        signal_BTNRd, noise_BTN1d = q_BTNQd[..., :-1, :], q_BTNQd[..., -1:, :]
        q_BTNRGd = jnp.stack([signal_BTNRd, jnp.broadcast_to(noise_BTN1d, signal_BTNRd.shape)], axis=-2)
        B, T, N, R, G, d = q_BTNRGd.shape
        q_BTHGd = jax.lax.reshape(q_BTNRGd, (B, T, N * R, G, d), out_sharding=self.layout.act_BTHGd)
        return q_BTHGd, k_BTKGd, v_BTKE
