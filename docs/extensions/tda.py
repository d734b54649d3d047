"""Threshold differential attention, from a summary of arXiv 2601.12145."""
#   C = queries, S = keys, d = width of a sub-head

import dataclasses
import functools

import jax.numpy as jnp

from difftx.kernels.weight_functions import MASKED
from difftx.model.architectures import ARCHITECTURES, heads_of
from difftx.model.attention import DiffAttention


@dataclasses.dataclass(frozen=True, kw_only=True)
class TdaConfig:
    """Architecture tda."""

    beta: float = 1.0
    """Factor β of the threshold."""


@ARCHITECTURES.register("tda")
class ThresholdDiffAttention(DiffAttention):
    """[ReLU(q̂₁·k̂₁ - τ)² - λ ReLU(q̂₂·k̂₂ - τ)²] V, with the λ, head norm and projections of differential attention."""

    kernel = "weighted_attention"
    subtracts = False
    own_config = TdaConfig

    def project(self, x_BTD, angles):
        q_BTHGd, k_BTKGd, v_BTKE = super().project(x_BTD, angles)
        return unit(q_BTHGd), unit(k_BTKGd), v_BTKE

    def weight_function(self):
        return functools.partial(exceedances, beta=self.config.own.beta, width=heads_of(self.config).d_head)


def unit(x):
    """Return vectors of length 1."""
    x_f32 = x.astype(jnp.float32)
    return (x_f32 / jnp.maximum(jnp.linalg.norm(x_f32, axis=-1, keepdims=True), 1e-6)).astype(x.dtype)


def exceedances(logits1_CS, logits2_CS, lam_C1, *, beta, width):
    """Return the attention weights of both groups' logits."""
    keys_C1 = jnp.sum(logits1_CS > MASKED, axis=-1, keepdims=True)
    threshold_C1 = beta * jnp.sqrt(2 * jnp.log(keys_C1 + 1.0) / width)
    first_CS, second_CS = (
        jnp.maximum(logits_CS * width**0.5 - threshold_C1, 0) ** 2 for logits_CS in (logits1_CS, logits2_CS)
    )
    return first_CS - lam_C1 * second_CS
