"""Numbers that no field accepts, and fields that the architecture does not use."""

import dataclasses
import json
import typing

import pytest
from conftest import ROOT

from difftx.config import Config
from difftx.config.build import config_from_dict, override
from difftx.config.checks import divisors
from difftx.config.model import default_specific_fields
from difftx.config.recipes import load_config
from difftx.configs import ablations, quickstart, toy
from difftx.errors import UserError
from difftx.evals.throughput import counterpart
from difftx.model.architectures import ARCHITECTURES
from difftx.training.fit import fit

QUICKSTART = f"{ROOT}/configs/quickstart.py"
CONFIG = load_config(QUICKSTART, {})


def fields_of(cls, kind, prefix=""):
    """Yield the names of all fields of a type outside of lists, including optional fields."""
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            yield from fields_of(hint, kind, f"{prefix}{name}.")
        elif kind in (hint, *typing.get_args(hint)):
            yield prefix + name


FLOATS = list(fields_of(Config, float))
INTEGERS = [field for field in fields_of(Config, int) if field not in FLOATS]
SIGNED = {"model.lambda_init", "model.post_scale"}  # Floats that may be negative. Of the integers, mesh axes may be -1.


def test_number_fields_of_all_groups_are_collected():
    assert {"model.norm_eps", "optimizer.clip_norm", "eval.judge.timeout_seconds", "data.upsampling.share"} < {*FLOATS}
    assert {"train.seed", "model.num_kv_heads", "data.synthetic.pairs", "eval.needle.samples"} < {*INTEGERS}


@pytest.mark.parametrize("field", FLOATS)
def test_no_number_is_nan_or_infinite_and_few_are_negative(field):
    for value in ("nan", "inf", "-inf", "1e999"):
        with pytest.raises(UserError, match=rf"^{field}(\[0\])?=-?(nan|inf): expected a finite number$"):
            override(CONFIG, {field: value})
    if field in SIGNED:
        override(CONFIG, {field: "-0.5"})
    else:
        with pytest.raises(UserError, match=rf"^{field}(\[0\])?=.*-0\.5"):
            override(CONFIG, {field: "-0.5"})


@pytest.mark.parametrize("field", INTEGERS)
def test_no_integer_is_beyond_64_bits_or_negative(field):
    for value in (2**63, 10**30, -(10**30)):
        with pytest.raises(UserError, match=rf"^{field}(\[0\])?: an integer of \d+ bits; at most 63 are possible$"):
            override(CONFIG, {field: str(value)})
    with pytest.raises(UserError, match=rf"^{field}(\[0\])?='1e30': expected an integer"):
        override(CONFIG, {field: "1e30"})
    with pytest.raises(UserError, match=rf"^{field}(\[0\])?='9999") as error:
        override(CONFIG, {field: "9" * 5000})
    assert len(str(error.value)) < 2000
    with pytest.raises(UserError, match=field.rpartition(".")[2]):
        override(CONFIG, {field: "-2"})


def test_numbers_in_a_config_file_and_in_lists_are_checked_alike(tmp_path):
    raw = json.loads(load_config(QUICKSTART, {}).to_json())
    raw["eval"]["needle"]["depths"] = (0.5, float("nan"))
    with pytest.raises(UserError, match=r"eval\.needle\.depths\[1\]=nan: expected a finite number"):
        config_from_dict(raw)
    raw["eval"]["needle"]["depths"] = (0.5, 10**5000)
    with pytest.raises(UserError, match=r"eval\.needle\.depths\[1\]: an integer of 16610 bits"):
        config_from_dict(raw)


@pytest.mark.parametrize("field", ["model.d_model", "model.vocab_size", "data.sequence_length", "train.seed"])
def test_impossibly_large_sizes_are_rejected(field):
    with pytest.raises(UserError, match=rf"{field}=4611686018427387904 must"):
        load_config(QUICKSTART, {field: str(2**62)})


def test_heads_that_do_not_divide_a_large_prime_are_rejected_quickly():
    with pytest.raises(UserError, match=r"4 sub-heads do not divide d_model=2147483647"):
        fit(load_config(QUICKSTART, {"model.d_model": str(2**31 - 1)}))
    assert divisors(360) == [n for n in range(1, 361) if 360 % n == 0]
    assert divisors(1) == [1]


EVERY = tuple(ARCHITECTURES)
LEARNED = ("diff", "gda", "zero_branch")
READERS = {
    "lambda_init": ("diff", "gda", "signed_mask", "zero_branch", "dex"),
    "lambda_learned": LEARNED,
    "lambda_std": LEARNED,
    "lambda_bound": LEARNED,
    "post_scale": tuple(name for name in EVERY if name not in ("zero_branch", "dex")),
    "anneal_steps": ("zero_branch", "dex"),
}
VALUES = {
    "lambda_init": 0.8,
    "lambda_learned": False,
    "lambda_std": 0.2,
    "lambda_bound": "tanh",
    "post_scale": 0.5,
    "anneal_steps": 5,
}


@pytest.mark.parametrize("architecture", EVERY)
def test_a_field_that_an_architecture_does_not_read_is_refused(architecture):
    config = load_config(f"{QUICKSTART}:{architecture}", {})  # The defaults of the architecture are accepted.
    assert {*VALUES, "signal_heads", "output_gate", "top_k"} == {*default_specific_fields()}
    for field, value in VALUES.items():
        if architecture in READERS[field]:
            fit(override(config, {f"model.{field}": str(value)}))
        else:
            with pytest.raises(UserError, match=rf"model\.{field}=.*: architecture {architecture!r} does not use it"):
                fit(override(config, {f"model.{field}": str(value)}))


def test_every_config_of_every_arm_still_loads():
    for name in toy.LEARNING_RATES["books"]:
        load_config(f"{ROOT}/configs/toy.py:books-{name}", {})
    for arm in ablations.ARMS:
        load_config(f"{ROOT}/configs/ablations.py:{arm}", {})
    assert quickstart.get_config("diff_fixed_lambda").model.lambda_learned is False
    load_config(f"{QUICKSTART}:diff_fixed_lambda", {})


def test_the_counterpart_resets_architecture_specific_fields():
    # `lambda_learned` is left out, because a fixed λ accepts no bound.
    fields = ("lambda_init", "lambda_std", "lambda_bound", "post_scale")
    changes = {f"model.{field}": str(VALUES[field]) for field in fields}
    other = counterpart(load_config(f"{QUICKSTART}:diff", changes))
    assert other.model.architecture == "transformer"
    assert (other.model.lambda_std, other.model.post_scale) == (0.1, None)
