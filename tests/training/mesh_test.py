"""Training gives the same losses on every mesh, and checkpoints move between meshes bit for bit."""

import re

import jax
import numpy as np
import pytest

from difftx.data.loader import Loader
from difftx.data.packing import PackedRows
from difftx.data.sources import Sources
from difftx.data.store import TokenStore
from difftx.parallel.layout import Layout
from difftx.training.checkpoint.checkpointer import Checkpointer
from difftx.training.checkpoint.restoring import restore_state
from difftx.training.state import init_state, make_train_step

MESHES = {
    "1": {},
    "fsdp 8": {"fsdp": 8},
    "data 2, fsdp 2, tensor 2": {"data": 2, "fsdp": 2, "tensor": 2},
    "context 2, fsdp 4": {"context": 2, "fsdp": 4},
}
TOKENS = np.random.default_rng(0).geometric(0.1, 20_000).astype(np.uint16)
STORE = TokenStore(TOKENS, np.array([0, len(TOKENS)], np.uint64))


def loader_on(mesh, c):
    rows = PackedRows(STORE, sequence_length=c.data.sequence_length, packing="concat", document_mask=False)
    return Loader(
        Sources(c.data, train={"train": rows}, valid={}, signature={}, notes=()),
        batch_rows=c.batch_rows,
        prefetch_batches=1,
        sharding=jax.NamedSharding(mesh, Layout().act_BT),
        vocab_size=c.model.vocab_size,
    )


def train(c, mesh, steps):
    with jax.set_mesh(mesh):
        state = jax.jit(lambda: init_state(c))()
        step, loader = jax.jit(make_train_step(c), donate_argnums=0), loader_on(mesh, c)
        metrics = []
        for _ in range(steps):
            state, m = step(state, next(loader))
            metrics.append((m["loss"], m["grad_norm"]))
    return state, np.asarray(jax.device_get(metrics))


@pytest.mark.long
def test_meshes_give_the_same_losses_and_read_each_others_checkpoints(config, mesh_of, tmp_path):
    """The state has the moments of Muon, in bfloat16, and an average of the weights."""
    c = config(train__steps=20, optimizer__name="muon", optimizer__moment_dtype="bfloat16", train__ema_decay=0.9)
    runs = {name: train(c, mesh_of(**sizes), 20) for name, sizes in MESHES.items()}
    expected = runs["1"][1]
    assert expected[-1, 0] < expected[0, 0]
    for name, (_, metrics) in runs.items():
        np.testing.assert_allclose(metrics[:, 0], expected[:, 0], rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(metrics[:, 1], expected[:, 1], rtol=1e-4, err_msg=name)
    jax.clear_caches()  # The same config on the same devices gives the same bits when it is compiled again.
    name = "data 2, fsdp 2, tensor 2"
    np.testing.assert_array_equal(train(c, mesh_of(**MESHES[name]), 5)[1], runs[name][1][:5])

    saved = runs["fsdp 8"][0]
    checkpointer = Checkpointer(tmp_path, c.checkpoint)
    checkpointer.save(saved, {"examples": 0, "signature": {}}, c)
    checkpointer.close()
    for sizes in MESHES.values():
        mesh = mesh_of(**sizes)
        with jax.set_mesh(mesh):
            restored = restore_state(checkpointer.read(20), jax.eval_shape(lambda: init_state(c)), mesh)
        jax.tree.map(np.testing.assert_array_equal, saved, restored)
        assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(restored)} == {mesh.size}


SHAPE = re.compile(r"= \(?\w+\[([\d,]*)\]")


def results(hlo, operation):
    """Return the shapes of the results of an HLO operation, or of all operations if it is ""."""
    lines = [line for line in hlo.splitlines() if re.search(rf" {operation}(-start)?\(", line) or not operation]
    return [tuple(int(n) for n in match.group(1).split(",") if n) for line in lines if (match := SHAPE.search(line))]


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, {}),
        *(
            pytest.param(sizes, options, marks=pytest.mark.long)
            for sizes, options in [
                ({"data": 2, "fsdp": 2, "tensor": 2}, {"model__window": 9, "model__window_pattern": "LLLLG"}),
                ({"context": 2, "fsdp": 4}, {}),
            ]
        ),
    ],
)
def test_compiled_step_gathers_one_layer_at_a_time_and_no_logits(config, mesh_of, monkeypatch, sizes, options):
    """No all-gather has a layer axis in its result, and no array has the logits of all tokens of a device."""
    vocabulary, length, rows = 1664, 64, 16
    layers, in_group = 15 if options else 5, 5
    monkeypatch.setattr("difftx.training.loss.CHUNK_LOGITS", 16 * vocabulary)
    c = config(
        model__num_layers=layers,
        model__vocab_size=vocabulary,
        data__sequence_length=length,
        train__global_batch_tokens=rows * length,
        model__remat="full",
        **options,
    )
    mesh = mesh_of(**sizes)
    with jax.set_mesh(mesh):
        state = jax.eval_shape(lambda: init_state(c))
        batch = next(loader_on(mesh, c))
        hlo = jax.jit(make_train_step(c), donate_argnums=0).lower(state, batch).compile().as_text()
    gathered = results(hlo, "all-gather")
    assert gathered, "weights are cut, so something must be gathered"
    assert not [shape for shape in gathered if {layers, in_group} & {*shape}]
    local_tokens = rows * length // (mesh.size // mesh.shape["tensor"])
    per_device = vocabulary // mesh.shape["tensor"]
    logits = [s for s in results(hlo, "") if {per_device, vocabulary} & {*s} and c.model.d_model not in s]
    assert max(map(np.prod, logits)) <= 16 * vocabulary < local_tokens * per_device
