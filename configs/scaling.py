"""The paper's scaling sweep: five sizes of both architectures (arXiv 2410.05258, §3.2, Table 10, Figure 3a).

Command:  python train.py --config=configs/scaling.py:diff-2.8b --workdir=runs/diff-2.8b --config.data.path='*.txt'
          (architecture: diff, transformer, or another value of `model.architecture` that is not in the paper; size:
          830m, 1.4b, 2.8b, 6.8b or 13.1b)
Sizes:    the Transformer has 0.834, 1.410, 2.763, 6.837 and 13.084 billion parameters, the sizes of Table 10.
Protocol: 40,000 steps of 0.25M tokens, 2,048 tokens per row, AdamW (0.9, 0.98), linear warm-up of 375 steps and linear
          decay.
Expected: Figure 3a: diff reaches the Transformer's loss with about 62 % of the parameters. Not reproduced here yet.
Compute:  6 N D FLOPs per run: 5e19 (830m) to 8e20 (13.1b). `--dry_run` prints the number of a config.
"""

from ml_collections import ConfigDict

from difftx.configs import base

ARG = "{architecture}-{size}"  # Format of the recipe's argument; see base.py.

# Size → (d_model, number of layers, heads of the differential model, learning rate), from Table 10 of the paper.
SIZES = {
    "830m": (1536, 24, 8, 1.5e-4),
    "1.4b": (2048, 24, 8, 1.5e-4),
    "2.8b": (2560, 32, 10, 1.5e-4),
    "6.8b": (4096, 32, 16, 7.5e-5),
    "13.1b": (5120, 40, 20, 7.5e-5),
}


def get_config(arg: str = "diff-1.4b") -> ConfigDict:
    """Return the config of an architecture and a size, such as "diff-1.4b"."""
    architecture, _, size = arg.partition("-")
    base.require_known(size, SIZES, "{size}")
    d_model, num_layers, diff_heads, learning_rate = SIZES[size]
    c = base.get_config()
    c.model.d_model = d_model
    c.model.num_layers = num_layers
    c.model.mlp_dim = base.mlp_dim(d_model, multiple=64)
    c.optimizer.learning_rate = learning_rate
    base.choose(c, architecture, heads=2 * diff_heads)
    return c
