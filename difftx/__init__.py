"""difftx: training and evaluation of Differential Transformers in JAX (arXiv 2410.05258)."""

from pathlib import Path

# setup.py installs the top-level folder configs/ as `difftx.configs`. In a clone that folder is next to this package.
if not (Path(__file__).parent / "configs").is_dir():
    __path__.append(str(Path(__file__).parents[1]))
