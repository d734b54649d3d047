"""Prefill and decode through the cache against one pass of the model, as training calls it, over whole rows."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from difftx.data.tokenizer import load_tokenizer
from difftx.inference import decode
from difftx.inference.decode import LanguageModel, Tokens
from difftx.inference.sampling import GREEDY
from difftx.kernels.cached import EMPTY
from difftx.training.state import graph, init_state

LENGTHS = [1, 40, 33, 64, 90]
LIMITS = [20, 20, 5, 20, 0]
TENSOR = {"data": 2, "fsdp": 2, "tensor": 2}
CONTEXT = {"context": 2, "fsdp": 4}


def language_model(config, mesh, architecture="diff", **overrides):
    """A model with random parameters, far from uniform, so that what is attended to matters."""
    overrides = {"train__global_batch_tokens": 1024} | overrides
    c = config(architecture, data__sequence_length=128, **overrides)
    rng = np.random.default_rng(0)
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(lambda: init_state(c).params)

    def draw(path, leaf):  # In numpy: compiling an initialisation takes longer than a test.
        scale = 0.02 if "embedding" in str(path) else 0.3
        mean = 1.0 if "scale" in str(path) else 0.0
        value = (mean + scale * rng.normal(size=leaf.shape)).astype(leaf.dtype)
        return jax.device_put(value, jax.NamedSharding(mesh, leaf.sharding.spec))

    return LanguageModel(c, mesh, jax.tree.map_with_path(draw, shapes), load_tokenizer("bytes"))


def full_logits(lm, mesh, host, tokens_BT):
    """Logits `[B, T, V]` by the training kernels on one device."""
    with jax.set_mesh(mesh):
        params = jax.device_put(jax.device_get(lm.params), jax.NamedSharding(mesh, jax.P()))
        graphdef = graph(lm.config)
        ids = {"positions_BT": host.positions_BT, "segment_ids_BT": host.segment_BT}
        return np.asarray(jax.jit(lambda p: nnx.merge(graphdef, p)(tokens_BT, **ids)[0])(params))


def prompts_of(lengths, count, chunk, *, packed):
    rng = np.random.default_rng(0)
    host = Tokens.of([rng.integers(0, 256, n).tolist() for n in lengths], count, chunk)
    if packed:  # Documents of eleven tokens, each with positions of its own; the last goes on.
        ids = np.where(host.segment_BT == EMPTY, EMPTY, host.positions_BT // 11)
        host = dataclasses.replace(host, segment_BT=ids.astype(np.int32), positions_BT=host.positions_BT % 11)
    return host


def check_against_full_pass(lm, one, host, limits, chunk):
    """Decode two blocks greedily; compare the tokens, and the logits after prefill and after each block."""
    count, real_B = len(host.tokens_BT), np.sum(host.segment_BT != EMPTY, axis=1)
    width = host.tokens_BT.shape[1] + 2 * decode.BLOCK_TOKENS
    with jax.set_mesh(lm.mesh):
        rows = decode.prefill(lm, host, chunk=chunk, seed_B=np.zeros(count), limit_B=limits)
        hidden, blocks = [np.asarray(rows.x_BD)], []
        for _ in range(2):
            rows, block_BN = decode.next_tokens(lm, rows, GREEDY)
            hidden.append(np.asarray(rows.x_BD))
            blocks.append(block_BN)
    new_BN = np.concatenate(blocks, axis=1)

    # The same rows with what was decoded behind each prompt, in its last segment.
    def extend(x, fill):
        return np.pad(x, [(0, 0), (0, width - x.shape[1])], constant_values=fill)

    tokens_BT, ids_BT, positions_BT = (
        extend(host.tokens_BT, 0),
        extend(host.segment_BT, EMPTY),
        extend(host.positions_BT, 0),
    )
    for b, length in enumerate(real_B):
        new = new_BN[b][new_BN[b] != decode.NO_TOKEN]
        assert len(new) <= limits[b]
        place = slice(length, length + len(new))
        tokens_BT[b, place], ids_BT[b, place] = new, ids_BT[b, length - 1]
        positions_BT[b, place] = positions_BT[b, length - 1] + 1 + np.arange(len(new))
    logits_BTV = full_logits(lm, one, Tokens(tokens_BT, positions_BT, ids_BT), tokens_BT)

    embedding_VD = np.asarray(lm.params["embedding_VD"])
    for b, length in enumerate(real_B):
        if not length:
            continue
        expected_NV = logits_BTV[b, length - 1 :]
        np.testing.assert_allclose(embedding_VD @ hidden[0][b], expected_NV[0], atol=1e-5)
        for i, token in enumerate(new_BN[b]):
            ended = token == decode.NO_TOKEN
            assert ended or token == np.argmax(expected_NV[i, :257])
        for block, x_BD in enumerate(hidden[1:], start=1):
            at = block * decode.BLOCK_TOKENS
            if at < limits[b] and not (new_BN[b, :at] == decode.NO_TOKEN).any():
                np.testing.assert_allclose(embedding_VD @ x_BD[b], expected_NV[at], atol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "kv_heads", "sizes", "packed", "chunks"),
    [
        ("diff", None, {}, False, [16, 128]),
        ("diff", 2, TENSOR, True, [32]),
        ("transformer", None, CONTEXT, True, [32]),
        pytest.param("transformer", 2, {}, False, [64], marks=pytest.mark.long),
    ],
)
def test_prefill_and_decode_equal_a_full_pass(config, mesh_of, architecture, kv_heads, sizes, packed, chunks):
    heads = {"model__num_heads": 4, "model__num_kv_heads": kv_heads}
    lm = language_model(config, mesh_of(**sizes), architecture, **heads)
    limits = np.array([*LIMITS, 0, 0, 0])
    for chunk in chunks:
        check_against_full_pass(lm, mesh_of(), prompts_of(LENGTHS, 8, chunk, packed=packed), limits, chunk)


@pytest.mark.long
def test_where_rows_are_cut_in_training_heads_need_not_divide_by_context(config, mesh_of):
    mesh = mesh_of(context=8)
    lm = language_model(config, mesh, model__num_heads=2, mesh__context_method="zigzag")
    check_against_full_pass(lm, mesh_of(), prompts_of(LENGTHS, 8, 32, packed=True), np.array([*LIMITS, 0, 0, 0]), 32)


def test_casting_the_weights_once_changes_no_bit(config, mesh_of):
    outputs = []
    for name in ("weights", "params"):
        lm = language_model(config, mesh_of(), model__compute_dtype="bfloat16")
        assert lm.weights["blocks"]["mlp"]["up_DF"].dtype == "bfloat16"
        vars(lm)["weights"] = getattr(lm, name)
        with jax.set_mesh(lm.mesh):
            host = prompts_of([20, 5], 2, 32, packed=False)
            rows = decode.prefill(lm, host, chunk=32, seed_B=np.zeros(2), limit_B=np.zeros(2))
        outputs.append(np.asarray(rows.x_BD, np.float32))
    np.testing.assert_array_equal(*outputs)
