"""Attention layers for your own models: `from difftx import DiffAttention`. docs/layer.md has examples."""
# Axes: B = batch, T = tokens, D = model width, L = layers

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from difftx.config import ModelConfig
from difftx.config.build import build_group
from difftx.config.fields import Flag, fields_with, plain, types_of
from difftx.errors import UserError, did_you_mean
from difftx.kernels.context import is_explicit_mesh
from difftx.kernels.rows import AttentionWeights
from difftx.model.architectures import ARCHITECTURES, check_attention
from difftx.model.attention import Angles, LayerConstants, layer_constants
from difftx.model.layers import rotary_angles
from difftx.parallel.layout import Layout, reshard
from difftx.parallel.mesh import AXES

# Groups and fields of `ModelConfig` that concern the whole decoder and are not arguments of a layer.
OTHER_FIELDS = {name.partition(".")[0] for name in fields_with(ModelConfig, Flag.DECODER)}


class AttentionLayer(nnx.Module):
    """Causal self-attention of any architecture of difftx, with a rotary embedding and float32 weights.

    The layer does not normalise its input and has no residual connection. Under a mesh with the axes of
    `difftx.parallel.mesh`, the layer shards its weights and activations like difftx's decoder. Without a mesh, or under
    a mesh with other axes, JAX infers all shardings.

    "zero_branch" and "dex" begin as softmax attention: their λ depends on `layer.attention.progress`, which starts at
    0. You must raise it to 1 during training. (difftx's own optimizer does this automatically.)

    Args:
        architecture: Name of an entry of `ARCHITECTURES`, such as "diff", "transformer" or "gda".
        d_model: Width of the input and of the output.
        num_heads: Number of heads. A head of "diff" or "signed_mask" has two queries and keys of width
            d_model / (2 num_heads), and a value of twice this width.
        rngs: Source of random numbers for the initial weights, such as `nnx.Rngs(0)`.
        layer: Index l = 1, 2, … of the layer in the model, for λ_init = 0.8 - 0.6 exp(-0.3 (l - 1)).
        fields: Further fields of `ModelConfig`, such as `num_kv_heads`, `head_dim`, `window` or `rope_theta`, and of
            the architecture's own group, such as `signal_heads` of "gda" (docs/config.md). The default of `head_norm`
            is "rms_affine" for diff, gda, motif and signed_mask, and "none" for the other architectures.

    Raises:
        UserError: An argument, or an input of a call, is invalid.
    """

    def __init__(
        self, architecture: str, d_model: int, num_heads: int, *, rngs: nnx.Rngs, layer: int = 1, **fields: Any
    ):
        attention, layout = ARCHITECTURES[architecture], _layout()
        group = attention.own_config
        own = set() if group is None else types_of(group).keys() - fields_with(group, Flag.DECODER)
        known = (types_of(ModelConfig).keys() - OTHER_FIELDS - ARCHITECTURES.keys()) | own
        if unknown := fields.keys() - known:
            name = min(unknown)
            hint = did_you_mean(name, {*known, "num_heads", "layer"})
            raise UserError(f"{name}={fields[name]!r}: no such argument of an attention layer.{hint}")
        if not isinstance(rngs, nnx.Rngs):
            raise UserError(f"rngs={rngs!r}: expected nnx.Rngs, such as nnx.Rngs(0)")
        if type(layer) is not int or layer < 1:
            raise UserError(f"layer={layer!r} must be an integer of at least 1, the index of the first layer")
        values = {name: plain(value) for name, value in fields.items() if name not in own}  # Values may be dataclasses.
        values |= {architecture: {name: fields[name] for name in own & fields.keys()}} if own else {}
        values |= {"architecture": architecture, "d_model": d_model, "num_heads": num_heads, "num_layers": layer}
        try:
            config = build_group(ModelConfig, {"head_norm": attention.default_head_norm} | values, "model")
            check_attention(config, None if layout == Layout.inferred() else jax.sharding.get_abstract_mesh())
        except UserError as error:  # Name the argument, not the config field `model.…`.
            raise UserError(re.sub(rf"\bmodel\.({architecture}\.)?(?=\w)", "", str(error))) from None
        self.layer = layer
        self.attention = attention(config, layout, rngs=rngs)

    def __call__(
        self, x: jax.Array, *, segment_ids: jax.Array | None = None, positions: jax.Array | None = None
    ) -> jax.Array:
        """Compute the attention output after the output projection, `[B, T, D]`, in the dtype of `x`.

        Args:
            x: float32 or bfloat16 `[B, T, D]`, usually normalised.
            segment_ids: int32 `[B, T]`. A token attends only to tokens of its own segment. None: each row is one
                segment.
            positions: int32 `[B, T]`, for the rotary embedding. None: 0, 1, 2, … in each row.
        """
        return self.attention(*self._operands(x, positions, segment_ids), segment_ids)[0]

    def attention_weights(
        self, x: jax.Array, *, segment_ids: jax.Array | None = None, positions: jax.Array | None = None
    ) -> AttentionWeights:
        """Return the attention weights A1, A2 and A1 - λ A2 of all tokens, float32 `[B, H, T, T]`, and λ.

        The arguments are the same as for calling the layer. Unlike a call, this needs memory quadratic in T.
        """
        operands, (B, T) = self._operands(x, positions, segment_ids), x.shape[:2]
        queries_BT = jnp.broadcast_to(jnp.arange(T)[None], (B, T))
        return AttentionWeights.of(self.attention.attention_rows(*operands, segment_ids, queries_BT))

    def _operands(
        self, x: jax.Array, positions: jax.Array | None, segment_ids: jax.Array | None
    ) -> tuple[jax.Array, Angles, LayerConstants]:
        """Check the arguments of a call. Convert them to the first three arguments of a `SelfAttention` call."""
        config, layout = self.attention.config, self.attention.layout
        if layout != Layout.inferred() and layout != _layout():
            raise UserError(
                f"this layer was created under a mesh with the axes {', '.join(AXES)}; call it under such a mesh, set "
                "by jax.set_mesh, or create the layer without it"
            )
        if x.ndim != 3 or x.shape[2] != config.d_model:
            hint = "; for one row without a batch axis, pass x[None]" if x.ndim == 2 else ""
            expected = f"expected [B, T, d_model] with d_model={config.d_model}"
            raise UserError(f"x has the shape {list(x.shape)}; {expected}{hint}")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise UserError(f"x has the dtype {x.dtype}; expected float32 or bfloat16")
        for name, ids in {"segment_ids": segment_ids, "positions": positions}.items():
            if ids is not None and (ids.shape != x.shape[:2] or not jnp.issubdtype(ids.dtype, jnp.integer)):
                raise UserError(f"{name}: {ids.dtype}{list(ids.shape)}; expected integers [B, T] = {list(x.shape[:2])}")
        x_BTD = reshard(x, layout.act_BTD)
        positions_BT = jnp.arange(x.shape[1])[None] if positions is None else reshard(positions, layout.act_BT)
        angles = rotary_angles(positions_BT, config)
        constants = jax.tree.map(lambda constant_L: constant_L[self.layer - 1], layer_constants(config))
        return x_BTD, angles, dataclasses.replace(constants, window=config.window)


class DiffAttention(AttentionLayer):
    """Multi-head differential attention (arXiv 2410.05258): `AttentionLayer` with the architecture "diff"."""

    def __init__(self, d_model: int, num_heads: int, *, rngs: nnx.Rngs, layer: int = 1, **fields: Any):
        super().__init__("diff", d_model, num_heads, rngs=rngs, layer=layer, **fields)


def _layout() -> Layout:
    """Return the decoder's layout under a mesh with difftx's axes. For other meshes, let JAX infer the layout."""
    has_axes = set(AXES) <= set(jax.sharding.get_abstract_mesh().axis_names)
    return Layout() if has_axes and is_explicit_mesh() else Layout.inferred()
