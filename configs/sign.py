"""The control by sign at 0.15M parameters: does it matter that differential attention subtracts A2, not adds it?

Plan:     docs/preregistration_sign.md, which states the contrasts, tests and seeds. Nothing has run yet.
Command:  python -m difftx sweep --config=configs/sign.py --grid task=novels arm=subtract,add seed=50,51 --out=runs/sign
          python -m difftx eval --workdir=runs/sign/novels-add-seed50 --extension=configs/sign.py
Protocol: question 1 of configs/controls.py. All arms but `transformer` have the code of differential attention and its
          head norm. Arms whose second queries and keys do not train have a wider MLP, so that all arms train equally
          many parameters.
Hardware: a CPU core, half a minute per run of 2M tokens and eight minutes per run of 12M tokens.
"""

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from difftx.configs import base, controls
from difftx.configs.base import Arm
from difftx.kernels.weight_functions import MASKED, difference
from difftx.model.architectures import ARCHITECTURES
from difftx.model.attention import DiffAttention

ARG = "{task}-{arm}"  # Format of the recipe's argument; see base.py.
LEARNED = {"lambda_bound": "sigmoid"}  # |λ| lies in (0, 1), one value per layer.
# Per layer, 2 weights of 64 × 64 do not train. 43 MLP channels, with 3 × 64 weights each, compensate for them.
USED_PARAMETERS = {"mlp_dim": base.mlp_dim(64) + 43}


@ARCHITECTURES.register("diff_add")
class AddedAttention(DiffAttention):
    """(A1 + |λ| A2) V, where |λ| is the bounded λ of `diff`."""

    def lam(self, lambda_init: jax.Array) -> jax.Array:
        return -super().lam(lambda_init)


@ARCHITECTURES.register("diff_uniform")
class UniformAttention(DiffAttention):
    """(A1 - λ U) V, where U is the mean over the visible keys. The second queries and keys have no effect."""

    kernel = "weighted_attention"

    def weight_function(self):
        return minus_mean


def minus_mean(logits1_CS: jax.Array, logits2_CS: jax.Array, lam_C1: jax.Array) -> jax.Array:
    """Return A1 - λ U. `logits2_CS` only determines which keys are visible."""
    return difference(logits1_CS, jnp.where(logits2_CS > MASKED, 0.0, logits2_CS), lam_C1)


ARMS = {
    "transformer": Arm("transformer"),
    "zero-matched": Arm("diff", {**controls.NO_SUBTRACTION, "post_scale": controls.MEAN_FACTOR, **USED_PARAMETERS}),
    "subtract": Arm("diff", LEARNED),
    "add": Arm("diff_add", LEARNED),
    "uniform": Arm("diff_uniform", {**LEARNED, **USED_PARAMETERS}),
    **{
        f"fixed_{lam:g}": Arm("diff", {"lambda_learned": False, "lambda_init": lam, "post_scale": controls.MEAN_FACTOR})
        for lam in (-0.6, -0.3, 0.0, 0.3, 0.6, 1.0)
    },
}


def get_config(arg: str = "novels-subtract") -> ConfigDict:
    """Return the config of the task novels and an arm, such as "novels-add"."""
    known = {f"novels-{name}": arm for name, arm in ARMS.items()}
    base.require_known(arg, known, ARG)
    c = controls.get_config("novels-transformer")
    base.choose(c, known[arg].architecture, heads=controls.TRANSFORMER_HEADS)
    known[arg].change(c)
    return c
