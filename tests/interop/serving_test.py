"""Exported folders in transformers, and in an engine with one key/value cache per layer. Run with `make parity`."""
# Axes: B = batch, T = tokens, S = cached tokens, L = layers, n = query heads, K = key/value heads, E = width of a head

import copy
import importlib
import re
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from helpers.inference_models import full_logits, prompts_of
from helpers.interop_folders import export
from helpers.interop_models import MODELS, NOT_SERVABLE, SERVABLE, exported

from difftx.config.build import override
from difftx.errors import RunError
from difftx.inference.generate import Request, generate
from difftx.inference.sampling import GREEDY
from difftx.interop import in_transformers, remote_code_config, runs
from difftx.interop.fields import config_json
from difftx.interop.runs import compare_logits
from difftx.training.checkpoint.manifest import read_manifest
from difftx.training.run import read_config

torch = pytest.importorskip("torch", reason="make parity installs torch and transformers")
transformers = pytest.importorskip("transformers")

END_OF_TEXT = 256
NEW_TOKENS = 24
ENGINE = "fake_engine"


@pytest.fixture(autouse=True)
def _modules_in_a_folder_of_their_own(tmp_path, monkeypatch):
    """Keep the copies of modelling files that transformers imports out of the user's cache."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))


def load(folder, **options):
    """Return the model that users load, with the code of the folder."""
    options = {"dtype": torch.float32, "trust_remote_code": True} | options
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_text_are_those_of_difftx(config, mesh_of, tmp_path, name):
    lm, _, folder = exported(config, mesh_of(), name, tmp_path)
    model = load(folder)
    assert type(model).__module__.startswith("transformers_modules") == (name != "llama")
    tokens_BT = np.random.default_rng(1).integers(260, size=(2, 32))
    ours_BTV = full_logits(lm, mesh_of(), tokens_BT)
    with torch.no_grad():
        theirs_BTV = model(torch.from_numpy(tokens_BT)).logits.numpy()
    np.testing.assert_allclose(theirs_BTV, ours_BTV, rtol=0, atol=1e-4 * np.abs(ours_BTV).max())
    prompts = prompts_of([3, 5, 8, 13, 21])
    requests = [Request(prompt=prompt, new_tokens=NEW_TOKENS, seed=0) for prompt in prompts]
    for prompt, ours in zip(prompts, generate(lm, requests, GREEDY), strict=True):
        text = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS)[0, len(prompt) :].tolist()
        assert [token for token in text if token != END_OF_TEXT] == ours.tokens


class FakeEngine:
    """Paged attention as vLLM's Transformers backend does it: one cache of fixed shape per layer.

    A call writes the keys and values of the step's tokens to the slots of their positions, and attends to all slots up
    to each query. A second call of a layer in the same step therefore overwrites the first call's keys and values. The
    outputs are `[T, n E]` as in vLLM, or `[B, T, n, E]` if `flat` is False, as in transformers.
    """

    def __init__(self, config, slots, *, flat):
        self.flat = flat
        self.heads, self.kv_heads, self.width = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        shape = (config.num_hidden_layers, slots, self.kv_heads, self.width)
        self.keys_LSKE, self.values_LSKE = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        self.positions, self.calls = torch.empty(0, dtype=torch.long), []

    def step(self, model, tokens_T, start):
        """Run the tokens at the positions from `start`, and return their logits."""
        self.positions = torch.arange(start, start + len(tokens_T))
        options = {"use_cache": False, "return_dict": False, "attention_instances": self}
        with torch.no_grad():
            hidden = model.model(input_ids=tokens_T[None], position_ids=self.positions[None], **options)[0]
            return model.lm_head(hidden)[0]

    def attend(self, layer, query, key, value, scaling):
        query_TnE, key_TKE, value_TKE = (x[0].transpose(0, 1) for x in (query, key, value))
        assert query_TnE.shape[1:] == (self.heads, self.width)
        assert key_TKE.shape[1:] == value_TKE.shape[1:] == (self.kv_heads, self.width)
        self.calls.append(layer)
        self.keys_LSKE[layer, self.positions], self.values_LSKE[layer, self.positions] = key_TKE, value_TKE
        outputs = []
        for query_nE, position in zip(query_TnE, self.positions, strict=True):
            seen = slice(0, int(position) + 1)
            for head, query_E in enumerate(query_nE):
                kv_head = head // (self.heads // self.kv_heads)
                logits_S = self.keys_LSKE[layer, seen, kv_head].double() @ query_E.double() * scaling
                outputs.append(logits_S.softmax(-1) @ self.values_LSKE[layer, seen, kv_head].double())
        shape = (len(query_TnE), -1) if self.flat else query_TnE[None].shape
        return torch.stack(outputs).float().reshape(shape)


def attend_in_engine(module, query, key, value, attention_mask, scaling=None, attention_instances=None, **kwargs):
    assert attention_mask is None
    return attention_instances.attend(module.layer_idx, query, key, value, scaling), None


transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.register(ENGINE, attend_in_engine)


def served(folder, lm, mesh, *, flat=True):
    """Return the engine's and difftx's logits of one row: prefill in two chunks, then one token per step."""
    model = load(folder, attn_implementation=ENGINE)
    assert type(model)._supports_attention_backend
    assert all(module.is_causal for module in model.modules() if hasattr(module, "layer_idx"))
    tokens_BT = np.random.default_rng(2).integers(256, size=(1, 16))
    engine = FakeEngine(model.config, slots=16, flat=flat)
    calls, logits = [], []
    for start, stop in [(0, 6), (6, 10), *((i, i + 1) for i in range(10, 16))]:
        engine.calls = []
        logits.append(engine.step(model, torch.from_numpy(tokens_BT[0, start:stop]), start))
        calls.append(engine.calls)
    ours_TV = full_logits(lm, mesh, tokens_BT)[0]
    theirs_TV = torch.cat(logits)
    if (cap := getattr(model.config, "final_logit_softcapping", None)) is not None:  # vLLM applies it to the logits.
        theirs_TV = cap * torch.tanh(theirs_TV / cap)
    return calls, theirs_TV.numpy(), ours_TV


@pytest.mark.parametrize("name", SERVABLE)
def test_an_engine_with_one_cache_per_layer_decodes_as_difftx(config, mesh_of, tmp_path, name):
    lm, _, folder = exported(config, mesh_of(), name, tmp_path)
    calls, theirs_TV, ours_TV = served(folder, lm, mesh_of())
    assert calls == [list(range(lm.config.model.num_layers))] * len(calls)
    np.testing.assert_allclose(theirs_TV, ours_TV, rtol=0, atol=1e-4 * np.abs(ours_TV).max())


def test_the_engine_cannot_serve_diffllama(config, mesh_of, tmp_path):
    """DiffLlama calls the attention function twice per layer, so the second call overwrites the first one's values."""
    lm, _, folder = exported(config, mesh_of(), "diffllama", tmp_path, "diffllama")
    assert "not servable" in (folder / "README.md").read_text()
    with pytest.raises(IndexError, match="Dimension out of range"):  # It expects another shape than vLLM's.
        served(folder, lm, mesh_of())
    calls, theirs_TV, ours_TV = served(folder, lm, mesh_of(), flat=False)
    assert calls == [[0, 0, 1, 1]] * len(calls)
    error_T = np.abs(theirs_TV - ours_TV).max(-1) / np.abs(ours_TV).max()
    assert error_T[:6].max() < 1e-4  # Each call of the first chunk reads only what it has just written.
    assert error_T[6:].min() > 0.01


@pytest.mark.parametrize("name", NOT_SERVABLE)
def test_unservable_architectures_are_marked(config, mesh_of, tmp_path, name):
    _, _, folder = exported(config, mesh_of(), name, tmp_path)
    assert "not servable" in (folder / "README.md").read_text()
    model = load(folder)
    assert model.config._attn_implementation == "eager"
    assert not type(model)._supports_attention_backend
    assert not type(model.model)._supports_attention_backend
    base = transformers.AutoModel.from_pretrained(folder, trust_remote_code=True)
    assert not type(base)._supports_attention_backend
    with pytest.raises(ValueError, match="does not support"):
        load(folder, attn_implementation="sdpa")
    with pytest.raises(ValueError, match=f"architecture '{name}' is not servable"):
        importlib.import_module("difftx.interop.modeling_difftx").DifftxForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("name", ["diff", "gda", "diff_v2", "gdla", "gated", "zero_branch"])
def test_two_tensor_parallel_ranks_add_up(config, mesh_of, tmp_path, name):
    """Each rank has the rows or columns of the projections that `base_model_tp_plan` gives it."""
    model = load(exported(config, mesh_of(), name, tmp_path)[2])
    plan = {name.rpartition(".")[2]: kind for name, kind in model.config.base_model_tp_plan.items() if "attn" in name}
    layer, parts = model.model.layers[1], []
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(1, 12, 32)).astype("f4"))
    angles = model.model._angles(torch.arange(12)[None])
    mask = torch.full((12, 12), -torch.inf).triu(1)[None, None]
    model.config._attn_implementation = "eager"
    with torch.no_grad():
        expected = layer.self_attn(x, angles, mask)[0]
        for rank in range(2):
            part = copy.deepcopy(layer.self_attn)
            for name, child in part.named_children():
                if isinstance(child, torch.nn.Linear):
                    axis = {"colwise": 0, "rowwise": 1}[plan[name]]
                    child.weight = torch.nn.Parameter(child.weight.chunk(2, axis)[rank])
                    if child.bias is not None:
                        child.bias = torch.nn.Parameter(child.bias.chunk(2)[rank])
            parts.append(part(x, angles, mask)[0])
    torch.testing.assert_close(sum(parts), expected)
    assert not torch.allclose(parts[0], parts[1])


class Missing(torch.nn.Module):
    """What engines put in place of a module of another pipeline rank."""

    def forward(self, hidden_states, **_):
        return hidden_states


@pytest.mark.parametrize("name", ["diff", "gdla"])
def test_two_pipeline_stages_equal_one(config, mesh_of, tmp_path, name):
    model = load(exported(config, mesh_of(), name, tmp_path)[2])
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    first.model.layers[1] = first.model.norm = Missing()
    second.model.layers[0] = second.model.embed_tokens = Missing()
    tokens = torch.from_numpy(np.random.default_rng(0).integers(256, size=(1, 12)))
    with torch.no_grad():
        hidden = first.model(input_ids=tokens, use_cache=False).last_hidden_state
        logits = second(inputs_embeds=hidden, use_cache=False).logits
        torch.testing.assert_close(logits, model(tokens).logits, rtol=0, atol=0)


def of_modelling_file(config):
    """Return a model of `modeling_difftx.py`, also for a config that is exported as a Llama."""
    module = importlib.import_module("difftx.interop.modeling_difftx")
    settings = config_json(remote_code_config, config, END_OF_TEXT)
    of_config = getattr(module, settings["architectures"][0])._from_config
    return of_config(module.DifftxConfig(**settings), attn_implementation="eager").eval()


@pytest.mark.parametrize(("name", "format_"), [("llama", "hf"), ("diffllama", "diffllama")])
def test_hidden_states_and_attention_weights_are_those_of_classes_of_transformers(
    config, mesh_of, tmp_path, name, format_
):
    _, workdir, folder = exported(config, mesh_of(), name, tmp_path, format_)
    theirs = load(folder, attn_implementation="eager")
    if name == "llama":
        ours = of_modelling_file(read_config(workdir))
        ours.load_state_dict(theirs.state_dict())
    else:
        ours = load(export(workdir, tmp_path / "hf"), attn_implementation="eager")
    tokens = torch.from_numpy(np.random.default_rng(0).integers(256, size=(2, 12)))
    options = {"output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        expected, found = theirs(tokens, **options), ours(tokens, **options)
    assert len(found.hidden_states) == len(expected.hidden_states) == len(found.attentions) + 1
    close = {"rtol": 0, "atol": 1e-5}
    torch.testing.assert_close(found.hidden_states, expected.hidden_states, **close)
    heads = expected.attentions[0].shape[1]
    # DiffLlama has all signal heads before all noise heads, and the call of difftx has each next to its noise head.
    order = [*range(0, heads, 2), *range(1, heads, 2)] if name == "diffllama" else range(heads)
    for weights, their_weights in zip(found.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(weights[:, [*order]], their_weights, **close)
    ours.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="output_attentions requires attn_implementation='eager'"):
        ours(tokens, output_attentions=True)


@pytest.mark.parametrize("name", ["diff", "zero_branch", "dex"])
def test_lambda_stays_float32_in_bfloat16(config, mesh_of, tmp_path, name):
    model = load(exported(config, mesh_of(), name, tmp_path)[2], dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        is_lambda = "lambda" in name or name.endswith("progress")
        assert parameter.dtype == (torch.float32 if is_lambda else torch.bfloat16)


def run_on_this_machine(workdir):
    """Return a run's checkpoint, and its config for a mesh of all devices."""
    return read_manifest(workdir / "checkpoints" / "0"), override(read_config(workdir), {"mesh.fsdp": "8"})


def test_verify_compares_logits_and_greedy_text(config, mesh_of, tmp_path, monkeypatch):
    _, workdir, folder = exported(config, mesh_of(), "gdla", tmp_path)
    checkpoint, settings = run_on_this_machine(workdir)
    said = compare_logits(folder, checkpoint, settings)
    assert said.startswith("verified: logits of 1024 tokens differ from transformers' by at most ")
    assert said.endswith("; the greedy text of 8 prompts is equal")
    exact = in_transformers.greedy
    monkeypatch.setattr(in_transformers, "greedy", lambda *a: (exact(*a) + 1) % 260)
    with pytest.raises(RunError, match="the greedy text of transformers is not that of difftx, though logits of"):
        compare_logits(folder, checkpoint, settings)
    monkeypatch.setattr(runs, "TOLERANCE", 0.0)
    with pytest.raises(RunError, match="more than rounding; nothing was written"):
        compare_logits(folder, checkpoint, settings)


@pytest.mark.parametrize("page", ["mine-hf/README.md", ROOT / "docs" / "serving.md"])
def test_the_documented_code_loads_without_a_question(config, mesh_of, tmp_path, monkeypatch, page):
    exported(config, mesh_of(), "diff", tmp_path)[2].rename(tmp_path / "mine-hf")
    card = tmp_path / "mine-hf" / "README.md"
    card.write_text(card.read_text().replace("'hf'", "'mine-hf'"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda question: pytest.fail(question))
    loaded = {}
    exec(re.search(r"```python\n(.*?)```", Path(page).read_text(), re.DOTALL)[1], loaded)
    assert type(loaded["model"]).__name__ == "DifftxForCausalLM"
    assert loaded["tokenizer"]("a")["input_ids"] == [ord("a")]


def test_verify_executes_no_code_of_the_folder(config, mesh_of, tmp_path):
    _, workdir, folder = exported(config, mesh_of(), "gdla", tmp_path)
    hostile = folder / remote_code_config.MODELING.name
    hostile.write_text("raise SystemExit('executed')\n")
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"vocab_size"', '"attn_implementation": "someone/kernel", "vocab_size"'))
    assert "verified: " in compare_logits(folder, *run_on_this_machine(workdir))
    with pytest.raises(SystemExit, match="executed"):
        load(folder, attn_implementation="eager")
