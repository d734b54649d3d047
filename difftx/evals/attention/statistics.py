"""The measures of the suite `attention`, computed on the device from the weights of one query (docs/suites.md)."""
# Axes of arrays: B = prompts, C = queries, H = heads, G = 2 groups (A1, A2), S = tokens, N = bins of tokens

import jax
import jax.numpy as jnp

from difftx.kernels.rows import AttentionRows

# Parts of a prompt. `part_BS` has indices into this tuple. Sums over a part exclude position 0.
PARTS = ("answer", "others", "noise", "question")
FIRST = "first"  # Name of position 0 in results.
UNSEEN = -1  # Marks a token in `part_BS` that the query cannot see.
GROUPS = ("a1", "a2")  # Names of A1 and A2 in results.


def row_statistics(
    rows: AttentionRows, part_BS: jax.Array, *, l0_share: float, compared: tuple[str, ...]
) -> dict[str, jax.Array]:
    """Return measures of one query's attention weights per prompt, averaged over heads: name → float32 `[B]`.

    `part_BS` has indices into `PARTS`, or UNSEEN. The measure `l0` counts the weights above `l0_share` of the sum of
    magnitudes. If the weights are A1 - λ A2, there are also measures of A1, A2 and λ. A1 and A2 are compared within
    each part in `compared`, and every prompt must have all of these parts.
    """
    is_first_1S = jnp.arange(part_BS.shape[1])[None] == 0
    in_part = {name: part_BS == number for number, name in enumerate(PARTS)}
    seen_BS = part_BS != UNSEEN
    row_BHS = rows.weights_BCHS[:, 0]
    statistics = {}
    for suffix, x_BHS in (("", _share(row_BHS)), ("_signed", row_BHS)):
        for name, inside_BS in in_part.items():
            statistics[name + suffix] = _sum(x_BHS, inside_BS & ~is_first_1S)
        statistics[FIRST + suffix] = x_BHS[..., 0]
    statistics |= _sparsity(_share(row_BHS), seen_BS, l0_share)
    if rows.lam_BCH is not None:
        statistics["lambda"] = rows.lam_BCH[:, 0]
        logits_BHGS = rows.logits_BCHGS[:, 0]
        for group, name in enumerate(GROUPS):
            softmax_BHS = jax.nn.softmax(logits_BHGS[:, :, group], axis=-1)
            of_group = {FIRST: softmax_BHS[..., 0], **_sparsity(softmax_BHS, seen_BS, l0_share)}
            statistics |= {f"{measure}_{name}": value for measure, value in of_group.items()}
        for name in compared:
            for suffix, inside_BS in (("", in_part[name] & ~is_first_1S), ("_with_first", in_part[name])):
                cosine_BH, kl_BH = _similarity(logits_BHGS, inside_BS)
                statistics |= {f"cosine_{name}{suffix}": cosine_BH, f"kl_{name}{suffix}": kl_BH}
    return {name: jnp.mean(value_BH, axis=1) for name, value_BH in statistics.items()}


def row_pictures(rows: AttentionRows, *, tokens_per_bin: int) -> dict[str, jax.Array]:
    """Return the attention weights to draw, averaged over heads and summed over bins: name → float32 `[B, C, N]`."""
    weights = {"share": _share(rows.weights_BCHS), "map": rows.weights_BCHS}
    if rows.lam_BCH is not None:
        softmax_BCHGS = jax.nn.softmax(rows.logits_BCHGS, axis=-1)
        weights |= {name: softmax_BCHGS[:, :, :, group] for group, name in enumerate(GROUPS)}

    def binned(x_BCHS: jax.Array) -> jax.Array:
        x_BCS = jnp.mean(x_BCHS, axis=2)
        B, C, S = x_BCS.shape
        padded = jnp.pad(x_BCS, [(0, 0), (0, 0), (0, -S % tokens_per_bin)])
        return jnp.sum(padded.reshape(B, C, -1, tokens_per_bin), axis=-1)

    return {name: binned(x_BCHS) for name, x_BCHS in weights.items()}


def _share(row_BHS: jax.Array) -> jax.Array:
    size_BHS = jnp.abs(row_BHS)
    return size_BHS / jnp.sum(size_BHS, axis=-1, keepdims=True)


def _sum(x_BHS: jax.Array, where_BS: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(where_BS[:, None], x_BHS, 0), axis=-1)


def _sparsity(w_BHS: jax.Array, seen_BS: jax.Array, l0_share: float) -> dict[str, jax.Array]:
    n_B1 = jnp.sum(seen_BS, axis=1, dtype=jnp.float32)[:, None]
    # Gini: Σ_i (2 i - n - 1) w_(i) / n, with w sorted in ascending order and i from 1. Unseen tokens have weight 0, so
    # they come first and add nothing.
    rank_BS = jnp.arange(1, w_BHS.shape[-1] + 1)[None] - (w_BHS.shape[-1] - n_B1)
    gini_BH = jnp.sum((2 * rank_BS - n_B1 - 1)[:, None] * jnp.sort(w_BHS, axis=-1), axis=-1) / n_B1
    entropy_BH = -jnp.sum(jax.scipy.special.xlogy(w_BHS, w_BHS), axis=-1)
    return {"gini": gini_BH, "entropy": entropy_BH, "l0": _sum(w_BHS > l0_share, seen_BS) / n_B1}


def _similarity(logits_BHGS: jax.Array, inside_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Normalise A1 and A2 over the tokens in `inside_BS`. Return their cosine and KL(A1 ‖ A2), each `[B, H]`."""
    log_p_BHGS = jax.nn.log_softmax(jnp.where(inside_BS[:, None, None], logits_BHGS, -jnp.inf), axis=-1)
    p1_BHS, p2_BHS = jnp.exp(log_p_BHGS[:, :, 0]), jnp.exp(log_p_BHGS[:, :, 1])
    norms_BH = jnp.sqrt(jnp.sum(p1_BHS**2, axis=-1) * jnp.sum(p2_BHS**2, axis=-1))
    kl_BHS = p1_BHS * (log_p_BHGS[:, :, 0] - log_p_BHGS[:, :, 1])
    return jnp.sum(p1_BHS * p2_BHS, axis=-1) / norms_BH, _sum(kl_BHS, inside_BS)
