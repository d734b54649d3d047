"""`difftx convert --to=hf` of every architecture: round trips, the files of the folder, and invalid folders."""

import ast
import json
import sys

import jax
import numpy as np
import pytest
from helpers.cases import marked
from helpers.interop_folders import export, import_, parameters, refused
from helpers.interop_models import MODELS, NOT_SERVABLE, config_of, exported

from difftx.interop import remote_code_config
from difftx.interop.fields import config_json, determined_fields
from difftx.interop.parameters import architectures_of
from difftx.interop.remote_code_config import MODELING
from difftx.model.architectures import ARCHITECTURES
from difftx.training.run import read_config

LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ABSENT = object()
GDA = {"num_heads": 6, "num_kv_heads": None, "head_dim": None, "gda": {"signal_heads": 3}}
LLAMA3 |= {"original_max_position_embeddings": 64}


@pytest.mark.parametrize("name", marked(MODELS, fast=["diff", "llama"]))
def test_round_trip_is_bit_for_bit(config, mesh_of, tmp_path, name):
    lm, workdir, folder = exported(config, mesh_of(), name, tmp_path)
    back = import_(folder, tmp_path / "back")
    jax.tree.map(np.testing.assert_array_equal, parameters(back, mesh_of())[1], lm.params)
    now, before = (read_config(run).model for run in (back, workdir))
    assert determined_fields(remote_code_config, now) == determined_fields(remote_code_config, before)
    again = export(back, tmp_path / "again")
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert files.get(MODELING.name) == (None if name == "llama" else MODELING.read_bytes())


def test_every_architecture_can_be_exported():
    assert {architecture for architecture, _ in MODELS.values()} == {*architectures_of("hf")} == {*ARCHITECTURES}


def test_the_modelling_file_stands_alone():
    """It imports nothing of difftx, and its list of architectures that no engine can serve is complete."""
    tree = ast.parse(MODELING.read_text())
    modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert {module.split(".")[0] for module in modules} - sys.stdlib_module_names == {"torch", "transformers"}
    constants = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    assert {*ast.literal_eval(constants["EAGER_ONLY"])} == {*NOT_SERVABLE}


@pytest.mark.parametrize(("name", "serving"), [("gdla", "engines with one key/value cache"), ("sink", "not servable")])
def test_the_model_card_has_the_numbers_of_its_checkpoint(config, mesh_of, tmp_path, name, serving):
    lm, workdir, _ = exported(config, mesh_of(), name, tmp_path)
    rows = [{"split": "train", "step": step, "attempt": 1, "loss": 2.5 + step} for step in (0, 1)]
    others = {"grad_norm": 1.0, "learning_rate": 1e-3, "tokens": 0, "tokens_per_second": 1.0, "step_seconds": 1.0}
    others |= {"data_wait_seconds": 0.0, "skipped": 0}
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(row | others) + "\n" for row in rows))
    manifest = json.loads((workdir / "checkpoints" / "0" / "manifest.json").read_text())
    for suite, weights, number in (("loss", manifest["weights"], 1.25), ("recall", "of another attempt", 0.75)):
        (workdir / "evals" / suite).mkdir(parents=True)
        result = {"weights": weights, "numbers": {"value": number}}
        (workdir / "evals" / suite / "0.json").write_text(json.dumps(result))
    out = export(workdir, tmp_path / "out")
    card = (out / "README.md").read_text()
    assert card.startswith(f"---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [difftx, {name}]\n")
    assert serving in card
    assert "| `num_heads` | `8` |" in card or name == "sink"
    assert "| training loss | 2.5000 |" in card
    assert "| loss: value | 1.2500 |" in card
    assert "0.75" not in card.split("## Data")[0]
    assert manifest["loader"]["signature"]["tokenizer"] in card
    assert lm.config.to_json().strip() in card
    generation = json.loads((out / "generation_config.json").read_text())
    unused = list(range(257, lm.config.model.vocab_size))
    assert generation == {"do_sample": False, "eos_token_id": 256, "pad_token_id": 256, "suppress_tokens": unused}
    assert (out / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "other/repo--evil.Model"}}, r"auto_map=.*evil.* only .*modeling_difftx"),
        ({"architectures": ["LlamaForCausalLM"]}, r"model_type='difftx' cannot be converted; only 'llama' can"),
        ({"architectures": ["DifftxEagerForCausalLM"]}, r"architectures=.*Eager.* only \['DifftxForCausalLM'\] can"),
        ({"architecture": "sink"}, r"config\.json: model\.gda: architecture 'sink' does not use this group"),
        ({"difftx": GDA | {"num_heads": 5}}, r"config\.json: model\.gda\.signal_heads=3 does not divide num_heads=5"),
        ({"difftx": GDA | {"window": 8}}, "difftx={.*'window': 8.* cannot be converted"),
        ({"num_noise_heads": 3}, "num_noise_heads=3 cannot be converted; only 2 can"),
        ({"rope_scaling": LLAMA3}, "rope_parameters=.* cannot be converted; only .*llama3"),
        ({"quantization_config": {"bits": 4}}, "quantization_config=.* cannot be converted"),
        ({"lambda_bound": ABSENT}, r"config\.json: lambda_bound is missing"),
        ({"dex": {"lambda_bound": "tanh"}}, r"model\.lambda_bound=tanh: architecture 'dex' does not use it"),
    ],
)
def test_configs_that_contradict_themselves(config, tmp_path, changes, message):
    """Change the config.json of a gda, or of the architecture that the changes name."""
    (name,) = changes if changes.keys() <= MODELS.keys() else ("gda",)
    settings = config_json(remote_code_config, config_of(config, name), 256) | changes.get(name, changes)
    settings = {field: value for field, value in settings.items() if value is not ABSENT}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    refused(tmp_path, tmp_path / "out", message)


def test_a_hostile_modelling_file_is_not_executed(config, mesh_of, tmp_path):
    lm, _, folder = exported(config, mesh_of(), "gda", tmp_path)
    (folder / MODELING.name).write_text("raise SystemExit('executed')\n")
    back = import_(folder, tmp_path / "back")
    jax.tree.map(np.testing.assert_array_equal, parameters(back, mesh_of())[1], lm.params)
