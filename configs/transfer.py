"""Transfer of the learning rate from 0.1M to 3M parameters, with and without µP and CompleteP, on books.

Paper:    arXiv 2203.03466 (µP) and 2505.01618 (CompleteP); docs/operations.md, "One learning rate for all sizes".
Command:  make study-transfer    # 0.1m and 3m, both architectures, both parametrisations, a grid of rates
          python train.py --config=configs/transfer.py:3m-diff-mup --workdir=runs/transfer-3m
Protocol: the books and the other settings of configs/toy.py, with one million tokens and heads of the same width at all
          sizes. A run with "mup" has the 0.1M model as its base, so at 0.1M "mup" and "standard" are the same.
Hardware: 2 CPU cores; a run of 0.1m takes half a minute of an idle core, one of 3m about four. Result: none yet.
"""

from ml_collections import ConfigDict

from difftx.configs import base, toy

ARG = "{size}-{architecture}-{parametrization}"  # Format of the argument. `difftx sweep --grid` fills in the names.

# Size → (d_model, number of layers). The first one is the base model.
SIZES = {"0.1m": (64, 2), "0.6m": (128, 3), "3m": (256, 4)}
HEAD_DIM = 16
PARAMETRIZATIONS = ("standard", "mup")


def get_config(arg: str = "3m-diff-mup") -> ConfigDict:
    """Return the config of a size, an architecture and a parametrisation, such as "3m-diff-mup"."""
    known = [f"{size}-{name}-{kind}" for size in SIZES for name in ("transformer", "diff") for kind in PARAMETRIZATIONS]
    base.require_known(arg, known, ARG)
    size, architecture, kind = arg.split("-")
    c = toy.get_config("books-transformer")
    c.model.d_model, c.model.num_layers = SIZES[size]
    c.model.mlp_dim = 2 * (4 * c.model.d_model // 3)
    c.train.steps = 1000
    c.optimizer.warmup_steps = 500
    c.optimizer.learning_rate = 8e-3  # The best one of configs/toy.py.
    c.eval.every_steps = c.train.steps
    c.eval.suites = ("loss",)
    base.choose(c, architecture, heads=c.model.d_model // HEAD_DIM)
    if kind == "mup":
        c.model.mup_base_width, c.model.mup_base_layers = SIZES["0.1m"]
        c.model.mup_base_head_dim = HEAD_DIM
    return c
