"""A trained run in Python: `difftx.load` and what it returns. Results are arrays of numpy on the host."""
# Axes of arrays: T = tokens of the text, V = vocabulary with its padding, H = heads, D = model width, L = layers,
#   B = 1 row, C = queries, here all tokens, G = 2 groups (A1 and A2), S = keys

import dataclasses
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from difftx.config import Config, MeshConfig
from difftx.data.tokenizer import Tokenizer
from difftx.errors import UserError
from difftx.inference.decode import LanguageModel, model_of
from difftx.inference.generate import Request, generate
from difftx.inference.load import load_model
from difftx.inference.sampling import Sampling
from difftx.kernels.rows import AttentionRows
from difftx.model.attention import LayerConstants, layer_constants
from difftx.model.decoder import Block
from difftx.parallel.mesh import make_mesh
from difftx.registry import load_extensions
from difftx.storage.paths import path_of
from difftx.training.checkpoint.checkpointer import Checkpoints
from difftx.training.checkpoint.manifest import WeightsPart
from difftx.training.run import read_config
from difftx.training.state import graph

MIN_TOKENS = 32  # Texts are padded to a power of two of at least this length, so that few programs are compiled.


@dataclasses.dataclass(frozen=True)
class AttentionWeights:
    """Attention weights of one layer for a text, float32 `[H, T, T]` each: heads, queries, keys.

    An architecture that does not subtract has only one attention: `a1` is `difference`, and `a2` and `lam` are None.
    """

    a1: np.ndarray
    a2: np.ndarray | None
    lam: np.ndarray | None  # λ of each head and query, `[H, T, 1]`, so that `a1 - lam * a2` is the difference.
    difference: np.ndarray  # The weights that multiply the values.


class TrainedRun:
    """The model of a checkpoint on one device, with its config and tokenizer. `difftx.load` returns it.

    Texts may also be given as token ids. They may have at most `config.data.sequence_length` tokens.
    """

    def __init__(self, lm: LanguageModel):
        self._lm = lm

    @property
    def config(self) -> Config:
        return self._lm.config

    @property
    def tokenizer(self) -> Tokenizer:
        return self._lm.tokenizer

    def logits(self, text: str | Sequence[int]) -> np.ndarray:
        """Return the logits of the token after each token of the text, float32 `[T, V]`.

        V is the size of the vocabulary, padded to `config.model.embeddings`. The loss normalises over all of it.
        """
        tokens_1T, length = self._padded(text)
        with jax.set_mesh(self._lm.mesh):
            return np.array(_logits(graph(self.config), self._lm.params, tokens_1T)[0, :length])

    def attention(self, text: str | Sequence[int], *, layer: int) -> AttentionWeights:
        """Return the attention weights of a layer, which counts from 1, for all tokens of the text."""
        c = self.config.model
        if not 1 <= layer <= c.num_layers:
            raise UserError(f"layer={layer} must lie in 1 … {c.num_layers}")
        tokens_1T, length = self._padded(text)
        options: dict[str, Any] = {"config": self.config, "window": c.windows[(layer - 1) % len(c.windows)]}
        with jax.set_mesh(self._lm.mesh):
            rows = jax.device_get(_attention_rows(self._lm.params, tokens_1T, np.int32(layer - 1), **options))
        difference_HTT, logits_HGTT = (np.moveaxis(x[0, :length, ..., :length], 0, -2) for x in rows[:2])
        if rows.lam_BCH is None:
            return AttentionWeights(difference_HTT, None, None, difference_HTT)
        a_HGTT = np.exp(logits_HGTT - np.max(logits_HGTT, axis=-1, keepdims=True))
        a_HGTT /= np.sum(a_HGTT, axis=-1, keepdims=True)
        lam_HT1 = np.moveaxis(rows.lam_BCH[0, :length], 0, -1)[..., None]
        return AttentionWeights(a_HGTT[:, 0], a_HGTT[:, 1], lam_HT1, difference_HTT)

    def generate(
        self,
        text: str | Sequence[int],
        *,
        new_tokens: int = 64,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        stop: Sequence[str] = (),
    ) -> str:
        """Return a continuation of the text, of at most `new_tokens` tokens, that ends before any string of `stop`.

        Temperature 0 takes the most likely token. The same seed gives the same continuation.
        """
        sampling = Sampling(repetition_penalty=None, temperature=temperature, top_k=top_k, top_p=top_p)
        request = Request(prompt=self._tokens(text), new_tokens=new_tokens, seed=seed)
        return generate(self._lm, [request], sampling, stop=stop)[0].text

    def _tokens(self, text: str | Sequence[int]) -> list[int]:
        return self.tokenizer.encode_prompt(text) if isinstance(text, str) else list(text)

    def _padded(self, text: str | Sequence[int]) -> tuple[np.ndarray, int]:
        """Return the tokens as `[1, T]`, padded at the end, where no token attends to them, and their number."""
        tokens, limit = self._tokens(text), self._lm.context_length
        if not 0 < len(tokens) <= limit:
            raise UserError(f"the text has {len(tokens)} tokens; give it 1 to data.sequence_length={limit}")
        if not all(0 <= token < self.config.model.embeddings for token in tokens):
            raise UserError(f"the text has token ids outside of 0 … {self.config.model.embeddings - 1}")
        length = min(limit, max(MIN_TOKENS, 2 ** (len(tokens) - 1).bit_length()))
        return np.pad(np.array([tokens], np.int32), ((0, 0), (0, length - len(tokens)))), len(tokens)


def load(
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    weights: WeightsPart = "params",
    extensions: Sequence[str | os.PathLike[str]] = (),
) -> TrainedRun:
    """Load the model of a run directory onto the first device. Several runs may be loaded at a time.

    Args:
        path: The directory of the run, `--workdir` of the training. It may be in a bucket.
        step: The step of the checkpoint. The default is the newest one that is valid.
        weights: "params", or "ema" for their moving average.
        extensions: Your files that the run was trained with, as `--extension` names them.

    Raises:
        UserError: There is no such run or checkpoint, or an extension that the run needs is not given.
    """
    load_extensions(list(map(Path, extensions)))
    workdir = path_of("path", os.fspath(path))
    config = dataclasses.replace(read_config(workdir), mesh=MeshConfig(fsdp=1))
    mesh = make_mesh(config.mesh, jax.local_devices()[:1])
    return TrainedRun(load_model(Checkpoints(workdir), step, config, mesh, weights))


@functools.partial(jax.jit, static_argnums=0)
def _logits(graphdef: nnx.GraphDef, params: Any, tokens_BT: jax.Array) -> jax.Array:
    return nnx.merge(graphdef, params)(tokens_BT)[0]


@functools.partial(jax.jit, static_argnames=("config", "window"))
def _attention_rows(
    params: Any, tokens_BT: jax.Array, index: jax.Array, *, config: Config, window: int | None
) -> AttentionRows:
    """Return the attention weights of all tokens in the layer with this index, whose window is `window`."""
    model = model_of(config, params)
    queries_BC, angles = jnp.arange(tokens_BT.shape[1])[None], model.angles(tokens_BT.shape[1])

    def layer(x_BTD: jax.Array, block: Block, constants: LayerConstants) -> tuple[jax.Array, jax.Array]:
        """Return the output of the layer, and the normalised input of its attention."""
        return block(x_BTD, lambda h_BTD: (block.attention(h_BTD, angles, constants, None)[0], h_BTD))

    stacked = model.blocks, layer_constants(config.model), model.walk(layer, model.embed(tokens_BT))[1]
    block, constants, x_BTD = jax.tree.map(
        lambda x_L: jax.lax.dynamic_index_in_dim(x_L, index, keepdims=False), stacked
    )
    constants = dataclasses.replace(constants, window=window)
    return block.attention.attention_rows(x_BTD, angles, constants, None, queries_BC)
