"""The decoder: pre-RMSNorm blocks of attention and SwiGLU, scanned over layers (arXiv 2410.05258, §2.2)."""
# Axes: B = batch, T = tokens, C = selected queries, D = model width, V = vocabulary, L = layers, K = key/value heads,
#   N = groups of layers, P = layers per group

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from difftx.config import ModelConfig
from difftx.kernels import context
from difftx.kernels.backend import CUDNN_FORWARD, SAVED
from difftx.kernels.cached import KVCache, SegmentMask
from difftx.kernels.rows import AttentionRows
from difftx.model.architectures import ARCHITECTURES, check_attention
from difftx.model.attention import Angles, LayerConstants, layer_constants
from difftx.model.layers import RMSNorm, observed, rotary_angles, scaled, soft_cap
from difftx.model.products import PRODUCT
from difftx.parallel.layout import Layout, reshard

UNROLLED_LAYERS = 8  # Models with at most this many layers may be unrolled instead of scanned (`Decoder.walk`).
LAYER_INPUT = "layer_input"  # Name of a layer's input in remat policies.
# A function of a layer's output `[B, T, D]` and the layer's index from 1. It returns a new output, and a result that
# `Decoder` collects.
type Hook = Callable[[jax.Array, jax.Array], tuple[jax.Array, Any]]


def _saves_products(primitive: Any, *arguments: Any, **params: Any) -> bool:
    """Return whether an operation is a product with weights or attention. The remat policy "dots" saves its result."""
    policies = jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _saves_named
    return primitive.name == CUDNN_FORWARD or any(policy(primitive, *arguments, **params) for policy in policies)


_saves_named = jax.checkpoint_policies.save_only_these_names(SAVED, PRODUCT)

# `model.remat` selects which values the forward pass saves. The backward pass recomputes all other values. "none" is
# not listed: a policy that saves everything would also save the attention weights, which `kernels/xla.py` recomputes.
REMAT_POLICIES = {
    "dots": _saves_products,
    "full": jax.checkpoint_policies.nothing_saveable,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[LAYER_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


class Block(nnx.Module):
    """One layer, Y + MLP(RMSNorm(Y)) with Y = X + Attention(RMSNorm(X)) (Eq. 4 of arXiv 2410.05258)."""

    def __init__(self, config: ModelConfig, layout: Layout, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps, layout)
        attention = ARCHITECTURES[config.architecture]
        self.attention = attention(config, layout, rngs=rngs)
        self.mlp_norm = RMSNorm(config.d_model, config.norm_eps, layout)
        self.mlp = attention.mlp(config, layout, rngs=rngs)
        self.branch_scale = 1 / config.depth_ratio

    def __call__[Extra](
        self, x_BTD: jax.Array, attend: Callable[[jax.Array], tuple[jax.Array, Extra]]
    ) -> tuple[jax.Array, Extra]:
        """Return the output of the layer, `[B, T, D]`, and the second result of `attend`.

        `attend` is called with the normalised input `[B, T, D]`. It returns the residual update and any second result.
        """
        with jax.named_scope("attention"):
            update_BTD, extra = attend(self.attention_norm(x_BTD))
            x_BTD = x_BTD + scaled(update_BTD, self.branch_scale)
        with jax.named_scope("mlp"):
            return x_BTD + scaled(self.mlp(self.mlp_norm(x_BTD)), self.branch_scale), extra


class Decoder(nnx.Module):
    """A decoder-only language model. Weights are float32, and activations have the dtype `config.compute_dtype`."""

    def __init__(self, config: ModelConfig, layout: Layout | None = None, *, rngs: nnx.Rngs):
        check_attention(config)
        self.config = config
        self.layout = layout = layout or Layout()
        init = jax.nn.initializers.normal(config.embedding_std)
        shape = (config.embeddings, config.d_model)
        self.embedding_VD = nnx.Param(init(rngs.params(), shape, jnp.float32, out_sharding=layout.embedding_VD))
        # The weights of all layers are stacked along a leading axis, so compile time does not grow with depth. After
        # `separate_layers`, this is a list of blocks.
        self.blocks: Any = jax.vmap(lambda r: Block(config, layout, rngs=r))(rngs.split(config.num_layers))
        self.final_norm = RMSNorm(config.d_model, config.norm_eps, layout)
        if not config.tie_embeddings:
            self.unembedding_VD = nnx.Param(init(rngs.params(), shape, jnp.float32, out_sharding=layout.embedding_VD))

    def __call__(
        self,
        tokens_BT: jax.Array,
        *,
        positions_BT: jax.Array | None = None,
        segment_ids_BT: jax.Array | None = None,
        hook: Hook | None = None,
    ) -> tuple[jax.Array, dict[str, Any]]:
        """Return float32 logits of the next tokens, `[B, T, V]`, and per-layer statistics by name, `[L]` each.

        All input arrays are int32. By default, positions are 0, 1, 2, … in each row, and each row is one segment. A
        token attends only to tokens of its own segment. `hook` is called with the traced output of each layer. Its
        first result replaces that output, and its second results are stacked to the statistic "hook", `[L, …]`.
        """
        x_BTD, stats = self.hidden(tokens_BT, positions_BT=positions_BT, segment_ids_BT=segment_ids_BT, hook=hook)
        return self.logits(x_BTD), stats

    def hidden(
        self,
        tokens_BT: jax.Array,
        *,
        positions_BT: jax.Array | None = None,
        segment_ids_BT: jax.Array | None = None,
        hook: Hook | None = None,
        watch: bool | jax.Array = False,
    ) -> tuple[jax.Array, dict[str, Any]]:
        """Return the normalised output of the last layer, `[B, T, D]`, and per-layer statistics by name, `[L]` each.

        With `watch`, the statistics include `LARGEST_LOGITS`, `[L, H, G]` (see `SelfAttention.__call__`).
        """
        if self.layout.zigzag:
            if positions_BT is None:
                sharding = jax.P(None, self.layout.act_BT[1])
                positions_BT = jax.lax.broadcasted_iota(jnp.int32, (1, tokens_BT.shape[1]), 1, out_sharding=sharding)
            rows = tokens_BT, positions_BT, segment_ids_BT
            tokens_BT, positions_BT, segment_ids_BT = jax.tree.map(context.to_zigzag, rows)
        angles = self.angles(tokens_BT.shape[1], positions_BT)

        def layer(
            x_BTD: jax.Array, block: Block, constants: LayerConstants, *index: jax.Array
        ) -> tuple[jax.Array, dict[str, Any]]:
            x_BTD = checkpoint_name(x_BTD, LAYER_INPUT)
            x_BTD, stats = block(x_BTD, lambda h_BTD: block.attention(h_BTD, angles, constants, segment_ids_BT, watch))
            if hook is not None:
                x_BTD, stats["hook"] = hook(x_BTD, *index)
            return x_BTD, stats

        if self.config.remat != "none":
            # With one layer per scan iteration, XLA cannot merge the recomputation with the forward pass anyway. With
            # several, XLA could recompute all of them before the backward pass of the last. `prevent_cse` forbids it.
            is_group = len(self.config.windows) > 1
            layer = jax.checkpoint(layer, policy=REMAT_POLICIES[self.config.remat], prevent_cse=is_group)
        indices_L = () if hook is None else (jnp.arange(1, self.config.num_layers + 1),)
        x_BTD, stats = self.walk(layer, self.embed(tokens_BT), *indices_L, may_unroll=True)
        x_BTD = self.final_norm(x_BTD)
        return context.from_zigzag(x_BTD) if self.layout.zigzag else x_BTD, stats

    def extend(
        self, tokens_BT: jax.Array, *, positions_BT: jax.Array, cache: KVCache | None, segments: SegmentMask
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Return the normalised output `[B, T, D]` for new tokens, and their entries for the cache, each `[L, …]`.

        New tokens attend to each other and to cached tokens as far as `segments` allows. `cache` holds the cached keys
        and values of all layers, stacked along a leading axis L, or is None if the new tokens are whole prompts.
        `SelfAttention.extend` describes the entries.
        """
        angles = self.angles(tokens_BT.shape[1], positions_BT)

        def layer(x_BTD: jax.Array, block: Block, constants: LayerConstants, cache: KVCache | None):
            return block(x_BTD, lambda h_BTD: block.attention.extend(h_BTD, angles, constants, cache, segments))

        x_BTD, entries = self.walk(layer, self.embed(tokens_BT), cache, may_unroll=True)
        return self.final_norm(x_BTD), entries

    def separate_layers(self) -> None:
        """Replace the stacked weights by separate arrays per layer, as in `LanguageModel.weights`."""
        self.blocks = nnx.List([layer_of(self.blocks, i) for i in range(self.config.num_layers)])

    def attention_rows[Found](
        self,
        tokens_BT: jax.Array,
        queries_BC: jax.Array,
        of_layer: Callable[[AttentionRows], Found],
        *,
        positions_BT: jax.Array | None = None,
        segment_ids_BT: jax.Array | None = None,
    ) -> Found:
        """Call `of_layer` with the attention weights of each layer, and return the stacked results.

        `queries_BC` are the int32 positions of the queries for which weights are computed. `of_layer` reduces the
        weights of one layer to a tree of arrays. The trees are stacked along a leading axis `[L]`. The weights of only
        one layer exist at a time.
        """
        angles = self.angles(tokens_BT.shape[1], positions_BT)

        def layer(x_BTD: jax.Array, block: Block, constants: LayerConstants) -> tuple[jax.Array, Found]:
            def attend(h_BTD: jax.Array) -> tuple[jax.Array, AttentionRows]:
                update_BTD, _ = block.attention(h_BTD, angles, constants, segment_ids_BT)
                rows = block.attention.attention_rows(h_BTD, angles, constants, segment_ids_BT, queries_BC)
                return update_BTD, rows

            x_BTD, rows = block(x_BTD, attend)
            return x_BTD, of_layer(rows)

        return self.walk(layer, self.embed(tokens_BT))[1]

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """Return float32 logits `[B, T, V]` from the output of `hidden`.

        Use this for a few tokens. For many tokens, `difftx.training.loss` computes logits in chunks.
        """
        weight_VD, sharding = self.unembedding().astype(x_BTD.dtype), self.layout.logits_BTV
        kind = {"preferred_element_type": jnp.float32, "out_sharding": sharding}
        return soft_cap(jnp.einsum("BTD,VD->BTV", x_BTD, weight_VD, **kind), self.config.logit_soft_cap)

    def unembedding(self) -> jax.Array:
        """Return the float32 matrix `[V, D]` that maps hidden states to logits before `model.logit_soft_cap`.

        The matrix is already multiplied by µP's logit factor.
        """
        weight_VD = (self.embedding_VD if self.config.tie_embeddings else self.unembedding_VD)[...]
        # In inference, the weight may be bfloat16. Multiplying in bfloat16 would round the factor.
        return scaled(weight_VD.astype(jnp.float32), 1 / self.config.width_ratio)

    def walk(self, layer: Callable[..., Any], carry: Any, *inputs_L: Any, may_unroll: bool = False) -> tuple[Any, Any]:
        """Scan `carry, result = layer(carry, block, constants, *inputs)` over the layers.

        Return the last carry and the stacked results. `inputs_L` are trees of arrays `[L, …]`. The scan keeps compile
        time independent of depth. Windows are static, so one iteration applies a group of layers, one for each letter
        of `model.window_pattern`. With `may_unroll`, a shallow model without remat is unrolled instead: a scan would
        copy the values saved for the backward pass into stacked arrays, which took a third of a step on CPUs.
        """
        constants_L, period = layer_constants(self.config), len(self.config.windows)
        if self.config.matmul_ranges:
            layer = _with_static_scales(layer)

        def group(carry: Any, layers: Iterable[Any]) -> tuple[Any, Any]:
            outputs = []
            for index, (block, constants, *others) in enumerate(layers):
                carry, output = layer(carry, block, constants.of_layer(self.config, index), *others)
                outputs.append(output)
            return carry, jax.tree.map(lambda *by_layer: jnp.stack(by_layer), *outputs)

        if isinstance(self.blocks, nnx.List):
            others_L = constants_L, *inputs_L
            return group(carry, [(block, *layer_of(others_L, i)) for i, block in enumerate(self.blocks)])
        is_shallow = self.config.remat == "none" and self.config.num_layers <= UNROLLED_LAYERS
        unroll = self.config.num_layers // period if may_unroll and is_shallow else 1
        if period == 1:
            stacked_L = self.blocks, constants_L.of_layer(self.config, 0), *inputs_L
            return jax.lax.scan(lambda carry, of_layer: layer(carry, *of_layer), carry, stacked_L, unroll=unroll)
        stacked_NP = jax.tree.map(lambda x_L: _split_axis(x_L, period), (self.blocks, constants_L, *inputs_L))
        carry, outputs_NP = jax.lax.scan(
            lambda carry, stacked_P: group(carry, _unstacked(stacked_P, period)), carry, stacked_NP, unroll=unroll
        )
        return carry, jax.tree.map(_merge_axes, outputs_NP)

    def angles(self, length: int, positions_BT: jax.Array | None = None) -> Angles:
        """Return the angles of the rotary embedding. By default, tokens have the positions 0, …, `length` - 1."""
        positions = jnp.arange(length)[None] if positions_BT is None else positions_BT
        return rotary_angles(positions, self.config)

    def embed(self, tokens_BT: jax.Array) -> jax.Array:
        """Look up the token embeddings, the input of the first layer, `[B, T, D]`."""
        # Look up in float32: the gradient of a frequent token's embedding is a sum of thousands of terms.
        tokens_BT = reshard(tokens_BT, self.layout.lookup_BT)
        x_BTD = self.embedding_VD.at[tokens_BT].get(out_sharding=self.layout.lookup_BTD)
        return reshard(x_BTD.astype(self.config.compute_dtype), self.layout.act_BTD)


def _with_static_scales(layer: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a layer so that its matrix products, in order, use the input ranges in `constants.ranges_P`."""

    def scaled_layer(carry: Any, block: Block, constants: LayerConstants, *others: Any) -> Any:
        assert constants.ranges_P is not None
        ranges = iter(jnp.unstack(constants.ranges_P))
        with observed(lambda *_: next(ranges)):
            return layer(carry, block, constants, *others)

    return scaled_layer


def _split_axis(x_L: jax.Array, period: int) -> jax.Array:
    """Reshape `[L, …]` to `[L / period, period, …]` and keep the sharding of the other axes.

    Without `out_sharding`, JAX removes the sharding of axes of size 1, such as the batch axis of a single prompt.
    """
    sharding = jax.P(None, *jax.typeof(x_L).sharding.spec)
    return jnp.reshape(x_L, (-1, period, *x_L.shape[1:]), out_sharding=sharding)


def _merge_axes(x_NP: jax.Array) -> jax.Array:
    """Reshape `[N, P, …]` to `[N P, …]`, the inverse of `_split_axis`."""
    sharding = jax.P(*jax.typeof(x_NP).sharding.spec[1:])
    return jnp.reshape(x_NP, (-1, *x_NP.shape[2:]), out_sharding=sharding)


def _unstacked[Stacked](stacked_P: Stacked, period: int) -> list[Stacked]:
    """Split a group's stacked arrays into a list of layers, so that the backward pass stacks gradients only once."""
    leaves, tree = jax.tree.flatten(stacked_P)
    unstacked = [jnp.unstack(x_P) for x_P in leaves]
    return [jax.tree.unflatten(tree, [by_layer[i] for by_layer in unstacked]) for i in range(period)]


def layer_of[Stacked](stacked: Stacked, index: int) -> Stacked:
    """Return the entries of one layer from arrays that are stacked along a leading layer axis."""
    return jax.tree.map(lambda x: jax.lax.index_in_dim(x, index, keepdims=False), stacked)
