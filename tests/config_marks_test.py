"""What config fields state at their declaration, the rules that follow from it, and names of other trainers."""

import re

import pytest
from conftest import ROOT

from difftx.config import Config, ModelConfig, affects
from difftx.config.affects import Effect
from difftx.config.fields import Group, fields_with, marks, type_of, types_of, without
from difftx.config.flag import Flag
from difftx.config.recipes import load_config
from difftx.config.synonyms import SYNONYMS
from difftx.errors import UserError
from difftx.model.architectures import ARCHITECTURES
from difftx.training.resume import changed_fields

for name in ARCHITECTURES:
    type_of(ModelConfig, name)  # Adds the architecture's own group.
MARKS = dict(marks(Config))
QUICKSTART = f"{ROOT}/configs/quickstart.py:diff"


def test_a_field_without_an_effect_cannot_be_imported():
    with pytest.raises(TypeError, match=r"Fresh\.size: state what a change of it affects"):

        class Fresh(Group):
            size: int = 1

    class Stated(Group):
        size: affects.Training[int] = 1

    assert fields_with(Stated, Effect.TRAINING) == ["size"]


@pytest.mark.parametrize(
    ("field", "value", "is_neutral", "is_safe"),
    [
        ("mesh.fsdp", "2", True, True),
        ("model.cache.bits", "8", False, False),
        ("eval.needle.samples", "3", True, True),
        ("train.kernel_choice", "fixed", True, True),
        ("train.steps", "999", False, True),
        ("model.compute_dtype", "bfloat16", False, False),
        ("model.rope_scaling.factor", "2", False, False),
        ("data.seed", "3", False, False),
        ("checkpoint.init_from", "runs/other", False, False),
        ("train.teacher", "runs/other", False, True),  # A resume compares the teacher's weights.
        ("train.trainable", "blocks/*", False, False),
    ],
)
def test_what_a_change_means_for_a_resume(field, value, is_neutral, is_safe):
    (change,) = changed_fields(load_config(QUICKSTART, {}), load_config(QUICKSTART, {field: value}))
    assert (change.field, change.is_neutral, change.is_safe) == (field, is_neutral, is_safe)


def test_fields_are_left_out_at_any_depth():
    values = {"path": "a", "sources": ({"name": "b", "path": "c", "weight": 1.0},), "upsampling": {}, "synthetic": {}}
    group = types_of(Config)["data"]
    left = without(group, {name: None for name in types_of(group)} | values | {"stages": ()}, Flag.PROCESS)
    assert left["sources"] == ({"name": "b", "weight": 1.0},)
    assert "path" not in left


def test_names_of_other_trainers_lead_to_fields():
    words = [word for names in SYNONYMS.values() for word in names.split()]
    assert SYNONYMS.keys() <= MARKS.keys()
    assert len(words) == len({*words} - {name.rpartition(".")[2] for name in MARKS})
    for wrong, right in {
        "model.hidden_size": "model.d_model",
        "train.batch_size": "train.global_batch_tokens",
        "data.block_size": "data.sequence_length",
        "optimizer.lr": "optimizer.learning_rate",  # difflib alone suggests optimizer.b2.
        "optimizer.wd": "optimizer.weight_decay",
        "train.learning_rate": "optimizer.learning_rate",  # A field of another group.
        "model.num_layer": "num_layers",
    }.items():
        message = rf"{re.escape(wrong)}.*no such field\. Did you mean '{right}'( \(in .*\))?\?"
        with pytest.raises(UserError, match=message):
            load_config(QUICKSTART, {wrong: "1"})
