"""Weights in 8 or 4 bits, in the format "pack-quantized" of compressed-tensors, which transformers reads.

Three tensors replace a matrix `[outputs, inputs]`. `weight_packed` has int32 words of 4 or 8 consecutive inputs, the
first input in the lowest bits. A code c of b bits is stored as c + 2^(b - 1). `weight_scale` has one scale per output
and group of inputs. `weight_shape` is the shape. Codes and scales are computed as for `model.matmul` = "int8_weights"
and "int4_weights".
"""

import functools
import re
from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from difftx.model.products import group_size, groups_of
from difftx.training.checkpoint.weights import Streamed

Bits = Literal["int8", "int4"]
# Matches the weights that `model.matmul` rounds. Group 1 is the module's name. The projection to λ is not rounded.
_ROUNDED = re.compile(r"model\.layers\.\d+\.(.*(?<!lambda)_proj)\.weight")


def compress(tensors: Mapping[str, Streamed], bits: Bits) -> tuple[dict[str, Streamed], dict[str, Any]]:
    """Replace the weights of products by rounded weights. Return all tensors and config.json's quantization_config."""
    found: dict[str, Streamed] = {}
    modules_of: dict[int, set[str]] = {}  # Number of inputs that share a scale (0: all) → names of modules.
    for name, tensor in tensors.items():
        match = _ROUNDED.fullmatch(name)
        if match is None:
            found[name] = tensor
            continue
        outputs, inputs = tensor.shape
        size = group_size(inputs, jnp.dtype(bits))
        modules_of.setdefault(size if bits == "int4" else 0, set()).add(match[1])
        read = functools.lru_cache(maxsize=1)(functools.partial(_rounded, tensor, bits))
        words = -(-inputs * jnp.iinfo(bits).bits // 32)
        found |= {
            f"{name}_packed": Streamed((outputs, words), outputs, lambda _, read=read: read()[0], np.dtype(np.int32)),
            f"{name}_scale": Streamed((outputs, inputs // size), outputs, lambda _, read=read: read()[1]),
            f"{name}_shape": Streamed((2,), 2, np.array(tensor.shape, np.int64).__getitem__, np.dtype(np.int64)),
        }
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"}
    return found, config | {"config_groups": _config_groups(modules_of, bits), "ignore": ["lm_head"]}


def _rounded(tensor: Streamed, bits: Bits) -> tuple[np.ndarray, np.ndarray]:
    """Return the packed codes, int32 `[outputs, words]`, and the scales, float32 `[outputs, groups]`."""
    weight = jnp.asarray(tensor.read(slice(None)).T)
    codes, scale = groups_of(weight, 1, jnp.dtype(bits))
    width = jnp.iinfo(bits).bits
    per_word = 32 // width
    stored = np.asarray(codes.astype(jnp.int8)).reshape(weight.shape).T.astype(np.int32) + 2 ** (width - 1)
    stored = np.pad(stored, [(0, 0), (0, -stored.shape[1] % per_word)]).astype(np.uint32)
    shifted = stored.reshape(len(stored), -1, per_word) << (width * np.arange(per_word, dtype=np.uint32))
    return np.bitwise_or.reduce(shifted, axis=-1).view(np.int32), np.asarray(scale[:, 0].T, np.float32)


def _config_groups(modules_of: Mapping[int, set[str]], bits: Bits) -> dict[str, Any]:
    kind = {"num_bits": jnp.iinfo(bits).bits, "type": "int", "symmetric": True, "dynamic": False}
    return {
        f"group_{index}": {
            "targets": [f"re:.*{re.escape(module)}$" for module in sorted(modules)],
            "weights": kind | ({"strategy": "group", "group_size": size} if size else {"strategy": "channel"}),
        }
        for index, (size, modules) in enumerate(sorted(modules_of.items()))
    }
