"""The defaults of all config fields, and helpers for the other recipes.

The defaults are the paper's 1.4B differential model. docs/config.md lists every field with its meaning and unit.

A recipe is a file with a function `get_config`. If the function takes an argument, the constant `ARG` states the
argument's format, such as "{architecture}-{size}". `difftx sweep --grid` fills in the names in braces.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from difftx.config.recipes import default_config
from difftx.errors import did_you_mean

# `model.vocab_size` of the tokenizer "bytes": 256 bytes and <|endoftext|>, rounded up to a multiple of 8.
BYTE_VOCABULARY = 264


class Arm(NamedTuple):
    """One of the models that a recipe compares: an architecture, and changes to its config."""

    architecture: str
    model: Mapping[str, Any] = MappingProxyType({})  # Fields of the config group `model` to change, with their values.
    wide_heads: bool = False  # Whether to halve the number of heads and double their width.
    suites: tuple[str, ...] = ()  # Evaluation suites to run in addition to the suites of all arms.

    def change(self, c: ConfigDict) -> None:
        """Apply the arm's changes to a config. The config must already have the arm's architecture."""
        if self.wide_heads:
            c.model.num_heads //= 2
            if c.model.head_dim is not None:
                c.model.head_dim *= 2
        c.model.update(self.model)
        if self.wide_heads or self.model:
            # `difftx train` and `difftx sweep` warn if a model differs in size from the Transformer in `model.matched`.
            # This arm differs from its Transformer on purpose, so turn the warning off.
            c.model.matched.num_heads = None


def get_config() -> ConfigDict:
    """Return a config with the default of every field."""
    return default_config()


def mlp_dim(d_model: int, *, multiple: int = 2) -> int:
    """Return the width of the MLP for a model width: 8/3 d_model, rounded down to a multiple of `multiple`.

    SwiGLU's three matrices then have about as many weights as the two matrices of an MLP of width 4 d_model.
    """
    return multiple * (8 * d_model // (3 * multiple))


def choose(c: ConfigDict, architecture: str, *, heads: int) -> None:
    """Change the config of a Transformer with `heads` heads to another architecture with equally many parameters.

    `architecture` is a value of `model.architecture`, or "diff_fixed_lambda" for diff with λ = λ_init.
    """
    from difftx.model.matching import match  # Import here, because it imports JAX, which takes seconds.

    match(c, "diff" if architecture == "diff_fixed_lambda" else architecture, heads=heads)
    if architecture == "diff_fixed_lambda":
        c.model.lambda_learned = False


def require_known(text: str, known: Collection[str], form: str) -> None:
    """Raise `ValueError` unless `text`, a recipe's argument or a part of it, is one of `known`."""
    if text not in known:
        raise ValueError(f"{text!r} is not a valid {form}.{did_you_mean(text, known)}")
