"""Experiments that a review of the paper proposes, to separate noise cancellation from other explanations.

The review argues that the subtraction A1 - λ A2 may help by making attention sparse and signed, without cancelling any
shared noise. Each proposed experiment is an arm of this recipe; docs/reproducing.md lists the numbers that answer
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

ARG = "{arm}-{data}"  # Format of the recipe's argument; see base.py.

INSIDE = ("attention", "gradients", "outliers")  # Suites that analyse attention weights, gradients and hidden states.
NEED_TEXT = ("hallucination",)  # Suites that require a text model, so they do not run on "retrieval".
# λ = 1 in all layers throughout training. The default factor after the head norm, 1 - λ_init, would be 0. Use 0.2, its
# value at λ_init = 0.8.
LAMBDA_1 = {"lambda_learned": False, "lambda_init": 1.0, "post_scale": 0.2}

ARMS = {
    "diff": Arm("diff", suites=INSIDE),
    "transformer": Arm("transformer", suites=INSIDE),
    "nc1": Arm("diff", suites=("attention",)),  # Tests if A1 and A2 agree more at irrelevant tokens.
    "nc2": Arm("diff", LAMBDA_1),  # Tests if subtraction with a fixed λ = 1 wins with many distractors.
    "nc3": Arm("diff", suites=("gradients", "attention")),  # Tests if training aligns A1 and A2 in noise.
    "sp1": Arm("top_k"),  # Tests if explicit sparsity does as well as differential attention.
    "sp2": Arm("diff", suites=("attention",)),  # Measures how sparse the attention weights are.
    "sp3": Arm("signed_mask", suites=("attention",)),  # Tests if a learned signed mask does as well.
    "q1": Arm("diff", LAMBDA_1),  # Fixes λ at 1, for comparison with `diff`, which learns one λ per layer.
    "q2-scalar": Arm("diff", {"head_norm": "scalar"}),  # Measures how much of the gain remains without the head norm.
    "q2-none": Arm("diff", {"head_norm": "none", "post_scale": 1.0}),
    "q3": Arm("transformer", {"num_heads": 32}),  # Tests if the gain comes from more, narrower heads.
    "q4": Arm("diff", suites=("hallucination",)),  # Tests if answers are truer, or only fewer.
    "q5": Arm("diff", suites=("attention", "outliers")),  # Tests if attention sinks persist.
    "gated": Arm("gated"),  # Tests if a gate alone explains the gain, as the review's closing remark suggests.
    "lambda_0.5": Arm("diff", {"lambda_init": 0.5}),  # Tests if the schedule of λ_init over the layers matters.
    "lambda_0.8": Arm("diff", {"lambda_init": 0.8}),
}


def get_config(arg: str = "diff-text") -> ConfigDict:
    """Return the config of an arm, trained on "text" or "retrieval", such as "nc2-retrieval"."""
    base.require_known(arg, [f"{name}-{data}" for name in ARMS for data in ("text", "retrieval")], ARG)
    name, _, data = arg.rpartition("-")
    arm = ARMS[name]
    c = base.get_config()
    c.model.d_model = 1024
    c.model.num_layers = 12
    c.model.mlp_dim = base.mlp_dim(c.model.d_model)
    c.optimizer.learning_rate = 6e-4
    c.train.steps = 10_000
    c.eval.suites = ("loss", *arm.suites)
    if data == "retrieval":
        c.model.vocab_size = c.data.synthetic.vocab_size
        c.data.path = "synthetic:retrieval"
        c.data.tokenizer = "bytes"  # The task does not use it. "bytes" needs no download.
        c.data.synthetic.train_examples = 1_000_000
        c.data.synthetic.distractors = 768
        c.data.sequence_length = 1024
        c.train.global_batch_tokens = 65_536
        c.eval.suites = ("exact_match", *(suite for suite in arm.suites if suite not in NEED_TEXT))
    base.choose(c, arm.architecture, heads=16)
    arm.change(c)
    c.checkpoint.keep_every_steps = c.eval.every_steps  # Keep checkpoints for suites that you run later.
    return c
