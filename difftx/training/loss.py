"""Negative log-likelihood (NLL) of the next token and z-loss, with the vocabulary sharded across devices.

Logits are computed for one chunk of tokens at a time: for a row of 64K tokens and a vocabulary of 100,288, all logits
would take 26 GB in float32. When the loss is differentiated, the forward pass also computes the gradient of each chunk,
so the backward pass neither needs stored logits nor computes them again.
"""
# Axes: B = batch, T = tokens, D = model width, V = vocabulary, N = all tokens on one device, C = tokens of a chunk.

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from difftx.data.loader import Batch
from difftx.kernels import target
from difftx.model.decoder import Decoder
from difftx.model.layers import soft_cap
from difftx.parallel.layout import Layout

# Logits per chunk and device: 256 MiB in float32, or 2 GiB on devices with much memory. Each chunk reads and writes the
# float32 gradient of the table. For chunks with few tokens, this takes longer than the matrix products.
CHUNK_LOGITS, LARGE_CHUNK_LOGITS = 2**26, 2**29
CHUNK_MULTIPLE = 256  # In tokens. If it is not a multiple of the tile size, GPUs and TPUs waste part of the last tile.


@dataclasses.dataclass(frozen=True)
class Distillation:
    """The loss (1 - weight) NLL + weight t² KL(teacher ‖ model) at a temperature t (arXiv 1503.02531)."""

    weight: float
    temperature: float
    logit_soft_cap: float | None  # Soft cap on the teacher's logits.


def batch_loss(
    model: Decoder,
    batch: Batch,
    z_loss: float = 0.0,
    watch: bool | jax.Array = False,
    teacher: Decoder | None = None,
    weight: float = 0.0,
    temperature: float = 1.0,
) -> tuple[jax.Array, tuple[jax.Array, ...], dict[str, jax.Array]]:
    """Return the results of `weighted_loss` for the unmasked targets, and statistics per layer.

    `watch` is passed to `Decoder.hidden`. `weight` and `temperature` are the fields of `Distillation`.
    """
    of_teacher, distillation = (), None
    if teacher is not None:
        with jax.named_scope("teacher"):
            of_teacher = _hidden(teacher, batch)[0], teacher.unembedding()
        distillation = Distillation(weight, temperature, teacher.config.logit_soft_cap)
    x_BTD, stats = _hidden(model, batch, watch)
    inputs, cap = (x_BTD, model.unembedding(), batch.targets_BT, batch.loss_mask_BT), model.config.logit_soft_cap
    with jax.named_scope("loss"):
        return *weighted_loss(*inputs, cap, z_loss, of_teacher, distillation), stats


def _hidden(model: Decoder, batch: Batch, watch: bool | jax.Array = False) -> tuple[jax.Array, dict[str, jax.Array]]:
    rows = {"positions_BT": batch.positions_BT, "segment_ids_BT": batch.segment_ids_BT}
    return model.hidden(batch.tokens_BT, **rows, watch=watch)


def token_scores(
    x_BTD: jax.Array, table_VD: jax.Array, targets_BT: jax.Array, *, logit_soft_cap: float | None
) -> tuple[jax.Array, jax.Array]:
    """Return -log p(target) in nats, float32 `[B, T]`, and whether no other token is more likely, bool `[B, T]`.

    `x_BTD` is the last hidden state, and `table_VD` is the unembedding.
    """
    nll_BT, _, is_largest_BT = _scores(x_BTD, table_VD, targets_BT, logit_soft_cap)
    return nll_BT, is_largest_BT


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 7))
def weighted_loss(
    x_BTD: jax.Array,
    table_VD: jax.Array,
    targets_BT: jax.Array,
    weight_BT: jax.Array,
    logit_soft_cap: float | None,
    z_loss: float,
    teacher: tuple[jax.Array, ...] = (),
    distillation: Distillation | None = None,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Return the weighted sum of the loss over all tokens, and its parts: the sums of NLL and of z-loss, in nats.

    The z-loss of a target is `z_loss` · log² Z, where Z is the denominator of the softmax (PaLM, arXiv 2204.02311).
    `teacher` is the last hidden state and the unembedding of a teacher. With a teacher, the loss of `Distillation`
    replaces the NLL, and the parts include the sum of the KL divergence. The parts have no gradient, nor has the
    teacher.
    """
    rest = logit_soft_cap, z_loss, teacher, distillation
    if distillation is not None:
        return _weighted_loss_forward(x_BTD, table_VD, targets_BT, weight_BT, *rest)[0]
    nll_BT, log_z_BT, _ = _scores(x_BTD, table_VD, targets_BT, logit_soft_cap)
    return _sums(weight_BT, z_loss, None, nll_BT, log_z_BT)[1]


def _weighted_loss_forward(
    x_BTD, table_VD, targets_BT, weight_BT, logit_soft_cap, z_loss, teacher, distillation
) -> tuple[Any, Any]:
    layout = Layout()
    of_model = (layout.act_BTD, layout.embedding_VD)
    in_specs = (*of_model, layout.act_BT, layout.act_BT, *(of_model if teacher else ()))
    out_specs = (*[layout.act_BT] * (3 if teacher else 2), *of_model)
    options = {"logit_soft_cap": logit_soft_cap, "z_loss": z_loss, "distillation": distillation}
    local = functools.partial(_loss_and_gradients, **options)
    call = jax.shard_map(local, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    *scores_BT, dx_BTD, dtable_VD = call(x_BTD, table_VD, targets_BT, weight_BT, *teacher)
    dweight_BT, sums = _sums(weight_BT, z_loss, distillation, *scores_BT)
    return sums, (dx_BTD, dtable_VD, dweight_BT)


def _weighted_loss_backward(logit_soft_cap, z_loss, distillation, residuals, dsums):
    dx_BTD, dtable_VD, dweight_BT = residuals
    dloss, _ = dsums
    no_grad = np.zeros(dweight_BT.shape, jax.dtypes.float0)
    dx_scaled_BTD = (dx_BTD.astype(jnp.float32) * dloss).astype(dx_BTD.dtype)
    return dx_scaled_BTD, dtable_VD * dloss, no_grad, dweight_BT * dloss, None


weighted_loss.defvjp(_weighted_loss_forward, _weighted_loss_backward)


def _sums(weight_BT, z_loss, distillation: Distillation | None, nll_BT, log_z_BT, *kl_BT) -> tuple[Any, Any]:
    """Return the loss of each token, `[B, T]`, and the results of `weighted_loss`."""

    def loss(nll, log_z_squared, *kl):
        of_z = z_loss * log_z_squared if z_loss else jnp.zeros_like(nll)
        if distillation is None:
            return nll + of_z, (nll, of_z)
        w = distillation.weight
        return (1 - w) * nll + of_z + w * distillation.temperature**2 * kl[0], (nll, of_z, *kl)

    parts_BT = nll_BT, log_z_BT**2, *kl_BT
    return loss(*parts_BT)[0], loss(*(jnp.sum(x_BT * weight_BT) for x_BT in parts_BT))


def _scores(x_BTD, table_VD, targets_BT, logit_soft_cap):
    """Return NLL, log Z, and whether no other token is more likely than the target, each `[B, T]`."""

    def on_one_device(x_BTD, table_VD, targets_BT):
        table_VD = _whole_rows(table_VD, x_BTD.dtype)

        def chunk(arrays):
            logits_CV, log_z_C, target_C, _ = _logits(arrays["x"], table_VD, arrays["target"], logit_soft_cap)
            return log_z_C - target_C, log_z_C, target_C >= jax.lax.pmax(jnp.max(logits_CV, axis=-1), "tensor")

        found = jax.lax.map(chunk, _chunks(table_VD, x=x_BTD, target=targets_BT))
        return tuple(_joined(x, targets_BT.shape) for x in found)

    layout = Layout()
    in_specs = (layout.act_BTD, layout.embedding_VD, layout.act_BT)
    # check_vma is off, here and in the forward pass, because nothing differentiates through the collectives.
    call = jax.shard_map(on_one_device, in_specs=in_specs, out_specs=layout.act_BT, check_vma=False)
    return call(x_BTD, table_VD, targets_BT)


def _loss_and_gradients(
    x_BTD, table_VD, targets_BT, weight_BT, *teacher, logit_soft_cap, z_loss, distillation: Distillation | None = None
):
    """Return NLL and log Z of one device's tokens, and the gradients of its hidden states and its shard of the table.

    With a teacher's hidden state and unembedding, also return the KL divergence, after log Z.
    """
    table_VD = _whole_rows(table_VD, x_BTD.dtype)
    arrays_BT = {"x": x_BTD, "target": targets_BT, "weight": weight_BT}
    if distillation is not None:
        arrays_BT["teacher"], teacher_VD = teacher[0], _whole_rows(teacher[1], teacher[0].dtype)

    def chunk(dtable_VD, arrays):
        logits_CV, log_z_C, target_C, is_target_CV = _logits(arrays["x"], table_VD, arrays["target"], logit_soft_cap)
        p_CV = jnp.exp(logits_CV - log_z_C[:, None])
        kl, change_CV = (), None
        if distillation is not None:
            w, t = distillation.weight, distillation.temperature
            kl_C, excess_CV = _divergence(logits_CV, arrays["teacher"], teacher_VD, distillation)
            kl, change_CV = (kl_C,), w * (t * excess_CV - (p_CV - is_target_CV.astype(p_CV.dtype)))
        if z_loss:  # The derivative of log² Z is 2 log Z p.
            p_CV *= (1 + 2 * z_loss * log_z_C)[:, None]
        dlogits_CV = p_CV - is_target_CV.astype(p_CV.dtype)
        if change_CV is not None:
            dlogits_CV += change_CV
        dlogits_CV *= arrays["weight"][:, None]
        if logit_soft_cap is not None:  # The derivative of c tanh(z / c) is 1 - tanh²(z / c).
            dlogits_CV *= 1 - (logits_CV / logit_soft_cap) ** 2
        dlogits_CV = dlogits_CV.astype(table_VD.dtype)
        dx_CD = jnp.einsum("CV,VD->CD", dlogits_CV, table_VD, preferred_element_type=jnp.float32)
        dtable_VD += jnp.einsum("CV,CD->VD", dlogits_CV, arrays["x"], preferred_element_type=jnp.float32)
        return dtable_VD, (log_z_C - target_C, log_z_C, *kl, jax.lax.psum(dx_CD, "tensor").astype(x_BTD.dtype))

    all_chunks = _chunks(table_VD, **arrays_BT)
    dtable_VD, (*scores, dx) = jax.lax.scan(chunk, jnp.zeros(table_VD.shape, jnp.float32), all_chunks)
    dtable_VD = jax.lax.psum_scatter(dtable_VD, "fsdp", scatter_dimension=1, tiled=True)
    dtable_VD = jax.lax.psum(dtable_VD, ("data", "context"))
    return *(_joined(x, targets_BT.shape) for x in scores), _joined(dx, x_BTD.shape), dtable_VD


def _divergence(logits_CV, teacher_CD, teacher_VD, distillation: Distillation):
    """Return KL(teacher ‖ model) of each token, and the model's probabilities minus the teacher's."""
    teacher_CV = jnp.einsum("CD,VD->CV", teacher_CD, teacher_VD, preferred_element_type=jnp.float32)

    def log_softmax(logits_CV):
        logits_CV = logits_CV / distillation.temperature
        shifted_CV = logits_CV - jax.lax.pmax(jnp.max(logits_CV, axis=-1), "tensor")[:, None]
        return shifted_CV - jnp.log(jax.lax.psum(jnp.sum(jnp.exp(shifted_CV), axis=-1), "tensor"))[:, None]

    log_q_CV, log_p_CV = log_softmax(logits_CV), log_softmax(soft_cap(teacher_CV, distillation.logit_soft_cap))
    p_CV = jnp.exp(log_p_CV)
    return jax.lax.psum(jnp.sum(p_CV * (log_p_CV - log_q_CV), axis=-1), "tensor"), jnp.exp(log_q_CV) - p_CV


def _whole_rows(table_VD: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Gather the full width D of this device's table rows, which is sharded along `fsdp`."""
    return jax.lax.all_gather(table_VD.astype(dtype), "fsdp", axis=1, tiled=True)


def _logits(x_CD: jax.Array, table_VD: jax.Array, target_C: jax.Array, logit_soft_cap: float | None):
    """Return this device's logits, the log-sum-exp over the whole vocabulary, the target logits and the target mask."""
    logits_CV = soft_cap(jnp.einsum("CD,VD->CV", x_CD, table_VD, preferred_element_type=jnp.float32), logit_soft_cap)
    first = jax.lax.axis_index("tensor") * table_VD.shape[0]
    is_target_CV = first + jnp.arange(table_VD.shape[0])[None] == target_C[:, None]
    # Only one device has the target's row. So sum the masked logits over all devices to get the target's logit. Compute
    # this sum in the same reduction as the maximum, to read the logits only once.
    largest_C, target_logit_C = jax.lax.reduce(
        (logits_CV, jnp.where(is_target_CV, logits_CV, 0)),
        (jnp.float32(-jnp.inf), jnp.float32(0)),
        lambda a, b: (jnp.maximum(a[0], b[0]), a[1] + b[1]),
        dimensions=(1,),
    )
    largest_C, target_logit_C = jax.lax.pmax(largest_C, "tensor"), jax.lax.psum(target_logit_C, "tensor")
    sum_C = jax.lax.psum(jnp.sum(jnp.exp(logits_CV - largest_C[:, None]), axis=-1), "tensor")
    return logits_CV, largest_C + jnp.log(sum_C), target_logit_C, is_target_CV


def _chunks(table_VD: jax.Array, **arrays_BT: jax.Array) -> dict[str, jax.Array]:
    """Split `[B, T, …]` into chunks `[chunks, C, …]`, and pad the last chunk with zeros."""
    N = arrays_BT["target"].size
    limit = LARGE_CHUNK_LOGITS if target.has_large_memory() else CHUNK_LOGITS
    count = -(-N * table_VD.shape[0] // limit)
    size = -(-N // count)
    if count > 1 and size > CHUNK_MULTIPLE:
        size += -size % CHUNK_MULTIPLE
        count = -(-N // size)

    def split(x_BT: jax.Array) -> jax.Array:
        x_N = x_BT.reshape(N, *x_BT.shape[2:])
        padded = jnp.pad(x_N, [(0, count * size - N)] + [(0, 0)] * (x_N.ndim - 1))
        return padded.reshape(count, size, *x_N.shape[1:])

    return {name: split(x_BT) for name, x_BT in arrays_BT.items()}


def _joined(x_chunks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Join chunks `[chunks, C, …]` to `shape`, and drop the padding of the last chunk."""
    x_N = x_chunks.reshape(-1, *x_chunks.shape[2:])
    return x_N[: shape[0] * shape[1]].reshape(shape)
