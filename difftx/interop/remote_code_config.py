"""The config.json of `modeling_difftx.py`, which transformers loads as remote code.

The modelling file is copied into each exported folder. difftx never executes the copy.
"""

from pathlib import Path
from typing import Any

from difftx.config import ModelConfig
from difftx.config.fields import values_of
from difftx.errors import UserError
from difftx.interop.fields import Fields, model_of, rope_fields, rope_parameters
from difftx.interop.parameters import architectures_of
from difftx.model.architectures import ARCHITECTURES, heads_of

MODELING = Path(__file__).with_name("modeling_difftx.py")
SERVABLE, EAGER = "DifftxForCausalLM", "DifftxEagerForCausalLM"
NAMES = {
    "architecture": "architecture",
    "vocab_size": "vocab_size",
    "hidden_size": "d_model",
    "intermediate_size": "mlp_dim",
    "num_hidden_layers": "num_layers",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    "attention_bias": "attention_bias",
    "qk_norm": "qk_norm",
    "head_norm": "head_norm",
    "head_norm_eps": "head_norm_eps",
    "lambda_init": "lambda_init",
    "lambda_learned": "lambda_learned",
    "lambda_std_dev": "lambda_std",
    "lambda_bound": "lambda_bound",
    "post_scale": "post_scale",
    "final_logit_softcapping": "logit_soft_cap",  # Gemma's name, which engines read.
}


def is_ours(path: Path) -> bool:
    """Return whether a config.json names a class of the modelling file."""
    return class_of(path) in (SERVABLE, EAGER)


def class_of(path: Path) -> Any:
    """Return the first class that a config.json names, or None."""
    return next(iter(Fields(path).get("architectures", list, [None])), None)


def read(fields: Fields) -> ModelConfig:
    """Return the model that a config.json describes, or raise `UserError` if it contradicts itself."""
    path = fields.path
    raw = fields.read(*NAMES, "num_noise_heads", "rope_parameters")
    architecture = raw["architecture"]
    if architecture not in (known := architectures_of("hf")):
        raise UserError(f"{path}: architecture={architecture!r} cannot be converted; use one of {', '.join(known)}")
    own = {ours: fields.read(theirs)[theirs] for theirs, ours in ARCHITECTURES[architecture].exported.items()}
    if architecture == "gdla":
        own["output_gate"] = fields.get("output_gate", bool, False)
    model = {
        **{ours: raw[theirs] for theirs, ours in NAMES.items()},
        **_heads(fields, architecture, own),
        **({architecture: own} if own else {}),
        **rope_fields(fields),
    }
    built = model_of(path, model)
    for name, value in _description(built).items():
        fields.require(name, value)
    fields.refuse_others()
    return built


def _heads(fields: Fields, architecture: str, own: dict[str, Any]) -> dict[str, int | None]:
    """Return the fields of `model` on heads, from those of its attention call, which a config.json describes.

    Add `signal_heads` to the fields of the architecture's own group.

    In config.json, `num_attention_heads` counts queries, of signal heads and of noise heads. `head_dim` is the width of
    a value, and the keys of a token are divided into `num_key_value_heads` heads of that width.
    """
    queries, kv_heads = fields.get("num_attention_heads", int), fields.get("num_key_value_heads", int)
    noise_heads = fields.read("num_noise_heads")["num_noise_heads"]
    if noise_heads is not None and (type(noise_heads) is not int or not 0 < noise_heads < queries):
        raise UserError(
            f"{fields.path}: num_noise_heads={noise_heads!r}: expected null or a count below {queries}, all heads"
        )
    num_heads = queries - (noise_heads or 0)
    width = fields.get("head_dim", int)
    attention = ARCHITECTURES[architecture]
    sub_heads_per_call_head = attention.value_width_factor
    num_kv_heads = kv_heads * sub_heads_per_call_head // attention.groups
    sub_heads = queries if sub_heads_per_call_head == 2 else num_heads
    shares_noise = architecture in ("gda", "gdla") and noise_heads
    default_kv_heads = noise_heads if shares_noise else num_heads
    has_default_width = sub_heads * width == sub_heads_per_call_head * fields.get("hidden_size", int)
    if architecture in ("gda", "gdla"):
        own["signal_heads"] = num_heads // noise_heads if noise_heads else None
    return {
        "num_heads": num_heads,
        "num_kv_heads": None if num_kv_heads == default_kv_heads else num_kv_heads,
        "head_dim": None if has_default_width else width // sub_heads_per_call_head,
    }


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json that a model determines."""
    return {**_description(model), "initializer_range": model.init_std, "dtype": "float32"}


def _description(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json that must agree with each other. Heads are those of the attention call."""
    values, heads, attention = values_of(model), heads_of(model), ARCHITECTURES[model.architecture]
    causal = EAGER if attention.kernel == "weighted_attention" else SERVABLE
    classes = {"AutoConfig": "DifftxConfig", "AutoModel": causal.replace("ForCausalLM", "Model")}
    classes["AutoModelForCausalLM"] = causal
    return {
        "architectures": [causal],
        "auto_map": {auto: f"{MODELING.stem}.{name}" for auto, name in classes.items()},
        "model_type": "difftx",
        **{theirs: values[ours] for theirs, ours in NAMES.items()},
        **{theirs: None for name in architectures_of("hf") for theirs in ARCHITECTURES[name].exported},
        **{theirs: getattr(model.own, ours) for theirs, ours in attention.exported.items()},
        "num_attention_heads": heads.query_heads,
        # The keys of a token, divided into heads as wide as a value.
        "num_key_value_heads": heads.kv_heads * heads.groups * heads.d_head // heads.d_value,
        "num_noise_heads": heads.query_heads - model.num_heads or None,
        "head_dim": heads.d_value,
        "rope_parameters": rope_parameters(model),
        "output_gate": getattr(model.own, "output_gate", model.architecture == "gated"),
    }
