"""Experiments that a review of the paper proposes, to separate noise cancellation from other explanations.

The review argues that subtracting two attention maps may help by making attention sparse and signed, without cancelling
any shared noise. Each proposed experiment is an arm of this recipe; docs/reproducing.md lists the numbers that answer
it. The controls `diff` and `transformer` run every suite that looks inside the model, so one training of each also
answers NC1, NC3, SP2, the first half of Q1, and Q5.

Command:  python train.py --config=configs/review.py:nc2-retrieval --workdir=runs/review/nc2-retrieval
          python train.py --config=configs/review.py:nc1-text --config.data.path=stores/corpus --workdir=…
          python -m difftx sweep --config=configs/review.py --grid arm=diff,nc2,transformer,sp1,sp3 data=retrieval \
              data.synthetic.distractors=64,256,768 seed=0,1,2 --out=runs/review
Protocol: 12 layers of width 1,024. The Transformer has 16 heads of 64; the other architectures have as many parameters.
          text: 10,000 steps of 0.25M tokens, 2,048 tokens per row. retrieval: each row asks for one of 64 keys among
          distractors (difftx/data/synthetic.py), 10,000 steps of 64K tokens, 1,024 tokens per row; the loss counts
          only the answer. The suites of an arm run at every tenth of the training.
Compute:  5e18 FLOPs per arm on text (3 hours of an H200 at 400 TFLOP/s), 7e17 on retrieval (30 minutes).
"""

from ml_collections import ConfigDict

from difftx.configs import base
from difftx.configs.base import Arm

ARG = "{arm}-{data}"  # Form of the recipe's argument; `difftx sweep --grid` sets the names in braces.

INSIDE = ("attention", "gradients", "outliers")  # Suites that look inside the model.
NEED_TEXT = ("hallucination",)  # Suites that require a model of text; the data "retrieval" leaves them out.
# λ = 1 in all layers throughout training. The factor after the head norm, 1 - λ_init, would then be 0, so it is set to
# 0.2, its value at λ_init = 0.8.
LAMBDA_1 = {"lambda_learned": False, "lambda_init": 1.0, "post_scale": 0.2}


ARMS = {
    "diff": Arm("diff", suites=INSIDE),
    "transformer": Arm("transformer", suites=INSIDE),
    "nc1": Arm("diff", suites=("attention",)),  # Are A1 and A2 more alike at irrelevant tokens?
    "nc2": Arm("diff", LAMBDA_1),  # Does pure subtraction win if there are many distractors?
    "nc3": Arm("diff", suites=("gradients", "attention")),  # Does training push both maps towards shared noise?
    "sp1": Arm("top_k"),  # Does explicit sparsity do as well?
    "sp2": Arm("diff", suites=("attention",)),  # How sparse are the maps, compared with `transformer`?
    "sp3": Arm("signed_mask", suites=("attention",)),  # Does one softmax with a learned signed mask do as well?
    "q1": Arm("diff", LAMBDA_1),  # λ clamped to 1; `diff` is the arm with a learned λ per layer.
    "q2-scalar": Arm("diff", {"head_norm": "scalar"}),  # What is left without the head norm?
    "q2-none": Arm("diff", {"head_norm": "none", "post_scale": 1.0}),
    "q3": Arm("transformer", {"num_heads": 32}),  # Are twice as many heads of half the width the reason?
    "q4": Arm("diff", suites=("hallucination",)),  # Are answers truer than `transformer`'s, or only fewer?
    "q5": Arm("diff", suites=("attention", "outliers")),  # Do attention sinks persist, compared with `transformer`?
    "gated": Arm("gated"),  # Does a gate explain it? The review's closing remark.
    "lambda_0.5": Arm("diff", {"lambda_init": 0.5}),  # How much does the schedule of λ_init matter?
    "lambda_0.8": Arm("diff", {"lambda_init": 0.8}),
}


def get_config(arg: str = "diff-text") -> ConfigDict:
    """Return the config named `arm-data`, where data is text or retrieval."""
    base.require_known(arg, [f"{name}-{data}" for name in ARMS for data in ("text", "retrieval")], ARG)
    name, _, data = arg.rpartition("-")
    arm = ARMS[name]
    c = base.get_config()
    c.model.d_model = 1024
    c.model.num_layers = 12
    c.model.mlp_dim = 2 * (4 * c.model.d_model // 3)
    c.optimizer.learning_rate = 6e-4
    c.train.steps = 10_000
    c.eval.suites = ("loss", *arm.suites)
    if data == "retrieval":
        c.model.vocab_size = c.data.synthetic.vocab_size
        c.data.path = "synthetic:retrieval"
        c.data.tokenizer = "bytes"  # Not used, but needs no download.
        c.data.synthetic.train_examples = 1_000_000
        c.data.synthetic.distractors = 768
        c.data.sequence_length = 1024
        c.train.global_batch_tokens = 65_536
        c.eval.suites = ("exact_match", *(suite for suite in arm.suites if suite not in NEED_TEXT))
    base.choose(c, arm.architecture, heads=16)
    arm.change(c)
    c.checkpoint.keep_every_steps = c.eval.every_steps  # So that other suites can be run later.
    return c
