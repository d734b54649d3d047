"""FLOPs of the matrix products in a traced program, counted in its jaxpr.

XLA's cost analysis counts the body of a loop once and ignores Pallas kernels. This module walks the equations of a
jaxpr and of the jaxprs in their parameters (the bodies of `scan`, `cond`, `jit`, `checkpoint` and kernels), and
multiplies a body by its number of iterations. It counts matrix products only, because memory bandwidth, not arithmetic,
bounds the other operations of a decoder.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from jax.extend import core

# Kernel (difftx/kernels/pallas_gpu*.py) → number of matrix products over the causal half of the T × T attention weights
# of a head. Mosaic GPU kernels carry no cost estimate, and the lengths of their loops are known only on the device.
MOSAIC_GPU_PRODUCTS = {"difftx_forward": 6, "difftx_dkv": 8, "difftx_dq": 6}
# The same for JAX's primitives of cuDNN's attention. Forward: S = Q Kᵀ and P V. Backward: S again, dP, dV, dQ and dK.
CUDNN_PRODUCTS = {"dot_product_attention_fwd_wrapper": 2, "dot_product_attention_bwd_wrapper": 5}


def executed_flops(jaxpr: core.ClosedJaxpr | core.Jaxpr) -> float:
    """Return the FLOPs that one device executes in matrix products, where a multiply-add is two FLOPs.

    A conditional counts as its most expensive branch, and a loop of unknown length as one iteration.
    """
    return sum(map(_equation_flops, jaxpr.eqns))


def _equation_flops(equation: core.JaxprEqn) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return _product_flops(equation)
    if name == "pallas_call":
        return _pallas_flops(params)
    if name in ("mpmd_map", "core_map"):
        kernel = params["name"]
        if kernel not in MOSAIC_GPU_PRODUCTS:
            raise ValueError(f"no FLOPs are known of the Mosaic GPU kernel {kernel!r}; add them to MOSAIC_GPU_PRODUCTS")
        return _causal_flops(equation, rank=5, products=MOSAIC_GPU_PRODUCTS[kernel])
    if name in CUDNN_PRODUCTS:
        return _causal_flops(equation, rank=4, products=CUDNN_PRODUCTS[name])
    inner = [executed_flops(jaxpr) for jaxpr in _inner_jaxprs(params)]
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
    # A device computes its shard of the output from its shards of the contracted dimensions. A contracted dimension
    # that is sharded in only one operand is gathered first, so its mesh axis does not divide the work.
    both = _mesh_axes(left, left_contracted) & _mesh_axes(right, right_contracted)
    axes = _mesh_axes(out, range(out.ndim)) | both
    return flops / math.prod(out.sharding.mesh.shape[axis] for axis in axes)


def _mesh_axes(array: Any, dimensions: Any) -> set[str]:
    specs = [array.sharding.spec[i] for i in dimensions]  # Each is None, a name or a tuple of names.
    return {axis for spec in specs if spec is not None for axis in (spec if isinstance(spec, tuple) else (spec,))}


def _pallas_flops(params: Mapping[str, Any]) -> float:
    if params["cost_estimate"] is not None:
        return params["cost_estimate"].flops
    grid = params["grid_mapping"].grid
    flops = executed_flops(params["jaxpr"]) * math.prod(grid)
    # JAX's splash attention visits all square tiles of T × T, but computes only the tiles that the causal mask leaves.
    name = str(params.get("name") or params.get("name_and_src_info"))
    return flops * (grid[-1] + 1) / (2 * grid[-1]) if "splash" in name else flops


def _causal_flops(equation: core.JaxprEqn, *, rank: int, products: int) -> float:
    """Return the FLOPs of `products` matrix products over the causal half of T × T attention weights, for all heads."""
    arrays: list[Any] = [v.aval for v in equation.invars]
    # The queries, `[B, T, H, …, D]`, have the largest shape with `rank` axes, because keys may have fewer heads.
    batch, tokens, heads, *_, width = max(a.shape for a in arrays if a.ndim == rank)
    return products * batch * heads * tokens**2 * width


def _inner_jaxprs(params: Mapping[str, Any]) -> Iterator[core.ClosedJaxpr | core.Jaxpr]:
    """Yield the jaxprs in an equation's parameters, such as the body of a loop or the branches of a conditional."""
    for value in params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, (core.ClosedJaxpr, core.Jaxpr)):
                yield item
