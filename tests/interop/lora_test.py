"""Adapters in checkpoints: what readers compute, `difftx convert --merge` and `--to=peft`."""

import json

import jax
import numpy as np
import pytest
from helpers.inference_models import full_logits, language_model, prompts_of
from helpers.interop_folders import export, parameters, refused, run_of
from model.oracle import SIZES
from training.trainable_test import random_adapters

from difftx.commands.convert import main
from difftx.inference.decode import LanguageModel
from difftx.training.trainable import LORA, merged


def run_with_adapters(config, mesh, folder, architecture, trainable=()):
    """Write a run without and a run with adapters. Return the model with merged weights."""
    lm = language_model(config, mesh, architecture, **{"model__compute_dtype": "float32"} | SIZES.get(architecture, {}))
    run_of(lm, folder / "base")
    c = lm.config.but(train={"lora_rank": 3, "lora_alpha": 6.0, "trainable": trainable})
    params = lm.params | {LORA: random_adapters(c, mesh)[1][LORA]}
    run_of(LanguageModel(c, mesh, params, lm.tokenizer), folder / "lora")
    with jax.set_mesh(mesh):
        return LanguageModel(lm.config, mesh, merged(params, c.train), lm.tokenizer)


def test_readers_and_merge_have_the_merged_weights(config, mesh_of, tmp_path):
    mesh = mesh_of()
    expected = run_with_adapters(config, mesh, tmp_path, "gated").params
    assert main(["--from=difftx", "--to=difftx", "--merge", f"--input={tmp_path}/lora", f"--out={tmp_path}/new"]) == 0
    for name in ("lora", "new"):
        c, params = parameters(tmp_path / name, mesh)
        assert c.train.lora_rank == (3 if name == "lora" else None)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), params, expected)
    formats = [export(tmp_path / name, tmp_path / f"{name}-hf") for name in ("lora", "new")]
    assert len({(folder / "model.safetensors").read_bytes() for folder in formats}) == 1


@pytest.mark.long
def test_refusals(config, mesh_of, tmp_path):
    run_with_adapters(config, mesh_of(), tmp_path, "diff", ("lora/*", "final_norm/scale"))

    def convert(source, out, *flags):
        main(["--from=difftx", f"--input={source}", f"--out={out}", *flags])

    base, lora, out = (tmp_path / name for name in ("base", "lora", "out"))
    refused(base, out, "--to=peft: .* has no adapters; training with train.lora_rank", "--to=peft", convert=convert)
    refused(base, out, "--merge: .* has no adapters", "--to=difftx", "--merge", convert=convert)
    refused(lora, out, "--merge requires --from=difftx --to=difftx", "--to=hf", "--merge", convert=convert)
    refused(lora, out, "has trained final_norm/scale too, .*; use --to=hf", "--to=peft", convert=convert)
    refused(lora, out, "--verify compares with the package transformers", "--to=peft", "--verify", convert=convert)


@pytest.mark.parametrize("architecture", ["transformer", "diff", "diff_v2", "gdla", "gated", "gda"])
def test_peft_loads_the_adapters(config, mesh_of, tmp_path, architecture):
    torch = pytest.importorskip("torch", reason="make parity installs torch, transformers and peft")
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    mesh = mesh_of()
    expected = run_with_adapters(config, mesh, tmp_path, architecture)
    base, adapters = (export(tmp_path / name, tmp_path / f"{name}-{form}", format_=form) for name, form in FORMS)
    assert json.loads((adapters / "adapter_config.json").read_text())["r"] == 3
    tokens_BT = np.array(prompts_of([24, 24]))
    model = transformers.AutoModelForCausalLM.from_pretrained(base, trust_remote_code=True, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(model, adapters)
    with torch.no_grad():
        found = adapted(torch.tensor(tokens_BT)).logits.numpy()
        merged_BTV = adapted.merge_and_unload()(torch.tensor(tokens_BT)).logits.numpy()
    ours = full_logits(expected, mesh, tokens_BT)
    for logits in (found, merged_BTV):
        np.testing.assert_allclose(logits, ours, atol=1e-4 * np.abs(ours).max())
    before = full_logits(parameters_model(tmp_path / "base", mesh, expected), mesh, tokens_BT)
    assert not np.allclose(before, ours, atol=1e-2 * np.abs(ours).max())


FORMS = (("base", "hf"), ("lora", "peft"))


def parameters_model(workdir, mesh, like):
    return LanguageModel(like.config, mesh, parameters(workdir, mesh)[1], like.tokenizer)
