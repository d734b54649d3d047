"""Formulas of the layers of difftx/model/variants/ in float64 numpy, token by token and head by head."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from kernels.oracle import sink_row, softmax_row, top_k_row

from difftx.model.architectures import heads_of

# Tiny sizes with which the heads of each architecture share keys and can be sharded over two devices.
SIZES: dict[str, dict[str, Any]] = {
    "diff_v2": {"model__num_heads": 4, "model__num_kv_heads": 2},
    "gda": {"model__num_heads": 6, "model__gda__signal_heads": 3},
    "motif": {"model__num_heads": 6, "model__motif__signal_heads": 3},
    "gdla": {
        "model__num_heads": 8,
        "model__gdla__signal_heads": 2,
        "model__num_kv_heads": 2,
        "model__gdla__output_gate": "true",
    },
    "gated": {"model__num_heads": 4, "model__num_kv_heads": 2},
    "off_by_one": {"model__num_heads": 4, "model__num_kv_heads": 2},
    "sink": {"model__num_heads": 4},
    "top_k": {"model__num_heads": 4, "model__num_kv_heads": 2, "model__top_k__k": 5},
    "signed_mask": {"model__num_heads": 4, "model__num_kv_heads": 2},
    "diff_fixed_lambda": {"model__num_heads": 4},
    "zero_branch": {"model__num_heads": 4, "model__num_kv_heads": 2},
    "dex": {"model__num_heads": 4, "model__num_kv_heads": 2},
}


def frequencies(model: Any) -> np.ndarray:
    """Return the angle per token of each pair of channels, with the scaling of Llama 3.1 by its three cases."""
    half, c = heads_of(model).d_head // 2, model.rope_scaling
    unscaled = model.rope_theta ** (-np.arange(half) / half)
    found = []
    for frequency in unscaled:
        wavelength = 2 * np.pi / frequency
        if wavelength < c.original_max_position_embeddings / c.high_freq_factor:
            found.append(frequency)
        elif wavelength > c.original_max_position_embeddings / c.low_freq_factor:
            found.append(frequency / c.factor)
        else:
            smooth = c.original_max_position_embeddings / wavelength - c.low_freq_factor
            smooth /= c.high_freq_factor - c.low_freq_factor
            found.append((1 - smooth) * frequency / c.factor + smooth * frequency)
    return np.array(found)


def turned(x_Td: np.ndarray, model: Any) -> np.ndarray:
    """Return x after the rotary embedding, where channels i and i + d/2 are real and imaginary parts."""
    half = x_Td.shape[1] // 2
    z = x_Td[:, :half] + 1j * x_Td[:, half:]
    angle = np.outer(np.arange(len(x_Td)), frequencies(model))
    z = z * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag], axis=1)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def weights_of(module: nnx.Module) -> dict[str, Any]:
    """Return the parameters of a module as a tree of float64 arrays."""
    return jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(nnx.state(module)))


def rms(x: np.ndarray, norm: dict[str, np.ndarray]) -> np.ndarray:
    """Return the RMSNorm of `x` over its last axis, with a gain if the norm has one."""
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-5) * norm.get("scale", 1)


def head_norm(head_TE: np.ndarray, head: int, w: dict[str, Any], model: Any) -> np.ndarray:
    """Return the output of a head after the norm, or the factor, of `model.head_norm`."""
    if model.head_norm in ("rms", "rms_affine"):
        return rms(head_TE, w.get("head_norm", {}))  # "rms" has no weights.
    factor = {
        "none": lambda: 1,
        "scalar": lambda: w["head_norm"]["scale"],
        "sigmoid": lambda: sigmoid(w["head_norm"]["scale"][head]),
    }
    return head_TE * factor[model.head_norm]()


def position_encoded(
    w: dict[str, Any], model: Any, q_Td: np.ndarray, k_Td: np.ndarray, depth: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return a query and a key of each token after the norm of `model.qk_norm` and the rotary embedding, if any."""
    if model.qk_norm:
        q_Td, k_Td = rms(q_Td, w["query_norm"]), rms(k_Td, w["key_norm"])
    if model.window_pattern[depth % len(model.window_pattern)] == "N":
        return q_Td, k_Td
    return turned(q_Td, model), turned(k_Td, model)


def attend(
    row: Callable[..., np.ndarray], queries_keys: list, v_TE: np.ndarray, window: int | None = None
) -> np.ndarray:
    """Return Σ_s row(q_t·k_s / √d, …)_s v_s over t - window < s ≤ t.

    `row` takes the logits of each pair of queries and keys.
    """
    out_TE = np.zeros_like(v_TE)
    for t in range(len(v_TE)):
        seen = slice(0 if window is None else max(0, t - window + 1), t + 1)
        logits = [k_Td[seen] @ q_Td[t] / np.sqrt(q_Td.shape[1]) for q_Td, k_Td in queries_keys]
        out_TE[t] = row(*logits) @ v_TE[seen]
    return out_TE


def lambda_init(model: Any, depth: int) -> float:
    """Return λ_init of layer `depth` + 1, or of the layer at the same relative depth in the base model of µP."""
    depth *= (model.mup_base_layers or model.num_layers) / model.num_layers
    return 0.8 - 0.6 * np.exp(-0.3 * (depth - (model.architecture == "motif")))


def layer(w: dict[str, Any], model: Any, x_TD: np.ndarray, depth: int, *, v2_pairs: str = "neighbours") -> np.ndarray:
    """Return the update of one row by layer `depth` + 1, given the weights of its attention (`weights_of`).

    `v2_pairs` = "halves" pairs the heads of V2 wrongly.
    """
    x, H, K, name = np.asarray(x_TD, np.float64), model.num_heads, heads_of(model).kv_heads, model.architecture
    window = model.windows[depth % len(model.windows)]

    if name in ("diff", "gda", "motif", "signed_mask", "zero_branch"):
        return _two_keys(w, model, x, depth, window)

    def head(query: int, row: Callable[..., np.ndarray]) -> np.ndarray:
        kv = query * K // heads_of(model).query_heads
        q, k, v = (
            x @ w[f"{name}_{axes}"][:, index] + (w[f"{name}_bias"][index] if model.attention_bias else 0)
            for name, axes, index in (("query", "DHd", query), ("key", "DKd", kv), ("value", "DKd", kv))
        )
        return attend(row, [position_encoded(w, model, q, k, depth)], v, window)

    def subtracted(signal: int, noise: int, i: int) -> np.ndarray:
        lam_T1 = sigmoid(x @ w["lambda_DH"][:, i])[:, None]
        noise_TE = head(noise, softmax_row)
        return head(signal, softmax_row) - lam_T1 * noise_TE

    heads = []
    for i in range(H):
        if name == "diff_v2":
            heads.append(subtracted(*((2 * i, 2 * i + 1) if v2_pairs == "neighbours" else (i, H + i)), i))
        elif name == "gdla":  # The queries of a group: R signal heads, then the noise head.
            R = model.own.signal_heads
            heads.append(subtracted(i + i // R, (i // R) * (R + 1) + R, i))
        elif name in ("transformer", "gated"):
            heads.append(head(i, softmax_row))
        elif name == "dex":
            a = w["progress"]
            lam = (1 - a) * a * lambda_init(model, depth) + a * w["lambda_learned"]
            output = head(i, softmax_row)
            heads.append(output - lam * w["chosen_H"][i] * (output @ w["correction_de"]))
        elif name == "top_k":
            heads.append(head(i, lambda logits: top_k_row(logits, model.own.k)))
        else:
            sink = w["sink_H"][i] if name == "sink" else 0.0
            heads.append(head(i, lambda logits, sink=sink: sink_row(logits, sink)))
        if "gate_DHd" in w:
            heads[-1] = sigmoid(x @ w["gate_DHd"][:, i]) * heads[-1]
        heads[-1] = head_norm(heads[-1], i, w, model)
    gain = 1.0 if model.post_scale is None else model.post_scale
    return gain * np.concatenate(heads, axis=1) @ w["output_HdD"].reshape(-1, model.d_model)


def _two_keys(w, model, x, depth, window) -> np.ndarray:
    """Return the update by differential attention, a variant of it, or signed-mask attention."""
    H, K = model.num_heads, heads_of(model).kv_heads
    lam_init = lam = lambda_init(model, depth)
    if model.lambda_learned and model.architecture != "signed_mask":
        exponents = np.sum(w["lambda_query_Gd"] * w["lambda_key_Gd"], axis=-1)
        change = np.exp(exponents[0]) - np.exp(exponents[1])
        lam = change + lam_init
        if model.lambda_bound == "sigmoid":
            lam = 1 / (1 + (1 - lam_init) / lam_init * np.exp(-change))
        elif model.lambda_bound == "tanh":  # The addition theorem of tanh.
            lam = (np.tanh(change) + lam_init) / (1 + np.tanh(change) * lam_init)
    if is_zero_branch := model.architecture == "zero_branch":
        lam = w["progress"] * lam

    def row(logits1: np.ndarray, logits2: np.ndarray) -> np.ndarray:
        if model.architecture == "signed_mask":
            return softmax_row(logits1) * np.tanh(logits2)
        return softmax_row(logits1) - lam * softmax_row(logits2)

    heads = []
    for i in range(H):
        kv = i * K // H
        group, signal = divmod(
            i, getattr(model.own, "signal_heads", 1)
        )  # Queries of a group: signal heads, then the noise head.
        pairs = []
        for g, query in enumerate((signal, -1)):
            q_Td, k_Td = x @ w["query_DHGd"][:, group, query], x @ w["key_DKGd"][:, kv, g]
            if model.attention_bias:
                q_Td, k_Td = q_Td + w["query_bias"][group, query], k_Td + w["key_bias"][kv, g]
            pairs.append(position_encoded(w, model, q_Td, k_Td, depth))
        v_TE = x @ w["value_DKE"][:, kv] + (w["value_bias"][kv] if model.attention_bias else 0)
        head = attend(row, pairs, v_TE, window)
        heads.append(head if is_zero_branch else (1 - lam_init) * head_norm(head, i, w, model))
    return np.concatenate(heads, axis=1) @ w["output_HED"].reshape(-1, model.d_model)
