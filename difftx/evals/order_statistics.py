"""Exact order statistics of magnitudes that are never held: counted on the devices, digit by digit (radix selection).

The bits of a float32 without a sign, read as an integer, are in the order of the values. A first pass counts the high
16 of them; then it is known which bins hold the wanted positions, and a second pass counts the low 16 bits of what lies
in these. Both passes run the same program, so that a value has the same bits in both; that counts agree is checked.
"""
#   N = devices, P = slots: high digits whose low digits are counted, V = 2**16 values of a digit

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import P

from difftx.errors import RunError, UserError

DIGIT_BITS = 16
V = 2**DIGIT_BITS

type Counts = jax.Array  # uint32 [N, P, 2, V]: low and high words, as one would overflow; cut over all devices.


class Digit(NamedTuple):
    """What a pass counts: 16 bits of those values whose high digit has a slot, by slot."""

    slot_V: np.ndarray  # uint32, of each high digit; the number of slots: none.
    shift: np.uint32  # Of the bits that are counted.


class Statistics(NamedTuple):
    """Of some magnitudes."""

    count: int
    top: dict[int, float]  # Rank, the largest value's is 1, → value.
    median: float  # The mean of the two in the middle, where they are two.


def order_statistics(
    count: Callable[[Mapping[str, Digit]], Mapping[str, np.ndarray]],
    names: Sequence[str],
    ranks: Sequence[int],
    *,
    field: str,
) -> dict[str, Statistics]:
    """Return the statistics of several sets of values from two passes over them.

    Args:
        count: makes a pass; returns the counts of each set's digit, int64 `[P, V]`.
        names: of the sets.
        ranks: of the values that are wanted.
        field: of the config that has the ranks.

    Raises:
        UserError: a set has fewer values than a rank.
        RunError: the passes do not agree.
    """
    slots = slots_for(ranks)
    everything = Digit(np.zeros(V, np.uint32), np.uint32(DIGIT_BITS))
    high = {name: counts_PV[0] for name, counts_PV in count(dict.fromkeys(names, everything)).items()}
    wanted, bins = {}, {}
    for name in names:
        total = int(high[name].sum())
        if max(ranks) > total:
            raise UserError(f"{field}: rank {max(ranks)} of {total} values; use at most that")
        wanted[name] = [*(total - rank for rank in ranks), (total - 1) // 2, total // 2]
        bins[name] = np.searchsorted(np.cumsum(high[name]), wanted[name], side="right")
    digits = {name: Digit(_slots_of(bins[name], slots), np.uint32(0)) for name in names}
    low = count(digits)
    return {name: _statistics(high[name], low[name], digits[name], wanted[name], ranks) for name in names}


def slots_for(ranks: Sequence[int]) -> int:
    """Return how many high digits the wanted values may have."""
    return len(ranks) + 2


def no_counts(mesh: jax.sharding.Mesh, slots: int) -> Counts:
    """Return counts of nothing, on every device its own."""
    return jnp.zeros((mesh.size, slots, 2, V), jnp.uint32, out_sharding=P(mesh.axis_names))


def add_counts(counts_P2V: jax.Array, values: jax.Array, counted: jax.Array, digit: Digit) -> jax.Array:
    """Return a device's counts with some values more: the magnitudes of those that are `counted`, fewer than 2**32."""
    slots = counts_P2V.shape[0]
    bits = jax.lax.bitcast_convert_type(values.astype(jnp.float32), jnp.uint32) & 0x7FFF_FFFF  # Without the sign.
    slot = jnp.asarray(digit.slot_V)[bits >> DIGIT_BITS]
    place = jnp.where(counted, slot * V + ((bits >> digit.shift) & (V - 1)), slots * V)
    new_PV = jnp.zeros(slots * V, jnp.uint32).at[place.reshape(-1)].add(jnp.uint32(1), mode="drop").reshape(slots, V)
    low_PV = counts_P2V[:, 0] + new_PV
    return jnp.stack([low_PV, counts_P2V[:, 1] + (low_PV < new_PV)], axis=1)


def summed(counts: Counts) -> np.ndarray:
    """Return the counts of all devices, int64 `[P, V]`, in every process."""
    halves = np.asarray(_sum_of_halves(counts)).astype(np.int64)
    return np.sum(halves << (DIGIT_BITS * np.arange(4))[:, None], axis=1)


@jax.jit
def _sum_of_halves(counts_NP2V: Counts) -> jax.Array:
    # Halves of words: their sum over up to 65,536 devices fits in a word.
    halves = [counts_NP2V[:, :, word] >> shift & (V - 1) for word in range(2) for shift in (0, DIGIT_BITS)]
    return jax.sharding.reshard(jnp.sum(jnp.stack(halves, axis=2), axis=0), P())


def _slots_of(bins: np.ndarray, slots: int) -> np.ndarray:
    slot_V = np.full(V, slots, np.uint32)
    distinct = np.unique(bins)
    slot_V[distinct] = np.arange(len(distinct))
    return slot_V


def _statistics(
    high_V: np.ndarray, low_PV: np.ndarray, digit: Digit, wanted: Sequence[int], ranks: Sequence[int]
) -> Statistics:
    until_V = np.cumsum(high_V)

    @functools.cache
    def at(position: int) -> float:
        bin_ = int(np.searchsorted(until_V, position, side="right"))
        low_V = low_PV[digit.slot_V[bin_]]
        if low_V.sum() != high_V[bin_]:
            raise RunError(
                f"{high_V[bin_]} values began with {bin_:#06x} in the first pass and {low_V.sum()} in the second: "
                "the devices do not give the same values twice"
            )
        place = position - (until_V[bin_] - high_V[bin_])
        low = int(np.searchsorted(np.cumsum(low_V), place, side="right"))
        return float(np.uint32(bin_ << DIGIT_BITS | low).view(np.float32))

    *top, below, above = map(at, wanted)
    return Statistics(int(high_V.sum()), dict(zip(ranks, top, strict=True)), (below + above) / 2)
