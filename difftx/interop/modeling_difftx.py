"""Models trained with difftx, for transformers >= 5.4 (`trust_remote_code=True`).

`difftx convert --to=hf` copies this file into each folder that it writes. The file imports only torch and transformers.

A layer calls the attention function of transformers once, for ordinary softmax attention, so that serving engines with
one key/value cache per layer can compute it. Differential attention, (A1 - λ A2) V with A_g = softmax(Q_g K_gᵀ/√d), is
mapped to this form. Each key/value head has the key [K1; K2] and the value V, both of width E = 2d. A signal query is
[Q1; 0], and a noise query is [0; Q2]. The scale stays 1/√d. After the call, λ times the output of the noise head is
subtracted from the output of the signal head.

Two architectures continue the training of a Transformer. In "zero_branch", values have width d like keys, so K1 and K2
are two ordinary key/value heads with the same value. "dex" corrects the outputs of the heads after the call:
O - λ f_D(O) (arXiv 2505.16333).
"""
# Axes in comments: B = batch, T = tokens, S = keys, N = noise heads, R = signal heads per noise head, H = N R heads,
#   K = key/value heads, d = width of a query/key (sub-)head, E = width of a value head

import inspect
import math
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

TWO_KEYS = ("diff", "gda", "motif", "signed_mask")  # Architectures whose key/value heads have two keys of width d.
LAMBDA_VECTORS = ("diff", "gda", "motif", "zero_branch")  # Architectures with one λ per layer.
LAMBDA_PROJECTIONS = ("diff_v2", "gdla")  # Architectures with one λ per token and head.
# Architectures whose attention weights are not a softmax. The attention functions of engines do not support them.
EAGER_ONLY = ("top_k", "off_by_one", "sink", "signed_mask")
# The cache's name in arguments and outputs of transformers: "cache" since 5.24, "past_key_values" before.
CACHE = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
BOUNDS = {"sigmoid": (torch.sigmoid, torch.logit), "tanh": (torch.tanh, torch.arctanh)}


class DifftxConfig(PreTrainedConfig):
    """The config of a model.

    `num_attention_heads`, `num_key_value_heads` and `head_dim` describe the call of the attention function, which
    includes noise heads.
    """

    model_type = "difftx"
    keys_to_ignore_at_inference = [CACHE]
    base_model_tp_plan = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.lambda_proj": "colwise",
        "layers.*.self_attn.gate_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    base_model_pp_plan = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    difftx: dict | None = None  # The heads as difftx counts them. Only `difftx convert` reads this field.
    architecture: str = "diff"
    vocab_size: int = 100_288
    hidden_size: int = 2048
    intermediate_size: int = 5440
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int = 8
    num_noise_heads: int | None = 8
    head_dim: int = 256
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_parameters: dict | None = None
    attention_bias: bool = False
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02
    qk_norm: bool = False
    head_norm: str = "rms_affine"
    head_norm_eps: float = 1e-5
    lambda_init: float | None = None
    lambda_learned: bool = True
    lambda_std_dev: float = 0.1
    lambda_bound: str = "none"
    post_scale: float | None = None
    output_gate: bool = False
    top_k: int | None = None
    final_logit_softcapping: float | None = None
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any):
        super().__post_init__(**kwargs)
        # No tensor parallelism: factors per head would have to be sharded, and PolyNorm needs the whole hidden width.
        if self.head_norm == "sigmoid" or self.architecture in ("dex", "motif"):
            self.base_model_tp_plan = {}


class DifftxRMSNorm(nn.Module):
    """RMSNorm over the last axis, computed in float32. It has a gain unless `has_gain` is False."""

    has_gain = True

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width)) if self.has_gain else None
        self.variance_epsilon = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised `x` in the dtype of `x`."""
        x_f32 = x.float()
        x = (x_f32 * torch.rsqrt(x_f32.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)).to(x.dtype)
        return x if self.weight is None else self.weight * x


class DifftxNorm(DifftxRMSNorm):
    """RMSNorm without a gain. SGLang would replace a class named "…RMSNorm" by a norm of the model's width."""

    has_gain = False


class DifftxHeadScale(nn.Module):
    """A learned factor that replaces the head norm: one per layer, or the sigmoid of one number per head."""

    def __init__(self, kind: str, heads: int):
        super().__init__()
        self.is_sigmoid = kind == "sigmoid"
        self.weight = nn.Parameter(torch.zeros(heads) if self.is_sigmoid else torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scaled heads `[B, T, H, E]`."""
        return x * (self.weight.sigmoid() if self.is_sigmoid else self.weight).to(x.dtype)[:, None]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the channels i and i + d/2 of `x`, `[B, T, heads, d]`. `cos` and `sin` of the angles: `[B, T, 1, d/2]`."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def eager_attention_forward(
    module: "DifftxAttention",
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the outputs of the heads, `[B, T, heads, E]`, and their attention weights in plain PyTorch."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    logits = (query @ key.transpose(2, 3)).float() * scaling
    if attention_mask is not None:
        logits = logits + attention_mask
    weights = module.attention_weights(logits).to(value.dtype)
    value = value.repeat_interleave(weights.shape[1] // value.shape[1], dim=1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class DifftxAttention(nn.Module):
    """Self-attention of any difftx architecture, with one call of transformers' attention function."""

    def __init__(self, config: DifftxConfig, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.is_causal = True
        self.head_dim = config.head_dim
        self.sub_head_dim = config.head_dim // 2 if config.architecture in TWO_KEYS else config.head_dim
        self.scaling = self.sub_head_dim**-0.5
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        noise_heads = config.num_noise_heads or 0
        heads = config.num_attention_heads - noise_heads
        self.signal_heads = heads // noise_heads if noise_heads else 0  # Signal heads per noise head.
        self.keys_per_value = 2 if config.architecture == "zero_branch" else 1
        width, kv_width, bias = config.hidden_size, config.num_key_value_heads * self.head_dim, config.attention_bias
        self.q_proj = nn.Linear(width, config.num_attention_heads * self.sub_head_dim, bias=bias)
        self.k_proj = nn.Linear(width, kv_width, bias=bias)
        self.v_proj = nn.Linear(width, kv_width // self.keys_per_value, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, width, bias=False)
        if config.qk_norm:
            self.q_norm = DifftxRMSNorm(self.sub_head_dim, config.rms_norm_eps)
            self.k_norm = DifftxRMSNorm(self.sub_head_dim, config.rms_norm_eps)
        if config.architecture in LAMBDA_PROJECTIONS:
            self.lambda_proj = nn.Linear(width, heads, bias=False)
        elif config.architecture in LAMBDA_VECTORS and config.lambda_learned:
            for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
                self.register_parameter(name, nn.Parameter(torch.empty(self.sub_head_dim)))
        # `chosen_heads` and `progress` are not trained, but are parameters: older versions of vLLM do not load buffers.
        if config.architecture == "dex":
            self.correction_proj = nn.Linear(self.head_dim, self.head_dim, bias=False)
            self.dex_lambda = nn.Parameter(torch.zeros(1))
            self.chosen_heads = nn.Parameter(torch.ones(heads))  # 1 for the heads that are corrected, else 0.
        if config.architecture in ("zero_branch", "dex"):
            self.progress = nn.Parameter(torch.zeros(1))  # Grew from 0 (where λ = 0) to 1 in training.
        if config.output_gate:
            self.gate_proj = nn.Linear(width, heads * self.head_dim, bias=False)
        if config.architecture == "sink":
            self.sinks = nn.Parameter(torch.zeros(heads))
        if config.head_norm in ("rms", "rms_affine"):
            norm = DifftxNorm if config.head_norm == "rms" else DifftxRMSNorm
            self.head_norm = norm(self.head_dim, config.head_norm_eps)
        elif config.head_norm != "none":
            self.head_norm = DifftxHeadScale(config.head_norm, heads)
        # By default, λ_init follows the paper's schedule (arXiv 2410.05258). Motif counts layers from 0.
        schedule = 0.8 - 0.6 * math.exp(-0.3 * (layer_idx - (config.architecture == "motif")))
        self.lambda_init = schedule if config.lambda_init is None else config.lambda_init
        usual = 1 - self.lambda_init if config.architecture in TWO_KEYS else 1.0
        self.post_scale = usual if config.post_scale is None else config.post_scale

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the residual update, `[B, T, D]`, and the attention weights, or None if they are not available."""
        shape = hidden_states.shape[:-1]
        query = self.q_proj(hidden_states).view(*shape, -1, self.sub_head_dim)
        key = self.k_proj(hidden_states).view(*shape, -1, self.sub_head_dim)
        value = self.v_proj(hidden_states).view(*shape, -1, self.head_dim)
        if self.config.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = rotate(query, *position_embeddings), rotate(key, *position_embeddings)
        if self.sub_head_dim < self.head_dim:
            key = key.reshape(*shape, -1, self.head_dim)
            signal, noise = self._by_noise_head(query)
            signal = nn.functional.pad(signal, (0, self.sub_head_dim))
            noise = nn.functional.pad(noise, (self.sub_head_dim, 0))
            query = torch.cat([signal, noise], dim=-2).flatten(-3, -2)
        value = value.repeat_interleave(self.keys_per_value, dim=-2)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = eager_attention_forward
        if self.config.architecture not in EAGER_ONLY:
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, attend)
        heads, weights = attend(self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs)
        heads = self._subtracted(heads.reshape(*shape, -1, self.head_dim), hidden_states)
        if self.config.output_gate:
            heads = self.gate_proj(hidden_states).sigmoid().view_as(heads) * heads
        if self.config.head_norm != "none":
            heads = self.head_norm(heads)
        return self.o_proj((heads * self.post_scale).flatten(-2)), weights

    def attention_weights(self, logits: torch.Tensor) -> torch.Tensor:
        """Convert masked logits to attention weights, both float32 `[B, heads, T, S]`."""
        architecture = self.config.architecture
        if architecture == "signed_mask":
            signal, sign = logits.unflatten(1, (-1, 2)).unbind(2)
            return signal.softmax(-1) * sign.tanh()
        if architecture == "top_k":
            assert self.config.top_k is not None
            smallest = logits.topk(min(self.config.top_k, logits.shape[-1]), dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < smallest, -torch.inf)
        elif architecture in ("sink", "off_by_one"):  # The sink acts as one more key whose value is 0.
            sink = self.sinks.float() if architecture == "sink" else logits.new_zeros(logits.shape[1])
            sink = sink[:, None, None].expand(*logits.shape[:1], -1, logits.shape[2], 1)
            return torch.cat([logits, sink], dim=-1).softmax(-1)[..., :-1]
        return logits.softmax(-1)

    def _by_noise_head(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Split each group of R + 1 heads into signal heads `[B, T, N, R, width]` and the noise head, which is last."""
        x = x.unflatten(-2, (-1, self.signal_heads + 1))
        return x.split([self.signal_heads, 1], dim=-2)

    def _subtracted(self, heads: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute head_i - λ noise_(i // R), `[B, T, H, E]`, from the outputs of the attention function."""
        architecture = self.config.architecture
        if architecture == "dex":
            signal, noise, lam = heads, self.correction_proj(heads), self._lam_of_dex()
        elif architecture == "zero_branch":  # Heads that share a key are neighbours: [B, T, keys / 2, 2, heads, E].
            signal, noise = heads.unflatten(-2, (-1, 2, self.num_key_value_groups)).unbind(-3)
            lam = self.progress.detach().float() * self._lam(heads.device)
        elif architecture in LAMBDA_VECTORS:
            (signal, noise), lam = self._by_noise_head(heads), self._lam(heads.device)
        elif architecture in LAMBDA_PROJECTIONS:
            signal, noise = self._by_noise_head(heads)
            lam = self.lambda_proj(hidden_states).float().sigmoid()
            lam = lam.unflatten(-1, (-1, self.signal_heads))[..., None]
        else:
            return heads
        heads = (signal.float() - lam * noise.float()).to(heads.dtype)
        return heads.reshape(*hidden_states.shape[:-1], -1, self.head_dim)

    def _lam_of_dex(self) -> torch.Tensor:
        """Return λ for each head, float32 `[H, 1]`. It is 0 for heads that are not corrected."""
        progress = self.progress.detach().float()
        lam = (1 - progress) * progress * self.lambda_init + progress * self.dex_lambda.float()
        return (lam * self.chosen_heads.detach().float())[:, None]

    def _lam(self, device: torch.device) -> torch.Tensor:
        """Return the λ of the layer, a float32 scalar."""
        initial = torch.tensor(self.lambda_init, dtype=torch.float32, device=device)
        if not self.config.lambda_learned:
            return initial
        exponent1 = (self.lambda_q1.float() * self.lambda_k1.float()).sum()
        exponent2 = (self.lambda_q2.float() * self.lambda_k2.float()).sum()
        change = exponent1.exp() - exponent2.exp()
        if self.config.lambda_bound == "none":
            return change + initial
        bound, inverse = BOUNDS[self.config.lambda_bound]
        return bound(change + inverse(initial))


class DifftxPolyNorm(nn.Module):
    """PolyNorm (arXiv 2411.03884): w_1 N(z³) + w_2 N(z²) + w_3 N(z) + b with RMSNorms N without gains, in float32."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3) / 3)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return PolyNorm of `x` over its last axis."""
        powers = x.float()[..., None, :] ** torch.tensor([3, 2, 1], device=x.device)[:, None]
        normalized = powers * torch.rsqrt(powers.pow(2).mean(-1, keepdim=True) + 1e-6)
        return ((self.weight.float()[:, None] * normalized).sum(-2) + self.bias.float()).to(x.dtype)


class DifftxMLP(nn.Module):
    """The MLP (silu(x W_gate) ∘ x W_up) W_down. Motif has PolyNorm in place of silu."""

    def __init__(self, config: DifftxConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act_fn = DifftxPolyNorm() if config.architecture == "motif" else nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the residual update."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class DifftxDecoderLayer(GradientCheckpointingLayer):
    """One layer, Y + MLP(RMSNorm(Y)) with Y = X + Attention(RMSNorm(X))."""

    def __init__(self, config: DifftxConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DifftxAttention(config, layer_idx)
        self.mlp = DifftxMLP(config)
        self.input_layernorm = DifftxRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = DifftxRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Return the output of the layer."""
        update, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + update
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class DifftxPreTrainedModel(PreTrainedModel):
    """Base class of all models. By itself, it declares that engines can serve them (see `_Eager`)."""

    config_class = DifftxConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DifftxDecoderLayer"]
    _can_record_outputs = {"hidden_states": DifftxDecoderLayer, "attentions": DifftxAttention}
    _skip_keys_device_placement = ["cache"]
    # In bfloat16, λ would be wrong by up to 0.01.
    _keep_in_fp32_modules_strict = ["lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2", "dex_lambda", "progress"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DifftxAttention):
            for name, parameter in module.named_parameters(recurse=False):
                std = self.config.lambda_std_dev if name.startswith("lambda") else 0.0
                nn.init.normal_(parameter, mean=float(name == "chosen_heads"), std=std)


class DifftxModel(DifftxPreTrainedModel):
    """The decoder without the output projection."""

    def __init__(self, config: DifftxConfig):
        super().__init__(config)
        if config.architecture in EAGER_ONLY and self._supports_attention_backend:
            raise ValueError(f"architecture {config.architecture!r} is not servable: load it as DifftxEagerForCausalLM")
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([DifftxDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.sub_head_dim = self.layers[0].self_attn.sub_head_dim  # Engines with pipeline ranks remove layer 0 later.
        self.norm = DifftxRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Return the normalised output of the last layer, `[B, T, D]`, and the cache.

        `past_key_values` is the older name of `cache`. `cache` is used if both are given.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("specify exactly one of input_ids and inputs_embeds")
        if kwargs.get("output_attentions") and self.config._attn_implementation != "eager":
            raise ValueError("output_attentions requires attn_implementation='eager' in from_pretrained")
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = self.config.use_cache if use_cache is None else use_cache
        cache = past_key_values if cache is None else cache
        if use_cache and cache is None and not self.training:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            seen = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(seen, seen + hidden_states.shape[1], device=hidden_states.device)[None]
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **{CACHE: cache},
        )
        angles = self._angles(position_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states, position_embeddings=angles, attention_mask=mask, cache=cache, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), **{CACHE: cache})

    def _angles(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and sines of the rotary embedding, each float32 `[B, T, 1, d/2]`."""
        width, rope = self.sub_head_dim, self.config.rope_parameters
        channels = torch.arange(0, width, 2, dtype=torch.float32, device=position_ids.device)
        frequencies = rope["rope_theta"] ** (-channels / width)
        if rope["rope_type"] == "llama3":  # Lower the frequencies for a longer context (arXiv 2407.21783).
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            rotations = frequencies * (rope["original_max_position_embeddings"] / (2 * math.pi))
            kept = ((rotations - low) / (high - low)).clamp(0, 1)
            frequencies = frequencies * (kept + (1 - kept) / rope["factor"])
        angles = position_ids[..., None, None].float() * frequencies
        return angles.cos(), angles.sin()


class DifftxForCausalLM(DifftxPreTrainedModel, GenerationMixin):
    """The language model."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _model_class = DifftxModel

    def __init__(self, config: DifftxConfig):
        super().__init__(config)
        self.model = self._model_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        labels: torch.LongTensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return the logits of the next tokens, `[B, T, V]`, the cache, and the loss if there are labels."""
        outputs = self.model(input_ids=input_ids, **kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        if (cap := self.config.final_logit_softcapping) is not None:
            logits = cap * torch.tanh(logits / cap)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        others = {name: getattr(outputs, name) for name in (CACHE, "hidden_states", "attentions")}
        return CausalLMOutputWithPast(loss=loss, logits=logits, **others)


class _Eager:
    """Makes engines refuse models of the architectures in `EAGER_ONLY`, for which they would compute a softmax."""

    _supports_flash_attn = False
    _supports_sdpa = False
    _supports_flex_attn = False
    _supports_attention_backend = False


class DifftxEagerModel(_Eager, DifftxModel):
    """`DifftxModel` for the architectures in `EAGER_ONLY`. Engines cannot serve it."""


class DifftxEagerForCausalLM(_Eager, DifftxForCausalLM):
    """`DifftxForCausalLM` for the architectures in `EAGER_ONLY`. Engines cannot serve it."""

    _model_class = DifftxEagerModel
