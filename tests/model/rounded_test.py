"""Attention with rounded queries, keys and values, or rounded logits, against the float64 oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import marked
from helpers.model_layers import X_BTD, layer_of

from model import oracle

NAMES = ["diff", "transformer", "diff_v2", "gda", "gdla", "gated", "sink", "top_k", "zero_branch", "dex"]
CASES = [(name, bits) for name in NAMES for bits in (8, 4)]


def rounded(x, bits):
    """Return vectors rounded to 2^bits - 1 levels, with a bfloat16 scale per token and head."""
    levels = 2 ** (bits - 1) - 1
    scale = np.float64(jnp.asarray(np.abs(x).max(-1, keepdims=True) / levels, jnp.bfloat16).astype(jnp.float32))
    return np.clip(np.rint(np.divide(x, scale, out=np.zeros_like(x), where=scale > 0)), -levels, levels) * scale


def check(mesh, name, **field):
    """Compare a layer with the oracle. A number between two levels may fall either way, so most tokens must agree."""
    with jax.set_mesh(mesh):
        heads = {} if name in oracle.SIZES else {"model__num_heads": 4}
        model, module, call, _ = layer_of(name, **heads, **{f"model__{key}": value for key, value in field.items()})
        weights, out_BTD = oracle.weights_of(module), call(X_BTD)
        for x_TD, out_TD in zip(X_BTD, out_BTD, strict=True):
            expected_TD = oracle.layer(weights, model, x_TD, 0)
            assert np.median(np.abs(out_TD - expected_TD).max(-1)) < 1e-5 * np.abs(expected_TD).max()


@pytest.mark.parametrize(("name", "bits"), marked(CASES, fast=[("diff", 8), ("transformer", 4), ("gdla", 4)]))
def test_queries_keys_and_values_are_rounded(mesh_of, monkeypatch, name, bits):
    encoded, attend = oracle.position_encoded, oracle.attend
    monkeypatch.setattr(oracle, "position_encoded", lambda *given: tuple(rounded(x, bits) for x in encoded(*given)))
    monkeypatch.setattr(oracle, "attend", lambda row, qk, v, window=None: attend(row, qk, rounded(v, bits), window))
    check(mesh_of(), name, attention_operand_bits=bits)


@pytest.mark.parametrize("name", marked(["gdla", "zero_branch"], fast=["zero_branch"]))
def test_logits_are_rounded(mesh_of, monkeypatch, name):
    """Cover two architectures that, without rounding, give the kernel function more heads than the layer has."""
    attend = oracle.attend

    def rounded_row(row):
        def of_levels(logits):
            scale = np.abs(logits).max() / 7
            return np.rint(logits / scale) * scale

        return lambda *logits: row(*map(of_levels, logits))

    monkeypatch.setattr(oracle, "attend", lambda row, qk, v, window=None: attend(rounded_row(row), qk, v, window))
    check(mesh_of(), name, attention_logit_bits=4)
