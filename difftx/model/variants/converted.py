"""Differential attention for models that were trained with softmax attention (docs/differentialize.md)."""
# Axes: B = batch, T = tokens, D = model width, H = heads, K = key/value heads, G = 2 groups (A1 and A2),
#   d = e = width of a head's queries, keys and values

import jax
import jax.numpy as jnp

from difftx.config import affects, flag
from difftx.config.fields import Group, Positive
from difftx.kernels.backend import broadcast_to_tokens, difference
from difftx.model.architectures import heads_of
from difftx.model.attention import Attention, DiffAttention, merge_heads, require_no_head_norm
from difftx.model.layers import constant, linear, progress, projection, vector


class AnnealedConfig(Group):
    """Settings of the architectures zero_branch and dex."""

    anneal_steps: flag.Decoder[affects.Training[Positive[int]]] = 1000
    """Number of updates over which λ grows from 0 to its full value."""


class ZeroBranchAttention(DiffAttention):
    """Softmax attention to which training adds second attention weights A2. Their factor λ is initially zero.

    head_i = (A1_i - λ A2_i) V_i with λ = a (exp(λ_q1·λ_k1) - exp(λ_q2·λ_k2) + λ_init). The scalar a grows from 0 to 1
    over `anneal_steps` updates (`layers.progress`). With a = 0, this is the Transformer with the weights of A1, V and
    W_O. As in the Transformer, values have width d, and there is no head norm and no factor 1 - λ_init. Attention has
    6 D² weights, so the MLP is 2 D / 3 narrower than in a Transformer with equally many parameters.

    The kernels of `diff_attention` expect values of width 2d. `attend` therefore makes two calls of softmax attention,
    for A1 and for A2. Fused kernels support these calls.
    """

    kernel = "attention"
    value_width_factor = 1
    default_head_norm = "none"
    replaced_heads = 1
    fields = tuple(name for name in DiffAttention.fields if name != "post_scale")
    own_config = AnnealedConfig

    @classmethod
    def check(cls, config):
        super().check(config)
        require_no_head_norm(config)

    @classmethod
    def sub_heads(cls, config, num_heads):
        return num_heads

    @classmethod
    def query_heads(cls, config):
        return cls.groups * config.num_heads

    def __init__(self, config, layout, *, rngs):
        super().__init__(config, layout, rngs=rngs)
        self.progress = progress(layout)

    @classmethod
    def tensors(cls, config):
        return {
            # In `modeling_difftx.py`, query heads that share a key are neighbours.
            "q_proj.weight": ("KGRd D", "query_DHGd", "D KR G d"),
            "k_proj.weight": ("KGd D", "key_DKGd", "D K G d"),
            "v_proj.weight": ("Kd D", "value_DKE", "D K d"),
            "o_proj.weight": ("D Hd", "output_HED", "H d D"),
            "progress": ("o", "progress", ""),
        }

    def lam(self, lambda_init):
        return jax.lax.stop_gradient(self.progress[...]) * super().lam(lambda_init)

    def attend(self, q, k, v, x_BTD, constants, segment_ids_BT):
        if self.config.attention_logit_bits is not None:  # The kernel for quantised logits accepts values of width d.
            return super().attend(q, k, v, x_BTD, constants, segment_ids_BT)
        out1_BTHE, out2_BTHE = (
            super(ZeroBranchAttention, self).attend(q_BTH1d, k_BTK1d, v, x_BTD, constants, segment_ids_BT)
            for q_BTH1d, k_BTK1d in zip(jnp.split(q, 2, axis=3), jnp.split(k, 2, axis=3), strict=True)
        )
        return difference(out1_BTHE, out2_BTHE, broadcast_to_tokens(self.lam(constants.lambda_init), q))

    def output(self, heads_BTHE, x_BTD, constants):
        return merge_heads(heads_BTHE, self.output_HED, self.layout)


class DexAttention(Attention):
    """DEX (arXiv 2505.16333): softmax attention with a learned correction of the outputs of chosen heads.

    With O_i = A_i V_i, head_i = O_i - λ f_D(O_i) in chosen heads and O_i in all others. f_D is one d × d matrix per
    layer. λ = (1 - a) a λ_init + a λ_learn, where a grows from 0 to 1 over `anneal_steps` updates
    (`layers.progress`), and λ_learn is a scalar per layer, initially 0. `difftx convert` chooses the heads. In a new
    model, all heads are chosen.
    """

    fields = ("lambda_init",)
    own_config = AnnealedConfig

    def __init__(self, config, layout, *, rngs):
        super().__init__(config, layout, rngs=rngs)
        d = heads_of(config).d_head
        shape, spec = (d, d), layout.vector
        self.correction_de = projection(config, shape, 1, spec, rngs=rngs)
        self.lambda_learned = vector(jnp.zeros((), jnp.float32, out_sharding=spec), is_lambda=True)
        self.chosen_H = constant(jnp.ones((config.num_heads,), jnp.float32, out_sharding=spec))
        self.progress = progress(layout)

    @classmethod
    def tensors(cls, config):
        return super().tensors(config) | {
            "correction_proj.weight": ("E d", "correction_de", "d E"),
            "dex_lambda": ("o", "lambda_learned", ""),
            "chosen_heads": ("H", "chosen_H", "H"),
            "progress": ("o", "progress", ""),
        }

    def lam(self, lambda_init: jax.Array) -> jax.Array:
        """Return λ, a float32 scalar."""
        a = jax.lax.stop_gradient(self.progress[...])
        return (1 - a) * a * lambda_init + a * self.lambda_learned[...]

    def output(self, heads_BTHE, x_BTD, constants):
        correction_BTHe = linear("BTHd,de->BTHe", heads_BTHE, self.correction_de, self.layout.act_BTHE)
        lam_H = self.lam(constants.lambda_init) * jax.lax.stop_gradient(self.chosen_H[...])
        return super().output(difference(heads_BTHE, correction_BTHe, lam_H[None, None]), x_BTD, constants)

    def statistics(self, x_BTD, constants):
        return {"lambda": self.lam(constants.lambda_init)}
