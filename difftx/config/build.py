"""Build validated config groups from values in a recipe, on the command line or in a `config.json`.

`parse` checks names, types and rules. A group's `__post_init__` checks its fields against each other.
`difftx/training/fit.py` checks the groups against each other, the model and the devices.
"""

import ast
import contextlib
import dataclasses
import itertools
import json
import math
import os
from collections.abc import Mapping
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from ml_collections import ConfigDict, FieldReference

from difftx.config import Config, fields
from difftx.config.synonyms import field_named, note_on
from difftx.errors import UserError, closest, did_you_mean
from difftx.files import require_local
from difftx.registry import EXTENSION_HINT
from difftx.storage.paths import scheme_of


def config_from_dict(raw: Any) -> Config:
    """Build a config from nested dictionaries. Missing fields get their defaults. Invalid values raise `UserError`."""
    return build_group(Config, raw, "")


def override(config: Config, overrides: Mapping[str, Any]) -> Config:
    """Return a config with some fields replaced, such as `{"mesh.tensor": "4"}`. `parsed` parses the values."""
    raw = fields.values_of(config)
    for field, value in parsed(overrides).items():
        set_field(raw, field, value)
    return config_from_dict(raw)


def parsed(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Parse and check overrides. A value may be a Python value or a text from the command line."""
    found = {}
    for field, value in overrides.items():
        read = parse_text if isinstance(value, str) else parse
        found[field] = fields.plain(read(value, annotation_of(field), field))
    return found


def named_fields(values: Mapping[str, Any], group: type = Config, path: str = "") -> dict[str, Any]:
    """Convert keyword arguments such as `steps=9, model={"d_model": 64}` to values by full field name.

    A keyword is a field or subgroup of `group`, or the last part of a field's full name. If several fields end in the
    keyword, the least nested one is meant. Raise `UserError` if no field matches or the match is ambiguous. `path` is
    the full name of `group`.
    """
    found = {}
    for name, value in values.items():
        kind, full = fields.type_of(group, name), f"{path}.{name}" if path else name
        if kind is None and "." not in name:
            same = [field for field, _ in fields.marks(group, path) if field.rpartition(".")[2] == name]
            nearest = [field for field in same if field.count(".") == min(other.count(".") for other in same)]
            if len(nearest) > 1:
                raise UserError(f"{name}={value!r}: {' and '.join(nearest)} have this name; write one of them in full")
            if not nearest and not path and field_named(name) is None:
                close = closest(name, {field.rpartition(".")[2] for field, _ in fields.marks(group)})
                hint = f"Did you mean {close!r}?" if close else "See docs/config.md."
                raise UserError(f"{name}={value!r}: no such field. {hint}")
            full = nearest[0] if nearest else full
        if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
            found |= named_fields(value, kind, full)  # pyrefly: ignore[bad-argument-type]
        else:
            annotation_of(full)  # Raise an error if there is no such field.
            found[full] = os.fspath(value) if isinstance(value, os.PathLike) else value
    return found


def annotation_of(field: str) -> Any:
    """Return the type annotation of a field such as "train.steps", or raise `UserError` if it is unknown."""
    annotation, names = Config, field.split(".")
    for i, name in enumerate(names):
        path = ".".join(names[:i])
        if entry := fields.entry_type(annotation):
            if not name.isdecimal() or i + 1 == len(names):
                raise UserError(f"{field}: {path} is a list; write {path}.0.field for its first entry")
            annotation = entry
        elif dataclasses.is_dataclass(annotation):
            group = annotation
            if (annotation := fields.type_of(group, name)) is None:
                raise _no_field(group, name, f"{path}.{name}" if path else name)
        else:
            raise UserError(f"{field}: {path} is a value, not a group")
    return annotation


def defaults_of(group: type) -> ConfigDict:
    """Return a group's defaults as a `ConfigDict`, which checks the types of values that users assign."""
    values, defaults = ConfigDict(), {field.name: field.default for field in dataclasses.fields(group)}
    for name, annotation in fields.types_of(group).items():
        kinds = [kind for kind in fields.options(annotation) if kind is not NoneType]
        if dataclasses.is_dataclass(annotation):
            if name in fields.default_groups(group, {}):
                values[name] = defaults_of(annotation)  # pyrefly: ignore[bad-argument-type]
        elif defaults[name] is None or len(kinds) > 1:  # Accept other types than the default's.
            values[name] = FieldReference(defaults[name], field_type=kinds[0] if len(kinds) == 1 else object)
        else:
            values[name] = fields.plain(defaults[name])
    return values


def build_group(group: type, raw: Any, path: str) -> Any:
    """Build a group from a mapping of its fields, or raise `UserError`. `path`, its full name, is for messages."""
    if not isinstance(raw, Mapping):
        raise UserError(f"{path or 'config'}={raw!r}: expected a group of fields")
    prefix = f"{path}." if path else ""
    if unknown := [name for name in raw if fields.type_of(group, name) is None]:
        raise _no_field(group, str(unknown[0]), f"{prefix}{unknown[0]}={raw[unknown[0]]!r}")
    groups, hints = fields.default_groups(group, raw), fields.types_of(group)
    required = {field.name for field in dataclasses.fields(group) if field.default is dataclasses.MISSING}
    values = {}
    for name, annotation in hints.items():
        if name in raw or name in groups:
            values[name] = parse(raw.get(name, {}), annotation, prefix + name)
        elif name in required:
            raise UserError(f"{prefix}{name}: missing; give {', '.join(hints)}")
    if issubclass(group, fields.Extensible):
        added = {name: values.pop(name) for name in fields.added_groups(group) if name in values}
        values["extensions"] = tuple((n, value) for n, value in added.items() if n in groups or value != type(value)())
    return group(**values)


def parse(value: Any, annotation: Any, field: str) -> Any:
    """Convert a value to the type of its field (lists become tuples), or raise `UserError`."""
    if dataclasses.is_dataclass(annotation):
        return build_group(annotation, value, field)  # pyrefly: ignore[bad-argument-type]
    if type(value) is int and value.bit_length() > 63:  # numpy cannot hold it.
        raise UserError(f"{field}: an integer of {value.bit_length()} bits; at most 63 are possible")
    if type(value) is float and not math.isfinite(value):
        raise UserError(f"{field}={value}: expected a finite number")
    for kind, rules in fields.options(annotation).items():
        if get_origin(kind) is tuple and isinstance(value, list | tuple):
            value = tuple(parse(entry, get_args(kind)[0], f"{field}[{i}]") for i, entry in enumerate(value))
        elif kind is float and type(value) is int:
            value = float(value)
        elif not (value in get_args(kind) if get_origin(kind) is Literal else type(value) is kind):
            continue
        if kind is str and not field.endswith("_url"):
            # Do not call `path_of`: reading a config must not require the optional packages for its bucket.
            (scheme_of if fields.Flag.BUCKET in fields.marks_of(annotation) else require_local)(field, value)
        for rule in rules if value is not None else ():
            if not rule.holds(value):
                none = "; None is possible too" if NoneType in fields.options(annotation) else ""
                raise UserError(f"{field}={value}{rule.message}{none}")
        return value
    literals = [kind for kind in fields.options(annotation) if get_origin(kind) is Literal]
    choices = list(itertools.chain.from_iterable(map(get_args, literals)))
    close = closest(value, choices) if choices and isinstance(value, str) else None
    hint = f". Did you mean {close!r}?" if close else ""
    raise UserError(f"{field}={value!r}: expected {describe_type(annotation)}{hint}")


def parse_text(text: str, annotation: Any, field: str) -> Any:
    """Parse and check the text of a field on the command line."""
    return parse(_value_of(text, annotation, field), annotation, field)


def describe_type(annotation: Any) -> str:
    """Describe an annotation in words, such as "an integer or None"."""
    words = {int: "an integer", float: "a number", bool: "true or false", str: "text", NoneType: "None"}
    plurals = {int: "integers", float: "numbers", str: "texts"}
    names = []
    for kind in fields.options(annotation):
        if get_origin(kind) is Literal:
            names.append("one of " + ", ".join(map(repr, get_args(kind))))
        elif get_origin(kind) is tuple:
            (entry,) = fields.options(get_args(kind)[0])
            choices = ", ".join(map(repr, get_args(entry)))
            names.append(f"a list of {choices or plurals.get(entry) or entry.__name__}")
        else:
            names.append(words.get(kind) or str(kind))
    return " or ".join(names)


def _no_field(group: type, name: str, field: str) -> UserError:
    """Return the error for an unknown field. `field` is the full name that the user wrote, perhaps with a value."""
    if other := field_named(name):
        return UserError(f"{field}: no such field. Did you mean {other!r}{note_on(name, other)}?")
    hint = EXTENSION_HINT if issubclass(group, fields.Extensible) else ""
    return UserError(f"{field}: no such field.{did_you_mean(name, fields.types_of(group))}{hint}")


def set_field(values: Any, field: str, value: Any) -> None:
    """Set a field in nested dictionaries or `ConfigDict`s. A number in the name indexes a list: `sources.0.path`."""
    *groups, last = field.split(".")
    for name in groups:
        if name.isdecimal():
            if int(name) >= len(values):
                path = field.partition(f".{name}.")[0]
                raise UserError(f"{field}: {path} is a list of {len(values)}; write {path}.0.field for its first entry")
            values = values[int(name)]
            continue
        if name not in values:  # An older config lacks a group that an extension has added since, for example.
            values[name] = {}
        elif isinstance(values[name], list | tuple):  # Copy, because recipes may share list entries.
            values[name] = tuple(map(dict, values[name]))
        values = values[name]
    values[last] = value


def _value_of(text: str, annotation: Any, field: str) -> Any:
    """Convert a text from the command line to a value for a field of this type. `parse` then checks the value."""
    if dataclasses.is_dataclass(annotation):
        names = ", ".join(fields.types_of(annotation))
        raise UserError(f"{field}={text}: {field} is a group; set one of its fields: {names}")
    kinds = fields.options(annotation)
    if NoneType in kinds and text.lower() in ("none", "null"):
        return None
    for kind in kinds:
        if get_origin(kind) is tuple:
            return _list_of(text, get_args(kind)[0], field)
        if kind is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if kind in (int, float):
            with contextlib.suppress(ValueError):
                return kind(text)
    return text


def _list_of(text: str, entry: Any, field: str) -> Any:
    """Parse a list written in Python, in JSON, or as comma-separated values: `("a", "b")`, `["a", "b"]` or `a,b`."""
    if text.lstrip()[:1] in ("(", "["):
        try:
            values = json.loads(text)
        except ValueError as error:
            try:
                values = ast.literal_eval(text)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                raise UserError(f"{field}={text}: not a list in Python or JSON ({error})") from error
        return values if isinstance(values, list | tuple) else (values,)
    if dataclasses.is_dataclass(entry):
        entries = ", ".join(f'"{name}": …' for name in fields.types_of(entry))
        raise UserError(f"{field}={text}: not a list in JSON; write [{{{entries}}}, …]")
    return [_value_of(part.strip(), entry, field) for part in text.split(",") if part.strip()]
