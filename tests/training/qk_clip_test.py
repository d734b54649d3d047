"""The largest attention logits of a step, and QK-Clip, which scales query and key weights by them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY
from flax import nnx
from helpers.cases import marked
from helpers.model_layers import OPTIONS, TOKENS, X_BTD, batch_on, layer_of
from helpers.training_runs import all_metrics
from model import oracle

import difftx
from difftx import kernels
from difftx.errors import UserError
from difftx.kernels import reference, weight_functions
from difftx.model.architectures import ARCHITECTURES, heads_of
from difftx.model.attention import LARGEST_LOGITS, layer_constants
from difftx.model.layers import rotary_angles
from difftx.parallel.layout import Layout
from difftx.training.state import init_state, make_train_step

GROUPED = {"model__num_heads": 4, "model__num_kv_heads": 2}
SIZES = {"diff": GROUPED, "transformer": GROUPED} | oracle.SIZES
NAMES = ("diff", "diff_v2", "gda", "motif", "sink", "signed_mask", "transformer", "zero_branch")


def largest_of_oracle(monkeypatch, module, model):
    """Return the largest logits `[H, G]` by the formulas in float64 numpy."""
    found, attend = [], oracle.attend

    def recorded(row, queries_keys, v_TE, window):
        largest = []

        def observed(*logits):
            largest.append([max(of_query) for of_query in logits])
            return row(*logits)

        out_TE = attend(observed, queries_keys, v_TE, window)
        found.append(np.max(largest, axis=0))
        return out_TE

    monkeypatch.setattr(oracle, "attend", recorded)
    for x_TD in X_BTD:
        oracle.layer(oracle.weights_of(module), model, x_TD, 0)
    monkeypatch.undo()
    largest_HG = np.reshape(found, (len(X_BTD), -1, len(found[0]))).max(axis=0)
    # In V2, the oracle computes the noise head 2 i + 1 before the signal head 2 i.
    return largest_HG.reshape(-1, 2)[:, ::-1].reshape(-1, 1) if model.architecture == "diff_v2" else largest_HG


@pytest.mark.parametrize("name", marked(NAMES, fast=("diff", "gda")))
def test_largest_logits_of_a_layer_equal_the_formula(name, monkeypatch, mesh_of):
    """The layer has a window, biases and scaled rotary frequencies."""
    with jax.set_mesh(mesh_of()):
        model, module, *_ = layer_of(name, **SIZES[name], **OPTIONS | {"model__qk_norm": "false"})
        graphdef, state = nnx.split(module)
        constants = jax.tree.map(lambda a: a[0], layer_constants(model)).of_layer(model, 0)
        angles = rotary_angles(jnp.arange(TOKENS)[None], model)

        @jax.jit
        def largest(state, watch):
            return nnx.merge(graphdef, state)(X_BTD, angles, constants, None, watch)[1][LARGEST_LOGITS]

        found, not_watched = largest(state, True), largest(state, False)
    np.testing.assert_allclose(found, largest_of_oracle(monkeypatch, module, model), rtol=1e-5)
    assert not np.any(not_watched)


def dense(q_BTHGd, k_BSKGd, ids_BT, window):
    """Return the largest visible logits `[H, G]` in float64 numpy."""
    B, T, H, _, d = q_BTHGd.shape
    q_BTHGd, k_BSHGd = np.float64(q_BTHGd), np.repeat(np.float64(k_BSKGd), H // k_BSKGd.shape[2], axis=2)
    distance_TS = np.arange(T)[:, None] - np.arange(T)
    seen_BTS = np.broadcast_to((distance_TS >= 0) & (distance_TS < (window or T)), (B, T, T))
    if ids_BT is not None:
        seen_BTS = seen_BTS & (ids_BT[:, :, None] == ids_BT[:, None])
    logits_BHGTS = np.einsum("bthgd,bshgd->bhgts", q_BTHGd, k_BSHGd) / np.sqrt(d)
    return np.where(seen_BTS[:, None, None], logits_BHGTS, -np.inf).max(axis=(0, 3, 4))


BACKENDS = {"reference": (), "xla": (), "cudnn": (), "pallas_tpu": pytest.mark.long, "splash_wide": pytest.mark.long}
BACKENDS |= {"pallas_gpu": pytest.mark.interpreter}


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in BACKENDS.items()])
def test_largest_logits_are_those_of_the_queries_and_keys_of_every_backend(config, monkeypatch, name):
    """cuDNN, which no CPU has, is replaced by the reference."""
    seen, backends = [], kernels.BACKENDS["diff_attention"]
    forward = backends[name].forward
    if name == "cudnn":
        forward = functools.partial(reference.weighted_attention, weight_functions.difference)

    def recorded(q, k, v, lam, ids, *, window):
        seen.append((q, k, ids, window))
        return forward(q, k, v, lam, ids, window=window)

    changes = {"unsupported": lambda call: None, "backward": None} if name == "cudnn" else {}
    monkeypatch.setitem(backends, name, dataclasses.replace(backends[name], forward=recorded, **changes))
    sizes = {"model__head_dim": 32, "model__window": 9, **GROUPED}
    model = config("diff", model__attention_implementation=name, **sizes).model
    module = jax.jit(lambda: ARCHITECTURES["diff"](model, Layout.inferred(), rngs=nnx.Rngs(0)))()
    rng = np.random.default_rng(0)
    x_BTD = jnp.asarray(rng.normal(size=(2, 40, 32)), jnp.float32)
    ids_BT = jnp.asarray(np.sort(rng.integers(0, 3, (2, 40))), jnp.int32)
    constants = jax.tree.map(lambda a: a[0], layer_constants(model)).of_layer(model, 0)
    _, statistics = module(x_BTD, rotary_angles(jnp.arange(40)[None], model), constants, ids_BT, True)
    ((q, k, ids, window),) = seen
    assert window == 9
    np.testing.assert_allclose(statistics[LARGEST_LOGITS], dense(q, k, np.asarray(ids), window), rtol=1e-5)


@pytest.mark.parametrize("tokens", [1, 33, 200])  # 200 tokens are two spans.
@pytest.mark.parametrize("groups", [1, 2])
def test_largest_logits_equal_dense_ones(monkeypatch, tokens, groups):
    monkeypatch.setattr("difftx.kernels.xla.CHUNK_WEIGHTS", 37 * tokens)  # The last chunk is partly filled.
    rng = np.random.default_rng(tokens)
    q, k = rng.normal(size=(2, 2, tokens, 4, groups, 8)).astype(np.float32)
    k, ids_BT = k[:, :, :2], np.sort(rng.integers(0, 3, (2, tokens))).astype(np.int32)
    found = []
    for ids, window in ((None, None), (ids_BT, None), (None, 5), (ids_BT, 5)):
        largest = jax.jit(functools.partial(kernels.largest_logits, window=window))
        found.append(largest(q - 2, k + 2, segment_ids_BT=ids))  # No logit exceeds 0.
        np.testing.assert_allclose(found[-1], dense(q - 2, k + 2, ids, window), rtol=1e-5)
    assert tokens == 1 or not any(np.array_equal(found[0], other) for other in found[1:])  # The masks matter.


@pytest.mark.long
@pytest.mark.parametrize("method", ["heads", "gather", "zigzag"])
def test_a_mesh_does_not_change_logits_or_clips(config, mesh_of, method):
    """One device takes a whole batch at a time, and several devices accumulate two microbatches."""
    options = {"train__global_batch_tokens": 16 * 32, "optimizer__qk_clip": 0.3, "optimizer__eps": 1e-4, **GROUPED}
    c = config("diff", mesh__context_method=method, optimizer__learning_rate=1e-2, **options)
    one, c = steps(c, mesh_of(), 2), c.but(train={"accumulation": 2})
    for sizes in ({"fsdp": 2, "tensor": 2}, {"fsdp": 2, "context": 2}):
        several = steps(c, mesh_of(**sizes), 2)
        for (state, metrics), (expected_state, expected) in zip(several, one, strict=True):
            assert expected["clipped_heads"] == np.sum(expected[LARGEST_LOGITS] > 0.3) > 0
            for name in (LARGEST_LOGITS, "loss", "clipped_heads"):
                np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-4, err_msg=name)
            jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), state.params, expected_state.params)


def steps(c, mesh, count, skipped=()):
    """Return the states and metrics of steps with the same batch. No parameter, such as a bias, is 0 at the start.

    The updates of the steps in `skipped`, which count from 0, are skipped, because no token counts.
    """

    def start():
        state = init_state(c)
        return dataclasses.replace(state, params=jax.tree.map(lambda x: jnp.where(x == 0, 0.1, x), state.params))

    def with_limit(limit, state, batch):
        """Take a step. The limit is an argument, so that one program, which is compiled once, serves all limits."""
        return make_train_step(c.but(optimizer={"qk_clip": limit}))(state, batch)

    with jax.set_mesh(mesh):
        state, step = jax.jit(start)(), jax.jit(with_limit)
        batch, found = batch_on(mesh, c, rows=c.batch_rows), []
        empty = dataclasses.replace(batch, loss_mask_BT=0 * batch.loss_mask_BT)
        for number in range(count):
            state, metrics = step(c.optimizer.qk_clip, state, empty if number in skipped else batch)
            found.append(jax.device_get((state, metrics)))
    return found


@pytest.mark.parametrize("name", marked(SIZES, fast=("diff",)))
def test_a_clip_brings_logits_to_the_limit_and_leaves_the_others(config, mesh_of, name):
    """The updates are too small to change a number, so that only the clip does. A skipped update does not clip."""
    options = {"model__num_layers": 1, "model__attention_bias": "true", "optimizer__learning_rate": 1e-30}
    c = config(name, optimizer__qk_clip=1e9, **options, **SIZES[name])
    unclipped, _ = steps(c, mesh_of(), 2)
    before, largest_HG = unclipped[0].params["blocks"]["attention"], unclipped[1][LARGEST_LOGITS][0]
    limit = float(np.median(largest_HG))
    assert 0 < limit < largest_HG.max()
    clipping = c.but(optimizer={"qk_clip": limit})
    (first, skipped), (clipped, metrics), (_, after) = steps(clipping, mesh_of(), 3, skipped=[0])
    assert skipped["skipped"]
    for weight, x in first.params["blocks"]["attention"].items():
        if weight.startswith(("query", "key")):  # The progress of zero_branch and dex advances in unskipped steps only.
            np.testing.assert_array_equal(x, before[weight])
    assert metrics["clipped_heads"] == np.sum(largest_HG > limit)
    np.testing.assert_allclose(after[LARGEST_LOGITS][0], np.minimum(largest_HG, limit), rtol=1e-3)
    for weight, x in clipped.params["blocks"]["attention"].items():
        part = weight.partition("_")[0]
        if part not in ("query", "key"):
            jax.tree.map(np.testing.assert_array_equal, x, before[weight])
            continue
        is_same = x == before[weight]
        by_head = is_same.all(axis=(0, 1, -1) if is_same.ndim > 3 and not weight.endswith("bias") else (0, -1))
        is_below_HG = largest_HG <= limit
        if part == "key":  # A key keeps its bits if one of its query heads is below the limit.
            is_below_HG = is_below_HG.reshape(heads_of(c.model).kv_heads, -1, is_below_HG.shape[1]).any(axis=1)
        elif name in ("gda", "motif"):  # Three signal queries and one noise query of each group.
            is_below_NRG = is_below_HG.reshape(2, 3, 2)
            is_below_HG = np.concatenate([is_below_NRG[..., 0], is_below_NRG[:, :1, 1]], axis=1)
        np.testing.assert_array_equal(by_head.reshape(-1), is_below_HG.reshape(-1), err_msg=weight)


@pytest.mark.long
def test_neither_watching_nor_a_limit_that_is_not_reached_changes_a_bit(config, mesh_of):
    c = config("diff", optimizer__learning_rate=1e-2, train__ema_decay=0.5, model__remat="dots", **GROUPED)
    expected = steps(c, mesh_of(), 3)
    watched = steps(c.but(logging={"every_steps": 2, "attention_logits_every_steps": 2}), mesh_of(), 3)
    unclipped = steps(c.but(optimizer={"qk_clip": 1e9}), mesh_of(), 3)
    for (state, metrics), (same, with_logits), (same_too, with_clip) in zip(expected, watched, unclipped, strict=True):
        jax.tree.map(np.testing.assert_array_equal, state, same)
        jax.tree.map(np.testing.assert_array_equal, state, same_too)
        assert with_logits[LARGEST_LOGITS].any() == (state.step == 2)  # It is computed only for the rows that have it.
        assert LARGEST_LOGITS not in metrics
        assert with_clip["clipped_heads"] == 0


REFUSED = {
    "with the norm": ("diff", {"model.qk_norm": True}, r"model\.qk_norm already bounds the logits"),
    "with adapters": ("diff", {"train.lora_rank": 2}, r"or train\.lora_rank freezes some"),
    "with frozen weights": ("diff", {"train.trainable": "*norm*"}, r"train\.trainable or"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_configs_that_are_refused(config, case):
    name, fields, message = REFUSED[case]
    options = {field.replace(".", "__"): value for field, value in fields.items()}
    with pytest.raises(UserError, match=rf"^optimizer\.qk_clip=100\.0\S* .*{message}"):
        config(name, optimizer__qk_clip=100, **options)


def test_projections_of_an_extension_are_refused(config, monkeypatch):
    class Other(ARCHITECTURES["diff"]):
        def project(self, x_BTD, angles):
            return super().project(x_BTD, angles)

    monkeypatch.setitem(ARCHITECTURES._entries, "diff", Other)
    with pytest.raises(UserError, match=r"^optimizer\.qk_clip=100\.0: architecture 'diff' has its own `project`"):
        config("diff", optimizer__qk_clip=100)


def test_steps_between_rows_must_divide(config):
    with pytest.raises(UserError, match=r"logits_every_steps=15 must be a multiple of logging\.every_steps=10"):
        config(logging__every_steps=10, logging__attention_logits_every_steps=15)


@pytest.mark.long
def test_a_resumed_run_has_the_same_bits(text_file, tmp_path):
    def train(name, steps):
        fields = {key: value for key, value in TINY.items() if key != "train.steps"} | {"mesh.fsdp": "8"}
        fields |= {"optimizer.schedule": "constant", "optimizer.qk_clip": 0.5, "optimizer.learning_rate": 1e-2}
        fields |= {"logging.every_steps": 1, "logging.attention_logits_every_steps": 2, "logging.trackers": ()}
        fields |= {"eval.loss_tokens": 600, "data.path": text_file}
        difftx.train("quickstart:diff", tmp_path / name, steps=steps, **fields)
        return [row for row in all_metrics(tmp_path / name) if row["split"] == "train"]

    expected, _ = train("whole", 6), train("stopped", 3)
    resumed = train("stopped", 6)
    for row, same in zip(expected, resumed, strict=True):
        assert (LARGEST_LOGITS in row) == (row["step"] % 2 == 0)
        names = ("loss", "grad_norm", "clipped_heads", *([LARGEST_LOGITS] if row["step"] % 2 == 0 else ()))
        assert [row[name] for name in names] == [same[name] for name in names]
    assert np.shape(expected[-1][LARGEST_LOGITS]) == (2, 2, 2)
    assert sum(row["clipped_heads"] for row in expected) > 0
