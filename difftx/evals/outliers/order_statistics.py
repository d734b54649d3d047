"""Exact order statistics of magnitudes that do not fit in memory, by radix selection on the devices.

Read as integers, the bits of non-negative float32 values have the same order as the values. A first pass counts the
high 16 bits (the high digit) of all magnitudes. The counts show which high digits the requested values have. A second
pass counts the low 16 bits of the magnitudes with one of these high digits. Both passes run the same program, so a
magnitude should have the same bits in both. If the counts do not match, that is an error.
"""
# Axes of arrays: N = devices, P = slots, one for each high digit whose low digits are counted, V = values of a digit

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import P

from difftx.errors import RunError, UserError

DIGIT_BITS = 16
V = 2**DIGIT_BITS

# uint32 `[N, P, 2, V]`, sharded over all devices. Each count has a low and a high word, since one word could overflow.
type Counts = jax.Array


class Digit(NamedTuple):
    """The 16 bits that a pass counts in the magnitudes whose high digit has a slot."""

    slot_V: np.ndarray  # Slot of each high digit, uint32; P, the number of slots, if it has none.
    shift: np.uint32  # Position of the lowest of the 16 bits.


class Statistics(NamedTuple):
    """The order statistics of one set of magnitudes."""

    count: int
    top: dict[int, float]  # Values by rank; the largest value has rank 1.
    median: float  # For an even count, the mean of the two middle values.


def order_statistics(
    count: Callable[[Mapping[str, Digit]], Mapping[str, np.ndarray]],
    names: Sequence[str],
    ranks: Sequence[int],
    *,
    field: str,
) -> dict[str, Statistics]:
    """Return the statistics of sets of magnitudes at the given ranks, from two passes over the values.

    In each pass, `count` gets the digit to count in each set, and returns the counts of each set, int64 `[P, V]`. An
    error about a rank names the config field `field`.
    """
    everything = Digit(np.zeros(V, np.uint32), np.uint32(DIGIT_BITS))
    high = {name: counts_PV[0] for name, counts_PV in count(dict.fromkeys(names, everything)).items()}
    indices, digits = {}, {}
    for name in names:
        total = int(high[name].sum())
        if max(ranks) > total:
            raise UserError(f"{field}: rank {max(ranks)} of {total} values; use ranks of at most {total}")
        indices[name] = [*(total - rank for rank in ranks), (total - 1) // 2, total // 2]
        needed = np.unique(np.searchsorted(np.cumsum(high[name]), indices[name], side="right"))
        slot_V = np.full(V, slots_for(ranks), np.uint32)
        slot_V[needed] = np.arange(len(needed))
        digits[name] = Digit(slot_V, np.uint32(0))
    low = count(digits)
    return {name: _statistics(high[name], low[name], digits[name], indices[name], ranks) for name in names}


def slots_for(ranks: Sequence[int]) -> int:
    """Return the largest possible number of high digits of the requested values: one per rank, two for the median."""
    return len(ranks) + 2


def no_counts(mesh: jax.sharding.Mesh, slots: int) -> Counts:
    """Return counts of zero, sharded over all devices."""
    return jnp.zeros((mesh.size, slots, 2, V), jnp.uint32, out_sharding=P(mesh.axis_names))


def add_counts(counts_P2V: jax.Array, values: jax.Array, counted: jax.Array, digit: Digit) -> jax.Array:
    """Add the magnitudes of `values`, fewer than 2**32, where `counted` is True to one device's counts."""
    slots = counts_P2V.shape[0]
    bits = jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.uint32) & 0x7FFF_FFFF  # Clears the sign bit.
    slot = jnp.asarray(digit.slot_V)[bits >> DIGIT_BITS]
    cell = jnp.where(counted, slot * V + ((bits >> digit.shift) & (V - 1)), slots * V)
    new_PV = jnp.zeros(slots * V, jnp.uint32).at[cell.reshape(-1)].add(jnp.uint32(1), mode="drop").reshape(slots, V)
    low_PV = counts_P2V[:, 0] + new_PV
    return jnp.stack([low_PV, counts_P2V[:, 1] + (low_PV < new_PV)], axis=1)


def summed(counts: Counts) -> np.ndarray:
    """Return the sum of all devices' counts, int64 `[P, V]`, in every process."""
    halves = np.asarray(_sum_of_halves(counts)).astype(np.int64)
    return np.sum(halves << (DIGIT_BITS * np.arange(4))[:, None], axis=1)


@jax.jit
def _sum_of_halves(counts_NP2V: Counts) -> jax.Array:
    # Halves of words are summed, since a sum of 16-bit numbers over up to 65,536 devices fits in 32 bits.
    halves = [counts_NP2V[:, :, word] >> shift & (V - 1) for word in range(2) for shift in (0, DIGIT_BITS)]
    return jax.sharding.reshard(jnp.sum(jnp.stack(halves, axis=2), axis=0), P())


def _statistics(
    high_V: np.ndarray, low_PV: np.ndarray, digit: Digit, indices: Sequence[int], ranks: Sequence[int]
) -> Statistics:
    """Return a set's statistics from its counts. `indices` are positions of values in ascending order of magnitude."""
    until_V = np.cumsum(high_V)

    def value_at(index: int) -> float:
        high = int(np.searchsorted(until_V, index, side="right"))
        low_V = low_PV[digit.slot_V[high]]
        if low_V.sum() != high_V[high]:
            raise RunError(
                f"{high_V[high]} values began with {high:#06x} in the first pass and {low_V.sum()} in the second: "
                "the devices do not compute the same values twice; check the hardware"
            )
        index_in_digit = index - (until_V[high] - high_V[high])
        low = int(np.searchsorted(np.cumsum(low_V), index_in_digit, side="right"))
        return float(np.uint32(high << DIGIT_BITS | low).view(np.float32))

    *top, below, above = map(value_at, indices)
    return Statistics(int(high_V.sum()), dict(zip(ranks, top, strict=True)), (below + above) / 2)
