"""Causal controls for the differential model at 0.15M parameters: does norm, gain or subtraction change the loss?

Paper:    arXiv 2410.05258; the protocol of §3.2 (equal parameters and tokens, the same data order, linear warm-up and
          decay). docs/preregistration.md states the questions, contrasts and tests.
Command:  make study-controls    # all tasks and arms, with tuned learning rates and gains
          python train.py --config=configs/controls.py:novels-diff --workdir=runs/controls
          python -m difftx sweep --config=configs/controls.py --grid task=recall arm=diff,zero-norm seed=10,11 \
              --out=runs/controls
Protocol: two layers of width 64; differential models have 4 heads of width 16 (two queries and keys per head), the
          Transformer has 8. novels: 2M bytes of public-domain novels (`make novels`). novels-wide: heads of width 32.
          novels-0.4m: models of width 128, with 0.43M parameters. The last five arms are other architectures.
          recall: eight keys and their values among 15 distractors, recall-31 and recall-63 among more. TUNED has the
          rates and gains that `studies/controls_study.py` found.
Hardware: 2 CPU cores, half a minute per run. Result: docs/results.md.
"""

from collections.abc import Mapping

from ml_collections import ConfigDict

from difftx.configs import base, toy
from difftx.configs.base import Arm

ARG = "{task}-{arm}"  # Format of the recipe's argument; see base.py.

# With λ = 0, differential attention still computes the second attention weights, but multiplies them by zero.
NO_SUBTRACTION = {"lambda_learned": False, "lambda_init": 0.0}
GAIN = 2.0  # Gain of arms that have no entry in TUNED.
MEAN_FACTOR = 0.72  # Mean of diff's factor 1 - λ_init over the two layers (0.8 and 0.64).

# In the arms with a gain, `model.post_scale` is the constant gain.
ARMS = {
    "transformer": Arm("transformer"),
    "transformer-gain": Arm("transformer", {"post_scale": GAIN}),
    "transformer-wide-norm": Arm("transformer", {"head_norm": "rms_affine"}, wide_heads=True),
    "zero-norm": Arm("diff", {**NO_SUBTRACTION, "post_scale": MEAN_FACTOR}),
    "zero-gain": Arm("diff", {**NO_SUBTRACTION, "head_norm": "none", "post_scale": GAIN}),
    "diff": Arm("diff"),
    "diff-gain": Arm("diff", {"head_norm": "none", "post_scale": GAIN}),
    "diff-plain": Arm("diff", {"head_norm": "none", "post_scale": 1.0}),
    "diff-lambda_1": Arm("diff", {"lambda_learned": False, "lambda_init": 1.0, "post_scale": MEAN_FACTOR}),
    **{architecture: Arm(architecture) for architecture in ("diff_v2", "gdla", "gated", "top_k", "signed_mask")},
}
TRANSFORMER_HEADS = 8
ROWS_PER_UPDATE = 16  # On recall.

NOVELS_RATE, RECALL_RATE = 8e-3, 2.5e-3  # Learning rates of arms that have no entry in TUNED.
# Task → arm → the best field values, tuned on a seed that is not reported.
TUNED: Mapping[str, Mapping[str, Mapping[str, float]]] = {
    "novels": {
        "transformer": {"optimizer.learning_rate": 8e-3},
        "transformer-gain": {"optimizer.learning_rate": 8e-3, "model.post_scale": 2.0},
        "transformer-wide-norm": {"optimizer.learning_rate": 8e-3},
        "zero-norm": {"optimizer.learning_rate": 4e-3},
        "zero-gain": {"optimizer.learning_rate": 8e-3, "model.post_scale": 2.0},
        "diff": {"optimizer.learning_rate": 4e-3},
        "diff-gain": {"optimizer.learning_rate": 4e-3, "model.post_scale": 1.0},
        "diff-plain": {"optimizer.learning_rate": 4e-3},
    },
    "recall": {
        "transformer": {"optimizer.learning_rate": 2.5e-3},
        "transformer-gain": {"optimizer.learning_rate": 5e-3, "model.post_scale": 8.0},
        "transformer-wide-norm": {"optimizer.learning_rate": 5e-3},
        "zero-norm": {"optimizer.learning_rate": 2.5e-3},
        "zero-gain": {"optimizer.learning_rate": 5e-3, "model.post_scale": 4.0},
        "diff": {"optimizer.learning_rate": 2.5e-3},
        "diff-gain": {"optimizer.learning_rate": 2.5e-3, "model.post_scale": 4.0},
        "diff-plain": {"optimizer.learning_rate": 1.25e-3},
    },
}
DISTRACTORS = {"recall": 15, "recall-31": 31, "recall-63": 63}
WIDER = "novels-0.4m"
TASKS = ("novels", "novels-wide", WIDER, *DISTRACTORS)


def get_config(arg: str = "novels-diff") -> ConfigDict:
    """Return the config of a task and an arm, such as "novels-diff"."""
    known = {f"{task}-{name}": (task, name) for task in TASKS for name in ARMS}
    base.require_known(arg, known, ARG)
    task, name = known[arg]
    arm = ARMS[name]
    c = toy.get_config(f"{'recall' if task in DISTRACTORS else 'books'}-transformer")
    c.model.head_dim = 32 if task == "novels-wide" else 16
    if task == WIDER:
        c.model.d_model = 128
        c.model.mlp_dim = base.mlp_dim(c.model.d_model)
    if task in DISTRACTORS:
        _recall(c, DISTRACTORS[task])
    else:
        _novels(c)
    base.choose(c, arm.architecture, heads=TRANSFORMER_HEADS)
    arm.change(c)
    c.update_from_flattened_dict(TUNED.get(task, {}).get(name, {}))
    return c


def _novels(c: ConfigDict) -> None:
    c.data.path = "stores/novels"  # `make novels` writes these two stores.
    c.eval.test.path = "stores/novels-test"
    c.eval.bigrams_path = None
    c.eval.suites = ("loss", "test")
    c.eval.loss_tokens = 262_144
    c.optimizer.learning_rate = NOVELS_RATE
    c.train.steps = 2000
    c.eval.every_steps = c.train.steps


def _recall(c: ConfigDict, distractors: int) -> None:
    c.data.synthetic.distractors = distractors
    c.data.sequence_length = 2 * c.data.synthetic.pairs + distractors + 1
    c.train.global_batch_tokens = ROWS_PER_UPDATE * c.data.sequence_length
    c.eval.suites = ("loss", "exact_match")
    c.optimizer.learning_rate = RECALL_RATE
    c.train.steps = 2500
    c.eval.every_steps = 250  # Often, so that the page can say when a run solves the task.
