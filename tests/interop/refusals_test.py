"""Inputs that `difftx convert` rejects: it writes nothing, and its message names the tensor, field or file."""

import json
import re
import shutil

import numpy as np
import pytest
from helpers.inference_models import language_model
from helpers.interop_folders import FIXTURES, edit_config, export, import_, refused, rewrite, run_of, tensors_of

from difftx.data.tokenizers import load_tokenizer
from difftx.errors import UserError
from difftx.interop.runs import check_representable

GROUPED = FIXTURES / "diff_grouped"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ABSENT = object()
QWEN = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
SMOLLM3 = {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3"}
Q = "model.layers.1.self_attn.q_proj.weight"


BIAS = "model.layers.0.self_attn.q_proj.bias"
INCOMPLETE = r"model\.safetensors: not a complete safetensors file \(.*\); copy or download it again$"


def without_a_shard(out):
    shutil.copytree(GROUPED, out)
    (out / "model-00002-of-00005.safetensors").unlink()
    return out


def with_an_index_of_another_folder(out):
    shutil.copytree(GROUPED, out)
    index = out / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-00001-of-00005.safetensors", "../secret.safetensors"))
    return out


def truncated(out, length):
    file = rewrite(GROUPED, out) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    return out


def with_last_value(out, value):
    weights = tensors_of(GROUPED)[Q].copy()
    weights[-1, -1] = value
    return rewrite(GROUPED, out, **{Q: weights})


def with_tensor(name, value):
    return lambda out: rewrite(GROUPED, out, **{name: value})


def with_fewer_tokens(out):
    small = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), np.zeros((200, 32), "f4"))
    return edit_config(rewrite(GROUPED, out.with_name("large"), **small), out, vocab_size=200)


def with_other_embeddings(out):
    embedding = tensors_of(FIXTURES / "diff")["model.embed_tokens.weight"]
    return rewrite(FIXTURES / "diff", out, **{"lm_head.weight": embedding + 1})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (without_a_shard, r"model-00002-of-00005\.safetensors: not a complete safetensors file \(No such file"),
        *((lambda out, n=n: truncated(out, n), INCOMPLETE) for n in (7, -1)),
        (lambda out: with_last_value(out, np.nan), rf"{Q} has values that are not finite"),
        (with_tensor(Q, np.zeros((32, 31), "f4")), rf"{Q} has shape \(32, 31\), but config\.json implies \(32, 32\)"),
        (with_tensor(Q, None), rf"no tensor {Q}\. Did you mean 'model\.layers\.\d\.self_attn\.\S_proj\.weight'\?"),
        (with_tensor(BIAS, np.zeros(32, "f4")), rf"{BIAS} does not belong to the model that config\.json"),
        (with_fewer_tokens, "model.vocab_size=200 is less than the 257 tokens of data.tokenizer='bytes'"),
        (with_other_embeddings, r"lm_head\.weight differs from model\.embed_tokens\.weight, though .* to false"),
        (with_an_index_of_another_folder, r"index\.json: '\.\./secret\.safetensors' is not a file of this folder"),
    ],
)
def test_folders_whose_tensors_do_not_fit(tmp_path, make, message):
    refused(make(tmp_path / "source"), tmp_path / "out", message)


def test_a_tied_model_may_have_a_copy_of_its_embedding(tmp_path):
    embedding = tensors_of(FIXTURES / "diff")["model.embed_tokens.weight"]
    import_(rewrite(FIXTURES / "diff", tmp_path / "again", **{"lm_head.weight": embedding}), tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # No hint: another model has another class, so renaming the class would not help.
        ({"architectures": ["GemmaForCausalLM"]}, "'GemmaForCausalLM' cannot be converted; only .*, .* can$"),
        ({"model_type": "llama"}, "model_type='llama' cannot be converted; only 'diffllama' can"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=.* cannot be converted"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' cannot be converted; only 'silu' can"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 8.0}}, "rope scaling of type 'yarn' cannot be converted"),
        ({"rope_parameters": LLAMA3 | {"factor": None}}, "'factor': None.* its numbers must be positive"),
        (QWEN | {"use_sliding_window": True}, "use_sliding_window=True cannot be"),
        (SMOLLM3 | {"no_rope_layers": [1, 0]}, r"no_rope_layers=\[1, 0\]: expected a 1 or a 0 for each of 3 layers"),
        # transformers takes rope_scaling, though the folder has rope_parameters too.
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope scaling of type 'linear' cannot"),
        ({"rope_parameters": {"rope_type": "default", "factor": 8.0}}, "factor=8.0 cannot be converted with rope type"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps=inf: expected a positive number"),
        ({"num_attention_heads": 7}, "num_attention_heads=7 must be even"),
    ],
)
def test_models_that_difftx_cannot_represent(tmp_path, changes, message):
    refused(edit_config(GROUPED, tmp_path / "source", **changes), tmp_path / "out", message)


def test_a_tokenizer_of_foreign_code(tmp_path):
    """An export would contain the reference to the code, and `trust_remote_code=True` would execute it."""
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / "llama", source)
    auto_map = {"AutoTokenizer": ["someone/evil--tokenization.Evil", None]}
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<s>", "auto_map": auto_map}))
    (source / "tokenizer.json").write_text("{}")
    message = r"tokenizer_config\.json: auto_map=.*someone/evil.* names code of a tokenizer"
    refused(source, tmp_path / "out", message)
    with pytest.raises(UserError, match=message):
        load_tokenizer(str(source))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--config.model.num_layers=3"], r"model\.num_layers: .*config\.json determines this field; remove the flag"),
        (["--config.model.qk_norm=true"], r"--config\.model\.qk_norm: .*config\.json determines this field"),
        (["--config.model.num_layer=3"], "no such field. Did you mean"),
        (["--step=3"], "--step selects a checkpoint of a run"),
        (["--to=official"], "exactly one of them must be difftx"),
    ],
)
def test_incompatible_flags_are_refused(tmp_path, flags, message):
    refused(GROUPED, tmp_path / "out", message, *flags)


def test_output_that_exists_or_has_no_parent(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="exists already; name a new folder"):
        import_(GROUPED, tmp_path / "out")
    with pytest.raises(UserError, match="there is no folder"):
        import_(GROUPED, tmp_path / "none" / "out")


@pytest.mark.parametrize(
    ("architecture", "format_", "changes", "refusal"),
    [
        ("diff", "diffllama", {"lambda_init": 0.8}, "lambda_init=0.8 {}: a DiffLlamaForCausalLM would have None"),
        ("diff", "official", {"head_norm_eps": 1e-6}, "head_norm_eps=1e-06 {}: a MultiheadFlashDiff1 would have 1e-05"),
        ("diff", "official", {"head_dim": 4}, "head_dim=4: the official code derives it from d_model and num_heads"),
        ("transformer", "official", {"post_scale": 3.0}, "post_scale=3.0 {}: a MultiheadAttention would have None"),
        ("transformer", "hf", {"window": 8, "qk_norm": True}, "window=8 {}: a DifftxForCausalLM would have None"),
        ("diff", "hf", {"attention_logit_bits": 8}, "attention_logit_bits=8 {}: a DifftxForCausalLM would have None"),
        ("diff_v2", "diffllama", {}, "architecture='diff_v2' {} with --to=diffllama; diff can"),
        ("gated", "official", {}, "architecture='gated' {} with --to=official; diff, transformer can, and --to=hf"),
    ],
)
def test_models_that_other_formats_do_not_have(config, architecture, format_, changes, refusal):
    with pytest.raises(UserError, match=re.escape(refusal.format("cannot be converted"))):
        check_representable(config(architecture).but(model=changes).model, format_)


def test_a_refused_export_writes_nothing(config, mesh_of, tmp_path):
    lm = language_model(config, mesh_of(), model__head_norm_eps=1e-6)
    workdir = run_of(lm, tmp_path / "run")
    with pytest.raises(
        UserError, match=r"model\.head_norm_eps=1e-06 cannot be converted: a DiffLlamaForCausalLM would have 1e-05"
    ):
        export(workdir, tmp_path / "out", format_="diffllama")
    with pytest.raises(UserError, match=r"step 7: no such checkpoint; .*checkpoints has 0$"):
        export(workdir, tmp_path / "out", "--step=7")
    with pytest.raises(UserError, match=r"no config\.json there, so it is not a run"):
        export(tmp_path, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
