"""The defaults of all config fields, which are the paper's 1.4B differential model, and helpers for the other recipes.

docs/config.md lists every field with its meaning and unit.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from difftx.config.recipes import default_config
from difftx.errors import did_you_mean
from difftx.model.abstract import match


class Arm(NamedTuple):
    """A model of a comparison: an architecture, and changes to its config."""

    architecture: str
    model: Mapping[str, Any] = MappingProxyType({})  # Field of the group `model` → value.
    wide_heads: bool = False  # Whether the model has half as many heads of twice the width.
    suites: tuple[str, ...] = ()  # Suites to run besides those of every arm.

    def change(self, c: ConfigDict) -> None:
        """Change a config of the arm's architecture into the config of the arm."""
        if self.wide_heads:
            c.model.num_heads //= 2
        c.model.update(self.model)


def get_config() -> ConfigDict:
    """Return a config with the default of every field."""
    return default_config()


def choose(c: ConfigDict, architecture: str, *, heads: int) -> None:
    """Change a Transformer's config into that of another architecture with as many parameters.

    Args:
        c: Config with the sizes of the Transformer; changed in place.
        architecture: A value of `model.architecture`, or "diff_fixed_lambda" for diff with λ = λ_init.
        heads: Number of heads of the Transformer.
    """
    match(c, "diff" if architecture == "diff_fixed_lambda" else architecture, heads=heads)
    if architecture == "diff_fixed_lambda":
        c.model.lambda_learned = False


def require_known(text: str, known: Collection[str], form: str) -> None:
    """Raise `ValueError` unless `text`, the argument of a recipe or a part of it, is known."""
    if text not in known:
        raise ValueError(f"{text!r} is not a valid {form}.{did_you_mean(text, known)}")
