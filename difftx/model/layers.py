"""RMSNorm, SwiGLU, rotary embedding and initialised parameters."""
# Axes: B = batch, T = tokens, D = model width, F = hidden width of the MLP, d = width of a (sub-)head

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import P
from jax.ad_checkpoint import checkpoint_name

from difftx.config import ModelConfig
from difftx.kernels import target
from difftx.model.architectures import heads_of
from difftx.model.lora import Adapted
from difftx.model.products import COMPUTE_DTYPE, PRECISIONS, PRODUCT, ROUNDED_WEIGHTS, product, rounded_weight
from difftx.parallel.layout import Layout


class RMSNorm(nnx.Module):
    """RMSNorm over the last axis (arXiv 1910.07467), computed in float32, with a learned gain."""

    def __init__(self, width: int, eps: float, layout: Layout):
        self.eps = eps
        self.scale = vector(jnp.ones((width,), jnp.float32, out_sharding=layout.vector))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise `x`. The result has the dtype of `x`."""
        return _scaled(normalized(x, self.eps), self.scale[...])


class HeadNorm(nnx.Module):
    """The norm of each head's output, or the learned factor in its place, that `model.head_norm` selects."""

    def __init__(self, config: ModelConfig, width: int, layout: Layout):
        self.eps, self.kind = config.head_norm_eps, config.head_norm
        initial = {
            "rms_affine": jnp.ones((width,), jnp.float32, out_sharding=layout.vector),
            "scalar": jnp.ones((), jnp.float32, out_sharding=layout.vector),
            "sigmoid": jnp.zeros((config.num_heads, 1), jnp.float32, out_sharding=layout.vector),
        }
        if self.kind in initial:
            self.scale = vector(initial[self.kind])

    def __call__(self, heads_BTHE: jax.Array) -> jax.Array:
        """Normalise or scale the heads' outputs. The dtype stays the same."""
        if self.kind in ("rms", "rms_affine"):
            heads_BTHE = normalized(heads_BTHE, self.eps)
        if not hasattr(self, "scale"):
            return heads_BTHE
        scale = self.scale[...]
        return _scaled(heads_BTHE, jax.nn.sigmoid(scale) if self.kind == "sigmoid" else scale)


def normalized(x: jax.Array, eps: float) -> jax.Array:
    """Divide `x` by its root mean square over the last axis. Compute in float32 and return the dtype of `x`."""
    x_f32 = x.astype(jnp.float32)
    return (x_f32 * jax.lax.rsqrt(jnp.mean(x_f32**2, axis=-1, keepdims=True) + eps)).astype(x.dtype)


def _scaled(x: jax.Array, gain: jax.Array) -> jax.Array:
    return x * jnp.expand_dims(gain.astype(x.dtype), tuple(range(x.ndim - gain.ndim)))


class SwiGLU(nnx.Module):
    """The MLP (silu(x W_gate) ∘ x W_up) W_down, Eq. 5 of arXiv 2410.05258."""

    def __init__(self, config: ModelConfig, layout: Layout, *, rngs: nnx.Rngs):
        self.layout = layout
        D, F = config.d_model, config.mlp_dim
        self.gate_DF = projection(config, (D, F), 1, layout.mlp_in_DF, rngs=rngs)
        self.up_DF = projection(config, (D, F), 1, layout.mlp_in_DF, rngs=rngs)
        self.down_FD = projection(config, (F, D), 1, layout.mlp_out_FD, rngs=rngs, output=True)

    @classmethod
    def tensors(cls) -> dict[str, tuple[str, str, str]]:
        """Return the exported weights in the format of `SelfAttention.tensors`."""
        return {
            "gate_proj.weight": ("F D", "gate_DF", "D F"),
            "up_proj.weight": ("F D", "up_DF", "D F"),
            "down_proj.weight": ("D F", "down_FD", "F D"),
        }

    def activation(self, gate_BTF: jax.Array) -> jax.Array:
        """Apply the activation function to `x W_gate`. The result is multiplied by `x W_up`."""
        return jax.nn.silu(gate_BTF)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        gate_BTF = linear("BTD,DF->BTF", x_BTD, self.gate_DF, self.layout.act_BTF)
        up_BTF = linear("BTD,DF->BTF", x_BTD, self.up_DF, self.layout.act_BTF)
        return linear("BTF,FD->BTD", self.activation(gate_BTF) * up_BTF, self.down_FD, self.layout.act_BTD)


# A function that is called for each product with a weight while JAX traces a layer. It receives the subscripts, the
# input, the weight and the sharding. It returns the largest magnitude of the input, from which `multiply` computes a
# static scale, or None to compute one scale per row.
type Observer = Callable[[str, jax.Array, jax.Array, P], jax.Array | None]
_OBSERVER: contextvars.ContextVar[Observer | None] = contextvars.ContextVar("observer", default=None)


@contextlib.contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Call `observer` for each product with a weight that JAX traces in this context."""
    token = _OBSERVER.set(observer)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


def linear(subscripts: str, x: jax.Array, weight: nnx.Param, sharding: P) -> jax.Array:
    """Return `jnp.einsum(subscripts, x, weight)` with this sharding, in the dtype of `x`.

    Weights made by `projection` carry the precision of the product, `model.matmul`, as metadata. A weight with a LoRA
    adapter is an `Adapted` (model/lora.py). Its low-rank product is computed in the dtype of `x`.
    """
    matmul, observer = weight.get_metadata().get("matmul", COMPUTE_DTYPE), _OBSERVER.get()
    adapted = value if isinstance(value := weight.get_value(), Adapted) else None
    base = adapted.weight if adapted else weight[...]
    largest = None if observer is None else observer(subscripts, x, base, sharding)
    out = multiply(matmul, subscripts, x, base, sharding, largest)
    if adapted is None:
        return out
    x_axes, weight_axes, out_axes = subscripts.replace("->", ",").split(",")
    batch = [axis for axis in out_axes if axis not in weight_axes]
    inputs, outputs = ("".join(axis for axis in weight_axes if (axis in x_axes) is of_x) for of_x in (True, False))
    low_axes, low_sharding = "".join((*batch, "z")), P(*(sharding[out_axes.index(axis)] for axis in batch), None)
    low = multiply(COMPUTE_DTYPE, f"{x_axes},{inputs}z->{low_axes}", x, adapted.a, low_sharding)
    change = multiply(COMPUTE_DTYPE, f"{low_axes},z{outputs}->{out_axes}", low, adapted.b, sharding)
    return out + adapted.scale * change


def multiply(
    matmul: str, subscripts: str, x: jax.Array, weight: jax.Array, sharding: P, largest: jax.Array | None = None
) -> jax.Array:
    """Return `jnp.einsum(subscripts, x, weight)` in the dtype of `x`.

    `matmul` is the precision of the product, a value of `model.matmul`. If `largest`, the largest magnitude of `x`, is
    given, the scale of `x` is static.
    """
    if matmul in ROUNDED_WEIGHTS:
        x_axes, weight_axes, _ = subscripts.replace("->", ",").split(",")
        weight = rounded_weight(weight, len(set(x_axes) & set(weight_axes)), ROUNDED_WEIGHTS[matmul])
    return _linear(matmul, subscripts, sharding, x, weight if matmul in PRECISIONS else weight.astype(x.dtype), largest)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _linear(
    matmul: str, subscripts: str, sharding: P, x: jax.Array, weight: jax.Array, largest: jax.Array | None
) -> jax.Array:
    if x.shape[1] == 1 and target.platform() == "gpu":
        # XLA turns a product with one row into an elementwise product and a sum, and may write the elementwise product,
        # which is as large as `weight`, to memory. A second row avoids it.
        x = jnp.pad(x, [(0, 0), (0, 1), *[(0, 0)] * (x.ndim - 2)])
        return _product(matmul, subscripts, sharding, x, weight, largest)[:, :1]
    return _product(matmul, subscripts, sharding, x, weight, largest)


def _product(matmul, subscripts, sharding, x, weight, largest):
    if matmul not in PRECISIONS:
        return jnp.einsum(subscripts, x, weight, out_sharding=sharding)
    dtypes = (PRECISIONS[matmul].forward,) * 2
    # Name the result after the cast, so that a remat policy saves it in the dtype of `x` and not in 32 bits.
    return checkpoint_name(product(subscripts, x, weight, dtypes, sharding, largest).astype(x.dtype), PRODUCT)


def _linear_forward(matmul, subscripts, sharding, x, weight, largest):
    # Do not call `_linear` here: the remat policy "dots" does not see products inside it.
    return _product(matmul, subscripts, sharding, x, weight, largest), (x, weight)


def _linear_backward(matmul, subscripts, sharding, saved, dout):
    x, weight = saved
    x_axes, weight_axes, out_axes = subscripts.replace("->", ",").split(",")
    precision, mesh = PRECISIONS.get(matmul), jax.sharding.get_abstract_mesh()
    if precision is None:
        (dx,) = jax.linear_transpose(lambda x: jnp.einsum(subscripts, x, weight, out_sharding=sharding), x)(dout)
    else:
        transposed, dtypes = f"{out_axes},{weight_axes}->{x_axes}", (precision.gradient, precision.forward)
        dx_sharding = jax.NamedSharding(mesh, jax.typeof(x).sharding.spec)
        dx = product(transposed, dout, weight, dtypes, dx_sharding).astype(x.dtype)
    # Name the mesh explicitly, because the type of a weight that was created without a mesh has none.
    sharding = jax.NamedSharding(mesh, jax.typeof(weight).sharding.spec)
    if precision is None or not precision.rounds_weight_gradient:
        # JAX would derive the weight's gradient as a transposed product, for which XLA's CPU backend transposes `dout`.
        # That takes a third of the MLP's time.
        gradient = f"{out_axes},{x_axes}->{weight_axes}"
        return dx, jnp.einsum(gradient, dout, x, out_sharding=sharding).astype(weight.dtype), None
    gradient, dtypes = f"{x_axes},{out_axes}->{weight_axes}", (precision.forward, precision.gradient)
    return dx, product(gradient, x, dout, dtypes, sharding).astype(weight.dtype), None


_linear.defvjp(_linear_forward, _linear_backward)


def soft_cap(logits: jax.Array, cap: float | None) -> jax.Array:
    """Return cap tanh(logits / cap), which limits magnitudes to `cap` (arXiv 2408.00118). None: no cap."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def scaled(x: jax.Array, factor: float) -> jax.Array:
    """Return `factor * x`, or `x` itself if the factor is 1."""
    return x if factor == 1 else factor * x


def projection(
    config: ModelConfig, shape: Sequence[int], inputs: int, spec: P, *, rngs: nnx.Rngs, output: bool = False
) -> nnx.Param:
    """Create a float32 weight, initialised as `model.init` says.

    Products contract its first `inputs` axes with the activations. `output` marks the last weight of a residual branch,
    which starts as zero if `model.zero_init_output` is True. The metadata `matrix_axes` tells optimizers which axes are
    inputs and which are outputs. The metadata `matmul` tells `linear` the precision of products.
    """
    in_axis, out_axis = tuple(range(inputs)), tuple(range(inputs, len(shape)))
    if output and config.zero_init_output:
        init = jax.nn.initializers.zeros
    elif config.init == "fan_in":
        # The official code uses torch's Linear. Its default initialisation is U(±1/√fan_in).
        init = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform", in_axis=in_axis, out_axis=out_axis)
    else:
        init = jax.nn.initializers.normal(config.init_std / math.sqrt(config.width_ratio))
    # Count axes from the end, because `Decoder` stacks the weights of all layers along a leading axis.
    axes = tuple(tuple(axis - len(shape) for axis in part) for part in (in_axis, out_axis))
    return nnx.Param(
        init(rngs.params(), tuple(shape), jnp.float32, out_sharding=spec), matrix_axes=axes, matmul=config.matmul
    )


def vector(value: jax.Array, *, is_lambda: bool = False) -> nnx.Param:
    """Create a parameter without weight decay, such as a norm gain or a λ vector. It stays float32 in inference.

    `optimizer.lambda_learning_rate_factor` applies to parameters with `is_lambda`.
    """
    return nnx.Param(value, is_vector=True, is_lambda=is_lambda)


def constant(value: jax.Array) -> nnx.Param:
    """Create a parameter that training does not change. The layer must apply `jax.lax.stop_gradient` to it."""
    return nnx.Param(value, is_vector=True, is_constant=True)


def progress(layout: Layout) -> nnx.Param:
    """Create a scalar that the optimizer raises linearly from 0 to 1 over `anneal_steps` updates.

    The scalar is a parameter, so it is saved, restored and averaged with the weights. The layer must apply
    `jax.lax.stop_gradient` to it.
    """
    return nnx.Param(jnp.zeros((), jnp.float32, out_sharding=layout.vector), is_vector=True, is_progress=True)


def rotary_angles(positions: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """Return the cosines and sines of the rotary embedding (arXiv 2104.09864), each `positions.shape + (d / 2,)`.

    Both are computed in float32, because bfloat16 rounds position 257 to 256.
    """
    width = heads_of(config).d_head
    frequencies = config.rope_theta ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    c = config.rope_scaling
    if c.factor != 1:  # Adapt to a longer context than in pre-training, as in Llama 3.1 (arXiv 2407.21783).
        rotations = frequencies * (c.original_max_position_embeddings / (2 * math.pi))  # Per original context.
        kept = jnp.clip((rotations - c.low_freq_factor) / (c.high_freq_factor - c.low_freq_factor), 0, 1)
        frequencies = frequencies * (kept + (1 - kept) / c.factor)
    angles = positions[..., None].astype(jnp.float32) * jnp.expand_dims(frequencies, tuple(range(positions.ndim)))
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate each pair of channels i and i + d/2 of `x`, `[B, T, heads…, d]`, by angles `[B or 1, T, d/2]`.

    Hugging Face uses the same pairs. The official code of the Differential Transformer rotates channels 2i and 2i + 1.
    Both are equivalent up to a permutation of the channels.
    """
    head_axes = tuple(range(2, x.ndim - 1))
    cos, sin = (jnp.expand_dims(a, head_axes) for a in angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
