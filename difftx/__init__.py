"""difftx: training and evaluation of Differential Transformers in JAX (arXiv 2410.05258)."""
