"""The train state, and the pure function that computes the next one."""
# Axes: B = batch, T = tokens, A = microbatches per update.

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import P
from jax.typing import ArrayLike

from difftx.config import Config
from difftx.data.loader import Batch
from difftx.model.abstract import one_abstract_device, vector_mask
from difftx.model.attention import LARGEST_LOGITS
from difftx.model.decoder import Decoder
from difftx.model.lora import LORA
from difftx.parallel.layout import BATCH, Layout
from difftx.training.loss import batch_loss
from difftx.training.optimizer import learning_rate, make_optimizer, updates_made
from difftx.training.qk_clip import clipped
from difftx.training.trainable import join, new_adapters, split, with_adapters

Metrics = dict[str, Any]  # Name → scalar, or array with one number per layer.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The values that an update changes."""

    step: jax.Array  # Number of steps so far, including skipped updates, int32.
    params: Any  # Nested dictionaries of float32 arrays. The keys are attribute names of the model.
    opt_state: Any
    ema: Any = None  # Exponential moving average of `params`. None without `train.ema_decay`.

    def parts(self) -> dict[str, Any]:
        """Return the fields as a dictionary. Leave out the average if there is none."""
        return {name: part for name, part in vars(self).items() if part is not None}


def graph(config: Config, layout: Layout | None = None) -> nnx.GraphDef:
    """Return the static part of the model, to be merged with parameters by `nnx.merge`.

    The default layout is the one for training.
    """
    layout = layout or Layout.of(config.mesh.context_method)
    return nnx.graphdef(nnx.eval_shape(lambda: Decoder(config.model, layout, rngs=nnx.Rngs(0))))


def init_params(config: Config, seed: ArrayLike | None = None) -> Any:
    """Return the parameters before the first update. Under jit, all arrays are created with their sharding.

    `seed` is a random seed, uint32, by default `train.seed`.
    """
    key = jax.random.key(config.train.seed if seed is None else seed)
    return nnx.to_pure_dict(nnx.state(Decoder(config.model, rngs=nnx.Rngs(key))))


def init_trained(config: Config, seed: ArrayLike | None = None) -> Any:
    """Return the parameters of `init_params`, plus adapters if `train.lora_rank` is set."""
    params = init_params(config, seed)
    if (rank := config.train.lora_rank) is None:
        return params
    key = jax.random.key(config.train.seed if seed is None else seed)
    return params | {LORA: new_adapters(config.model, params, rank, jax.random.fold_in(key, rank))}


def init_state(config: Config, seed: ArrayLike | None = None) -> TrainState:
    """Return the state before the first update, with the parameters of `init_trained`."""
    params = init_trained(config, seed)
    moments = make_optimizer(config).init(split(config, params)[0])
    ema = None if config.train.ema_decay is None else jax.tree.map(jnp.zeros_like, params)
    return TrainState(jnp.zeros((), jnp.int32), params, moments, ema)


def jit_init[T](init: Callable[[Config, ArrayLike], T], config: Config) -> T:
    """Compile `init_params` or `init_state`, and call it with the config's seed.

    The seed is an argument of the compiled function, so the compilation cache also serves runs with other seeds.
    """
    return jax.jit(lambda seed: init(config, seed))(np.uint32(config.train.seed))


def state_bytes(config: Config) -> int:
    """Return the size of the train state in bytes: parameters, their average, and optimizer state."""
    with one_abstract_device():
        state = jax.eval_shape(lambda: init_state(config))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def make_train_step(config: Config, teacher: Config | None = None) -> Callable[..., tuple[TrainState, Metrics]]:
    """Return the pure function `step(state, batch) -> (state, metrics)`. Jit it with the state donated.

    With the config of a teacher, the function is `step(state, batch, teacher_params)`, and adds the metric
    "teacher_kl".

    The loss is the mean over the unmasked tokens of all microbatches. Sums are divided once at the end, so that tokens
    have equal weights even if microbatches have different numbers of unmasked tokens. If the loss or the norm of the
    gradient is not finite, the update is skipped: parameters, their average and optimizer state do not change. A batch
    without unmasked tokens has a loss of NaN. The gradient includes the z-loss, but the metric "loss" does not.
    """
    graphdef, optimizer, schedule = graph(config), make_optimizer(config), learning_rate(config)

    teacher_graph = None if teacher is None else graph(teacher, Layout.of(config.mesh.context_method))

    def sums_and_grad(params: Any, batch: Batch, teacher_params: Any, watch: bool | jax.Array):
        """Return the sums of NLL, z-loss and (with a teacher) KL, the layers' statistics, and the gradient."""
        train, frozen = split(config, params)

        def loss_of(train: Any):
            model, c = nnx.merge(graphdef, with_adapters(join(train, frozen), config.train)), config.train
            of_teacher: Any = ()
            if teacher_graph is not None:
                of_teacher = nnx.merge(teacher_graph, teacher_params), c.distill_weight, c.distill_temperature
            loss, sums, stats = batch_loss(model, batch, c.z_loss, watch, *of_teacher)
            return loss, (sums, stats)

        grads, (sums, stats) = jax.grad(loss_of, has_aux=True)(train)
        return sums, stats, grads

    def step(state: TrainState, batch: Batch, teacher_params: Any = None) -> tuple[TrainState, Metrics]:
        params, (before, frozen) = _cast_layers(config, state.params), split(config, state.params)
        limit = config.optimizer.qk_clip
        watch = limit is not None or config.logging.watches(state.step + 1)
        if config.train.accumulation == 1:
            sums, stats, grads = sums_and_grad(params, batch, teacher_params, watch)
        else:

            def add(total: Any, microbatch: Batch):
                sums, stats, grads = sums_and_grad(params, microbatch, teacher_params, watch)
                return jax.tree.map(lambda total, x: total + x.astype(total.dtype), total, (sums, grads)), stats

            zero = ((jnp.zeros(()),) * (2 if teacher is None else 3), jax.tree.map(jnp.zeros_like, before))
            microbatches = split_microbatches(batch, config.train.accumulation)
            (sums, grads), stats = jax.lax.scan(add, zero, microbatches)
            reduced = {name: jnp.max if name == LARGEST_LOGITS else jnp.mean for name in stats}
            stats = {name: reduced[name](s, axis=0) for name, s in stats.items()}
        (nll, z_loss, *kl), tokens = sums, jnp.sum(batch.loss_mask_BT)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / jnp.maximum(tokens, 1.0), grads)
        loss, grad_norm = nll / tokens, optax.tree.norm(grads)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        # optax needs implicit dtype promotion.
        with jax.named_scope("optimizer"), jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update(grads, state.opt_state, before)
            params, ema = optax.apply_updates(before, updates), None
            if limit is not None:
                params = clipped(config.model, params, stats[LARGEST_LOGITS], limit)
            if (decay := config.train.ema_decay) is not None:
                ema = updated_average(state.ema, join(params, frozen), decay, updates_made(opt_state))
            params, opt_state, ema = jax.tree.map(
                lambda new, old: jnp.where(finite, new, old),
                (params, opt_state, ema),
                (before, state.opt_state, state.ema),
            )
        metrics = {
            "loss": loss,
            "grad_norm": grad_norm,
            "learning_rate": schedule(updates_made(state.opt_state)),
            "skipped": 1 - finite.astype(jnp.int32),
            **stats,
        }
        if limit is not None:
            metrics["clipped_heads"] = jnp.sum(stats[LARGEST_LOGITS] > limit)
        if config.train.z_loss:
            metrics["z_loss"] = z_loss / tokens
        if kl:
            metrics["teacher_kl"] = kl[0] / tokens
        return TrainState(state.step + 1, join(params, frozen), opt_state, ema), metrics

    return step


def _cast_layers(config: Config, params: Any) -> Any:
    """Cast the matrices of the layers to the compute dtype.

    Layers cast them anyway, so no result changes. The stacked gradients of all layers then also have this dtype, which
    takes half the memory of float32.
    """
    dtype, mask = config.model.compute_dtype, vector_mask(config.model)["blocks"]
    cast = {"blocks": jax.tree.map(lambda x, is_vector: x if is_vector else x.astype(dtype), params["blocks"], mask)}
    if LORA in params:
        cast[LORA] = jax.tree.map(lambda x: x.astype(dtype), params[LORA])
    return params | cast


def updated_average(average: Any, params: Any, decay: float, updates: jax.Array) -> Any:
    """Return Σ_k decay^(t-k) p_k / Σ_k decay^(t-k) over the parameters p_k after the updates k = 1, …, t.

    `average` is this average after t - 1 updates, `params` is p_t, and `updates` is t. The weights of the p_k add up to
    1 from the first update on, so the initial parameters are not part of the average.
    """
    share = (1 - decay) / -jnp.expm1(updates * math.log(decay))  # Weight of p_t: 1 / (1 + decay + … + decay^(t-1)).
    return jax.tree.map(lambda mean, new: mean + share * (new - mean), average, params)


def split_microbatches(batch: Batch, count: int) -> Batch:
    """Return the batch as `[A, B / A, T]`. Row i goes to microbatch i mod A, so each row stays on its device."""

    def split(x_BT: jax.Array) -> jax.Array:
        rows = x_BT.shape[0] // count
        x_BAT = x_BT.reshape(rows, count, *x_BT.shape[1:], out_sharding=P(BATCH, None, "context"))
        return jnp.moveaxis(x_BAT, 1, 0)

    return jax.tree.map(split, batch)
