"""Conversion of the config.json of microsoft/unilm's Diff-Transformer, in both directions.

That repository publishes attention layers but no model, so difftx defines the format. The parameters of these layers
are under `self_attn`, and all other tensors have Llama's names. config.json has the arguments of the layers'
constructors and the fields of a Llama.
"""

from pathlib import Path
from typing import Any

from difftx.config import Config, ModelConfig
from difftx.errors import UserError, did_you_mean
from difftx.interop.fields import FIXED, Fields, heads_from
from difftx.model.architectures import heads_of

CLASSES = {"MultiheadFlashDiff1": "diff", "MultiheadAttention": "transformer"}
HEAD_NORM_EPS = 1e-5  # Hard-coded in the official code.


def model_fields(path: Path) -> dict[str, Any]:
    """Return the fields of `model` that a config.json determines, or raise `UserError` if difftx lacks a feature."""
    fields = Fields(path)
    name = fields.get("attention", str)
    if name not in CLASSES:
        raise UserError(f"{path}: attention={name!r} cannot be converted.{did_you_mean(name, CLASSES)}")
    groups = 2 if CLASSES[name] == "diff" else 1
    d_model, heads = fields.get("embed_dim", int), fields.get("num_heads", int)
    model = FIXED | {
        "architecture": CLASSES[name],
        "vocab_size": fields.get("vocab_size", int),
        "d_model": d_model,
        "num_layers": fields.get("num_layers", int),
        **heads_from(d_model, groups, heads, fields.get("num_kv_heads", int, heads), d_model // heads // groups),
        "mlp_dim": fields.get("intermediate_size", int),
        "rope_theta": fields.get("rope_theta", float),
        "norm_eps": fields.get("rms_norm_eps", float),
        "head_norm": "rms_affine" if groups == 2 else "none",
        "tie_embeddings": fields.get("tie_word_embeddings", bool),
    }
    fields.refuse_others()
    return model | {"head_norm_eps": HEAD_NORM_EPS} if groups == 2 else model


def check_model(model: ModelConfig) -> None:
    """Raise `UserError` for a model that the official code cannot represent."""
    heads = heads_of(model)
    if heads.d_head * heads.groups * model.num_heads != model.d_model:
        raise UserError(f"model.head_dim={model.head_dim}: the official code derives it from d_model and num_heads")
    if model.architecture == "transformer" and model.head_norm != "none":
        raise UserError(f"model.head_norm={model.head_norm!r}: the official MultiheadAttention has no head norm")
    if model.architecture == "diff" and model.head_norm_eps != HEAD_NORM_EPS:
        raise UserError(f"model.head_norm_eps={model.head_norm_eps}: the official code requires {HEAD_NORM_EPS}")


def config_json(config: Config, end_of_text: int) -> dict[str, Any]:
    """Return the content of config.json for a model that `check_model` accepts."""
    model = config.model
    return {
        "attention": next(name for name in CLASSES if CLASSES[name] == model.architecture),
        "vocab_size": model.embeddings,
        "embed_dim": model.d_model,
        "num_layers": model.num_layers,
        "num_heads": model.num_heads,
        "num_kv_heads": heads_of(model).kv_heads,
        "intermediate_size": model.mlp_dim,
        "rope_theta": model.rope_theta,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "max_position_embeddings": config.data.sequence_length,
        "eos_token_id": end_of_text,
    }
