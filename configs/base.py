"""The defaults of all config fields, which the other recipes change: the paper's 1.4B differential model.

docs/config.md lists every field with its meaning and unit.
"""

from collections.abc import Collection

from ml_collections import ConfigDict

from difftx.config.recipes import default_config
from difftx.errors import did_you_mean


def get_config() -> ConfigDict:
    """Return a config with the default of every field."""
    return default_config()


def require_known(text: str, known: Collection[str], form: str) -> None:
    """Raise `ValueError` unless `text`, the argument of a recipe or a part of it, is known."""
    if text not in known:
        raise ValueError(f"{text!r} is not a valid {form}.{did_you_mean(text, known)}")
