"""The class that `difftx.load` returns: a trained model for use in Python. Results are numpy arrays on the host."""
# Axes of arrays: T = tokens of the text, V = vocabulary including padding, H = heads, D = model width, L = layers,
#   B = rows, C = queries (here: all tokens)

import collections
import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from difftx.config import Config
from difftx.data.loader import make_batch
from difftx.data.tokenizer import Tokenizer
from difftx.errors import UserError
from difftx.inference.decode import LanguageModel, model_of
from difftx.inference.generate import Request, generate
from difftx.inference.sampling import Sampling
from difftx.inference.score import batch_scores
from difftx.kernels.rows import AttentionWeights
from difftx.model.attention import LayerConstants, layer_constants
from difftx.model.decoder import Block, Decoder
from difftx.parallel.layout import Layout
from difftx.training.checkpoint.checkpointer import Checkpoints
from difftx.training.checkpoint.manifest import WeightsPart
from difftx.training.checkpoint.reading import Checkpoint
from difftx.training.state import graph

MIN_TOKENS = 32  # Pad texts to a power of two from this length on, so that few programs are compiled.
BATCH_TOKENS = 2**16  # Largest number of tokens in a batch of texts that are scored together.

# A text or its token ids.
type Text = str | Sequence[int]


class TrainedRun:
    """The model of a checkpoint or of an exported folder on one device, with its config and tokenizer.

    `difftx.load` returns it. Methods accept a text or its token ids, with at most `config.data.sequence_length` tokens.
    """

    def __init__(self, lm: LanguageModel, run: Checkpoints | None = None, checkpoint: Checkpoint | None = None):
        self._lm, self._checkpoint = lm, checkpoint
        self.workdir = None if run is None else run.workdir

    @property
    def config(self) -> Config:
        """The training config, with a mesh of one device."""
        return self._lm.config

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, with the methods `encode_prompt(text)` and `decode(ids)`."""
        return self._lm.tokenizer

    @property
    def step(self) -> int | None:
        """The step of the checkpoint, or None for an exported folder."""
        return None if self._checkpoint is None else self._checkpoint.manifest.step

    @property
    def weights(self) -> WeightsPart:
        """Which weights of the checkpoint are loaded: "params", or "ema" for their moving average."""
        return "params" if self._checkpoint is None else self._checkpoint.part

    @functools.cached_property
    def model(self) -> Decoder:
        """The model as a Flax NNX module: `logits, statistics = run.model(tokens, hook=…)`.

        Its weights are float32, on the first device and without a mesh. The module works with JAX transformations, like
        any tree of arrays. `difftx.model.decoder.Decoder` explains the arguments.
        """
        params = jax.tree.map(lambda x: x.addressable_shards[0].data, self._lm.params)  # No copy.
        return nnx.merge(graph(self.config, Layout.inferred()), params)

    def logits(self, text: Text) -> np.ndarray:
        """Return the logits for the next token after each token of the text, float32 `[T, V]`.

        V is the vocabulary size including padding, `config.model.embeddings`. The training loss normalises over all V.
        """
        tokens_1T, length = self._padded(text)
        with jax.set_mesh(self._lm.mesh):
            return np.array(_logits(graph(self.config), self._lm.params, tokens_1T)[0, :length])

    def logprobs(self, texts: Sequence[Text]) -> list[np.ndarray]:
        """Return the log-probability (in nats) of each token given the tokens before it, float32 `[T - 1]` per text.

        The first token of a text has no value. A text may have `config.data.sequence_length` + 1 tokens. For a
        validation row, the values equal those of the suite `loss` bit for bit, unless the config sets
        `data.document_mask` or compresses the cache.
        """
        if isinstance(texts, str):
            raise UserError(f"texts={texts!r} is one text; give a list, such as [text]")
        limit = self._lm.context_length
        rows = [self._tokens(text, least=2, most=limit + 1) for text in texts]
        by_length: dict[int, list[int]] = collections.defaultdict(list)
        for index, row in enumerate(rows):
            by_length[self._padded_length(len(row) - 1)].append(index)
        found: dict[int, np.ndarray] = {}
        for length, indices in by_length.items():
            # Use the same number of rows as an evaluation on one device. Another number could change the rounding.
            count = min(self.config.batch_rows // self.config.train.accumulation, max(1, BATCH_TOKENS // length))
            for batch in itertools.batched(indices, count):
                tokens_BT = np.zeros((count, length + 1), np.int32)
                for row, index in enumerate(batch):
                    tokens_BT[row, : len(rows[index])] = rows[index]
                mask_BT = np.ones((count, length), np.float32)
                arrays = {"tokens": tokens_BT[:, :-1], "targets": tokens_BT[:, 1:], "loss_mask": mask_BT}
                sharding = jax.NamedSharding(self._lm.mesh, Layout().act_BT)
                with jax.set_mesh(self._lm.mesh):
                    scored = batch_scores(graph(self.config), self._lm.params, make_batch(arrays, count, sharding))
                nll_BT = jax.device_get(scored[0])
                found |= {index: -nll_BT[row, : len(rows[index]) - 1] for row, index in enumerate(batch)}
        return [found[index] for index in range(len(rows))]

    def attention(self, text: Text, *, layer: int) -> AttentionWeights:
        """Return the attention weights `[H, T, T]` of a layer as numpy arrays. Layers are counted from 1."""
        c = self.config.model
        if not 1 <= layer <= c.num_layers:
            raise UserError(f"layer={layer} must lie in 1 … {c.num_layers}")
        tokens_1T, length = self._padded(text)
        # Layers with the same position in the window pattern share a compiled program.
        options: dict[str, Any] = {"config": self.config, "pattern_index": (layer - 1) % len(c.windows)}
        with jax.set_mesh(self._lm.mesh):
            weights = jax.device_get(_attention(self._lm.params, tokens_1T, np.int32(layer - 1), **options))
        return jax.tree.map(lambda x_1HTS: x_1HTS[0, :, :length, :length], weights)

    def generate(
        self,
        text: Text,
        *,
        new_tokens: int = 64,
        temperature: float = 0.8,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
        stop: Sequence[str] = (),
    ) -> str:
        """Continue the text by at most `new_tokens` tokens, and return the continuation.

        It ends before the first occurrence of a string in `stop`. Temperature 0 chooses the most likely token. The same
        seed gives the same continuation.
        """
        if isinstance(stop, str):
            raise UserError(f"stop={stop!r} is one string; give a list, such as [{stop!r}]")
        sampling = Sampling(repetition_penalty=None, temperature=temperature, top_k=top_k, top_p=top_p)
        request = Request(
            prompt=self._tokens(text, least=1, most=self._lm.context_length), new_tokens=new_tokens, seed=seed
        )
        return generate(self._lm, [request], sampling, stop=stop)[0].text

    def _tokens(self, text: Text, *, least: int, most: int) -> list[int]:
        """Return the token ids of a text. Raise `UserError` if there are too few, too many or invalid ids."""
        if not isinstance(text, str) and any(isinstance(token, str) for token in text):
            raise UserError(f"text={text!r}: expected one text, or its token ids")
        tokens = self.tokenizer.encode_prompt(text) if isinstance(text, str) else [*map(operator.index, text)]
        if not least <= len(tokens) <= most:
            extra = "" if most == self._lm.context_length else " + 1"
            limit = f"data.sequence_length{extra}={most}"
            raise UserError(f"the text has {len(tokens)} tokens; give it {least} to {limit}")
        if not all(0 <= token < self.config.model.embeddings for token in tokens):
            raise UserError(f"the text has token ids outside of 0 … {self.config.model.embeddings - 1}")
        return tokens

    def _padded_length(self, length: int) -> int:
        return min(self._lm.context_length, max(MIN_TOKENS, 2 ** (length - 1).bit_length()))

    def _padded(self, text: Text) -> tuple[np.ndarray, int]:
        """Return the padded tokens `[1, T]` and their number without padding. Padding is at the end."""
        tokens = self._tokens(text, least=1, most=self._lm.context_length)
        padding = self._padded_length(len(tokens)) - len(tokens)
        return np.pad(np.array([tokens], np.int32), ((0, 0), (0, padding))), len(tokens)


@functools.partial(jax.jit, static_argnums=0)
def _logits(graphdef: nnx.GraphDef, params: Any, tokens_BT: jax.Array) -> jax.Array:
    return nnx.merge(graphdef, params)(tokens_BT)[0]


@functools.partial(jax.jit, static_argnames=("config", "pattern_index"))
def _attention(
    params: Any, tokens_BT: jax.Array, index: jax.Array, *, config: Config, pattern_index: int
) -> AttentionWeights:
    """Return the attention weights of layer `index`. `pattern_index` is its position in the window pattern."""
    model = model_of(config, params)
    queries_BC, angles = jnp.arange(tokens_BT.shape[1])[None], model.angles(tokens_BT.shape[1])

    def layer(x_BTD: jax.Array, block: Block, constants: LayerConstants) -> tuple[jax.Array, jax.Array]:
        """Return the layer's output and the normalised input of its attention."""
        return block(x_BTD, lambda h_BTD: (block.attention(h_BTD, angles, constants, None)[0], h_BTD))

    stacked = model.blocks, layer_constants(config.model), model.walk(layer, model.embed(tokens_BT))[1]
    block, constants, x_BTD = jax.tree.map(
        lambda x_L: jax.lax.dynamic_index_in_dim(x_L, index, keepdims=False), stacked
    )
    constants = constants.of_layer(config.model, pattern_index)
    return AttentionWeights.of(block.attention.attention_rows(x_BTD, angles, constants, None, queries_BC))
