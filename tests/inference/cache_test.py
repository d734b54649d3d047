"""Prefill and decoding through the cache, compared with one pass over whole rows, as in training."""

import jax
import numpy as np
import pytest
from helpers.inference_models import CONTEXT, TENSOR, full_logits, language_model, prompts_of
from helpers.model_layers import MUP, OPTIONS, WINDOWS

from difftx.inference import decode
from difftx.inference.sampling import GREEDY

LENGTHS = [1, 40, 33, 64, 90]
LIMITS = [20, 20, 5, 20, 0]
SEEDS = [0] * len(LIMITS)


def check_against_full_pass(lm, one):
    """Decode two blocks greedily. Compare the tokens, and the logits after prefill and after each block."""
    prompts = prompts_of(LENGTHS)
    tokens_BT, _, _ = decode.padded(prompts, lm.mesh, lm.config.model.cache)
    with jax.set_mesh(lm.mesh):
        rows = decode.prefill(lm, prompts, seeds=SEEDS, limits=LIMITS)
        hidden, blocks = [np.asarray(rows.x_BD)], []
        for _ in range(2):
            rows, block_BN = decode.next_tokens(lm, rows, GREEDY)
            hidden.append(np.asarray(rows.x_BD))
            blocks.append(block_BN)
    new_BN = np.concatenate(blocks, axis=1)

    # The same rows, with the decoded tokens after each prompt.
    tokens_BT = np.pad(tokens_BT, [(0, 0), (0, 2 * decode.BLOCK_TOKENS)])
    for b, length in enumerate(LENGTHS):
        new = new_BN[b][new_BN[b] != decode.NO_TOKEN]
        assert len(new) <= LIMITS[b]
        tokens_BT[b, length : length + len(new)] = new
    logits_BTV = full_logits(lm, one, tokens_BT)

    embedding_VD, cap = np.asarray(lm.params["embedding_VD"]), lm.config.model.logit_soft_cap

    def logits_of(x_D):
        logits_V = embedding_VD @ x_D / lm.config.model.width_ratio
        return logits_V if cap is None else cap * np.tanh(logits_V / cap)

    for b, length in enumerate(LENGTHS):
        expected_NV = logits_BTV[b, length - 1 :]
        np.testing.assert_allclose(logits_of(hidden[0][b]), expected_NV[0], atol=1e-5)
        for i, token in enumerate(new_BN[b]):
            ended = token == decode.NO_TOKEN
            assert ended or token == np.argmax(expected_NV[i, :257])
        for block, x_BD in enumerate(hidden[1:], start=1):
            at = block * decode.BLOCK_TOKENS
            if at < LIMITS[b] and not (new_BN[b, :at] == decode.NO_TOKEN).any():
                np.testing.assert_allclose(logits_of(x_BD[b]), expected_NV[at], atol=1e-5)


GROUPED = {"model__num_heads": 4, "model__num_kv_heads": 2}
CAPPED = OPTIONS | {"model__logit_soft_cap": 0.1}


@pytest.mark.parametrize(
    ("architecture", "sizes", "options"),
    [
        ("diff", TENSOR, GROUPED),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [
                ("diff", {}, {}),
                ("transformer", CONTEXT, {}),
                # A window of 5 is shorter than most prompts, so that new tokens see only a part of the cache.
                ("transformer", TENSOR, CAPPED),
                ("diff", {}, MUP),
                # Windows alternate, and in the full pass the layers run in a loop over groups of layers.
                ("diff", {}, CAPPED | {"model__num_layers": 12}),
                # Training shards rows, so that `context` need not divide the heads.
                ("diff", {"context": 8}, {"model__num_heads": 2, "mesh__context_method": "zigzag"}),
            ]
        ),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in [
                ("transformer", {}, GROUPED),
                ("diff", {}, CAPPED),
                ("diff", {}, {"model__qk_norm": "true"}),
                ("diff", {}, {"model__logit_soft_cap": 0.1}),
                ("diff", {}, WINDOWS),
            ]
        ),
    ],
)
def test_prefill_and_decode_equal_a_full_pass(config, mesh_of, architecture, sizes, options):
    lm = language_model(config, mesh_of(**sizes), architecture, **{"model__num_heads": 4} | options)
    check_against_full_pass(lm, mesh_of())


@pytest.mark.long
def test_casting_the_weights_once_changes_no_bit(config, mesh_of):
    outputs = []
    for name in ("weights", "params"):
        lm = language_model(config, mesh_of(), model__compute_dtype="bfloat16")
        assert lm.weights["blocks"][0]["mlp"]["up_DF"].dtype == "bfloat16"
        vars(lm)["weights"] = getattr(lm, name)
        with jax.set_mesh(lm.mesh):
            rows = decode.prefill(lm, prompts_of([20, 5]), seeds=[0, 0], limits=[0, 0])
        outputs.append(np.asarray(rows.x_BD, np.float32))
    np.testing.assert_array_equal(*outputs)
