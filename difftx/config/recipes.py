"""Load recipes: Python files with a function `get_config` that returns a `ConfigDict`, or configs in JSON.

The recipes of difftx are in the folder configs/, the package `difftx.configs`. Users' recipes can be in any folder.
"""

import importlib
import pkgutil
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import RequiredValueError

from difftx.config import Config
from difftx.config.build import config_from_dict, defaults_of, override, parsed, set_field
from difftx.errors import UserError, did_you_mean
from difftx.json_files import read_json
from difftx.registry import import_file, one_line_errors
from difftx.storage.paths import path_of


def default_config() -> ConfigDict:
    """Return a `ConfigDict` with the default of every field. Recipes edit it."""
    return defaults_of(Config)


def load_config(spec: str, overrides: Mapping[str, Any]) -> Config:
    """Return the config of a recipe, with overrides applied.

    `spec` is `FILE.py` or the name of a recipe of difftx, such as `quickstart`. `:ARG` at its end is passed to
    `get_config`. `spec` may also be a JSON file, such as the `config.json` of a run. If a recipe derives a field from
    an overridden field by `ConfigDict.get_ref`, the derived field changes too.
    """
    if is_json(spec):
        content = Path(spec).read_bytes() if spec.startswith("/dev/") else None  # A pipe can be read only once.
        return override(config_from_dict(read_json(path_of("--config", spec), content)), overrides)
    path, argument = split_spec(spec)
    module = _import_recipe(path)
    changes = parsed(overrides)  # First, because running the recipe may take seconds.
    if not callable(getattr(module, "get_config", None)):
        raise UserError(f"--config={path}: the file has no function get_config; configs/quickstart.py is an example")
    with one_line_errors(module):
        values = module.get_config(argument) if argument else module.get_config()
        if not isinstance(values, ConfigDict):
            raise TypeError(f"get_config returned {type(values).__name__}, not a ConfigDict")
    with values.unlocked():
        for field, value in changes.items():
            set_field(values, field, value)
    try:
        return config_from_dict(values.to_dict())
    except RequiredValueError as error:
        raise UserError(f"--config={spec}: {error}; set it with --config.FIELD=value") from error


def split_spec(spec: str) -> tuple[str, str]:
    """Split `RECIPE:ARG` into the recipe's name or file and its argument, which may be ""."""
    recipe, _, argument = spec.partition(":")
    return recipe, argument


def argument_of(path: str) -> str | None:
    """Return the format of a recipe's argument, such as "{architecture}-{size}", or None if it takes no argument."""
    return None if is_json(path) else getattr(_import_recipe(path), "ARG", None)


def is_name(text: str) -> bool:
    """Return whether a recipe in a `spec` is given by its name in difftx and not as a file."""
    return "." not in text and "/" not in text


def is_json(spec: str) -> bool:
    """Return whether a `spec` is a JSON config: a .json file, or a pipe such as /dev/stdin."""
    return spec.endswith(".json") or spec.startswith("/dev/")


def recipe_names() -> list[str]:
    """Return the names of the recipes of difftx."""
    return [module.name for module in pkgutil.iter_modules(importlib.import_module("difftx.configs").__path__)]


def _import_recipe(text: str) -> types.ModuleType:
    path, names = Path(text), recipe_names()
    if is_name(text):
        if text not in names:
            raise UserError(f"--config={text}: no such recipe.{did_you_mean(text, names)}")
        return importlib.import_module(f"difftx.configs.{text}")
    if path.suffix != ".py":
        raise UserError(f"--config={text}: its name must end in .py (a recipe) or .json (a config)")
    if not path.is_file():
        hint = f" The recipe of difftx is --config={path.stem}." if path.stem in names else ""
        raise UserError(f"--config={text}: no file {text!r}.{hint}")
    return import_file(path, "--config")
