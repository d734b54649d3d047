"""Construction of validated configs from the values in a recipe, on the command line or in a `config.json`."""

import ast
import contextlib
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from difftx.config import Config
from difftx.config.fields import (
    Extensible,
    Flag,
    added_groups,
    alternative_of,
    default_groups,
    describe_type,
    entry_type,
    marks_of,
    options,
    type_of,
    types_of,
    values_of,
)
from difftx.config.synonyms import field_named
from difftx.errors import UserError, did_you_mean
from difftx.files import require_local
from difftx.registry import EXTENSION_HINT
from difftx.storage.paths import scheme_of


def config_from_dict(raw: Any) -> Config:
    """Return the config with the given values and the schema's defaults, or raise `UserError` if a value is invalid."""
    return build_group(Config, raw, "")


def override(config: Config, overrides: Mapping[str, str]) -> Config:
    """Return the config with some fields replaced by values from the command line, such as `{"mesh.tensor": "4"}`."""
    raw = values_of(config)
    apply_overrides(raw, overrides)
    return config_from_dict(raw)


def apply_overrides(values: Any, overrides: Mapping[str, str]) -> None:
    """Set fields in nested `ConfigDict`s or dictionaries, from texts on the command line."""
    for field, text in overrides.items():
        _set(values, Config, field.split("."), text, field)


def annotation_of(field: str) -> Any:
    """Return the type annotation of a field such as "train.steps", or raise `UserError` if it is unknown."""
    annotation, path = Config, []
    for name in field.split("."):
        path.append(name)
        if entry := entry_type(annotation):
            annotation = entry if name.isdecimal() else None
        else:
            annotation = _annotation(annotation, name, ".".join(path))
    return annotation


def _set(target: Any, group: type, names: Sequence[str], text: str, field: str) -> None:
    """Set the field of `target` at the path `names`. A number in the path is an index into a list of groups."""
    name, *rest = names
    path = field.removesuffix("." + ".".join(rest)) if rest else field
    annotation = _annotation(group, name, path)
    if not rest:
        target[name] = value = parse(text, annotation, field)
        if value is not None and (other := alternative_of(group, name)):
            target[other] = None
    elif dataclasses.is_dataclass(annotation):
        if name not in target:
            target[name] = {}
        _set(target[name], annotation, rest, text, field)  # pyrefly: ignore[bad-argument-type]
    elif entry := entry_type(annotation):
        entries = [dict(item) for item in target.get(name) or ()]
        index, *inner = rest
        if not index.isdecimal() or int(index) >= len(entries) or not inner:
            raise UserError(f"{field}: {path} is a list of {len(entries)}; write {path}.0.field for its first entry")
        _set(entries[int(index)], entry, inner, text, field)
        target[name] = tuple(entries)
    else:
        raise UserError(f"{field}: {path} is a value, not a group")


def build_group(group: type, raw: Any, path: str) -> Any:
    """Build a group from a mapping of its fields, or raise `UserError`. `path` is the group's path, for messages."""
    if not isinstance(raw, Mapping):
        raise UserError(f"{path or 'config'}={raw!r}: expected a group of fields")
    prefix = f"{path}." if path else ""
    for name, value in raw.items():
        _annotation(group, str(name), f"{prefix}{name}={value!r}")  # Raises `UserError` if there is no such field.
    groups = default_groups(group, raw)
    hints = types_of(group)
    values = {name: {} for name in groups} | dict(raw)
    for name, value in raw.items():  # A value that is given replaces the default of the alternative field.
        if value is not None and (other := alternative_of(group, name)):
            values.setdefault(other, None)
    missing = [f.name for f in dataclasses.fields(group) if f.default is dataclasses.MISSING and f.name not in values]
    if missing:
        raise UserError(f"{prefix}{missing[0]}: missing; give {', '.join(hints)}")
    checked = {name: _checked(value, hints[name], prefix + name) for name, value in values.items()}
    for name, value in checked.items():
        _check_paths(value, prefix + name, may_be_in_bucket=Flag.BUCKET in marks_of(group).get(name, ()))
    if issubclass(group, Extensible):
        added = {name: checked.pop(name) for name, kind in added_groups(group).items() if name in checked}
        checked["extensions"] = tuple((n, value) for n, value in added.items() if n in groups or value != type(value)())
    return group(**checked)


def _annotation(group: Any, name: str, field: str) -> Any:
    """Return the type of a group's field, or raise a `UserError` about `field` if there is no such field."""
    hint = type_of(group, name) if dataclasses.is_dataclass(group) else None
    if hint is None:
        if other := field_named(name):
            raise UserError(f"{field}: no such field. Did you mean {other!r}?")
        known = types_of(group) if dataclasses.is_dataclass(group) else {}
        may_add = EXTENSION_HINT if isinstance(group, type) and issubclass(group, Extensible) else ""
        raise UserError(f"{field}: no such field.{did_you_mean(name, known)}{may_add}")
    return hint


def _checked(value: Any, annotation: Any, path: str) -> Any:
    """Return `value`, with integers converted to floats and lists to tuples as the annotation requires.

    Raise `UserError` if the value does not match the annotation, is NaN or infinite, or is too large for numpy.
    """
    if type(value) is int and value.bit_length() > 63:
        raise UserError(f"{path}: an integer of {value.bit_length()} bits; at most 63 are possible")
    if type(value) is float and not math.isfinite(value):
        raise UserError(f"{path}={value}: expected a finite number")
    if dataclasses.is_dataclass(annotation):
        return build_group(annotation, value, path)  # pyrefly: ignore[bad-argument-type]
    for option in options(annotation):
        if get_origin(option) is Literal and value in get_args(option):
            return value
        if get_origin(option) is tuple and isinstance(value, list | tuple):
            return tuple(_checked(v, get_args(option)[0], f"{path}[{i}]") for i, v in enumerate(value))
        if option is float and type(value) in (float, int):
            return float(value)
        if isinstance(option, type) and type(value) is option:
            return value
    choices = [choice for kind in options(annotation) if get_origin(kind) is Literal for choice in get_args(kind)]
    hint = f".{did_you_mean(value, choices)}" if choices and isinstance(value, str) else ""
    raise UserError(f"{path}={value!r}: expected {describe_type(annotation)}{hint}")


def _check_paths(value: Any, field: str, *, may_be_in_bucket: bool) -> None:
    """Raise `UserError` if a text is the path of a bucket, and the field takes none or the path is invalid."""
    if isinstance(value, tuple):
        for i, entry in enumerate(value):
            _check_paths(entry, f"{field}[{i}]", may_be_in_bucket=may_be_in_bucket)
    elif isinstance(value, str) and not field.endswith("_url"):
        # Not `path_of`: a config must be readable without the extra of a store that the reader does not need.
        (scheme_of if may_be_in_bucket else require_local)(field, value)


def parse(text: str, annotation: Any, field: str) -> Any:
    """Parse a command-line text as a value of the field's type."""
    if dataclasses.is_dataclass(annotation):
        raise UserError(f"{field}={text}: {field} is a group; set one of its fields: {', '.join(types_of(annotation))}")
    kinds = options(annotation)
    if type(None) in kinds and text.lower() in ("none", "null"):
        return None
    for kind in kinds:
        if get_origin(kind) is tuple:
            return _parse_list(text, annotation, field)
        if kind is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if kind in (int, float):
            try:
                return kind(text)
            except ValueError:
                continue
    return _checked(text, annotation, field)


def _parse_list(text: str, annotation: Any, field: str) -> tuple[Any, ...]:
    """Parse a list in Python or JSON, such as `("a", "b")` or `[0.0, 1.0]`, or comma-separated values."""
    if text.lstrip()[:1] in ("(", "["):
        values = _literal(text, field)
        return tuple(values) if isinstance(values, list | tuple) else (values,)
    if entry := entry_type(annotation):
        fields = ", ".join(f'"{name}": …' for name in types_of(entry))
        raise UserError(f"{field}={text}: not a list in JSON; write [{{{fields}}}, …]")
    (item,) = {get_args(kind)[0] for kind in options(annotation) if get_origin(kind) is tuple}
    return tuple(parse(part.strip(), item, field) for part in text.split(",") if part.strip())


def _literal(text: str, field: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            return ast.literal_eval(text)
        raise UserError(f"{field}={text}: not a list in Python or JSON ({error})") from error
