"""Conversion of weights from and to other formats: `difftx convert`."""

SHARD_MIB = 4096  # Default of the largest size of a safetensors file.
