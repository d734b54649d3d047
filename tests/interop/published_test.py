"""Models with the config.json of published models (fixtures/published.json)."""

import json
from pathlib import Path

import pytest
from helpers.cases import marked
from helpers.interop_folders import FIXTURES

from difftx.config.build import override
from difftx.errors import UserError
from difftx.interop.differential import new_model
from difftx.interop.fields import Fields
from difftx.interop.huggingface import read
from difftx.model.abstract import count_parameters

PUBLISHED = json.loads((FIXTURES / "published.json").read_text())
# Numbers of parameters, as the models' pages state them.
SIZES = {
    "SmolLM2-135M": 134_515_008,
    "TinyLlama": 1_100_048_384,
    "Qwen2.5-0.5B": 494_032_768,
    "Llama-3.2-1B": 1_235_814_400,
    "Qwen3-0.6B": 596_049_920,
    "Mistral-7B-v0.1": 7_241_732_096,
    "SmolLM3-3B": 3_075_098_624,
}


def model_of(name):
    return read(Fields(Path("config.json"), PUBLISHED[name]))


@pytest.mark.parametrize("name", SIZES)
def test_the_model_has_the_published_size_and_rotary_embedding(name):
    model, published = model_of(name), PUBLISHED[name]
    assert count_parameters(model).total == SIZES[name]
    assert model.rope_theta == published["rope_theta"]
    scaling = published.get("rope_scaling")
    assert model.rope_scaling.factor == (scaling["factor"] if scaling else 1)
    assert model.attention_bias == (name == "Qwen2.5-0.5B")
    assert model.qk_norm == (name == "Qwen3-0.6B")
    assert model.window == (4096 if name == "Mistral-7B-v0.1" else None)
    assert model.window_pattern == ("GGGN" if name == "SmolLM3-3B" else "L")


@pytest.mark.parametrize("name", marked(SIZES, fast=["SmolLM2-135M"]))
@pytest.mark.parametrize("architecture", ["zero_branch", "dex", "diff"])
def test_published_model_becomes_differential(config, name, architecture):
    """SmolLM2-135M has 9 heads and 3 key/value heads, which cannot be paired."""
    model = model_of(name)
    changes = {"model.head_norm": "rms_affine" if architecture == "diff" else "none"}
    chosen = override(config("transformer"), changes | {"model.architecture": architecture}).model
    if (name, architecture) == ("SmolLM2-135M", "diff"):
        with pytest.raises(UserError, match=r"num_kv_heads=3: split makes one head of two .* use zero-branch or dex"):
            new_model(model, chosen)
    else:
        assert count_parameters(new_model(model, chosen)).total >= SIZES[name]
