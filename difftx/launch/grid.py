"""The runs of a sweep: one per combination of the grid's values, each with a checked config and a name."""

import dataclasses
import itertools
import os
import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path

from difftx.config import Config
from difftx.config.build import annotation_of
from difftx.config.fields import marks
from difftx.config.recipes import argument_of, load_config, split_spec
from difftx.config.synonyms import field_named
from difftx.data.tokenizers import with_vocabulary
from difftx.errors import UserError, closest, did_you_mean
from difftx.training.fit import fit

# Fields that `--grid seed=…` sets together. Runs with the same seed see the data in the same order.
SEED_FIELDS = ("train.seed", "data.seed")


@dataclasses.dataclass(frozen=True)
class SweepPoint:
    """One run of a sweep."""

    name: str  # Name of the run directory.
    spec: str  # `NAME`, `FILE.py` or either with `:ARG`, for the flag --config of `difftx train`.
    overrides: Mapping[str, str]  # Field → value, for the flags --config.field.
    config: Config
    extensions: Sequence[Path] = ()  # Python files, for the flags --extension.

    def flags(self, workdir: str | os.PathLike[str]) -> list[str]:
        """Return the arguments of `difftx train` for this run in `workdir`."""
        changes = [f"--config.{field}={value}" for field, value in self.overrides.items()]
        files = [f"--extension={path}" for path in self.extensions]
        return [f"--config={self.spec}", f"--workdir={workdir}", *files, *changes]


def parse_grid(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Parse `["size=830m,1.4b", "seed=0,1"]` to `{"size": ["830m", "1.4b"], "seed": ["0", "1"]}`."""
    grid: dict[str, list[str]] = {}
    for argument in arguments:
        name, _, text = argument.partition("=")
        values = [value.strip() for value in text.split(",")]
        if not name or not all(values):
            raise UserError(f"--grid {argument!r} is not understood; it is written name=value,value")
        if name in grid or len(set(values)) < len(values):
            raise UserError(f"--grid {argument!r}: {name if name in grid else 'a value'} is given twice")
        grid[name] = values
    return grid


def make_points(
    spec: str, grid: Mapping[str, Sequence[str]], overrides: Mapping[str, str], extensions: Sequence[Path] = ()
) -> list[SweepPoint]:
    """Return a point for each combination of the grid's values. All points share the overrides and extensions.

    A name in the grid is "seed", a config field such as "train.steps", or a placeholder in the recipe's argument, such
    as "size" in "{architecture}-{size}". `spec` is `NAME` or `FILE.py`, followed by `:ARG` unless the grid sets the
    placeholders.
    """
    path, argument = split_spec(spec)
    form = argument_of(path) or ""
    slots = [slot for _, slot, _, _ in string.Formatter().parse(form) if slot]
    _check_names(path, argument, form, slots, grid)
    filled = any(slot in grid for slot in slots)

    points: list[SweepPoint] = []
    for values in itertools.product(*grid.values()):
        chosen = dict(zip(grid, values, strict=True))
        arg = form.format(**chosen) if filled else argument
        varied = {name: value for name, value in chosen.items() if name not in slots}
        changes = dict(overrides)
        for name, value in varied.items():
            for field in SEED_FIELDS if name == "seed" else (name,):
                if field in changes:
                    raise UserError(f"--grid {name}=…: {field} is set twice")
                changes[field] = value
        parts = [f"{field.rpartition('.')[2]}{value}" for field, value in varied.items()]
        if arg:
            parts.insert(0, arg)
        name = re.sub(r"[^\w.+-]+", "_", "-".join(parts))
        point_spec = f"{path}:{arg}" if arg else path
        try:
            config = fit(with_vocabulary(load_config(point_spec, changes)))
        except UserError as error:
            raise UserError(f"--grid, run {name}: {error}") from error
        if any(point.name == name for point in points):
            raise UserError(f"--grid: two runs would be named {name!r}; vary one of those fields in a sweep of its own")
        points.append(SweepPoint(name, point_spec, changes, config, extensions))
    return points


def _check_names(path: str, argument: str, form: str, slots: Sequence[str], grid: Mapping[str, Sequence[str]]) -> None:
    for name in [name for name in grid if name not in (*slots, "seed")]:
        try:
            annotation_of(name)  # Raise an error if there is no such field, including fields of architectures.
        except UserError as error:
            meant = closest(name, slots) or field_named(name) or field_named(name.rpartition(".")[2])
            fields = (field for field, _ in marks(Config))
            hint = f" Did you mean {meant!r}?" if meant else did_you_mean(name, [*slots, "seed", *fields])
            raise UserError(f"--grid {name}=…: no such name.{hint}") from error
    missing = [slot for slot in slots if slot not in grid]
    if len(missing) < len(slots):
        if argument:
            raise UserError(f"--config={path}:{argument}: the grid fills in {form!r}; leave :{argument} out")
        if missing:
            raise UserError(f"--grid: {path} is called with {form!r}; give {missing[0]}=… too")
