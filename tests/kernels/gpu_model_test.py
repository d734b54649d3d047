"""benchmarks/gpu_model.py against times measured on an H100, and against cases that can be computed by hand."""

import pytest

from benchmarks import gpu_model

SHAPE = gpu_model.Shape(batch=4, heads=12, tokens=4096)


def forward_in_phase(width, softmax, *, stages):
    """Return the programs of the forward kernel that was measured: it waits for both products, and then computes."""
    unit = 2 * width  # Clocks of a product of 64 x 64 x `width`.

    def warpgroup(m, steps):
        yield "wait", ("k", 0)
        yield from gpu_model.multiply(unit, 0.5, ("logits", m))
        yield "signal", ("k", "free", m, 0)
        for i in range(steps):
            yield "compute", softmax
            yield "wait", ("v", i)
            if i + 1 < steps:
                yield "wait", ("k", i + 1)
            yield from gpu_model.multiply(3 * unit, 0.5, ("products", m, i))
            yield "signal", ("v", "free", m, i)
            yield "signal", ("k", "free", m, i + 1)

    size = gpu_model.TILE * 2 * width * 2
    return lambda steps: [
        warpgroup(0, steps),
        warpgroup(1, steps),
        gpu_model.loads(stages, steps, {"k": size, "v": size}),
    ]


def dq_in_phase(width, softmax, producer, *, stages):
    """Return the programs of the dQ kernel that was measured: a step has one product after the other."""
    unit, size = 2 * width, gpu_model.TILE * 2 * width * 2
    load_dp, store_dp = 128, 128

    def warpgroup(m, steps):
        for i in range(steps):
            yield "wait", ("k", i)
            yield from gpu_model.multiply(unit, 0.5, ("logits", m, i))
            yield "compute", softmax / 2
            yield "wait", ("dp", i)
            yield "move", load_dp
            yield "signal", ("dp", "free", m, i)
            yield "compute", softmax / 2 - load_dp
            yield from gpu_model.multiply(unit, 0.5, ("dq", m, i))
            yield "signal", ("k", "free", m, i)

    def producing(steps):
        for i in range(min(stages, steps)):
            yield "load", ("v", i), size
            yield "load", ("k", i), size
        for i in range(steps):
            yield "wait", ("v", i)
            yield from gpu_model.multiply(2 * unit, 0.5, ("product dp", i))
            if i + stages < steps:
                yield "load", ("v", i + stages), size
            if i >= 2:
                yield "wait", ("dp", "free", 0, i - 2)
                yield "wait", ("dp", "free", 1, i - 2)
            yield "move", store_dp
            yield "compute", producer - store_dp
            yield "signal", ("dp", i)
            if i:
                yield "wait", ("k", "free", 0, i - 1)
                yield "wait", ("k", "free", 1, i - 1)
                if i - 1 + stages < steps:
                    yield "load", ("k", i - 1 + stages), size

    return lambda steps: [warpgroup(0, steps), warpgroup(1, steps), producing(steps)]


# The measured kernels: clocks that each loop computes per step, from the machine code of commit e1b4c3fd, and ms from
# benchmarks/records/2026-11-26_h100_first_run.md. Their CTAs ran row by row, which left SMs idle for 3.8 % of the time.
MEASURED = {
    (forward_in_phase, 128): ((799,), 1.122),
    (gpu_model.dkv, 128): ((1199, 1044), 1.788),
    (dq_in_phase, 128): ((750, 568), 1.196),
    (forward_in_phase, 64): ((734,), 0.771),
    (gpu_model.dkv, 64): ((1182, 1003), 1.235),
    (dq_in_phase, 64): ((727, 545), 0.870),
}


@pytest.mark.parametrize(("kernel", "width"), MEASURED, ids=lambda x: getattr(x, "__name__", x))
def test_the_model_predicts_the_measured_time(kernel, width):
    computed, measured_ms = MEASURED[kernel, width]
    clocks = gpu_model.clocks_per_step(kernel(width, *computed, stages=2), loaded=512 * width)
    predicted_ms = SHAPE.milliseconds(clocks, ctas=True, idle=0.038)
    assert 0.8 < predicted_ms / measured_ms < 1.2, f"{predicted_ms:.3f} ms"


def alternate(steps, product, share, compute):
    for i in range(steps):
        yield "product", product, share, i
        yield "wait", i
        yield "compute", compute


@pytest.mark.parametrize(
    ("warpgroups", "product", "share", "compute", "expected"),
    [
        (1, 100, 0.5, 50, 150),
        (2, 100, 0.5, 0, 200),  # Two share the tensor cores.
        (2, 100, 0.5, 50, 250),  # They run in phase: the tensor cores idle while both compute.
        (1, 100, 1.0, 0, 200),  # TMA takes half of shared memory.
    ],
)
def test_a_step_takes_the_time_computed_by_hand(warpgroups, product, share, compute, expected):
    written = 0.5 if share == 1.0 else 0.0
    programs = [alternate(10, product, share, compute) for _ in range(warpgroups)]
    assert gpu_model.clocks(programs, written_share=written) == pytest.approx(10 * expected)


def test_l2_bounds_a_kernel_that_only_loads():
    def loads(steps):
        for i in range(steps):
            yield "load", i, 65536
        yield "wait", steps - 1

    clocks = gpu_model.clocks_per_step(lambda steps: [loads(steps)], loaded=65536)
    assert clocks == pytest.approx(65536 / gpu_model.L2_BYTES_PER_CLOCK)
