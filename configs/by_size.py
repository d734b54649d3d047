"""A recipe for any size: the number of parameters determines the model's shape, batch size and learning rate.

Command:  python train.py --config=configs/by_size.py:diff-25m --workdir=runs/diff-25m --config.data.path='corpus/*.txt'
          (architecture: diff, transformer or another value of `model.architecture`, all with equally many parameters;
          gda only at sizes with a multiple of 4 heads. Size: 0.8m, 25m, 1.3b, …, including embeddings.) train.py
          prints what the recipe has chosen before it trains. With `--dry_run`, it stops there.
Protocol: `_shape`, `_head_width` and `_schedule` below state each rule with its source.
Expected: nothing here is tuned for differential models. At 0.8M parameters, the learning rate is 1.4 (transformer) and
          2.8 (diff) times the best one of configs/toy.py, which trains on fewer tokens.
"""

import math
import re

from ml_collections import ConfigDict

from difftx.configs import base

ARG = "{architecture}-{size}"  # Format of the recipe's argument; see base.py.

FLOAT32_BELOW = 3_000_000  # Smaller models use float32 and short rows: they train on CPUs, which emulate bfloat16.
BYTES_BELOW = 100_000_000  # Smaller models read bytes: an embedding of 100,000 tokens would dominate their size.
# Model width divided by the number of layers. It is 51 to 128 in configs/small.py and in Table 10 of the paper.
ASPECT = 75
TOLERANCE = 0.05  # Accepted relative deviation from the requested number of parameters.
TOKENS_PER_PARAMETER = 20  # Chinchilla (arXiv 2203.15556).


def get_config(arg: str = "diff-25m") -> ConfigDict:
    """Return the config of an architecture and a number of parameters, such as "diff-25m"."""
    architecture, _, size = arg.partition("-")
    parameters = _number(size)
    c = base.get_config()
    if parameters < BYTES_BELOW:
        c.model.vocab_size = base.BYTE_VOCABULARY
        c.data.tokenizer = "bytes"
        c.data.sequence_length = 256 if parameters < FLOAT32_BELOW else 1024
        c.model.zero_init_output = True  # The best initialisation at 0.1M parameters (docs/exploratory.md).
        c.model.remat = "none"
    if parameters < FLOAT32_BELOW:
        c.model.compute_dtype = "float32"
    c.model.d_model, c.model.num_layers = _shape(parameters, c.model.vocab_size)
    c.model.mlp_dim = _mlp_dim(c.model.d_model)
    _schedule(c, parameters)
    base.choose(c, architecture, heads=c.model.d_model // _head_width(c.model.d_model))
    return c


def _number(size: str) -> int:
    """Return the number that a size such as "0.8m" or "1.3b" stands for."""
    match = re.fullmatch(r"(\d+\.?\d*)([mb])", size)
    if match is None or not float(match[1]):
        raise ValueError(f"{size!r} is not a size; write millions or billions of parameters, such as 0.8m, 25m or 1.3b")
    return round(float(match[1]) * {"m": 10**6, "b": 10**9}[match[2]])


def _shape(parameters: int, vocab_size: int) -> tuple[int, int]:
    """Return width and depth of the model with this number of parameters whose aspect is closest to `ASPECT`."""
    found = []
    for d_model in range(64, 32_768, 64):
        # A differential head is as wide as two heads of the Transformer. Large models get an even number of
        # differential heads, so that devices can shard them.
        if d_model % ((2 if d_model < 1024 else 4) * _head_width(d_model)):
            continue
        of_layer = 4 * d_model**2 + 3 * d_model * _mlp_dim(d_model)
        layers = max(2, round((parameters - vocab_size * d_model) / of_layer))
        if abs(vocab_size * d_model + layers * of_layer - parameters) <= TOLERANCE * parameters:
            found.append((d_model, layers))
    if not found:
        raise ValueError(f"no model of whole layers has {parameters:,} parameters, give or take {TOLERANCE:.0%}")
    return min(found, key=lambda shape: abs(math.log(shape[0] / shape[1] / ASPECT)))


def _mlp_dim(d_model: int) -> int:
    return base.mlp_dim(d_model, multiple=64)  # As in configs/scaling.py.


def _head_width(d_model: int) -> int:
    """Return the width of a head. From a model width of 2,048 on, it is the paper's, 128.

    The authors advise at least 8 differential heads of width 64 or more. In narrower models, heads of width 32 permit 8
    heads from a model width of 512 on.
    """
    return 128 if d_model >= 2048 else 64 if d_model >= 1024 else 32


def _schedule(c: ConfigDict, parameters: int) -> None:
    """Set batch size, number of steps and learning rate.

    Batch size and learning rate are power laws of the compute, 6 FLOPs per parameter and token (DeepSeek LLM, arXiv
    2401.02954, §3.1). The warm-up takes a tenth of the steps. The learning rate then falls linearly to 0.
    """
    tokens = TOKENS_PER_PARAMETER * parameters
    compute = 6 * parameters * tokens
    rows = 0.2920 * compute**0.3271 / c.data.sequence_length
    c.train.global_batch_tokens = 2 ** max(2, round(math.log2(rows))) * c.data.sequence_length
    c.train.steps = math.ceil(tokens / c.train.global_batch_tokens)
    c.optimizer.learning_rate = float(f"{0.3118 * compute**-0.1250:.2g}")
    c.optimizer.warmup_steps = 0.1
    c.optimizer.b2 = 0.95  # As DeepSeek LLM.
    c.optimizer.weight_decay = 0.1
