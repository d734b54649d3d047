"""Comparison of the logits of a checkpoint with the logits that transformers computes from a model's folder."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from difftx.config import Config
from difftx.errors import RunError
from difftx.parallel.mesh import batch_shards, make_mesh
from difftx.training.checkpoint.checkpointer import restore_params
from difftx.training.state import graph, init_state

TOKENS = 64  # Largest number of tokens per row.
TOLERANCE = 1e-4  # Relative to the largest logit; allows for float32 sums in another order.


def compare_logits(folder: Path, checkpoint: Path, config: Config) -> str:
    """Compare the logits of random tokens, both models in float32; return a message with the largest difference.

    Raises:
        RunError: the difference exceeds `TOLERANCE`.
    """
    mesh = make_mesh(config.mesh)
    chunks = 2 * mesh.shape["context"]  # Zig-zag order splits a row into this many chunks.
    length = min(TOKENS, config.data.sequence_length) // chunks * chunks
    tokens_BT = np.random.default_rng(0).integers(config.model.vocab_size, size=(2 * batch_shards(mesh), length))
    theirs_BTV = transformers_logits(folder, tokens_BT)
    ours_BTV = our_logits(checkpoint, config, mesh, tokens_BT)
    error, largest = float(np.abs(ours_BTV - theirs_BTV).max()), float(np.abs(theirs_BTV).max())
    line = f"logits of {tokens_BT.size} random tokens differ from transformers' by at most {error:.1e} of {largest:.1f}"
    if not error <= TOLERANCE * largest:
        raise RunError(f"{line}: more than rounding; nothing was written")
    return f"verified: {line}"


def our_logits(checkpoint: Path, config: Config, mesh: jax.sharding.Mesh, tokens_BT: np.ndarray) -> np.ndarray:
    """Return the logits of a verified checkpoint, computed in float32."""
    model = dataclasses.replace(config.model, compute_dtype="float32", attention_implementation="xla")
    config = dataclasses.replace(config, model=model)
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        params = restore_params(checkpoint, jax.eval_shape(lambda: init_state(config)).params, mesh)
        graphdef = graph(config)
        logits = jax.jit(lambda params, tokens_BT: nnx.merge(graphdef, params)(tokens_BT)[0])
        return np.asarray(logits(params, tokens_BT.astype(np.int32)))


def transformers_logits(folder: Path, tokens_BT: np.ndarray) -> np.ndarray:
    """Return the logits of the model that transformers loads from a folder, in float32 on the CPU."""
    import torch  # pyrefly: ignore[missing-import]  # Installed by `make parity`.
    import transformers  # pyrefly: ignore[missing-import]

    transformers.utils.logging.disable_progress_bar()
    # The folder is local and local_files_only is set, so nothing is downloaded.
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(folder, dtype=torch.float32, local_files_only=True)  # nosec B615
    with torch.no_grad():
        return model(torch.from_numpy(tokens_BT)).logits.numpy()
