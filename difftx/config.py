"""Typed, checked configs: the only reader of a `ConfigDict`.

A config file returns a `ml_collections.ConfigDict` whose fields are described in `configs/base.py`. It crosses into
the code once, here, as frozen dataclasses. File, command line and `config.json` all go through the same schema, so
that a wrong key or type reads the same wherever it was made.
"""

import dataclasses
import importlib.util
import json
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from difftx.errors import UserError, did_you_mean


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Group `model`."""

    architecture: Literal["diff", "transformer"]
    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None
    head_dim: int | None
    mlp_dim: int
    rope_theta: float
    norm_eps: float
    head_norm: Literal["none", "rms", "rms_affine"]
    head_norm_eps: float
    lambda_init: float | None
    lambda_learned: bool
    lambda_std: float
    post_scale: float | None
    init: Literal["fan_in", "normal"]
    init_std: float
    embedding_std: float
    zero_init_output: bool
    tie_embeddings: bool
    compute_dtype: Literal["float32", "bfloat16"]
    remat: Literal["none", "dots", "full"]
    attention_implementation: Literal["auto", "xla", "reference"]

    def __post_init__(self):
        for name in ("vocab_size", "d_model", "num_layers", "num_heads", "mlp_dim"):
            _require_positive("model", name, getattr(self, name))
        width = self.groups * self.num_heads
        if self.head_dim is None and self.d_model % width:
            fitting = [n for n in range(1, self.d_model) if self.d_model % (self.groups * n) == 0]
            nearest = min(fitting, key=lambda n: abs(n - self.num_heads), default=1)
            heads = "2 * num_heads" if self.groups == 2 else "num_heads"
            raise UserError(
                f"model.num_heads={self.num_heads}: {heads} = {width} does not divide d_model={self.d_model}; "
                f"use {nearest}, or set model.head_dim"
            )
        if self.head_dim is not None:
            _require_positive("model", "head_dim", self.head_dim)
        if self.d_head % 2:
            raise UserError(f"model.head_dim={self.d_head}: the rotary embedding turns pairs; use an even head_dim")
        if self.num_kv_heads is not None:
            _require_positive("model", "num_kv_heads", self.num_kv_heads)
            if self.num_heads % self.num_kv_heads:
                raise UserError(
                    f"model.num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}; "
                    f"use {max(n for n in _divisors(self.num_heads) if n <= self.num_kv_heads)}"
                )

    @property
    def groups(self) -> int:
        """Query/key groups of a head: 2 for differential attention, A1 and A2 of Eq. 1."""
        return 2 if self.architecture == "diff" else 1

    @property
    def d_head(self) -> int:
        """Width d of a query/key (sub-)head."""
        return self.head_dim or self.d_model // (self.groups * self.num_heads)

    @property
    def kv_heads(self) -> int:
        """Key/value heads."""
        return self.num_kv_heads or self.num_heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Group `data`."""

    path: str | None
    tokenizer: str
    sequence_length: int
    valid_fraction: float
    seed: int
    prefetch_batches: int

    def __post_init__(self):
        _require_positive("data", "sequence_length", self.sequence_length)
        _require_positive("data", "prefetch_batches", self.prefetch_batches)
        if not 0 < self.valid_fraction < 1:
            raise UserError(f"data.valid_fraction={self.valid_fraction} must lie between 0 and 1")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"data.seed={self.seed} must lie in 0 … 2**32 - 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Group `optimizer`."""

    learning_rate: float
    final_learning_rate: float
    warmup_steps: int
    b1: float
    b2: float
    eps: float
    weight_decay: float
    clip_norm: float | None

    def __post_init__(self):
        _require_positive("optimizer", "learning_rate", self.learning_rate)
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"optimizer.{name}={getattr(self, name)} must lie in [0, 1)")
        if self.warmup_steps < 0:
            raise UserError(f"optimizer.warmup_steps={self.warmup_steps} must not be negative")
        if self.clip_norm is not None:
            _require_positive("optimizer", "clip_norm", self.clip_norm)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Group `train`."""

    steps: int
    global_batch_tokens: int
    accumulation: int
    seed: int

    def __post_init__(self):
        for name in ("steps", "global_batch_tokens", "accumulation"):
            _require_positive("train", name, getattr(self, name))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Group `mesh`; the product is checked against the devices in `difftx.parallel.mesh`."""

    data: int
    fsdp: int
    tensor: int

    def __post_init__(self):
        sizes = dataclasses.asdict(self)
        for axis, size in sizes.items():
            if size != -1:
                _require_positive("mesh", axis, size)
        if list(sizes.values()).count(-1) > 1:
            raise UserError(f"mesh={sizes}: only one axis can be -1 (all devices that are left)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Group `checkpoint`."""

    every_steps: int
    keep: int

    def __post_init__(self):
        _require_positive("checkpoint", "every_steps", self.every_steps)
        _require_positive("checkpoint", "keep", self.keep)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Group `eval`."""

    every_steps: int
    suites: tuple[str, ...]
    loss_tokens: int
    sample_tokens: int
    sample_temperature: float

    def __post_init__(self):
        for name in ("every_steps", "loss_tokens", "sample_tokens"):
            _require_positive("eval", name, getattr(self, name))
        if self.sample_temperature < 0:
            raise UserError(f"eval.sample_temperature={self.sample_temperature} must not be negative")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Group `logging`."""

    every_steps: int
    tensorboard: bool
    wandb_project: str | None

    def __post_init__(self):
        _require_positive("logging", "every_steps", self.every_steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A whole config. Fields and units: `configs/base.py`."""

    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    train: TrainConfig
    mesh: MeshConfig
    checkpoint: CheckpointConfig
    eval: EvalConfig
    logging: LoggingConfig

    def __post_init__(self):
        rows, rest = divmod(self.train.global_batch_tokens, self.data.sequence_length)
        if rest or rows % self.train.accumulation:
            unit = self.data.sequence_length * self.train.accumulation
            raise UserError(
                f"train.global_batch_tokens={self.train.global_batch_tokens} is not a multiple of data.sequence_length "
                f"× train.accumulation = {unit}; use {max(1, round(self.train.global_batch_tokens / unit)) * unit}"
            )
        if self.optimizer.warmup_steps >= self.train.steps:
            raise UserError(
                f"optimizer.warmup_steps={self.optimizer.warmup_steps} leaves nothing of train.steps={self.train.steps}"
                f"; use fewer, such as {self.train.steps // 10}"
            )

    @property
    def batch_rows(self) -> int:
        """Rows of an update, over all devices and microbatches."""
        return self.train.global_batch_tokens // self.data.sequence_length

    def to_json(self) -> str:
        """Return the config as indented JSON, the text of `config.json`."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def load_config(spec: str, overrides: Mapping[str, str]) -> Config:
    """Read `FILE.py` or `FILE.py:ARG` and apply overrides such as `{"model.num_layers": "2"}`.

    Raises:
        UserError: no such file, a file that does not run, an unknown key, a wrong type or value.
    """
    return config_from_dict(_with_overrides(_run_config_file(spec), overrides))


def override(config: Config, overrides: Mapping[str, str]) -> Config:
    """Return the config with fields replaced, as on a command line."""
    return config_from_dict(_with_overrides(dataclasses.asdict(config), overrides))


def config_from_dict(raw: Any) -> Config:
    """Build a checked config from plain dictionaries, as read from `config.json`."""
    return _build(Config, raw, "")


def split_overrides(arguments: Sequence[str], group: str) -> dict[str, str]:
    """Turn `--group.path.to.field=value` arguments into `{"path.to.field": "value"}`."""
    overrides = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not name.startswith(f"--{group}.") or not equals:
            raise UserError(f"{argument!r} is not understood; overrides are written --{group}.path.to.field=value")
        overrides[name.removeprefix(f"--{group}.")] = value
    return overrides


def _run_config_file(spec: str) -> dict[str, Any]:
    path_text, _, arg = spec.partition(":")
    path = Path(path_text)
    if not path.is_file():
        near = [str(p) for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise UserError(f"--config={spec}: no file {path_text!r}.{did_you_mean(path_text, near) if near else ''}")
    module_spec = importlib.util.spec_from_file_location(f"difftx_config_{path.stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise UserError(f"--config={spec}: {path_text!r} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
        config = module.get_config(arg) if arg else module.get_config()
        return config.to_dict()
    except Exception as error:  # Whatever a user's file raises is a mistake in that file: say where.
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).resolve() == path.resolve()]
        at = f"{path_text}:{lines[-1]}" if lines else path_text
        text = str(error.args[0] if error.args else error).splitlines()
        raise UserError(f"{at}: {type(error).__name__}: {text[0] if text else ''}") from error


def _with_overrides(raw: dict[str, Any], overrides: Mapping[str, str]) -> dict[str, Any]:
    for key, text in overrides.items():
        *groups, name = key.split(".")
        cls: type = Config
        target = raw
        for i, group in enumerate(groups):
            annotation = _annotation(cls, group, ".".join(groups[: i + 1]))
            if not dataclasses.is_dataclass(annotation):
                raise UserError(f"{key}: {'.'.join(groups[: i + 1])} is a value, not a group")
            cls = annotation
            target = target.setdefault(group, {})
        target[name] = _parse(text, _annotation(cls, name, key), key)
    return raw


def _build(cls: type, raw: Any, path: str) -> Any:
    """Build dataclass `cls` from a dictionary; unknown, missing and mistyped fields are the user's errors."""
    if not isinstance(raw, Mapping):
        raise UserError(f"{path or 'config'}={raw!r}: expected a group of fields")
    prefix = f"{path}." if path else ""
    hints = get_type_hints(cls)
    for name in raw:
        if name not in hints:
            raise UserError(f"{prefix}{name}={raw[name]!r}: no such field.{did_you_mean(str(name), hints)}")
    missing = [name for name in hints if name not in raw]
    if missing:
        raise UserError(f"{prefix}{missing[0]}: missing; start the config from configs/base.py")
    return cls(**{name: _checked(raw[name], hint, prefix + name) for name, hint in hints.items()})


def _annotation(cls: type, name: str, key: str) -> Any:
    hints = get_type_hints(cls)
    if name not in hints:
        raise UserError(f"{key}: no such field.{did_you_mean(name, hints)}")
    return hints[name]


def _checked(value: Any, annotation: Any, path: str) -> Any:
    """Return `value` if it fits the annotation; integers pass as floats, lists as tuples."""
    if dataclasses.is_dataclass(annotation):
        return _build(annotation, value, path)  # pyrefly: ignore[bad-argument-type]
    options = _options(annotation)
    for option in options:
        if get_origin(option) is Literal and value in get_args(option):
            return value
        if get_origin(option) is tuple and isinstance(value, (list, tuple)):
            return tuple(_checked(v, get_args(option)[0], f"{path}[{i}]") for i, v in enumerate(value))
        if option is float and type(value) in (int, float):
            return float(value)
        if isinstance(option, type) and type(value) is option:
            return value
    raise UserError(f"{path}={value!r}: expected {_describe(annotation)}{_suggestion(value, options)}")


def _parse(text: str, annotation: Any, key: str) -> Any:
    """Read a command-line value by its field's type; `_checked` has the last word."""
    if dataclasses.is_dataclass(annotation):
        fields = ", ".join(get_type_hints(annotation))
        raise UserError(f"{key}={text}: {key} is a group; set one of its fields: {fields}")
    options = _options(annotation)
    if type(None) in options and text.lower() in ("none", "null"):
        return None
    for option in options:
        if get_origin(option) is tuple:
            return tuple(part.strip() for part in text.split(",") if part.strip())
        if option is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if option in (int, float):
            try:
                return option(text)
            except ValueError:
                continue
    return _checked(text, annotation, f"{key}")


def _options(annotation: Any) -> tuple[Any, ...]:
    union = get_origin(annotation) in (Union, types.UnionType)
    return get_args(annotation) if union else (annotation,)


def _describe(annotation: Any) -> str:
    names = []
    for option in _options(annotation):
        if get_origin(option) is Literal:
            names.append("one of " + ", ".join(repr(v) for v in get_args(option)))
        elif option is type(None):
            names.append("None")
        elif get_origin(option) is tuple:
            names.append("a list of " + getattr(get_args(option)[0], "__name__", "values"))
        else:
            names.append({int: "an integer", float: "a number", bool: "true or false", str: "text"}[option])
    return " or ".join(names)


def _suggestion(value: Any, options: Sequence[Any]) -> str:
    for option in options:
        if get_origin(option) is Literal and isinstance(value, str):
            return f".{did_you_mean(value, get_args(option))}"
    return ""


def _require_positive(group: str, name: str, value: float) -> None:
    if not value > 0:
        raise UserError(f"{group}.{name}={value} must be positive")


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]
