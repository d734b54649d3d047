"""What the architectures need of their fields of `model`, and refuse: checks of `ModelConfig`."""

from typing import TYPE_CHECKING, Any, Literal, get_args

from difftx.config.checks import divisor_below, require_positive
from difftx.errors import UserError

if TYPE_CHECKING:
    from difftx.config import ModelConfig

Architecture = Literal["diff", "transformer", "diff_v2", "gda", "gated", "off_by_one", "sink", "top_k", "signed_mask"]
Implementation = Literal["auto", "reference", "xla", "pallas_tpu", "pallas_gpu", "cudnn_wide", "cudnn", "splash"]
Granularity = Literal["query", "token"]

TWO_GROUPS: tuple[Architecture, ...] = (
    "diff",
    "gda",
    "signed_mask",
)  # Two keys a key/value head, and one value as wide as both.
MAPPED = ("off_by_one", "sink", "top_k", "signed_mask")  # Maps that no library kernel computes.
ONLY_OF = {"top_k": "top_k", "signal_heads": "gda"}  # Field → the architecture that needs it.
# Field → the architectures that read it, and its value in configs/base.py: all that the other architectures take.
READ_BY: dict[str, tuple[tuple[Architecture, ...], float | None]] = {
    "lambda_init": (TWO_GROUPS, None),
    "lambda_learned": (("diff", "gda"), True),
    "lambda_std": (("diff", "gda"), 0.1),
    "post_scale": (TWO_GROUPS, None),
}


def check_architecture(model: "ModelConfig") -> None:
    """Raise `UserError` for a field that the architecture lacks, or has no use for."""
    name = model.architecture
    for field, owner in ONLY_OF.items():
        value = getattr(model, field)
        if value is None and name == owner:
            raise UserError(f"model.{field}=None: architecture {name!r} needs it; see configs/base.py")
        if value is not None and name != owner:
            raise UserError(f"model.{field}={value}: only architecture {owner!r} has it, not {name!r}; leave it None")
        if value is not None:
            require_positive("model", field, value)
    for field, value in unread_fields(name).items():
        if getattr(model, field) != value:
            owners = ", ".join(map(repr, READ_BY[field][0]))
            raise UserError(
                f"model.{field}={getattr(model, field)}: architecture {name!r} does not read it, only {owners}; "
                f"leave it {value}"
            )
    if model.signal_heads is not None and model.num_heads % model.signal_heads:
        raise UserError(
            f"model.signal_heads={model.signal_heads} does not divide num_heads={model.num_heads}, which counts them "
            f"all; use {divisor_below(model.signal_heads, model.num_heads)}, or other num_heads"
        )
    if name == "diff_v2" and model.head_norm != "none":
        raise UserError(f"model.head_norm={model.head_norm!r}: Differential Transformer V2 has none; use 'none'")
    bits = model.attention_logit_bits
    if bits is not None and not 2 <= bits < 16:
        raise UserError(f"model.attention_logit_bits={bits} must lie in 2 … 15; None: not quantised, as 16 in Figure 8")
    fitting = implementations(name, quantized=bits is not None)
    if model.attention_implementation not in fitting:
        served = f"architecture {name!r}" if bits is None else "quantised attention logits"
        raise UserError(
            f"model.attention_implementation={model.attention_implementation!r} does not serve {served}; "
            f"use one of {', '.join(fitting)}"
        )


def unread_fields(architecture: Architecture) -> dict[str, Any]:
    """Return the fields of `model` that an architecture does not read, with the only values that it takes."""
    return {field: value for field, (owners, value) in READ_BY.items() if architecture not in owners}


def implementations(architecture: Architecture, *, quantized: bool) -> tuple[Implementation, ...]:
    """Return the backends of `difftx.kernels` that an architecture may name."""
    if quantized or architecture in MAPPED:
        return ("auto", "reference", "xla")
    if architecture in TWO_GROUPS:
        return tuple(name for name in get_args(Implementation) if name != "splash")
    return ("auto", "reference", "xla", "cudnn", "splash")
