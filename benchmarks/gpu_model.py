"""Model of the time of a Hopper attention kernel: three warpgroups of one SM share its tensor cores and its memories.

`benchmarks/gpu_sass.py` counts the clocks that each warpgroup computes between its matrix products. This model predicts
how long a pair of tiles takes with all three warpgroups. The floors of single units do not suffice for that: two
warpgroups that wait for the same tile run in phase. Both multiply, then both compute while the tensor cores idle.

A warpgroup is a generator of operations:
    ("compute", clocks)                 instructions that use neither tensor cores nor much shared memory
    ("move", clocks)                    loads or stores of registers that need the whole bandwidth of shared memory
    ("product", clocks, share, event)   start a matrix product that reads `share` of the bandwidth of shared memory
    ("load", event, bytes)              start a TMA load
    ("wait", event), ("signal", event)  a barrier, or the end of a product or of a load

The tensor cores serve the warpgroups in equal shares, and the products of each warpgroup in order. No number is fitted
to the times that the model predicts.
"""

import dataclasses
import heapq
from collections.abc import Callable, Iterator

SMS = 132  # Streaming multiprocessors of an H100 or H200.
# An assumption, as in benchmarks/records/2026-11-23_gpu_sass.md, because the clock under load was not measured.
# NVIDIA's peak FLOP/s correspond to 1.83 GHz, and the largest clock is 1.98 GHz.
CLOCK_HZ = 1.755e9
SHARED_BYTES_PER_CLOCK = 128
L2_BYTES_PER_S = 6.65e12  # Measured on an H100: openxla/xla, xla/service/gpu/model/gpu_dot_fusion_cost_model.cc.
L2_BYTES_PER_CLOCK = L2_BYTES_PER_S / SMS / CLOCK_HZ  # The share of one SM.
TMA_LATENCY = 900  # Clocks from a TMA load to its data while L2 is busy, an estimate. 600 changes times by up to 5 %.
CTA_SECONDS = 2e-6  # Start and end of a CTA, in which no tile is computed: an estimate.
TILE = 64

type Program = Iterator[tuple]
type Kernel = Callable[[int], list[Program]]  # Number of steps → the programs of the warpgroups.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Causal attention of `batch` sequences with `heads` heads of `tokens` tokens."""

    batch: int
    heads: int
    tokens: int

    def milliseconds(self, clocks: float, *, ctas: bool, sharing: int = 1, idle: float = 0.0) -> float:
        """Return the time of a kernel that needs `clocks` per pair of tiles.

        `sharing` neighbouring query tiles visit the same key tiles, `ctas` adds the starts and ends of CTAs, and `idle`
        is the share of time that the SMs wait for the last CTA.
        """
        tiles = self.tokens // TILE
        rows_per_sm = self.batch * self.heads / SMS
        busy = clocks * rows_per_sm * tiles * (tiles + sharing) / 2 / CLOCK_HZ
        return 1e3 * (busy / (1 - idle) + ctas * rows_per_sm * tiles * CTA_SECONDS)


@dataclasses.dataclass(eq=False)
class _Warpgroup:
    program: Program
    waits_for: object = None  # An event, or None while it computes or moves.
    moves: bool = False
    left: float = 0.0  # Clocks of "compute" or "move" that are left at full speed.


@dataclasses.dataclass(eq=False)
class _Product:
    left: float
    share: float
    event: object
    warpgroup: _Warpgroup


class _SM:
    def __init__(self, programs: list[Program], written_share: float):
        self.now = self.link_free = 0.0
        self.events: set = set()
        self.loads: list[tuple[float, int, object]] = []  # A heap of (clock, number, event).
        self.products: list[_Product] = []  # In the order in which they were started.
        self.bandwidth = 1 - written_share  # Of shared memory.
        self.running = [x for x in map(_Warpgroup, programs) if self.resume(x)]

    def resume(self, warpgroup: _Warpgroup) -> bool:
        """Do the next operations of a warpgroup, up to one that takes time. Return False at the end of its program."""
        for operation in warpgroup.program:
            match operation:
                case ("signal", event):
                    self.events.add(event)
                case ("load", event, size):
                    self.link_free = max(self.now + TMA_LATENCY, self.link_free) + size / L2_BYTES_PER_CLOCK
                    heapq.heappush(self.loads, (self.link_free, len(self.loads), event))
                case ("product", clocks, share, event):
                    self.products.append(_Product(clocks, share, event, warpgroup))
                case ("wait", event):
                    warpgroup.waits_for = event
                    if event not in self.events:
                        return True
                case (kind, clocks):
                    warpgroup.waits_for, warpgroup.moves, warpgroup.left = None, kind == "move", clocks
                    return True
        return False

    def run_to_next_event(self) -> None:
        """Let time pass until the first product, load, "compute" or "move" ends."""
        first = {x.warpgroup: x for x in reversed(self.products)}  # The oldest product of each warpgroup.
        working = [x for x in self.running if x.waits_for is None]
        demand = sum(x.moves for x in working) + sum(x.share for x in first.values()) / max(len(first), 1)
        slowed = min(1.0, self.bandwidth / demand) if demand else 1.0
        speed = {x: slowed / len(first) for x in first.values()} | {x: slowed if x.moves else 1.0 for x in working}
        step = min([x.left / rate for x, rate in speed.items()] + [clock - self.now for clock, _, _ in self.loads[:1]])
        self.now += step
        for x, rate in speed.items():
            x.left -= rate * step
        self.events |= {x.event for x in first.values() if x.left < 1e-6}
        self.products = [x for x in self.products if x.left >= 1e-6]
        while self.loads and self.loads[0][0] <= self.now + 1e-6:
            self.events.add(heapq.heappop(self.loads)[2])

    def ready(self, warpgroup: _Warpgroup) -> bool:
        if warpgroup.waits_for is None:
            return warpgroup.left < 1e-6
        return warpgroup.waits_for in self.events


def clocks(programs: list[Program], *, written_share: float) -> float:
    """Return the clocks until all programs end. TMA writes take `written_share` of shared memory's bandwidth."""
    sm = _SM(programs, written_share)
    while sm.running:
        if any(map(sm.ready, sm.running)):
            sm.running = [x for x in sm.running if not sm.ready(x) or sm.resume(x)]
        else:
            sm.run_to_next_event()
    return sm.now


def clocks_per_step(programs_of: Kernel, *, loaded: int, steps: int = 40) -> float:
    """Return the clocks of a step in the middle of a long loop. `loaded` are the bytes that TMA writes per step."""
    result = 2000.0
    for _ in range(4):  # The share of TMA's writes depends on the time.
        share = loaded / SHARED_BYTES_PER_CLOCK / result
        long, short = (clocks(programs_of(n), written_share=share) for n in (steps, steps // 2))
        result = (long - short) / (steps - steps // 2)
    return result


def multiply(duration: float, share: float, event: object) -> Program:
    """Start a matrix product and wait for it."""
    yield "product", duration, share, event
    yield "wait", event


def loads(stages: int, steps: int, tiles: dict[str, int], readers: int = 2) -> Program:
    """Fill the buffers of each array in `tiles`, {name: bytes}, when all readers have signalled that they are free."""
    for i in range(steps):
        for name, size in tiles.items():
            if i >= stages:
                for m in range(readers):
                    yield "wait", (name, "free", m, i - stages)
            yield "load", (name, i), size


def forward(width: int, during: float, after: float, *, stages: int, sharing: int = 2) -> Kernel:
    """Return the programs of the forward kernel, of which `sharing` CTAs load each tile together.

    It computes `during` clocks of a step while P·V is in flight, and then `after` clocks.
    """
    unit = 2 * width  # Clocks of a product of 64 x 64 x `width`.

    def warpgroup(m: int, steps: int) -> Program:
        yield "wait", ("k", 0)
        yield from multiply(unit, 0.5, ("logits", m, 0))
        yield "signal", ("k", "free", m, 0)
        yield "compute", during
        yield "wait", ("v", 0)
        for i in range(steps - 1):
            yield "wait", ("k", i + 1)
            yield "product", unit, 0.5, ("logits", m, i + 1)
            yield "product", 2 * unit, 0.5, ("output", m, i)
            yield "wait", ("logits", m, i + 1)
            yield "compute", during
            yield "wait", ("v", i + 1)
            if i + 2 < steps:
                yield "wait", ("k", i + 2)
            yield "wait", ("output", m, i)
            yield "signal", ("k", "free", m, i + 1)
            yield "signal", ("v", "free", m, i)
            yield "compute", after
        yield from multiply(2 * unit, 0.5, ("output", m, steps - 1))

    size = TILE * 2 * width * 2 // sharing
    return lambda steps: [warpgroup(0, steps), warpgroup(1, steps), loads(stages, steps, {"k": size, "v": size})]


def dkv(width: int, softmax: float, producer: float, *, stages: int) -> Kernel:
    """Return the programs of the dK/dV kernel. `softmax` and `producer` are the clocks that they compute per step."""
    unit, size = 2 * width, TILE * 2 * width * 2
    store_p, load_dp, move_dp, load_p = 64, 128, 128, 128  # Clocks to move tiles between registers and shared memory.

    def warpgroup(m: int, steps: int) -> Program:
        for i in range(steps):
            yield "wait", ("q", i)
            yield from multiply(unit, 1.0, ("logits", m, i))
            yield "compute", softmax / 2
            if i:
                yield "wait", ("p", "free", i - 1)
            yield "move", store_p
            yield "signal", ("p", m, i)
            yield "wait", ("dp", i)
            yield "move", load_dp
            yield "signal", ("dp", "free", m, i)
            yield "compute", softmax / 2 - store_p - load_dp
            yield from multiply(unit, 0.5, ("dk", m, i))
            yield "signal", ("q", "free", m, i)

    def producing(steps: int) -> Program:
        for i in range(min(stages, steps)):
            yield "load", ("q", i), size
            yield "load", ("dout", i), size
        for i in range(steps):
            yield "wait", ("dout", i)
            yield from multiply(2 * unit, 1.0, ("product dp", i))
            if i:
                yield "wait", ("dp", "free", 0, i - 1)
                yield "wait", ("dp", "free", 1, i - 1)
            yield "move", move_dp
            yield "compute", producer / 2 - move_dp
            yield "signal", ("dp", i)
            if i:
                yield "wait", ("q", "free", 0, i - 1)
                yield "wait", ("q", "free", 1, i - 1)
                if i - 1 + stages < steps:
                    yield "load", ("q", i - 1 + stages), size
            yield "wait", ("p", 0, i)
            yield "wait", ("p", 1, i)
            yield "move", load_p
            yield "compute", producer / 2 - load_p
            yield "signal", ("p", "free", i)
            yield from multiply(2 * unit, 0.5, ("dv", i))
            if i + stages < steps:
                yield "load", ("dout", i + stages), size

    return lambda steps: [warpgroup(0, steps), warpgroup(1, steps), producing(steps)]


def dq(width: int, during: float, after: float, producer: float, *, stages: int, sharing: int = 2) -> Kernel:
    """Return the programs of the dQ kernel, of which `sharing` CTAs load each tile together.

    Its softmax warpgroups compute `during` clocks of a step while dS·K is in flight, and `after` clocks with dP. Its
    other warpgroup computes `producer` clocks.
    """
    unit, size = 2 * width, TILE * 2 * width * 2 // sharing
    load_dp, store_dp = 128, 128

    def warpgroup(m: int, steps: int) -> Program:
        yield "wait", ("k", 0)
        yield from multiply(unit, 0.5, ("logits", m, 0))
        yield "compute", during
        yield "wait", ("dp", 0)
        for i in range(steps - 1):
            yield "move", load_dp
            yield "signal", ("dp", "free", m, i)
            yield "compute", after - load_dp
            yield "wait", ("k", i + 1)
            yield "product", unit, 0.5, ("logits", m, i + 1)
            yield "product", unit, 0.5, ("dq", m, i)
            yield "wait", ("logits", m, i + 1)
            yield "compute", during
            yield "wait", ("dp", i + 1)
            if i + 2 < steps:
                yield "wait", ("k", i + 2)
            yield "wait", ("dq", m, i)
            yield "signal", ("k", "free", m, i)
        yield "compute", after
        yield from multiply(unit, 0.5, ("dq", m, steps - 1))

    def producing(steps: int) -> Program:
        for i in range(min(stages, steps)):
            yield "load", ("v", i), size
            yield "load", ("k", i), size
        for i in range(steps):
            yield "wait", ("v", i)
            yield from multiply(2 * unit, 0.5, ("product dp", i))
            if i >= stages:
                yield "wait", ("dp", "free", 0, i - stages)
                yield "wait", ("dp", "free", 1, i - stages)
            yield "move", store_dp
            yield "compute", producer - store_dp
            yield "signal", ("dp", i)
            if i + stages < steps:
                yield "load", ("v", i + stages), size
                if i:  # K has one buffer more, which the tile of the step before has left.
                    yield "wait", ("k", "free", 0, i - 1)
                    yield "wait", ("k", "free", 1, i - 1)
                yield "load", ("k", i + stages), size

    return lambda steps: [warpgroup(0, steps), warpgroup(1, steps), producing(steps)]
