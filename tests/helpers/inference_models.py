"""Language models with random parameters, their prompts, and logits of a whole row to compare with."""

import types

import jax
import numpy as np
from flax import nnx

from difftx.data.tokenizers import load_tokenizer
from difftx.inference.decode import LanguageModel
from difftx.training.state import graph
from helpers.evals_params import params_from

TENSOR = {"data": 2, "fsdp": 2, "tensor": 2}
CONTEXT = {"context": 2, "fsdp": 4}


def language_model(config, mesh, architecture="diff", **overrides):
    """Return a model with random parameters whose attention weights are far from uniform."""
    overrides = {"train__global_batch_tokens": 1024, "data__sequence_length": 128} | overrides
    c = config(architecture, **overrides)
    return LanguageModel(c, mesh, random_params(c, mesh, embedding_scale=0.02), load_tokenizer("bytes"))


def random_params(c, mesh, *, embedding_scale):
    """Return random parameters, drawn by numpy because compiling an initialisation takes longer than a test."""
    rng = np.random.default_rng(0)

    def draw(path, shape):
        scale = embedding_scale if "embedding" in path else 0.3
        return float("scale" in path) + scale * rng.normal(size=shape)  # Gains are around 1.

    return params_from(types.SimpleNamespace(config=c, mesh=mesh), draw)


def full_logits(lm, mesh, tokens_BT):
    """Return logits `[B, T, V]`, computed by the training kernels on one device."""
    with jax.set_mesh(mesh):
        params = jax.device_put(jax.device_get(lm.params), jax.NamedSharding(mesh, jax.P()))
        graphdef = graph(lm.config)
        return np.asarray(jax.jit(lambda p: nnx.merge(graphdef, p)(tokens_BT)[0])(params))


def prompts_of(lengths):
    """Return prompts of random tokens."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, n).tolist() for n in lengths]
