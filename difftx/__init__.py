"""difftx: training and evaluation of Differential Transformers in JAX (arXiv 2410.05258)."""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from difftx import kernels as kernels
    from difftx.layer import AttentionLayer as AttentionLayer
    from difftx.layer import DiffAttention as DiffAttention

__version__ = "0.1.0"
__all__ = ["AttentionLayer", "DiffAttention", "kernels"]

# setup.py installs the top-level folder configs/ as `difftx.configs`. In a clone that folder is next to this package.
if not (Path(__file__).parent / "configs").is_dir():
    __path__.append(str(Path(__file__).parents[1]))


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that `import difftx` does not import JAX."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "kernels":
        return importlib.import_module("difftx.kernels")
    return getattr(importlib.import_module("difftx.layer"), name)
