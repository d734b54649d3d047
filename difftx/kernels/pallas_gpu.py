"""Fused differential attention in Pallas Mosaic GPU, for Hopper: interface and forward pass.

The kernel computes causal O = (A1 - λ·A2)·V with A_m = softmax(Q_m·K_mᵀ / √d) (arXiv:2410.05258, Eq. 1). The
accumulator of A_m·V is a 64 x 2d tile in float32, which takes 128 registers per thread at d = 128. One warpgroup cannot
hold two such accumulators, so one warpgroup computes A1·V and another one A2·V. Both read the same V tiles. At the end,
the second warpgroup passes A2·V through shared memory to the first, which subtracts it.

Two things limit the speed. First, loads from L2. Therefore two CTAs form a cluster that loads each tile of K and V once
for two tiles of queries. Second, tensor cores that idle while both warpgroups compute their softmax. Therefore each
warpgroup computes the softmax of the next tile while the tensor cores compute P·V of the current tile.

benchmarks/records/2026-11-26_h100_first_run.md compares the times of these kernels with those of cuDNN on an H100.
"""
# Axes: B = batch, T = query tokens, S = key tokens (= T), H = query heads, K = key/value heads,
#   G = 2 groups (A1 and A2), d = query/key width, E = 2·d = value width, N = tiles in T, X = see pallas_gpu_backward

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from difftx.kernels import pallas_gpu_tiles as tiles
from difftx.kernels import target
from difftx.kernels.backend import AttentionCall, ShardedArrays, deltas, pad_to
from difftx.kernels.pallas_gpu_backward import Inputs, dkv_call, dq_call, fold
from difftx.kernels.pallas_gpu_tiles import GROUPS, LOG2_E, MASKED, MATRIX, PAIR, PRODUCER, ROWS, TILE

REGISTERS = tiles.Registers(softmax=240, producer=24)
STAGES = 3  # Buffers of K and of V. With two, P·V of a step would wait for a load that starts in the same step.
# Rescale a row's output only if its maximum has grown by a factor of 2^GROWTH since the last rescaling. Until then, P
# is at most 2^GROWTH, which loses no accuracy in floating point. FlashAttention-4 has the same threshold.
GROWTH = 8.0


def unsupported(call: AttentionCall) -> str | None:
    """Return why this backend cannot serve a call, or None if it can. The interpreter supports all dtypes."""
    width, dtype = call.q.shape[-1], call.q.dtype
    if width not in tiles.HEAD_WIDTHS:
        return f"head width {width} is not one of {tiles.HEAD_WIDTHS}"
    if target.platform() != "gpu":
        return None
    if dtype != jnp.bfloat16:
        # wgmma would round float32 to tf32, and float32 tiles would exceed shared memory at d = 128.
        return f"the compiled kernels support bfloat16, not {dtype}"
    if target.compute_capability()[0] != target.HOPPER:
        return f"the kernels are written for wgmma of Hopper (compute capability 9.0), found {target.device_kind()}"
    return None


def forward(q_BTHGd, k_BSKGd, v_BSKE, lam_BTH, segment_ids_BT, *, window, interpret=None):
    """Return the output O [B, T, H, E] in the dtype of q, and the arrays for `backward`: O2 = A2·V and log-sum-exps.

    `interpret` is False, True or InterpretGPUParams. If it is None, the kernel is interpreted unless the target is a
    GPU.
    """
    length = q_BTHGd.shape[1]
    pad, marks_BXT, keys_BN2, _ = _whole_tiles(q_BTHGd.shape, segment_ids_BT, window=window)
    out_BTHE, out2_BTHE, lse_BHGT = _forward_call(
        pad(q_BTHGd),
        pad(k_BSKGd),
        pad(v_BSKE),
        pad(jnp.moveaxis(lam_BTH, 1, 2), axis=2),
        marks_BXT,
        keys_BN2,
        window=window,
        interpret=tiles.interpret_params(interpret),
    )
    return out_BTHE[:, :length], ShardedArrays(by_token=(out2_BTHE[:, :length],), by_group=(lse_BHGT[..., :length],))


def backward(q_BTHGd, k_BSKGd, v_BSKE, lam_BTH, segment_ids_BT, out_BTHE, saved, dout_BTHE, *, window, interpret=None):
    """Return the gradients of q, k and v in their dtypes, and of λ in float32. All sums are in float32."""
    (out2_BTHE,), (lse_BHGT,) = saved.by_token, saved.by_group
    delta1_BTH, delta2_BTH = deltas(out_BTHE, out2_BTHE, lam_BTH, dout_BTHE)
    length = q_BTHGd.shape[1]
    pad, marks_BXT, keys_BN2, queries_BN2 = _whole_tiles(q_BTHGd.shape, segment_ids_BT, window=window)
    lam_BHT = jnp.moveaxis(lam_BTH, 1, 2)
    weight_BHGT = jnp.stack([jnp.ones_like(lam_BHT), -lam_BHT], axis=2)
    delta_BHGT = jnp.stack([delta1_BTH, delta2_BTH], axis=1).transpose(0, 3, 1, 2)
    scale = q_BTHGd.shape[-1] ** -0.5
    stats_BHXGT = pad(jnp.stack([fold(lse_BHGT * LOG2_E, weight_BHGT), delta_BHGT * scale], axis=2), axis=4)
    # Padding changes no gradient: padded queries have dO = delta = 0, and the causal mask hides padded keys.
    inputs = Inputs(pad(q_BTHGd), pad(k_BSKGd), pad(v_BSKE), pad(dout_BTHE), stats_BHXGT, marks_BXT)
    static = {"window": window, "interpret": tiles.interpret_params(interpret)}
    dk_BSKGd, dv_BSKE = dkv_call(inputs, queries_BN2, **static)
    dq_BTHGd = dq_call(inputs, keys_BN2, **static)
    return dq_BTHGd[:, :length], dk_BSKGd[:, :length], dv_BSKE[:, :length], -delta2_BTH


def _whole_tiles(q_shape, segment_ids_BT, *, window):
    """Return a function that pads arrays to whole pairs of tiles, the marks for the mask, and the `tile_ranges`."""
    batch, length = q_shape[:2]
    count = math.ceil(length / (TILE * PAIR)) * PAIR
    pad = functools.partial(pad_to, length=count * TILE, axis=1)
    marks_BXT = jnp.broadcast_to(jnp.arange(count * TILE, dtype=jnp.int32), (batch, 1, count * TILE))
    if segment_ids_BT is not None:
        segment_ids_BT = pad(segment_ids_BT, mode="edge")
        marks_BXT = jnp.concatenate([marks_BXT, segment_ids_BT[:, None]], axis=1)
    ranges = tiles.tile_ranges(segment_ids_BT, batch=batch, tiles=count, window=window)
    return pad, marks_BXT, *ranges


def _forward_call(  # noqa: C901 - Nested functions count.
    q_BTHGd, k_BSKGd, v_BSKE, lam_BHT, marks_BXT, keys_BN2, *, window, interpret
):
    """Run the forward kernel on arrays of whole tiles, with one CTA per (sequence, head, query tile).

    The CTAs of two neighbouring query tiles form a cluster. Each CTA loads half of every tile of K and V for both CTAs.
    """
    batch, length, heads, _, width = q_BTHGd.shape
    value_width, dtype = v_BSKE.shape[-1], q_BTHGd.dtype
    q_tiles, group = length // TILE, heads // k_BSKGd.shape[2]
    logit_scale = width**-0.5 * LOG2_E  # With the factor log2(e), since the kernel computes exp2, not exp.

    def kernel(  # noqa: C901 - Nested functions count.
        cta, q_gmem, k_gmem, v_gmem, lam_gmem, marks_gmem, keys_gmem, out_gmem, out2_gmem, lse_gmem, smem, barriers,
    ):  # fmt: skip
        k_smem, weighted_out2_smem = smem.k_or_weighted_out2
        warpgroup = lax.axis_index("warpgroup")
        sequence, head = cta.sequence, cta.head
        kv_head = lax.div(head, group)
        visit = tiles.visit_of(cta, keys_gmem, q_tiles)
        queries, steps = tiles.rows_of(visit.q_tile), visit.steps
        hide = functools.partial(tiles.hide, marks_gmem.at[sequence], window=window, queries_in_rows=True)

        @pl.when(warpgroup < GROUPS)
        def softmax_warpgroup():  # noqa: C901 - Nested functions count.
            tiles.set_registers(REGISTERS.softmax)
            q_ready = barriers.q_ready.at[warpgroup]
            plgpu.copy_gmem_to_smem(q_gmem.at[sequence, queries, head, warpgroup], smem.q.at[warpgroup], q_ready)
            plgpu.barrier_wait(q_ready)

            q = tiles.to_registers(smem.q.at[warpgroup], interpret)

            def softmax(i, logits, maximum, total):
                """Return P of tile i, the factors that rescale the output, and the new row maxima and row sums."""
                logits = hide(logits, MASKED, visit.q_tile, visit.first + i, needed=visit.needs_mask(i))
                tile_maximum = logits.max(axis=1) * logit_scale
                new_maximum = jnp.where(tile_maximum > maximum + GROWTH, tile_maximum, maximum)
                rescale = jnp.exp2(maximum - new_maximum)
                p = jnp.exp2(logits * logit_scale - tiles.across(new_maximum, logits))
                return p.astype(dtype), rescale, new_maximum, total * rescale + p.sum(axis=1)

            def wait_for_tiles(i):
                """Wait for the operands of step i: V of tile i and K of tile i + 1."""
                plgpu.barrier_wait(barriers.v_ready.at[lax.rem(i, STAGES)])
                pl.when(i + 1 < steps)(lambda: plgpu.barrier_wait(barriers.k_ready.at[lax.rem(i + 1, STAGES)]))

            def add_product(out, p, v_smem):
                """Return out + P·V."""
                if smem.p is None:
                    start: Any = plgpu.ACC.init(out)  # JAX annotates it as a reference. run_state returns an array.
                    return pl.run_state(lambda out_acc: plgpu.wgmma(out_acc, p, v_smem))(start)
                smem.p[warpgroup] = p  # The interpreter does not support P in registers or initial accumulators.
                plgpu.commit_smem()
                return out + tiles.product(smem.p.at[warpgroup], v_smem)

            def add_product_during_softmax(i, out, p, maximum, total):
                """Add P·V of tile i to `out` while computing `softmax` of tile i + 1. Return both results."""
                v_smem, next_k_smem = smem.v.at[lax.rem(i, STAGES)], k_smem.at[lax.rem(i + 1, STAGES), warpgroup]
                if smem.p is not None:
                    next_logits = tiles.product(q, next_k_smem.T)
                    out = add_product(out, p, v_smem)
                    results = softmax(i + 1, next_logits, maximum, total)
                    wait_for_tiles(i + 1)
                    return out, *results

                def run(logits_acc):
                    def multiply(refs):
                        out_acc, *result_refs = refs
                        plgpu.wgmma(logits_acc, q, next_k_smem.T)
                        plgpu.wgmma(out_acc, p, v_smem)
                        next_logits = plgpu.wgmma_accumulator_load(logits_acc, wait_n=1)  # P·V is still running.
                        for ref, result in zip(result_refs, softmax(i + 1, next_logits, maximum, total), strict=True):
                            ref[...] = result
                        # This wait ends a basic block. Without it, ptxas would wait for P·V before the exponentials.
                        wait_for_tiles(i + 1)

                    return pl.run_state(multiply)((plgpu.ACC.init(out), p, maximum, maximum, total))

                return pl.run_scoped(run, plgpu.ACC((TILE, TILE), jnp.float32))

            def step(i, carry):
                out, p, rescale, maximum, total = add_product_during_softmax(i, *carry)
                tiles.arrive_if(i + 1 + STAGES < steps, barriers.k_free.at[lax.rem(i + 1, STAGES)])
                tiles.arrive_if(i + STAGES < steps, barriers.v_free.at[lax.rem(i, STAGES)])
                grows = tiles.any_in_warp(rescale < 1.0, interpret)
                out = lax.cond(grows, lambda out: out * tiles.across(rescale, out), lambda out: out, out)
                return out, p, maximum, total

            plgpu.barrier_wait(barriers.k_ready.at[0])
            first_logits = tiles.product(q, k_smem.at[0, warpgroup].T)
            tiles.arrive_if(steps > STAGES, barriers.k_free.at[0])
            maximum = plgpu.layout_cast(jnp.full((TILE,), tiles.LOWEST, jnp.float32), ROWS)
            total = plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), ROWS)
            p, _, maximum, total = softmax(0, first_logits, maximum, total)
            out = plgpu.layout_cast(jnp.zeros((TILE, value_width), jnp.float32), MATRIX)
            wait_for_tiles(0)
            out, p, maximum, total = lax.fori_loop(0, steps - 1, step, (out, p, maximum, total))
            out = add_product(out, p, smem.v.at[lax.rem(steps - 1, STAGES)])
            lse = maximum / LOG2_E + jnp.log(total)
            tiles.write(lse, smem.lse.at[warpgroup], lse_gmem.at[sequence, head, warpgroup, queries])
            out = out * tiles.across(1.0 / total, out)
            # Results overwrite the K and V buffers, so wait until both warpgroups have read all of K and V.
            plgpu.barrier_arrive(barriers.softmax_done)
            plgpu.barrier_wait(barriers.softmax_done)

            @pl.when(warpgroup == 1)
            def write_out2():
                lam = tiles.load_rows(lam_gmem.at[sequence, head, queries])
                weighted_out2_smem[...] = out * tiles.across(lam, out)
                plgpu.commit_smem()
                plgpu.barrier_arrive(barriers.out2_ready)
                tiles.write(out, smem.v.at[1], out2_gmem.at[sequence, queries, head])

            @pl.when(warpgroup == 0)
            def write_difference():
                plgpu.barrier_wait(barriers.out2_ready)
                weighted_out2 = plgpu.load(weighted_out2_smem, layout=MATRIX)
                tiles.write(out - weighted_out2, smem.v.at[0], out_gmem.at[sequence, queries, head])

            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == PRODUCER)
        def producer_warpgroup():
            tiles.set_registers(REGISTERS.producer)

            @pl.loop(0, steps)
            def _(i):
                slot, keys = lax.rem(i, STAGES), tiles.rows_of(visit.first + i)
                pl.when(i >= STAGES)(lambda: plgpu.barrier_wait(barriers.k_free.at[slot]))
                for m in range(GROUPS):
                    tile_gmem = k_gmem.at[sequence, keys, kv_head, m]
                    tiles.load_for_pair(tile_gmem, k_smem.at[slot, m], barriers.k_ready.at[slot])
                pl.when(i >= STAGES)(lambda: plgpu.barrier_wait(barriers.v_free.at[slot]))
                tiles.load_for_pair(v_gmem.at[sequence, keys, kv_head], smem.v.at[slot], barriers.v_ready.at[slot])

    out = jax.ShapeDtypeStruct((batch, length, heads, value_width), dtype)
    lse = jax.ShapeDtypeStruct((batch, heads, GROUPS, length), jnp.float32)
    k_buffer = tiles.buffer((STAGES, GROUPS, TILE, width), dtype)
    return tiles.launch(
        "difftx_forward",
        kernel,
        *(q_BTHGd, k_BSKGd, v_BSKE, lam_BHT, marks_BXT, keys_BN2),
        grid=(batch, heads, q_tiles // PAIR),
        pairs=True,
        row_bytes=4 * length * width * dtype.itemsize // group,  # K1, K2 and V. V is twice as wide as K1.
        out_type=(out, out, lse),
        buffers={
            "q": tiles.buffer((GROUPS, TILE, width), dtype),
            # λ·O2 overwrites K at the end.
            "k_or_weighted_out2": plgpu.RefUnion(k_buffer, tiles.buffer((TILE, value_width), jnp.float32)),
            "v": tiles.buffer((STAGES, TILE, value_width), dtype),
            "lse": plgpu.SMEM((GROUPS, TILE), jnp.float32),
            "p": tiles.buffer((GROUPS, TILE, TILE), dtype) if interpret else None,
        },
        barriers={
            "q_ready": plgpu.Barrier(num_barriers=GROUPS),  # One per group.
            "k_ready": plgpu.Barrier(num_barriers=STAGES, num_arrivals=GROUPS),  # One arrival per group.
            "v_ready": plgpu.Barrier(num_barriers=STAGES),
            "k_free": tiles.PairBarrier(num_barriers=STAGES, num_arrivals=GROUPS),
            "v_free": tiles.PairBarrier(num_barriers=STAGES, num_arrivals=GROUPS),
            "softmax_done": plgpu.Barrier(num_arrivals=GROUPS),
            "out2_ready": plgpu.Barrier(),
        },
        interpret=interpret,
    )
