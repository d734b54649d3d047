"""Bodies of the TPU kernels, and the lists of tiles that their grids visit.

The kernels are flash attention with two softmaxes per head that share V. Each grid step visits one tile of logits (a
tile of keys times a tile of queries) and adds to accumulators in VMEM. A tile of logits has the shape (keys, queries),
transposed from the usual order. Vectors with one number per query (running maximum and sum, log-sum-exp, delta, lam)
then lie along the lanes of a vector register, and broadcast over keys without cost.

Callers multiply the queries by log2(e) / sqrt(d), so the kernels use exp2 instead of exp.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from difftx.kernels.context import SequenceSharding

# Axes: T = tokens (queries and keys), N = query heads that share one key/value head, d = sub-head width,
#   E = 2d = value width, X = T padded to whole tiles, Y = query tokens on one device, padded to whole tiles.
# If rows are sharded along their tokens, a call has the queries of one device (Y < X), but the keys and segment ids of
# whole rows.

LOG2_E = math.log2(math.e)
LANES = 128  # Number of lanes of a vector register. The sides of tiles are multiples of it.
HIDDEN = -1e30  # Logit of a masked key. Finite, because -inf - (-inf) is NaN for queries that have seen no key yet.

# A visit is one grid step: a query tile, a key tile and flags, packed into an int32. The flags are the lowest bits.
_QUERY_SHIFT, _KEY_SHIFT, _TILE_MASK = 19, 6, 2**13 - 1
_FIRST, _LAST = 1, 2  # First and last visit to a tile of the outer loop: clear the accumulators, write the results.
MASKED = 4  # The diagonal or the edge of the window crosses the tile, so the tile needs a mask.
_DQ_FIRST, _DQ_LAST = 8, 16  # First and last visit to a query tile, if key tiles are the outer loop.
_EMPTY = 32  # Nothing to compute: the visit only pads the list, or writes zero gradients for keys without queries.

# Dimension numbers of dot_general: A Bᵀ, A B and Aᵀ B.
_NT = (((1,), (1,)), ((), ()))
_NN = (((1,), (0,)), ((), ()))
_TN = (((0,), (0,)), ((), ()))


class Scalars(NamedTuple):
    """References in scalar memory. All kernels and index maps receive them."""

    visits: Any  # Packed visits in grid order.
    offsets: Any = None  # Per chunk of queries: tile index in the row minus tile index on the device. None: whole rows.
    low: Any = None  # Lowest segment id of each tile of each batch row. None without segment ids.
    high: Any = None  # Highest segment id of each tile of each batch row. None without segment ids.


class Inputs(NamedTuple):
    """Blocks of the current visit in VMEM. Inputs that a kernel does not use are None."""

    q: Any  # Queries of both groups, (2, queries, d).
    k: Any  # Keys of both groups, (2, keys, d).
    v: Any  # Values, (keys, E).
    lam: Any = None  # λ of each query in the forward pass, (1, queries).
    dout: Any = None  # Gradient of the output in the backward pass, (queries, E).
    stats: Any = None  # In the backward pass, (5, queries): base-2 log-sum-exps of both groups, delta1, delta2, lam.
    query_segments: Any = None  # Segment ids of the queries, (1, queries), if the call has segment ids.
    key_segments: Any = None  # Segment ids of the keys, (1, keys), if the call has segment ids.


@dataclasses.dataclass(frozen=True)
class TileCall:
    """Static parameters of a kernel call."""

    batch: int
    kv_heads: int
    group: int  # Number of query heads that share one key/value head.
    d: int  # Width of a sub-head.
    x: int  # Number of key tokens, padded to whole tiles.
    y: int  # Number of query tokens on one device, padded to whole tiles.
    side: int  # Side of a tile in tokens.
    window: int | None
    sharding: SequenceSharding | None
    segmented: bool  # Whether the call has segment ids.
    dtype: np.dtype
    keys_outer: bool  # Whether key tiles are the outer loop, as for dK and dV, which are sums over queries.

    @classmethod
    def of(cls, q_BTHGd, k_BTKGd, segments_BT, window, sharding, max_side, *, keys_outer):
        """Return the parameters of a call. Rows are split into equal tiles of at most `max_side` tokens."""
        b, _, h, _, d = q_BTHGd.shape
        t, kv_heads = k_BTKGd.shape[1:3]
        side = tile_side(t, sharding, max_side)
        tiles = pl.cdiv(t, side)
        return cls(
            batch=b,
            kv_heads=kv_heads,
            group=h // kv_heads,
            d=d,
            x=tiles * side,
            y=tiles * side if sharding is None else q_BTHGd.shape[1],
            side=side,
            window=window,
            sharding=sharding,
            segmented=segments_BT is not None,
            dtype=q_BTHGd.dtype,
            keys_outer=keys_outer,
        )

    @property
    def tiles(self):
        return self.x // self.side

    @functools.cached_property
    def visits(self):
        """The result of `list_visits` for this call: packed visits in grid order."""
        return list_visits(self.tiles, self.side, self.window, self.sharding, keys_outer=self.keys_outer)

    @property
    def grid(self):
        """Kernel grid (batch, key/value heads, query heads, visits). With `keys_outer`, the last two are swapped."""
        steps = self.visits.shape[-1]
        inner = (steps, self.group) if self.keys_outer else (self.group, steps)
        return (self.batch, self.kv_heads, *inner)

    @property
    def chunk_tiles(self):
        """Number of query tiles in each contiguous chunk of a row on this device."""
        return self.y // self.side // (1 if self.sharding is None else self.sharding.chunks)

    def row_tile(self, visit, offsets_ref):
        """Return the index of a visit's query tile within the whole row."""
        tile = query_tile(visit)
        if self.sharding is None:
            return tile
        if self.sharding.chunks == 1:
            return tile + offsets_ref[0]
        return tile + jnp.where(tile < self.chunk_tiles, offsets_ref[0], offsets_ref[1])

    def finished_tile(self, visit, offsets_ref):
        """Return the last query tile on this device whose dQ is complete after the visit's key tile, or 0.

        Key tiles must be the outer loop, so that the last visit to a query tile is the one on the diagonal.
        """
        if self.sharding is None:
            return key_tile(visit)
        finished = -1
        for chunk in range(self.sharding.chunks):
            start = offsets_ref[chunk] + chunk * self.chunk_tiles
            finished += jnp.clip(key_tile(visit) + 1 - start, 0, self.chunk_tiles)
        return jnp.maximum(finished, 0)

    @property
    def scale(self):
        return self.d**-0.5

    @property
    def dot(self):
        """`lax.dot_general` with float32 accumulation, and with full precision if the operands are float32."""
        precision = lax.Precision.HIGHEST if self.dtype == jnp.float32 else None
        return functools.partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)


def tile_side(t, sharding, max_side):
    """Return the tile side for rows of `t` tokens, a multiple of 128 up to `max_side`.

    If rows are sharded along their tokens, the side must divide the length of a chunk. Return 0 if no side does.
    """
    if sharding is None:
        # Tiles of equal size need less padding: 640 tokens become 2 tiles of 384, not 2 of 512.
        return pl.cdiv(pl.cdiv(t, pl.cdiv(t, max_side)), LANES) * LANES
    chunk = t // sharding.row_chunks
    return max((side for side in range(LANES, max_side + 1, LANES) if chunk % side == 0), default=0)


def list_visits(tiles, side, window, sharding=None, *, keys_outer):
    """List the packed visits (int32, in grid order) to all tiles that the causal mask and the window leave visible.

    If rows are sharded along their tokens, return one list per device, padded to the longest list.
    """
    if sharding is None:
        return _visits_of(np.arange(tiles), tiles, side, window, keys_outer)
    tiles_in_chunk = np.arange(tiles // sharding.row_chunks)
    rows = []
    for device in range(sharding.devices):
        row_tiles = [start + tiles_in_chunk for start in sharding.starts(device, len(tiles_in_chunk))]
        rows.append(_visits_of(np.concatenate(row_tiles), tiles, side, window, keys_outer))
    longest = max(map(len, rows))
    fillers = [np.full(longest - len(row), row[-1] & ~(2**_KEY_SHIFT - 1) | _EMPTY) for row in rows]
    return np.stack([np.concatenate(pair) for pair in zip(rows, fillers, strict=True)]).astype(np.int32)


def _visits_of(row_tiles, tiles, side, window, keys_outer):
    """Return the packed visits of one device. `row_tiles` are the row indices of its query tiles."""
    # n = index of a query tile on the device, i = its index in the row, j = index of a key tile in the row.
    n, j = (index.ravel() for index in np.indices((len(row_tiles), tiles)))
    i = row_tiles[n]
    nearest, farthest = (i - j) * side - (side - 1), (i - j) * side + side - 1
    keep = (j <= i) & (nearest < (window or math.inf))
    oldest_key = np.full(len(row_tiles), tiles)
    np.minimum.at(oldest_key, n[keep], j[keep])
    crossed = (i == j) | (farthest >= (window or math.inf))
    flags = MASKED * crossed + _DQ_FIRST * (j == oldest_key[n]) + _DQ_LAST * (i == j)
    if keys_outer:  # Visit every key tile, even if no local query attends to it: the visit writes its zero gradient.
        unseen = (n == 0) & ~np.isin(j, j[keep])
        flags, keep = np.where(unseen, _EMPTY, flags), keep | unseen
    order = np.lexsort((n, j) if keys_outer else (j, n))
    order = order[keep[order]]
    n, j, flags = n[order], j[order], flags[order]
    outer = j if keys_outer else n
    flags += _FIRST * (np.diff(outer, prepend=-1) != 0) + _LAST * (np.diff(outer, append=-1) != 0)
    return ((n << _QUERY_SHIFT) | (j << _KEY_SHIFT) | flags).astype(np.int32)


def query_tile(visit):
    """Return the index, among this device's query tiles, of a packed visit's query tile."""
    return (visit >> _QUERY_SHIFT) & _TILE_MASK


def key_tile(visit):
    """Return the index, within the whole row, of a packed visit's key tile."""
    return (visit >> _KEY_SHIFT) & _TILE_MASK


def forward_kernel(scalars, inputs, out_ref, out2_ref, lse_ref, max_ref, sum_ref, acc_ref, *, call):
    """Write O, O2 and the natural log-sum-exps of a query tile at the last visit to the tile.

    Accumulators in VMEM hold the running maximum of the base-2 logits (2, queries), the running sum of exp2
    (2, queries), and O_m^T before the division by the sum (2, E, queries).
    """
    visit = scalars.visits[pl.program_id(3)]

    @pl.when(visit & _FIRST != 0)
    def _():
        max_ref[...] = jnp.full_like(max_ref, HIDDEN)
        sum_ref[...] = jnp.zeros_like(sum_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    def tile(masked):
        # Computing both products before the softmaxes saves 15 % of the instruction bundles on v6e, none on v5p.
        logits = [call.dot(inputs.k[m], inputs.q[m], _NT) for m in range(2)]
        if masked:
            visible = _visible(call, visit, scalars, inputs)
            logits = [jnp.where(visible, s, HIDDEN) for s in logits]
        v_EX = inputs.v[...].T
        for m, s in enumerate(logits):
            row = slice(m, m + 1)
            old_max = max_ref[row]
            new_max = jnp.maximum(old_max, s.max(axis=0, keepdims=True))
            p = jnp.exp2(s - new_max)
            decay = jnp.exp2(old_max - new_max)
            max_ref[row] = new_max
            sum_ref[row] = sum_ref[row] * decay + p.sum(axis=0, keepdims=True)
            acc_ref[m] = acc_ref[m] * decay + call.dot(v_EX, p.astype(v_EX.dtype), _NN)

    _compute(call, visit, scalars, tile)

    @pl.when(visit & _LAST != 0)
    def _():
        inverse = 1.0 / sum_ref[...]
        out2_EX = acc_ref[1] * inverse[1:]
        out_EX = acc_ref[0] * inverse[:1] - inputs.lam[...] * out2_EX
        out_ref[...] = out_EX.T.astype(out_ref.dtype)
        out2_ref[...] = out2_EX.T.astype(out2_ref.dtype)
        lse_ref[...] = (max_ref[...] + jnp.log2(sum_ref[...])) * (1 / LOG2_E)


def dkv_kernel(scalars, inputs, dk_ref, dv_ref, dq_ref, dk_acc, dv_acc, dq_acc, *, call):
    """Write dK and dV of a key tile at its last visit, and dQ of a query tile at its last visit.

    `dq_ref` (N, 2, queries, d) and its accumulator (N, 2, Y, d) are None if `dq_kernel` computes dQ.
    """
    visit, n = scalars.visits[pl.program_id(2)], pl.program_id(3)
    queries = pl.ds(pl.multiple_of(query_tile(visit) * call.side, call.side), call.side)

    @pl.when((visit & _FIRST != 0) & (n == 0))
    def _():
        dk_acc[...] = jnp.zeros_like(dk_acc)
        dv_acc[...] = jnp.zeros_like(dv_acc)

    if dq_ref is not None:

        @pl.when(visit & _DQ_FIRST != 0)
        def _():
            dq_acc[n, :, queries] = jnp.zeros_like(dq_acc[n, :, queries])

    def tile(masked):
        ds, p = _logit_gradients(call, visit, scalars, inputs, masked)
        for m in range(2):
            dk_acc[m] += call.dot(ds[m], inputs.q[m], _NN)
            if dq_ref is not None:
                dq_acc[n, m, queries] += call.dot(ds[m], inputs.k[m], _TN)
        dv_acc[...] += call.dot(p, inputs.dout[...], _NN)

    _compute(call, visit, scalars, tile)

    if dq_ref is not None:

        @pl.when(visit & _DQ_LAST != 0)
        def _():
            dq_ref[n] = (dq_acc[n, :, queries] * call.scale).astype(dq_ref.dtype)

    @pl.when((visit & _LAST != 0) & (n == call.group - 1))
    def _():
        # The queries include the factor scale * log2(e). dK needs only the factor scale, so divide by log2(e).
        dk_ref[...] = (dk_acc[...] * (1 / LOG2_E)).astype(dk_ref.dtype)
        dv_ref[...] = dv_acc[...].astype(dv_ref.dtype)


def dq_kernel(scalars, inputs, dq_ref, dq_acc, *, call):
    """Write dQ of a query tile at the last visit to the tile."""
    visit = scalars.visits[pl.program_id(3)]

    @pl.when(visit & _FIRST != 0)
    def _():
        dq_acc[...] = jnp.zeros_like(dq_acc)

    def tile(masked):
        ds, _ = _logit_gradients(call, visit, scalars, inputs, masked)
        for m in range(2):
            dq_acc[m] += call.dot(ds[m], inputs.k[m], _TN)

    _compute(call, visit, scalars, tile)

    @pl.when(visit & _LAST != 0)
    def _():
        dq_ref[...] = (dq_acc[...] * call.scale).astype(dq_ref.dtype)


def _logit_gradients(call, visit, scalars, inputs, masked):
    """Return [dS1, dS2] and P1 - lam * P2, all (keys, queries) in the dtype of the operands."""
    visible = masked and _visible(call, visit, scalars, inputs)
    lse1, lse2, delta1, delta2, lam = (inputs.stats[r : r + 1] for r in range(5))
    # Computing dP between the two logit products takes 4 % fewer instruction bundles on v5p than computing it first.
    s1 = call.dot(inputs.k[0], inputs.q[0], _NT)
    dp = call.dot(inputs.v[...], inputs.dout[...], _NT)
    s2 = call.dot(inputs.k[1], inputs.q[1], _NT)
    if masked:
        s1, s2 = jnp.where(visible, s1, HIDDEN), jnp.where(visible, s2, HIDDEN)
    p1 = jnp.exp2(s1 - lse1)
    p2 = jnp.exp2(s2 - lse2) * lam
    ds = [p1 * (dp - delta1), p2 * (delta2 - dp)]
    return [x.astype(call.dtype) for x in ds], (p1 - p2).astype(call.dtype)


def _visible(call, visit, scalars, inputs):
    """Return the mask of one tile, (keys, queries)."""
    shape = (call.side, call.side)
    distance = (call.row_tile(visit, scalars.offsets) - key_tile(visit)) * call.side
    distance += lax.broadcasted_iota(jnp.int32, shape, 1)
    distance -= lax.broadcasted_iota(jnp.int32, shape, 0)
    visible = distance >= 0
    if call.window is not None:
        visible &= distance < call.window
    if call.segmented:
        keys = jnp.broadcast_to(inputs.key_segments[...], (LANES, call.side)).T[:, :1]
        visible &= keys == inputs.query_segments[...]
    return visible


def _compute(call, visit, scalars, tile):
    """Call `tile(masked)`, unless the visit is empty or its queries and keys have no segment in common."""
    masked, seen = visit & MASKED != 0, True
    if (call.visits & _EMPTY != 0).any():
        seen = visit & _EMPTY == 0
    if call.segmented:
        row = pl.program_id(0) * call.tiles
        query, key = row + call.row_tile(visit, scalars.offsets), row + key_tile(visit)
        low, high = scalars.low[query], scalars.high[query]
        seen &= (low <= scalars.high[key]) & (scalars.low[key] <= high)
        one_segment = (low == high) & (scalars.low[key] == low) & (scalars.high[key] == low)
        masked |= ~one_segment
    # Do not compile branches that no visit takes.
    if call.segmented or (call.visits & MASKED != 0).any():
        pl.when(masked & seen)(lambda: tile(True))
    if (call.visits & MASKED == 0).any() or call.segmented:
        pl.when(~masked & seen)(lambda: tile(False))
