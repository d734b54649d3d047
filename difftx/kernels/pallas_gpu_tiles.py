"""Shared parts of the Mosaic GPU kernels: tile sizes, memory layout, tile ranges and the mask.

In every kernel, a CTA has three warpgroups. Warpgroups 0 and 1 compute one softmax each. Warpgroup 2, the producer,
loads their tiles by TMA. A buffer X has two barriers: X_ready tells its readers that it is filled, and X_free tells its
writer that it may be filled again.
"""
# Axes: B = batch, T = query tokens = key tokens, padded to whole tiles, N = T // TILE = tiles,
#   P = TILE = positions in a tile, X = marks of a position: its index in the row and, if there are segments, segment id

import collections
import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm, vector

from difftx.kernels import target

TILE = 64  # Tokens in a tile. One wgmma computes 64 rows, and 64 values in bfloat16 fill a swizzled row of 128 bytes.
PAIR = 2  # CTAs per cluster in the forward and the dQ kernel. The two query tiles share the loads of K and V.
GROUPS = 2  # Number of groups of queries and keys. Each group has its own softmax.
PRODUCER = 2  # Index of the producer warpgroup.
WARPGROUPS = 3  # Warpgroups per CTA. A fourth would limit each thread to 128 registers at the start of the kernel.
REGISTERS_AT_ENTRY = 168  # Registers per thread at the start: 64 Ki over 384 threads, rounded down to a multiple of 8.

HEAD_WIDTHS = (32, 64, 96, 128)  # Supported values of d. tests/compile/gpu_compile_test.py compiles each of them.

# Limit for the arrays that concurrent CTAs read, so that they stay in the 50 MB L2. FlashAttention-3 uses the same.
L2_BYTES = 32 * 2**20

# The X_free barrier for a buffer that both CTAs of a pair fill. It completes when both CTAs have read their buffers.
PairBarrier = functools.partial(plgpu.ClusterBarrier, collective_axes=("pair",))

LOG2_E = 1.4426950408889634
# MASKED replaces masked logits. LOWEST is the initial value of a row's running maximum. LOWEST is below every real
# logit, but far above MASKED, so masked keys contribute exp2(MASKED - LOWEST) = 0 to rows that have seen no key yet.
# With MASKED as the initial value, exp2 could overflow: a fused multiply-add rounds only once, so MASKED·scale minus
# its rounded value can be 1e21.
MASKED = -1e30
LOWEST = -1e20

POSITION, SEGMENT = 0, 1  # Indices along X in the marks [B, X, T], from which the kernels compute the mask.

MATRIX = plgpu.Layout.WGMMA  # Register layout of a tile in a warpgroup.
ROWS = MATRIX.reduce(1)  # Register layout of a [TILE] vector with one value per row of a tile.
COLUMNS = MATRIX.reduce(0)  # Register layout of a [TILE] vector with one value per column of a tile.


@dataclasses.dataclass(frozen=True)
class Registers:
    """Registers per thread for each kind of warpgroup, chosen so that ptxas 13.0 spills none at d = 128.

    The warpgroups divide the registers that the CTA has at its start. If they request more, the last warpgroup waits
    forever. Neither the interpreter nor ptxas detects this.
    """

    softmax: int  # In each of the two softmax warpgroups.
    producer: int

    def __post_init__(self):
        total, available = GROUPS * self.softmax + self.producer, WARPGROUPS * REGISTERS_AT_ENTRY
        assert total <= available, f"{self}: the counts of {WARPGROUPS} warpgroups sum to {total} > {available}"


def set_registers(count):
    """Change the number of registers per thread of this warpgroup from REGISTERS_AT_ENTRY to `count`."""
    plgpu.set_max_registers(count, action="increase" if count > REGISTERS_AT_ENTRY else "decrease")


def buffer(shape, dtype):
    """Return a buffer in shared memory with the tiled and swizzled layout that TMA writes and wgmma reads."""
    itemsize = jnp.dtype(dtype).itemsize
    # 96 bf16 columns fill one and a half 128-byte rows, but exactly three 64-byte rows.
    swizzle = 128 if shape[-1] * itemsize % 128 == 0 else 64
    tiling = plgpu.TilingTransform((8, swizzle // itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def exchange(shape, dtype):
    """Return a buffer in shared memory for tiles that pass between warpgroups in the layout MATRIX.

    TMA and wgmma must not use it. A warp moves 8 x 8 values at a time, and these are contiguous here. There are no bank
    conflicts, and a thread needs only one address register, since its addresses differ by constants.
    """
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, 8)),))


def rows_of(tile):
    """Return the slice of a sequence that the tile with index `tile` covers."""
    return pl.ds(tile * TILE, TILE)


def product(a, b_smem):
    """Multiply a tile (in shared memory or registers) by a tile in shared memory. Return float32 in registers."""

    def run(accumulator):
        plgpu.wgmma(accumulator, a, b_smem)
        return accumulator[...]

    return pl.run_scoped(run, plgpu.ACC((a.shape[0], b_smem.shape[1]), jnp.float32))


def to_registers(buffer_smem, interpret):
    """Load a tile into registers, for use as the left operand of many products.

    The interpreter requires operands in shared memory, so for the interpreter return the buffer itself.
    """
    return buffer_smem if interpret else plgpu.load(buffer_smem, layout=MATRIX)


def as_operand(values, staging_smem, index):
    """Return values in registers as the left operand of wgmma.

    The interpreter requires operands in shared memory, so the values are copied to `staging_smem` at `index`. In
    compiled kernels, `staging_smem` is None.
    """
    if staging_smem is None:
        return values
    staging_smem[index] = values
    plgpu.commit_smem()
    return staging_smem.at[index]


def write(values, buffer_smem, gmem):
    """Start an asynchronous copy of values from registers to global memory, through a buffer in shared memory."""
    buffer_smem[...] = values.astype(buffer_smem.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer_smem, gmem)


def across(row_values, like):
    """Broadcast a ROWS vector over the columns of `like`."""
    return lax.broadcast_in_dim(row_values, like.shape, [0])


def down(column_values, like):
    """Broadcast a COLUMNS vector over the rows of `like`."""
    return lax.broadcast_in_dim(column_values, like.shape, [1])


@plgpu.inline_mgpu(arg_types=(ROWS,), return_type=plgpu.ShapeDtypeStruct((), np.dtype(bool), plgpu.Layout.WG_SPLAT))
def _any_in_warp(_, rows):
    """Return whether any row of this warp is true. The result may differ between the warps of a warpgroup."""
    value = functools.reduce(arith.ori, rows.registers.flat)
    if isinstance(value.type, ir.VectorType):
        value = vector.extract(value, [], [0])
    all_lanes = arith.constant(ir.IntegerType.get_signless(32), 0xFFFFFFFF)
    return mgpu.FragmentedArray.splat(nvvm.vote_sync(all_lanes, value, "any"), (), is_signed=False)


def any_in_warp(rows, interpret):
    """Return whether any row of this warp is true. The interpreter has no warps, so it tests all rows of the tile."""
    return rows.any() if interpret else _any_in_warp(rows)


def arrive_if(condition, barrier):
    """Arrive at a barrier if a later step waits for it (`condition`). A kernel must not end with pending arrivals."""
    pl.when(condition)(lambda: plgpu.barrier_arrive(barrier))


def at_least_one(count):
    """Return max(count, 1). ptxas would spill the accumulators of a loop that may run zero times."""
    return lax.max(count, 1)


def load_rows(ref):
    """Load a [TILE] vector with one value per row of a tile from global memory into registers."""
    return plgpu.load(ref, layout=ROWS, optimized=False)


def hide(marks_gmem, values, hidden, q_tile, k_tile, *, needed, window, queries_in_rows):
    """Replace the values of masked token pairs in a tile by `hidden`. Do nothing if not `needed`.

    Apply the position mask first and then the segment mask: both at once would spill registers in `dq_call`.
    """
    for mark in range(marks_gmem.shape[0]):

        def masked(values, mark=mark):
            visible = _visible(marks_gmem.at[mark], mark, q_tile, k_tile, window, queries_in_rows)
            return jnp.where(visible, values, hidden)

        values = lax.cond(needed, masked, lambda values: values, values)
    return values


def _visible(mark_gmem, mark, q_tile, k_tile, window, queries_in_rows):
    """Return the mask of a query tile and a key tile, bool [TILE, TILE], computed from one kind of mark.

    `mark` is POSITION (causal and inside the window) or SEGMENT (equal ids). `mark_gmem` holds the marks of one
    sequence in global memory. They are not staged in shared memory, because only tiles on the diagonal and at the edges
    of windows and segments need a mask. Positions are loaded and not computed: an iota would stay in registers during
    the loop, which spills 120 bytes in `dkv_call` at d = 128.
    """

    def spread(tile, layout, axis):
        values = plgpu.load(mark_gmem.at[rows_of(tile)], layout=layout, optimized=False)
        return lax.broadcast_in_dim(values, (TILE, TILE), [axis])

    row_tile, column_tile = (q_tile, k_tile) if queries_in_rows else (k_tile, q_tile)
    rows_and_columns = spread(row_tile, ROWS, 0), spread(column_tile, COLUMNS, 1)
    of_query, of_key = rows_and_columns if queries_in_rows else rows_and_columns[::-1]
    if mark == SEGMENT:
        return of_key == of_query
    mask = of_key <= of_query
    return mask if window is None else mask & (of_query - of_key < window)


def tile_ranges(segment_ids_BT, *, batch, tiles, window):
    """Return the range of key tiles for each query tile, and the range of query tiles for each key tile.

    All token pairs outside these ranges are masked. Segment ids need not be sorted.

    Returns:
        keys: int32 [B, N, 2] of (first, full). Query tile n visits key tiles first..n. Tiles full..n-1 need no mask.
        queries: int32 [B, N, 2] of (full, end). Query tiles n..end-1 visit key tile n. Tiles n+1..full-1 need no mask.
    """
    n = np.arange(tiles)
    behind_1NN = (n[:, None] - n[None, :])[None]  # Query tile minus key tile.
    needed_BNN, whole_BNN = behind_1NN >= 0, behind_1NN > 0
    if window is not None:
        needed_BNN = needed_BNN & ((behind_1NN - 1) * TILE + 1 < window)
        whole_BNN = whole_BNN & ((behind_1NN + 1) * TILE - 1 < window)
    if segment_ids_BT is not None:
        ids_BNP = segment_ids_BT.reshape(batch, tiles, TILE)
        low_BN, high_BN = ids_BNP.min(-1), ids_BNP.max(-1)
        (q_low_BN1, k_low_B1N), (q_high_BN1, k_high_B1N) = ((x[:, :, None], x[:, None]) for x in (low_BN, high_BN))
        needed_BNN = needed_BNN & ~((q_low_BN1 > k_high_B1N) | (q_high_BN1 < k_low_B1N))
        # If the minimum over both tiles equals the maximum, all their tokens have the same segment id.
        whole_BNN = whole_BNN & (jnp.minimum(q_low_BN1, k_low_B1N) == jnp.maximum(q_high_BN1, k_high_B1N))
    xp = np if segment_ids_BT is None else jnp  # Without segments, the ranges are constants of the program.
    broken_BNN = (behind_1NN > 0) & ~whole_BNN
    keys_first_BN = xp.argmax(needed_BNN, axis=2)
    keys_full_BN = xp.max(xp.where(broken_BNN, n[None, None, :] + 1, 0), axis=2)
    queries_end_BN = tiles - xp.argmax(needed_BNN[:, ::-1, :], axis=1)
    queries_full_BN = xp.min(xp.where(broken_BNN, n[None, :, None], tiles), axis=1)
    pairs = (keys_first_BN, keys_full_BN), (queries_full_BN, queries_end_BN)
    keys_BN2, queries_BN2 = (xp.broadcast_to(xp.stack(pair, axis=-1), (batch, tiles, 2)) for pair in pairs)
    return jnp.asarray(keys_BN2, jnp.int32), jnp.asarray(queries_BN2, jnp.int32)


def interpret_params(interpret):
    """Convert a backend's argument `interpret` for `plgpu.kernel`. None means: interpret unless the target is a GPU."""
    if interpret is None:
        interpret = target.platform() != "gpu"
    return plgpu.InterpretGPUParams() if interpret is True else interpret


class CTA(NamedTuple):
    """Indices of the tile that one CTA computes. CTAs start in grid order, so tile 0 should have the most work."""

    sequence: Any
    head: Any
    tile: Any  # With `pairs` in `launch`, the index of a pair of tiles.


class Visit(NamedTuple):
    """The query tile of one CTA of a pair, and its steps: step i visits key tile first + i."""

    q_tile: Any
    first: Any
    full: Any  # Steps full..diagonal-1 need no mask.
    diagonal: Any
    steps: Any

    def needs_mask(self, step):
        """Return whether the mask hides keys in this step."""
        return (step < self.full) | (step >= self.diagonal)


def visit_of(cta, keys_gmem, q_tiles):
    """Return the `Visit` of a CTA. Both CTAs of a pair visit all key tiles that either needs, as they share loads."""
    first_q_tile = q_tiles - PAIR * (1 + cta.tile)  # Query tiles with the most keys start first.
    q_tile = first_q_tile + lax.axis_index("pair")
    first = lax.min(keys_gmem[cta.sequence, first_q_tile, 0], keys_gmem[cta.sequence, first_q_tile + 1, 0])
    full = keys_gmem[cta.sequence, q_tile, 1] - first
    return Visit(q_tile, first, full, q_tile - first, at_least_one(first_q_tile + PAIR - first))


def load_for_pair(gmem, smem, barrier):
    """Start loading half of a tile into the buffers of both CTAs of a pair. The other CTA loads the other half."""
    plgpu.copy_gmem_to_smem(gmem, smem, barrier, collective_axes="pair")


def grid_of(rows, tiles, *, row_bytes):
    """Return the grid (row groups, tiles, rows per group), where a row is a (sequence, head) with `tiles` CTAs.

    CTAs start in grid order, and the last axis changes fastest. All CTAs of a row together read `row_bytes`. Groups are
    small enough that their reads fit into L2. Within a group, the CTAs with the most work start first, so that all SMs
    finish at almost the same time.
    """
    group = max(n for n in range(1, rows + 1) if rows % n == 0 and (n == 1 or n * row_bytes <= L2_BYTES))
    return rows // group, tiles, group


def launch(name, kernel, *operands, grid, row_bytes, out_type, buffers, barriers, interpret, pairs=False):
    """Run `kernel(cta, *operands, *outputs, smem, barriers)` in each CTA of a grid (sequences, heads, tiles).

    With `pairs`, each grid element is a cluster of two CTAs. All CTAs of a (sequence, head) together read `row_bytes`.
    The kernel receives `smem` and `barriers` as named tuples with the keys of `buffers` and `barriers` as fields.
    """
    sequences, heads, tiles = grid
    scratch = [collections.namedtuple("Scratch", fields)(**fields) for fields in (buffers, barriers)]  # pyrefly: ignore
    groups, tiles, group = grid_of(sequences * heads, tiles, row_bytes=row_bytes)

    def body(*refs):
        row = lax.axis_index("row_group") * group + lax.axis_index("row")
        kernel(CTA(lax.div(row, heads), lax.rem(row, heads), lax.axis_index("tile")), *refs)

    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(groups, tiles, group),
        grid_names=("row_group", "tile", "row"),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        cluster=(PAIR,) if pairs else (),
        cluster_names=("pair",) if pairs else (),
        scratch_types=scratch,
        # Only reductions across warps need scratch memory, and no kernel has any.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
        kernel_name=name,
    )(*operands)
