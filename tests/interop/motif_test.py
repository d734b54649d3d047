"""Folders of Motif: each layer and the greedy text are those of a reference in numpy, and all suites run."""

import functools
import itertools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import write_text
from helpers.cases import marked
from helpers.interop_folders import edit_config, export, import_, parameters, refused
from safetensors.numpy import save_file

import difftx
from difftx.data.tokenizer import END_OF_TEXT
from difftx.data.tokenizers import load_tokenizer
from difftx.interop import tokenizers
from difftx.interop.fields import Fields
from difftx.interop.huggingface import read
from difftx.interop.parameters import shape_of, sizes_of, weights_of
from difftx.model.abstract import count_parameters
from interop import motif_reference

COMMON = {
    "architectures": ["MotifForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_motif.MotifForCausalLM"},  # It is never executed.
    "model_type": "motif",
    "hidden_act": "poly_norm",
    "attn_rms_norm_eps": 1e-3,
    "rms_norm_eps": 1e-2,
    "rope_theta": 50.0,
    "use_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "torch_dtype": "float32",
}
TINY = COMMON | {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "max_position_embeddings": 128,
}
# The heads of the published models: pairs, and 4 signal heads per noise head.
MODELS = {
    "motif": TINY | {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "motif_2": TINY
    | {"num_attention_heads": 20, "num_key_value_heads": 4, "num_noise_heads": 4, "k_ratio": 1, "head_dim": 6},
}
# Sizes of Motif-2.6B and Motif-2-12.7B, whose published totals are 2.6 and 12.7 billion. mlx-motif states the widths of
# the projections. The vocabulary is not in the sources of these tests.
PUBLISHED = {
    2_597_218_432: COMMON
    | {"vocab_size": 219_520, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 32}
    | {"num_attention_heads": 16, "num_key_value_heads": 16, "tie_word_embeddings": True},
    12_703_860_896: COMMON
    | {"vocab_size": 219_520, "hidden_size": 4096, "intermediate_size": 16_384, "num_hidden_layers": 40}
    | {"num_attention_heads": 40, "num_key_value_heads": 16, "num_noise_heads": 8, "k_ratio": 1, "head_dim": 128},
}


def write(folder, settings):
    """Write a folder with random weights and the tokenizer of bytes, and return its tensors."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizers.tokenizer_json(load_tokenizer("bytes"), "bytes")))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END_OF_TEXT}))
    model, rng, tensors = read(Fields(folder / "config.json")), np.random.default_rng(5), {}
    for weight in weights_of("motif", model):
        shape = shape_of(weight.axes, sizes_of(model))
        for name, layer in itertools.product(weight.names, range(model.num_layers if weight.has_layers else 1)):
            mean = 1 if "norm" in name or "subln" in name else 0
            tensors[name.format(layer=layer)] = rng.normal(mean, 0.3, shape).astype(np.float32)
    tensors["model.layers.1.mlp.gate_proj.weight"] *= 0.03  # So small that PolyNorm's epsilon matters.
    save_file(tensors, folder / "model.safetensors")
    return tensors


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Return a function from a model's name to its tensors, its folder and the run's directory."""
    root = tmp_path_factory.mktemp("motif")
    write_text(root / "text.txt")

    @functools.cache
    def of(name):
        tensors = write(root / name, MODELS[name])
        flags = [f"--config.data.path={root / 'text.txt'}", "--config.data.sequence_length=512"]
        return tensors, root / name, import_(root / name, root / f"{name}-run", *flags)

    return of


@pytest.mark.parametrize("name", marked(MODELS, fast=["motif_2"]))
def test_each_layer_is_that_of_the_reference(imported, name):
    tensors, folder, workdir = imported(name)
    tokens_T = np.random.default_rng(1).integers(256, size=20)
    expected_LTD, expected_TV = motif_reference.outputs(tensors, MODELS[name], tokens_T)
    for run in map(difftx.load, (workdir, folder)):
        call = jax.jit(lambda model, tokens_BT: model(tokens_BT, hook=lambda x_BTD, _: (x_BTD, x_BTD)))
        logits_BTV, statistics = call(run.model, tokens_T[None])
        for found_TD, expected_TD in zip(statistics["hook"][:, 0], expected_LTD, strict=True):
            np.testing.assert_allclose(found_TD, expected_TD, rtol=0, atol=1e-5 * np.abs(expected_TD).max())
        np.testing.assert_allclose(logits_BTV[0], expected_TV, rtol=0, atol=1e-5 * np.abs(expected_TV).max())


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_is_that_of_the_reference(imported, name):
    tensors, _, workdir = imported(name)
    tokens = [5, 77, 130, 9, 200]
    for _ in range(12):
        logits_V = motif_reference.outputs(tensors, MODELS[name], np.array(tokens))[1][-1]
        tokens.append(int(logits_V[:257].argmax()))
    assert 256 not in tokens  # The end of a text.
    run = difftx.load(workdir)
    expected = run.tokenizer.decode(tokens[5:])
    assert run.generate(tokens[:5], new_tokens=12, temperature=0) == expected


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_the_export_is_imported_bit_for_bit(imported, mesh_of, tmp_path, name):
    workdir = imported(name)[2]
    back = import_(export(workdir, tmp_path / "hf"), tmp_path / "back", "--config.data.sequence_length=512")
    old, new = (parameters(each, mesh_of())[1] for each in (workdir, back))
    jax.tree.map(np.testing.assert_array_equal, old, new)


@pytest.mark.parametrize(("total", "settings"), PUBLISHED.items())
def test_the_published_models_have_the_published_sizes(total, settings):
    assert count_parameters(read(Fields(Path("config.json"), settings))).total == total


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_noise_heads": 3}, "num_attention_heads=20 is not num_noise_heads=3 times an integer above 1"),
        ({"num_key_value_heads": 5}, "num_key_value_heads=5 must be even"),
        ({"k_ratio": 2}, "k_ratio=2 cannot be converted; only 1 can"),
        ({"q_lora_rank": 512}, "q_lora_rank=512 cannot be converted"),  # Motif-3 has the same class.
    ],
)
def test_models_that_difftx_cannot_represent(imported, tmp_path, changes, message):
    refused(edit_config(imported("motif_2")[1], tmp_path / "source", **changes), tmp_path / "out", message)


def test_transformers_cannot_verify_motif(imported, tmp_path):
    pytest.importorskip("torch")  # Without it, --verify is refused first.
    refused(imported("motif_2")[1], tmp_path / "out", "--verify: transformers has no MotifForCausalLM", "--verify")
