"""difftx: train and evaluate Differential Transformers in JAX (arXiv 2410.05258)."""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from difftx import kernels as kernels
    from difftx.api import evaluate as evaluate
    from difftx.api import load as load
    from difftx.api import train as train
    from difftx.layer import AttentionLayer as AttentionLayer
    from difftx.layer import DiffAttention as DiffAttention

__version__ = "0.1.0"
# Public name → the module that defines it, or None if the name itself is a module of this package.
_MODULES = {
    "AttentionLayer": "difftx.layer",
    "DiffAttention": "difftx.layer",
    "evaluate": "difftx.api",
    "kernels": None,
    "load": "difftx.api",
    "train": "difftx.api",
}
__all__ = list(_MODULES)

# `difftx.configs` is the folder configs/. A wheel contains it in this package. In a clone, it is next to this package.
if not (Path(__file__).parent / "configs").is_dir():
    __path__.append(str(Path(__file__).parents[1]))


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that `import difftx` does not import JAX."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if (module := _MODULES[name]) is None:
        return importlib.import_module(f"difftx.{name}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return __all__
