"""Base classes of the config groups, and the types, rules and defaults of their fields.

Each config field is declared once, as a field of a dataclass with a type and a default, followed by a string with its
meaning and unit. The type also states what a change of the field affects (`Effect`), and further facts that other code
needs (`Flag`). Recipes, the command line, docs/config.md and every rule about fields use this declaration.
"""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from difftx.config import affects
from difftx.config.affects import Effect
from difftx.config.flag import Flag
from difftx.errors import UserError
from difftx.registry import record

GROUP = "config group"  # The kind of a group that an extension adds, for `extension_of`.
_find: dict[type, Callable[[str], type | None]] = {}  # Group → function that finds groups to add, by name.
_added: dict[type, dict[str, type]] = {}  # Group → groups that extensions have added to it, by name.


@dataclasses.dataclass(frozen=True)
class Rule:
    """A condition for the values of a field. `typing.Annotated` attaches it to the field's type."""

    holds: Callable[[Any], bool]
    message: str  # End of the error message, after "field=value".


_T = TypeVar("_T")
_DISTINCT = Rule(lambda entries: len(set(entries)) == len(entries), ": the entries must differ")
_AXIS_LIMIT = Rule(lambda value: value < 2**31, " must be less than 2**31, the limit for an axis of an array")

# Types with rules. For example, `Positive[int]` is a positive integer, `Unique[tuple[int, ...]]` is a list of different
# integers, and `NonEmptyUnique[tuple[int, ...]]` is a list of different integers with at least one entry.
Positive = Annotated[_T, Rule(lambda value: value > 0, " must be positive")]
NotNegative = Annotated[_T, Rule(lambda value: value >= 0, " must not be negative")]
Unique = Annotated[_T, _DISTINCT]
NonEmptyUnique = Annotated[_T, Rule(bool, ": give at least one entry"), _DISTINCT]
AxisLength = Annotated[Positive[int], _AXIS_LIMIT]
Seed = Annotated[int, Rule(lambda value: 0 <= value < 2**32, " must lie in 0 … 2**32 - 1")]
UnitClosed = Annotated[float, Rule(lambda value: 0 <= value <= 1, " must lie in 0 … 1")]
UnitHalfOpen = Annotated[float, Rule(lambda value: 0 <= value < 1, " must be at least 0 and less than 1")]
UnitOpen = Annotated[float, Rule(lambda value: 0 < value < 1, " must lie between 0 and 1")]


def check_rules(field: str, value: Any, annotation: Any) -> None:
    """Raise `UserError` if a value, or an entry of a list, breaks a rule of its type. None is always valid."""
    if value is None:
        return
    for kind in options(annotation):
        if get_origin(kind) is Annotated:
            for rule in kind.__metadata__:
                if isinstance(rule, Rule) and not rule.holds(value):
                    raise UserError(f"{field}={value}{rule.message}")
            check_rules(field, value, kind.__origin__)
        elif get_origin(kind) is tuple:
            for entry in value:
                check_rules(field, entry, get_args(kind)[0])


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Group:
    """Base class of config groups. Each subclass becomes a frozen dataclass that checks the values of its fields."""

    _path = ""
    _alternatives = types.MappingProxyType[str, str]({})

    def __init_subclass__(cls, path: str = "", alternatives: Mapping[str, str] = types.MappingProxyType({})):
        cls._path = path  # Path of the group in the config, such as "eval.needle", for error messages.
        # Pairs of fields of which exactly one has a value. Setting one sets the other to None (`alternative_of`).
        cls._alternatives = types.MappingProxyType({**alternatives, **{b: a for a, b in alternatives.items()}})
        for name, annotation in inspect.get_annotations(cls).items():
            stated = [mark for mark in getattr(annotation, "__metadata__", ()) if isinstance(mark, Effect)]
            if len(stated) != 1 and not dataclasses.is_dataclass(annotation):
                raise TypeError(f"{cls.__name__}.{name}: state what a change of it affects, as in affects.Training[…]")
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self):
        for name, annotation in _declared_types(type(self), with_rules=True).items():
            check_rules(f"{self._path}.{name}", getattr(self, name), annotation)
        for name, other in self._alternatives.items():
            if (getattr(self, name) is None) == (getattr(self, other) is None):
                pair = f"{self._path}.{name}={getattr(self, name)}, {self._path}.{other}={getattr(self, other)}"
                raise UserError(f"{pair}: exactly one of them must have a value; set the other to None")


class Extensible(Group):
    """A group to which extensions can add groups, such as `config.eval.bleu`.

    `effect` is what the fields of these groups affect, unless a group is a `Group`, whose fields say it. If
    `chosen_by` names a field, a value of this group has only the added group that the field names.
    """

    extensions: affects.Nothing[tuple[tuple[str, Any], ...]] = ()
    """Name and value of each added group. This attribute is not a config field."""
    _effect = Effect.TRAINING
    _chosen_by = ""

    def __init_subclass__(cls, path: str = "", *, effect: Effect, chosen_by: str = "", **options: Any):
        cls._effect, cls._chosen_by = effect, chosen_by
        super().__init_subclass__(path, **options)

    def __getattr__(self, name: str) -> Any:
        for added, value in object.__getattribute__(self, "extensions"):
            if added == name:
                return value
        raise AttributeError(f"{type(self).__name__} has no field {name!r}")


def add_group(parent: type[Extensible], name: str, group: type) -> None:
    """Add the dataclass `group` to the group `parent` of the schema, as a field with the given name.

    Raise `UserError` if the name is taken, or if `group` is not a frozen dataclass whose fields all have defaults.
    """
    if name in types_of(parent):
        raise UserError(f"{parent.__name__} has a field {name!r} already; choose another name")
    if not (dataclasses.is_dataclass(group) and getattr(group, "__dataclass_params__").frozen):  # noqa: B009
        raise UserError(f"{group.__name__} is not a frozen dataclass; decorate it with @dataclass(frozen=True)")
    if missing := [field.name for field in dataclasses.fields(group) if field.default is dataclasses.MISSING]:
        raise UserError(f"{group.__name__}.{missing[0]} has no default; give every field a default")
    _added.setdefault(parent, {})[name] = group
    record(GROUP, f"{parent._path}.{name}")


def added_groups(parent: type) -> Mapping[str, type]:
    """Return the groups that have been added to a group, by field name."""
    return _added.get(parent, {})


def find_groups(parent: type[Extensible], find: Callable[[str], type | None]) -> None:
    """Let `find` return the group to add for a name that `parent` does not have, or None. It is asked when needed."""
    _find[parent] = find


def type_of(group: type, name: str) -> Any:
    """Return the type of a group's field, or None if there is no such field."""
    if name not in types_of(group) and (find := _find.get(group)) and (found := find(name)):
        add_group(group, name, found)
    return types_of(group).get(name)


def default_groups(group: type, values: Mapping[str, Any]) -> list[str]:
    """Return the names of the groups that a value of a group has, given its other values."""
    chosen = None
    if by := getattr(group, "_chosen_by", ""):
        chosen = values.get(by, getattr(group, by))
        type_of(group, str(chosen))  # Adds the group.
    others = added_groups(group).keys() - {chosen} if by else ()
    return [name for name, kind in types_of(group).items() if dataclasses.is_dataclass(kind) and name not in others]


def types_of(group: type) -> dict[str, Any]:
    """Return the types of a group's fields by name, including groups that extensions have added."""
    return {**_declared_types(group), **added_groups(group)}


@functools.cache  # Evaluating 200 annotations takes longer than the rest of reading a config.
def _declared_types(group: type, with_rules: bool = False) -> dict[str, Any]:
    hints = get_type_hints(group, include_extras=with_rules)
    return {name: kind for name, kind in hints.items() if name != "extensions"}


@functools.cache
def marks_of(group: type[Group]) -> Mapping[str, frozenset[Effect | Flag]]:
    """Return the effect and the flags of each field of a group, without the groups in it."""
    hints = _declared_types(group, with_rules=True)
    return {
        name: frozenset(mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, Effect | Flag))
        for name, hint in hints.items()
        if not dataclasses.is_dataclass(hint)
    }


def marks(group: type, path: str = "") -> Iterator[tuple[str, frozenset[Effect | Flag]]]:
    """Yield the full name, such as "model.cache.bits", and the effect and flags of each field of a group.

    Fields of the entries of a list have names such as "data.sources.path".
    """
    prefix = f"{path}." if path else ""
    yield from ((prefix + name, of_field) for name, of_field in marks_of(group).items())
    for name, kind in types_of(group).items():
        if name in added_groups(group) and not issubclass(kind, Group):
            assert issubclass(group, Extensible)
            yield from (
                (f"{prefix}{name}.{field.name}", frozenset({group._effect})) for field in dataclasses.fields(kind)
            )
        elif inner := kind if dataclasses.is_dataclass(kind) else entry_type(kind):
            yield from marks(inner, prefix + name)


def fields_with(group: type, *any_of: Effect | Flag) -> list[str]:
    """Return the full names of the fields of a group, and of the groups in it, that have any of the marks."""
    return [name for name, of_field in marks(group) if not of_field.isdisjoint(any_of)]


def alternative_of(group: Any, name: str) -> str | None:
    """Return the field that becomes None when the field `name` of a group is set to another value than None."""
    return getattr(group, "_alternatives", {}).get(name)


def without(group: type, values: Mapping[str, Any], mark: Effect | Flag) -> dict[str, Any]:
    """Return the values of a group, as `values_of` returns them, without the fields that have a mark."""
    kept = {name: value for name, value in values.items() if mark not in marks_of(group).get(name, ())}
    for name, kind in types_of(group).items():
        if dataclasses.is_dataclass(kind) and name in kept:
            kept[name] = without(kind, kept[name], mark)
        elif name in kept and (entry := entry_type(kind)):
            kept[name] = tuple(without(entry, item, mark) for item in kept[name])
    return kept


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a group, as `values_of` returns them, by full name, such as "model.cache.bits"."""
    names: dict[str, Any] = {}
    for name, value in values.items():
        names |= {f"{name}.{n}": v for n, v in flat(value).items()} if isinstance(value, Mapping) else {name: value}
    return names


def values_of(group: Any) -> dict[str, Any]:
    """Return a group as nested dictionaries of plain values and tuples, including its added groups."""
    names = [*_declared_types(type(group)), *dict(getattr(group, "extensions", ()))]
    return {name: plain(getattr(group, name)) for name in names}


def plain(value: Any) -> Any:
    """Return a value with all groups in it converted to dictionaries."""
    if dataclasses.is_dataclass(value):
        return values_of(value)
    return tuple(map(plain, value)) if isinstance(value, tuple) else value


def options(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the annotation itself."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def entry_type(annotation: Any) -> type | None:
    """Return the dataclass of the list entries if the annotation is a list of groups, else None."""
    item = get_args(annotation)[0] if get_origin(annotation) is tuple else None
    return item if dataclasses.is_dataclass(item) and isinstance(item, type) else None


def describe_type(annotation: Any) -> str:
    """Describe an annotation in words, such as "an integer or None"."""
    names = []
    for option in options(annotation):
        if get_origin(option) is Literal:
            names.append("one of " + ", ".join(repr(value) for value in get_args(option)))
        elif get_origin(option) is tuple:
            names.append("a list of " + _describe_entries(get_args(option)[0]))
        elif dataclasses.is_dataclass(option):
            names.append("a group of fields")
        else:
            words = {int: "an integer", float: "a number", bool: "true or false", str: "text", type(None): "None"}
            names.append(words[option])
    return " or ".join(names)


def _describe_entries(annotation: Any) -> str:
    """Describe the entries of a list in words, such as "integers"."""
    if get_origin(annotation) is Literal:
        return ", ".join(repr(value) for value in get_args(annotation))
    words = {int: "integers", float: "numbers", str: "texts"}
    return words.get(annotation) or getattr(annotation, "__name__", "values")


class Matched(NamedTuple):
    """The Transformer with which a recipe has matched its model."""

    num_heads: int
    num_kv_heads: int | None
    mlp_dim: int
    matched_num_kv_heads: int | None  # The model's `num_kv_heads` and `mlp_dim` after matching.
    matched_mlp_dim: int


class GroupValues(ConfigDict):
    """The values of a group that a recipe edits. Of two alternative fields, the one that is set last applies."""

    # None until `defaults_of` has set all defaults, so that a default does not set its alternative to None.
    _group: type | None = None
    matched: "Matched | None" = None  # Set by `match` of difftx/model/matching.py. It is not a field.

    def __getitem__(self, key: str) -> Any:
        if self._group and key not in self and dataclasses.is_dataclass(kind := type_of(self._group, key)):
            super().__setitem__(key, defaults_of(kind))
        return super().__getitem__(key)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if value is not None and (other := alternative_of(self._group, key)):
            super().__setitem__(other, None)


def defaults_of(group: type) -> ConfigDict:
    """Return the defaults of a group as a `ConfigDict`, which checks the types of assigned values."""
    values = GroupValues()
    defaults = {field.name: field.default for field in dataclasses.fields(group)}
    for name, annotation in types_of(group).items():
        if dataclasses.is_dataclass(annotation):
            if name in default_groups(group, {}):
                values[name] = defaults_of(annotation)  # pyrefly: ignore[bad-argument-type]
        elif defaults[name] is None:
            # A plain None would accept a value of any type.
            values[name] = placeholder(next(kind for kind in options(annotation) if kind is not type(None)))
        else:
            values[name] = plain(defaults[name])
    object.__setattr__(values, "_group", group)  # `ConfigDict` would make it a field.
    return values
