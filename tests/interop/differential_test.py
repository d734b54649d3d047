"""`difftx convert --differential` on models of transformers and of difftx."""

import itertools

import flax.traverse_util
import jax
import numpy as np
import pytest
from conftest import write_text
from flax import nnx
from helpers.inference_models import language_model
from helpers.interop_folders import FIXTURES, import_, parameters, refused, run_of, tensors_of
from helpers.model_layers import MUP
from helpers.report_runs import save_run
from model import oracle

from difftx.commands.convert import main
from difftx.data.sources import load_sources
from difftx.data.tokenizers import load_tokenizer
from difftx.errors import UserError
from difftx.interop.runs import our_logits
from difftx.json_files import read_json
from difftx.model.architectures import heads_of
from difftx.model.decoder import Decoder
from difftx.training.checkpoint.manifest import read_manifest
from difftx.training.run import read_config

# The fixtures llama, llama3 and qwen2 have grouped queries. llama3 has scaled rotary frequencies, and qwen2 biases.
LONG = (("zero-branch", "qwen2"), ("dex", "llama3"))  # The other cases are exhaustive.
LAYERS, D = 3, 32
# Tolerance of the difference's norm, relative to the norm of the logits: both are float32, with sums in another order.
ROUNDING = 1e-6


@pytest.fixture(scope="module")
def transformer(config, mesh_of, tmp_path_factory):
    """The directory of a run of a Transformer with random parameters."""
    lm = language_model(config, mesh_of(), "transformer", model__num_heads=4)
    return run_of(lm, tmp_path_factory.mktemp("transformer"))


def flat(workdir, mesh):
    """Return the parameters by path."""
    tree = flax.traverse_util.flatten_dict(parameters(workdir, mesh)[1], sep="/")
    return {name: np.asarray(value) for name, value in tree.items()}


def initial(workdir, mesh):
    """Return the parameters of a new model with the run's config."""
    config = read_config(workdir)
    with jax.set_mesh(mesh):
        state = nnx.state(Decoder(config.model, rngs=nnx.Rngs(config.train.seed)))
    return {n: np.asarray(v) for n, v in flax.traverse_util.flatten_dict(nnx.to_pure_dict(state), sep="/").items()}


def logits_of(workdir, mesh, tokens_BT):
    return our_logits(read_manifest(workdir / "checkpoints" / "0"), read_config(workdir), mesh, tokens_BT)


def split_by_origin(new, old, method):
    """Return the copied weights by their path in the Transformer, and the drawn weights by their path in the new model.

    Of the two queries and keys of a head, the first is copied and the second is drawn.
    """
    copied, drawn = {}, {}
    for path, value in new.items():
        axes = path.rpartition("/")[2]
        old_path = path.replace("value_DKE", "value_DKd").replace("output_HED", "output_HdD")
        if axes in ("query_DHGd", "key_DKGd") or (method == "zero-branch" and axes in ("query_bias", "key_bias")):
            copied[path.replace("Gd", "d")] = value[..., 0, :]
            drawn[path] = value[..., 1, :]
        elif old_path in old:
            copied[old_path] = value
        else:
            drawn[path] = value
    return copied, drawn


def relative(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("method", "name"),
    [
        pytest.param(*case, marks=pytest.mark.long if case in LONG else pytest.mark.exhaustive)
        for case in itertools.product(["zero-branch", "dex"], ["llama", "llama3", "qwen2"])
    ],
)
def test_new_model_computes_the_function_of_the_transformer(tmp_path, mesh_of, capsys, name, method):
    flags = ["--dex_heads=all"] if method == "dex" else []
    workdir = import_(FIXTURES / name, tmp_path / "run", f"--differential={method}", *flags)
    said = capsys.readouterr().out
    assert "the function is preserved: logits of" in said
    theirs, transformer = np.load(FIXTURES / name / "expected.npz"), import_(FIXTURES / name, tmp_path / "transformer")
    ours = logits_of(workdir, mesh_of(), theirs["tokens"])
    assert relative(ours, theirs["logits"]) < ROUNDING
    assert relative(ours, logits_of(transformer, mesh_of(), theirs["tokens"])) < ROUNDING
    old, new = flat(transformer, mesh_of()), flat(workdir, mesh_of())
    before, after = (sum(x.size for x in params.values()) for params in (old, new))
    assert f"parameters: {before:,} in the Transformer, {after - before:,} added, {after:,} now" in said

    # Copied weights are equal bit for bit, and drawn weights are those of a new model.
    copied, drawn = split_by_origin(new, old, method)
    assert copied.keys() == old.keys()
    for path, value in old.items():
        np.testing.assert_array_equal(copied[path].view(np.uint32), value.view(np.uint32))
    _, expected = split_by_origin(initial(workdir, mesh_of()), old, method)
    assert drawn.keys() == expected.keys()
    for path, value in drawn.items():
        np.testing.assert_array_equal(value, expected[path])
    if method == "zero-branch":
        assert np.abs(new["blocks/attention/query_DHGd"][..., 1, :]).max() > 0.1


@pytest.mark.parametrize("name", [pytest.param("llama3", marks=pytest.mark.long), "qwen2"])
def test_split_pairs_neighbouring_key_value_heads(tmp_path, mesh_of, capsys, name):
    """Keys and values of the heads 2j and 2j + 1 become one head, and so do the queries r of both."""
    workdir = import_(FIXTURES / name, tmp_path / "run", "--differential=split")
    assert "the function is not preserved" in capsys.readouterr().out
    tensors, new = tensors_of(FIXTURES / name), flat(workdir, mesh_of())
    model = read_config(workdir).model
    raw = read_json(FIXTURES / name / "config.json")
    H, K = raw["num_attention_heads"], raw["num_key_value_heads"]
    d, pairs, R = heads_of(model).d_head, K // 2, H // K
    assert (model.architecture, model.num_heads, heads_of(model).kv_heads) == ("diff", H // 2, pairs)
    assert model.head_norm == "rms_affine"

    def projection(part, *axes, kind="weight"):
        """Return a tensor of the Transformer, `[L, …]`, with these axes in place of the axis of heads and channels."""
        names = [f"model.layers.{layer}.self_attn.{part}_proj.{kind}" for layer in range(LAYERS)]
        tensor = np.stack([tensors[name] for name in names])
        return tensor.reshape(LAYERS, *axes, *tensor.shape[2:])

    output_LDPGRd = projection("o", D).reshape(LAYERS, D, pairs, 2, R, d)
    expected = {
        "query_DHGd": np.einsum("LPGRdD->LDPRGd", projection("q", pairs, 2, R, d)).reshape(LAYERS, D, H // 2, 2, d),
        "key_DKGd": np.einsum("LPGdD->LDPGd", projection("k", pairs, 2, d)),
        "value_DKE": np.einsum("LPED->LDPE", projection("v", pairs, 2 * d)),
        "output_HED": np.einsum("LDPGRd->LPRGdD", output_LDPGRd).reshape(LAYERS, H // 2, 2 * d, D),
    }
    if model.attention_bias:
        query_bias = np.einsum("LPGRd->LPRGd", projection("q", pairs, 2, R, d, kind="bias"))
        expected["query_bias"] = query_bias.reshape(LAYERS, H // 2, 2, d)
        expected["key_bias"] = projection("k", pairs, 2, d, kind="bias")
        expected["value_bias"] = projection("v", pairs, 2 * d, kind="bias")
    for parameter, value in expected.items():
        np.testing.assert_array_equal(new[f"blocks/attention/{parameter}"], value)


def entropies(params, model, tokens_T, monkeypatch):
    """Return the entropy of each query's attention weights, `[L, H, T]`, by the oracle's formulas in float64."""
    w = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    x_TD, found, attend = w["embedding_VD"][tokens_T], [], oracle.attend

    def recorded(row, queries_keys, v_TE, window):
        p_TT = attend(row, queries_keys, np.eye(len(v_TE)), window)
        found.append(-np.sum(p_TT * np.log(np.where(p_TT > 0, p_TT, 1)), axis=1))
        return attend(row, queries_keys, v_TE, window)

    monkeypatch.setattr(oracle, "attend", recorded)
    for layer in range(model.num_layers):
        block = jax.tree.map(lambda x, layer=layer: x[layer], w["blocks"])
        x_TD = x_TD + oracle.layer(block["attention"], model, oracle.rms(x_TD, block["attention_norm"]), layer)
        h_TD, mlp = oracle.rms(x_TD, block["mlp_norm"]), block["mlp"]
        gate_TF = h_TD @ mlp["gate_DF"]
        x_TD = x_TD + (gate_TF * oracle.sigmoid(gate_TF) * (h_TD @ mlp["up_DF"])) @ mlp["down_FD"]
    monkeypatch.undo()
    return np.reshape(found, (model.num_layers, model.num_heads, -1))


@pytest.mark.long
@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_dex_chooses_the_heads_of_highest_entropy(config, mesh_of, tmp_path, monkeypatch, packing):
    path = write_text(tmp_path / "text.txt")
    if packing == "best_fit":  # Short documents, so that rows have padding. A row is one document.
        path = tmp_path / "*.md"
        for i in range(80):
            (tmp_path / f"{i}.md").write_text(f"the square of {i} is {i * i}"[: 17 + i % 6])
    lm = language_model(
        config, mesh_of(), "transformer", model__num_heads=4, model__num_kv_heads=2, model__num_layers=4,
        data__path=path, data__packing=packing, data__valid_fraction=0.4, data__cache_path=tmp_path / "cache",
    )  # fmt: skip
    source, out = run_of(lm, tmp_path / "source"), tmp_path / "run"
    # The entropy uses at most 64 queries of a row, and would leave out tokens of rows longer than that.
    flags = ["--differential=dex", "--config.data.sequence_length=32"]
    convert_run(source, out, *flags)
    new = read_config(out)
    (rows,) = load_sources(new.data, load_tokenizer("bytes")).valid.values()
    documents = [rows[i]["tokens"][: np.flatnonzero(rows[i]["tokens"])[-1] + 1] for i in range(min(32, len(rows)))]
    assert (min(map(len, documents)) < 32) == (packing == "best_fit")
    total_LH = sum(entropies(lm.params, lm.config.model, tokens_T, monkeypatch).sum(2) for tokens_T in documents)
    expected_LH = np.zeros_like(total_LH)
    np.put_along_axis(expected_LH, np.argsort(total_LH, axis=1)[:, 2:], 1, axis=1)
    np.testing.assert_array_equal(flat(out, mesh_of())["blocks/attention/chosen_H"], expected_LH)
    assert len({*map(tuple, expected_LH)}) > 1  # The layers differ.


@pytest.mark.long
def test_flags_select_the_source_and_the_new_weights(transformer, mesh_of, tmp_path):
    method = "--differential=zero-branch"
    for seed in (0, 1):
        convert_run(transformer, tmp_path / str(seed), method, "--step=0", f"--config.train.seed={seed}")
    one, two = (flat(tmp_path / str(seed), mesh_of())["blocks/attention/query_DHGd"] for seed in (0, 1))
    np.testing.assert_array_equal(one[..., 0, :], two[..., 0, :])
    assert np.abs(one[..., 1, :] - two[..., 1, :]).max() > 0.01
    with pytest.raises(UserError, match=r"--weights=ema: .* has no such weights"):
        convert_run(transformer, tmp_path / "ema", method, "--weights=ema")


def convert_run(source, out, *flags):
    """Convert a run on all devices of the tests."""
    common = ["--from=difftx", "--to=difftx", "--config.mesh.fsdp=8"]
    assert main([*common, f"--input={source}", f"--out={out}", *flags]) == 0


def test_folders_that_cannot_be_converted(tmp_path):
    out, llama = tmp_path / "out", FIXTURES / "llama3"
    flags = ["--differential=dex", "--config.data.path=stdlib"]
    refused(FIXTURES / "diff", out, "architecture='diff': --differential requires a 'transformer'", *flags)
    refused(llama, out, r"num_layers: .* determines this field", *flags, "--config.model.num_layers=2")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--differential=zero-branch", "--config.model.d_model=64"], r"--config\.model\.d_model: --input"),
        (["--differential=zero-branch", "--config.model.head_norm=rms"], r"model\.head_norm='rms': .* has none"),
        (["--differential=split", "--config.model.dex.anneal_steps=3"], r"--config\.model\.dex\.anneal_steps: --input"),
        (["--differential=dex", "--verify"], "--verify compares with the package transformers; it requires --from=hf"),
        ([], "exactly one of them must be difftx, unless --differential or --merge is set"),
    ],
)
def test_flags_that_do_not_fit_a_run(transformer, tmp_path, flags, message):
    refused(transformer, tmp_path / "out", message, *flags, convert=convert_run)


@pytest.mark.parametrize(
    ("architecture", "fields", "method", "message"),
    [
        ("transformer", {"model__head_norm": "rms"}, "dex", r"model\.head_norm='rms': --differential requires"),
        ("transformer", {"model__post_scale": 0.5}, "zero-branch", r"post_scale=0\.5: .* 'zero_branch' lacks"),
        ("transformer", MUP, "dex", r"model\.mup_base_width=8: architecture 'dex' lacks"),
        ("gated", {}, "zero-branch", "'gated': --differential requires a 'transformer'"),
    ],
)
def test_run_that_is_not_a_plain_transformer(config, mesh_of, tmp_path, architecture, fields, method, message):
    source = run_of(language_model(config, mesh_of(), architecture, model__num_heads=4, **fields), tmp_path / "source")
    refused(source, tmp_path / "out", message, f"--differential={method}", convert=convert_run)


@pytest.mark.parametrize("fields", [{"model__d_model": 40}, MUP | {"model__head_dim": None}])
@pytest.mark.long
def test_split_keeps_the_width_of_heads(config, mesh_of, tmp_path, fields):
    """Half the Transformer's width would be invalid: odd in the first case, and not that of the base in the second."""
    lm = language_model(config, mesh_of(), "transformer", model__num_heads=4, **fields)
    convert_run(run_of(lm, tmp_path / "source"), tmp_path / "split", "--differential=split")
    model = read_config(tmp_path / "split").model
    assert (model.num_heads, heads_of(model).d_head) == (2, heads_of(lm.config.model).d_head)


def test_dex_does_not_choose_heads_on_changed_data(config, tmp_path, text_file):
    """The text was edited after the training, so that its validation rows may be training text."""
    text = tmp_path / "text.txt"
    text.write_text(text_file.read_text())
    fields = {"data__path": text, "model__num_heads": 4, "model__head_norm": "none", "mesh__fsdp": 8}
    run = save_run(config("transformer", **fields), tmp_path / "source", [0])
    text.write_text("another line\n" + text_file.read_text())
    message = "checkpoints/0: the data changed since the training: source train .*; restore the data"
    refused(run.workdir, tmp_path / "out", message, "--differential=dex", convert=convert_run)
