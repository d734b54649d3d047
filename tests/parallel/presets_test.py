"""Mesh presets: sizes of axes and microbatches for given devices."""

import math

import pytest
from conftest import ROOT

from difftx.config.recipes import load_config
from difftx.errors import UserError
from difftx.model.abstract import count_parameters
from difftx.model.flops import gradient_bytes
from difftx.parallel.presets import apply_preset
from difftx.training.state import state_bytes

HBM = {"TPU v5 lite": 15.75, "TPU v5": 95.7, "TPU v6 lite": 31.2, "NVIDIA H200": 131, "NVIDIA H100 80GB HBM3": 74}
HBM |= {"NVIDIA A100-SXM4-40GB": 39, "NVIDIA B200": 167, "NVIDIA L4": 22, "NVIDIA GeForce RTX 4090": 22}


def resolved(spec, kind, devices, **overrides):
    changes = {"mesh.preset": "auto"} | {name.replace("__", "."): str(value) for name, value in overrides.items()}
    config = load_config(f"{ROOT}/configs/{spec}", changes)
    return apply_preset(config, kind=kind, devices=devices, parameters=count_parameters(config.model).total)


@pytest.mark.parametrize(
    ("size", "kind", "devices"),
    [
        ("830m", "TPU v5 lite", 64),
        ("6.8b", "TPU v5 lite", 128),
        ("13.1b", "TPU v5 lite", 256),
        ("830m", "TPU v5", 4),
        ("13.1b", "TPU v5", 64),
        ("13.1b", "TPU v6 lite", 64),
        ("2.8b", "NVIDIA H200", 8),
        ("13.1b", "NVIDIA H200", 16),
        ("13.1b", "NVIDIA H100 80GB HBM3", 32),
        ("13.1b", "NVIDIA A100-SXM4-40GB", 32),
        ("2.8b", "NVIDIA B200", 8),
        ("13.1b", "NVIDIA B200", 8),
        ("2.8b", "NVIDIA L4", 8),
        ("6.8b", "NVIDIA L4", 16),
        ("2.8b", "NVIDIA GeForce RTX 4090", 8),
    ],
)
def test_every_device_is_used_and_the_state_fits(size, kind, devices):
    config = resolved(f"scaling.py:diff-{size}", kind, devices)
    mesh = config.mesh
    assert mesh.data * mesh.fsdp * mesh.tensor * mesh.context == devices
    assert config.batch_rows % (config.train.accumulation * mesh.data * mesh.fsdp) == 0
    assert (state_bytes(config) + gradient_bytes(config.model)) / (mesh.fsdp * mesh.tensor) < HBM[kind] * 2**30


def test_accumulation_keeps_microbatches_small():
    config = resolved("scaling.py:diff-830m", "TPU v5 lite", 16)
    rows = config.batch_rows // (config.train.accumulation * 16)
    assert rows * config.data.sequence_length <= 8192
    assert config.train.accumulation == 2


def test_presets_keep_slices_and_context():
    config = resolved("scaling.py:diff-2.8b", "TPU v5", 64, mesh__slices=2, mesh__context=2)
    mesh = config.mesh
    assert (mesh.slices, mesh.context) == (2, 2)
    assert mesh.data % 2 == 0
    assert math.prod((mesh.data, mesh.fsdp, mesh.context, mesh.tensor)) == 64


@pytest.mark.parametrize(("devices", "context", "slices"), [(2, 4, 1), (8, 3, 2), (8, 8, 2), (8, 1, 3), (4, -1, 1)])
def test_context_and_slices_that_do_not_fit_the_devices_are_refused(devices, context, slices):
    sizes = {"mesh__context": context, "mesh__slices": slices, "mesh__fsdp": 1}
    message = f"mesh.context={context}, mesh.slices={slices}: .* {devices} devices here; set both to 1$"
    with pytest.raises(UserError, match=message):
        resolved("scaling.py:diff-830m", "TPU v5", devices, **sizes)


def test_without_a_preset_nothing_changes():
    config = resolved("scaling.py:diff-2.8b", "TPU v5", 64, mesh__preset="none")
    assert config.mesh.fsdp == -1


def test_an_unknown_device_is_refused():
    with pytest.raises(UserError, match=r"mesh\.preset='auto': no rule for 'Abacus' and 2\.76e\+09 parameters"):
        resolved("scaling.py:diff-2.8b", "Abacus", 4)
