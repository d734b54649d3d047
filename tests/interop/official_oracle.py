"""A decoder with the formulas of the official code's attention, in float64 numpy, with that code's tensor names.

It computes head by head, as multihead_flashdiff_1.py and multihead_attention.py of microsoft/unilm do. Head i has the
sub-heads 2i and 2i + 1 of queries and keys. Its value has 2 d adjacent channels. The rotary embedding rotates pairs of
adjacent channels.
"""

import math

import numpy as np
from kernels.oracle import softmax_row


def logits(tensors, config, tokens_T):
    """Return the logits `[T, V]` of one row."""
    w = {name: value.astype(np.float64) for name, value in tensors.items()}
    eps = config["rms_norm_eps"]
    x_TD = w["model.embed_tokens.weight"][tokens_T]
    for layer in range(config["num_layers"]):
        prefix = f"model.layers.{layer}."
        own = {name.removeprefix(prefix): value for name, value in w.items() if name.startswith(prefix)}
        x_TD = x_TD + attention(own, config, rms(x_TD, eps) * own["input_layernorm.weight"], layer)
        h_TD = rms(x_TD, eps) * own["post_attention_layernorm.weight"]
        gate = h_TD @ own["mlp.gate_proj.weight"].T
        hidden = gate / (1 + np.exp(-gate)) * (h_TD @ own["mlp.up_proj.weight"].T)
        x_TD = x_TD + hidden @ own["mlp.down_proj.weight"].T
    unembedding = w["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    return rms(x_TD, eps) * w["model.norm.weight"] @ unembedding.T


def attention(w, config, x_TD, depth):
    """Return the output of MultiheadFlashDiff1 or of MultiheadAttention, `[T, D]`."""
    is_diff = config["attention"] == "MultiheadFlashDiff1"
    heads, groups, theta = config["num_heads"], 2 if is_diff else 1, config["rope_theta"]
    d = config["embed_dim"] // heads // groups
    q, k, v = (x_TD @ w[f"self_attn.{name}_proj.weight"].T for name in "qkv")
    out = []
    for i in range(heads):
        kv = i // (heads // config["num_kv_heads"])
        value = v[:, kv * groups * d : (kv + 1) * groups * d]
        queries, keys = ([sub_head(x, groups * n + g, d, theta) for g in range(groups)] for x, n in ((q, i), (k, kv)))
        head = [causal_weights(*pair) @ value for pair in zip(queries, keys, strict=True)]
        out.append(subtracted(w, depth, *head) if is_diff else head[0])
    return np.concatenate(out, axis=1) @ w["self_attn.out_proj.weight"].T


def subtracted(w, depth, signal, noise):
    """Return the output of a head of MultiheadFlashDiff1, given A1 V and A2 V."""
    lambda_init = 0.8 - 0.6 * math.exp(-0.3 * depth)
    exponents = [w[f"self_attn.lambda_q{g}"] @ w[f"self_attn.lambda_k{g}"] for g in (1, 2)]
    lam = math.exp(exponents[0]) - math.exp(exponents[1]) + lambda_init
    return rms(signal - lam * noise, 1e-5) * w["self_attn.subln.weight"] * (1 - lambda_init)


def sub_head(x, index, d, theta):
    """Return the rotated channels of a (sub-)head. Channel 2j is the real part, and 2j + 1 the imaginary part."""
    z = x[:, index * d : (index + 1) * d : 2] + 1j * x[:, index * d + 1 : (index + 1) * d : 2]
    return z * np.exp(1j * np.outer(np.arange(len(x)), theta ** (-np.arange(0, d, 2) / d)))


def causal_weights(q, k):
    """Return softmax(q kᵀ / √d), in which each row covers the tokens up to its own."""
    scores = (q @ k.conj().T).real / math.sqrt(2 * q.shape[1])
    out = np.zeros_like(scores)
    for t in range(len(scores)):
        out[t, : t + 1] = softmax_row(scores[t, : t + 1])
    return out


def rms(x, eps):
    """Return the RMSNorm of `x` without a gain."""
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps)
