"""Shared parts of the Mosaic GPU kernels: tile sizes, memory layout, tile ranges and the mask.

In every kernel a CTA has three warpgroups. Warpgroups 0 and 1 compute one softmax each. Warpgroup 2, the producer,
loads their tiles by TMA. Of a buffer X, the barrier X_ready tells the readers that X is filled, and X_free tells the
writer that X may be filled again.
"""

#   B = batch, T = query tokens = key tokens, padded to whole tiles, N = T // TILE = tiles,
#   P = TILE = positions in a tile, X = marks of a position

import collections

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from difftx.kernels import target

TILE = 64  # rows of a tile: the M of one wgmma, and 64 bf16 keys fill one 128-byte swizzled row
STAGES = 2  # TMA buffers; a third does not fit into 227 KiB of shared memory at D = 128
GROUPS = 2  # groups of queries and keys, one softmax each
PRODUCER = 2  # index of the producer warpgroup
WARPGROUPS = 3  # a fourth would limit registers at entry to 128 per thread

HEAD_WIDTHS = (32, 64, 96, 128)  # tests/compile/gpu_compile_test.py compiles each width

LOG2_E = 1.4426950408889634
# MASKED replaces masked logits. LOWEST is the initial value of a row's running maximum. It is below every
# real logit, and so far above MASKED that a row without a visible key adds exp2(-huge) = 0. MASKED would
# not work as the initial value: a fused multiply-add rounds once, so that MASKED·scale minus its rounded
# value is ±1e21, and exp2(1e21) is infinite.
MASKED = -1e30
LOWEST = -1e20

POSITION, SEGMENT = 0, 1  # indices along X in the marks [B, X, T], which are the inputs of the mask

MATRIX = plgpu.Layout.WGMMA  # register layout of a tile in a warpgroup
ROWS = MATRIX.reduce(1)  # layout of a [TILE] vector with one value per row of a tile
COLUMNS = MATRIX.reduce(0)  # layout of a [TILE] vector with one value per column of a tile


REGISTERS_AT_ENTRY = 168  # 64 Ki registers over 384 threads, rounded down to a multiple of 8


def set_registers(count):
    """Change the registers of this warpgroup from REGISTERS_AT_ENTRY to `count` per thread.

    The counts of a kernel must satisfy 2·softmax + producer <= 512. They are chosen for H200 at D = 128, where
    registers are scarce (ptxas 13.0).
    """
    plgpu.set_max_registers(count, action="increase" if count > REGISTERS_AT_ENTRY else "decrease")


def buffer(shape, dtype):
    """Return a shared-memory buffer in the tiled, swizzled layout that TMA writes and wgmma reads."""
    itemsize = jnp.dtype(dtype).itemsize
    # 96 bf16 columns fill one and a half 128-byte rows, but exactly three 64-byte rows.
    swizzle = 128 if shape[-1] * itemsize % 128 == 0 else 64
    tiling = plgpu.TilingTransform((8, swizzle // itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def rows_of(tile):
    """Return the slice of a sequence that tile `tile` covers."""
    return pl.ds(tile * TILE, TILE)


def product(a_smem, b_smem):
    """Return the completed product of two shared-memory tiles as a float32 array in registers."""

    def run(accumulator):
        plgpu.wgmma(accumulator, a_smem, b_smem)
        return accumulator[...]

    return pl.run_scoped(run, plgpu.ACC((a_smem.shape[0], b_smem.shape[1]), jnp.float32))


def as_operand(values, staging_smem, index):
    """Return values in registers as the left operand of wgmma.

    The interpreter requires operands in shared memory, so it has a buffer `staging_smem` for a copy of the values. The
    compiled kernels have None.
    """
    if staging_smem is None:
        return values
    staging_smem[index] = values
    plgpu.commit_smem()
    return staging_smem.at[index]


def write(values, buffer_smem, gmem):
    """Start to copy values in registers to global memory, through a buffer in shared memory."""
    buffer_smem[...] = values.astype(buffer_smem.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer_smem, gmem)


def across(row_values, like):
    """Broadcast a ROWS vector over the columns of `like`."""
    return lax.broadcast_in_dim(row_values, like.shape, [0])


def down(column_values, like):
    """Broadcast a COLUMNS vector over the rows of `like`."""
    return lax.broadcast_in_dim(column_values, like.shape, [1])


def arrive_if(condition, barrier):
    """Arrive at a barrier if a later step waits on it (`condition`): a kernel must not end with a pending arrival."""
    pl.when(condition)(lambda: plgpu.barrier_arrive(barrier))


def at_least_one(count):
    """Tell the compiler that `count` is at least 1. If a loop could have zero steps, ptxas would spill accumulators."""
    return lax.max(count, 1)


def load_rows(ref):
    """Load a [TILE] vector from global memory into registers, with one value per row of a tile."""
    return plgpu.load(ref, layout=ROWS, optimized=False)


def hide(marks_gmem, values, hidden, q_tile, k_tile, *, needed, window, queries_in_rows):
    """Replace the values of token pairs that the mask excludes by `hidden`. `needed` says whether there are any."""

    def masked(values):
        visible = _visible(marks_gmem, q_tile, k_tile, window=window, queries_in_rows=queries_in_rows)
        return jnp.where(visible, values, hidden)

    return lax.cond(needed, masked, lambda values: values, values)


def _visible(marks_gmem, q_tile, k_tile, *, window, queries_in_rows):
    """Return the mask of a query tile and a key tile, bool [TILE, TILE]: causal, same segment, inside the window.

    marks_gmem holds the marks of one sequence. The mask reads them from L2 directly, because few tiles need a mask:
    those on the diagonal and at the edges of windows and segments. It reads positions too. An iota would be hoisted
    out of the loop and kept in registers, which spills 120 bytes in "dkv" at D = 128.
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


def tile_ranges(segment_ids_BT, *, batch, tiles, window):
    """Return the key tiles that each query tile visits, and the query tiles that visit each key tile.

    Pairs of tiles outside these ranges have no visible pair of tokens, in any order of the segment ids.

    Returns:
        keys: int32 [B, N, 2] of (first, full). Query tile n visits key tiles first..n and needs no mask for full..n-1.
        queries: int32 [B, N, 2] of (full, end). Query tiles n..end-1 visit key tile n and need no mask for n+1..full-1.
    """
    n = jnp.arange(tiles)
    behind_1NN = (n[:, None] - n[None, :])[None]  # query tile minus key tile
    needed_BNN = jnp.broadcast_to(behind_1NN >= 0, (batch, tiles, tiles))
    whole_BNN = jnp.broadcast_to(behind_1NN > 0, (batch, tiles, tiles))
    if window is not None:
        needed_BNN &= (behind_1NN - 1) * TILE + 1 < window
        whole_BNN &= (behind_1NN + 1) * TILE - 1 < window
    if segment_ids_BT is not None:
        ids_BNP = segment_ids_BT.reshape(batch, tiles, TILE)
        low_BN, high_BN = ids_BNP.min(-1), ids_BNP.max(-1)
        (q_low_BN1, k_low_B1N), (q_high_BN1, k_high_B1N) = ((x[:, :, None], x[:, None]) for x in (low_BN, high_BN))
        needed_BNN &= ~((q_low_BN1 > k_high_B1N) | (q_high_BN1 < k_low_B1N))
        # Both tiles hold one and the same id if their common minimum equals their common maximum.
        whole_BNN &= jnp.minimum(q_low_BN1, k_low_B1N) == jnp.maximum(q_high_BN1, k_high_B1N)
    broken_BNN = (behind_1NN > 0) & ~whole_BNN
    keys_first_BN = jnp.argmax(needed_BNN, axis=2)
    keys_full_BN = jnp.max(jnp.where(broken_BNN, n[None, None, :] + 1, 0), axis=2)
    queries_end_BN = tiles - jnp.argmax(needed_BNN[:, ::-1, :], axis=1)
    queries_full_BN = jnp.min(jnp.where(broken_BNN, n[None, :, None], tiles), axis=1)
    keys_BN2 = jnp.stack([keys_first_BN, keys_full_BN], axis=-1)
    queries_BN2 = jnp.stack([queries_full_BN, queries_end_BN], axis=-1)
    return keys_BN2.astype(jnp.int32), queries_BN2.astype(jnp.int32)


def pad_rows(array, *, axis, tiles, mode="constant"):
    """Pad `axis` to `tiles` whole tiles with zeros, or with copies of the last row if mode="edge"."""
    missing = tiles * TILE - array.shape[axis]
    if missing == 0:
        return array
    widths = [(0, missing if i == axis else 0) for i in range(array.ndim)]
    return jnp.pad(array, widths, mode=mode)


def interpret_params(interpret):
    """Convert `interpret` of a backend call to the argument of plgpu.kernel. None: interpret except on a GPU."""
    if interpret is None:
        interpret = target.platform() != "gpu"
    return plgpu.InterpretGPUParams() if interpret is True else interpret


def launch(name, kernel, *operands, grid, out_type, buffers, barriers, interpret):
    """Run `kernel(*operands, *outputs, smem, barriers)` in each CTA of a grid (sequence, head, tile).

    `smem` and `barriers` are named tuples of the shared memory in `buffers` and of the barriers, with their keys.
    """
    scratch = [collections.namedtuple("Scratch", fields)(**fields) for fields in (buffers, barriers)]  # pyrefly: ignore
    return plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=grid,
        grid_names=("sequence", "head", "tile"),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name=name,
    )(*operands)
