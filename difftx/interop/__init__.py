"""Weights of other formats: `difftx convert`."""
