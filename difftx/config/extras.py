"""Checks of optional packages, before any slow import. pyproject.toml lists them as extras."""

from collections.abc import Iterable

from difftx.config import Config
from difftx.config.suites import SUITES
from difftx.errors import UserError, require_extra

# Modules of the extra "eval" that a suite requires.
SUITE_MODULES = {"harness": ("lm_eval", "datasets"), "math": ("math_verify",)}


def check_suites(names: Iterable[str]) -> None:
    """Raise `UserError` if there is no such suite, or if a module that it requires is not installed."""
    names = list(names)
    SUITES.check(names)
    for name in names:
        for module in SUITE_MODULES.get(name, ()):
            require_extra(module, "eval")


def check_extras(config: Config) -> None:
    """Raise `UserError` if a training with this config requires a module that is not installed."""
    check_suites(config.eval.suites)
    if (project := config.logging.wandb_project) is not None:
        try:
            require_extra("wandb", "wandb")
        except UserError as error:
            raise UserError(f"logging.wandb_project={project!r}: {error}; or set it to none") from error
