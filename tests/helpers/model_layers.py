"""Decoders, layers and batches with random numbers."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from conftest import ROOT, TINY
from flax import nnx
from model import oracle

from difftx.config import ModelConfig
from difftx.config.recipes import load_config
from difftx.data.loader import Batch
from difftx.model.architectures import ARCHITECTURES
from difftx.model.attention import SelfAttention, layer_constants
from difftx.model.decoder import Decoder
from difftx.model.layers import rotary_angles
from difftx.parallel.layout import Layout

QUICKSTART = f"{ROOT}/configs/quickstart.py"
# Options that every architecture has, in a model of two layers with a window and one without.
WINDOWS = {"model__num_layers": 3, "model__window": 5, "model__window_pattern": "LLG"}
# In a head of width 8, this divides two of the four frequencies, interpolates one and leaves one.
SCALING = {"factor": 4, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 100}
OPTIONS = (
    WINDOWS
    | {"model__qk_norm": "true", "model__logit_soft_cap": 2.0, "model__attention_bias": "true"}
    | {f"model__rope_scaling__{name}": value for name, value in SCALING.items()}
)
# A base model of a quarter of the tiny model's width, and half of its layers.
MUP = {"model__head_dim": 8, "model__mup_base_width": 8, "model__mup_base_layers": 1, "model__mup_base_head_dim": 8}
TOKENS = 18
X_BTD = np.random.default_rng(3).normal(size=(2, TOKENS, 32)).astype(np.float32)


def parameters_of(config):
    return jax.jit(lambda: nnx.to_pure_dict(nnx.state(Decoder(config.model, rngs=nnx.Rngs(0)))))()


def batch_on(mesh, config, rows=8, seed=0):
    rng = np.random.default_rng(seed)
    shape = (rows, config.data.sequence_length)
    sharding = jax.NamedSharding(mesh, Layout().act_BT)
    tokens, targets = (rng.integers(0, 257, shape).astype(np.int32) for _ in range(2))
    mask = (rng.random(shape) < 0.7).astype(np.float32)

    def put(x):
        return jax.device_put(x, sharding)

    return Batch(tokens_BT=put(tokens), targets_BT=put(targets), loss_mask_BT=put(mask))


class Gradients(NamedTuple):
    """Gradients of Σ weights ∘ output, and of each token's output sum in the first row."""

    by_state: Any
    by_x_BTD: np.ndarray
    jacobian_TTD: np.ndarray


class Layer(NamedTuple):
    """A layer with random weights."""

    model: ModelConfig
    module: SelfAttention
    call: Callable[..., np.ndarray]
    gradient: Callable[..., Gradients]


@functools.cache
def layer_of(name, **overrides):
    changes = {key.replace("__", "."): str(value) for key, value in (oracle.SIZES.get(name, {}) | overrides).items()}
    model = load_config(f"{QUICKSTART}:{name}", TINY | changes).model
    shapes = nnx.eval_shape(lambda: ARCHITECTURES[model.architecture](model, Layout(), rngs=nnx.Rngs(0)))
    graphdef, shapes = nnx.split(shapes)
    rng = np.random.default_rng(0)

    def draw(p):
        return jnp.asarray(rng.normal(scale=0.4, size=p.shape), p.dtype)

    module = nnx.merge(graphdef, jax.tree.map(draw, shapes))

    def update(state, x_BTD, layer, ids_BT):
        """Return the layer's output `[B, T, D]`."""
        angles = rotary_angles(jnp.arange(TOKENS)[None], model)
        constants = jax.tree.map(lambda a: a[layer], layer_constants(model))
        constants = constants.of_layer(model, 0)  # Callers use layers with the first window.
        return nnx.merge(graphdef, state)(x_BTD, angles, constants, ids_BT)[0]

    forward = jax.jit(update)

    def call(x_BTD, layer=0, ids_BT=None, module=module):
        """Return outputs `[B, T, D]`."""
        ids_BT = np.zeros((2, TOKENS), np.int32) if ids_BT is None else ids_BT
        return np.asarray(forward(nnx.state(module), np.float32(x_BTD), np.int32(layer), ids_BT))

    @jax.jit
    def gradients(state, x_BTD, weights_BTD, layer):
        """Compile the backward pass once for all weighted sums of the outputs."""
        out_BTD, pullback = jax.vjp(lambda state, x_BTD: update(state, x_BTD, layer, None), state, x_BTD)
        of_token_TBTD = np.zeros((TOKENS, *x_BTD.shape), np.float32)
        of_token_TBTD[:, 0] = np.eye(TOKENS)[:, :, None]
        all_NBTD, spec = jnp.concatenate([weights_BTD[None], of_token_TBTD]), jax.typeof(out_BTD).sharding.spec
        by_state_N, by_x_NBTD = jax.lax.map(lambda g_BTD: pullback(jax.sharding.reshard(g_BTD, spec)), all_NBTD)
        return jax.tree.map(lambda x_N: x_N[0], by_state_N), by_x_NBTD[0], by_x_NBTD[1:, 0]

    def gradient(x_BTD, weights_BTD, layer):
        by_state, *of_x = gradients(nnx.state(module), x_BTD, np.float32(weights_BTD), np.int32(layer))
        return Gradients(nnx.to_pure_dict(by_state), *map(np.asarray, of_x))

    return Layer(model, module, call, gradient)
