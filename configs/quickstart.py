"""A differential model and its matched Transformer, trained in minutes on the source code of Python's library.

Paper:    arXiv 2410.05258; the architecture of §2, at a much smaller scale.
Command:  make quickstart
          python train.py --config=configs/quickstart.py:diff --workdir=runs/quickstart/diff
          python train.py --config=configs/quickstart.py:transformer --workdir=runs/quickstart/transformer
          In place of `diff`, write any value of `model.architecture`. All have as many parameters.
Hardware: 2 CPU cores, 2 to 3 minutes per model. Result: docs/getting-started.md shows a real run.
"""

from ml_collections import ConfigDict

from difftx.configs import base

ARG = "{architecture}"  # Format of the recipe's argument; see base.py.


def get_config(architecture: str = "diff") -> ConfigDict:
    """Return the config of an architecture: "diff", "transformer" or another value of `model.architecture`."""
    c = base.get_config()
    c.model.vocab_size = base.BYTE_VOCABULARY
    c.model.d_model = 128
    c.model.num_layers = 4
    c.model.mlp_dim = base.mlp_dim(c.model.d_model)
    c.model.zero_init_output = True  # The best initialisation at 0.1M parameters (docs/exploratory.md).
    c.model.compute_dtype = "float32"  # Most CPUs emulate bfloat16, which is slower.
    c.model.remat = "none"
    c.data.path = "stdlib"
    c.data.tokenizer = "bytes"
    c.data.sequence_length = 256
    c.optimizer.learning_rate = 4e-3
    c.optimizer.warmup_steps = 0.5  # A shorter warm-up hurts diff more than the Transformer.
    c.optimizer.b2 = 0.95
    c.optimizer.weight_decay = 0.1
    c.train.steps = 550
    c.train.global_batch_tokens = 2048
    c.checkpoint.every_steps = 100
    c.eval.every_steps = 100
    c.eval.loss_tokens = 65_536
    c.logging.every_steps = 1
    base.choose(c, architecture, heads=4)  # Few heads, so that training takes minutes on a laptop.
    return c
