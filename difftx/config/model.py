"""Config group `model`."""

import dataclasses
from typing import Any, Literal

from difftx.config.architectures import ARCHITECTURES, Granularity, Implementation
from difftx.config.checks import divisor_below, divisors
from difftx.config.fields import AxisLength, Extensible, NotNegative, Positive
from difftx.errors import UserError

# Fields that only some architectures use. Each architecture lists the fields that it uses in `SelfAttention.fields`.
SPECIFIC_FIELDS = ("signal_heads", "top_k", "lambda_init", "lambda_learned", "lambda_std", "post_scale")


def default_specific_fields() -> dict[str, Any]:
    """Return the defaults of `SPECIFIC_FIELDS`, for resetting them when a config changes its architecture."""
    return {field.name: field.default for field in dataclasses.fields(ModelConfig) if field.name in SPECIFIC_FIELDS}


class ModelConfig(Extensible, path="model"):
    """The decoder. The defaults are the paper's 1.4B differential model (arXiv 2410.05258, Tables 6 and 10)."""

    architecture: str = "diff"
    """What attends: "diff" (differential attention), "transformer" (softmax attention, its baseline), "diff_v2", "gda",
    "gated", "off_by_one", "sink", "top_k", "signed_mask" (`difftx/model/variants/`), or one of an extension."""
    vocab_size: AxisLength = 100_288
    """Rows of the embedding; at least the tokenizer's number of tokens (cl100k_base has 100,277)."""
    d_model: AxisLength = 2048
    """Width of the residual stream."""
    num_layers: AxisLength = 24
    """Number of blocks of attention and MLP."""
    num_heads: AxisLength = 8
    """Number of heads. A diff head has two query/key sub-heads, so the matched Transformer has twice as many (§3.1)."""
    num_kv_heads: AxisLength | None = None
    """Number of key/value heads for grouped queries, counted like `num_heads`; None: one per head (gda: one per noise
    head)."""
    head_dim: AxisLength | None = None
    """Width d of a query/key sub-head (Eq. 1). None: `d_model` divided by the number of sub-heads; a head of diff and
    signed_mask counts as two, and gda's noise heads count too."""
    signal_heads: Positive[int] | None = None
    """Architecture gda only: signal heads per noise head; `num_heads` counts the signal heads."""
    top_k: Positive[int] | None = None
    """Architecture top_k only: number of keys that a query attends to."""
    mlp_dim: AxisLength = 5440
    """Hidden width of SwiGLU: 8/3 `d_model` rounded down to a multiple of 64. With it and one embedding, all five sizes
    of Table 10 round to the printed ones. 5504, a multiple of 128, costs 1 % more and fills a TPU's lanes."""
    rope_theta: Positive[float] = 10_000.0
    """Base of the rotary embedding. The paper states only its value at 64K tokens, 640,000."""
    norm_eps: Positive[float] = 1e-5
    """Epsilon of the RMSNorms before each sub-layer and after the last layer."""
    head_norm: Literal["none", "rms", "rms_affine", "scalar"] = "rms_affine"
    """RMSNorm over each head's output, 2d wide. "rms": without a gain (Eq. 3, Hugging Face); "rms_affine": with a gain
    (the official code); "scalar": one learned factor per layer in place of a norm; "none": neither."""
    head_norm_eps: Positive[float] = 1e-5
    """Epsilon of the head norm."""
    lambda_init: float | None = None
    """λ_init of every layer; None: 0.8 - 0.6 exp(-0.3 (l - 1)) for layer l = 1, 2, … (§2.1)."""
    lambda_learned: bool = True
    """False: λ is λ_init and has no parameters. For a fixed λ = 1 set `lambda_init` = 1 and a `post_scale` such as 0.2
    too, since 1 - λ_init would zero the output."""
    lambda_std: NotNegative[float] = 0.1
    """Standard deviation of the initial λ_q1, λ_k1, λ_q2 and λ_k2."""
    post_scale: float | None = None
    """Factor after the head norm; None: 1 - λ_init (Eq. 3)."""
    init: Literal["fan_in", "normal"] = "fan_in"
    """Initialization of projections. "fan_in": uniform with variance 1 / (3 fan_in), as torch's Linear in the official
    code; "normal": N(0, `init_std`²)."""
    init_std: NotNegative[float] = 0.02
    """Standard deviation for `init` = "normal"."""
    embedding_std: NotNegative[float] = 0.02
    """Standard deviation of the initial embedding; the paper and its code do not state one."""
    zero_init_output: bool = False
    """Whether both residual branches start at zero (W_O and the MLP's last matrix). False, with `init` = "fan_in", is
    the initialization of the official code; True is better for both models at 0.1M parameters (docs/results.md)."""
    tie_embeddings: bool = True
    """Whether the input embedding is also the output projection; Table 10's sizes require it."""
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of activations and matrix products; parameters and λ are float32."""
    remat: Literal["none", "dots", "full", "offload"] = "dots"
    """What the backward pass keeps per layer. "none": everything except what kernels recompute; "dots": matrix
    products; "full": the layer's input; "offload": the layer's input, in host memory."""
    attention_implementation: Implementation = "auto"
    """Attention kernel. "auto"; "reference" or "xla" for every architecture; "cudnn" for all except off_by_one, sink,
    top_k and signed_mask; "pallas_tpu", "pallas_gpu" or "cudnn_wide" for diff and gda; "splash" (TPU) for transformer,
    diff_v2 and gated."""
    attention_logit_bits: int | None = None
    """Round attention logits to this many bits (2 to 15) and back, scaled by their largest magnitude; the suite
    quantize sets it. Requires "auto", "reference" or "xla". None: no rounding."""
    attention_logit_granularity: Granularity = "query"
    """Which logits share a scale. "query": those of a query in one head and group; "token": those in all heads and
    groups."""

    def __post_init__(self):
        super().__post_init__()
        attention = ARCHITECTURES[self.architecture]
        attention.check(self)
        self._check_specific_fields()
        sub_heads = attention.sub_heads(self, self.num_heads)
        if self.head_dim is None and self.d_model % sub_heads:
            step = self.signal_heads or 1
            unit = attention.sub_heads(self, step)
            fitting = [step * (n // unit) for n in divisors(self.d_model)[:-1] if n % unit == 0]
            nearest = min(fitting, key=lambda n: abs(n - self.num_heads), default=step)
            raise UserError(
                f"model.num_heads={self.num_heads}: their {sub_heads} sub-heads do not divide d_model={self.d_model}; "
                f"use {nearest}, or set model.head_dim"
            )
        if self.d_head % 2:
            raise UserError(f"model.head_dim={self.d_head} must be even, because the rotary embedding rotates pairs")
        if self.num_kv_heads is not None:
            heads = attention.kv_heads(self)
            if heads % self.num_kv_heads:
                raise UserError(
                    f"model.num_kv_heads={self.num_kv_heads} does not divide the {heads} heads that have keys and "
                    f"values; use {divisor_below(self.num_kv_heads, heads)}"
                )

    def _check_specific_fields(self) -> None:
        """Raise `UserError` if a field that the architecture does not use differs from its default."""
        used = ARCHITECTURES[self.architecture].fields
        for name, default in default_specific_fields().items():
            if (value := getattr(self, name)) != default and name not in used:
                raise UserError(
                    f"model.{name}={value}: architecture {self.architecture!r} does not use it; leave it at {default}"
                )

    @property
    def groups(self) -> int:
        """Keys per key/value head, and the width of a value head in units of d: 2 for heads with two groups, else 1."""
        return ARCHITECTURES[self.architecture].groups

    @property
    def query_heads(self) -> int:
        """Queries of width d per token."""
        return ARCHITECTURES[self.architecture].query_heads(self)

    @property
    def d_head(self) -> int:
        """Width d of a query/key sub-head."""
        return self.head_dim or self.d_model // ARCHITECTURES[self.architecture].sub_heads(self, self.num_heads)

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or ARCHITECTURES[self.architecture].kv_heads(self)
