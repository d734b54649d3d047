"""Static schedules of the TPU attention kernels, without a TPU.

    JAX_PLATFORMS=cpu python benchmarks/tpu_schedule.py

libtpu compiles the kernels for a TPU that is not attached and dumps the final VLIW bundles. One
bundle is one cycle of the core, apart from memory stalls. The script counts the bundles of one
unmasked tile of queries x keys in bfloat16, plus the work done once per query (or key) tile. It
compares difftx's fused kernels (the backend `pallas_tpu`) with two splash-attention calls whose
values have width 2D (`splash_wide`, which takes the split backward pass for rows over 4K). Splash
attention has two forms of the backward pass: split (dQ, dKV), and fused. The fused form writes a
partial dQ for every key tile to HBM and sums these outside of the kernel; the bundles include
neither that traffic nor the sum. difftx keeps dQ in VMEM where it fits, and splits otherwise.
"""

import argparse
import functools
import glob
import os
import pathlib
import sys
import tempfile

_DUMP = tempfile.TemporaryDirectory(prefix="tpu_schedule_")
os.environ.update(  # libtpu reads these variables when it is loaded.
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    LIBTPU_INIT_ARGS=f"--xla_jf_dump_to={_DUMP.name} --xla_jf_dump_llo_text=true",
)
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.experimental.pallas.ops.tpu.splash_attention import (  # noqa: E402
    splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (  # noqa: E402
    splash_attention_mask as splash_mask,
)

from difftx.kernels import pallas_tpu, pallas_tpu_kernels  # noqa: E402

TOPOLOGIES = {"v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
TOKENS, HEADS = 4096, 2
SLOTS = ("MXU", "XLU", "VALU", "EUP", "VLOAD", "VSTORE", "VSTORE:SPILL")


def ours(d, side, dq_mib):
    """Return (function, [(shape, dtype)]) of difftx's forward and backward pass."""
    t, h = TOKENS, HEADS
    tiles = pallas_tpu.Tiles(side, vmem_mib=56, dq_mib=dq_mib)

    def both(q, k, v, lam, dout):
        pallas_tpu._tiles = lambda d: tiles
        out, saved = pallas_tpu.forward(q, k, v, lam, None, window=None)
        return pallas_tpu.backward(q, k, v, lam, None, out, saved, dout, window=None)

    qk, ve = ((1, t, h, 2, d), jnp.bfloat16), ((1, t, h, 2 * d), jnp.bfloat16)
    return both, [qk, qk, ve, ((1, t, h), jnp.float32), ve]


def theirs(d, side, *, fused_backward):
    """Return (function, [(shape, dtype)]) of the forward and backward pass of one splash-attention call."""
    mask = splash_mask.MultiHeadMask([splash_mask.FullMask((TOKENS, TOKENS))] * HEADS)
    dq_side = None if fused_backward else side
    sizes = splash.BlockSizes(
        block_q=side,
        block_kv=side,
        block_kv_compute=side,
        block_q_dkv=side,
        block_kv_dkv=side,
        block_kv_dkv_compute=side,
        block_q_dq=dq_side,
        block_kv_dq=dq_side,
        use_fused_bwd_kernel=fused_backward,
    )
    call = splash.make_splash_mha_single_device(mask, block_sizes=sizes)

    def both(q, k, v, dout):
        return jax.vjp(call, q, k, v)[1](dout)

    qk, ve = ((HEADS, TOKENS, d), jnp.bfloat16), ((HEADS, TOKENS, 2 * d), jnp.bfloat16)
    return both, [qk, qk, ve, ve]


def schedules(function, shapes, device):
    """Compile a function for `device`; return {kernel: (bundles, {slot: share in use})}."""
    kind = jax.sharding.AbstractDevice(device_kind=device.device_kind, num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=kind)
    placed = jax.sharding.SingleDeviceSharding(device)
    arguments = [jax.ShapeDtypeStruct(s, dtype, sharding=placed) for s, dtype in shapes]
    with jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(lambda *xs: function(*xs)).lower(*arguments)
    before = set(os.listdir(_DUMP.name))
    lowered.compile()
    found = {}
    for path in glob.glob(_DUMP.name + "/*final_hlo-static-per-bundle-utilization.txt"):
        name = os.path.basename(path)
        if name in before or ("splash" not in name and "diff_attention" not in name):
            continue
        lines = pathlib.Path(path).read_text().splitlines()
        slots = [x.strip() for x in lines[1].split(",")]
        capacity = dict(zip(slots, map(int, lines[2].split()), strict=True))
        rows = [list(map(int, line.split())) for line in lines[4:] if line.strip()]
        used = dict(zip(slots, map(sum, zip(*rows, strict=True)), strict=True))
        share = {s: used[s] / (capacity[s] * len(rows)) for s in SLOTS}
        found[name.split("-", 1)[1].split(".")[0]] = (len(rows), share)
    return found


def _print_kernel(chip, who, name, bundles, share):
    slots = "  ".join(f"{s} {100 * share[s]:.0f}%" for s in SLOTS)
    print(f"{chip}  {who:12s} {name:34s} {bundles:6d}  {slots}", flush=True)


def main():
    """Print the bundles of each kernel, then the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--d", type=int, default=128, help="sub-head width")
    parser.add_argument("--side", type=int, default=512, help="tile side in tokens")
    parser.add_argument("--chips", default="v5p,v6e")
    args = parser.parse_args()

    # Clear the flag MASKED of all visits, so that the masked branch is not compiled into the kernel.
    listed = pallas_tpu_kernels.list_visits
    pallas_tpu_kernels.list_visits = lambda *a, **k: listed(*a, **k) & ~pallas_tpu_kernels.MASKED

    for chip in args.chips.split(","):
        device = topologies.get_topology_desc(TOPOLOGIES[chip], "tpu").devices[0]
        bundles = {}
        for who, build in (
            ("ours", functools.partial(ours, dq_mib=24)),
            ("ours split", functools.partial(ours, dq_mib=0)),
            ("splash", functools.partial(theirs, fused_backward=True)),
            ("splash split", functools.partial(theirs, fused_backward=False)),
        ):
            calls = 2 if who.startswith("splash") else 1
            parts = schedules(*build(args.d, args.side), device)
            for name, (count, share) in sorted(parts.items()):
                _print_kernel(chip, who, name, count, share)
            forward = sum(count for name, (count, _) in parts.items() if "fwd" in name)
            forward += sum(count for name, (count, _) in parts.items() if "forward" in name)
            total = sum(count for count, _ in parts.values())
            bundles[who] = tuple(calls * x for x in (forward, total - forward, total))
        print(f"\n{chip}, D = {args.d}, E = {2 * args.d}, {args.side} x {args.side}, bundles:")
        print(f"{'':28s} {'forward':>9s} {'backward':>9s} {'total':>9s}")
        for who, counts in bundles.items():
            calls = "two calls, " if who.startswith("splash") else ""
            print(f"{calls + who:28s} " + " ".join(f"{x:9d}" for x in counts))
        for who, base in (
            ("ours", "splash"),
            ("ours", "splash split"),
            ("ours split", "splash"),
            ("ours split", "splash split"),
        ):
            ratios = (b / a for a, b in zip(bundles[who], bundles[base], strict=True))
            print(f"{base + ' / ' + who:28s} " + " ".join(f"{x:8.2f}x" for x in ratios))
        print()


if __name__ == "__main__":
    main()
