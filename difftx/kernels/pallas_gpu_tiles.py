"""What the Mosaic GPU kernels share: tile sizes, memory layout, which tiles to visit, the mask.

Every kernel gives one CTA three warpgroups: 0 and 1 own one softmax map each, 2 (the producer)
feeds them by TMA.
"""

#   B = batch, T = query length = key length (here always whole tiles), N = T // TILE tiles
#   P = TILE places in a tile, X = marks of a position (see `marks`)
#   H = query heads, D = query/key width, E = 2·D value width

import dataclasses

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from difftx.kernels import target

TILE = 64  # rows of a tile: the M of one wgmma, and 64 bf16 keys fill one 128-byte swizzled row
STAGES = 2  # TMA buffers; a third does not fit into 227 KiB at D = 128
MAPS = 2
PRODUCER = 2  # the warpgroup after the maps'; a fourth would cap registers at 128 a thread at entry
WARPGROUPS = 3

HEAD_WIDTHS = (32, 64, 96, 128)  # each one compiled in tests/compile/gpu_compile_test.py

LOG2_E = 1.4426950408889634
# Masked logits, and where a row's running maximum starts: below every real logit, yet so far above
# MASKED that a row which has seen no key adds exp2(-huge) = 0. Starting at MASKED would not do: with
# one rounding (FMA), MASKED·scale less its own rounded value is ±1e21, and exp2 of that is infinite.
MASKED = -1e30
LOWEST = -1e20

POSITION, SEGMENT = 0, 1  # places in `marks`

MATRIX = plgpu.Layout.WGMMA  # how a warpgroup holds a tile in registers
ROWS = MATRIX.reduce(1)  # a [TILE] vector, one value a row of an accumulator
COLUMNS = MATRIX.reduce(0)  # a [TILE] vector, one value a column of it


@dataclasses.dataclass(frozen=True)
class Registers:
    """Registers a thread in a map warpgroup and in the producer; 2·maps + producer <= 512."""

    maps: int
    producer: int


# Chosen at D = 128, E = 256, where they are tight (ptxas 13.0): in "dkv" (152, 208) spills 4 bytes
# in some calls, (160, 192) up to 36, and (168, 176) makes ptxas serialise wgmma.
REGISTERS = {
    ("H200", "forward"): Registers(maps=240, producer=24),
    ("H200", "dkv"): Registers(maps=152, producer=200),
    ("H200", "dq"): Registers(maps=208, producer=88),
}
REGISTERS_AT_ENTRY = 168  # 64 Ki registers over 384 threads, rounded down to a multiple of 8


def set_registers(count):
    """Move this warpgroup from REGISTERS_AT_ENTRY to `count` registers a thread."""
    plgpu.set_max_registers(count, action="increase" if count > REGISTERS_AT_ENTRY else "decrease")


def smem(shape, dtype):
    """A shared-memory buffer in the tiled, swizzled layout that TMA writes and wgmma reads."""
    itemsize = jnp.dtype(dtype).itemsize
    # 96 bf16 columns are one and a half 128-byte rows, but three 64-byte ones.
    swizzle = 128 if shape[-1] * itemsize % 128 == 0 else 64
    tiling = plgpu.TilingTransform((8, swizzle // itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def rows_of(tile):
    """The slice of a sequence that tile `tile` covers."""
    return pl.ds(tile * TILE, TILE)


def product(a_smem, b_smem):
    """a·b of two shared-memory tiles as a float32 register array, waited for."""

    def run(accumulator):
        plgpu.wgmma(accumulator, a_smem, b_smem)
        return accumulator[...]

    return pl.run_scoped(run, plgpu.ACC((a_smem.shape[0], b_smem.shape[1]), jnp.float32))


def across(row_values, like):
    """Broadcast a ROWS vector over the columns of `like`."""
    return lax.broadcast_in_dim(row_values, like.shape, [0])


def down(column_values, like):
    """Broadcast a COLUMNS vector over the rows of `like`."""
    return lax.broadcast_in_dim(column_values, like.shape, [1])


def arrive_if(condition, barrier):
    """Arrive at a barrier that will be waited for: none may be left with an arrival pending."""
    pl.when(condition)(lambda: plgpu.barrier_arrive(barrier))


def at_least_one(count):
    """`count`, which is never below 1, in a form in which the compiler sees that.

    A loop that might run zero times gives the accumulators a second origin, and ptxas spills.
    """
    return lax.max(count, 1)


def visible(marks_gmem, q_tile, k_tile, *, window, queries_in_rows):
    """The mask of one tile pair, [TILE, TILE] bool: causal, inside the window, of the same segment.

    marks_gmem is one sequence's row of `marks`. Few tiles need a mask (the diagonal, the ends of
    windows and segments), so the marks are read straight from L2. The positions too: an iota is
    hoisted out of the loop and kept in registers, 120 bytes of spills in "dkv" at D = 128.
    """
    row_tile, column_tile = (q_tile, k_tile) if queries_in_rows else (k_tile, q_tile)

    def rows_and_columns(mark):
        def spread(tile, layout, axis):
            values = plgpu.load(marks_gmem.at[mark, rows_of(tile)], layout=layout, optimized=False)
            return lax.broadcast_in_dim(values, (TILE, TILE), [axis])

        return spread(row_tile, ROWS, 0), spread(column_tile, COLUMNS, 1)

    positions = rows_and_columns(POSITION)
    q_position, k_position = positions if queries_in_rows else positions[::-1]
    mask = k_position <= q_position
    if window is not None:
        mask = mask & (q_position - k_position < window)
    if marks_gmem.shape[0] > SEGMENT:
        row_ids, column_ids = rows_and_columns(SEGMENT)
        mask = mask & (row_ids == column_ids)
    return mask


def marks(segment_ids_BT, *, batch, length):
    """What the mask compares, int32 [B, X, T]: positions, then segment ids if there are any."""
    positions_BT = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    if segment_ids_BT is None:
        return positions_BT[:, None]
    return jnp.stack([positions_BT, segment_ids_BT], axis=1)


def tile_ranges(segment_ids_BT, *, batch, tiles, window):
    """Which key tiles a query tile visits, and the reverse: int32 [B, N, 2] twice.

    Query tile n visits key tiles first..n and needs no mask in full..n-1: keys[n] = first, full.
    Key tile n is visited by query tiles n..end-1, which need no mask in n+1..full-1:
    queries[n] = full, end. Tiles outside hold no visible pair, whatever the order of the segment
    ids. Works on N x N flags, never T x T.
    """
    n = jnp.arange(tiles)
    behind_1NN = (n[:, None] - n[None, :])[None]  # query tile less key tile
    needed_BNN = jnp.broadcast_to(behind_1NN >= 0, (batch, tiles, tiles))
    whole_BNN = jnp.broadcast_to(behind_1NN > 0, (batch, tiles, tiles))
    if window is not None:
        needed_BNN &= (behind_1NN - 1) * TILE + 1 < window
        whole_BNN &= (behind_1NN + 1) * TILE - 1 < window
    if segment_ids_BT is not None:
        ids_BNP = segment_ids_BT.reshape(batch, tiles, TILE)
        low_BN, high_BN = ids_BNP.min(-1), ids_BNP.max(-1)
        apart_BNN = (low_BN[:, :, None] > high_BN[:, None, :]) | (high_BN[:, :, None] < low_BN[:, None, :])
        # One id in both tiles: the lowest of the two equals the highest of the two.
        same_BNN = jnp.minimum(low_BN[:, :, None], low_BN[:, None, :]) == jnp.maximum(
            high_BN[:, :, None], high_BN[:, None, :]
        )
        needed_BNN &= ~apart_BNN
        whole_BNN &= same_BNN
    broken_BNN = (behind_1NN > 0) & ~whole_BNN
    keys_first_BN = jnp.argmax(needed_BNN, axis=2)
    keys_full_BN = jnp.max(jnp.where(broken_BNN, n[None, None, :] + 1, 0), axis=2)
    queries_end_BN = tiles - jnp.argmax(needed_BNN[:, ::-1, :], axis=1)
    queries_full_BN = jnp.min(jnp.where(broken_BNN, n[None, :, None], tiles), axis=1)
    keys_BN2 = jnp.stack([keys_first_BN, keys_full_BN], axis=-1)
    queries_BN2 = jnp.stack([queries_full_BN, queries_end_BN], axis=-1)
    return keys_BN2.astype(jnp.int32), queries_BN2.astype(jnp.int32)


def pad_rows(array, *, axis, tiles, mode="constant"):
    """Lengthen `axis` to whole tiles: zeros, or copies of the last row with mode="edge"."""
    missing = tiles * TILE - array.shape[axis]
    if missing == 0:
        return array
    widths = [(0, missing if i == axis else 0) for i in range(array.ndim)]
    return jnp.pad(array, widths, mode=mode)


def interpret_params(interpret):
    """`interpret` of a backend call as plgpu.kernel's argument; None: interpreted unless the target is a GPU."""
    if interpret is None:
        interpret = target.platform() != "gpu"
    return plgpu.InterpretGPUParams() if interpret is True else interpret
