"""Topologies of absent devices, and their peak FLOPs."""

import argparse
import sys

import jax
import pytest
from jaxlib import xla_client

from difftx.commands import train
from difftx.errors import UserError, install_hint
from difftx.launch.topology import (
    CHIPS,
    GPU_MEMORY_SHARE,
    GPUS,
    Topology,
    find_devices,
    gpu_target,
    parse_topology,
    prepare,
)
from difftx.model.flops import PEAK_FLOPS
from difftx.parallel import multihost


@pytest.mark.parametrize(
    ("text", "kind", "shape", "slices"),
    [
        ("v5p:4x4x4", "v5p", (4, 4, 4), 1),
        ("v5e:16x16*2", "v5e", (16, 16), 2),
        ("TPU7x:2x2x1", "tpu7x", (2, 2, 1), 1),
        ("h200:8", "h200", (8,), 1),
        ("rtx4090:4", "rtx4090", (4,), 1),
        ("cpu:8", "cpu", (8,), 1),
    ],
)
def test_a_topology_is_parsed_and_printed(text, kind, shape, slices):
    topology = parse_topology(text)
    assert topology == Topology(kind, shape, slices)
    assert str(topology) == text.lower()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v5p", "write kind:shape"),
        ("v5p:4x4x", "write kind:shape"),
        ("v5p:4x4x4*", "write kind:shape"),
        ("v5q:4x4x4", "Did you mean 'v5"),
        ("v5p:0x4x4", "positive"),
        ("cpu:2x4", "cpu:8"),
        ("h200:8*2", "h200:16"),
        ("b200:2x4", "b200:8"),
    ],
)
def test_a_wrong_topology_says_how_it_is_written(text, message):
    with pytest.raises(UserError, match="--topology") as caught:
        parse_topology(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(("text", "extra"), [("v5p:2x2x1", "tpu"), ("h200:8", "cuda"), ("l4:8", "cuda")])
def test_a_missing_plugin_is_reported_with_its_extra(text, extra, monkeypatch):
    for name in ("libtpu", "jax_plugins", "jax_plugins.xla_cuda13"):
        monkeypatch.setitem(sys.modules, name, None)  # Make the import fail.
    with pytest.raises(UserError) as caught:
        prepare(parse_topology(text))
    assert install_hint(extra) in str(caught.value)


def test_virtual_cpus_share_the_memory_of_the_host():
    two, eight = (parse_topology(f"cpu:{n}").chip.hbm_bytes for n in (2, 8))
    assert two == 4 * eight
    assert find_devices(parse_topology("cpu:3")) == jax.devices()[:3]


@pytest.mark.parametrize(
    ("name", "value"),
    [("XLA_CLIENT_MEM_FRACTION", ".5"), ("XLA_PYTHON_CLIENT_MEM_FRACTION", ".5"), ("XLA_CLIENT_MEM_FRACTION", None)],
)
def test_training_opens_gpus_with_the_share_of_memory_that_plan_counts(config, monkeypatch, name, value):
    """JAX's own reader of the variables returns the share, which the user's variable overrides."""

    def join(*_):
        shares.append(xla_client.generate_pjrt_gpu_plugin_options()["memory_fraction"])
        raise UserError("stopped")

    shares = []
    for variable in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(variable, "")  # Restores the variable after the test, too.
        monkeypatch.delenv(variable)
    if value is not None:
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(multihost, "join", join)
    with pytest.raises(UserError, match="stopped"):
        train.train(config(), None, argparse.Namespace(), began=0)
    assert shares == [GPU_MEMORY_SHARE if value is None else 0.5]


def test_every_kind_has_a_peak():
    kinds = {"v4": "TPU v4", "v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "tpu7x": "TPU7x"}
    kinds |= {kind: gpu.name for kind, gpu in GPUS.items()}
    assert set(kinds) == set(CHIPS)
    assert set(kinds.values()) <= set(PEAK_FLOPS)


@pytest.mark.parametrize(
    ("kind", "relative", "share"),
    [
        ("NVIDIA A100-PCIE-40GB", "NVIDIA A100-SXM4-40GB", 1.0),
        ("NVIDIA A100 80GB PCIe", "NVIDIA A100-SXM4-80GB", 1.0),
        # NVIDIA's data sheets: 1,513 and 1,671 of the 1,979 TFLOP/s of the SXM module.
        ("NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3", 1513 / 1979),
        ("NVIDIA H100 NVL", "NVIDIA H100 80GB HBM3", 1671 / 1979),
        # 5 PFLOP/s with sparsity in a GB200, and 4.5 in a B200.
        ("NVIDIA GB200", "NVIDIA B200", 5 / 4.5),
    ],
)
def test_peak_flops_of_other_modules_with_the_same_chip(kind, relative, share):
    assert PEAK_FLOPS[kind] == pytest.approx(share * PEAK_FLOPS[relative], rel=2e-3)


@pytest.mark.parametrize("kind", GPUS)
def test_peak_flops_match_the_cores(kind):
    """The data sheet's dense bfloat16 peak = cores × tensor FLOPs per core and cycle × at most the largest clock.

    A core does 2,048 FLOPs per cycle on Ampere, 1,024 on Ada (half of that on GeForce with float32 accumulation), 4,096
    on Hopper and 8,192 on Blackwell (NVIDIA's whitepapers).
    """
    per_cycle = {"a100": 2048, "l4": 1024, "rtx4090": 512, "h100": 4096, "h200": 4096, "b200": 8192}[kind]
    largest = GPUS[kind].cores * per_cycle * GPUS[kind].clock_ghz * 1e9
    assert 0.85 * largest < PEAK_FLOPS[GPUS[kind].name] <= 1.001 * largest


def test_the_target_of_a_gpu_has_the_properties_of_its_data_sheet():
    for line in ("core_count: 132", "optin: 232448", "memory_bandwidth: 4800000000000", "major: 9 minor: 0"):
        assert line in gpu_target("h200")
