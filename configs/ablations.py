"""The paper's ablations at 1.4B (arXiv 2410.05258, §3.8, Table 6).

Command:  python train.py --config=configs/ablations.py:diff-no_norm --workdir=runs/ablations/diff-no_norm \
              --config.data.path=stores/corpus --config.eval.bigrams_path=bigrams
          python -m difftx sweep --config=configs/ablations.py --grid arm=transformer,diff --out=runs/ablations
Protocol: as configs/scaling.py at 1.4B: 24 layers of width 2,048, 40,000 steps of 0.25M tokens.
Expected: validation loss, loss on AR-Hit tokens and loss on other tokens (suites loss and recall):

    transformer             16 heads of 128                        3.087  0.898  3.272
    transformer-8x256       8 heads of 256                         3.088  0.899  3.273
    transformer-8x256-norm  8 heads of 256, with head norm         3.086  0.899  3.271
    diff                    8 heads of 2 × 128                     3.062  0.880  3.247
    diff-no_norm            diff without head norm                 3.122  0.911  3.309
    diff-lambda_0.8         diff with λ_init = 0.8 in all layers   3.065  0.883  3.250
    diff-lambda_0.5         diff with λ_init = 0.5 in all layers   3.066  0.882  3.251

          Not reproduced here yet. The paper does not say whether its model without head norm keeps the factor
          1 - λ_init. Here it keeps the factor; --config.model.post_scale=1 removes it.
Compute:  1e20 FLOPs per arm.
"""

from ml_collections import ConfigDict

from difftx.configs import base, scaling
from difftx.configs.base import Arm

ARG = "{arm}"  # Format of the recipe's argument; see base.py.

ARMS = {
    "transformer": Arm("transformer"),
    "transformer-8x256": Arm("transformer", wide_heads=True),
    "transformer-8x256-norm": Arm("transformer", {"head_norm": "rms_affine"}, wide_heads=True),
    "diff": Arm("diff"),
    "diff-no_norm": Arm("diff", {"head_norm": "none"}),
    "diff-lambda_0.8": Arm("diff", {"lambda_init": 0.8}),
    "diff-lambda_0.5": Arm("diff", {"lambda_init": 0.5}),
}


def get_config(arm: str = "diff") -> ConfigDict:
    """Return the config of an arm, that is, of a row in Table 6 of the paper."""
    base.require_known(arm, ARMS, ARG)
    c = scaling.get_config(f"{ARMS[arm].architecture}-1.4b")
    ARMS[arm].change(c)
    c.eval.suites = ("loss", "recall")
    return c
