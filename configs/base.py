"""The defaults of all config fields, which the other recipes change: the paper's 1.4B differential model.

docs/config.md lists every field with its meaning and unit.
"""

from ml_collections import ConfigDict

from difftx.config.recipes import default_config


def get_config() -> ConfigDict:
    """Return a config with the default of every field."""
    return default_config()
