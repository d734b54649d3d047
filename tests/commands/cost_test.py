"""The warning about the memory of accelerators, whose size only the device knows."""

import types

import pytest

from difftx.commands.cost import _memory_warning

GIB = 2**30


def accelerator(stats):
    return types.SimpleNamespace(platform="gpu", memory_stats=lambda: stats)


@pytest.mark.parametrize(
    ("state", "activations", "stats", "warnings"),
    [
        (60 * GIB, 15 * GIB, {"bytes_limit": 80 * GIB}, []),
        (60 * GIB, 30 * GIB, {"bytes_limit": 80 * GIB}, ["90 GiB exceed the 80 GiB of the device; use a smaller"]),
        (30 * GIB, 60 * GIB, {"bytes_limit": 80 * GIB}, ["90 GiB exceed the 80 GiB of the device; raise train."]),
        (60 * GIB, 30 * GIB, None, []),  # The device does not report its memory.
        (60 * GIB, 30 * GIB, {}, []),
    ],
)
def test_the_estimate_is_compared_with_the_memory_of_one_device(state, activations, stats, warnings):
    found = _memory_warning(state, activations, [accelerator(stats)] * 8)
    assert [part in line for part, line in zip(warnings, found, strict=True)] == [True] * len(warnings)
