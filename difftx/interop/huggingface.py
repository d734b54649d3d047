"""The config.json of classes that differ from transformers' Llama in few fields, such as Qwen 3 and DiffLlama.

To support another class of this kind, add a row to `CLASSES`. `MotifForCausalLM` is not in transformers: difftx imports
its folders, but exports Motif models with `modeling_difftx.py`.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from difftx.config import ModelConfig
from difftx.config.checks import divisors
from difftx.errors import UserError
from difftx.interop.fields import CONFIG, Fields, differences, heads_from, model_of, rope_fields, rope_parameters
from difftx.interop.parameters import Format
from difftx.model.architectures import ARCHITECTURES, heads_of


@dataclasses.dataclass(frozen=True)
class Class:
    """The differences of a class from `LlamaForCausalLM`."""

    # Fields of `model` that the class fixes. config.json has no fields for them.
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Defaults of the config class for fields that config.json may leave out.
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ignored: tuple[str, ...] = ()  # Fields of config.json to ignore, because they do not affect the model.


CLASSES = {
    "LlamaForCausalLM": Class(),
    "DiffLlamaForCausalLM": Class({"architecture": "diff", "head_norm": "rms"}),
    "Qwen2ForCausalLM": Class(
        {"attention_bias": True}, {"num_key_value_heads": 32}, ignored=("sliding_window", "attention_bias")
    ),
    "Qwen3ForCausalLM": Class(
        {"qk_norm": True}, {"num_key_value_heads": 32, "head_dim": 128}, ignored=("sliding_window",)
    ),
    # `sliding_window` applies to all layers. null: no window.
    "MistralForCausalLM": Class(defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    # By default, every fourth layer has no rotary embedding. `no_rope_layers` overrides this with a 1 or 0 per layer.
    "SmolLM3ForCausalLM": Class(
        defaults={
            "num_key_value_heads": 4,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
            "no_rope_layer_interval": 4,
        },
        ignored=("sliding_window",),
    ),
    # Ignored: `auto_map` names code that difftx does not execute, `fused_rope` selects a kernel, `expanded` is a note.
    "MotifForCausalLM": Class(
        {"architecture": "motif", "head_norm": "rms_affine"},
        {"hidden_act": "poly_norm", "attn_rms_norm_eps": 1e-5},
        ignored=("auto_map", "model_type", "sliding_window", "fused_rope", "expanded"),
    ),
}
# Architecture → layout of its weights. All others have the layout "hf".
LAYOUTS: dict[str, Format] = {"diff": "diffllama", "motif": "motif"}
TRANSFORMER: dict[str, Any] = {
    "architecture": "transformer",
    "head_norm": "none",
    "attention_bias": False,
    "qk_norm": False,
}
NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "intermediate_size": "mlp_dim",
    "num_hidden_layers": "num_layers",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}


def read(fields: Fields) -> ModelConfig:
    """Return the model that a config.json describes. Raise `UserError` if difftx does not support it."""
    path = fields.path
    (name, *_) = fields.get("architectures", list) or ["none"]
    if not isinstance(name, str) or name not in CLASSES:
        raise UserError(f"{path}: architectures={name!r} cannot be converted; only {', '.join(CLASSES)} can")
    described = CLASSES[name]
    fields.assume(described.defaults)
    if "model_type" not in described.ignored:
        fields.require("model_type", _model_type(name))  # transformers selects the class by it.
    fields.require("layer_types", ["full_attention"] * len(fields.get("layer_types", list, [])) or None)
    fields.require("hidden_act", described.defaults.get("hidden_act", "silu"))
    implied = {**TRANSFORMER, **described.model}
    named = fields.named(NAMES, tie_word_embeddings=False)
    head_norm_eps_field = "attn_rms_norm_eps" if "attn_rms_norm_eps" in described.defaults else "rms_norm_eps"
    model = {
        **implied,
        **named,
        **_heads(fields, implied["architecture"], named["d_model"]),
        **rope_fields(fields),
        "head_norm_eps": fields.get(head_norm_eps_field, float),  # DiffLlama has only one epsilon.
    }
    if "sliding_window" in described.defaults:
        model["window"] = fields.read("sliding_window")["sliding_window"]
    if "no_rope_layer_interval" in described.defaults:
        model["window_pattern"] = _window_pattern(fields, named["num_layers"])
    fields.refuse_others(*described.ignored)
    return model_of(path, model)


def _heads(fields: Fields, architecture: str, d_model: int) -> dict[str, Any]:
    """Return the `model` fields that describe heads."""
    groups = ARCHITECTURES[architecture].groups
    heads = fields.get("num_attention_heads", int)
    kv_heads = fields.get("num_key_value_heads", int, heads)
    for field, count in (("num_attention_heads", heads), ("num_key_value_heads", kv_heads)):
        if count % groups and (field, architecture) != ("num_attention_heads", "motif"):
            raise UserError(f"{fields.path}: {field}={count} must be even, since half of the heads are another group")
    head_dim = fields.get("head_dim", int, d_model // heads)
    if architecture != "motif":
        return heads_from(d_model, groups, heads // groups, kv_heads // groups, head_dim)
    fields.require("k_ratio", 1)  # Number of A1 keys per A2 key.
    noise_heads = fields.get("num_noise_heads", int, max(1, heads // 2))  # Motif-2.6B has pairs of heads.
    signal_heads, rest = divmod(heads - noise_heads, noise_heads)
    if rest or signal_heads < 1:
        raise UserError(
            f"{fields.path}: num_attention_heads={heads} is not num_noise_heads={noise_heads} times an integer above 1"
        )
    return {
        "num_heads": heads - noise_heads,
        "num_kv_heads": kv_heads // groups,
        "head_dim": head_dim,
        "motif": {"signal_heads": signal_heads},
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json fields of a model, for the first class that computes the same function.

    If there is no such class, use the first class of the model's architecture.
    """
    if model.architecture == "transformer" and model.d_model % model.num_heads:
        raise UserError(
            f"model.d_model={model.d_model}, model.num_heads={model.num_heads}: transformers refuses a Llama whose "
            "hidden size is not a multiple of its number of heads, for every head_dim"
        )
    names = [name for name in CLASSES if {**TRANSFORMER, **CLASSES[name].model}["architecture"] == model.architecture]
    written = [_write(name, model) for name in names]
    same = (settings for settings in written if not differences(model, read(Fields(Path(CONFIG), settings))))
    return next(same, written[0])


def _write(name: str, model: ModelConfig) -> dict[str, Any]:
    """Return the config.json fields of a model for the class `name`."""
    heads, described = heads_of(model), CLASSES[name]
    special: dict[str, Any] = {"lambda_std_dev": model.lambda_std} if heads.groups == 2 else {"mlp_bias": False}
    if (rope := rope_parameters(model))["rope_type"] == "llama3":
        special["rope_scaling"] = rope  # For transformers 4, which does not read rope_parameters.
    if "sliding_window" in described.defaults:
        special["sliding_window"] = model.window
    if "no_rope_layer_interval" in described.defaults:
        repeats = model.num_layers // len(model.rotates)
        special["no_rope_layers"] = [int(rotates) for rotates in model.rotates * repeats]
        special["pad_token_id"] = None  # The class's default, 128004, may exceed the vocabulary.
    return {
        "architectures": [name],
        "model_type": _model_type(name),
        **{theirs: getattr(model, ours) for theirs, ours in NAMES.items()},
        "num_attention_heads": heads.groups * model.num_heads,
        "num_key_value_heads": heads.groups * heads.kv_heads,
        "head_dim": heads.d_head,
        "hidden_act": "silu",
        "initializer_range": model.init_std,
        "rope_parameters": rope,
        "rope_theta": model.rope_theta,  # For transformers 4, which does not read rope_parameters.
        "bos_token_id": None,  # nosec B105: a token of text, not a password
        "dtype": "float32",
        "torch_dtype": "float32",
        **special,
    }


def _model_type(name: str) -> str:
    return name.removesuffix("ForCausalLM").lower()


def _window_pattern(fields: Fields, layers: int) -> str:
    """Return the shortest `model.window_pattern` that describes which layers have no rotary embedding."""
    interval = fields.get("no_rope_layer_interval", int)
    every = [int((layer + 1) % interval != 0) for layer in range(layers)]
    rotates = fields.get("no_rope_layers", list, every)[:layers]
    if len(rotates) < layers or not all(rotated in (0, 1) for rotated in rotates):
        raise UserError(f"{fields.path}: no_rope_layers={rotates}: expected a 1 or a 0 for each of {layers} layers")
    letters = "".join("G" if rotated else "N" for rotated in rotates)
    shortest = next(letters[:length] for length in divisors(layers) if letters[:length] * (layers // length) == letters)
    return "L" if shortest == "G" else shortest
