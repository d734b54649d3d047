"""Fused differential attention for TPU: Mosaic kernels for the forward and the backward pass.

    O = (A1 - lam * A2) V,    A_m = softmax(Q_m K_m^T / sqrt(d)),    causal    (arXiv:2410.05258)

The backward pass requires O, O2 = A2 V and the two log-sum-exps L_m. It recomputes the attention weights
P_m = exp(S_m - L_m) from the logits S_m. With dP = dO V^T and delta_m = rowsum(dO * A_m V), the gradients are:

    dS1 = P1 * (dP - delta1)        dQ_m = dS_m K_m        dV = (P1 - lam * P2)^T dO
    dS2 = lam * P2 * (delta2 - dP)  dK_m = dS_m^T Q_m

dP and dV are therefore one product each. Two flash-attention calls would compute each of them twice.

Two decisions determine the grids:

* The grids do not cover the T x T square. On the host, `list_visits` lists the tiles that the causal mask and the
  window leave visible. The kernels read this list from scalar memory, so hidden tiles take no grid step. They apply a
  mask only to tiles that the diagonal, the edge of the window or a segment boundary crosses.
* dQ is a sum over keys, but dK and dV are sums over queries. If the float32 dQ of one key head fits in VMEM, one kernel
  computes all three gradients, with 20*T*T*d FLOPs per head. Longer rows take two kernels with 28*T*T*d FLOPs. Each sum
  has a fixed order in both cases, so results are reproducible bit for bit.
"""
# Axes: B = batch, T = tokens (queries and keys), H = query heads, K = key/value heads,
#   N = H / K = query heads that share one key/value head, G = 2 groups (A1 and A2), d = sub-head width,
#   E = 2d = value width, R = 5 statistics per query (`Inputs.stats`), X = T padded to whole tiles,
#   Y = X or, if rows are sharded along their tokens, the number of queries on one device

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from difftx.kernels import pallas_tpu_kernels as kernels
from difftx.kernels import target
from difftx.kernels.backend import AttentionCall, ShardedArrays, deltas, pad_to


class Tiles(NamedTuple):
    """Largest tile size, and limits for the use of VMEM in MiB."""

    max_side: int  # Largest side of a tile in tokens, a multiple of 128.
    vmem_mib: int  # VMEM that a kernel may use in total.
    dq_mib: int  # VMEM that dQ may use. If dQ needs more, two kernels compute the gradients instead of one.


# Tiles by device kind, chosen from compiled schedules (benchmarks/tpu_schedule.py) for the widths in _MEASURED_WIDTHS.
# VMEM is 64 MiB on v5p and 7x, and 128 MiB on v5e and v6e. An eighth of VMEM is left to XLA.
_DEFAULT_TILES = Tiles(512, vmem_mib=16, dq_mib=0)
_TILES = {
    "TPU v5": Tiles(512, vmem_mib=56, dq_mib=24),
    "TPU v5 lite": Tiles(512, vmem_mib=112, dq_mib=72),
    "TPU v6 lite": Tiles(512, vmem_mib=112, dq_mib=72),
    "TPU7x": Tiles(512, vmem_mib=56, dq_mib=24),
}
_MEASURED_WIDTHS = (64, 96, 128)
_SMEM_WORDS = 2**17  # Limit for visits and segment bounds, in 32-bit words: half of the 1 MiB scalar memory.


def unsupported(call: AttentionCall, max_side: int | None = None) -> str | None:
    """Return why this backend cannot serve a call, or None if it can. `forward` documents `max_side`."""
    batch, t, _, _, d = call.q.shape
    sharding = call.sharding
    if call.q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"the TPU's matrix units support bfloat16 and float32, not {call.q.dtype}"
    if d % 8 or not 8 <= d <= 128:
        return f"the width of a sub-head must be a multiple of 8 up to 128; got {d}"
    side = kernels.tile_side(t, sharding, max_side or _tiles(d).max_side)
    if max_side is not None and side == kernels.tile_side(t, sharding, _tiles(d).max_side):
        return f"rows of {t} tokens get the tiles of pallas_tpu"
    if sharding is not None and not side:
        return f"{t} tokens in {sharding.row_chunks} chunks per row leave no tile of a multiple of 128 tokens"
    tiles = pl.cdiv(t, side)
    visits = kernels.list_visits(tiles, side, call.window, sharding, keys_outer=True)
    words = visits.shape[-1] + 2 * batch * tiles
    if words > _SMEM_WORDS:
        return f"batch {batch} of {t} tokens requires {words} words of scalar memory, over {_SMEM_WORDS}"
    return None


def forward(q_BTHGd, k_BTKGd, v_BTKE, lam_BTH, segments_BT, *, window, sharding=None, max_side=None, interpret=None):
    """Return the output O [B, T, H, E] in the dtype of q, and the arrays for `backward`: O2 = A2 V and log-sum-exps.

    `max_side` is the largest side of a tile in tokens, by default the device's `Tiles.max_side`. `interpret` is False,
    True or a `pltpu.InterpretParams`. If it is None, the kernel is interpreted unless the target is a TPU.
    """
    t, d = q_BTHGd.shape[1], q_BTHGd.shape[-1]
    max_side = max_side or _tiles(d).max_side
    call = kernels.TileCall.of(q_BTHGd, k_BTKGd, segments_BT, window, sharding, max_side, keys_outer=False)
    heads, e, side = call.kv_heads * call.group, 2 * d, call.side
    out_spec = _spec(call, (side, e), tile_of="query", axis=0)
    out_shape = jax.ShapeDtypeStruct((call.batch, heads, call.y, e), call.dtype)
    lse_shape = jax.ShapeDtypeStruct((call.batch, heads, 2, call.y), jnp.float32)
    q_BHGYd, k_BKGXd, v_BKXE = _qkv(call, q_BTHGd, k_BTKGd, v_BTKE)
    lam_BH1Y = pad_to(lam_BTH.transpose(0, 2, 1)[:, :, None], call.y, axis=3)
    out_BHYE, out2_BHYE, lse_BHGY = _run(
        call,
        kernels.forward_kernel,
        "diff_attention_forward",
        kernels.Inputs(q_BHGYd, k_BKGXd, v_BKXE, lam=lam_BH1Y),
        segments_BT,
        products=6,
        out_specs=[out_spec, out_spec, _spec(call, (2, side), tile_of="query", axis=1)],
        out_shape=[out_shape, out_shape, lse_shape],
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in ((2, side), (2, side), (2, e, side))],
        interpret=interpret,
    )
    return _tokens_first(out_BHYE, t), ShardedArrays(by_head=(out2_BHYE[:, :, :t],), by_group=(lse_BHGY[..., :t],))


def backward(
    q_BTHGd,
    k_BTKGd,
    v_BTKE,
    lam_BTH,
    segments_BT,
    out_BTHE,
    saved,
    dout_BTHE,
    *,
    window,
    sharding=None,
    max_side=None,
    interpret=None,
):
    """Return the gradients of q, k and v in the dtype of q, and of lam in float32. `forward` documents the options."""
    (out2_BHTE,), (lse_BHGT,) = saved.by_head, saved.by_group
    delta1_BTH, delta2_BTH = deltas(out_BTHE, jnp.moveaxis(out2_BHTE, 1, 2), lam_BTH, dout_BTHE)
    t, d = q_BTHGd.shape[1], q_BTHGd.shape[-1]
    tiles = _tiles(d)
    max_side = max_side or tiles.max_side
    call = kernels.TileCall.of(q_BTHGd, k_BTKGd, segments_BT, window, sharding, max_side, keys_outer=True)
    per_query_BH1T = [x.transpose(0, 2, 1)[:, :, None] for x in (delta1_BTH, delta2_BTH, lam_BTH)]
    stats_BHRT = jnp.concatenate([lse_BHGT * kernels.LOG2_E, *per_query_BH1T], axis=2)
    inputs = kernels.Inputs(
        *_qkv(call, q_BTHGd, k_BTKGd, v_BTKE),
        dout=_heads_first(dout_BTHE, call.y),
        stats=pad_to(stats_BHRT, call.y, axis=3),
    )
    with_dq = _dq_bytes(call) <= tiles.dq_mib * 2**20
    dk_BKGXd, dv_BKXE, dq_BHGYd = _dkv(call, inputs, segments_BT, interpret, with_dq)
    if not with_dq:
        dq_BHGYd = _dq(dataclasses.replace(call, keys_outer=False), inputs, segments_BT, interpret)
    keys = k_BTKGd.shape[1]
    dk_BTKGd, dv_BTKE = _tokens_first(dk_BKGXd, keys), _tokens_first(dv_BKXE, keys)
    return _tokens_first(dq_BHGYd, t), dk_BTKGd, dv_BTKE, -delta2_BTH


def _dkv(call, inputs, segments_BT, interpret, with_dq):
    """Return dK, dV and dQ. If not `with_dq`, the kernel does not compute dQ, which is None."""
    side, group, d = call.side, call.group, call.d
    dq_shape = jax.ShapeDtypeStruct((call.batch, call.kv_heads, group, 2, call.y, d), call.dtype)
    dk, dv, dq = _run(
        call,
        kernels.dkv_kernel,
        "diff_attention_dqkv" if with_dq else "diff_attention_dkv",
        inputs,
        segments_BT,
        products=10 if with_dq else 8,
        out_specs=[
            _spec(call, (2, side, d), tile_of="key", axis=1),
            _spec(call, (side, 2 * d), tile_of="key", axis=0),
            _spec(call, (group, 2, side, d), tile_of="finished query", axis=2) if with_dq else None,
        ],
        out_shape=[
            *(jax.ShapeDtypeStruct(x.shape, call.dtype) for x in (inputs.k, inputs.v)),
            dq_shape if with_dq else None,
        ],
        scratch_shapes=[
            pltpu.VMEM((2, side, d), jnp.float32),
            pltpu.VMEM((side, 2 * d), jnp.float32),
            pltpu.VMEM((group, 2, call.y, d), jnp.float32) if with_dq else None,
        ],
        interpret=interpret,
    )
    return dk, dv, dq.reshape(inputs.q.shape) if with_dq else None


def _dq(call, inputs, segments_BT, interpret):
    block_shape = (2, call.side, call.d)
    return _run(
        call,
        kernels.dq_kernel,
        "diff_attention_dq",
        inputs,
        segments_BT,
        products=6,
        out_specs=_spec(call, block_shape, tile_of="query", axis=1),
        out_shape=jax.ShapeDtypeStruct(inputs.q.shape, call.dtype),
        scratch_shapes=[pltpu.VMEM(block_shape, jnp.float32)],
        interpret=interpret,
    )


def _run(call, kernel, name, inputs, segments_BT, *, products, out_specs, out_shape, scratch_shapes, interpret):
    """Run a kernel over `call.grid`.

    `products` is the number of matrix products of width d per visit, for the cost estimate. A product of width E = 2d
    counts as two.
    """
    scalars = kernels.Scalars(jnp.asarray(call.visits))
    if call.sharding is not None:
        visits = scalars.visits[call.sharding.device()]
        starts = call.sharding.starts(call.sharding.device(), call.chunk_tiles)
        offsets = jnp.stack([start - chunk * call.chunk_tiles for chunk, start in enumerate(starts)])
        scalars = scalars._replace(visits=visits, offsets=offsets)
    # The cost estimate lets XLA overlap communication with the kernel. It assumes that each array is moved once.
    logits = call.batch * call.kv_heads * call.group * call.visits.shape[-1] * call.side**2
    cost = pl.CostEstimate(
        flops=products * 2 * logits * call.d,
        transcendentals=2 * logits,  # One exponential per logit of each group.
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((inputs, out_shape))),
    )
    if call.segmented:
        segments_BX = pad_to(segments_BT, call.x, axis=1, mode="edge")
        segments_B1X = segments_BX[:, None]
        by_tile = segments_BX.reshape(call.batch * call.tiles, call.side)
        scalars = scalars._replace(low=by_tile.min(axis=1), high=by_tile.max(axis=1))
        inputs = inputs._replace(query_segments=segments_B1X, key_segments=segments_B1X)
    return pl.pallas_call(
        functools.partial(kernel, call=call),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=call.grid,
            in_specs=[_input_specs(call, inputs)],
            out_specs=out_specs,
            scratch_shapes=scratch_shapes,
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=_tiles(call.d).vmem_mib * 2**20,
        ),
        interpret=target.platform() != "tpu" if interpret is None else interpret,
        name=name,
        cost_estimate=cost,
    )(scalars, inputs)


def _spec(call, shape, *, tile_of, axis, has_heads=True):
    """Return a BlockSpec for blocks of `shape`. `axis` is indexed by the tile that `tile_of` names."""

    def index(b, kv, outer, inner, scalars):
        step, n = (outer, inner) if call.keys_outer else (inner, outer)
        visit = scalars.visits[step]
        head = kv * call.group + n if tile_of == "query" else kv
        tile = {
            "query": lambda: kernels.query_tile(visit),
            "key": lambda: kernels.key_tile(visit),
            "query in row": lambda: call.row_tile(visit, scalars.offsets),
            "finished query": lambda: call.finished_tile(visit, scalars.offsets),
        }[tile_of]()
        batch_and_head = (b, head) if has_heads else (b,)
        return (*batch_and_head, *(tile if a == axis else 0 for a in range(len(shape))))

    return pl.BlockSpec((None,) * (2 if has_heads else 1) + shape, index)


def _input_specs(call, inputs):
    side, d = call.side, call.d
    specs = kernels.Inputs(
        q=_spec(call, (2, side, d), tile_of="query", axis=1),
        k=_spec(call, (2, side, d), tile_of="key", axis=1),
        v=_spec(call, (side, 2 * d), tile_of="key", axis=0),
        lam=_spec(call, (1, side), tile_of="query", axis=1),
        dout=_spec(call, (side, 2 * d), tile_of="query", axis=0),
        stats=_spec(call, (5, side), tile_of="query", axis=1),
        query_segments=_spec(call, (1, side), tile_of="query in row", axis=1, has_heads=False),
        key_segments=_spec(call, (1, side), tile_of="key", axis=1, has_heads=False),
    )
    return kernels.Inputs(*(None if x is None else spec for spec, x in zip(specs, inputs, strict=True)))


def _qkv(call, q_BTHGd, k_BTKGd, v_BTKE):
    """Move heads before tokens, pad the rows, and multiply q by log2(e) / sqrt(d)."""
    q_BTHGd = q_BTHGd.astype(jnp.float32) * (call.scale * kernels.LOG2_E)
    q_BHGYd = _heads_first(q_BTHGd.astype(call.dtype), call.y)
    return [q_BHGYd, _heads_first(k_BTKGd, call.x), _heads_first(v_BTKE, call.x)]


def _heads_first(x, length):
    """Transpose [B, T, H, ..., W] to [B, H, ..., T, W] and pad T to `length`. XLA fuses this with preceding ops."""
    # Padding changes no result: dO is zero for padded queries, and the causal mask hides padded keys.
    return pad_to(jnp.moveaxis(x, 1, -2), length, axis=x.ndim - 2)


def _tokens_first(x, t):
    return jnp.moveaxis(x[..., :t, :], -2, 1)


def _dq_bytes(call):
    """Return the bytes of VMEM that the float32 dQ of one key head and its two output buffers need."""
    width = pl.cdiv(call.d, kernels.LANES) * kernels.LANES
    return call.group * 2 * width * (call.y * 4 + 2 * call.side * call.dtype.itemsize)


def _tiles(d):
    return _TILES.get(target.device_kind(), _DEFAULT_TILES) if d in _MEASURED_WIDTHS else _DEFAULT_TILES
