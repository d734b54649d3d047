"""The warning about the memory of accelerators, whose size the device reports."""

import types

import pytest

from difftx.commands.cost import Memory

GIB = 2**30


def accelerator(stats):
    return types.SimpleNamespace(platform="gpu", memory_stats=lambda: stats)


@pytest.mark.parametrize(
    ("state", "activations", "stats", "warning", "holds_state"),
    [
        (60 * GIB, 15 * GIB, {"bytes_limit": 80 * GIB}, None, True),
        (60 * GIB, 30 * GIB, {"bytes_limit": 80 * GIB}, "90 GiB exceed the 80 GiB of the device; use a smaller", True),
        (30 * GIB, 60 * GIB, {"bytes_limit": 80 * GIB}, "90 GiB exceed the 80 GiB of the device; raise train.", True),
        (81 * GIB, 1 * GIB, {"bytes_limit": 80 * GIB}, "82 GiB exceed the 80 GiB of the device; use a smaller", False),
        (60 * GIB, 30 * GIB, None, None, True),  # The device does not report its memory.
        (60 * GIB, 30 * GIB, {}, None, True),
    ],
)
def test_the_estimate_is_compared_with_the_memory_of_one_device(state, activations, stats, warning, holds_state):
    memory = Memory(state, activations, [accelerator(stats)] * 8)
    assert memory.holds_state == holds_state
    found = memory.warning()
    assert found is None if warning is None else warning in found
