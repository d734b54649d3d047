"""Count the FLOPs of matrix products in a program's jaxpr.

XLA's cost analysis counts the body of a loop once and ignores Pallas kernels. This module walks all equations of a
jaxpr, including the bodies of `scan`, `cond`, `jit`, `checkpoint` and kernels, and multiplies a body by its number of
iterations. It counts only matrix products, because memory bandwidth limits the other operations of a decoder.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from difftx.kernels.backend import CUDNN_FORWARD, WINDOW_SCOPE, visible_keys

# Kernel (difftx/kernels/pallas_gpu*.py) → number of matrix products per head over the causal half of the T × T
# attention weights. Mosaic GPU kernels have no cost estimate, and their loop lengths are known only on the device.
MOSAIC_GPU_PRODUCTS = {"difftx_forward": 6, "difftx_dkv": 8, "difftx_dq": 6}
# The same for cuDNN's attention (JAX primitives). Forward: S = Q Kᵀ and P V. Backward: S again, dP, dV, dQ and dK.
CUDNN_PRODUCTS = {CUDNN_FORWARD: 2, "dot_product_attention_bwd_wrapper": 5}


def executed_flops(
    jaxpr: core.ClosedJaxpr | core.Jaxpr, window: int | None = None, *, only_8_bits: bool = False
) -> float:
    """Return the FLOPs that one device executes in matrix products. A multiply-add is two FLOPs.

    A conditional counts as its most expensive branch, and a loop of unknown length as one iteration. `window` is the
    attention window that an enclosing `difftx.kernels.backend.window_scope` has recorded. With `only_8_bits`, count
    only products of 8-bit operands. Attention kernels have no such products.
    """
    return sum(_equation_flops(equation, window, only_8_bits) for equation in jaxpr.eqns)


def _equation_flops(equation: core.JaxprEqn, window: int | None, only_8_bits: bool) -> float:
    name, params = equation.primitive.name, equation.params
    if named := re.search(rf"{WINDOW_SCOPE}(\d+)", str(equation.source_info.name_stack)):
        window = int(named[1])
    if name == "dot_general":
        operand: Any = equation.invars[0].aval
        return 0 if only_8_bits and operand.dtype.itemsize > 1 else _product_flops(equation)
    if only_8_bits and name in ("pallas_call", "mpmd_map", "core_map", *CUDNN_PRODUCTS):
        return 0
    if name == "pallas_call":
        return _pallas_flops(equation, window)
    if name in ("mpmd_map", "core_map"):
        kernel = params["name"]
        if kernel not in MOSAIC_GPU_PRODUCTS:
            raise ValueError(f"no FLOPs are known of the Mosaic GPU kernel {kernel!r}; add them to MOSAIC_GPU_PRODUCTS")
        return _causal_flops(equation, window, rank=5, products=MOSAIC_GPU_PRODUCTS[kernel])
    if name in CUDNN_PRODUCTS:
        return _causal_flops(equation, window, rank=4, products=CUDNN_PRODUCTS[name])
    inner = [executed_flops(jaxpr, window, only_8_bits=only_8_bits) for jaxpr in _inner_jaxprs(params)]
    if name == "cond":
        return max(inner)
    return sum(inner) * (params["length"] if name == "scan" else 1)


def _product_flops(equation: core.JaxprEqn) -> float:
    arrays: list[Any] = [v.aval for v in (*equation.invars[:2], equation.outvars[0])]
    left, right, out = arrays
    (left_contracted, right_contracted), _ = equation.params["dimension_numbers"]
    flops = 2 * out.size * math.prod(left.shape[i] for i in left_contracted)
    if out.sharding.mesh.empty:
        return flops
    # The mesh axes of the output divide the work, and so do axes that shard a contracted dimension in both operands. If
    # only one operand is sharded along a contracted dimension, JAX gathers it first.
    both = _mesh_axes(left, left_contracted) & _mesh_axes(right, right_contracted)
    axes = _mesh_axes(out, range(out.ndim)) | both
    return flops / math.prod(out.sharding.mesh.shape[axis] for axis in axes)


def _mesh_axes(array: Any, dimensions: Any) -> set[str]:
    specs = [array.sharding.spec[i] for i in dimensions]  # Entries are None, a name or a tuple of names.
    return {axis for spec in specs if spec is not None for axis in (spec if isinstance(spec, tuple) else (spec,))}


def _pallas_flops(equation: core.JaxprEqn, window: int | None) -> float:
    params: Mapping[str, Any] = equation.params
    if params["cost_estimate"] is not None:
        return params["cost_estimate"].flops
    grid = params["grid_mapping"].grid
    tile_flops = executed_flops(params["jaxpr"])
    if "splash" not in str(params.get("name") or params.get("name_and_src_info")):
        return tile_flops * math.prod(grid)
    # JAX's splash attention has a grid over all square tiles of T × T, but computes only tiles that the mask leaves.
    if window is None:
        return tile_flops * math.prod(grid) * (grid[-1] + 1) / (2 * grid[-1])
    avals: list[Any] = [v.aval for v in equation.invars]
    q, k, *_ = (a for a in avals if jnp.issubdtype(a.dtype, jnp.floating))
    side = params["grid_mapping"].block_mappings[0].block_shape[-2].block_size
    key_tiles = k.shape[-2] // side
    reach = min(key_tiles, (window - 2) // side + 2)  # Key tiles that a query tile sees, except at the start.
    return tile_flops * math.prod(q.shape[:-1]) / side * (reach - reach * (reach - 1) / (2 * key_tiles))


def _causal_flops(equation: core.JaxprEqn, window: int | None, *, rank: int, products: int) -> float:
    """Return the FLOPs of `products` matrix products over the unmasked part of T × T attention weights, for all heads.

    Without a window, the unmasked part is the causal half.
    """
    arrays: list[Any] = [v.aval for v in equation.invars]
    # Of the inputs with `rank` axes, the queries `[B, T, H, …, D]` have the largest shape. Keys may have fewer heads.
    batch, tokens, heads, *_, width = max(a.shape for a in arrays if a.ndim == rank)
    visible_pairs = batch * heads * tokens * visible_keys(tokens, window)
    return products * 2 * width * visible_pairs


def _inner_jaxprs(params: Mapping[str, Any]) -> Iterator[core.ClosedJaxpr | core.Jaxpr]:
    """Yield the jaxprs in an equation's parameters, such as the body of a loop or the branches of a conditional."""
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, (core.ClosedJaxpr, core.Jaxpr)):
                yield item
