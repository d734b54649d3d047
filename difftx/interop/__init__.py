"""Convert weights from and to other formats: `difftx convert`."""

SHARD_MIB = 4096  # Default limit for the size of a safetensors file.
