"""Reading configs: the only place that sees a `ConfigDict`.

A config file returns a `ml_collections.ConfigDict`; it crosses into the code once, here, as the dataclasses of
`difftx.config`. File, command line and `config.json` all go through that one schema, so that a wrong key or type reads
the same wherever it was made.
"""

import contextlib
import dataclasses
import importlib.util
import json
import math
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from difftx.config import Config
from difftx.errors import UserError, did_you_mean
from difftx.files import require_local

BASE = Path(__file__).parents[1] / "configs" / "base.py"


def load_config(spec: str, overrides: Mapping[str, str]) -> Config:
    """Read `FILE.py` or `FILE.py:ARG` and apply overrides such as `{"model.num_layers": "2"}`.

    Raises:
        UserError: no such file, a file that does not run, an unknown key, a wrong type or value.
    """
    return config_from_dict(_with_overrides(_run_config_file(spec), overrides))


def config_argument(path: str) -> str | None:
    """Return a config file's `ARG`, the form of its argument such as "{architecture}-{size}"; None if it has none."""
    return getattr(_import_config_file(path), "ARG", None)


def override(config: Config, overrides: Mapping[str, str]) -> Config:
    """Return the config with fields replaced, as on a command line."""
    return config_from_dict(_with_overrides(dataclasses.asdict(config), overrides))


def config_from_dict(raw: Any) -> Config:
    """Build a checked config from plain dictionaries, as read from `config.json`."""
    return _build(Config, raw, "")


def saved_config(raw: Any) -> Config:
    """Build the config of a run from its `config.json`; fields that difftx has got since are as in configs/base.py."""
    if BASE.is_file():  # An installed package has no configs.
        raw = _filled(raw, _run_config_file(str(BASE)))
    return config_from_dict(raw)


def _filled(raw: Any, base: Any) -> Any:
    if not isinstance(raw, dict) or not isinstance(base, dict):
        return raw
    return base | {name: _filled(value, base.get(name)) for name, value in raw.items()}


def split_overrides(arguments: Sequence[str], group: str) -> dict[str, str]:
    """Turn `--group.path.to.field=value` arguments into `{"path.to.field": "value"}`."""
    overrides = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not name.startswith(f"--{group}.") or not equals:
            raise UserError(f"{argument!r} is not understood; overrides are written --{group}.path.to.field=value")
        overrides[name.removeprefix(f"--{group}.")] = value
    return overrides


def split_group_overrides(arguments: Sequence[str], groups: Sequence[str]) -> dict[str, str]:
    """Turn `--eval.field=value` arguments, of these groups of the config, into `{"eval.field": "value"}`."""
    overrides = {}
    for argument in arguments:
        name = argument.removeprefix("--").partition(".")[0]
        group = name if name in groups else groups[0]
        overrides |= {f"{group}.{field}": text for field, text in split_overrides([argument], group).items()}
    return overrides


def _run_config_file(spec: str) -> dict[str, Any]:
    path, _, arg = spec.partition(":")
    module = _import_config_file(spec)
    with _mistakes_in(path):
        config = module.get_config(arg) if arg else module.get_config()
        return config.to_dict()


def _import_config_file(spec: str) -> types.ModuleType:
    path_text = spec.partition(":")[0]
    path = Path(path_text)
    if not path.is_file():
        near = [str(p) for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise UserError(f"--config={spec}: no file {path_text!r}.{did_you_mean(path_text, near) if near else ''}")
    module_spec = importlib.util.spec_from_file_location(f"difftx_config_{path.stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise UserError(f"--config={spec}: {path_text!r} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    with _mistakes_in(path_text):
        module_spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _mistakes_in(path_text: str) -> Iterator[None]:
    """Whatever a user's config file raises is a mistake in that file: say where."""
    try:
        yield
    except Exception as error:  # Any: the file is the user's own program.
        path = Path(path_text).resolve()
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).resolve() == path]
        at = f"{path_text}:{lines[-1]}" if lines else path_text
        if isinstance(error, SyntaxError) and error.filename and error.lineno:  # No frame: that file never ran.
            is_own = Path(error.filename).resolve() == path
            at = f"{path_text if is_own else error.filename}:{error.lineno}"
        text = str(error.args[0] if error.args else error).splitlines()
        raise UserError(f"{at}: {type(error).__name__}: {text[0] if text else ''}") from error


def _with_overrides(raw: dict[str, Any], overrides: Mapping[str, str]) -> dict[str, Any]:
    for key, text in overrides.items():
        _override(raw, Config, key.split("."), text, key)
    return raw


def _override(target: dict[str, Any], cls: type, names: Sequence[str], text: str, key: str) -> None:
    """Set field `names` of a group of type `cls`; a number in `names` counts the groups of a list, from 0."""
    name, *rest = names
    path = ".".join(key.split(".")[: -len(rest) or None])
    annotation = _annotation(cls, name, path)
    if not rest:
        target[name] = _parse(text, annotation, key)
    elif dataclasses.is_dataclass(annotation):
        _override(target.setdefault(name, {}), annotation, rest, text, key)  # pyrefly: ignore[bad-argument-type]
    elif get_origin(annotation) is tuple and dataclasses.is_dataclass(get_args(annotation)[0]):
        target[name] = [dict(item) for item in target.get(name, ())]
        number, *field = rest
        if not number.isdecimal() or int(number) >= len(target[name]) or not field:
            raise UserError(f"{key}: {path} is a list of {len(target[name])}; write {path}.0.field for its first")
        _override(target[name][int(number)], get_args(annotation)[0], field, text, key)
    else:
        raise UserError(f"{key}: {path} is a value, not a group")


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
    """Return `value` if it fits the annotation; integers pass as floats, lists as tuples.

    No field has a use for NaN or infinity (None is "no limit"), nor for an integer that numpy cannot hold.
    """
    if type(value) is int and value.bit_length() > 63:
        raise UserError(f"{path}: an integer of {value.bit_length()} bits; at most 63 are possible")
    if type(value) is float and not math.isfinite(value):
        raise UserError(f"{path}={value}: expected a finite number")
    if dataclasses.is_dataclass(annotation):
        return _build(annotation, value, path)  # pyrefly: ignore[bad-argument-type]
    options = _options(annotation)
    if isinstance(value, str) and not path.endswith("_url"):
        require_local(path, value)
    for option in options:
        if get_origin(option) is Literal and value in get_args(option):
            return value
        if get_origin(option) is tuple and isinstance(value, (list, tuple)):
            return tuple(_checked(v, get_args(option)[0], f"{path}[{i}]") for i, v in enumerate(value))
        if option is float and type(value) in (float, int):
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
            return _parse_list(text, get_args(option)[0], key)
        if option is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if option in (int, float):
            try:
                return option(text)
            except ValueError:
                continue
    return _checked(text, annotation, f"{key}")


def _parse_list(text: str, item: Any, key: str) -> tuple[Any, ...]:
    """Read values between commas, or for a list of groups JSON."""
    if not dataclasses.is_dataclass(item):
        return tuple(_parse(part.strip(), item, key) for part in text.split(",") if part.strip())
    try:
        return tuple(json.loads(text))
    except (json.JSONDecodeError, TypeError) as error:
        fields = ", ".join(f'"{name}": …' for name in get_type_hints(item))
        raise UserError(f"{key}={text}: not a list in JSON, [{{{fields}}}, …] ({error})") from error


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
