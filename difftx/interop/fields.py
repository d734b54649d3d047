"""Read and write the config.json of other formats.

Each format is a module with two functions and a table. `read` converts a config.json to a model config. `write`
converts a model config to fields of config.json. `NAMES` maps fields of config.json to fields of `model` with the same
value. A model can be exported in a format if `read(write(model))` computes the same function.
"""

import operator
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, NoneType
from typing import Any

from difftx.config import Config, ModelConfig
from difftx.config.affects import Effect
from difftx.config.build import build_group, set_field
from difftx.config.fields import added_groups, fields_with, flat, options, plain, types_of, values_of
from difftx.config.model import RopeScalingConfig
from difftx.errors import UserError
from difftx.json_files import TYPE_NAMES, read_json
from difftx.model.architectures import check_attention, heads_of

CONFIG = "config.json"
# Fields that exports ignore. Engines have their own cache. The granularity has no effect without
# `attention_logit_bits`.
NOT_OF_WEIGHTS = ("cache", "attention_logit_granularity")
# Fields of config.json that do not change the logits in transformers, such as additions by SmolLM and Unsloth.
HARMLESS = (
    "_attn_implementation_autoset", "_commit_hash", "_flash_attn_2_enabled", "_name_or_path", "attention_dropout",
    "bos_token_id", "do_sample", "dtype", "eos_token_id", "initializer_range", "is_llama_config", "lambda_std_dev",
    "max_length", "max_position_embeddings", "max_window_layers", "pad_token_id", "pretraining_tp",
    "repetition_penalty", "temperature", "tokenizer_class", "top_k", "top_p", "torch_dtype", "transformers.js_config",
    "transformers_version", "unsloth_fixed", "unsloth_version", "use_cache",
)  # fmt: skip
EXPECTED: dict[type, str] = TYPE_NAMES | {float: "a positive number", bool: "true or false", list: "a list"}


class Fields:
    """A config.json that checks each field when it is read."""

    def __init__(self, path: Path, raw: Any = None):
        self.path = path
        self._raw = read_json(path) if raw is None else raw
        if not isinstance(self._raw, dict):
            raise UserError(f"{path}: not an object")
        self._known = {*HARMLESS}

    def assume(self, defaults: Mapping[str, Any]) -> None:
        """Use `defaults` for absent fields."""
        self._raw = {**defaults, **self._raw}

    def get[T](self, name: str, kind: type[T], default: T | None = None) -> T:
        """Return a field, or `default` if it is absent or null. Raise `UserError` if its type is wrong or it is ≤ 0."""
        self._known.add(name)
        value = self._raw.get(name)
        if value is None and default is not None:
            return default
        if kind is float and _is_positive(value):
            value = float(value)
        if type(value) is not kind or (kind in (int, float) and not _is_positive(value)):
            raise UserError(f"{self.path}: {name}={value!r}: expected {EXPECTED[kind]}")
        return value

    def named(self, names: Mapping[str, str], **defaults: Any) -> dict[str, Any]:
        """Read all fields in a table `NAMES` and return their values by their names in `model`."""
        types = types_of(ModelConfig)
        kinds = {ours: next(kind for kind in options(types[ours]) if kind is not NoneType) for ours in names.values()}
        return {ours: self.get(theirs, kinds[ours], defaults.get(theirs)) for theirs, ours in names.items()}

    def read(self, *names: str) -> dict[str, Any]:
        """Return fields without checking their types. Raise `UserError` if a field is absent."""
        if missing := [name for name in names if name not in self._raw]:
            raise UserError(f"{self.path}: {missing[0]} is missing")
        self._known.update(names)
        return {name: self._raw[name] for name in names}

    def require(self, name: str, value: Any) -> None:
        """Raise `UserError` unless a field is absent or has the given value."""
        self._known.add(name)
        if (found := self._raw.get(name, value)) != value:
            raise UserError(f"{self.path}: {name}={found!r} cannot be converted; only {value!r} can")

    def refuse_others(self, *ignored: str) -> None:
        """Raise `UserError` if there is a field that was not read, unless it is harmless, `ignored`, false or null."""
        for name, value in self._raw.items():
            if value and name not in {*self._known, *ignored}:
                raise UserError(f"{self.path}: {name}={value!r} cannot be converted; remove it if it has no effect")


def function_fields(model: ModelConfig) -> list[str]:
    """Return the names of the `model` fields that determine the model's function.

    Names look like "d_model", "rope_scaling" (a whole group) and, at the end, "top_k.k" (the architecture's own group).
    """
    names = fields_with(ModelConfig, Effect.SHAPES, Effect.FUNCTION)
    others = (*NOT_OF_WEIGHTS, *added_groups(ModelConfig))
    shared = [name for name in dict.fromkeys(name.partition(".")[0] for name in names) if name not in others]
    return shared + [name for name in names if model.own and name.startswith(f"{model.architecture}.")]


def with_fields(model: ModelConfig, fields: Mapping[str, Any]) -> ModelConfig:
    """Return the model with some fields replaced, including fields in the own group of `fields["architecture"]`."""
    architecture, others = fields["architecture"], dict(model.extensions)
    raw = {name: value for name, value in values_of(model).items() if name == architecture or name not in others}
    for field, value in fields.items():
        set_field(raw, field, plain(value))
    return build_group(ModelConfig, raw, "model")


def model_of(path: Path, raw: dict[str, Any]) -> ModelConfig:
    """Build a model config from the fields `raw`. Errors name `path`, the config.json from which they were read."""
    try:
        model = build_group(ModelConfig, raw, "model")
        check_attention(model)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return model


def determined_fields(format_: ModuleType, model: ModelConfig) -> dict[str, Any]:
    """Return the `model` fields that a format's config.json determines, with their values in `model`."""
    names = {*function_fields(model), *format_.NAMES.values()}
    return {name: operator.attrgetter(name)(model) for name in names}


def config_json(format_: ModuleType, config: Config, end_of_text: int) -> dict[str, Any]:
    """Return the content of config.json. The model must pass `check_model`."""
    scaling = config.model.rope_scaling
    scaled = 0 if scaling.factor == 1 else round(scaling.factor * scaling.original_max_position_embeddings)
    longest = max(config.data.sequence_length, scaled)
    return {**format_.write(config.model), "max_position_embeddings": longest, "eos_token_id": end_of_text}


def check_model(format_: ModuleType, model: ModelConfig) -> None:
    """Raise `UserError` if a format cannot represent a model, that is, if its config.json describes another model."""
    written = format_.write(model)
    other = format_.read(Fields(Path(CONFIG), written))
    for name in differences(model, other):
        value, their_value = (operator.attrgetter(name)(each) for each in (model, other))
        kind = written.get("attention") or written["architectures"][0]
        raise UserError(f"model.{name}={value!r} cannot be converted: a {kind} would have {their_value!r}")


def differences(model: ModelConfig, other: ModelConfig) -> list[str]:
    """Return the fields that make two models compute different functions with the same weights."""
    ours, theirs = _canonical(model), _canonical(other)
    return [name for name in function_fields(model) if ours[name] != theirs[name]]


def _canonical(model: ModelConfig) -> dict[str, Any]:
    """Return the model's fields, with values normalised so that models with equal functions have equal fields."""
    heads, values = heads_of(model), values_of(model)
    values |= flat(values) | {"num_kv_heads": heads.kv_heads, "head_dim": heads.d_head}
    repeats = model.num_layers // len(model.windows)
    values |= {"window": model.windows * repeats, "window_pattern": model.rotates * repeats}
    if model.head_norm == "rms_affine":
        values["head_norm"] = "rms"  # `export_params` folds the gain into W_O.
    elif model.head_norm != "rms":
        values["head_norm_eps"] = None  # It has no effect without an RMSNorm.
    return values


def heads_from(d_model: int, groups: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, int | None]:
    """Return the `model` fields that describe heads. If a value equals the default, use None."""
    return {
        "num_heads": heads,
        "num_kv_heads": None if kv_heads == heads else kv_heads,
        "head_dim": None if groups * heads * head_dim == d_model else head_dim,
    }


def rope_fields(fields: Fields) -> dict[str, Any]:
    """Return the `model` fields of the rotary embedding. If both exist, rope_scaling overrides rope_parameters."""
    both = [fields.get(name, dict, {}) for name in ("rope_scaling", "rope_parameters")]
    raw: dict[str, Any] = both[0] or both[1]
    kind = raw.get("rope_type", raw.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UserError(
            f"{fields.path}: rope scaling of type {kind!r} cannot be converted; only types 'default' and 'llama3' can"
        )
    fields.require("partial_rotary_factor", 1.0)
    theta = raw.get("rope_theta", fields.get("rope_theta", float, 10_000.0))
    scaling = {name: raw.get(name) for name in types_of(RopeScalingConfig)} if kind == "llama3" else {}
    if others := sorted(raw.keys() - {"rope_type", "type", "rope_theta", "partial_rotary_factor", *scaling}):
        raise UserError(f"{fields.path}: {others[0]}={raw[others[0]]!r} cannot be converted with rope type {kind!r}")
    if raw.get("partial_rotary_factor", 1.0) != 1.0 or not all(map(_is_positive, (theta, *scaling.values()))):
        raise UserError(f"{fields.path}: rope_parameters={raw} cannot be converted; its numbers must be positive")
    return {"rope_theta": float(theta), "rope_scaling": scaling}


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= sys.float_info.max


def rope_parameters(model: ModelConfig) -> dict[str, Any]:
    """Return the value of config.json's field `rope_parameters`."""
    scaling = model.rope_scaling
    kind = {"rope_type": "default"} if scaling.factor == 1 else {"rope_type": "llama3", **values_of(scaling)}
    return kind | {"rope_theta": model.rope_theta}
