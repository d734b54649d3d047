"""Language models with random parameters, their prompts, and logits of a whole row to compare with."""

import dataclasses

import jax
import numpy as np
from flax import nnx

from difftx.data.tokenizer import load_tokenizer
from difftx.inference.decode import LanguageModel, Tokens
from difftx.kernels.cached import EMPTY
from difftx.training.state import graph, init_state

TENSOR = {"data": 2, "fsdp": 2, "tensor": 2}
CONTEXT = {"context": 2, "fsdp": 4}


def language_model(config, mesh, architecture="diff", **overrides):
    """Return a model with random parameters whose attention weights are far from uniform."""
    overrides = {"train__global_batch_tokens": 1024} | overrides
    c = config(architecture, data__sequence_length=128, **overrides)
    rng = np.random.default_rng(0)
    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(lambda: init_state(c).params)

    def draw(path, leaf):  # In numpy: compiling an initialisation takes longer than a test.
        scale = 0.02 if "embedding" in str(path) else 0.3
        mean = 1.0 if "scale" in str(path) else 0.0
        value = (mean + scale * rng.normal(size=leaf.shape)).astype(leaf.dtype)
        return jax.device_put(value, jax.NamedSharding(mesh, leaf.sharding.spec))

    return LanguageModel(c, mesh, jax.tree.map_with_path(draw, shapes), load_tokenizer("bytes"))


def full_logits(lm, mesh, host, tokens_BT):
    """Return logits `[B, T, V]`, computed by the training kernels on one device."""
    with jax.set_mesh(mesh):
        params = jax.device_put(jax.device_get(lm.params), jax.NamedSharding(mesh, jax.P()))
        graphdef = graph(lm.config)
        ids = {"positions_BT": host.positions_BT, "segment_ids_BT": host.segment_BT}
        return np.asarray(jax.jit(lambda p: nnx.merge(graphdef, p)(tokens_BT, **ids)[0])(params))


def prompts_of(lengths, count, chunk, *, packed):
    """Return `count` rows of random tokens, as single prompts or as documents of eleven tokens."""
    rng = np.random.default_rng(0)
    host = Tokens.of([rng.integers(0, 256, n).tolist() for n in lengths], count, chunk)
    if packed:  # Positions restart in each document. Decoding extends the last document.
        ids = np.where(host.segment_BT == EMPTY, EMPTY, host.positions_BT // 11)
        host = dataclasses.replace(host, segment_BT=ids.astype(np.int32), positions_BT=host.positions_BT % 11)
    return host
