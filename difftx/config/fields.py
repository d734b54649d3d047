"""Base classes of the config groups, and the types and rules of their fields.

Each config field is declared once: a dataclass field with a type and a default, and below it a string that explains its
meaning and unit. The type also states what a change of the field affects (`Effect`) and how other code treats the field
(`Flag`). Recipes, the command line, docs/config.md and all rules about fields use this declaration.
"""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, TypeVar, Union, dataclass_transform, get_args, get_origin, get_type_hints

from difftx.config import affects
from difftx.config.affects import Effect
from difftx.config.flag import Flag
from difftx.errors import UserError
from difftx.registry import record

GROUP = "config group"  # The kind under which `extension_of` looks up a group that an extension has added.
_find: dict[type, Callable[[str], type | None]] = {}  # Group → function that returns a group to add, given its name.
_added: dict[type, dict[str, type]] = {}  # Group → name → group that an extension has added under this name.


@dataclasses.dataclass(frozen=True)
class Rule:
    """A condition that a field's value must satisfy. `typing.Annotated` attaches it to the field's type."""

    holds: Callable[[Any], bool]
    message: str  # End of the error message, after "field=value".


_T = TypeVar("_T")
_DISTINCT = Rule(lambda entries: len(set(entries)) == len(entries), ": the entries must differ")
_AXIS_LIMIT = Rule(lambda value: value < 2**31, " must be less than 2**31, the limit for an axis of an array")

# Types with rules. Examples: `Positive[int]` is a positive integer. `Unique[tuple[int, ...]]` is a list of distinct
# integers. `NonEmptyUnique[tuple[int, ...]]` is a list of distinct integers with at least one entry.
Positive = Annotated[_T, Rule(lambda value: value > 0, " must be positive")]
NotNegative = Annotated[_T, Rule(lambda value: value >= 0, " must not be negative")]
Unique = Annotated[_T, _DISTINCT]
NonEmptyUnique = Annotated[_T, Rule(bool, ": give at least one entry"), _DISTINCT]
AxisLength = Annotated[Positive[int], _AXIS_LIMIT]
Seed = Annotated[int, Rule(lambda value: 0 <= value < 2**32, " must lie in 0 … 2**32 - 1")]
UnitClosed = Annotated[float, Rule(lambda value: 0 <= value <= 1, " must lie in 0 … 1")]
UnitHalfOpen = Annotated[float, Rule(lambda value: 0 <= value < 1, " must be at least 0 and less than 1")]
UnitOpen = Annotated[float, Rule(lambda value: 0 < value < 1, " must lie between 0 and 1")]


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Group:
    """Base class of config groups. It makes each subclass a frozen dataclass.

    `difftx/config/build.py` checks the values of single fields. A group's `__post_init__` checks fields against each
    other.
    """

    def __init_subclass__(cls):
        for name, annotation in inspect.get_annotations(cls).items():
            stated = [mark for mark in getattr(annotation, "__metadata__", ()) if isinstance(mark, Effect)]
            if len(stated) != 1 and not dataclasses.is_dataclass(annotation):
                raise TypeError(f"{cls.__name__}.{name}: state what a change of it affects, as in affects.Training[…]")
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)


class Extensible(Group):
    """Base class of groups that extensions can extend with further groups, such as `config.eval.bleu`.

    If an added group is a plain dataclass, all its fields have the effect `effect`. If it is a `Group`, its fields
    state their effects. If `chosen_by` is the name of a field, a config has only the added group that this field names.
    """

    extensions: affects.Nothing[tuple[tuple[str, Any], ...]] = ()
    """Name and value of each added group. This attribute is not a config field."""
    _effect = Effect.TRAINING
    _chosen_by = ""

    def __init_subclass__(cls, *, effect: Effect, chosen_by: str = ""):
        cls._effect, cls._chosen_by = effect, chosen_by
        super().__init_subclass__()

    def __getattr__(self, name: str) -> Any:
        for added, value in object.__getattribute__(self, "extensions"):
            if added == name:
                return value
        raise AttributeError(f"{type(self).__name__} has no field {name!r}")


def add_group(parent: type[Extensible], name: str, group: type) -> None:
    """Add the dataclass `group` to the schema, as the field `name` of the group `parent`.

    Raise `UserError` if the name is taken, or if `group` is not a frozen dataclass with defaults for all fields.
    """
    if name in types_of(parent):
        raise UserError(f"{parent.__name__} has a field {name!r} already; choose another name")
    if not (dataclasses.is_dataclass(group) and getattr(group, "__dataclass_params__").frozen):  # noqa: B009
        raise UserError(f"{group.__name__} is not a frozen dataclass; decorate it with @dataclass(frozen=True)")
    if missing := [field.name for field in dataclasses.fields(group) if field.default is dataclasses.MISSING]:
        raise UserError(f"{group.__name__}.{missing[0]} has no default; give every field a default")
    _added.setdefault(parent, {})[name] = group
    record(GROUP, f"{parent.__name__}.{name}")


def added_groups(parent: type) -> Mapping[str, type]:
    """Return the groups that extensions have added to `parent`, sorted by field name."""
    return dict(sorted(_added.get(parent, {}).items()))


def find_groups(parent: type[Extensible], find: Callable[[str], type | None]) -> None:
    """Register a function that is called with each unknown field of `parent`. It returns a group to add, or None."""
    _find[parent] = find


def type_of(group: type, name: str) -> Any:
    """Return the type of a group's field, or None if there is no such field."""
    if name not in types_of(group) and (find := _find.get(group)) and (found := find(name)):
        add_group(group, name, found)
    return types_of(group).get(name)


def default_groups(group: type, values: Mapping[str, Any]) -> list[str]:
    """Return the names of the added groups that a config with these values has."""
    others: Iterable[str] = ()
    if by := getattr(group, "_chosen_by", ""):
        chosen = str(values.get(by, getattr(group, by)))
        type_of(group, chosen)  # Add the group if it exists.
        others = added_groups(group).keys() - {chosen}
    return [name for name, kind in types_of(group).items() if dataclasses.is_dataclass(kind) and name not in others]


def types_of(group: type) -> dict[str, Any]:
    """Return the type of each field of a group, including groups that extensions have added."""
    return {**_declared_types(group), **added_groups(group)}


@functools.cache  # Evaluating 200 annotations would dominate the time to read a config.
def _declared_types(group: type) -> dict[str, Any]:
    hints = get_type_hints(group, include_extras=True)
    return {name: kind for name, kind in hints.items() if name != "extensions"}


@functools.cache
def options(annotation: Any) -> dict[Any, tuple[Rule, ...]]:
    """Return the types that a field accepts, such as `int` and `NoneType`, with the rules for each type."""
    if get_origin(annotation) is Annotated:
        outer = tuple(rule for rule in annotation.__metadata__ if isinstance(rule, Rule))
        return {kind: rules + outer for kind, rules in options(annotation.__origin__).items()}
    if get_origin(annotation) in (Union, types.UnionType):
        return {kind: rules for member in get_args(annotation) for kind, rules in options(member).items()}
    return {annotation: ()}


def entry_type(annotation: Any) -> type | None:
    """Return the dataclass of the entries if a field is a list of groups, else None."""
    kind = next(iter(options(annotation)))
    item = get_args(kind)[0] if get_origin(kind) is tuple else None
    return item if dataclasses.is_dataclass(item) and isinstance(item, type) else None


def marks_of(annotation: Any) -> frozenset[Effect | Flag]:
    """Return the effect and the flags in a field's type annotation."""
    return frozenset(mark for mark in getattr(annotation, "__metadata__", ()) if isinstance(mark, Effect | Flag))


def marks(group: type, path: str = "") -> Iterator[tuple[str, frozenset[Effect | Flag]]]:
    """Yield the full name, such as "model.cache.bits", and the effect and flags, for each field of a group.

    The entries of a list of groups share one name per field, such as "data.sources.path".
    """
    prefix = f"{path}." if path else ""
    for name, kind in types_of(group).items():
        if name in added_groups(group) and not issubclass(kind, Group):
            assert issubclass(group, Extensible)
            yield from ((f"{prefix}{name}.{f.name}", frozenset({group._effect})) for f in dataclasses.fields(kind))
            continue
        if not dataclasses.is_dataclass(kind):
            yield prefix + name, marks_of(kind)
        if inner := kind if dataclasses.is_dataclass(kind) else entry_type(kind):
            yield from marks(inner, prefix + name)


def fields_with(group: type, *any_of: Effect | Flag) -> list[str]:
    """Return the full names of all fields in a group and its subgroups that have at least one of the marks."""
    return [name for name, of_field in marks(group) if not of_field.isdisjoint(any_of)]


def without(group: type, values: Mapping[str, Any], mark: Effect | Flag) -> dict[str, Any]:
    """Remove the fields that have a mark from the result of `values_of`."""
    hints = types_of(group)
    kept = {name: value for name, value in values.items() if mark not in marks_of(hints.get(name))}
    for name, kind in hints.items():
        if dataclasses.is_dataclass(kind) and name in kept:
            kept[name] = without(kind, kept[name], mark)
        elif name in kept and (entry := entry_type(kind)):
            kept[name] = tuple(without(entry, item, mark) for item in kept[name])
    return kept


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten the result of `values_of` to a dictionary with full names such as "model.cache.bits"."""
    names: dict[str, Any] = {}
    for name, value in values.items():
        names |= {f"{name}.{n}": v for n, v in flat(value).items()} if isinstance(value, Mapping) else {name: value}
    return names


def values_of(group: Any) -> dict[str, Any]:
    """Convert a group, including added groups, to nested dictionaries of plain values and tuples."""
    names = [*_declared_types(type(group)), *dict(getattr(group, "extensions", ()))]
    return {name: plain(getattr(group, name)) for name in names}


def plain(value: Any) -> Any:
    """Convert all groups in a value to dictionaries."""
    if dataclasses.is_dataclass(value):
        return values_of(value)
    return tuple(map(plain, value)) if isinstance(value, tuple) else value
