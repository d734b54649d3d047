"""The registry of attention architectures, their numbers of heads and head widths, and checks of a model's config."""

import dataclasses
import functools
import math
from typing import TYPE_CHECKING

from difftx.config import ModelConfig
from difftx.config.checks import divisors, largest_divisor_up_to
from difftx.config.fields import find_groups
from difftx.config.model import default_specific_fields
from difftx.errors import UserError
from difftx.registry import Registry

if TYPE_CHECKING:
    import jax

    from difftx.model.attention import SelfAttention

# Each entry is a subclass of `SelfAttention` (`difftx/model/attention.py`).
ARCHITECTURES: Registry["type[SelfAttention]"] = Registry(
    "architecture",
    {
        "diff": "difftx.model.attention:DiffAttention",
        "transformer": "difftx.model.attention:Attention",
        "diff_v2": "difftx.model.variants.differential:DiffAttentionV2",
        "gda": "difftx.model.variants.differential:GroupedDiffAttention",
        "gdla": "difftx.model.variants.differential:GroupedDiffAttentionV2",
        "gated": "difftx.model.variants.softmax:GatedAttention",
        "off_by_one": "difftx.model.variants.softmax:OffByOneAttention",
        "sink": "difftx.model.variants.softmax:SinkAttention",
        "top_k": "difftx.model.variants.softmax:TopKAttention",
        "signed_mask": "difftx.model.variants.differential:SignedMaskAttention",
        "zero_branch": "difftx.model.variants.converted:ZeroBranchAttention",
        "dex": "difftx.model.variants.converted:DexAttention",
        "motif": "difftx.model.variants.motif:MotifAttention",
    },
)


# `own_config` is the dataclass of the fields that only this architecture uses, or None.
find_groups(ModelConfig, lambda name: ARCHITECTURES[name].own_config if name in ARCHITECTURES else None)


@dataclasses.dataclass(frozen=True)
class Heads:
    """How many heads an attention layer has, and how wide they are."""

    sub_heads: int  # Number of query/key sub-heads. If `model.head_dim` is not set, d is `model.d_model` / this number.
    query_heads: int  # Number of query vectors per token.
    kv_heads: int  # Number of key/value heads.
    groups: int  # Number of keys per key/value head: 2 for architectures with attention weights A1 and A2, else 1.
    d_head: int  # Width d of a query/key sub-head.
    d_value: int  # Width of a value, and of a head's output.


@functools.cache
def heads_of(config: ModelConfig) -> Heads:
    """Return the head counts and widths of a model. Raise `UserError` if they do not divide its dimensions."""
    attention = ARCHITECTURES[config.architecture]
    sub_heads = attention.sub_heads(config, config.num_heads)
    if config.head_dim is None and config.d_model % sub_heads:
        step = getattr(config.own, "signal_heads", None) or 1
        unit = attention.sub_heads(config, step)
        fitting = [step * (n // unit) for n in divisors(config.d_model)[:-1] if n % unit == 0]
        nearest = min(fitting, key=lambda n: abs(n - config.num_heads), default=step)
        raise UserError(
            f"model.num_heads={config.num_heads}: their {sub_heads} sub-heads do not divide d_model={config.d_model}; "
            f"use {nearest}, or set model.head_dim"
        )
    d_head = config.head_dim or config.d_model // sub_heads
    if d_head % 2:
        raise UserError(f"model.head_dim={d_head} must be even, because the rotary embedding rotates pairs")
    kv_heads = attention.kv_heads(config)
    if config.num_kv_heads is not None and kv_heads % config.num_kv_heads:
        raise UserError(
            f"model.num_kv_heads={config.num_kv_heads} does not divide the {kv_heads} heads that have keys and "
            f"values; use {largest_divisor_up_to(config.num_kv_heads, kv_heads)}"
        )
    return Heads(
        sub_heads=sub_heads,
        query_heads=attention.query_heads(config),
        kv_heads=config.num_kv_heads or kv_heads,
        groups=attention.groups,
        d_head=d_head,
        d_value=attention.value_width_factor * d_head,
    )


def describe_heads(config: ModelConfig) -> str:
    """Describe the heads, such as "8 differential heads = 16 sub-heads of width 128, 4 key/value heads"."""
    heads, count = heads_of(config), config.num_heads
    kind = "differential head" if ARCHITECTURES[config.architecture].subtracts else "head"
    text = f"{count} {kind}{'s' * (count > 1)} = {heads.query_heads} sub-heads"
    if heads.query_heads == count:
        text = f"{count} head{'s' * (count > 1)}"
    shared = f", {heads.kv_heads} key/value head{'s' * (heads.kv_heads > 1)}"
    return f"{text} of width {heads.d_head}{'' if heads.kv_heads == count else shared}"


def check_attention(
    config: ModelConfig,
    mesh: "jax.sharding.Mesh | jax.sharding.AbstractMesh | None" = None,
    context_method: str | None = None,
) -> None:
    """Raise `UserError` if the architecture does not support the config, or the heads cannot be sharded over the mesh.

    `context_method` is `mesh.context_method`. Pass None if there is no such setting and the mesh axis `context` shards
    the heads.
    """
    attention = ARCHITECTURES[config.architecture]
    attention.check(config)
    for name in dict(config.extensions).keys() & ARCHITECTURES.keys() - {config.architecture}:
        raise UserError(f"model.{name}: architecture {config.architecture!r} does not use this group; remove it")
    for name, default in default_specific_fields().items():
        if (value := getattr(config, name)) != default and name not in attention.fields:
            raise UserError(
                f"model.{name}={value}: architecture {config.architecture!r} does not use it; leave it at {default}"
            )
    heads = heads_of(config)
    if config.mup_base_head_dim not in (None, heads.d_head):
        raise UserError(
            f"model.mup_base_head_dim={config.mup_base_head_dim}: this model's sub-heads are {heads.d_head} wide, and "
            "rates transfer only between heads of the same width; change model.num_heads or model.head_dim"
        )
    if mesh is None:
        return
    tensor = mesh.shape["tensor"]
    require_multiple("model.d_model", config.d_model, mesh.shape["fsdp"], "mesh.fsdp")
    for field, size in {"model.num_heads": config.num_heads, "model.num_kv_heads": heads.kv_heads}.items():
        require_multiple(field, size, tensor, "mesh.tensor")
        if context_method in (None, "heads"):
            other = "; or mesh.context_method='zigzag', which does not shard heads over mesh.context"
            hint = "" if context_method is None else other
            require_multiple(field, size, tensor * mesh.shape["context"], "mesh.tensor × mesh.context", hint)


def require_multiple(field: str, size: int, shards: int, axes: str, hint: str = "") -> None:
    """Raise `UserError` if the size of a config field is not a multiple of the number of shards."""
    if size % shards:
        fix = math.ceil(size / shards) * shards
        raise UserError(
            f"{field}: {size} cannot be split into {axes} = {shards} shards; use a multiple, such as {fix}{hint}"
        )
