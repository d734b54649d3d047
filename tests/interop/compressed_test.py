"""Exports with weights in 8 and 4 bits, decoded by NumPy and by compressed-tensors."""

import dataclasses
import json
import math

import numpy as np
import pytest
from conftest import replace
from helpers.interop_folders import export, run_of
from helpers.interop_models import exported

from difftx.errors import UserError
from difftx.interop.fields import CONFIG


def values_of(folder):
    safetensors = pytest.importorskip("safetensors.numpy")
    return safetensors.load_file(folder / "model.safetensors")


def decoded(tensors, name, bits):
    """Return a matrix of "pack-quantized": codes + 2^(bits - 1) from the lowest bits of int32 words, times scales."""
    packed, scale = tensors[f"{name}_packed"], tensors[f"{name}_scale"]
    rows, columns = tensors[f"{name}_shape"]
    assert (packed.dtype, scale.dtype) == (np.int32, np.float32)
    words = packed.view(np.uint32)
    codes = np.stack([words >> (bits * i) & (2**bits - 1) for i in range(32 // bits)], -1).reshape(rows, -1)
    codes = codes[:, :columns].astype(np.int64) - 2 ** (bits - 1)
    return codes.reshape(rows, scale.shape[1], -1) * scale[..., None]


@pytest.mark.parametrize(("name", "bits"), [("diff", 4), ("llama", 8)])
def test_exported_weights_are_those_that_numpy_rounds(config, mesh_of, tmp_path, name, bits):
    lm, workdir, plain = exported(config, mesh_of(), name, tmp_path)
    folder = export(workdir, tmp_path / "rounded", f"--quantize=int{bits}")
    before, after = values_of(plain), values_of(folder)
    rounded = [each for each in before if each.endswith("_proj.weight") and "lambda" not in each]
    assert len(rounded) >= 7 * lm.config.model.num_layers
    for each, weight in before.items():
        if each not in rounded:
            np.testing.assert_array_equal(after[each], weight)
            continue
        size = math.gcd(weight.shape[1], 128) if bits == 4 else weight.shape[1]
        groups = weight.reshape(len(weight), -1, size)
        scale = np.abs(groups).max(-1, keepdims=True) / np.float32(2 ** (bits - 1) - 1)
        found = decoded(after, each, bits)
        np.testing.assert_allclose(found, np.rint(groups / scale) * scale, rtol=1e-6)
        assert each not in after
    config_json = json.loads((folder / CONFIG).read_text())["quantization_config"]
    assert config_json["format"] == "pack-quantized"


@pytest.mark.parametrize(("name", "bits"), [("diff", 4), ("diff_v2", 8)])
def test_transformers_computes_the_logits_of_the_rounded_model(config, mesh_of, tmp_path, capsys, name, bits):
    pytest.importorskip("torch")
    pytest.importorskip("compressed_tensors", reason="make parity installs compressed-tensors")
    lm, _, _ = exported(config, mesh_of(), name, tmp_path)
    on_all_devices = dataclasses.replace(lm, config=replace(lm.config, "mesh", fsdp=8))
    export(run_of(on_all_devices, tmp_path / "again"), tmp_path / "rounded", f"--quantize=int{bits}", "--verify")
    assert "verified: logits of" in capsys.readouterr().out


def test_other_formats_are_refused(config, mesh_of, tmp_path):
    _, workdir, _ = exported(config, mesh_of(), "diffllama", tmp_path)
    with pytest.raises(UserError, match="--quantize=int8 requires --to=hf, and no --push"):
        export(workdir, tmp_path / "rounded", "--quantize=int8", format_="diffllama")
