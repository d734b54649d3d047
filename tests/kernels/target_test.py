"""The kind of device that a computation is compiled for decides which backends "auto" takes."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from helpers.kernels_checks import targeting

from difftx import kernels
from difftx.kernels import api, cudnn, target
from difftx.kernels.backend import AttentionCall


@dataclasses.dataclass
class Gpu:
    """Stand-in for an attached GPU."""

    compute_capability: str
    device_kind: str = "NVIDIA RTX A6000"


@pytest.mark.parametrize(
    ("kind", "capability"),
    [
        ("NVIDIA A100-SXM4-40GB", (8, 0)),
        ("NVIDIA L4", (8, 9)),
        ("NVIDIA L40S", (8, 9)),
        ("NVIDIA GeForce RTX 4090", (8, 9)),
        ("NVIDIA H100 PCIe", (9, 0)),
        ("NVIDIA GH200 480GB", (9, 0)),
        ("NVIDIA GB200", (10, 0)),
        ("NVIDIA Abacus", (0, 0)),
    ],
)
def test_the_kind_of_an_absent_gpu_tells_its_compute_capability(kind, capability):
    assert target.compute_capability(kind) == capability
    with targeting(kind):
        assert (target.platform(), target.compute_capability()) == ("gpu", capability)


@pytest.mark.parametrize(("stated", "capability"), [("8.6", (8, 6)), ("12.0", (12, 0)), ("gfx942", (0, 0))])
def test_an_attached_gpu_states_its_compute_capability(stated, capability, monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [Gpu(stated)])
    assert target.compute_capability() == capability
    with targeting("NVIDIA H200"):  # Compiling for another GPU than the attached one.
        assert target.compute_capability() == (9, 0)


@pytest.mark.parametrize(
    ("kind", "segments", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", False, ["cudnn", "xla"]),
        ("NVIDIA A100-SXM4-80GB", True, ["cudnn", "xla"]),
        ("NVIDIA L4", True, ["cudnn", "xla"]),
        ("NVIDIA GeForce RTX 4090", False, ["cudnn", "xla"]),
        ("NVIDIA H100 80GB HBM3", False, ["pallas_gpu", "cudnn", "xla"]),
        ("NVIDIA H200", True, ["pallas_gpu", "cudnn", "xla"]),
        ("NVIDIA B200", True, ["cudnn", "xla"]),
        ("NVIDIA Abacus", False, ["xla"]),
    ],
)
def test_candidates_of_a_kind_of_gpu(kind, segments, expected):
    shapes = [(2, 4096, 12, 2, 128), (2, 4096, 12, 2, 128), (2, 4096, 12, 256)]
    ids = jax.ShapeDtypeStruct((2, 4096), jnp.int32) if segments else None
    call = AttentionCall(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes), ids)
    with targeting(kind), cudnn.checked_for_target(91900):
        candidates = [b for b in kernels.BACKENDS["diff_attention"].values() if b.auto and b.platform in (None, "gpu")]
        assert [b.name for b in candidates if b.why_unsupported(call) is None] == expected
        assert api.choose("diff_attention", "auto", call).name == expected[0]
