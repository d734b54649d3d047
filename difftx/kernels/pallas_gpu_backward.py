"""Backward pass of fused differential attention on Hopper: one kernel for dK and dV, one for dQ.

P_m are the attention weights of group m = 1, 2, and S_m its logits. With the factors W_1 = 1 and W_2 = -λ, both groups
share dP = dO·Vᵀ and dV = (W_1·P_1 + W_2·P_2)ᵀ·dO. With delta_m = rowsum(P_m∘dP), the other gradients are
dS_m = W_m·P_m∘(dP - delta_m)/√d, dQ_m = dS_m·K_m and dK_m = dS_mᵀ·Q_m.

The producer warpgroup computes dP and dV. Warpgroups 0 and 1 compute P_m, dS_m, dK_m and dQ_m for one group m each.
Tiles of P and dP pass between the warpgroups through shared memory.

Both kernels compute the logits and dP. Together they need 28·T²·d FLOPs per head. A single kernel would need only
20·T²·d, but its CTAs would add to the same gradients. With two kernels, results are reproducible bit for bit.
"""
# Axes: B = batch, T = query tokens, padded to whole tiles, S = key tokens (= T), H = query heads,
#   K = key/value heads, G = 2 groups (A1 and A2), d = query/key width, E = 2·d = value width, N = T // TILE = tiles,
#   X in `stats` = LSE of `fold` and delta/√d, X in `marks` = position and, if there are segments, segment id

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from difftx.kernels import pallas_gpu_tiles as tiles
from difftx.kernels.pallas_gpu_tiles import COLUMNS, GROUPS, LOG2_E, MATRIX, PAIR, PRODUCER, TILE, WARPGROUPS

LSE, DELTA = 0, 1  # Indices along X in `stats`.

STAGES = 2  # Buffers of dO and V, and of Q in the dK/dV kernel at d > 64. At d = 128, three do not fit.
DKV_REGISTERS = tiles.Registers(softmax=152, producer=200)
DQ_REGISTERS = tiles.Registers(softmax=184, producer=136)


def fold(lse, weight):
    """Return LSE - log2|W|, so that exp2(logits - result) = |W|·P. The lowest bit is set to 1 where W < 0.

    The kernels then need not read W. Using the lowest bit causes a relative error in P of at most 2⁻²³·|LSE|.
    """
    bits = lax.bitcast_convert_type(lse - jnp.log2(jnp.abs(weight)), jnp.int32)  # If W = 0: infinity, so P = 0.
    return lax.bitcast_convert_type(bits & ~1 | (weight < 0), jnp.float32)


def sign_bits(folded):
    """Move the sign of W from the lowest bit of `folded` (see `fold`) to the highest bit of an int32."""
    return lax.shift_left(lax.bitcast_convert_type(folded, jnp.int32), 31)


def flip_sign(values, bits):
    """Negate float32 `values` where the highest bit of `bits` is 1."""
    return lax.bitcast_convert_type(lax.bitcast_convert_type(values, jnp.int32) ^ bits, jnp.float32)


class Inputs(NamedTuple):
    """Arrays in global memory that both kernels read."""

    q_BTHGd: jax.Array
    k_BSKGd: jax.Array
    v_BSKE: jax.Array
    dout_BTHE: jax.Array
    stats_BHXGT: jax.Array
    marks_BXT: jax.Array


def dkv_stages(width):
    """Return the number of buffers per array in the dK/dV kernel. At d = 128, three do not fit."""
    return 3 if width <= 64 else STAGES


def dkv_call(inputs, queries_BN2, *, window, interpret):  # noqa: C901 - Nested functions count.
    """Compute dK and dV, with one CTA per (sequence, key/value head, key tile).

    Each CTA loops over the query heads and query tiles that attend to its keys. In tiles of P and dS, rows are keys and
    columns are queries, so that wgmma can read dSᵀ and Pᵀ from registers.
    """
    batch, length, heads, _, width = inputs.q_BTHGd.shape
    kv_heads, value_width, dtype = inputs.k_BSKGd.shape[2], inputs.v_BSKE.shape[-1], inputs.q_BTHGd.dtype
    group = heads // kv_heads
    scale = width**-0.5
    stages = dkv_stages(width)

    def kernel(cta, gmem, queries_gmem, dk_gmem, dv_gmem, smem, barriers):  # noqa: C901 - Nested functions count.
        warpgroup = lax.axis_index("warpgroup")
        sequence, kv_head, k_tile = cta  # Key tiles with the most queries start first.
        full, end = queries_gmem[sequence, k_tile, 0], queries_gmem[sequence, k_tile, 1]
        hide = functools.partial(tiles.hide, gmem.marks_BXT.at[sequence], window=window, queries_in_rows=False)
        steps_per_head = end - k_tile
        steps = tiles.at_least_one(group * steps_per_head)

        def head_and_query_tile(i):
            return kv_head * group + lax.div(i, steps_per_head), k_tile + lax.rem(i, steps_per_head)

        @pl.when(warpgroup < GROUPS)
        def softmax_warpgroup():
            tiles.set_registers(DKV_REGISTERS.softmax)
            plgpu.barrier_wait(barriers.kv_ready)

            def accumulate(dk_acc):
                def step(i, q_tile):
                    slot = lax.rem(i, stages)
                    plgpu.barrier_wait(barriers.q_ready.at[slot])
                    logits = tiles.product(smem.k.at[warpgroup], smem.q.at[slot, warpgroup].T)
                    lse = plgpu.load(smem.stats.at[slot, LSE, warpgroup], layout=COLUMNS)
                    p = jnp.exp2(logits * (scale * LOG2_E) - tiles.down(lse, logits))
                    p = flip_sign(p, tiles.down(sign_bits(lse), p))
                    p = hide(p, 0.0, q_tile, k_tile, needed=(q_tile == k_tile) | (q_tile >= full))
                    plgpu.barrier_wait(barriers.p_free)
                    smem.p[warpgroup] = p.astype(dtype)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(barriers.p_ready)
                    scaled_delta = plgpu.load(smem.stats.at[slot, DELTA, warpgroup], layout=COLUMNS)
                    plgpu.barrier_wait(barriers.dp_ready)
                    dp = plgpu.load(smem.dp, layout=MATRIX)
                    tiles.arrive_if(i + 1 < steps, barriers.dp_free)
                    ds = (p * (dp * scale - tiles.down(scaled_delta, dp))).astype(dtype)
                    ds = tiles.as_operand(ds, smem.staging, warpgroup)
                    plgpu.wgmma(dk_acc, ds, smem.q.at[slot, warpgroup])
                    plgpu.wgmma_wait(0)
                    tiles.arrive_if(i + 1 < steps, barriers.q_free.at[slot])

                    return jnp.where(q_tile + 1 == end, k_tile, q_tile + 1)

                lax.fori_loop(0, steps, step, k_tile)
                return dk_acc[...]

            dk = pl.run_scoped(accumulate, plgpu.ACC((TILE, width), jnp.float32))
            keys = tiles.rows_of(k_tile)
            tiles.write(dk, smem.k.at[warpgroup], dk_gmem.at[sequence, keys, kv_head, warpgroup])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == PRODUCER)
        def producer_warpgroup():
            tiles.set_registers(DKV_REGISTERS.producer)
            keys = tiles.rows_of(k_tile)
            for m in range(GROUPS):
                plgpu.copy_gmem_to_smem(gmem.k_BSKGd.at[sequence, keys, kv_head, m], smem.k.at[m], barriers.kv_ready)
            plgpu.copy_gmem_to_smem(gmem.v_BSKE.at[sequence, keys, kv_head], smem.v, barriers.kv_ready)

            def load_q(i):
                slot = lax.rem(i, stages)
                head, q_tile = head_and_query_tile(i)
                for m in range(GROUPS):
                    q_gmem = gmem.q_BTHGd.at[sequence, tiles.rows_of(q_tile), head, m]
                    plgpu.copy_gmem_to_smem(q_gmem, smem.q.at[slot, m], barriers.q_ready.at[slot])
                stats_gmem = gmem.stats_BHXGT.at[sequence, head, :, :, tiles.rows_of(q_tile)]
                plgpu.copy_gmem_to_smem(stats_gmem, smem.stats.at[slot], barriers.q_ready.at[slot])

            def load_dout(i):
                slot = lax.rem(i, stages)
                head, q_tile = head_and_query_tile(i)
                dout_gmem = gmem.dout_BTHE.at[sequence, tiles.rows_of(q_tile), head]
                plgpu.copy_gmem_to_smem(dout_gmem, smem.dout.at[slot], barriers.dout_ready.at[slot])

            @pl.loop(0, lax.min(steps, stages))
            def _(i):
                load_q(i)
                load_dout(i)

            plgpu.barrier_wait(barriers.kv_ready)
            plgpu.barrier_arrive(barriers.p_free)

            def accumulate(dv_acc):
                @pl.loop(0, steps)
                def _(i):
                    slot = lax.rem(i, stages)
                    plgpu.barrier_wait(barriers.dout_ready.at[slot])
                    dp = tiles.product(smem.v, smem.dout.at[slot].T)
                    pl.when(i > 0)(lambda: plgpu.barrier_wait(barriers.dp_free))
                    smem.dp[...] = dp
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(barriers.dp_ready)

                    @pl.when(i > 0)
                    def refill_q():
                        plgpu.barrier_wait(barriers.q_free.at[lax.rem(i - 1, stages)])
                        pl.when(i - 1 + stages < steps)(lambda: load_q(i - 1 + stages))

                    plgpu.barrier_wait(barriers.p_ready)
                    p = plgpu.load(smem.p.at[0], layout=MATRIX)
                    p = p + plgpu.load(smem.p.at[1], layout=MATRIX)
                    tiles.arrive_if(i + 1 < steps, barriers.p_free)
                    p = tiles.as_operand(p, smem.staging, PRODUCER)
                    plgpu.wgmma(dv_acc, p, smem.dout.at[slot])
                    plgpu.wgmma_wait(0)
                    pl.when(i + stages < steps)(lambda: load_dout(i + stages))

                return dv_acc[...]

            dv = pl.run_scoped(accumulate, plgpu.ACC((TILE, value_width), jnp.float32))
            tiles.write(dv, smem.v, dv_gmem.at[sequence, keys, kv_head])
            plgpu.wait_smem_to_gmem(0)

    return tiles.launch(
        "difftx_dkv",
        kernel,
        inputs,
        queries_BN2,
        grid=(batch, kv_heads, length // TILE),
        row_bytes=4 * length * width * dtype.itemsize * group,  # Q1, Q2 and dO of all heads that read these keys.
        out_type=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (inputs.k_BSKGd, inputs.v_BSKE)),
        buffers={
            "k": tiles.buffer((GROUPS, TILE, width), dtype),
            "v": tiles.buffer((TILE, value_width), dtype),
            "q": tiles.buffer((stages, GROUPS, TILE, width), dtype),
            "dout": tiles.buffer((stages, TILE, value_width), dtype),
            "p": tiles.exchange((GROUPS, TILE, TILE), dtype),
            "dp": tiles.exchange((TILE, TILE), jnp.float32),
            "stats": plgpu.SMEM((stages, 2, GROUPS, TILE), jnp.float32),
            "staging": tiles.buffer((WARPGROUPS, TILE, TILE), dtype) if interpret else None,
        },
        barriers={
            "kv_ready": plgpu.Barrier(num_arrivals=GROUPS + 1),  # Two copies of K, one of V.
            "q_ready": plgpu.Barrier(num_arrivals=GROUPS + 1, num_barriers=stages),  # Two copies of Q, one of `stats`.
            "dout_ready": plgpu.Barrier(num_barriers=stages),
            "q_free": plgpu.Barrier(num_arrivals=GROUPS, num_barriers=stages),
            "p_ready": plgpu.Barrier(num_arrivals=GROUPS),
            "p_free": plgpu.Barrier(),
            "dp_ready": plgpu.Barrier(),
            "dp_free": plgpu.Barrier(num_arrivals=GROUPS),
        },
        interpret=interpret,
    )


def dq_call(inputs, keys_BN2, *, window, interpret):  # noqa: C901 - Nested functions count.
    """Compute dQ, with one CTA per (sequence, query head, query tile). It loops over the key tiles of its queries.

    As in the forward pass, two CTAs share the loads of K and V. A warpgroup computes the weights of the next tile while
    the tensor cores compute dS·K of the current tile.
    """
    batch, length, heads, _, width = inputs.q_BTHGd.shape
    value_width, dtype = inputs.v_BSKE.shape[-1], inputs.q_BTHGd.dtype
    q_tiles, group = length // TILE, heads // inputs.k_BSKGd.shape[2]
    scale = width**-0.5
    k_stages = STAGES + 1  # One more: a step reads K of the next step before it frees its own K.

    def kernel(cta, gmem, keys_gmem, dq_gmem, smem, barriers):  # noqa: C901 - Nested functions count.
        warpgroup = lax.axis_index("warpgroup")
        sequence, head = cta.sequence, cta.head
        kv_head = lax.div(head, group)
        visit = tiles.visit_of(cta, keys_gmem, q_tiles)
        queries, steps = tiles.rows_of(visit.q_tile), visit.steps
        hide = functools.partial(tiles.hide, gmem.marks_BXT.at[sequence], window=window, queries_in_rows=True)
        q_smem = smem.k.at[k_stages - 1]  # Q moves from here to registers before step k_stages - 1 loads K.

        @pl.when(warpgroup < GROUPS)
        def softmax_warpgroup():
            tiles.set_registers(DQ_REGISTERS.softmax)

            lse = tiles.load_rows(gmem.stats_BHXGT.at[sequence, head, LSE, warpgroup, queries])
            scaled_delta = tiles.load_rows(gmem.stats_BHXGT.at[sequence, head, DELTA, warpgroup, queries])
            plgpu.barrier_wait(barriers.q_ready)
            q = tiles.as_operand(plgpu.load(q_smem.at[warpgroup], layout=MATRIX), smem.q, warpgroup)
            tiles.arrive_if(steps >= k_stages, barriers.k_free.at[k_stages - 1])

            def k_of(i):
                return smem.k.at[lax.rem(i, k_stages), warpgroup]

            def weights(i, logits):
                """Return |W|·P of step i."""
                p = jnp.exp2(logits * (scale * LOG2_E) - tiles.across(lse, logits))
                return hide(p, 0.0, visit.q_tile, visit.first + i, needed=visit.needs_mask(i))

            def wait_for_tiles(i):
                """Wait for dP of step i and K of step i + 1."""
                plgpu.barrier_wait(barriers.dp_ready.at[lax.rem(i, STAGES)])
                pl.when(i + 1 < steps)(lambda: plgpu.barrier_wait(barriers.k_ready.at[lax.rem(i + 1, k_stages)]))

            def ds_of(i, p):
                slot = lax.rem(i, STAGES)
                dp = plgpu.load(smem.dp.at[slot], layout=MATRIX)
                tiles.arrive_if(i + STAGES < steps, barriers.dp_free.at[slot])
                ds = (p * (dp * scale - tiles.across(scaled_delta, dp))).astype(dtype)
                return tiles.as_operand(ds, smem.staging, warpgroup)

            def accumulate(dq_acc):
                def step(i, p):
                    ds = ds_of(i, p)

                    def run(logits_acc):
                        plgpu.wgmma(logits_acc, q, k_of(i + 1).T)
                        plgpu.wgmma(dq_acc, ds, k_of(i))
                        next_logits = plgpu.wgmma_accumulator_load(logits_acc, wait_n=1)  # dS·K is still running.
                        next_p = weights(i + 1, next_logits)
                        wait_for_tiles(i + 1)  # Ends a basic block, as in the forward kernel.
                        plgpu.wgmma_wait(0)
                        return next_p

                    next_p = pl.run_scoped(run, plgpu.ACC((TILE, TILE), jnp.float32))
                    tiles.arrive_if(i + k_stages < steps, barriers.k_free.at[lax.rem(i, k_stages)])
                    return next_p

                plgpu.barrier_wait(barriers.k_ready.at[0])
                p = weights(0, tiles.product(q, k_of(0).T))
                wait_for_tiles(0)
                p = lax.fori_loop(0, steps - 1, step, p)
                plgpu.wgmma(dq_acc, ds_of(steps - 1, p), k_of(steps - 1))
                plgpu.wgmma_wait(0)
                return dq_acc[...]

            dq = pl.run_scoped(accumulate, plgpu.ACC((TILE, width), jnp.float32))
            dq = flip_sign(dq, tiles.across(sign_bits(lse), dq))
            tiles.write(dq, smem.k.at[0, warpgroup], dq_gmem.at[sequence, queries, head, warpgroup])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == PRODUCER)
        def producer_warpgroup():
            tiles.set_registers(DQ_REGISTERS.producer)
            for m in range(GROUPS):
                plgpu.copy_gmem_to_smem(gmem.q_BTHGd.at[sequence, queries, head, m], q_smem.at[m], barriers.q_ready)
            plgpu.copy_gmem_to_smem(gmem.dout_BTHE.at[sequence, queries, head], smem.dout, barriers.q_ready)

            def load_k(i):
                slot, keys = lax.rem(i, k_stages), tiles.rows_of(visit.first + i)
                for m in range(GROUPS):
                    k_gmem = gmem.k_BSKGd.at[sequence, keys, kv_head, m]
                    tiles.load_for_pair(k_gmem, smem.k.at[slot, m], barriers.k_ready.at[slot])

            def load_v(i):
                slot, keys = lax.rem(i, STAGES), tiles.rows_of(visit.first + i)
                v_gmem = gmem.v_BSKE.at[sequence, keys, kv_head]
                tiles.load_for_pair(v_gmem, smem.v.at[slot], barriers.v_ready.at[slot])

            @pl.loop(0, lax.min(steps, STAGES))
            def _(i):
                load_v(i)
                load_k(i)

            plgpu.barrier_wait(barriers.q_ready)
            dout = tiles.to_registers(smem.dout, interpret)

            @pl.loop(0, steps)
            def _(i):
                slot = lax.rem(i, STAGES)
                plgpu.barrier_wait(barriers.v_ready.at[slot])
                dp = tiles.product(dout, smem.v.at[slot].T)
                tiles.arrive_if(i + STAGES < steps, barriers.v_free.at[slot])
                pl.when(i >= STAGES)(lambda: plgpu.barrier_wait(barriers.dp_free.at[slot]))
                smem.dp[slot] = dp
                plgpu.commit_smem()
                plgpu.barrier_arrive(barriers.dp_ready.at[slot])

                @pl.when(i + STAGES < steps)
                def refill():
                    plgpu.barrier_wait(barriers.v_free.at[slot])
                    load_v(i + STAGES)
                    plgpu.barrier_wait(barriers.k_free.at[lax.rem(i + STAGES, k_stages)])
                    load_k(i + STAGES)

    return tiles.launch(
        "difftx_dq",
        kernel,
        inputs,
        keys_BN2,
        grid=(batch, heads, q_tiles // PAIR),
        pairs=True,
        row_bytes=4 * length * width * dtype.itemsize // group,  # K1, K2 and V.
        out_type=jax.ShapeDtypeStruct(inputs.q_BTHGd.shape, dtype),
        buffers={
            "dout": tiles.buffer((TILE, value_width), dtype),
            "k": tiles.buffer((k_stages, GROUPS, TILE, width), dtype),
            "v": tiles.buffer((STAGES, TILE, value_width), dtype),
            "dp": tiles.buffer((STAGES, TILE, TILE), jnp.float32),
            "q": tiles.buffer((GROUPS, TILE, width), dtype) if interpret else None,
            "staging": tiles.buffer((GROUPS, TILE, TILE), dtype) if interpret else None,
        },
        barriers={
            "q_ready": plgpu.Barrier(num_arrivals=GROUPS + 1),  # Two copies of Q, one of dO.
            "k_ready": plgpu.Barrier(num_arrivals=GROUPS, num_barriers=k_stages),
            "v_ready": plgpu.Barrier(num_barriers=STAGES),
            "k_free": tiles.PairBarrier(num_arrivals=GROUPS, num_barriers=k_stages),
            "v_free": tiles.PairBarrier(num_barriers=STAGES),
            "dp_ready": plgpu.Barrier(num_barriers=STAGES),
            "dp_free": plgpu.Barrier(num_arrivals=GROUPS, num_barriers=STAGES),
        },
        interpret=interpret,
    )
