"""The experiments and questions of a review of the paper, which would tell noise cancellation from other explanations.

The review holds that subtracting two maps may help by making attention sparse and signed, without cancelling any shared
noise. Each experiment that it asks for is an arm here; docs/reproducing.md says which numbers answer it. `diff` and
`transformer` are the controls and run every suite, so that one training of each also answers NC1, NC3, SP2, Q1's first
half and Q5.

Command:  python train.py --config=configs/review.py:nc2-retrieval --workdir=runs/review/nc2-retrieval
          python train.py --config=configs/review.py:nc1-text --config.data.path=stores/corpus --workdir=…
          python -m difftx sweep --config=configs/review.py --grid arm=diff,nc2,transformer,sp1,sp3 data=retrieval \
              data.synthetic.distractors=64,256,768 seed=0,1,2 --out=runs/review
Protocol: 12 layers of 1,024, the Transformer with 16 heads of 64 and the others as large (configs/architectures.py).
          text: 10,000 steps of 0.25M tokens, 2,048 a row. retrieval: one of 64 keys is asked for, among distractors
          (difftx/data/synthetic.py), 10,000 steps of 64K tokens, 1,024 a row; the loss counts the answer alone.
Compute:  5e18 FLOPs an arm on text, 7e17 on retrieval: 3 hours and 30 minutes of an H200 at 400 TFLOP/s.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from difftx.configs import architectures, base
from ml_collections import ConfigDict

from difftx.errors import did_you_mean

ARG = "{arm}-{data}"  # What `difftx sweep --grid` fills in.

LOOKING_INSIDE = ("attention", "gradients", "outliers")
WANT_TEXT = ("hallucination",)  # Left out on retrieval.
# λ = 1 in all layers, all along. The factor behind the head norm would be 0 then; 0.2 is what λ_init = 0.8 leaves.
LAMBDA_1 = {"lambda_learned": False, "lambda_init": 1.0, "post_scale": 0.2}


class Arm(NamedTuple):
    """A model, and what is measured of it at every tenth of its training beside loss or exact match."""

    architecture: str
    model: Mapping[str, Any] = MappingProxyType({})
    suites: tuple[str, ...] = ()


ARMS = {
    "diff": Arm("diff", suites=LOOKING_INSIDE),
    "transformer": Arm("transformer", suites=LOOKING_INSIDE),
    "nc1": Arm("diff", suites=("attention",)),  # Are A1 and A2 more alike where nothing relevant stands?
    "nc2": Arm("diff", LAMBDA_1),  # Does pure subtraction win where distractors are many?
    "nc3": Arm("diff", suites=("gradients", "attention")),  # Does training push the maps towards shared noise?
    "sp1": Arm("top_k"),  # Does explicit sparsity do as well?
    "sp2": Arm("diff", suites=("attention",)),  # How sparse are the maps? Beside `transformer`.
    "sp3": Arm("signed_mask", suites=("attention",)),  # Does one softmax with a learned signed mask?
    "q1": Arm("diff", LAMBDA_1),  # λ by layer: `diff`'s; clamped to 1: this.
    "q2-scalar": Arm("diff", {"head_norm": "scalar"}),  # What is left without the head norm?
    "q2-none": Arm("diff", {"head_norm": "none", "post_scale": 1.0}),
    "q3": Arm("transformer", {"num_heads": 32}),  # Is it the finer heads, half as wide and twice as many?
    "q4": Arm("diff", suites=("hallucination",)),  # Truer, or only quieter? Beside `transformer`.
    "q5": Arm("diff", suites=("attention", "outliers")),  # Do attention sinks persist? Beside `transformer`.
    "gated": Arm("gated"),  # Is it a gate? The review's closing remark.
    "lambda_0.5": Arm("diff", {"lambda_init": 0.5}),  # How much does the schedule of λ_init matter?
    "lambda_0.8": Arm("diff", {"lambda_init": 0.8}),
}


def get_config(arg: str = "diff-text") -> ConfigDict:
    """Return the config named `arm-data`, data being text or retrieval."""
    name, _, data = arg.rpartition("-")
    if name not in ARMS or data not in ("text", "retrieval"):
        known = [f"{arm}-{kind}" for arm in ARMS for kind in ("text", "retrieval")]
        raise ValueError(f"{arg!r} is no arm-data such as 'nc2-retrieval'.{did_you_mean(arg, known)}")
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
        c.data.tokenizer = "bytes"  # Of no use here, and nothing has to be downloaded for it.
        c.data.synthetic.train_examples = 1_000_000
        c.data.synthetic.distractors = 768
        c.data.sequence_length = 1024
        c.train.global_batch_tokens = 65_536
        c.eval.suites = ("exact_match", *(suite for suite in arm.suites if suite not in WANT_TEXT))
    architectures.choose(c, arm.architecture, heads=16)
    c.model.update(arm.model)
    c.checkpoint.keep_every_steps = c.eval.every_steps  # For suites that are thought of later.
    return c
