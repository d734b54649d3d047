"""The second half of a toy study: a trained Transformer is converted to a differential model and trained further.

Command:  python studies/differential_study.py --out=runs/study/differential
          trains the Transformers, converts them, and trains every arm from `checkpoint.init_from` on new data.
Protocol: docs/differentialize.md, at the size of configs/toy.py and, for novels, of configs/controls.py. Each arm
          trains for as many tokens as its Transformer had, with a warm-up of 5 % and linear decay; λ grows over 250
          steps.
Hardware: 2 CPU cores. Result: docs/results.md for novels (question 5), and docs/exploratory.md for the other tasks.
"""

from ml_collections import ConfigDict

from difftx.configs import base, controls, toy
from difftx.configs.base import Arm

ARG = "{task}-{arm}"  # Format of the recipe's argument; see base.py.

# Arm → the model to which `difftx convert --differential` converts a Transformer. The first arm stays a Transformer.
ARMS = {
    "transformer": Arm("transformer"),
    "zero-branch": Arm("zero_branch", {"zero_branch": {"anneal_steps": 250}}),
    "dex": Arm("dex", {"dex": {"anneal_steps": 250}}),
    "split": Arm("diff", {"head_norm": "rms_affine"}),
}
# Task → the recipe with which its Transformer was trained.
RECIPES = {"books-0.8m": toy, "recall": toy, "recall-easy": toy, "novels": controls}
# Task → number of steps of the Transformer, and of each arm after it.
STEPS = {"books-0.8m": 1000, "recall": 2000, "recall-easy": 2000, "novels": 2000}


def get_config(arg: str = "books-0.8m-zero-branch") -> ConfigDict:
    """Return the config of a task and an arm, such as "books-0.8m-zero-branch"."""
    known = {f"{task}-{name}": (task, name) for task in STEPS for name in ARMS}
    base.require_known(arg, known, ARG)
    task, name = known[arg]
    c = RECIPES[task].get_config(f"{task}-transformer")
    c.model.architecture = ARMS[name].architecture
    if name == "split":
        c.model.num_heads //= 2  # A pair of the Transformer's heads becomes one differential head.
    ARMS[name].change(c)
    c.train.steps = c.eval.every_steps = STEPS[task]
    c.optimizer.warmup_steps = 0.05
    return c
