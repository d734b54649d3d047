"""The layers of Motif-2.6B (arXiv 2508.09148) and Motif-2-12.7B (arXiv 2511.07464)."""
# Axes: B = batch, T = tokens, F = hidden width of the MLP, c = 3 coefficients

import jax
import jax.numpy as jnp

from difftx.config import ModelConfig
from difftx.model.layers import SwiGLU, normalized, vector
from difftx.model.variants.differential import GroupedDiffAttention
from difftx.parallel.layout import Layout

POLY_NORM_EPS = 1e-6  # Hard-coded in the code of arXiv 2411.03884 and in all implementations of Motif.


class PolyNormMLP(SwiGLU):
    """SwiGLU with PolyNorm (arXiv 2411.03884) in place of silu: (PolyNorm(x W_gate) ∘ x W_up) W_down.

    PolyNorm(z) = w_1 N(z³) + w_2 N(z²) + w_3 N(z) + b, where N is an RMSNorm over the hidden width without a gain.
    PolyNorm is computed in float32. Initially, each w is 1/3, and b is 0.
    """

    def __init__(self, config: ModelConfig, layout: Layout, *, rngs):
        super().__init__(config, layout, rngs=rngs)
        self.poly_norm_c = vector(jnp.full((3,), 1 / 3, jnp.float32, out_sharding=layout.vector))
        self.poly_norm_bias = vector(jnp.zeros((), jnp.float32, out_sharding=layout.vector))

    @classmethod
    def tensors(cls):
        return super().tensors() | {
            "act_fn.weight": ("c", "poly_norm_c", "c"),
            "act_fn.bias": ("o", "poly_norm_bias", ""),
        }

    def activation(self, gate_BTF: jax.Array) -> jax.Array:
        z_BTF, w_c = gate_BTF.astype(jnp.float32), self.poly_norm_c[...]
        terms = [w_c[3 - power] * normalized(z_BTF**power, POLY_NORM_EPS) for power in (3, 2, 1)]
        return (sum(terms) + self.poly_norm_bias[...]).astype(gate_BTF.dtype)


class MotifAttention(GroupedDiffAttention):
    """Attention of Motif: grouped differential attention with layers counted from 0 instead of 1 for λ_init.

    λ_init = 0.8 - 0.6 exp(-0.3 (l - 1)) with l = 0, 1, 2, …, so λ_init is -0.01 in the first layer and 0.2 in the
    second. Motif-2-12.7B has R = 4 signal heads per noise head. Motif-2.6B has R = 1, that is, differential attention.
    The MLP is `PolyNormMLP`.

    The formulas are taken from vLLM 0.10.2 (vllm/model_executor/models/motif.py) for Motif-2.6B, and from
    junhoyeo/mlx-motif (src/mlx_motif/model.py), which runs the published weights of both models. In both, a noise head
    follows its signal heads. A draft for llama.cpp (ggml-org/llama.cpp, issue 18055) contradicts them: it has λ_init =
    1 in all layers, and all signal heads before all noise heads. No text was generated with this draft.
    """

    first_layer = 0
    mlp = PolyNormMLP
    # No `lambda_bound`: it would need the bound's inverse at λ_init, but λ_init is negative in the first layer.
    fields = tuple(name for name in GroupedDiffAttention.fields if name != "lambda_bound")
