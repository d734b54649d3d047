"""Backward pass of fused differential attention on Hopper: one kernel for dK and dV, one for dQ.

With weights W_1 = 1 and W_2 = -λ, both groups share dP = dO·Vᵀ and dV = (W_1·P_1 + W_2·P_2)ᵀ·dO. The
other gradients are dS_m = W_m·P_m∘(dP - delta_m)/√D, dQ_m = dS_m·K_m and dK_m = dS_mᵀ·Q_m.

The producer warpgroup computes dP and dV. Warpgroups 0 and 1 compute P_m, dS_m, dK_m and dQ_m for one
group m each. Tiles of P and dP pass between the warpgroups through shared memory.

Two kernels compute S and dP twice: 28·T²·D FLOPs per head, where a single kernel would need 20·T²·D.
In return, no two CTAs add to the same gradient, so that results are reproducible bit for bit.
"""

#   B = batch, T = query tokens = key tokens, padded to whole tiles, S = key tokens (= T), H = query heads,
#   K = key/value heads (query head h uses key/value head h // (H // K)), G = 2 groups (A1 and A2),
#   D = query/key width, E = 2·D = value width, N = T // TILE = tiles,
#   X = 2 statistics in `stats` (base-2 log-sum-exp, delta/√D); in `marks` see pallas_gpu_tiles.marks

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from difftx.kernels.pallas_gpu_tiles import (
    COLUMNS,
    LOG2_E,
    MAPS,
    MATRIX,
    PRODUCER,
    REGISTERS,
    ROWS,
    STAGES,
    TILE,
    WARPGROUPS,
    across,
    arrive_if,
    at_least_one,
    down,
    product,
    rows_of,
    set_registers,
    smem,
    visible,
)

LSE, DELTA = 0, 1  # indices along X in stats


def dkv_call(  # noqa: C901 - counts the bodies of both kinds of warpgroup
    q_BTHGD, k_BSKGD, v_BSKE, dout_BTHE, stats_BHXGT, weight_BHGT, marks_BXT, queries_BN2,
    *, window, interpret,
):  # fmt: skip
    """Compute dK and dV, with one CTA per (sequence, key/value head, key tile).

    Each CTA loops over the query heads and query tiles that see its keys. Tiles are transposed, with keys in
    rows, so that wgmma can read dSᵀ and Pᵀ from registers.
    """
    batch, length, heads, _, width = q_BTHGD.shape
    kv_heads, value_width, dtype = k_BSKGD.shape[2], v_BSKE.shape[-1], q_BTHGD.dtype
    tiles, group = length // TILE, heads // kv_heads
    scale = width**-0.5
    registers = REGISTERS["H200", "dkv"]
    staged = bool(interpret)  # the interpreter does not support wgmma operands in registers

    def kernel(  # noqa: C901
        q_gmem, k_gmem, v_gmem, dout_gmem, stats_gmem, weight_gmem, marks_gmem, queries_gmem,
        dk_gmem, dv_gmem,
        k_smem, v_smem, q_smem, dout_smem, p_smem, dp_smem, stats_smem, operand_smem,
        kv_ready, q_ready, dout_ready, q_free, p_ready, p_free, dp_ready, dp_free,
    ):  # fmt: skip
        warpgroup = lax.axis_index("warpgroup")
        sequence, kv_head = lax.axis_index("sequence"), lax.axis_index("kv_head")
        k_tile = lax.axis_index("tile")  # key tiles with the most queries start first
        full, end = queries_gmem[sequence, k_tile, 0], queries_gmem[sequence, k_tile, 1]
        seen = functools.partial(visible, marks_gmem.at[sequence], window=window, queries_in_rows=False)
        steps_a_head = end - k_tile
        steps = at_least_one(group * steps_a_head)

        def place(i):
            """Return the query head and the query tile of step i."""
            return kv_head * group + lax.div(i, steps_a_head), k_tile + lax.rem(i, steps_a_head)

        @pl.when(warpgroup < MAPS)
        def map_warpgroup():
            set_registers(registers.maps)
            plgpu.barrier_wait(kv_ready)

            def accumulate(dk_acc):
                def step(i, place):
                    head, q_tile = place
                    slot = lax.rem(i, STAGES)
                    plgpu.barrier_wait(q_ready.at[slot])
                    logits = product(k_smem.at[warpgroup], q_smem.at[slot, warpgroup].T)
                    lse = plgpu.load(stats_smem.at[slot, LSE, warpgroup], layout=COLUMNS)
                    p = jnp.exp2(logits * (scale * LOG2_E) - down(lse, logits))

                    def mask(p):
                        return jnp.where(seen(q_tile, k_tile), p, 0.0)

                    p = lax.cond((q_tile == k_tile) | (q_tile >= full), mask, lambda p: p, p)
                    # Read from L2: at D = 128, 2 x 2 rows of statistics fill the rest of shared memory.
                    weight = plgpu.load(
                        weight_gmem.at[sequence, head, warpgroup, rows_of(q_tile)],
                        layout=COLUMNS,
                        optimized=False,
                    )
                    p = p * down(weight, p)
                    plgpu.barrier_wait(p_free)
                    p_smem[warpgroup] = p.astype(dtype)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(p_ready)
                    scaled_delta = plgpu.load(stats_smem.at[slot, DELTA, warpgroup], layout=COLUMNS)
                    plgpu.barrier_wait(dp_ready)
                    dp = plgpu.load(dp_smem, layout=MATRIX)
                    arrive_if(i + 1 < steps, dp_free)
                    ds = (p * (dp * scale - down(scaled_delta, dp))).astype(dtype)
                    if staged:
                        operand_smem[warpgroup] = ds
                        plgpu.commit_smem()
                        ds = operand_smem.at[warpgroup]
                    plgpu.wgmma(dk_acc, ds, q_smem.at[slot, warpgroup])
                    plgpu.wgmma_wait(0)
                    arrive_if(i + 1 < steps, q_free.at[slot])

                    last = q_tile + 1 == end
                    return head + last.astype(jnp.int32), jnp.where(last, k_tile, q_tile + 1)

                lax.fori_loop(0, steps, step, place(0))
                return dk_acc[...]

            dk = pl.run_scoped(accumulate, plgpu.ACC((TILE, width), jnp.float32))
            k_smem[warpgroup] = dk.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(k_smem.at[warpgroup], dk_gmem.at[sequence, rows_of(k_tile), kv_head, warpgroup])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == PRODUCER)
        def producer_warpgroup():
            set_registers(registers.producer)
            keys = rows_of(k_tile)
            for m in range(MAPS):
                k_map_gmem = k_gmem.at[sequence, keys, kv_head, m]
                plgpu.copy_gmem_to_smem(k_map_gmem, k_smem.at[m], kv_ready)
            plgpu.copy_gmem_to_smem(v_gmem.at[sequence, keys, kv_head], v_smem, kv_ready)

            def load_q(i):
                slot = lax.rem(i, STAGES)
                head, q_tile = place(i)
                for m in range(MAPS):
                    q_map_gmem = q_gmem.at[sequence, rows_of(q_tile), head, m]
                    plgpu.copy_gmem_to_smem(q_map_gmem, q_smem.at[slot, m], q_ready.at[slot])
                step_stats_gmem = stats_gmem.at[sequence, head, :, :, rows_of(q_tile)]
                plgpu.copy_gmem_to_smem(step_stats_gmem, stats_smem.at[slot], q_ready.at[slot])

            def load_dout(i):
                slot = lax.rem(i, STAGES)
                head, q_tile = place(i)
                plgpu.copy_gmem_to_smem(
                    dout_gmem.at[sequence, rows_of(q_tile), head],
                    dout_smem.at[slot],
                    dout_ready.at[slot],
                )

            @pl.loop(0, lax.min(steps, STAGES))
            def _(i):
                load_q(i)
                load_dout(i)

            plgpu.barrier_wait(kv_ready)
            plgpu.barrier_arrive(p_free)

            def accumulate(dv_acc):
                @pl.loop(0, steps)
                def _(i):
                    slot = lax.rem(i, STAGES)
                    plgpu.barrier_wait(dout_ready.at[slot])
                    dp = product(v_smem, dout_smem.at[slot].T)
                    pl.when(i > 0)(lambda: plgpu.barrier_wait(dp_free))
                    dp_smem[...] = dp
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(dp_ready)

                    @pl.when(i > 0)
                    def refill_q():
                        plgpu.barrier_wait(q_free.at[lax.rem(i - 1, STAGES)])
                        pl.when(i - 1 + STAGES < steps)(lambda: load_q(i - 1 + STAGES))

                    plgpu.barrier_wait(p_ready)
                    p = plgpu.load(p_smem.at[0], layout=MATRIX)
                    p = p + plgpu.load(p_smem.at[1], layout=MATRIX)
                    arrive_if(i + 1 < steps, p_free)
                    if staged:
                        operand_smem[PRODUCER] = p
                        plgpu.commit_smem()
                        p = operand_smem.at[PRODUCER]
                    plgpu.wgmma(dv_acc, p, dout_smem.at[slot])
                    plgpu.wgmma_wait(0)
                    pl.when(i + STAGES < steps)(lambda: load_dout(i + STAGES))

                return dv_acc[...]

            dv = pl.run_scoped(accumulate, plgpu.ACC((TILE, value_width), jnp.float32))
            v_smem[...] = dv.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(v_smem, dv_gmem.at[sequence, keys, kv_head])
            plgpu.wait_smem_to_gmem(0)

    scratch = [
        smem((MAPS, TILE, width), dtype),  # k
        smem((TILE, value_width), dtype),  # v
        smem((STAGES, MAPS, TILE, width), dtype),  # q
        smem((STAGES, TILE, value_width), dtype),  # dout
        smem((MAPS, TILE, TILE), dtype),  # p
        smem((TILE, TILE), jnp.float32),  # dp
        plgpu.SMEM((STAGES, 2, MAPS, TILE), jnp.float32),  # stats
        smem((WARPGROUPS, TILE, TILE), dtype) if staged else None,  # operand
        plgpu.Barrier(num_arrivals=MAPS + 1),  # kv_ready: two copies of k, one of v
        plgpu.Barrier(num_arrivals=MAPS + 1, num_barriers=STAGES),  # q_ready: two copies of q, one of stats
        plgpu.Barrier(num_barriers=STAGES),  # dout_ready
        plgpu.Barrier(num_arrivals=MAPS, num_barriers=STAGES),  # q_free
        plgpu.Barrier(num_arrivals=MAPS),  # p_ready
        plgpu.Barrier(),  # p_free
        plgpu.Barrier(),  # dp_ready
        plgpu.Barrier(num_arrivals=MAPS),  # dp_free
    ]
    return plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct(k_BSKGD.shape, k_BSKGD.dtype),
            jax.ShapeDtypeStruct(v_BSKE.shape, v_BSKE.dtype),
        ),
        grid=(batch, kv_heads, tiles),
        grid_names=("sequence", "kv_head", "tile"),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="difftx_dkv",
    )(
        q_BTHGD, k_BSKGD, v_BSKE, dout_BTHE, stats_BHXGT, weight_BHGT, marks_BXT, queries_BN2
    )  # fmt: skip


def dq_call(  # noqa: C901
    q_BTHGD, k_BSKGD, v_BSKE, dout_BTHE, stats_BHXGT, weight_BHGT, marks_BXT, keys_BN2,
    *, window, interpret,
):  # fmt: skip
    """Compute dQ, with one CTA per (sequence, query head, query tile), which loops over its visible key tiles."""
    batch, length, heads, _, width = q_BTHGD.shape
    value_width, dtype = v_BSKE.shape[-1], q_BTHGD.dtype
    tiles, group = length // TILE, heads // k_BSKGD.shape[2]
    scale = width**-0.5
    registers = REGISTERS["H200", "dq"]
    staged = bool(interpret)  # the interpreter does not support wgmma operands in registers

    def kernel(  # noqa: C901
        q_gmem, k_gmem, v_gmem, dout_gmem, stats_gmem, weight_gmem, marks_gmem, keys_gmem,
        dq_gmem,
        q_smem, dout_smem, k_smem, v_smem, dp_smem, operand_smem,
        q_ready, k_ready, v_ready, k_free, dp_ready, dp_free,
    ):  # fmt: skip
        warpgroup = lax.axis_index("warpgroup")
        sequence, head = lax.axis_index("sequence"), lax.axis_index("head")
        kv_head = lax.div(head, group)
        q_tile = tiles - 1 - lax.axis_index("tile")  # query tiles with the most keys start first
        queries = rows_of(q_tile)
        first, full = keys_gmem[sequence, q_tile, 0], keys_gmem[sequence, q_tile, 1]
        seen = functools.partial(visible, marks_gmem.at[sequence], window=window, queries_in_rows=True)
        steps = at_least_one(q_tile + 1 - first)

        @pl.when(warpgroup < MAPS)
        def map_warpgroup():
            set_registers(registers.maps)

            def load_rows(ref):
                return plgpu.load(ref, layout=ROWS, optimized=False)

            lse = load_rows(stats_gmem.at[sequence, head, LSE, warpgroup, queries])
            scaled_delta = load_rows(stats_gmem.at[sequence, head, DELTA, warpgroup, queries])
            weight = load_rows(weight_gmem.at[sequence, head, warpgroup, queries])
            plgpu.barrier_wait(q_ready)

            def accumulate(dq_acc):
                @pl.loop(0, steps)
                def _(i):
                    k_tile, slot, dp_slot = first + i, lax.rem(i, STAGES), lax.rem(i, 2)
                    plgpu.barrier_wait(k_ready.at[slot])
                    logits = product(q_smem.at[warpgroup], k_smem.at[slot, warpgroup].T)
                    p = jnp.exp2(logits * (scale * LOG2_E) - across(lse, logits))

                    def mask(p):
                        return jnp.where(seen(q_tile, k_tile), p, 0.0)

                    p = lax.cond((k_tile < full) | (k_tile == q_tile), mask, lambda p: p, p)
                    p = p * across(weight, p)
                    plgpu.barrier_wait(dp_ready.at[dp_slot])
                    dp = plgpu.load(dp_smem.at[dp_slot], layout=MATRIX)
                    arrive_if(i + 2 < steps, dp_free.at[dp_slot])
                    ds = (p * (dp * scale - across(scaled_delta, dp))).astype(dtype)
                    if staged:
                        operand_smem[warpgroup] = ds
                        plgpu.commit_smem()
                        ds = operand_smem.at[warpgroup]
                    plgpu.wgmma(dq_acc, ds, k_smem.at[slot, warpgroup])
                    plgpu.wgmma_wait(0)
                    arrive_if(i + 1 < steps, k_free.at[slot])

                return dq_acc[...]

            dq = pl.run_scoped(accumulate, plgpu.ACC((TILE, width), jnp.float32))
            q_smem[warpgroup] = dq.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_smem.at[warpgroup], dq_gmem.at[sequence, queries, head, warpgroup])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == PRODUCER)
        def producer_warpgroup():
            set_registers(registers.producer)
            for m in range(MAPS):
                q_map_gmem = q_gmem.at[sequence, queries, head, m]
                plgpu.copy_gmem_to_smem(q_map_gmem, q_smem.at[m], q_ready)
            plgpu.copy_gmem_to_smem(dout_gmem.at[sequence, queries, head], dout_smem, q_ready)

            def load_k(i):
                slot = lax.rem(i, STAGES)
                for m in range(MAPS):
                    plgpu.copy_gmem_to_smem(
                        k_gmem.at[sequence, rows_of(first + i), kv_head, m],
                        k_smem.at[slot, m],
                        k_ready.at[slot],
                    )

            def load_v(i):
                slot = lax.rem(i, STAGES)
                plgpu.copy_gmem_to_smem(
                    v_gmem.at[sequence, rows_of(first + i), kv_head],
                    v_smem.at[slot],
                    v_ready.at[slot],
                )

            @pl.loop(0, lax.min(steps, STAGES))
            def _(i):
                load_v(i)
                load_k(i)

            plgpu.barrier_wait(q_ready)

            @pl.loop(0, steps)
            def _(i):
                slot, dp_slot = lax.rem(i, STAGES), lax.rem(i, 2)
                plgpu.barrier_wait(v_ready.at[slot])
                dp = product(dout_smem, v_smem.at[slot].T)
                pl.when(i + STAGES < steps)(lambda: load_v(i + STAGES))
                pl.when(i >= 2)(lambda: plgpu.barrier_wait(dp_free.at[dp_slot]))
                dp_smem[dp_slot] = dp
                plgpu.commit_smem()
                plgpu.barrier_arrive(dp_ready.at[dp_slot])

                @pl.when(i > 0)
                def refill_k():
                    plgpu.barrier_wait(k_free.at[lax.rem(i - 1, STAGES)])
                    pl.when(i - 1 + STAGES < steps)(lambda: load_k(i - 1 + STAGES))

    scratch = [
        smem((MAPS, TILE, width), dtype),  # q
        smem((TILE, value_width), dtype),  # dout
        smem((STAGES, MAPS, TILE, width), dtype),  # k
        smem((STAGES, TILE, value_width), dtype),  # v
        smem((2, TILE, TILE), jnp.float32),  # dp, double-buffered
        smem((MAPS, TILE, TILE), dtype) if staged else None,  # operand
        plgpu.Barrier(num_arrivals=MAPS + 1),  # q_ready: two copies of q, one of dout
        plgpu.Barrier(num_arrivals=MAPS, num_barriers=STAGES),  # k_ready
        plgpu.Barrier(num_barriers=STAGES),  # v_ready
        plgpu.Barrier(num_arrivals=MAPS, num_barriers=STAGES),  # k_free
        plgpu.Barrier(num_barriers=2),  # dp_ready
        plgpu.Barrier(num_arrivals=MAPS, num_barriers=2),  # dp_free
    ]
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(q_BTHGD.shape, dtype),
        grid=(batch, heads, tiles),
        grid_names=("sequence", "head", "tile"),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="difftx_dq",
    )(q_BTHGD, k_BSKGD, v_BSKE, dout_BTHE, stats_BHXGT, weight_BHGT, marks_BXT, keys_BN2)
