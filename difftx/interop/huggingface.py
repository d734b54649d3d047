"""Conversion of the config.json of DiffLlama, Llama and Qwen 2 models, in both directions."""

from pathlib import Path
from typing import Any

from difftx.config import Config, ModelConfig
from difftx.errors import UserError
from difftx.interop.fields import FIXED, Fields, heads_from, longest_context, rope_fields, rope_parameters
from difftx.model.architectures import heads_of

CLASSES = {"DiffLlamaForCausalLM": "diff", "LlamaForCausalLM": "transformer", "Qwen2ForCausalLM": "transformer"}
QWEN = "Qwen2ForCausalLM"  # A Llama with biases of queries, keys and values, which no field of its config.json states.


def model_fields(path: Path) -> dict[str, Any]:
    """Return the fields of `model` that a config.json determines, or raise `UserError` if difftx lacks a feature."""
    fields = Fields(path)
    (name, *_) = fields.get("architectures", list) or ["none"]
    if not isinstance(name, str) or name not in CLASSES:
        raise UserError(f"{path}: architectures={name!r} cannot be converted; only {', '.join(CLASSES)} can")
    fields.require("model_type", name.removesuffix("ForCausalLM").lower())  # It selects the class in transformers.
    fields.require("layer_types", ["full_attention"] * len(fields.get("layer_types", list, [])) or None)
    fields.require("hidden_act", "silu")
    architecture = CLASSES[name]
    groups = 2 if architecture == "diff" else 1
    d_model = fields.get("hidden_size", int)
    heads = fields.get("num_attention_heads", int)
    if name == QWEN:
        fields.read("num_key_value_heads")  # If it is absent, transformers takes 32.
    kv_heads = fields.get("num_key_value_heads", int, heads)
    for field, count in (("num_attention_heads", heads), ("num_key_value_heads", kv_heads)):
        if count % groups:
            raise UserError(f"{path}: {field}={count} must be even, since each half of the heads is one group")
    head_dim = fields.get("head_dim", int, d_model // heads)
    eps = fields.get("rms_norm_eps", float)
    model = FIXED | {
        "architecture": architecture,
        "vocab_size": fields.get("vocab_size", int),
        "d_model": d_model,
        "num_layers": fields.get("num_hidden_layers", int),
        **heads_from(d_model, groups, heads // groups, kv_heads // groups, head_dim),
        "mlp_dim": fields.get("intermediate_size", int),
        **rope_fields(fields),
        "attention_bias": name == QWEN,
        "norm_eps": eps,
        "head_norm": "rms" if groups == 2 else "none",
        "tie_embeddings": fields.get("tie_word_embeddings", bool, False),
    }
    fields.refuse_others(*(("sliding_window", "attention_bias") if name == QWEN else ()))  # Without effect there.
    return model | {"head_norm_eps": eps} if groups == 2 else model


def check_model(model: ModelConfig) -> None:
    """Raise `UserError` for a model that DiffLlama and Llama cannot represent."""
    if model.architecture == "transformer":
        if model.head_norm != "none":
            raise UserError(f"model.head_norm={model.head_norm!r}: Llama has no head norm; only 'none' converts")
        if model.d_model % model.num_heads:
            raise UserError(
                f"model.d_model={model.d_model}, model.num_heads={model.num_heads}: transformers refuses a Llama whose "
                "hidden size is not a multiple of its number of heads, for every head_dim"
            )
        return
    if model.head_norm_eps != model.norm_eps:
        both = f"model.head_norm_eps={model.head_norm_eps}, model.norm_eps={model.norm_eps}"
        raise UserError(f"{both}: DiffLlama has only one")


def config_json(config: Config, end_of_text: int) -> dict[str, Any]:
    """Return the content of config.json for a model that `check_model` accepts."""
    model, heads = config.model, heads_of(config.model)
    special: dict[str, Any] = {"lambda_std_dev": model.lambda_std} if heads.groups == 2 else {"mlp_bias": False}
    names = [name for name in CLASSES if CLASSES[name] == model.architecture and (name == QWEN) == model.attention_bias]
    if (rope := rope_parameters(model))["rope_type"] == "llama3":
        special["rope_scaling"] = rope  # transformers 4 reads this field instead of rope_parameters.
    return {
        "architectures": names,
        "model_type": names[0].removesuffix("ForCausalLM").lower(),
        "vocab_size": model.embeddings,
        "hidden_size": model.d_model,
        "intermediate_size": model.mlp_dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": heads.groups * model.num_heads,
        "num_key_value_heads": heads.groups * heads.kv_heads,
        "head_dim": heads.d_head,
        "hidden_act": "silu",
        "max_position_embeddings": longest_context(config),
        "initializer_range": model.init_std,
        "rms_norm_eps": model.norm_eps,
        "rope_parameters": rope,
        "rope_theta": model.rope_theta,  # transformers 4 reads this field instead of rope_parameters.
        "tie_word_embeddings": model.tie_embeddings,
        "bos_token_id": None,  # nosec B105: a token of text, not a password
        "eos_token_id": end_of_text,
        "dtype": "float32",
        "torch_dtype": "float32",
        **special,
    }
