"""Comparisons with transformers, tokenizers and safetensors in `make parity`. Without these, they are skipped."""

import json

import jax
import numpy as np
import pytest
from conftest import TINY, write_text
from helpers.command_server import run_new
from helpers.inference_models import language_model
from helpers.interop_checks import check_attention_weights, check_generation, check_logits
from helpers.interop_folders import FIXTURES, edit_config, export, import_, run_of, tensors_of, words_file
from helpers.pages import blocks
from helpers.tokenizer_files import random_strings

from difftx.data.sources import load_sources
from difftx.data.tokenizers import load_tokenizer
from difftx.errors import UnreadableError
from difftx.interop import in_transformers, runs, tokenizers
from difftx.interop.huggingface import CLASSES
from difftx.training.checkpoint.manifest import read_manifest
from difftx.training.run import read_config

torch = pytest.importorskip("torch", reason="make parity installs torch and transformers")
transformers = pytest.importorskip("transformers")

from interop.fixtures.make import MODELS, write_model  # noqa: E402 (imports torch)


@pytest.mark.parametrize("name", MODELS)
def test_random_models_have_the_results_of_transformers_and_are_exported_again(mesh_of, tmp_path, capsys, name):
    write_model(name, 11, tmp_path / "hf")
    workdir = import_(tmp_path / "hf", tmp_path / "run", "--verify", "--config.mesh.fsdp=8")
    theirs = np.load(tmp_path / "hf" / "expected.npz")
    check_logits(workdir, theirs, mesh_of())
    check_generation(workdir, theirs, mesh_of())
    format_ = "diffllama" if name.startswith("diff") else "hf"
    if format_ == "diffllama":
        check_attention_weights(workdir, theirs)
    export(workdir, tmp_path / "out", "--verify", format_=format_)
    assert capsys.readouterr().out.count("verified: logits of") == 2
    before, after = (tensors_of(tmp_path / folder) for folder in ("hf", "out"))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    configs = [transformers.AutoConfig.from_pretrained(tmp_path / folder) for folder in ("hf", "out")]
    # Without a window, a Mistral is a Llama.
    assert configs[1].architectures == (["LlamaForCausalLM"] if name == "mistral_full" else configs[0].architectures)
    assert configs[0].rope_parameters == configs[1].rope_parameters


@pytest.mark.parametrize("name", [name for name in CLASSES if hasattr(transformers, name)])
def test_absent_fields_have_the_values_of_transformers(name):
    """`read` takes these values for fields that config.json leaves out."""
    theirs = getattr(transformers, name.replace("ForCausalLM", "Config"))()
    width = theirs.hidden_size // theirs.num_attention_heads
    ours = {"num_key_value_heads": theirs.num_attention_heads, "head_dim": width, "tie_word_embeddings": False}
    ours |= {"rope_theta": 10_000.0} | CLASSES[name].defaults
    found = {field: getattr(theirs, field, width) for field in ours if field != "rope_theta"}
    assert found | {"rope_theta": theirs.rope_parameters["rope_theta"]} == ours


ABSENT = object()
LLAMA3 = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0}
LLAMA3 |= {"original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"rope_scaling": LLAMA3, "rope_theta": 50.0}),
        ("llama3", {"rope_scaling": LLAMA3 | {"rope_theta": 50.0}, "rope_theta": 7.0}),
        ("llama3", {"rope_scaling": {"type": "default"}}),
        ("llama", {"rope_parameters": {"rope_type": "default", "type": "linear"}, "rope_theta": 7.0}),
        ("qwen2", {"sliding_window": 4, "attention_bias": True, "max_window_layers": 1, "torch_dtype": "float16"}),
        ("diff", {"head_dim": None, "num_key_value_heads": None, "rope_parameters": None}),
        ("qwen3", {"rope_scaling": LLAMA3 | {"rope_theta": 50.0}, "sliding_window": 4, "attention_bias": False}),
        ("smollm3", {"rope_parameters": ABSENT, "no_rope_layers": None, "no_rope_layer_interval": 3}),
    ],
)
def test_fields_with_two_spellings_are_resolved_as_in_transformers(mesh_of, tmp_path, name, changes):
    folder = edit_config(FIXTURES / name, tmp_path / "hf", **changes)
    tokens_BT = np.random.default_rng(0).integers(256, size=(1, 32))
    theirs = in_transformers.logits(in_transformers.load(folder), tokens_BT)
    workdir = import_(folder, tmp_path / "run")
    ours = runs.our_logits(read_manifest(workdir / "checkpoints" / "0"), read_config(workdir), mesh_of(), tokens_BT)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["llama3", "qwen2", "qwen3"])
@pytest.mark.parametrize("method", ["zero-branch", "dex", "split"])
def test_differential_model_of_imported_weights_is_exported(tmp_path, mesh_of, capsys, name, method):
    write_model(name, 13, tmp_path / "hf")
    heads = ["--dex_heads=all"] if method == "dex" else []
    flags = [f"--differential={method}", "--verify", "--config.mesh.fsdp=8", *heads]
    workdir, theirs = import_(tmp_path / "hf", tmp_path / "run", *flags), np.load(tmp_path / "hf" / "expected.npz")
    ours = runs.our_logits(
        read_manifest(workdir / "checkpoints" / "0"), read_config(workdir), mesh_of(fsdp=1), theirs["tokens"]
    )
    is_preserved = np.linalg.norm(ours - theirs["logits"]) < 1e-6 * np.linalg.norm(theirs["logits"])
    assert is_preserved == (method != "split")
    export(workdir, tmp_path / "out", "--verify")
    assert capsys.readouterr().out.count("verified: logits of") == 2


def test_a_grouped_model_with_gains_has_the_logits_of_diffllama(tmp_path, mesh_of, config, capsys):
    """DiffLlama has no gain of the head norm, so W_O of each query head contains it."""
    changes = {"model__num_heads": 4, "model__num_kv_heads": 2, "model__compute_dtype": "float32", "mesh__fsdp": 8}
    lm = language_model(config, mesh_of(fsdp=8), **changes)
    assert np.abs(np.asarray(lm.params["blocks"]["attention"]["head_norm"]["scale"]) - 1).max() > 0.1
    out = export(run_of(lm, tmp_path / "run"), tmp_path / "hf", "--verify", format_="diffllama")
    assert "verified: logits of" in capsys.readouterr().out
    assert transformers.AutoConfig.from_pretrained(out).architectures == ["DiffLlamaForCausalLM"]


def output_of(*arguments):
    """Run a new interpreter, which must succeed, and return what it prints."""
    result = run_new(*arguments, timeout=600)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("architecture", "format_"), [("diff", "hf"), ("diff", "diffllama"), ("transformer", "hf"), ("gated", "hf")]
)
def test_a_trained_run_scores_the_same_loss_in_transformers(tmp_path, monkeypatch, architecture, format_):
    text = write_text(tmp_path / "text.txt")
    changes = TINY | {"data.path": text, "train.steps": 30, "eval.loss_tokens": 10**9, "logging.trackers": ""}
    flags = [f"--config.{name}={value}" for name, value in changes.items()]
    workdir, out = tmp_path / "run", tmp_path / "hf"
    output_of("train.py", f"--config=configs/quickstart.py:{architecture}", f"--workdir={workdir}", *flags)
    ours = json.loads((workdir / "evals" / "loss" / "30.json").read_text())["numbers"]["loss"]
    said = output_of(
        "-m", "difftx", "convert", "--from=difftx", f"--to={format_}", f"--input={workdir}", f"--out={out}", "--verify"
    )
    assert "verified: logits of 320 tokens differ from transformers' by at most" in said
    assert "the greedy text of 5 prompts is equal" in said

    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    model = transformers.AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer("line é")["input_ids"] == list("line é".encode())
    (source,) = load_sources(read_config(workdir).data, load_tokenizer("bytes")).valid.values()
    rows = [source[index] for index in range(len(source))]
    tokens_BT, targets_BT, mask_BT = (
        torch.from_numpy(np.stack([row[name] for row in rows])) for name in ("tokens", "targets", "loss_mask")
    )
    with torch.no_grad():
        logits_BVT = model(tokens_BT.long()).logits.transpose(1, 2)
    nll_BT = torch.nn.functional.cross_entropy(logits_BVT, targets_BT.long(), reduction="none")
    assert abs((nll_BT * mask_BT).sum() / mask_BT.sum() - ours) < 1e-4


@pytest.mark.parametrize("name", ["bytes", "words.tiktoken", "cl100k_base"])
def test_texts_have_the_ids_of_tiktoken(tmp_path, name):
    words_file(tmp_path / "words.tiktoken")
    spec = str(tmp_path / name) if name.endswith(".tiktoken") else name
    try:
        encoding = load_tokenizer(spec)
    except UnreadableError as error:  # Without a network.
        pytest.skip(str(error))
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizers.tokenizer_json(encoding, name)))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for text in random_strings(300):
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ids == encoding.encode_ordinary(text), repr(text)
        assert theirs.decode(ids, clean_up_tokenization_spaces=False) == text


def test_the_page_on_python_trains_an_export_with_trainer(tmp_path, monkeypatch, config, mesh_of):
    pytest.importorskip("accelerate", reason="make parity installs it, which Trainer needs")
    lm = language_model(config, mesh_of(fsdp=8), model__d_model=32, model__compute_dtype="float32", mesh__fsdp=8)
    export(run_of(lm, tmp_path / "run"), tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    (code,) = blocks("python.md", "py")
    names = {}
    exec(code.replace('report_to="none"', 'report_to="none", logging_steps=1'), names)
    losses = [row["loss"] for row in names["trainer"].state.log_history if "loss" in row]
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 0.1
