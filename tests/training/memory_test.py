"""Memory of a train step is linear, not quadratic, in the length of its rows. The steps are compiled and not run."""

import math
import re

import pytest
from model.oracle import SIZES

from difftx.launch.estimate import trace_step

pytestmark = pytest.mark.long

LENGTH = 4096
GROWTH = 2.1  # Largest allowed growth of memory for twice the tokens.
ARRAY = re.compile(r"\b(?:pred|s8|u8|s32|u32|bf16|f32)\[([\d,]+)\]")


def compile_step(config, mesh, name, length, **changes):
    """Compile a step of one row with document masks. Without remat, it keeps all it can for the backward pass."""
    fields = SIZES.get(name, {}) | {"model__remat": "none", "data__document_mask": "true"} | changes
    rows = {"data__sequence_length": length, "train__global_batch_tokens": length}
    return trace_step(config(name, **fields, **rows), mesh).lower().compile()


def largest_array(compiled):
    """Return the elements of the largest array in a compiled program."""
    return max(math.prod(map(int, shape.split(","))) for shape in ARRAY.findall(compiled.as_text()))


@pytest.mark.parametrize("name", ["diff", "transformer", "top_k"])  # Each stands for all with the same kernel.
def test_no_architecture_stores_all_attention_weights(config, mesh_of, name):
    short, long = (compile_step(config, mesh_of(), name, length) for length in (LENGTH, 2 * LENGTH))
    temporaries = [compiled.memory_analysis().temp_size_in_bytes for compiled in (short, long)]
    assert largest_array(short) < LENGTH**2
    assert largest_array(long) < (2 * LENGTH) ** 2
    assert temporaries[1] <= GROWTH * temporaries[0], temporaries


def test_memory_is_linear_with_remat(config, mesh_of):
    compiled = [
        compile_step(config, mesh_of(), "diff", length, model__remat="dots", data__document_mask="false")
        for length in (LENGTH, 2 * LENGTH)
    ]
    short, long = (c.memory_analysis().temp_size_in_bytes for c in compiled)
    assert long <= GROWTH * short
    assert largest_array(compiled[0]) < LENGTH**2
