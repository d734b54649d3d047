"""Compare `difftx convert` with committed results of transformers and with the official code's formulas."""

import functools
import json

import jax
import numpy as np
import pytest
from helpers.cases import marked
from helpers.inference_models import language_model
from helpers.interop_checks import check_attention_weights, check_generation, check_logits
from helpers.interop_folders import FIXTURES, export, import_, parameters, run_of, tensors_of

from difftx.interop.runs import our_logits
from difftx.training.checkpoint.manifest import read_manifest
from difftx.training.run import read_config
from interop import official_oracle

MODELS = ["diff", "diff_grouped", "llama", "llama3", "qwen2", "qwen3", "mistral", "smollm3"]


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Return a function from a model's name to the directory of the imported run."""
    folder = tmp_path_factory.mktemp("imported")
    return functools.cache(lambda name: import_(FIXTURES / name, folder / name))


def expected(name):
    return np.load(FIXTURES / name / "expected.npz")


@pytest.mark.parametrize("name", marked(MODELS, fast=["diff_grouped", "qwen3", "smollm3"]))
def test_logits_are_those_of_transformers(imported, mesh_of, name):
    check_logits(imported(name), expected(name), mesh_of())


@pytest.mark.long
@pytest.mark.parametrize("name", [pytest.param("diff", marks=pytest.mark.exhaustive), "diff_grouped"])
def test_both_attention_weights_are_the_halves_of_eager_attentions(imported, name):
    check_attention_weights(imported(name), expected(name))


@pytest.mark.parametrize("name", marked(MODELS, fast=[], exhaustive=["llama", "llama3", "diff", "qwen3"]))
def test_greedy_generation_is_that_of_transformers(imported, mesh_of, name):
    check_generation(imported(name), expected(name), mesh_of())


@pytest.mark.parametrize("name", marked(MODELS, fast=["diff", "mistral"]))
def test_round_trip_is_bit_for_bit(imported, mesh_of, tmp_path, name):
    format_ = "diffllama" if name.startswith("diff") else "hf"
    original, back = tensors_of(FIXTURES / name), tensors_of(export(imported(name), tmp_path / "back", format_=format_))
    assert original.keys() == back.keys()
    for tensor, value in original.items():
        np.testing.assert_array_equal(back[tensor].view(np.uint32), value.view(np.uint32))
    classes = [
        json.loads((folder / "config.json").read_text())["architectures"]
        for folder in (FIXTURES / name, tmp_path / "back")
    ]
    assert classes[0] == classes[1]
    again = import_(tmp_path / "back", tmp_path / "again")
    old, new = (parameters(workdir, mesh_of())[1] for workdir in (imported(name), again))
    jax.tree.map(np.testing.assert_array_equal, old, new)
    # The text of config.json may differ, but it describes the same model.
    assert read_config(again).model == read_config(imported(name)).model


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("diff", {"model__num_heads": 4, "model__num_kv_heads": 2, "model__tie_embeddings": False}),
        pytest.param("transformer", {"model__num_heads": 4, "model__num_kv_heads": 2}, marks=pytest.mark.long),
    ],
)
def test_official_layout_gives_the_same_logits(config, mesh_of, tmp_path, architecture, changes):
    lm = language_model(config, mesh_of(), architecture, model__compute_dtype="float32", **changes)
    workdir = run_of(lm, tmp_path)
    official = export(workdir, tmp_path / "official", format_="official")
    settings = json.loads((official / "config.json").read_text())
    tokens_BT = np.random.default_rng(0).integers(260, size=(1, 20))
    oracle_TV = official_oracle.logits(tensors_of(official), settings, tokens_BT[0])
    ours = our_logits(read_manifest(workdir / "checkpoints" / "0"), lm.config, mesh_of(), tokens_BT)
    np.testing.assert_allclose(ours[0], oracle_TV, rtol=0, atol=1e-5)
    back = import_(official, tmp_path / "back", format_="official")
    jax.tree.map(np.testing.assert_array_equal, parameters(back, mesh_of())[1], lm.params)


def test_the_head_norms_gain_is_folded_into_the_output(config, mesh_of, tmp_path):
    changes = {"model__num_heads": 4, "model__num_kv_heads": 2, "model__tie_embeddings": False}
    lm = language_model(config, mesh_of(), model__compute_dtype="float32", **changes)
    assert lm.config.model.head_norm == "rms_affine"
    workdir = run_of(lm, tmp_path)
    back = import_(export(workdir, tmp_path / "hf", format_="diffllama"), tmp_path / "back")
    assert read_config(back).model.head_norm == "rms"
    tokens_BT = np.random.default_rng(0).integers(260, size=(1, 20))
    ours, theirs = (
        our_logits(read_manifest(w / "checkpoints" / "0"), read_config(w), mesh_of(), tokens_BT)
        for w in (workdir, back)
    )
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-5)
    assert np.abs(ours).max() > 0.1
