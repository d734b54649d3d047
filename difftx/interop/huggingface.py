"""The config.json of DiffLlama, Llama and Qwen 2 models."""

from typing import Any

from difftx.config import ModelConfig
from difftx.errors import UserError
from difftx.interop.fields import Fields, heads_from, model_of, rope_fields, rope_parameters
from difftx.model.architectures import heads_of

CLASSES = {"DiffLlamaForCausalLM": "diff", "LlamaForCausalLM": "transformer", "Qwen2ForCausalLM": "transformer"}
QWEN = "Qwen2ForCausalLM"  # A Llama with biases of queries, keys and values, which no field of its config.json states.
NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "intermediate_size": "mlp_dim",
    "num_hidden_layers": "num_layers",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}


def read(fields: Fields) -> ModelConfig:
    """Return the model that a config.json describes, or raise `UserError` if difftx lacks a feature."""
    path = fields.path
    (name, *_) = fields.get("architectures", list) or ["none"]
    if not isinstance(name, str) or name not in CLASSES:
        raise UserError(f"{path}: architectures={name!r} cannot be converted; only {', '.join(CLASSES)} can")
    fields.require("model_type", name.removesuffix("ForCausalLM").lower())  # It selects the class in transformers.
    fields.require("layer_types", ["full_attention"] * len(fields.get("layer_types", list, [])) or None)
    fields.require("hidden_act", "silu")
    groups = 2 if CLASSES[name] == "diff" else 1
    heads = fields.get("num_attention_heads", int)
    if name == QWEN:
        fields.read("num_key_value_heads")  # If it is absent, transformers takes 32.
    kv_heads = fields.get("num_key_value_heads", int, heads)
    for field, count in (("num_attention_heads", heads), ("num_key_value_heads", kv_heads)):
        if count % groups:
            raise UserError(f"{path}: {field}={count} must be even, since each half of the heads is one group")
    named = fields.named(NAMES, tie_word_embeddings=False)
    head_dim = fields.get("head_dim", int, named["d_model"] // heads)
    model = {
        "architecture": CLASSES[name],
        **named,
        **heads_from(named["d_model"], groups, heads // groups, kv_heads // groups, head_dim),
        **rope_fields(fields),
        "attention_bias": name == QWEN,
        "head_norm": "rms" if groups == 2 else "none",
        "head_norm_eps": named["norm_eps"],  # DiffLlama has only one epsilon.
    }
    fields.refuse_others(*(("sliding_window", "attention_bias") if name == QWEN else ()))  # Without effect there.
    return model_of(path, model)


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json that a model determines."""
    if model.architecture == "transformer" and model.d_model % model.num_heads:
        raise UserError(
            f"model.d_model={model.d_model}, model.num_heads={model.num_heads}: transformers refuses a Llama whose "
            "hidden size is not a multiple of its number of heads, for every head_dim"
        )
    heads = heads_of(model)
    special: dict[str, Any] = {"lambda_std_dev": model.lambda_std} if heads.groups == 2 else {"mlp_bias": False}
    name = next(name for name in CLASSES if CLASSES[name] == model.architecture)
    if name == "LlamaForCausalLM" and model.attention_bias:
        name = QWEN
    if (rope := rope_parameters(model))["rope_type"] == "llama3":
        special["rope_scaling"] = rope  # transformers 4 reads this field instead of rope_parameters.
    return {
        "architectures": [name],
        "model_type": name.removesuffix("ForCausalLM").lower(),
        **{theirs: getattr(model, ours) for theirs, ours in NAMES.items()},
        "num_attention_heads": heads.groups * model.num_heads,
        "num_key_value_heads": heads.groups * heads.kv_heads,
        "head_dim": heads.d_head,
        "hidden_act": "silu",
        "initializer_range": model.init_std,
        "rope_parameters": rope,
        "rope_theta": model.rope_theta,  # transformers 4 reads this field instead of rope_parameters.
        "bos_token_id": None,  # nosec B105: a token of text, not a password
        "dtype": "float32",
        "torch_dtype": "float32",
        **special,
    }
