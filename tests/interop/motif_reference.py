"""Motif in float64 numpy, from the formulas of its ports (difftx/model/variants/motif.py) and without difftx."""

import numpy as np


def rms(x, eps):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps)


def rotated(x_Td, theta):
    """Turn channel i towards channel i + d/2, by the position times θ^(-2 i / d)."""
    d = x_Td.shape[-1]
    angle_Tj = np.arange(len(x_Td))[:, None] * theta ** (-2 * np.arange(d // 2) / d)
    first, second = x_Td[:, : d // 2], x_Td[:, d // 2 :]
    turned = first * np.cos(angle_Tj) - second * np.sin(angle_Tj), second * np.cos(angle_Tj) + first * np.sin(angle_Tj)
    return np.concatenate(turned, axis=1)


def attention(q_Td, k_Td):
    logits_TT = q_Td @ k_Td.T / np.sqrt(q_Td.shape[1])
    logits_TT = np.where(np.tri(len(q_Td), dtype=bool), logits_TT, -np.inf)
    weights_TT = np.exp(logits_TT - logits_TT.max(axis=1, keepdims=True))
    return weights_TT / weights_TT.sum(axis=1, keepdims=True)


def attention_update(w, c, h_TD, layer):
    queries = c["num_attention_heads"]
    noise_heads = c.get("num_noise_heads") or queries // 2
    group, pairs = queries // noise_heads, c["num_key_value_heads"] // 2
    d = c.get("head_dim") or c["hidden_size"] // queries
    q_TAd, k_TKd, v_TKd = (
        (h_TD @ w[f"self_attn.{name}_proj.weight"].T).reshape(len(h_TD), -1, d) for name in ("q", "k", "v")
    )
    lambda_init = 0.8 - 0.6 * np.exp(-0.3 * (layer - 1))  # `layer` is 0 in the first layer.
    exponents = [w[f"self_attn.lambda_q{i}"] @ w[f"self_attn.lambda_k{i}"] for i in (1, 2)]
    lam = np.exp(exponents[0]) - np.exp(exponents[1]) + lambda_init
    heads = []
    for noise in range(noise_heads):
        pair = noise // (noise_heads // pairs)
        v_TE = np.concatenate([v_TKd[:, 2 * pair], v_TKd[:, 2 * pair + 1]], axis=1)
        k1_Td, k2_Td = (rotated(k_TKd[:, 2 * pair + i], c["rope_theta"]) for i in (0, 1))
        *signals, subtracted = (rotated(q_TAd[:, noise * group + i], c["rope_theta"]) for i in range(group))
        for signal in signals:
            head_TE = (attention(signal, k1_Td) - lam * attention(subtracted, k2_Td)) @ v_TE
            head_TE = rms(head_TE, c["attn_rms_norm_eps"]) * w["self_attn.subln.weight"]
            heads.append((1 - lambda_init) * head_TE)
    return np.concatenate(heads, axis=1) @ w["self_attn.o_proj.weight"].T


def mlp_update(w, h_TD):
    gate_TF, up_TF = h_TD @ w["mlp.gate_proj.weight"].T, h_TD @ w["mlp.up_proj.weight"].T
    w3, w2, w1 = w["mlp.act_fn.weight"]
    activated = w3 * rms(gate_TF**3, 1e-6) + w2 * rms(gate_TF**2, 1e-6) + w1 * rms(gate_TF, 1e-6)
    return ((activated + w["mlp.act_fn.bias"]) * up_TF) @ w["mlp.down_proj.weight"].T


def outputs(tensors, c, tokens_T):
    """Return the output of each layer `[L, T, D]`, and the logits `[T, V]`."""
    tensors = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    x_TD, layers = tensors["model.embed_tokens.weight"][tokens_T], []
    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        w = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        h_TD = rms(x_TD, c["rms_norm_eps"]) * w["input_layernorm.weight"]
        x_TD = x_TD + attention_update(w, c, h_TD, layer)
        h_TD = rms(x_TD, c["rms_norm_eps"]) * w["post_attention_layernorm.weight"]
        x_TD = x_TD + mlp_update(w, h_TD)
        layers.append(x_TD)
    unembedding = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    return np.stack(layers), rms(x_TD, c["rms_norm_eps"]) * tensors["model.norm.weight"] @ unembedding.T
