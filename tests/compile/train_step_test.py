"""The whole train step and decoding, compiled for absent devices."""

import dataclasses
import math
import os
import re
from importlib.util import find_spec

os.environ.update(  # Must be set before libtpu loads. Without the last variable, a second process aborts.
    JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1"
)

import jax
import jax.numpy as jnp
import pytest
from conftest import ROOT
from jax import P
from jax.experimental import topologies

from compile import h200
from difftx.config.build import override
from difftx.config.recipes import load_config
from difftx.data.tokenizers import load_tokenizer
from difftx.inference import decode
from difftx.inference.sampling import GREEDY
from difftx.kernels import api, cudnn
from difftx.launch.estimate import estimate, trace_step
from difftx.launch.topology import CUDNN_VERSION, find_devices, parse_topology
from difftx.model.abstract import vector_mask
from difftx.parallel.mesh import make_mesh
from difftx.training.state import init_params
from difftx.training.workload import attention_kernel

NEEDS_LIBTPU = pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed: no TPU to compile for")


def compiled_step(c, devices) -> str:
    """Return the HLO of the train step on the mesh of the config."""
    return trace_step(c, make_mesh(c.mesh, devices)).lower().compile().as_text()


def sharded(config):
    return config(
        model__d_model=512,
        model__num_heads=2,
        model__compute_dtype="bfloat16",
        model__remat="dots",
        data__sequence_length=1024,
        train__global_batch_tokens=4096,
        mesh__fsdp=2,
        mesh__tensor=2,
    )


ZIGZAG_ROWS = {
    "model.remat": "full",
    "data.sequence_length": "8192",
    "train.global_batch_tokens": "8192",
    "data.document_mask": "True",
    "mesh.fsdp": "1",
    "mesh.tensor": "1",
    "mesh.context": "4",
    "mesh.context_method": "zigzag",
}


@pytest.mark.parametrize("fields", [{}, ZIGZAG_ROWS], ids=["whole rows", "sharded rows"])
def test_the_step_on_tpu_has_the_kernels_of_differential_attention(config, fields):
    pytest.importorskip("libtpu", reason="libtpu is not installed: nothing can be compiled for TPU")
    devices = topologies.get_topology_desc("v5p:2x2x1", "tpu").devices
    c = override(sharded(config), {"model.attention_implementation": "pallas_tpu"} | fields)
    text = compiled_step(c, devices)
    assert "diff_attention_forward" in text
    assert "diff_attention_dqkv" in text


@h200.needs_plugin
def test_the_step_on_hopper_has_all_three_kernels(config):
    devices = h200.mesh((2, 2), ("fsdp", "tensor")).devices.flatten()
    c = override(sharded(config), {"model.attention_implementation": "pallas_gpu"})
    text = compiled_step(c, devices)
    assert text.count('custom_call_target="mosaic_gpu_v2"') >= 3  # Forward, dK/dV, dQ, and kernels that remat repeats.


@h200.needs_plugin
def test_the_loops_over_layers_have_matrices_and_their_gradients_in_bfloat16(config):
    c = override(sharded(config), {"mesh.fsdp": "1", "mesh.tensor": "1", "model.num_layers": "9"})
    text = compiled_step(c, devices := find_devices(parse_topology("h100:1")))
    layer_loops = [line for line in text.splitlines() if " while(" in line and "bf16[9," in line]
    assert len(layer_loops) == 2  # Forward and backward.
    with jax.set_mesh(make_mesh(c.mesh, devices)):
        weights = jax.eval_shape(lambda: init_params(c))["blocks"]
    is_vector = jax.tree.leaves(vector_mask(c.model)["blocks"])
    for weight in [w for w, is_vector in zip(jax.tree.leaves(weights), is_vector, strict=True) if not is_vector]:
        shape = ",".join(map(str, weight.shape))
        assert all(f"bf16[{shape}]" in loop for loop in layer_loops)
        assert not any(f"f32[{shape}]" in loop for loop in layer_loops)


def operands_of_products(text: str) -> set[tuple[str, ...]]:
    """Return the dtypes of both operands of each product in an HLO, in alphabetical order."""
    found = set()
    for computation in re.split(r"\n(?=(?:ENTRY )?%)", text):
        dtypes = dict(re.findall(r"%([\w.-]+) = (\w+)\[", computation))
        for operands in re.findall(r" (?:dot|convolution)\((.*?)\)", computation):
            found.add(tuple(sorted(dtypes.get(name.strip().lstrip("%"), name) for name in operands.split(",")[:2])))
    return found


@pytest.mark.parametrize(
    ("topology", "matmul", "expected"),
    [
        pytest.param("h100:4", "fp8", {("f8e4m3fn", "f8e4m3fn"), ("f8e4m3fn", "f8e5m2")}, marks=h200.needs_plugin),
        pytest.param("h100:4", "int8", {("s8", "s8")}, marks=h200.needs_plugin),
        pytest.param("v5p:2x2x1", "int8", {("s8", "s8")}, marks=NEEDS_LIBTPU),
    ],
)
def test_the_products_of_the_step_have_operands_of_8_bits(config, topology, matmul, expected):
    c = override(sharded(config), {"model.matmul": matmul, "model.attention_implementation": "xla"})
    assert expected <= operands_of_products(compiled_step(c, find_devices(parse_topology(topology))))


@h200.needs_plugin
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("kind", ["a100", "b200"])
def test_the_step_on_gpus_without_wgmma_uses_cudnn(config, kind, documents):
    """Ampere, Ada and Blackwell compute attention by cuDNN, also for segments of packed documents."""
    topology = parse_topology(f"{kind}:4")
    c = sharded(config)
    c = dataclasses.replace(c, data=dataclasses.replace(c.data, document_mask=documents))
    found = estimate(c, find_devices(topology), topology.chip)
    assert found.cudnn
    assert found.fits
    assert found.bound is not None


DOCUMENTS = {"data.document_mask": "True"}
ZIGZAG = {"mesh.fsdp": "1", "mesh.context": "2", "mesh.context_method": "zigzag"}


@pytest.mark.parametrize(
    ("topology", "fields", "expected"),
    [
        pytest.param("v5p:2x2x1", {}, "splash_wide", marks=NEEDS_LIBTPU),
        pytest.param("v5p:2x2x1", DOCUMENTS | ZIGZAG, "splash_wide", marks=NEEDS_LIBTPU),
        pytest.param("h100:4", {}, "pallas_gpu", marks=h200.needs_plugin),
        pytest.param("h100:4", DOCUMENTS, "pallas_gpu", marks=h200.needs_plugin),
        pytest.param("h100:4", ZIGZAG, "xla", marks=h200.needs_plugin),
    ],
)
def test_the_named_kernel_is_the_one_in_the_step(config, caplog, topology, fields, expected):
    """`attention_kernel` does not trace the step, so its answer is compared with the log of a traced step."""
    c = override(sharded(config), fields)
    mesh = make_mesh(c.mesh, find_devices(parse_topology(topology)))
    api._log_once.cache_clear()
    with caplog.at_level("INFO", logger=api.log.name), cudnn.checked_for_target(CUDNN_VERSION):
        assert attention_kernel(c, mesh) == expected
        named = caplog.messages.copy()
        api._log_once.cache_clear()
        caplog.clear()
        trace_step(c, mesh)
        assert caplog.messages == named


@h200.needs_plugin
@pytest.mark.parametrize("architecture", ["diff", "transformer"])
def test_a_new_token_copies_no_weights(architecture):
    c = load_config(f"{ROOT}/configs/diff_3b.py:{architecture}", {"model.num_layers": "9"})
    mesh = make_mesh(c.mesh, find_devices(parse_topology("h100:1")))

    def on_device(tree):
        return jax.tree.map(lambda x: h200.struct(mesh, x.shape, x.dtype, x.sharding.spec if x.sharding else P()), tree)

    def rows_and_weights(params):
        lm = decode.LanguageModel(c, mesh, params, load_tokenizer("bytes"))
        return decode.prefill(lm, [[0]], seeds=[0], limits=[1]), lm.weights, lm.allowed, jnp.int32(0)

    with jax.set_mesh(mesh), cudnn.checked_for_target(91900):
        rows, weights, *others = on_device(jax.eval_shape(rows_and_weights, jax.eval_shape(lambda: init_params(c))))
        lowered = decode._decode_block.lower(weights, rows, *others, GREEDY, config=c)
        text = lowered.compile().as_text()
    smallest = min(w.size for w in jax.tree.leaves(weights) if w.dtype == jnp.bfloat16)
    (body,) = re.findall(r" while\(.*body=%([\w.]+)", text)
    instructions = text.split(f"%{body} (")[1].split("\n}")[0].splitlines()[1:]
    made = [
        re.match(r"\s+(?:ROOT )?%(\S+) = \w+\[([\d,]*)\]\S* (?!get-tuple-element|bitcast)", i) for i in instructions
    ]
    sizes = {m[1]: math.prod(map(int, m[2].split(","))) for m in made if m and m[2]}
    assert len(sizes) > 50
    assert {name for name, size in sizes.items() if size >= smallest and "scatter" not in name} == set()
