"""Transfer of the learning rate from 0.1M to 3M parameters, with and without µP and CompleteP, on books.

Paper:    arXiv 2203.03466 (µP) and 2505.01618 (CompleteP); docs/operations.md, "One learning rate for all sizes".
Command:  make study-transfer    # 0.1m and 3m, both architectures, with and without µP, a grid of rates
          python train.py --config=configs/transfer.py:3m-diff-mup --workdir=runs/transfer-3m
Protocol: the books and the other settings of configs/toy.py, with one million tokens and heads of the same width at all
          sizes. Arms that end in "-mup" have the 0.1M model as their base, so at 0.1M they are the same as the others.
Hardware: 2 CPU cores; a run of 0.1m takes half a minute of an idle core, one of 3m about four.
Result:   docs/exploratory.md.
"""

from ml_collections import ConfigDict

from difftx.configs import base, toy

ARG = "{task}-{arm}"  # Format of the recipe's argument; see base.py.

# Size (the {task} of ARG) → (d_model, number of layers). The first size is the base model's.
SIZES = {"0.1m": (64, 2), "3m": (256, 4)}
HEAD_DIM = 16
ARCHITECTURES = ("transformer", "diff")
MUP = "-mup"  # Ending of the arms that use µP, that is, the base model's learning rate.


def get_config(arg: str = "3m-diff-mup") -> ConfigDict:
    """Return the config of a size and an arm, such as "3m-diff-mup"."""
    base.require_known(
        arg, [f"{size}-{name}{end}" for size in SIZES for name in ARCHITECTURES for end in ("", MUP)], ARG
    )
    size, _, arm = arg.partition("-")
    c = toy.get_config("books-transformer")
    c.model.d_model, c.model.num_layers = SIZES[size]
    c.model.mlp_dim = base.mlp_dim(c.model.d_model)
    c.train.steps = c.eval.every_steps = 1000
    c.optimizer.learning_rate = 8e-3  # The best one of configs/toy.py.
    c.eval.suites = ("loss",)
    base.choose(c, arm.removesuffix(MUP), heads=c.model.d_model // HEAD_DIM)
    if arm.endswith(MUP):
        c.model.mup_base_width, c.model.mup_base_layers = SIZES["0.1m"]
        c.model.mup_base_head_dim = HEAD_DIM
    return c
