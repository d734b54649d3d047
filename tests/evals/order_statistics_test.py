"""Ranks and medians, compared with a sort of all values."""

import functools

import jax
import numpy as np
import pytest
from jax import P

from difftx.errors import UserError
from difftx.evals import outliers as under_test
from difftx.evals.outliers import add_counts, no_counts, order_statistics, slots_for, summed

RANKS = (1, 2, 3, 10, 100)


def mixed(count):
    """Return values like activations: a bulk, a heavy tail, zeros, equal values, subnormal and huge values."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=count) * np.exp(rng.normal(size=count) * 3)
    x[: count // 10] = 0
    x[count // 10 : count // 5] = -1.5
    x[-5:] = [1e-42, -3e38, 3e38, 1e-38, -7]
    return rng.permutation(x.astype(np.float32))


@functools.cache
def adder(mesh):
    def on_device(counts_1P2V, values, counted, digit):
        return add_counts(counts_1P2V[0], values, counted, digit)[None]

    axes = P(mesh.axis_names)
    in_specs = (axes, axes, axes, P())
    return jax.jit(jax.shard_map(on_device, in_specs=in_specs, out_specs=axes, check_vma=False), donate_argnums=0)


def put(mesh, x):
    return jax.device_put(x, jax.NamedSharding(mesh, P(mesh.axis_names)))


def counter(mesh, pieces, slots):
    """Return a function that makes a pass over `pieces`, which has pairs of values and a mask under each name."""

    def count(digits):
        found = {}
        for name, arrays in pieces.items():
            counts = no_counts(mesh, slots)
            for values, counted in arrays:
                counts = adder(mesh)(counts, put(mesh, values), put(mesh, counted), digits[name])
            found[name] = summed(counts)
        return found

    return count


@pytest.mark.long
def test_order_statistics_of_ten_million_values_are_exact(mesh_of):
    """The values are in two arrays of five million.

    XLA's memory analysis of a pass over all values in one array bounds the memory besides its inputs.
    """
    mesh = mesh_of()
    values = mixed(10_000_000)
    counted = np.ones(len(values) // 2, bool)
    with jax.set_mesh(mesh):
        pieces = {"values": [(half, counted) for half in np.split(values, 2)]}
        found = order_statistics(counter(mesh, pieces, slots_for(RANKS)), ["values"], RANKS)["values"]
        digit = under_test.Digit(np.zeros(under_test.V, np.uint32), np.uint32(0))
        whole = (no_counts(mesh, slots_for(RANKS)), put(mesh, values), put(mesh, np.ones(len(values), bool)), digit)
        memory = adder(mesh).lower(*whole).compile().memory_analysis()
    expected = np.sort(np.abs(values))
    assert found.count == len(values)
    assert found.top == {rank: float(expected[-rank]) for rank in RANKS}
    assert found.median == expected[4_999_999:5_000_001].astype(np.float64).mean()
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < 200e6


def test_counts_above_32_bits(mesh_of):
    """Add 3 values on each of eight devices to a bin that already has a count of 2**32 - 1 there."""
    mesh = mesh_of(fsdp=8)
    with jax.set_mesh(mesh):
        counts = np.zeros(no_counts(mesh, 1).shape, np.uint32)
        counts[:, 0, 0, 7] = 2**32 - 1
        value = np.uint32(7 << 16).view(np.float32)
        digit = under_test.Digit(np.zeros(under_test.V, np.uint32), np.uint32(16))
        counts = adder(mesh)(*(put(mesh, x) for x in (counts, np.full(24, value), np.ones(24, bool))), digit)
        counts_PV = summed(counts)
    assert counts_PV[0, 7] == counts_PV.sum() == 8 * (2**32 + 2)


def test_missing_ranks_are_rejected(mesh_of):
    mesh = mesh_of()
    with jax.set_mesh(mesh):
        count = counter(mesh, {"values": [(np.float32([1, 2, 3]), np.ones(3, bool))]}, slots_for([1]))
        with pytest.raises(UserError, match=r"eval\.outliers\.ranks: rank 4 of 3 values; use ranks of at most 3"):
            order_statistics(count, ["values"], [4])
