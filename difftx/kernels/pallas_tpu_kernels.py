"""Kernel bodies of `pallas_tpu`, and the lists of score tiles that their grids visit.

Score tiles have the shape (keys, queries). Per-query values (running maximum and sum, log-sum-exp,
delta, lam) are then rows of lanes, which broadcast without cost. Logits are in base 2, because q comes
multiplied by log2(e) / sqrt(D).
"""

import dataclasses
import functools
import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from difftx.kernels.context import SequenceSharding

# T = tokens (queries and keys), N = query heads that share one key/value head, D = sub-head width,
# E = 2D = value width, X = T padded to whole tiles, Y = X or, where rows are sharded, the number of queries
# on one device. In `_visits_of`, i = index of a query tile in the row, j = index of a key tile in the row,
# n = index of a query tile on the device.
#
# The first four references of every kernel are in scalar memory:
#   visits_ref         packed visits
#   offsets_ref        per chunk of queries: index of a tile in the row minus its index on the device
#                      (None if rows are whole)
#   low_ref, high_ref  lowest and highest segment id of each tile of each batch row (None without segments)
#
# If rows are sharded, queries are those of one device, and keys and segment ids cover whole rows.

LOG2_E = math.log2(math.e)
LANES = 128
HIDDEN = -1e30  # finite, so that queries without a visible key so far do not compute inf - inf

# A visit is the pair of a query tile and a key tile, packed into an int32: query tile, key tile, flags.
_QUERY_SHIFT, _KEY_SHIFT, _TILE_MASK = 19, 6, 2**13 - 1
_FIRST, _LAST = 1, 2  # flags: first and last of the visits that share one accumulator
MASKED = 4  # flag: the diagonal or the edge of the window crosses the tile
_DQ_FIRST, _DQ_LAST = 8, 16  # flags: first and last visit to one query tile, if keys are the outer loop
_EMPTY = 32  # flag: nothing to compute, for padding or for a key tile that no query of the device sees

# Dimension numbers of dot_general: contract last with last, last with first, first with first axis.
_NT = (((1,), (1,)), ((), ()))
_NN = (((1,), (0,)), ((), ()))
_TN = (((0,), (0,)), ((), ()))


@dataclasses.dataclass(frozen=True)
class TileCall:
    """Static parameters of a kernel call, known while JAX traces it."""

    batch: int
    kv_heads: int
    group: int  # N
    d: int
    x: int  # X
    y: int  # Y
    block: int  # side of a tile in tokens
    window: int | None
    sharding: SequenceSharding | None
    segmented: bool  # whether the call has segment ids
    dtype: np.dtype
    visits: np.ndarray  # packed visits in grid order, int32; if rows are sharded, one row per device

    @classmethod
    def of(cls, q_BTHGD, k_BTKGD, segment_ids_BT, window, sharding, side, *, keys_outer):
        """Return the parameters of a call, with T split into equal tiles of at most `side` tokens."""
        b, _, h, _, d = q_BTHGD.shape
        t, kv_heads = k_BTKGD.shape[1:3]
        block = block_tokens(t, sharding, side)
        tiles = pl.cdiv(t, block)
        return cls(
            batch=b,
            kv_heads=kv_heads,
            group=h // kv_heads,
            d=d,
            x=tiles * block,
            y=tiles * block if sharding is None else q_BTHGD.shape[1],
            block=block,
            window=window,
            sharding=sharding,
            segmented=segment_ids_BT is not None,
            dtype=q_BTHGD.dtype,
            visits=list_visits(tiles, block, window, sharding, keys_outer=keys_outer),
        )

    @property
    def tiles(self):
        """Number of tiles along T."""
        return self.x // self.block

    def with_queries_outer(self):
        """Return this call with its visits in the order of `dq_kernel`, queries in the outer loop."""
        visits = list_visits(self.tiles, self.block, self.window, self.sharding, keys_outer=False)
        return dataclasses.replace(self, visits=visits)

    @property
    def steps(self):
        """Number of visits per device."""
        return self.visits.shape[-1]

    @property
    def chunk_tiles(self):
        """Number of query tiles in a contiguous chunk of the row."""
        return self.y // self.block // (1 if self.sharding is None else self.sharding.chunks)

    def place(self, visit, offsets_ref):
        """Return the index in the row of a visit's query tile."""
        tile = query_tile(visit)
        if self.sharding is None:
            return tile
        if self.sharding.chunks == 1:
            return tile + offsets_ref[0]
        return tile + jnp.where(tile < self.chunk_tiles, offsets_ref[0], offsets_ref[1])

    def own_tile(self, visit, offsets_ref):
        """Return the latest query tile on the device whose visits end at or before the visit's key tile, or 0.

        Visits must have keys in the outer loop. A query tile's last visit is the one on the diagonal.
        """
        if self.sharding is None:
            return key_tile(visit)
        own = -1
        for chunk in range(self.sharding.chunks):
            start = offsets_ref[chunk] + chunk * self.chunk_tiles
            own += jnp.clip(key_tile(visit) + 1 - start, 0, self.chunk_tiles)
        return jnp.maximum(own, 0)

    @property
    def scale(self):
        """1 / sqrt(D)."""
        return self.d**-0.5

    @property
    def dot(self):
        """`lax.dot_general` with float32 accumulation, and full precision for float32 operands."""
        precision = lax.Precision.HIGHEST if self.dtype == jnp.float32 else None
        return functools.partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)


def block_tokens(t, sharding, side):
    """Return the number of tokens in a tile, a multiple of 128.

    If rows are sharded, the number divides a chunk. It is 0 if no multiple of 128 up to `side` does.
    """
    if sharding is None:
        # Equal tiles need less padding: 640 tokens become 2 tiles of 384, not 2 of 512.
        return pl.cdiv(pl.cdiv(t, pl.cdiv(t, side)), LANES) * LANES
    chunk = t // (sharding.devices * sharding.chunks)
    return max((block for block in range(LANES, side + 1, LANES) if chunk % block == 0), default=0)


def list_visits(tiles, block, window, sharding=None, *, keys_outer):
    """Return the packed visits to all tiles that causality and the window leave, in grid order.

    If rows are sharded, the list has one row per device, padded to the longest.
    """
    if sharding is None:
        return _visits_of(np.arange(tiles), tiles, block, window, keys_outer)
    of_chunk = np.arange(tiles // (sharding.devices * sharding.chunks))
    rows = []
    for device in range(sharding.devices):
        places = [start + of_chunk for start in sharding.starts(device, len(of_chunk))]
        rows.append(_visits_of(np.concatenate(places), tiles, block, window, keys_outer))
    longest = max(map(len, rows))
    fillers = [np.full(longest - len(row), row[-1] & ~(2**_KEY_SHIFT - 1) | _EMPTY) for row in rows]
    return np.stack([np.concatenate(pair) for pair in zip(rows, fillers, strict=True)]).astype(np.int32)


def _visits_of(places, tiles, block, window, keys_outer):
    """Return the packed visits for the query tiles whose indices in the row are `places`."""
    n, j = (index.ravel() for index in np.indices((len(places), tiles)))
    i = places[n]
    nearest, farthest = (i - j) * block - (block - 1), (i - j) * block + block - 1
    keep = (j <= i) & (nearest < (window or math.inf))
    oldest_key = np.full(len(places), tiles)
    np.minimum.at(oldest_key, n[keep], j[keep])
    crossed = (i == j) | (farthest >= (window or math.inf))
    flags = MASKED * crossed + _DQ_FIRST * (j == oldest_key[n]) + _DQ_LAST * (i == j)
    if keys_outer:  # Keys that no query of the device sees need a visit that writes their zero gradients.
        unseen = (n == 0) & ~np.isin(j, j[keep])
        flags, keep = np.where(unseen, _EMPTY, flags), keep | unseen
    order = np.lexsort((n, j) if keys_outer else (j, n))
    order = order[keep[order]]
    n, j, flags = n[order], j[order], flags[order]
    outer = j if keys_outer else n
    flags += _FIRST * (np.diff(outer, prepend=-1) != 0) + _LAST * (np.diff(outer, append=-1) != 0)
    return ((n << _QUERY_SHIFT) | (j << _KEY_SHIFT) | flags).astype(np.int32)


def query_tile(visit):
    """Return the query tile of a packed visit, as an index on the device."""
    return (visit >> _QUERY_SHIFT) & _TILE_MASK


def key_tile(visit):
    """Return the key tile of a packed visit, as an index in the row."""
    return (visit >> _KEY_SHIFT) & _TILE_MASK


def forward_kernel(
    visits_ref,
    offsets_ref,
    low_ref,
    high_ref,
    q_ref,
    k_ref,
    v_ref,
    lam_ref,
    query_segment_ref,
    key_segment_ref,
    out_ref,
    out2_ref,
    lse_ref,
    max_ref,  # (2, queries) running maximum, in base-2 logits
    sum_ref,  # (2, queries) running sum of exp2
    acc_ref,  # (2, E, queries) O_m^T before the division by the sum
    *,
    call,
):
    """Write O, O2 and the natural log-sum-exps of a query tile at the last visit to the tile."""
    visit = visits_ref[pl.program_id(3)]

    @pl.when(visit & _FIRST != 0)
    def _():
        max_ref[...] = jnp.full_like(max_ref, HIDDEN)
        sum_ref[...] = jnp.zeros_like(sum_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    def tile(masked):
        # Both products run before either softmax: 15 % fewer instruction bundles on v6e, as many on v5p.
        logits = [call.dot(k_ref[m], q_ref[m], _NT) for m in range(2)]
        if masked:
            visible = _visible(call, visit, offsets_ref, query_segment_ref, key_segment_ref)
            logits = [jnp.where(visible, s, HIDDEN) for s in logits]
        v_EX = v_ref[...].T
        for m, s in enumerate(logits):
            row = slice(m, m + 1)
            old_max = max_ref[row]
            new_max = jnp.maximum(old_max, s.max(axis=0, keepdims=True))
            p = jnp.exp2(s - new_max)
            decay = jnp.exp2(old_max - new_max)
            max_ref[row] = new_max
            sum_ref[row] = sum_ref[row] * decay + p.sum(axis=0, keepdims=True)
            acc_ref[m] = acc_ref[m] * decay + call.dot(v_EX, p.astype(v_EX.dtype), _NN)

    _run(call, visit, offsets_ref, low_ref, high_ref, tile)

    @pl.when(visit & _LAST != 0)
    def _():
        inverse = 1.0 / sum_ref[...]
        out2_EX = acc_ref[1] * inverse[1:]
        out_EX = acc_ref[0] * inverse[:1] - lam_ref[...] * out2_EX
        out_ref[...] = out_EX.T.astype(out_ref.dtype)
        out2_ref[...] = out2_EX.T.astype(out2_ref.dtype)
        lse_ref[...] = (max_ref[...] + jnp.log2(sum_ref[...])) * (1 / LOG2_E)


def dkv_kernel(
    visits_ref,
    offsets_ref,
    low_ref,
    high_ref,
    q_ref,
    k_ref,
    v_ref,
    dout_ref,
    rows_ref,
    query_segment_ref,
    key_segment_ref,
    dk_ref,
    dv_ref,
    dq_ref,  # (N, 2, queries, D), or None if `dq_kernel` computes dQ
    dk_acc,
    dv_acc,
    dq_acc,  # (N, 2, Y, D), or None
    *,
    call,
):
    """Write dK and dV of a key tile at its last visit and, unless dq_ref is None, dQ of a query tile at its last."""
    visit, n = visits_ref[pl.program_id(2)], pl.program_id(3)
    queries = pl.ds(pl.multiple_of(query_tile(visit) * call.block, call.block), call.block)

    @pl.when((visit & _FIRST != 0) & (n == 0))
    def _():
        dk_acc[...] = jnp.zeros_like(dk_acc)
        dv_acc[...] = jnp.zeros_like(dv_acc)

    if dq_ref is not None:

        @pl.when(visit & _DQ_FIRST != 0)
        def _():
            dq_acc[n, :, queries] = jnp.zeros_like(dq_acc[n, :, queries])

    def tile(masked):
        visible = masked and _visible(call, visit, offsets_ref, query_segment_ref, key_segment_ref)
        ds, p = _score_gradients(call, q_ref, k_ref, v_ref, dout_ref, rows_ref, visible)
        for m in range(2):
            dk_acc[m] += call.dot(ds[m], q_ref[m], _NN)
            if dq_ref is not None:
                dq_acc[n, m, queries] += call.dot(ds[m], k_ref[m], _TN)
        dv_acc[...] += call.dot(p, dout_ref[...], _NN)

    _run(call, visit, offsets_ref, low_ref, high_ref, tile)

    if dq_ref is not None:

        @pl.when(visit & _DQ_LAST != 0)
        def _():
            dq_ref[n] = (dq_acc[n, :, queries] * call.scale).astype(dq_ref.dtype)

    @pl.when((visit & _LAST != 0) & (n == call.group - 1))
    def _():
        # q_ref is multiplied by scale * log2(e). dK needs the factor scale, so only log2(e) is divided out.
        dk_ref[...] = (dk_acc[...] * (1 / LOG2_E)).astype(dk_ref.dtype)
        dv_ref[...] = dv_acc[...].astype(dv_ref.dtype)


def dq_kernel(
    visits_ref,
    offsets_ref,
    low_ref,
    high_ref,
    q_ref,
    k_ref,
    v_ref,
    dout_ref,
    rows_ref,
    query_segment_ref,
    key_segment_ref,
    dq_ref,
    dq_acc,
    *,
    call,
):
    """Write dQ of a query tile at the last visit to the tile."""
    visit = visits_ref[pl.program_id(3)]

    @pl.when(visit & _FIRST != 0)
    def _():
        dq_acc[...] = jnp.zeros_like(dq_acc)

    def tile(masked):
        visible = masked and _visible(call, visit, offsets_ref, query_segment_ref, key_segment_ref)
        ds, _ = _score_gradients(call, q_ref, k_ref, v_ref, dout_ref, rows_ref, visible)
        for m in range(2):
            dq_acc[m] += call.dot(ds[m], k_ref[m], _TN)

    _run(call, visit, offsets_ref, low_ref, high_ref, tile)

    @pl.when(visit & _LAST != 0)
    def _():
        dq_ref[...] = (dq_acc[...] * call.scale).astype(dq_ref.dtype)


def _score_gradients(call, q_ref, k_ref, v_ref, dout_ref, rows_ref, visible):
    """Return [dS1, dS2] and P1 - lam * P2, all (keys, queries) in the dtype of the operands."""
    lse1, lse2, delta1, delta2, lam = (rows_ref[r : r + 1] for r in range(5))
    # dP is computed between the two logits: 4 % fewer instruction bundles on v5p than before both.
    s1 = call.dot(k_ref[0], q_ref[0], _NT)
    dp = call.dot(v_ref[...], dout_ref[...], _NT)
    s2 = call.dot(k_ref[1], q_ref[1], _NT)
    if visible is not False:
        s1, s2 = jnp.where(visible, s1, HIDDEN), jnp.where(visible, s2, HIDDEN)
    p1 = jnp.exp2(s1 - lse1)
    p2 = jnp.exp2(s2 - lse2) * lam
    ds = [p1 * (dp - delta1), p2 * (delta2 - dp)]
    return [x.astype(call.dtype) for x in ds], (p1 - p2).astype(call.dtype)


def _visible(call, visit, offsets_ref, query_segment_ref, key_segment_ref):
    """Return the (keys, queries) mask of one tile."""
    shape = (call.block, call.block)
    first = (call.place(visit, offsets_ref) - key_tile(visit)) * call.block
    distance = first + lax.broadcasted_iota(jnp.int32, shape, 1)
    distance -= lax.broadcasted_iota(jnp.int32, shape, 0)
    visible = distance >= 0
    if call.window is not None:
        visible &= distance < call.window
    if call.segmented:
        keys = jnp.broadcast_to(key_segment_ref[...], (LANES, call.block)).T[:, :1]
        visible &= keys == query_segment_ref[...]
    return visible


def _run(call, visit, offsets_ref, low_ref, high_ref, tile):
    """Call `tile` for this visit, with a mask if an edge crosses the tile.

    The call is skipped for empty visits, and for tiles whose queries and keys have no segment in common.
    """
    masked, seen = visit & MASKED != 0, True
    if (call.visits & _EMPTY != 0).any():
        seen = visit & _EMPTY == 0
    if call.segmented:
        row = pl.program_id(0) * call.tiles
        query, key = row + call.place(visit, offsets_ref), row + key_tile(visit)
        low, high = low_ref[query], high_ref[query]
        seen &= (low <= high_ref[key]) & (low_ref[key] <= high)
        one_segment = (low == high) & (low_ref[key] == low) & (high_ref[key] == low)
        masked |= ~one_segment
    # Branches that no visit takes are not compiled.
    if call.segmented or (call.visits & MASKED != 0).any():
        pl.when(masked & seen)(lambda: tile(True))
    if (call.visits & MASKED == 0).any() or call.segmented:
        pl.when(~masked & seen)(lambda: tile(False))
