"""Numbers that no field accepts, and fields that the architecture does not use."""

import dataclasses
import typing

import pytest
from conftest import ROOT

from difftx.config import Config
from difftx.config.build import override
from difftx.config.checks import divisors
from difftx.config.fields import entry_type, options, types_of
from difftx.config.model import default_specific_fields
from difftx.config.recipes import load_config
from difftx.errors import UserError
from difftx.model.architectures import ARCHITECTURES
from difftx.training.fit import fit

QUICKSTART = f"{ROOT}/configs/quickstart.py"
CONFIG = load_config(QUICKSTART, {})


def numbers(group=Config, path=""):
    """Yield the name, the type and the rules of each field for a number or for a list of numbers."""
    for name, annotation in types_of(group).items():
        inner, path_to = annotation if dataclasses.is_dataclass(annotation) else entry_type(annotation), f"{path}{name}"
        if inner:
            yield from numbers(inner, f"{path_to}.")
            continue
        for kind, rules in options(annotation).items():
            if typing.get_origin(kind) is tuple:
                ((kind, rules),) = options(typing.get_args(kind)[0]).items()
            if kind in (int, float):
                yield path_to, kind, rules


# Fields whose group compares them with other fields, and the two factors that may be negative.
COMPARED = ("data.sources.weight", "data.stages.from_tokens", "data.stages.weights", "eval.needle.cases.needles")
COMPARED += ("eval.needle.cases.queries", "eval.attention.needles", "eval.attention.queries", "logging.profile_steps")
SIGNED = ("model.lambda_init", "model.post_scale")


def test_few_numbers_may_be_negative():
    found = [name for name, kind, rules in numbers() if all(rule.holds(kind(-2)) for rule in rules)]
    assert sorted(found) == sorted((*COMPARED, *SIGNED))
    assert len(list(numbers())) > 100


@pytest.mark.parametrize(
    ("field", "text", "message"),
    [
        *(("model.norm_eps", text, "=-?(nan|inf): expected a finite") for text in ("nan", "-inf", "1e999")),
        ("eval.needle.depths", "0.5,nan", r"\[1\]=nan: expected a finite number"),
        ("model.norm_eps", "-0.5", r"=-0\.5 must be positive$"),
        ("optimizer.clip_norm", "0", r"=0\.0 must be positive; None is possible too$"),  # 0 turns it off in nanoGPT.
        ("eval.needle.depths", "0.5,-0.5", r"\[1\]=-0\.5 must lie in 0 … 1"),
        *(("train.steps", str(n), r": an integer of \d+ bits; at most 63") for n in (2**63, -(10**30))),
        ("train.steps", "1e30", "='1e30': expected an integer"),
        ("train.steps", "9" * 5000, "='9999"),
        *((field, str(2**62), "=4611686018427387904 must") for field in ("model.d_model", "train.seed")),
    ],
)
def test_impossible_numbers_are_refused(field, text, message):
    with pytest.raises(UserError, match=rf"^{field}{message}") as error:
        override(CONFIG, {field: text})
    assert len(str(error.value)) < 2000


def test_heads_that_do_not_divide_a_large_prime_are_rejected_quickly():
    with pytest.raises(UserError, match=r"4 sub-heads do not divide d_model=2147483647"):
        fit(load_config(QUICKSTART, {"model.d_model": str(2**31 - 1)}))
    assert divisors(360) == [n for n in range(1, 361) if 360 % n == 0]
    assert divisors(1) == [1]


EVERY = tuple(ARCHITECTURES)
LEARNED = ("diff", "gda", "zero_branch", "motif")
READERS = {
    "lambda_init": (*LEARNED, "signed_mask", "dex"),
    "lambda_learned": LEARNED,
    "lambda_std": LEARNED,
    "lambda_bound": ("diff", "gda", "zero_branch"),
    "post_scale": tuple(name for name in EVERY if name not in ("zero_branch", "dex")),
}
VALUES = {"lambda_init": 0.8, "lambda_learned": False, "lambda_std": 0.2, "lambda_bound": "tanh", "post_scale": 0.5}


@pytest.mark.parametrize("architecture", EVERY)
def test_a_field_that_an_architecture_does_not_read_is_refused(architecture):
    config = load_config(f"{QUICKSTART}:{architecture}", {})  # The defaults of the architecture are accepted.
    assert {*VALUES} == {*default_specific_fields()}
    for field, value in VALUES.items():
        if architecture in READERS[field]:
            fit(override(config, {f"model.{field}": str(value)}))
        else:
            with pytest.raises(UserError, match=rf"model\.{field}=.*: architecture {architecture!r} does not use it"):
                fit(override(config, {f"model.{field}": str(value)}))
