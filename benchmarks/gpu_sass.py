"""Instructions of the Hopper attention kernels, and the times below which they cannot run, without a GPU.

    pip install --no-deps --target=/tmp/nvdisasm nvidia-cuda-nvdisasm   # 5 MB
    PATH=/tmp/nvdisasm/nvidia/cu13/bin:$PATH .venv-compile/bin/python benchmarks/gpu_sass.py

XLA and ptxas compile the kernels for an H200 that is not attached (jax-cuda13-plugin, ptxas on the PATH), and nvdisasm
prints their machine code (SASS) with its stall counts and scoreboards. The script counts the instructions of the main
loops, which a warpgroup runs once per pair of a query tile and a key tile. It leaves out two branches: one masks tiles
on the diagonal, and one rescales the output after the maximum of a row has grown.

The floors of a kernel are the clocks per pair of tiles that one unit of an SM is busy. The largest floor bounds the
kernel. "alone" is the time of one loop iteration if no other warpgroup uses the SM: instructions issue in order after
their stall counts and scoreboards, matrix products run one after another, and barriers are always open. "model" is the
time of `benchmarks/gpu_model.py` for all warpgroups together. Its milliseconds include the starts and ends of CTAs.

For each kernel, the script prints the counts of its main loops, and then its floors in clocks and in milliseconds.
"""

import argparse
import collections
import dataclasses
import os
import pathlib
import re
import shutil
import sys
import tempfile
from typing import NamedTuple

_DUMP = tempfile.TemporaryDirectory(prefix="gpu_sass_")
os.environ.update(  # Mosaic GPU reads these variables when it compiles.
    JAX_PLATFORMS="cpu", MOSAIC_GPU_DUMP_SASS_CTRL="1", MOSAIC_GPU_DUMP_TO=_DUMP.name
)
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.experimental.pallas import mosaic_gpu as plgpu  # noqa: E402, F401 - It overwrites MOSAIC_GPU_CUDA_ROOT.

from benchmarks import gpu_model  # noqa: E402
from difftx.kernels import pallas_gpu  # noqa: E402
from difftx.kernels.pallas_gpu_backward import STAGES, dkv_stages  # noqa: E402
from difftx.kernels.pallas_gpu_tiles import GROUPS, PAIR, TILE  # noqa: E402
from difftx.launch.topology import find_devices, parse_topology  # noqa: E402

BATCH = 4
TOKENS = 4096
HEADS = 12
MMA_PER_CLOCK = 2048  # Multiply-adds in bfloat16 of an SM: 989.4 TFLOP/s at 132 SMs and 1.83 GHz, NVIDIA's H100 SXM.
MUFU_CLOCKS = 8  # Clocks of an instruction of a warp: each of the 4 partitions of an SM computes 4 lanes per clock.
# Estimates of clocks from issue to result of instructions that set a scoreboard. Operands are in the SM or in L2.
LATENCY = {"MUFU": 22, "SHFL": 24, "LDS": 30, "LD": 260, "LDG": 260}
OTHER_LATENCY = 20
HGMMA_LATENCY = 32  # From the last product of a group to the end of the wait for it.

MODELS = {"difftx_forward": gpu_model.forward, "difftx_dkv": gpu_model.dkv, "difftx_dq": gpu_model.dq}
SHARING = {"difftx_forward": PAIR, "difftx_dkv": 1, "difftx_dq": PAIR}  # CTAs that load a tile together.
# The number of warpgroups that run each main loop, in the order of the code.
LOOPS = {
    "difftx_forward": {"softmax": GROUPS, "loads": 1},
    "difftx_dkv": {"softmax": GROUPS, "dP, dV": 1},
    "difftx_dq": {"softmax": GROUPS, "dP": 1},
}
# A line of SASS with its control code: waits, scoreboards of operands and of the result, stall count, opcode, operands.
SASS_LINE = re.compile(r"([\dx&a-f-]+):([\d-]):([\d-]):[Y-]:(\d+)\s+/\*\w+\*/\s+(?:@!?U?P\w+\s+)?([\w.]+)\s*(.*)$")


class Product(NamedTuple):
    """A matrix product of shape 64 x `columns` x 16."""

    columns: int
    left_in_registers: bool  # Whether the left operand is in registers, and not in shared memory.


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of SASS and its control code."""

    opcode: str
    operands: str
    waits: tuple[int, ...]  # Scoreboards to wait for before the issue.
    sets: tuple[int, ...]  # Scoreboards that are released when the operands are read or the result is written.
    stall: int  # Clocks until the next instruction may issue.

    @property
    def name(self):
        """The opcode without its modifiers."""
        return self.opcode.split(".")[0]

    @property
    def label(self):
        """The label that a branch jumps to."""
        found = re.search(r"\.L_x_\d+", self.operands)
        return found[0] if self.name == "BRA" and found else None

    @property
    def product(self):
        """The `Product` that this instruction computes, or None."""
        found = re.match(r"HGMMA\.64x(\d+)x16", self.opcode)
        return found and Product(int(found[1]), bool(re.match(r"R\d+, R\d+, gdesc", self.operands)))

    @property
    def tensor_clocks(self):
        """Clocks that the tensor cores of an SM need for this product of a warpgroup, or 0."""
        return TILE * self.product.columns * 16 // MMA_PER_CLOCK if self.product else 0

    @property
    def shared_bytes(self):
        """Bytes of shared memory that a warpgroup reads or writes by this instruction."""
        if self.product:  # A is [64, 16] and B is [16, columns], in bfloat16.
            return 32 * self.product.columns + (0 if self.product.left_in_registers else 2048)
        if self.name in ("STSM", "LDSM"):
            return 512 * int(self.opcode[-1])
        if self.name in ("STS", "LDS"):
            bits = re.search(r"\.(64|128)", self.opcode)
            return 16 * (int(bits[1]) if bits else 32)
        return 0


def parse(path):
    """Return the instructions of a dumped kernel, and the index of the instruction at each label."""
    instructions, labels = [], {}
    for line in path.read_text().splitlines():
        if label := re.match(r"(\.L_x_\d+):", line.strip()):
            labels[label[1]] = len(instructions)
        elif found := SASS_LINE.match(line.strip()):
            waits, read, written, stall, opcode, operands = found.groups()
            if waits.startswith("0x"):  # A mask instead of a list.
                waits = "".join(str(i) for i in range(6) if int(waits, 16) >> i & 1)
            sets = tuple(int(x) for x in (read, written) if x != "-")
            waits = tuple(int(x) for x in re.findall(r"\d", waits))
            instructions.append(Instruction(opcode, operands, waits, sets, int(stall)))
    return instructions, labels


def main_loops(instructions, labels):
    """Return the instructions of each main loop, in the order of the code, without the branches that mask tiles.

    These are the loops with matrix products, or if there is only one, that loop and those that load tiles.
    """
    bodies = []
    for end, instruction in enumerate(instructions):
        start = labels.get(instruction.label, end)
        # The code that sleeps until a barrier opens lies behind the kernel, and returns by a backward branch.
        from_sleep = any(x.name == "NANOSLEEP" for x in instructions[end - 5 : end])
        if start < end and not from_sleep:
            bodies.append((start, end + 1))
    with_products = [body for body in bodies if any(x.product for x in instructions[slice(*body)])]
    with_loads = [body for body in bodies if any(x.name == "UTMALDG" for x in instructions[slice(*body)])]
    loops = with_products if len(with_products) > 1 else with_products + with_loads
    return [_without_rare_branches(instructions, labels, *loop) for loop in loops]


def _without_rare_branches(instructions, labels, start, end):
    """Return the instructions from `start` to before `end`, without the branches that few tiles take."""
    body, i = [], start
    while i < end:
        body.append(instructions[i])
        after = labels.get(instructions[i].label, -1)
        skipped = instructions[i + 1 : after] if i < after < end else ()
        # Only the mask loads from global memory and selects. Only rescaling multiplies all of an accumulator.
        names = collections.Counter(x.name for x in skipped)
        i = after if {"LD", "FSEL"} <= names.keys() or names["FMUL"] >= TILE // 2 else i + 1
    return body


def clocks_alone(body, *, iterations=40, multiplies=True):
    """Return the clocks of one iteration of a warpgroup (one warp in each partition) that has the SM to itself.

    The second result holds the clocks from the start of an iteration to the end of each of its waits for products. If
    `multiplies` is false, products take no time.
    """
    released = collections.defaultdict(int)  # Scoreboard -> clock.
    groups = []  # Clocks at which committed groups of matrix products finish.
    clock = tensor_free = mufu_free = 0
    starts, waits = [], []  # Clocks at which iterations start, and at which the waits of the last one end.
    for _ in range(iterations):
        starts.append(clock)
        waits.clear()
        for x in body:
            clock = max([clock, *(released[s] for s in x.waits)])
            result = clock + LATENCY.get(x.name, OTHER_LATENCY)
            if x.product:
                tensor_free = max(clock, tensor_free) + x.tensor_clocks * multiplies
                if "gsb" in x.operands:
                    groups.append(tensor_free + HGMMA_LATENCY * multiplies)
            elif x.opcode == "WARPGROUP.DEPBAR.LE":
                left = int(x.operands.split(",")[1], 16)
                clock = max([clock, *groups[: len(groups) - left]])
                waits.append(clock - starts[-1])
            elif x.name == "MUFU":
                result = max(clock, mufu_free) + LATENCY["MUFU"]
                mufu_free = max(clock, mufu_free) + MUFU_CLOCKS
            for scoreboard in x.sets:
                released[scoreboard] = max(released[scoreboard], result)
            clock += x.stall
    return (starts[-1] - starts[9]) / (iterations - 10), waits  # Without the first iterations.


def print_kernel(name, width):
    """Print the counts of a dumped kernel's main loops; return {unit: clocks per pair of tiles that it is busy}."""
    (sass,), (ptxas_log,) = (pathlib.Path(_DUMP.name).glob(f"{name}_[0-9]*.{x}") for x in ("sass_ctrl", "ptxas"))
    bodies = main_loops(*parse(sass))
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", ptxas_log.read_text())))  # Stores and loads.
    print(f"\n{name}, d = {width}, spilled bytes {spilled}")
    # Q, K or V tiles of one step: two tiles of width d and one of width 2d, in bfloat16.
    loaded = TILE * 4 * width * 2
    busy = collections.defaultdict(float)
    busy["L2"] = loaded / gpu_model.L2_BYTES_PER_CLOCK / SHARING[name]
    busy["shared memory"] = loaded / gpu_model.SHARED_BYTES_PER_CLOCK
    computed = []  # Clocks per iteration that loops compute.
    for (loop, warpgroups), body in zip(LOOPS[name].items(), bodies, strict=True):
        count = collections.Counter(x.name for x in body)
        tensor = sum(x.tensor_clocks for x in body)
        busy["tensor"] += warpgroups * tensor
        busy["shared memory"] += warpgroups * sum(x.shared_bytes for x in body) / gpu_model.SHARED_BYTES_PER_CLOCK
        busy["exp2"] += warpgroups * MUFU_CLOCKS * count["MUFU"]
        busy["issue"] += warpgroups * len(body)
        alone, _ = clocks_alone(body)
        busy[f"alone, {loop}"] = alone
        clocks, waits = clocks_alone(body, multiplies=False)
        if order(body) == "PPWW":  # Between its two waits, it computes while the second product is in flight.
            computed += [waits[1] - waits[0], clocks - (waits[1] - waits[0])]
        elif tensor:
            computed.append(alone - tensor)
        print_loop(loop, warpgroups, body)
    print(f"  computed clocks: {', '.join(f'{x:.0f}' for x in computed)}")
    stages = {"difftx_forward": pallas_gpu.STAGES, "difftx_dkv": dkv_stages(width), "difftx_dq": STAGES}[name]
    busy["model"] = gpu_model.clocks_per_step(MODELS[name](width, *computed, stages=stages), loaded=loaded)
    return busy


def order(body):
    """Return P for each group of products that ends (its commit) and W for each wait, in the order of the code."""
    return "".join("P" if x.product else "W" for x in body if "gsb" in x.operands)


def print_loop(loop, warpgroups, body):
    """Print the counts of the instructions of a main loop."""
    count = collections.Counter(x.name for x in body)
    products = collections.Counter(x.product for x in body if x.product)
    shapes = [f"{n} x 64x{x.columns}x16 {'RS' if x.left_in_registers else 'SS'}" for x, n in products.items()]
    moved = [x.shared_bytes for x in body if x.shared_bytes and not x.product]
    print(
        f"  {loop} ({warpgroups} x): {len(body)} instructions, {', '.join(shapes)}\n"
        f"    groups of products and waits {order(body) or '-'}, exp2 {count['MUFU']}, fp32 "
        f"{sum(count[x] for x in ('FFMA', 'FADD', 'FMUL', 'FMNMX'))}, to bf16 {count['F2FP']}, "
        f"shuffles {count['SHFL']}\n"
        f"    shared memory: products {sum(x.shared_bytes for x in body if x.product)} bytes, "
        f"{len(moved)} LDS/STS/LDSM/STSM {sum(moved)} bytes; TMA loads {count['UTMALDG']}, mbarriers "
        f"{count['SYNCS']}, BAR {count['BAR']}, fences {count['MEMBAR'] + count['FENCE']}, "
        f"global loads {count['LD'] + count['LDG']}"
    )


def compile_kernels(width):
    """Compile the forward and the backward pass for one H200, and dump their SASS."""
    (device,) = find_devices(parse_topology("h200:1"))

    def struct(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.SingleDeviceSharding(device))

    def both(q, k, v, lam, dout):
        out, saved = pallas_gpu.forward(q, k, v, lam, None, window=None, interpret=False)
        return pallas_gpu.backward(q, k, v, lam, None, out, saved, dout, window=None, interpret=False)

    q, v = (struct(jnp.bfloat16, BATCH, TOKENS, HEADS, *rest) for rest in ((GROUPS, width), (2 * width,)))
    jax.jit(both).lower(q, q, v, struct(jnp.float32, BATCH, TOKENS, HEADS), v).compile()


def main():
    """Print the counts and the floors of the three kernels."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=128, help="head width d")
    width = parser.parse_args().width
    nvdisasm = shutil.which("nvdisasm")
    if not nvdisasm:
        parser.error("nvdisasm is not on the PATH: see the first lines of this file")
    os.environ["MOSAIC_GPU_CUDA_ROOT"] = str(pathlib.Path(nvdisasm).parents[1])
    compile_kernels(width)
    floors = {name: print_kernel(name, width) for name in LOOPS}
    shape = gpu_model.Shape(batch=BATCH, heads=HEADS, tokens=TOKENS)
    print(f"\nD = {width}, clocks per pair of tiles, and ms at B = {BATCH}, T = {TOKENS}, H = {HEADS}, causal:")
    for name, busy in floors.items():
        for unit, clocks in busy.items():
            ms = shape.milliseconds(clocks, ctas=unit == "model", sharing=SHARING[name])
            print(f"  {name:15s} {unit:18s} {clocks:7.0f} {ms:8.2f} ms")


if __name__ == "__main__":
    main()
