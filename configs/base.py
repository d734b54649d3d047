"""The schema's defaults, from which the other recipes start: the paper's 1.4B differential model.

Every field with its meaning and unit: docs/config.md.
"""

from ml_collections import ConfigDict

from difftx.config.recipes import default_config


def get_config() -> ConfigDict:
    """Return the config with every field."""
    return default_config()
