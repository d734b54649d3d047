"""Table 5's statistics, compared with a float64 model in numpy that keeps and sorts all values."""

import jax
import numpy as np
import pytest
from flax import nnx
from helpers.evals_params import random_params
from helpers.model_layers import OPTIONS
from model import oracle

from difftx.evals import run as evals
from difftx.parallel.mesh import make_mesh
from difftx.training.run import Run
from difftx.training.state import graph

ROWS = 5  # Rows of 32 tokens. A batch has eight rows, so it has filler rows.
RANKS = (1, 2, 3, 10, 100)
TOLERANCE = 1e-4  # Relative, for float32 compared with float64 after two layers.


def everything(run, params):
    """Return the sorted |logits| and |layer outputs| of the documents in the first rows, and the number of tokens."""
    config = run.config.model
    params = jax.device_get(params)
    with jax.set_mesh(run.mesh):
        graphdef, weights = nnx.split(nnx.merge(graph(run.config), params).blocks)
    logits, hidden, tokens = [], [], 0
    embedding_VD = np.asarray(params["embedding_VD"], np.float64)
    for i in range(ROWS):
        row = run.data.valid["valid"][i]
        # Without document masks, a row is one document. Its last token is not 0, the id of padding.
        pieces = row.get("segment_ids", np.arange(32) <= np.flatnonzero(row["tokens"])[-1])
        for piece in set(pieces) - {0}:
            x_TD = embedding_VD[row["tokens"][pieces == piece]]
            tokens += len(x_TD)
            for depth in range(config.num_layers):
                block = oracle.weights_of(nnx.merge(graphdef, jax.tree.map(lambda a, depth=depth: a[depth], weights)))
                h_TD = oracle.rms(x_TD, block["attention_norm"])
                logits += logits_of(block["attention"], config, h_TD, config.windows[depth % len(config.windows)])
                x_TD = x_TD + oracle.layer(block["attention"], config, h_TD, depth)
                x_TD = x_TD + mlp(block["mlp"], oracle.rms(x_TD, block["mlp_norm"]))
                hidden.append(np.abs(x_TD).ravel())
    return np.sort(np.concatenate(logits)), np.sort(np.concatenate(hidden)), tokens


def mlp(w, h_TD):
    gate_TF = h_TD @ w["gate_DF"]
    return (gate_TF * oracle.sigmoid(gate_TF) * (h_TD @ w["up_DF"])) @ w["down_FD"]


def logits_of(w, config, h_TD, window):
    """Return |q·k / √d| for the keys that each query sees, one array per softmax."""
    grouped = "query_DHGd" in w
    q, k = (w["query_DHGd"], w["key_DKGd"]) if grouped else (w["query_DHd"], w["key_DKd"])
    if config.attention_bias:  # Biases are the weights of an additional input, which is 1.
        h_TD = np.concatenate([h_TD, np.ones((len(h_TD), 1))], axis=1)
        q, k = (np.concatenate([x, w[f"{name}_bias"][None]]) for x, name in ((q, "query"), (k, "key")))
    pairs = []
    if grouped:
        for n, i in np.ndindex(q.shape[1], q.shape[2]):
            kv = n * k.shape[1] // q.shape[1]
            pairs.append((q[:, n, i], k[:, kv, int(i == q.shape[2] - 1)]))
    else:
        pairs = [(q[:, n], k[:, n * k.shape[1] // q.shape[1]]) for n in range(q.shape[1])]
    found, position = [], np.arange(len(h_TD))
    distance_TT = position[:, None] - position
    seen_TT = (distance_TT >= 0) & (distance_TT < (window or np.inf))
    for query_Dd, key_Dd in pairs:
        q_Td, k_Td = oracle.position_encoded(w, config, h_TD @ query_Dd, h_TD @ key_Dd)
        found.append(np.abs(q_Td @ k_Td.T / np.sqrt(q_Td.shape[1]))[seen_TT])
    return found


UNMASKED = {"data__document_mask": "false"}
SYNTHETIC = {"data__path": "synthetic:retrieval", "data__synthetic__pairs": 4, "data__synthetic__distractors": 4}
SYNTHETIC |= {"data__synthetic__vocab_size": 64}


@pytest.mark.parametrize(
    ("name", "packing", "axes", "options"),
    [
        ("diff", "best_fit", {"context": 2, "tensor": 1, "fsdp": 4}, UNMASKED),
        pytest.param("diff", "concat", {"context": 2, "tensor": 1, "fsdp": 4}, SYNTHETIC, marks=pytest.mark.long),
        pytest.param("diff", "concat", {"context": 2, "tensor": 1, "fsdp": 4}, {}, marks=pytest.mark.long),
        pytest.param("diff", "concat", {}, OPTIONS, marks=pytest.mark.long),
        pytest.param("zero_branch", "concat", {}, {}, marks=pytest.mark.exhaustive),
        pytest.param("gda", "best_fit", {"data": 2, "fsdp": 2, "tensor": 2}, {}, marks=pytest.mark.exhaustive),
        pytest.param("gdla", "best_fit", {"data": 2, "fsdp": 2, "tensor": 2}, {}, marks=pytest.mark.long),
        pytest.param("diff_v2", "best_fit", {"context": 4, "context_method": "zigzag"}, {}, marks=pytest.mark.long),
        pytest.param("off_by_one", "concat", {"tensor": 2}, OPTIONS, marks=pytest.mark.long),
    ],
)
def test_statistics_equal_those_of_all_values(config, text_file, tmp_path, monkeypatch, name, packing, axes, options):
    if packing == "best_fit":  # Short documents, so that rows have padding.
        for i in range(60):
            (tmp_path / f"{i}.txt").write_text(f"the square of {i} is {i * i}"[: 9 + i % 13])
        text_file = tmp_path / "*.txt"
    fields = {
        "data__path": text_file,
        "data__valid_fraction": 0.5,
        "data__packing": packing,
        "data__document_mask": packing == "best_fit",
        "data__cache_path": tmp_path / "cache",
        "eval__outliers__tokens": ROWS * 32 + 31,
        **{f"mesh__{axis}": size for axis, size in axes.items()},
    }
    made = config(name, **fields | oracle.SIZES.get(name, {}) | options)
    monkeypatch.setattr("difftx.kernels.xla.CHUNK_WEIGHTS", 1500)  # Several chunks, of which the last is not full.
    monkeypatch.setattr("difftx.evals.outliers.CHUNK_VALUES", 200)
    devices = np.prod([size for size in axes.values() if isinstance(size, int)], dtype=int)
    run = Run.open(made, tmp_path, make_mesh(made.mesh, jax.devices()[:devices]))
    params = random_params(run)
    result = evals.evaluate(run, params, 0, ["outliers"])["outliers"]
    logits, hidden, tokens = everything(run, params)
    assert result.details["values"] == {"logits": len(logits), "hidden": len(hidden)}
    assert result.numbers["tokens"] == tokens
    assert (tokens < ROWS * 32) == (packing == "best_fit" or options is SYNTHETIC)
    for kind, values in (("logits", logits), ("hidden", hidden)):
        expected = {f"{kind}_top_{rank}": values[-rank] for rank in RANKS} | {f"{kind}_median": np.median(values)}
        found = {key: result.numbers[key] for key in expected}
        assert found == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.long
def test_logits_that_are_nan_are_the_largest(config, text_file, tmp_path):
    """All values of a broken model count, so that its largest logit is not that of the layers before the fault."""
    made = config("diff", data__path=text_file, eval__outliers__ranks=(1, 10))
    run = Run.open(made, tmp_path, make_mesh(made.mesh, jax.devices()[:1]))
    params = random_params(run)
    sound = evals.evaluate(run, params, 0, ["outliers"])["outliers"]
    params["blocks"]["attention"]["query_DHGd"] *= np.float32([1, np.nan]).reshape(2, 1, 1, 1, 1)  # Two layers.
    broken = evals.evaluate(run, params, 0, ["outliers"])["outliers"]
    assert broken.details["values"] == sound.details["values"]
    assert np.isnan([broken.numbers[f"{kind}_top_{rank}"] for kind in ("logits", "hidden") for rank in (1, 10)]).all()
