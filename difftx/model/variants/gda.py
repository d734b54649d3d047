"""Grouped differential attention."""
#   B = batch, T = tokens, D = model width, H = signal heads, K = key/value heads, N = noise heads,
#   R = H / N = signal heads per noise head, Q = R + 1, G = 2 groups (A1 and A2), d = width of a query/key sub-head,
#   E = width of a value head

import jax
import jax.numpy as jnp

from difftx.config import ModelConfig
from difftx.config.checks import divisor_below, require_positive
from difftx.errors import UserError
from difftx.model.attention import Angles, DiffAttention

# Signal heads per noise head. Motif-2-12.7B has 4, which fits fewer numbers of heads.
SIGNAL_HEADS = 3


class GroupedDiffAttention(DiffAttention):
    """Grouped differential attention (arXiv 2510.06949), the attention of Motif-2-12.7B.

    head_i = (A1_i - λ A2_{i // R}) V. R = `signal_heads` signal heads subtract the attention weights of one shared
    noise head. Everything else is as in differential attention, which is the case R = 1.

    The query weight stores R signal queries and 1 noise query for each noise head. These R + 1 queries share keys and
    values, so that K divides N = H / R. Fused kernels require as many noise queries as signal queries, so the device
    computes A2 once per signal head.
    """

    fields = ("signal_heads", *DiffAttention.fields)

    @classmethod
    def check(cls, config):
        """Raise `UserError` for unsupported values, including a `signal_heads` that does not divide `num_heads`."""
        super().check(config)
        if config.signal_heads is None:
            raise UserError("model.signal_heads=None: architecture 'gda' requires it; 3 is a common number")
        require_positive("model", config, "signal_heads")
        if config.num_heads % config.signal_heads:
            raise UserError(
                f"model.signal_heads={config.signal_heads} does not divide num_heads={config.num_heads}, which counts "
                f"all signal heads; use {divisor_below(config.signal_heads, config.num_heads)}, or other num_heads"
            )

    @classmethod
    def sub_heads(cls, config: ModelConfig, num_heads: int) -> int:
        """Return the number of signal heads plus noise heads."""
        return num_heads + num_heads // (config.signal_heads or 1)

    @classmethod
    def kv_heads(cls, config: ModelConfig) -> int:
        """Return the number of noise heads."""
        return config.num_heads // (config.signal_heads or 1)

    @classmethod
    def configure(cls, c, heads):
        """Set three signal heads per noise head, with as many queries in total as the Transformer."""
        super().configure(c, heads)
        c.model.num_heads = SIGNAL_HEADS * (heads // (SIGNAL_HEADS + 1))
        c.model.signal_heads = SIGNAL_HEADS

    @classmethod
    def query_shape(cls, config: ModelConfig) -> tuple[int, int]:
        """Return the sizes N and Q of the query weights: noise heads, and queries per noise head."""
        noise_heads = cls.kv_heads(config)
        return noise_heads, cls.query_heads(config) // noise_heads

    def project(self, x_BTD: jax.Array, angles: Angles) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries `[B, T, H, 2, d]`, with noise queries repeated for each signal head, keys and values."""
        q_BTNQd, k_BTKGd, v_BTKE = super().project(x_BTD, angles)
        signal_BTNRd, noise_BTN1d = q_BTNQd[..., :-1, :], q_BTNQd[..., -1:, :]
        q_BTNRGd = jnp.stack([signal_BTNRd, jnp.broadcast_to(noise_BTN1d, signal_BTNRd.shape)], axis=-2)
        B, T, N, R, G, d = q_BTNRGd.shape
        q_BTHGd = jax.lax.reshape(q_BTNRGd, (B, T, N * R, G, d), out_sharding=self.layout.act_BTHGd)
        return q_BTHGd, k_BTKGd, v_BTKE
