"""The config.json of microsoft/unilm's Diff-Transformer.

That repository contains attention layers but no model, so difftx defines the format of a model. The parameters of the
attention layers are under `self_attn`, and all other tensors have Llama's names. config.json contains the constructor
arguments of the attention layers and the fields of a Llama.
"""

from typing import Any

from difftx.config import ModelConfig
from difftx.errors import UserError, did_you_mean
from difftx.interop.fields import Fields, heads_from, model_of
from difftx.model.architectures import heads_of

CLASSES = {"MultiheadFlashDiff1": "diff", "MultiheadAttention": "transformer"}
NAMES = {
    "vocab_size": "vocab_size",
    "embed_dim": "d_model",
    "num_layers": "num_layers",
    "intermediate_size": "mlp_dim",
    "rope_theta": "rope_theta",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
}


def read(fields: Fields) -> ModelConfig:
    """Return the model that a config.json describes. Raise `UserError` if difftx does not support it."""
    name = fields.get("attention", str)
    if name not in CLASSES:
        raise UserError(f"{fields.path}: attention={name!r} cannot be converted.{did_you_mean(name, CLASSES)}")
    groups = 2 if CLASSES[name] == "diff" else 1
    d_model, heads = fields.get("embed_dim", int), fields.get("num_heads", int)
    model = {
        "architecture": CLASSES[name],
        **fields.named(NAMES),
        **heads_from(d_model, groups, heads, fields.get("num_kv_heads", int, heads), d_model // heads // groups),
        "head_norm": "rms_affine" if groups == 2 else "none",
        "head_norm_eps": 1e-5,  # Hard-coded in the official code.
    }
    fields.refuse_others()
    return model_of(fields.path, model)


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json fields of a model."""
    heads = heads_of(model)
    if heads.d_head * heads.groups * model.num_heads != model.d_model:
        raise UserError(f"model.head_dim={model.head_dim}: the official code derives it from d_model and num_heads")
    return {
        "attention": next(name for name in CLASSES if CLASSES[name] == model.architecture),
        **{theirs: getattr(model, ours) for theirs, ours in NAMES.items()},
        "num_heads": model.num_heads,
        "num_kv_heads": heads.kv_heads,
    }
