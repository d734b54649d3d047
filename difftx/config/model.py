"""Config group `model`."""

import dataclasses
from typing import Annotated, Any, Literal

from difftx.config import affects, flag
from difftx.config.checks import divisors
from difftx.config.fields import AxisLength, Extensible, Group, NotNegative, Positive, Rule, UnitHalfOpen, fields_with
from difftx.errors import UserError

Granularity = Literal["query", "token"]
Matmul = Literal["compute_dtype", "fp8", "int8", "int8_weights", "int4_weights"]
ChunkTokens = Annotated[int, Rule(lambda tokens: tokens in (1, 2, 4, 8, 16, 32), " must be a power of two, 1 … 32")]
FewBits = Annotated[int, Rule(lambda bits: bits in (4, 8), " must be 4 or 8")]
LogitBits = Annotated[int, Rule(lambda bits: 2 <= bits < 16, " must lie in 2 … 15; None: not quantised")]
WindowPattern = Annotated[
    str,
    Rule(
        lambda text: text and set(text) <= {"L", "G", "N"},
        ": write L for a layer with a window, G for one without, and N for one without window and rotary embedding",
    ),
]


def default_specific_fields() -> dict[str, Any]:
    """Return the defaults of the fields that only some architectures use, for recipes that change the architecture."""
    specific = fields_with(ModelConfig, flag.Flag.SPECIFIC)
    return {field.name: field.default for field in dataclasses.fields(ModelConfig) if field.name in specific}


class CacheConfig(Group):
    """The key/value cache, for generation and for scoring continuations. The suite `cache` sets these fields. If the
    cache is compressed, validation losses use it too, except with `data.document_mask`."""

    bits: flag.Decoder[affects.Function[FewBits | None]] = None
    """Number of bits, 8 or 4, of each cached number. The keys and the values of a token have one scale per (sub-)head.
    None: `compute_dtype`."""
    tokens: flag.Decoder[affects.Function[Positive[int] | None]] = None
    """Largest number of tokens that each key/value head keeps of a row. None: all tokens."""
    recent_share: flag.Decoder[affects.Function[UnitHalfOpen]] = 0.5
    """Share of `tokens` for the most recent tokens. The remaining slots keep the tokens that have received the most
    attention, summed over queries (heavy hitters, arXiv 2306.14048)."""
    chunk_tokens: flag.Decoder[affects.Function[ChunkTokens]] = 32
    """Number of tokens of a prompt, or of a row to score, that enter a compressed cache together: a power of two up to
    32. They attend to each other before they are compressed."""

    def __post_init__(self):
        if self.tokens is not None and self.tokens < 2 * self.chunk_tokens:
            raise UserError(
                f"model.cache.tokens={self.tokens} is less than twice model.cache.chunk_tokens={self.chunk_tokens}; "
                "keep more tokens, or use smaller chunks (suite cache: eval.cache.chunk_tokens)"
            )

    @property
    def compresses(self) -> bool:
        """Whether the cache is quantised or keeps only some tokens."""
        return self.bits is not None or self.tokens is not None


class RopeScalingConfig(Group):
    """Lower rotary frequencies, for a longer context than in pre-training, as in Llama 3.1 (arXiv 2407.21783)."""

    factor: affects.Function[Positive[float]] = 1.0
    """Divisor of low frequencies. 1: no scaling."""
    low_freq_factor: affects.Function[Positive[float]] = 1.0
    """Frequencies with at most this number of rotations over the original context are divided by `factor`."""
    high_freq_factor: affects.Function[Positive[float]] = 4.0
    """Frequencies with at least this number of rotations are unchanged. Between the two limits, the divisor is
    interpolated."""
    original_max_position_embeddings: affects.Function[Positive[int]] = 8192
    """Length of the original context in tokens."""

    def __post_init__(self):
        if self.high_freq_factor <= self.low_freq_factor:
            raise UserError(
                f"model.rope_scaling.high_freq_factor={self.high_freq_factor} must exceed low_freq_factor="
                f"{self.low_freq_factor}"
            )


class MatchedConfig(Group):
    """The Transformer to which a recipe has matched the number of parameters (`match`, `difftx/model/matching.py`)."""

    num_heads: flag.Decoder[affects.Nothing[Positive[int] | None]] = None
    """Its `num_heads`. None: the model is not matched with a Transformer."""
    num_kv_heads: flag.Decoder[affects.Nothing[Positive[int] | None]] = None
    """Its `num_kv_heads`."""
    mlp_dim: flag.Decoder[affects.Nothing[Positive[int] | None]] = None
    """Its `mlp_dim`."""


class ModelConfig(Extensible, effect=affects.Effect.FUNCTION, chosen_by="architecture"):
    """The decoder. The defaults are the paper's 1.4B differential model (arXiv 2410.05258, Tables 6 and 10)."""

    architecture: flag.Decoder[affects.Function[str]] = "diff"
    """Attention variant: "diff" (differential attention), "transformer" (softmax attention, the baseline), "diff_v2",
    "gda", "gdla", "gated", "off_by_one", "sink", "top_k", "signed_mask", "zero_branch", "dex", "motif"
    (`difftx/model/variants/`), or one of an extension. An architecture may have a group of its own, such as
    `model.top_k`."""
    vocab_size: flag.Decoder[affects.Shapes[AxisLength | None]] = 100_288
    """Number of embeddings, at least the tokenizer's number of tokens (100,277 for cl100k_base). None: that number,
    rounded up to a multiple of 128."""
    d_model: flag.Decoder[affects.Shapes[AxisLength]] = 2048
    """Width of the residual stream."""
    num_layers: flag.Decoder[affects.Shapes[AxisLength]] = 24
    """Number of layers, each with attention and an MLP."""
    num_heads: flag.Decoder[affects.Shapes[AxisLength]] = 8
    """Number of heads. A head of `diff` has two query/key sub-heads, so a Transformer of equal size has twice as many
    heads."""
    num_kv_heads: affects.Shapes[AxisLength | None] = None
    """Number of key/value heads for grouped-query attention, counted like `num_heads`. None: one per head, or one
    per noise head with `gda`, `gdla` and `motif`."""
    head_dim: affects.Shapes[AxisLength | None] = None
    """Width d of a query/key sub-head (Eq. 1). None: `d_model` divided by the number of sub-heads. A head of `diff` or
    `signed_mask` has two sub-heads. In `gda` and `motif`, each signal head and each noise head is one."""
    mlp_dim: flag.Decoder[affects.Shapes[AxisLength]] = 5440
    """Hidden width of the MLP, which is SwiGLU, or in `motif` SwiGLU with PolyNorm. The default, 8/3 `d_model` rounded
    down to a multiple of 64, gives the model sizes of Table 10. 5504, a multiple of 128, costs 1 % more and suits the
    lanes of a TPU."""
    rope_theta: affects.Function[Positive[float]] = 10_000.0
    """Base of the rotary embedding. The paper states only its value at 64K tokens, 640,000."""
    rope_scaling: RopeScalingConfig
    """Rotary frequencies for a longer context than in pre-training."""
    attention_bias: affects.Shapes[bool] = False
    """Whether the projections to queries, keys and values have biases, initially 0, as in Qwen 2 (arXiv 2407.10671)."""
    qk_norm: affects.Shapes[bool] = False
    """Whether an RMSNorm with gain normalises the query and the key of each (sub-)head before the rotary embedding. All
    (sub-)heads of a layer share one gain for queries and one for keys, as in Qwen 3 (arXiv 2505.09388)."""
    window: affects.Function[Positive[int] | None] = None
    """Number of tokens to which a token attends in layers with a sliding window, itself included. None: no windows."""
    window_pattern: flag.Decoder[affects.Function[WindowPattern]] = "L"
    """One letter per layer. L: with the window. G: without it. N: with neither a window nor a rotary embedding. Gemma 3
    has "LLLLLG" (arXiv 2503.19786), SmolLM 3 has "GGGN". The pattern repeats over the layers, so its length must divide
    `num_layers`."""
    norm_eps: affects.Function[Positive[float]] = 1e-5
    """Epsilon of the RMSNorms before attention, before the MLP and after the last layer, and of `qk_norm`."""
    head_norm: flag.Conversion[affects.Function[Literal["none", "rms", "rms_affine", "scalar", "sigmoid"]]] = (
        "rms_affine"
    )
    """Norm of each head's output. "rms": RMSNorm without a gain (Eq. 3, Hugging Face). "rms_affine": RMSNorm with gain
    (the official code). In place of a norm, "scalar" has one learned factor per layer, and "sigmoid" the sigmoid of one
    learned number per head, initially 0 (head scaling, arXiv 2504.00927). "none": no norm and no factor."""
    head_norm_eps: flag.Conversion[affects.Function[Positive[float]]] = 1e-5
    """Epsilon of the head norm."""
    lambda_init: flag.Specific[affects.Function[float | None]] = None
    """λ_init of all layers. None: 0.8 - 0.6 exp(-0.3 (l - 1)) in layer l = 1, 2, … (§2.1 of the paper). In `motif`, the
    first layer has l = 0."""
    lambda_learned: flag.Specific[affects.Function[bool]] = True
    """Whether λ is learned. If not, λ = λ_init. For λ = 1, set `lambda_init` = 1 and a `post_scale` such as 0.2, since
    the default factor 1 - λ_init would be 0."""
    lambda_std: flag.Specific[affects.Training[NotNegative[float]]] = 0.1
    """Standard deviation of the initial vectors λ_q1, λ_k1, λ_q2 and λ_k2."""
    lambda_bound: flag.Specific[affects.Function[Literal["none", "sigmoid", "tanh"]]] = "none"
    """Function that bounds the λ of `diff`, `gda` and `zero_branch`. Let e = exp(λ_q1·λ_k1) - exp(λ_q2·λ_k2). "none":
    λ = e + λ_init as in the paper. "sigmoid": λ = σ(e + σ⁻¹(λ_init)) in (0, 1). "tanh": λ = tanh(e + tanh⁻¹(λ_init))
    in (-1, 1)."""
    post_scale: flag.Specific[affects.Function[float | None]] = None
    """Constant factor by which the heads' outputs are multiplied after the head norm. None: 1 - λ_init in `diff`,
    `gda`, `motif` and `signed_mask` (Eq. 3 of the paper), and 1 in all others. `zero_branch` and `dex` have no such
    factor."""
    init: flag.Conversion[affects.Training[Literal["fan_in", "normal"]]] = "fan_in"
    """Initial values of projections. "fan_in": uniform with variance 1 / (3 fan_in), like PyTorch's `Linear` in the
    official code. "normal": normal with mean 0 and standard deviation `init_std`."""
    init_std: flag.Conversion[affects.Training[NotNegative[float]]] = 0.02
    """Standard deviation of the projections' initial values if `init` is "normal"."""
    embedding_std: flag.Decoder[affects.Training[NotNegative[float]]] = 0.02
    """Standard deviation of the initial embeddings. The paper and its code do not state a value."""
    zero_init_output: affects.Training[bool] = False
    """Whether attention's output projection and the MLP's last matrix are initially zero. The official code has False,
    with `init` = "fan_in". True is better for both models at 0.1M parameters (docs/exploratory.md)."""
    tie_embeddings: flag.Decoder[affects.Shapes[bool]] = True
    """Whether the embedding is also the output projection. The model sizes of Table 10 require it."""
    logit_soft_cap: flag.Decoder[affects.Function[Positive[float] | None]] = None
    """Bound c of the vocabulary logits: they are replaced by c tanh(logits / c). Gemma 2 has 30 (arXiv 2408.00118).
    None: no bound."""
    mup_base_width: flag.Decoder[affects.Function[AxisLength | None]] = None
    """`d_model` of the base model, whose learning rate this model uses (µP, arXiv 2203.03466, and CompleteP, arXiv
    2505.01618). docs/operations.md shows how to use it. None: the learning rate applies to this model without
    scaling."""
    mup_base_layers: flag.Decoder[affects.Function[AxisLength | None]] = None
    """`num_layers` of the µP base model. A layer then has the λ_init of the layer at the same relative depth in the
    base model."""
    mup_base_head_dim: flag.Decoder[affects.Function[AxisLength | None]] = None
    """Width of a query/key sub-head in the µP base model. This model must have the same width, because learning rates
    do not transfer between heads of different widths."""
    compute_dtype: flag.Decoder[flag.Kernel[affects.Training[Literal["float32", "bfloat16"]]]] = "bfloat16"
    """Dtype of activations and matrix products. Parameters and λ are float32."""
    matmul: affects.Training[Matmul] = "compute_dtype"
    """Precision of the products with the weights of attention and MLP. "compute_dtype": as all other products. "fp8":
    e4m3, and e5m2 for gradients. "int8": 8-bit integers, except in the gradients of weights. For "fp8" and "int8", each
    product computes a scale per row and per column. CPUs emulate both; other devices must have units for them.
    "int8_weights", "int4_weights": only the weights are rounded. int8 has one scale per output, int4 one scale per 128
    inputs of an output. Gradients pass through the rounding."""
    matmul_ranges: flag.Decoder[affects.Training[tuple[NotNegative[float], ...]]] = ()
    """Largest input magnitude of each such product, layer by layer, from which static scales are computed. (): each
    product computes a scale per row. The suite `quantize` sets this field. It requires `remat` = "none"."""
    remat: flag.Preset[flag.Decoder[affects.Rounding[Literal["none", "dots", "full", "offload"]]]] = "dots"
    """Activations of a layer that are saved for the backward pass. All others are recomputed. "none": all activations
    outside of kernels are saved. "dots": matrix products and attention. "full": the layer's input. "offload": the
    layer's input, in host memory."""
    attention_implementation: affects.Rounding[str] = "auto"
    """Attention kernel. "auto" selects one. "reference" and "xla" support all architectures. "cudnn" supports
    all except `off_by_one`, `sink`, `top_k` and `signed_mask`. "pallas_tpu", "splash_wide" and "pallas_gpu" support
    `diff`, `gda` and `motif`. "splash" (on TPUs) supports `transformer`, `diff_v2`, `gdla`, `gated`, `zero_branch` and
    `dex`. The ending "_1024" means tiles of up to 1,024 tokens instead of 512."""
    attention_logit_bits: affects.Function[LogitBits | None] = None
    """Number of bits (2 to 15) to which attention logits are rounded, scaled by their largest magnitude. None: no
    rounding. The suite `quantize` sets this field, which requires the kernel "auto", "reference" or "xla"."""
    attention_logit_granularity: affects.Function[Granularity] = "query"
    """Which rounded logits share a scale. "query": the logits of one query in one sub-head. "token": the logits of a
    token in all heads."""
    attention_operand_bits: affects.Function[FewBits | None] = None
    """Number of bits, 8 or 4, to which queries, keys and values are rounded after the rotary embedding, with a scale
    per token and (sub-)head as in SageAttention (arXiv 2410.02367). None: no rounding. The suite `quantize` sets
    this field."""
    cache: CacheConfig
    """The key/value cache."""
    matched: MatchedConfig
    """The Transformer with equally many parameters."""

    def __post_init__(self):
        pattern = self.window_pattern
        if self.window is None and "L" in pattern and pattern != "L":
            raise UserError(f"model.window_pattern={pattern!r} requires model.window; set it, or write G in place of L")
        if self.window is not None and "L" not in pattern:
            raise UserError(
                f"model.window={self.window}: model.window_pattern={pattern!r} has no layer L with a window"
            )
        if self.num_layers % len(pattern):
            lengths = ", ".join(map(str, divisors(self.num_layers)))
            raise UserError(
                f"model.window_pattern={pattern!r} has {len(pattern)} letters, which do not divide model.num_layers="
                f"{self.num_layers}; use a pattern of one of these lengths: {lengths}"
            )
        base = {f"mup_base_{name}": getattr(self, f"mup_base_{name}") for name in ("width", "layers", "head_dim")}
        missing = [name for name, value in base.items() if value is None]
        if missing and len(missing) < len(base):
            raise UserError(f"model.{missing[0]}=None: set all of {', '.join(base)}, or none of them")

    @property
    def width_ratio(self) -> float:
        """`d_model` divided by `mup_base_width`, or 1 if that is not set."""
        return self.d_model / (self.mup_base_width or self.d_model)

    @property
    def depth_ratio(self) -> float:
        """`num_layers` divided by `mup_base_layers`, or 1 if that is not set."""
        return self.num_layers / (self.mup_base_layers or self.num_layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each letter of `window_pattern`, the window of the layer, or None if it has no window."""
        return tuple(self.window if letter == "L" else None for letter in self.window_pattern)

    @property
    def rotates(self) -> tuple[bool, ...]:
        """For each letter of `window_pattern`, whether the layer has a rotary embedding."""
        return tuple(letter != "N" for letter in self.window_pattern)

    @property
    def own(self) -> Any:
        """The architecture's own config group, such as `model.top_k`, or None if it has no such group."""
        return dict(self.extensions).get(self.architecture)

    @property
    def embeddings(self) -> int:
        """Number of embeddings. Call `with_vocabulary` first if `vocab_size` is None."""
        assert self.vocab_size is not None, "model.vocab_size=None: with_vocabulary (data/tokenizers.py) derives it"
        return self.vocab_size
