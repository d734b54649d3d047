"""The config.json of `modeling_difftx.py`, which transformers loads as remote code.

The modelling file is copied into each exported folder. difftx never executes the copy.
"""

from pathlib import Path
from typing import Any

from difftx.config import ModelConfig
from difftx.config.fields import values_of
from difftx.interop import huggingface
from difftx.interop.fields import Fields, function_fields, model_of, rope_fields, rope_parameters
from difftx.model.architectures import ARCHITECTURES, heads_of

MODELING = Path(__file__).with_name("modeling_difftx.py")
SERVABLE, EAGER = "DifftxForCausalLM", "DifftxEagerForCausalLM"
OWN = "difftx"  # Field of config.json for the heads as difftx counts them, and for the architecture's own group.
SAME_NAMES = (
    *("architecture", "attention_bias", "qk_norm", "head_norm", "head_norm_eps"),
    *("lambda_init", "lambda_learned", "lambda_bound", "post_scale"),
)
NAMES = {
    **huggingface.NAMES,
    **{name: name for name in SAME_NAMES},
    "lambda_std_dev": "lambda_std",
    "final_logit_softcapping": "logit_soft_cap",  # Gemma's name, which engines support.
}


def is_ours(path: Path) -> bool:
    """Return whether a config.json names a class of `modeling_difftx.py`."""
    return class_of(path) in (SERVABLE, EAGER)


def class_of(path: Path) -> Any:
    """Return the first class that a config.json names, or None."""
    return next(iter(Fields(path).get("architectures", list, [None])), None)


def read(fields: Fields) -> ModelConfig:
    """Return the model that a config.json describes, or raise `UserError` if it contradicts itself."""
    raw = fields.read(*NAMES)
    named = {ours: raw[theirs] for theirs, ours in NAMES.items()}
    model = model_of(fields.path, named | fields.get(OWN, dict) | rope_fields(fields))
    for name, value in _description(model).items():
        fields.read(name)
        fields.require(name, value)
    fields.refuse_others()
    return model


def write(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json fields of a model."""
    return {**_description(model), "initializer_range": model.init_std, "dtype": "float32"}


def _description(model: ModelConfig) -> dict[str, Any]:
    """Return the config.json fields that `read` checks for consistency. Heads are counted as in the attention call."""
    values, heads = values_of(model), heads_of(model)
    causal = EAGER if ARCHITECTURES[model.architecture].kernel == "weighted_attention" else SERVABLE
    classes = {"AutoConfig": "DifftxConfig", "AutoModel": causal.replace("ForCausalLM", "Model")}
    classes["AutoModelForCausalLM"] = causal
    prefix = f"{model.architecture}."
    own = [name.removeprefix(prefix) for name in function_fields(model) if name.startswith(prefix)]
    group = {model.architecture: {name: getattr(model.own, name) for name in own}} if own else {}
    return {
        "architectures": [causal],
        "auto_map": {auto: f"{MODELING.stem}.{name}" for auto, name in classes.items()},
        "model_type": "difftx",
        **{theirs: values[ours] for theirs, ours in NAMES.items()},
        OWN: {name: values[name] for name in ("num_heads", "num_kv_heads", "head_dim")} | group,
        "num_attention_heads": heads.query_heads,
        # A key/value head of the attention call has keys as wide as its values.
        "num_key_value_heads": heads.kv_heads * heads.groups * heads.d_head // heads.d_value,
        "num_noise_heads": heads.query_heads - model.num_heads or None,
        "head_dim": heads.d_value,
        "rope_parameters": rope_parameters(model),
        "output_gate": getattr(model.own, "output_gate", model.architecture == "gated"),
        "top_k": model.own.k if model.architecture == "top_k" else None,
    }
