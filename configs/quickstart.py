"""Minutes on a laptop: a differential model and its matched Transformer, bytes of Python's own library.

Paper:    arXiv 2410.05258; the architecture of §2, nothing of its scale.
Command:  make quickstart
          python train.py --config=configs/quickstart.py:diff --workdir=runs/quickstart/diff
          python train.py --config=configs/quickstart.py:transformer --workdir=runs/quickstart/transformer
          The others of difftx/model/variants.py by their names, as large: configs/architectures.py.
Hardware: 2 CPU cores, about 3 minutes each. Result: README.md shows a real run.
"""

from difftx.configs import architectures, base
from ml_collections import ConfigDict

ARG = "{architecture}"  # What `difftx sweep --grid` fills in.


def get_config(architecture: str = "diff") -> ConfigDict:
    """Return the config of one architecture: "diff", "transformer", or another of configs/architectures.py."""
    c = base.get_config()
    c.model.vocab_size = 264  # 256 bytes and <|endoftext|>, rounded up to a multiple of 8.
    c.model.d_model = 128
    c.model.num_layers = 4
    c.model.mlp_dim = 340
    c.model.zero_init_output = True  # Best at 0.1M parameters, see docs/results.md.
    c.model.compute_dtype = "float32"  # bfloat16 is emulated, and slower, on most CPUs.
    c.model.remat = "none"
    c.data.path = "stdlib"
    c.data.tokenizer = "bytes"
    c.data.sequence_length = 256
    c.optimizer.learning_rate = 4e-3
    c.optimizer.warmup_steps = 275  # Half of the steps: a shorter warm-up costs diff more, see docs/results.md.
    c.optimizer.b2 = 0.95
    c.optimizer.weight_decay = 0.1
    c.train.steps = 550
    c.train.global_batch_tokens = 2048
    c.checkpoint.every_steps = 100
    c.eval.every_steps = 100
    c.eval.loss_tokens = 65_536
    c.logging.every_steps = 1
    # Few heads, so that a laptop is done in minutes: the official notes warn against fewer than 8.
    architectures.choose(c, architecture, heads=4)
    return c
