"""Differential attention (arXiv 2410.05258, §2.1), the softmax attention it is compared with, and their base class.

`variants/` holds further architectures. docs/extend.md shows how to add an architecture in a file of your own.
"""
# Axes: B = batch, T = tokens, C = selected queries, D = model width, H = heads, K = key/value heads,
#   G = groups of queries and keys: 2 in differential attention (one for A1, one for A2), 1 in softmax attention,
#   d = width of a query/key (sub-)head, E = width of a value head (2d in differential attention, d in softmax
#   attention), L = layers

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from ml_collections import ConfigDict

from difftx import kernels
from difftx.config import ModelConfig
from difftx.config.model import default_specific_fields
from difftx.errors import UserError, did_you_mean
from difftx.kernels import cached, weight_functions
from difftx.kernels.backend import SAVED
from difftx.kernels.cached import KVCache, SegmentMask
from difftx.kernels.quantized import rounded
from difftx.kernels.rows import AttentionRows, attention_rows
from difftx.kernels.weight_functions import WeightFunction
from difftx.model.architectures import ARCHITECTURES, heads_of
from difftx.model.layers import HeadNorm, RMSNorm, SwiGLU, linear, projection, rotate, vector
from difftx.parallel.layout import Layout, reshard

Angles = tuple[jax.Array, jax.Array]
LARGEST_LOGITS = "largest_logits"  # Key in a layer's dict of statistics.


class LambdaBound(NamedTuple):
    """A function that bounds λ to the range from `lowest` to 1, selected by `model.lambda_bound`."""

    function: Callable[[jax.Array], jax.Array]
    inverse: Callable[[jax.Array], jax.Array]
    lowest: int


LAMBDA_BOUNDS = {
    "sigmoid": LambdaBound(jax.nn.sigmoid, jax.scipy.special.logit, 0),
    "tanh": LambdaBound(jnp.tanh, jnp.arctanh, -1),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerConstants:
    """Constants of one layer, computed from the config. Arrays are float32 scalars, or `[L]` for all layers."""

    lambda_init: jax.Array
    post_scale: jax.Array  # Factor after the head norm, by default 1 - λ_init (0 if λ_init = 1).
    ranges_P: jax.Array | None = None  # `model.matmul_ranges`: one entry per product P, or `[L, P]` for all layers.
    # A token attends to itself and the `window - 1` tokens before it. None: it attends to all tokens up to itself.
    window: int | None = dataclasses.field(default=None, metadata={"static": True})
    rotates: bool = dataclasses.field(default=True, metadata={"static": True})  # Whether to apply rotary embeddings.

    def of_layer(self, config: ModelConfig, index: int) -> "LayerConstants":
        """Return these constants with `window` and `rotates` set for the layer `index`, counted from 0."""
        position = index % len(config.windows)
        return dataclasses.replace(self, window=config.windows[position], rotates=config.rotates[position])


def layer_constants(config: ModelConfig) -> LayerConstants:
    """Return λ_init = 0.8 - 0.6 exp(-0.3 (l - 1)) and the post-norm scale 1 - λ_init for the layers l = 1, 2, ….

    Layers are counted from `SelfAttention.first_layer`, by default 1. `config.lambda_init` and `config.post_scale`, if
    set, apply to all layers in place of these formulas.
    """
    # l - 1 for each layer. With µP, l - 1 of the layer at the same relative depth in a model of `mup_base_layers`.
    layer_L = jnp.arange(config.num_layers, dtype=jnp.float32) / config.depth_ratio
    layer_L += ARCHITECTURES[config.architecture].first_layer - 1
    lambda_init_L = 0.8 - 0.6 * jnp.exp(-0.3 * layer_L)
    if config.lambda_init is not None:
        lambda_init_L = jnp.full_like(lambda_init_L, config.lambda_init)
    post_scale_L = 1 - lambda_init_L if config.post_scale is None else jnp.full_like(layer_L, config.post_scale)
    ranges_LP = (
        jnp.reshape(jnp.float32(config.matmul_ranges), (config.num_layers, -1)) if config.matmul_ranges else None
    )
    return LayerConstants(lambda_init_L, post_scale_L, ranges_LP)


class SelfAttention(nnx.Module):
    """Base class of all architectures: maps a layer's normalised input to its residual update.

    Class attributes and class methods describe the architecture to the rest of difftx. The other methods compute the
    attention. A subclass defines `project`, `weight_function` and `output`, or overrides the methods that call them.

    A call runs four methods:
    1. `operands` calls `project` for queries, keys and values, rounds them if the config requires it, and shards them.
    2. `attend` runs the kernel and returns one output per kernel head.
    3. `combine` maps the kernel's heads to the heads of the model, for example by subtracting pairs.
    4. `output` returns the residual update.

    Analyses call `attention_weight_inputs` to compute attention weights. Queries and keys always have the axis G.
    """

    groups: ClassVar[int] = 1  # Number of keys, each of width d, per key/value head.
    value_width_factor: ClassVar[int] = 1  # E / d. Values and head outputs have width E, keys have width d.
    # Name of the function in `difftx.kernels` that computes the heads. It determines the available backends.
    kernel: ClassVar[Literal["diff_attention", "attention", "weighted_attention"]] = "weighted_attention"
    subtracts: ClassVar[bool] = False  # Whether the attention weights of a head are A1 - λ A2.
    fields: ClassVar[tuple[str, ...]] = ()  # Fields of `model` with `Flag.SPECIFIC` that this class uses.
    # Frozen dataclass of the config fields that only this architecture uses. Users set them as `model.NAME.…`, where
    # NAME is the architecture. Methods of this class read them from `config.own`.
    own_config: ClassVar[type | None] = None
    default_head_norm: ClassVar[str] = "none"  # Value of `model.head_norm` if the user does not set it.
    replaced_heads: ClassVar[int] = 1  # One head replaces this many heads of the matched Transformer.
    first_layer: ClassVar[int] = 1  # The value of l for the first layer in the λ_init schedule.
    mlp: ClassVar[type[SwiGLU]] = SwiGLU  # Class of the MLP in the same layer.

    def __init__(self, config: ModelConfig, layout: Layout, *, rngs: nnx.Rngs):
        self.config, self.layout = config, layout
        if config.qk_norm:
            d = heads_of(config).d_head
            self.query_norm = RMSNorm(d, config.norm_eps, layout)
            self.key_norm = RMSNorm(d, config.norm_eps, layout)

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        """Raise `UserError` if the config has a value that the architecture does not support."""
        name, is_quantized = config.attention_implementation, config.attention_logit_bits is not None
        if name not in (known := {"auto"}.union(*kernels.BACKENDS.values())):
            raise UserError(f"model.attention_implementation={name!r}: no such kernel.{did_you_mean(name, known)}")
        if name not in (backends := cls.backends(quantized=is_quantized)):
            served = "quantised attention logits" if is_quantized else f"architecture {config.architecture!r}"
            raise UserError(
                f"model.attention_implementation={name!r} does not serve {served}; use one of {', '.join(backends)}"
            )

    @classmethod
    def tensors(cls, config: ModelConfig) -> dict[str, tuple[str, str, str]]:
        """Return, for each exported weight, its axes in the export, the parameter's name and the parameter's axes.

        The keys are weight names of `modeling_difftx.py`. `difftx/interop/parameters.py` explains the strings of axes.
        Norms and λ vectors are not included.
        """
        raise NotImplementedError

    @classmethod
    def check_rows(cls, config: ModelConfig, tokens: int) -> None:
        """Raise `UserError` if the architecture cannot process rows of `tokens` tokens with this config."""

    @classmethod
    def backends(cls, *, quantized: bool) -> tuple[str, ...]:
        """Return the valid values of `model.attention_implementation`."""
        return ("auto", *kernels.BACKENDS["weighted_attention" if quantized else cls.kernel])

    @classmethod
    def sub_heads(cls, config: ModelConfig, num_heads: int) -> int:
        """Return the number of query sub-heads. If `model.head_dim` is not set, d is d_model / this number."""
        return cls.groups * num_heads

    @classmethod
    def query_heads(cls, config: ModelConfig) -> int:
        """Return the number of query vectors of width d per token."""
        return cls.sub_heads(config, config.num_heads)

    @classmethod
    def kv_heads(cls, config: ModelConfig) -> int:
        """Return the default number of key/value heads, for configs that do not set `model.num_kv_heads`."""
        return config.num_heads

    @classmethod
    def configure(cls, c: ConfigDict, heads: int) -> None:
        """Set the config fields of this architecture, given the config of a Transformer with `heads` heads.

        `difftx.model.matching.match` then adjusts `model.mlp_dim` so that both have equally many parameters.
        """
        if heads % cls.replaced_heads:  # Rounding the number of heads would change the head width.
            raise UserError(
                f"architecture {c.model.architecture!r}: one head replaces {cls.replaced_heads} of the Transformer, "
                f"which do not divide its {heads} heads; use a multiple of {cls.replaced_heads}"
            )
        c.model.num_heads = heads // cls.replaced_heads
        if c.model.num_kv_heads is not None and c.model.num_kv_heads % cls.replaced_heads == 0:
            c.model.num_kv_heads //= cls.replaced_heads
        c.model.head_norm = cls.default_head_norm

    @classmethod
    def matrices_by_group(cls, config: ModelConfig, name: str, weight: jax.Array) -> dict[str, jax.Array]:
        """Split a weight into its slices for A1 and A2, with names such as "query_1" and "query_2".

        Only weights with the group axis, `[L, D, H, G, d]`, are split: the last index of G computes A2, the other
        indices compute A1. Other weights have fewer axes and are returned whole.
        """
        if weight.ndim != 5:
            return {name: weight}
        return {f"{name}_1": weight[..., :-1, :], f"{name}_2": weight[..., -1:, :]}

    def __call__(
        self,
        x_BTD: jax.Array,
        angles: Angles,
        constants: LayerConstants,
        segment_ids_BT: jax.Array | None,
        watch: bool | jax.Array = False,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the residual update `[B, T, D]` and statistics of the layer by name, one float32 scalar each.

        If `watch` is not False, the statistic `LARGEST_LOGITS` is the largest logit per kernel head and group,
        `[H, G]`, before `model.attention_logit_bits` rounds the logits. If `watch` is a traced boolean, the statistic
        is 0 in steps where `watch` is false.
        """
        q, k, v = self.operands(x_BTD, angles, constants)
        heads_BTHE = self.combined(self.attend(q, k, v, x_BTD, constants, segment_ids_BT), x_BTD)
        statistics = self.statistics(x_BTD, constants)
        if watch is not False:
            options = {"segment_ids_BT": segment_ids_BT, "window": constants.window, "zigzag": self.layout.zigzag}

            def largest() -> jax.Array:
                return reshard(kernels.largest_logits(q, k, **options), self.layout.vector)

            zeros_HG = jnp.zeros(q.shape[2:4], jnp.float32)
            statistics[LARGEST_LOGITS] = largest() if watch is True else jax.lax.cond(watch, largest, lambda: zeros_HG)
        return self.output(heads_BTHE, x_BTD, constants), statistics

    @classmethod
    def query_factors(cls, config: ModelConfig, factor_LHG: jax.Array) -> jax.Array:
        """Convert one factor per kernel head, `[L, H, G]`, to one factor per head of the query weight `[L, D, …, d]`.

        Multiplying the query weight by the result multiplies the logits by `factor_LHG`. Override this method if the
        kernel's heads are in another order than the query weight's heads.
        """
        return factor_LHG

    def extend(
        self, x_BTD: jax.Array, angles: Angles, constants: LayerConstants, cache: KVCache | None, segments: SegmentMask
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Return the residual update `[B, T, D]` of new tokens, and a tuple to be stored in the cache.

        New tokens attend to cached tokens and to each other. If `cache` is None, the new tokens are whole prompts, and
        the same kernel as in training computes them. The tuple holds the keys and values of the new tokens. If the
        cache evicts tokens, it also holds the attention mass per new token, `[B, T, K]`, and per cache slot,
        `[B, K, S]` (see `cached.weighted_attention`).
        """
        q, k, v = self.operands(x_BTD, angles, constants)
        if cache is None:
            heads_BTHE, mass = self.attend(q, k, v, x_BTD, constants, segments.segment_BT), ()
        else:
            options = {"weight_argument": self.weight_argument(constants, x_BTD), "window": constants.window}
            function = self._configured_weight_function()
            heads_BTHE, mass = cached.weighted_attention(function, q, k, v, cache, segments, **options)
        return self.output(self.combined(heads_BTHE, x_BTD), x_BTD, constants), (k, v, *mass)

    def attention_rows(
        self,
        x_BTD: jax.Array,
        angles: Angles,
        constants: LayerConstants,
        segment_ids_BT: jax.Array | None,
        queries_BC: jax.Array,
    ) -> AttentionRows:
        """Compute the attention weights of the queries at the row positions `queries_BC`."""
        q, k, _ = self.operands(x_BTD, angles, constants)
        weight_function, q, k, weight_argument = self.attention_weight_inputs(q, k, x_BTD, constants)
        options = {"weight_argument": weight_argument, "segment_ids_BT": segment_ids_BT, "window": constants.window}
        return attention_rows(weight_function, q, k, queries_BC, **options)

    def operands(
        self, x_BTD: jax.Array, angles: Angles, constants: LayerConstants
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Call `project` and return queries `[B, T, H, G, d]`, keys and values, sharded as `attend` expects them."""
        if not constants.rotates:
            angles = (jnp.ones_like(angles[0]), jnp.zeros_like(angles[1]))  # The angle 0 for each token.
        q, k, v = self.project(x_BTD, angles)
        if (bits := self.config.attention_operand_bits) is not None:
            q, k, v = (rounded(x, bits) for x in (q, k, v))
        grouped = self.layout.attend_BTHGd
        return reshard(q, grouped), reshard(k, grouped), reshard(v, self.layout.attend_BTHE)

    def project(self, x_BTD: jax.Array, angles: Angles) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return queries `[B, T, H, G, d]`, keys `[B, T, K, G, d]` and values `[B, T, K, E]` in the dtype of `x_BTD`.

        Implementations must pass queries and keys through `rotated`.
        """
        raise NotImplementedError

    def add_biases(self, *weights: nnx.Param) -> None:
        """Create biases for queries, keys and values if `model.attention_bias` is set."""
        if self.config.attention_bias:
            self.query_bias, self.key_bias, self.value_bias = (
                vector(jnp.zeros(weight.shape[1:], jnp.float32, out_sharding=self.layout.vector)) for weight in weights
            )

    def biased(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Add the biases that `add_biases` created, if any."""
        if not self.config.attention_bias:
            return q, k, v
        biases = (bias.astype(q.dtype)[None, None] for bias in (self.query_bias, self.key_bias, self.value_bias))
        q, k, v = map(jnp.add, (q, k, v), biases)
        return q, k, v

    def rotated(self, q: jax.Array, k: jax.Array, angles: Angles) -> tuple[jax.Array, jax.Array]:
        """Apply the norm if `model.qk_norm` is set, then the rotary embedding, to queries and keys."""
        if self.config.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k = rotate(q, angles), rotate(k, angles)
        # Without a norm, the backward pass does not need the projections, so remat saves the rotated arrays instead.
        return (q, k) if self.config.qk_norm else checkpoint_name((q, k), SAVED)

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        x_BTD: jax.Array,
        constants: LayerConstants,
        segment_ids_BT: jax.Array | None,
    ) -> jax.Array:
        """Run the kernel and return one output per kernel head, `[B, T, H, E]`, sharded as the layout says."""
        function = self.kernel if self.config.attention_logit_bits is None else "weighted_attention"
        return kernels.attend(
            function,
            *(q, k, v),
            None if function == "attention" else self.weight_argument(constants, x_BTD),
            weight_function=self._configured_weight_function(),
            segment_ids_BT=segment_ids_BT,
            window=constants.window,
            zigzag=self.layout.zigzag,
            implementation=self.config.attention_implementation,
        )

    def weight_function(self) -> WeightFunction:
        """Return the function that maps logits to attention weights, such as softmax."""
        raise NotImplementedError

    def weight_argument(self, constants: LayerConstants, x_BTD: jax.Array) -> jax.Array | None:
        """Return the last argument of the weight function, such as λ, or None if it takes only logits.

        The argument is a scalar, or has the shape `[H]` (per head) or `[B, T, H]` (per token and head), with any
        sharding. `x_BTD` is the layer's normalised input. In a cached call, it has only the new tokens.
        """
        return None

    def combine(self, heads_BTHE: jax.Array, x_BTD: jax.Array) -> jax.Array:
        """Map the outputs of the kernel's heads to those of the model's heads. By default, return them unchanged."""
        return heads_BTHE

    def combined(self, heads_BTHE: jax.Array, x_BTD: jax.Array) -> jax.Array:
        """Reshard the outputs of the kernel's heads as `output` expects them, then call `combine`."""
        return self.combine(reshard(heads_BTHE, self.layout.act_BTHE), x_BTD)

    def attention_weight_inputs(
        self, q: jax.Array, k: jax.Array, x_BTD: jax.Array, constants: LayerConstants
    ) -> tuple[WeightFunction, jax.Array, jax.Array, jax.Array | None]:
        """Return what analyses need to compute attention weights: weight function, queries, keys, weight argument.

        Queries are `[B, T, H, G, d]` and keys `[B, T, K, G, d]`, where H counts the model's heads, as `combine` returns
        them. A subclass that overrides `combine` must override this method too.
        """
        return self.weight_function(), q, k, self.weight_argument(constants, x_BTD)

    def output(self, heads_BTHE: jax.Array, x_BTD: jax.Array, constants: LayerConstants) -> jax.Array:
        """Return the residual update `[B, T, D]` from the outputs of the heads. `x_BTD` is the layer's input."""
        raise NotImplementedError

    def statistics(self, x_BTD: jax.Array, constants: LayerConstants) -> dict[str, jax.Array]:
        """Return statistics of the layer for logging, one float32 scalar each."""
        return {}

    def _configured_weight_function(self) -> WeightFunction:
        """Return the weight function. If `model.attention_logit_bits` is set, it quantises the logits first."""
        config = self.config
        if config.attention_logit_bits is None:
            return self.weight_function()
        return functools.partial(
            weight_functions.quantized,
            weight_function=self.weight_function(),
            groups=self.groups,
            bits=config.attention_logit_bits,
            granularity=config.attention_logit_granularity,
            mesh_axes=self.layout.attend_BTHE[2],
        )


class DiffAttention(SelfAttention):
    """Multi-head differential attention, Eq. 1-3 of arXiv 2410.05258.

    head_i = (A1 - λ A2) V with A_g = softmax(Q_g K_gᵀ/√d). The output is Concat_i((1 - λ_init) RMSNorm(head_i)) W_O.

    All heads of a layer share λ = exp(λ_q1·λ_k1) - exp(λ_q2·λ_k2) + λ_init. If `lambda_learned` is False, λ = λ_init.
    If `lambda_bound` is set, λ is bounded by that function. Both queries of head n use key/value head n // (H / K), as
    in the official code with flash attention.
    """

    groups = 2
    value_width_factor = 2
    kernel = "diff_attention"
    subtracts = True
    fields = tuple(default_specific_fields())
    default_head_norm = "rms_affine"
    replaced_heads = 2  # A differential head has two queries, two keys and a value of twice the width.

    @classmethod
    def check(cls, config):
        super().check(config)
        if config.lambda_bound == "none":
            return
        if not config.lambda_learned:
            raise UserError(f"model.lambda_bound={config.lambda_bound!r}: a fixed λ needs no bound; leave it at 'none'")
        lowest = LAMBDA_BOUNDS[config.lambda_bound].lowest
        if config.lambda_init is not None and not lowest < config.lambda_init < 1:
            raise UserError(
                f"model.lambda_init={config.lambda_init} must lie between {lowest} and 1, the range of "
                f"model.lambda_bound={config.lambda_bound!r}"
            )

    def __init__(self, config: ModelConfig, layout: Layout, *, rngs: nnx.Rngs):
        super().__init__(config, layout, rngs=rngs)
        heads = heads_of(config)
        D, H, K, d, E = config.d_model, config.num_heads, heads.kv_heads, heads.d_head, heads.d_value
        self.query_DHGd = projection(config, (D, *self.query_shape(config), d), 1, layout.query_DHGd, rngs=rngs)
        self.key_DKGd = projection(config, (D, K, 2, d), 1, layout.key_DKGd, rngs=rngs)
        self.value_DKE = projection(config, (D, K, E), 1, layout.value_DKE, rngs=rngs)
        self.output_HED = projection(config, (H, E, D), 2, layout.output_HED, rngs=rngs, output=True)
        self.add_biases(self.query_DHGd, self.key_DKGd, self.value_DKE)
        if self.has_lambda_vectors:
            init, spec = jax.nn.initializers.normal(config.lambda_std), layout.vector
            self.lambda_query_Gd = vector(init(rngs.params(), (2, d), jnp.float32, out_sharding=spec), is_lambda=True)
            self.lambda_key_Gd = vector(init(rngs.params(), (2, d), jnp.float32, out_sharding=spec), is_lambda=True)
        # All heads of the layer share one gain ("GroupNorm" in Figure 2 of the paper).
        self.head_norm = HeadNorm(config, E, layout)

    @classmethod
    def tensors(cls, config):
        return {
            "q_proj.weight": ("NQd D", "query_DHGd", "D N Q d"),
            "k_proj.weight": ("KGd D", "key_DKGd", "D K G d"),
            "v_proj.weight": ("KGd D", "value_DKE", "D K Gd"),
            "o_proj.weight": ("D HGd", "output_HED", "H Gd D"),
        }

    @property
    def has_lambda_vectors(self) -> bool:
        return self.config.lambda_learned

    @classmethod
    def query_shape(cls, config: ModelConfig) -> tuple[int, int]:
        """Return the middle axes of the query weight: the number of heads, and the number of queries per head."""
        return config.num_heads, 2

    def project(self, x_BTD: jax.Array, angles: Angles) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return rotated queries `[B, T, H, 2, d]`, rotated keys `[B, T, K, 2, d]` and values `[B, T, K, E]`."""
        q_BTHGd = linear("BTD,DHGd->BTHGd", x_BTD, self.query_DHGd, self.layout.act_BTHGd)
        k_BTKGd = linear("BTD,DKGd->BTKGd", x_BTD, self.key_DKGd, self.layout.act_BTHGd)
        v_BTKE = linear("BTD,DKE->BTKE", x_BTD, self.value_DKE, self.layout.act_BTHE)
        q_BTHGd, k_BTKGd, v_BTKE = self.biased(q_BTHGd, k_BTKGd, v_BTKE)
        return *self.rotated(q_BTHGd, k_BTKGd, angles), v_BTKE

    def lam(self, lambda_init: jax.Array) -> jax.Array:
        """Return λ, a float32 scalar. In bfloat16, λ was wrong by up to 0.01 (2,000 random draws, d = 128)."""
        if not self.has_lambda_vectors:
            return lambda_init
        exponents_G = jnp.sum(self.lambda_query_Gd[...] * self.lambda_key_Gd[...], axis=-1)
        change = jnp.exp(exponents_G[0]) - jnp.exp(exponents_G[1])
        if self.config.lambda_bound == "none":
            return change + lambda_init
        bound = LAMBDA_BOUNDS[self.config.lambda_bound]
        return bound.function(change + bound.inverse(lambda_init))

    def weight_function(self) -> WeightFunction:
        return weight_functions.difference

    def weight_argument(self, constants: LayerConstants, x_BTD: jax.Array) -> jax.Array | None:
        return self.lam(constants.lambda_init)

    def output(self, heads_BTHE: jax.Array, x_BTD: jax.Array, constants: LayerConstants) -> jax.Array:
        heads_BTHE = self.head_norm(heads_BTHE) * constants.post_scale.astype(heads_BTHE.dtype)
        return merge_heads(heads_BTHE, self.output_HED, self.layout)

    def statistics(self, x_BTD: jax.Array, constants: LayerConstants) -> dict[str, jax.Array]:
        lam = self.weight_argument(constants, x_BTD)
        return {} if lam is None else {"lambda": jnp.mean(lam) if lam.ndim else lam}


class Attention(SelfAttention):
    """Multi-head softmax attention. Differential attention with half as many heads has equally many parameters."""

    kernel = "attention"
    fields = ("post_scale",)

    def __init__(self, config: ModelConfig, layout: Layout, *, rngs: nnx.Rngs):
        super().__init__(config, layout, rngs=rngs)
        heads = heads_of(config)
        D, H, K, d = config.d_model, config.num_heads, heads.kv_heads, heads.d_head
        # The query and key weights have no group axis here, so they are sharded like the value weights.
        self.query_DHd = projection(config, (D, heads.query_heads, d), 1, layout.value_DKE, rngs=rngs)
        self.key_DKd = projection(config, (D, K, d), 1, layout.value_DKE, rngs=rngs)
        self.value_DKd = projection(config, (D, K, d), 1, layout.value_DKE, rngs=rngs)
        self.output_HdD = projection(config, (H, d, D), 2, layout.output_HED, rngs=rngs, output=True)
        self.add_biases(self.query_DHd, self.key_DKd, self.value_DKd)
        self.head_norm = HeadNorm(config, d, layout)

    @classmethod
    def tensors(cls, config):
        return {
            "q_proj.weight": ("Ad D", "query_DHd", "D A d"),
            "k_proj.weight": ("Kd D", "key_DKd", "D K d"),
            "v_proj.weight": ("Kd D", "value_DKd", "D K d"),
            "o_proj.weight": ("D Hd", "output_HdD", "H d D"),
        }

    def project(self, x_BTD: jax.Array, angles: Angles) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return rotated queries `[B, T, H, 1, d]`, rotated keys `[B, T, K, 1, d]` and values `[B, T, K, d]`."""
        q_BTHd, k_BTKd, v_BTKd = (
            linear("BTD,DHd->BTHd", x_BTD, weight, self.layout.act_BTHE)
            for weight in (self.query_DHd, self.key_DKd, self.value_DKd)
        )
        q_BTHd, k_BTKd, v_BTKd = self.biased(q_BTHd, k_BTKd, v_BTKd)
        q_BTHd, k_BTKd = self.rotated(q_BTHd, k_BTKd, angles)
        return q_BTHd[:, :, :, None], k_BTKd[:, :, :, None], v_BTKd

    def weight_function(self) -> WeightFunction:
        return weight_functions.softmax

    def output(self, heads_BTHE: jax.Array, x_BTD: jax.Array, constants: LayerConstants) -> jax.Array:
        heads_BTHE = self.head_norm(heads_BTHE)
        if self.config.post_scale is not None:
            heads_BTHE = heads_BTHE * self.config.post_scale
        return merge_heads(heads_BTHE, self.output_HdD, self.layout)


def merge_heads(heads_BTHE: jax.Array, output_HED: nnx.Param, layout: Layout) -> jax.Array:
    """Concatenate the heads and multiply them by the output projection. The result is `[B, T, D]`."""
    return linear("BTHE,HED->BTD", heads_BTHE, output_HED, layout.act_BTD)


def require_no_head_norm(config: ModelConfig) -> None:
    """Raise `UserError` if the config has a head norm."""
    if config.head_norm != "none":
        raise UserError(
            f"model.head_norm={config.head_norm!r}: architecture {config.architecture!r} has none; use 'none'"
        )


def require_field(config: ModelConfig, name: str, usual: str) -> None:
    """Raise `UserError` if the field `model.ARCHITECTURE.name` is not set. The message proposes the value `usual`."""
    if getattr(config.own, name) is None:
        path = f"model.{config.architecture}.{name}"
        raise UserError(f"{path}=None: architecture {config.architecture!r} requires it; {usual} is common")
