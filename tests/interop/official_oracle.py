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
    attend = diff_attention if config["attention"] == "MultiheadFlashDiff1" else attention
    eps = config["rms_norm_eps"]
    x_TD = w["model.embed_tokens.weight"][tokens_T]
    for layer in range(config["num_layers"]):
        own = {
            n.removeprefix(f"model.layers.{layer}."): v for n, v in w.items() if n.startswith(f"model.layers.{layer}.")
        }
        x_TD = x_TD + attend(own, config, rms(x_TD, eps) * own["input_layernorm.weight"], layer)
        h_TD = rms(x_TD, eps) * own["post_attention_layernorm.weight"]
        gate = h_TD @ own["mlp.gate_proj.weight"].T
        hidden = gate / (1 + np.exp(-gate)) * (h_TD @ own["mlp.up_proj.weight"].T)
        x_TD = x_TD + hidden @ own["mlp.down_proj.weight"].T
    unembedding = w["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    return rms(x_TD, eps) * w["model.norm.weight"] @ unembedding.T


def diff_attention(w, config, x_TD, depth):
    """Return the output of MultiheadFlashDiff1, `[T, D]`."""
    heads, kv_heads = config["num_heads"], config["num_kv_heads"]
    d = config["embed_dim"] // heads // 2
    q, k, v = (x_TD @ w[f"self_attn.{name}_proj.weight"].T for name in "qkv")
    lambda_init = 0.8 - 0.6 * math.exp(-0.3 * depth)
    exponents = [w[f"self_attn.lambda_q{g}"] @ w[f"self_attn.lambda_k{g}"] for g in (1, 2)]
    lam = math.exp(exponents[0]) - math.exp(exponents[1]) + lambda_init
    out = []
    for i in range(heads):
        kv = i // (heads // kv_heads)
        value = v[:, kv * 2 * d : (kv + 1) * 2 * d]
        weights = [
            causal_weights(
                sub_head(q, 2 * i + g, d, config["rope_theta"]), sub_head(k, 2 * kv + g, d, config["rope_theta"])
            )
            for g in (0, 1)
        ]
        head = rms((weights[0] - lam * weights[1]) @ value, 1e-5) * w["self_attn.subln.weight"]
        out.append(head * (1 - lambda_init))
    return np.concatenate(out, axis=1) @ w["self_attn.out_proj.weight"].T


def attention(w, config, x_TD, depth):
    """Return the output of MultiheadAttention, `[T, D]`."""
    heads, kv_heads = config["num_heads"], config["num_kv_heads"]
    d = config["embed_dim"] // heads
    q, k, v = (x_TD @ w[f"self_attn.{name}_proj.weight"].T for name in "qkv")
    out = []
    for i in range(heads):
        kv = i // (heads // kv_heads)
        theta = config["rope_theta"]
        out.append(causal_weights(sub_head(q, i, d, theta), sub_head(k, kv, d, theta)) @ v[:, kv * d : (kv + 1) * d])
    return np.concatenate(out, axis=1) @ w["self_attn.out_proj.weight"].T


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
