"""Static schedules of the TPU attention kernels, without a TPU.

    JAX_PLATFORMS=cpu python benchmarks/tpu_schedule.py

libtpu compiles the kernels for a TPU that is not attached and dumps the final VLIW bundles. One bundle is one cycle of
the core, apart from memory stalls. The script counts the bundles of one unmasked tile of queries x keys in bfloat16,
plus the work done once per query (or key) tile, and divides them by the tile's area in units of 512 x 512. It compares
difftx's fused kernels (the backend `pallas_tpu`) with two splash-attention calls whose values have width 2d
(`splash_wide`, which takes the split backward pass for rows over 4K), each kernel with its best tile, as a tuner would
choose it. Splash attention has two forms of the backward pass: split (dQ, dKV), and fused. The fused form writes a
partial dQ for every key tile to HBM and sums these outside of the kernel; the bundles include neither that traffic nor
the sum. difftx keeps dQ in VMEM where it fits, and splits otherwise.

For each chip, the script prints the bundles of each kernel and tile with the share of them that uses each slot of the
core, the bundles of the forward and the backward pass, and the ratios of splash attention to difftx. A tile whose
kernels do not fit in VMEM is left out.
"""

import argparse
import glob
import itertools
import os
import pathlib
import sys
import tempfile

_DUMP = tempfile.TemporaryDirectory(prefix="tpu_schedule_")
os.environ.update(  # libtpu reads these variables when it is loaded.
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    # Splash attention sets no limit of its own, and gets as much VMEM here as difftx's kernels on the smallest chip.
    LIBTPU_INIT_ARGS=f"--xla_jf_dump_to={_DUMP.name} --xla_jf_dump_llo_text=true --xla_tpu_scoped_vmem_limit_kib=57344",
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

TOPOLOGIES = {"v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "7x": "tpu7x:2x2x1"}
TOKENS = 4096
HEADS = 2
AREA = 512 * 512
# Queries, keys, and keys at a time of a splash-attention tile.
SPLASH_TILES = [
    (queries, keys, at_a_time)
    for queries in (512, 1024)
    for keys, at_a_time in ((512, 256), (512, 512), (1024, 256), (1024, 512), (1024, 1024))
]
SLOTS = ("MXU", "XLU", "VALU", "EUP", "VLOAD", "VSTORE", "VSTORE:SPILL")


def difftx_passes(d, side, dq_mib):
    """Return (function, [(shape, dtype)]) of difftx's forward and backward pass.

    `d` is the width of queries and keys, `side` the side of a tile in tokens, and `dq_mib` the MiB of VMEM for dQ, or 0
    for the split backward pass.
    """
    tiles = pallas_tpu.Tiles(side, vmem_mib=56, dq_mib=dq_mib)

    def both(q, k, v, lam, dout):
        pallas_tpu._tiles = lambda d: tiles
        out, saved = pallas_tpu.forward(q, k, v, lam, None, window=None)
        return pallas_tpu.backward(q, k, v, lam, None, out, saved, dout, window=None)

    qk = ((1, TOKENS, HEADS, 2, d), jnp.bfloat16)
    values = ((1, TOKENS, HEADS, 2 * d), jnp.bfloat16)
    return both, [qk, qk, values, ((1, TOKENS, HEADS), jnp.float32), values]


def splash_passes(d, tile, *, fused_backward):
    """Return (function, [(shape, dtype)]) of the forward and backward pass of one splash-attention call."""
    queries, keys, at_a_time = tile
    mask = splash_mask.MultiHeadMask([splash_mask.FullMask((TOKENS, TOKENS))] * HEADS)
    sizes = splash.BlockSizes(
        block_q=queries,
        block_kv=keys,
        block_kv_compute=at_a_time,
        block_q_dkv=queries,
        block_kv_dkv=keys,
        block_kv_dkv_compute=at_a_time,
        block_q_dq=None if fused_backward else queries,
        block_kv_dq=None if fused_backward else keys,
        use_fused_bwd_kernel=fused_backward,
    )
    call = splash.make_splash_mha_single_device(mask, block_sizes=sizes)

    def both(q, k, v, dout):
        return jax.vjp(call, q, k, v)[1](dout)

    qk = ((HEADS, TOKENS, d), jnp.bfloat16)
    values = ((HEADS, TOKENS, 2 * d), jnp.bfloat16)
    return both, [qk, qk, values, values]


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
    print(f"{chip}  {who:26s} {name:34s} {bundles:6.0f}  {slots}", flush=True)


def main():
    """Print the bundles of each kernel, then the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--d", type=int, default=128, help="sub-head width")
    parser.add_argument("--chips", default="v5p,v6e,7x")
    args = parser.parse_args()

    # Clear the flag MASKED of all visits, so that the masked branch is not compiled into the kernel.
    listed = pallas_tpu_kernels.list_visits
    pallas_tpu_kernels.list_visits = lambda *a, **k: listed(*a, **k) & ~pallas_tpu_kernels.MASKED

    for chip in args.chips.split(","):
        bundles = _print_kernels(chip, args.d)
        print(f"\n{chip}, d = {args.d}, E = {2 * args.d}, fewest bundles of 512 x 512:")
        _print_comparison(bundles)
        print()


def _print_kernels(chip, d):
    """Print the bundles of each kernel for a chip; return {implementation: (forward, backward, total)} bundles."""
    device = topologies.get_topology_desc(TOPOLOGIES[chip], "tpu").devices[0]
    ours = [(512, 512), (1024, 1024)]
    bundles = {}
    for who, build, tiles in (
        ("ours", lambda tile: difftx_passes(d, tile[0], dq_mib=24), ours),
        ("ours split", lambda tile: difftx_passes(d, tile[0], dq_mib=0), ours),
        ("splash", lambda tile: splash_passes(d, tile, fused_backward=True), SPLASH_TILES),
        ("splash split", lambda tile: splash_passes(d, tile, fused_backward=False), SPLASH_TILES),
    ):
        best = {}  # Kernel → its fewest bundles of a pass over AREA.
        for tile in tiles:
            try:
                kernels = schedules(*build(tile), device)
            except jax.errors.JaxRuntimeError as error:
                print(f"{chip}  {who:12s} {tile}: {str(error).splitlines()[0][:100]}", flush=True)
                continue
            for name, (count, share) in sorted(kernels.items()):
                count = count * AREA / (tile[0] * tile[1])
                _print_kernel(chip, f"{who} {'x'.join(map(str, tile))}", name, count, share)
                best[name] = min(count, best.get(name, count))
        calls = 2 if who.startswith("splash") else 1
        # Splash attention writes "fwd" in the name of a kernel, and difftx "forward".
        forward = sum(count for name, count in best.items() if "fwd" in name or "forward" in name)
        total = sum(best.values())
        bundles[who] = tuple(calls * count for count in (forward, total - forward, total))
    return bundles


def _print_comparison(bundles):
    """Print the bundles of each implementation, and the ratios of splash attention to difftx."""
    print(f"{'':28s} {'forward':>9s} {'backward':>9s} {'total':>9s}")
    for who, counts in bundles.items():
        calls = "two calls, " if who.startswith("splash") else ""
        print(f"{calls + who:28s} " + " ".join(f"{count:9.0f}" for count in counts))
    for own, base in itertools.product(("ours", "ours split"), ("splash", "splash split")):
        ratios = (theirs / ours for ours, theirs in zip(bundles[own], bundles[base], strict=True))
        print(f"{base + ' / ' + own:28s} " + " ".join(f"{ratio:8.2f}x" for ratio in ratios))


if __name__ == "__main__":
    main()
