"""Wrong settings of suites: the message names the field, the value and the fix, when the config is built."""

import json

import pytest
from conftest import ROOT
from helpers.evals_examples import set_of, task_of

from difftx.config.build import override
from difftx.config.recipes import load_config
from difftx.errors import UserError

CONFIG = load_config(f"{ROOT}/configs/quickstart.py:diff", {})
MATH = {"name": "sums", "format": "gsm8k", "test": "a.jsonl", "train": "a.jsonl", "train_format": None}


def entries(make, *changes):
    return json.dumps([make("folder", **of) if callable(make) else make | of for of in changes])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("attention.layers", "1,1", r"eval.attention.layers=\(1, 1\): the entries must differ"),
        ("attention.queries", "5", "eval.attention.queries=5 must lie in 1 … needles=2"),
        ("attention.l0_share", "1.5", "eval.attention.l0_share=1.5 must be at least 0 and less than 1"),
        ("hallucination.sets", entries(set_of, {}, {}), "2 sets are named 'qa'"),
        (
            "hallucination.sets",
            entries(set_of, {"name": "qa"}).replace('"qa"', '"summarisation"'),
            "of a kind have this",
        ),
        ("hallucination.sets", entries(set_of, {"kind": "summary"}), r"sets\[0\].kind=.*Did you mean 'summarisation'"),
        (
            "hallucination.sets",
            entries(set_of, {"kind": "summarisation"}),
            "question='input' with kind='summarisation'",
        ),
        ("hallucination.sets", entries(set_of, {"question": None}), "qa: question=None with kind='question_answering'"),
        ("hallucination.support_threshold", "50", "support_threshold=50.0 must lie in 0 … 1"),
        ("harness.tasks", "", "give at least one"),
        ("harness.tasks", "piqa,piqa", r"eval.harness.tasks=.*the entries must differ"),
        ("icl.tasks", entries(task_of, {}, {}), "2 tasks are named 'trec'"),
        ("judge.base_url", "https://me:sk-proj-1234@host/v1", "without user, password or query"),
        ("judge.base_url", "file:///etc/passwd", "must be an http or https address"),
        ("judge.key_variable", "sk-proj-1234", "the key itself belongs into that variable"),
        ("math.tasks", entries(MATH, {"train": None}), "'sums': eval.math.shots=4 demonstrations need a file"),
        ("math.tasks", entries(MATH, {}, {}), "2 tasks are named 'sums'"),
        ("math.tasks", entries(MATH, {"format": "gsm"}), "Did you mean 'gsm8k'"),
        ("needle.cases", '[{"needles": 2, "queries": 3}]', r"needle.cases\[0\]: queries=3 must lie in 1 … needles=2"),
        ("needle.cases", "[]", r"eval.needle.cases=\(\): give at least one"),
        ("needle.depths", "0.5,50", "50.0 must lie in 0 … 1"),
        ("quantize.bits", "16,1", r"eval\.quantize\.bits\[1\]=1 must lie in 2 … 16"),
        ("quantize.suites", "", r"eval\.quantize\.suites=\(\): give at least one"),
    ],
)
def test_a_wrong_setting_is_named_and_no_key_is_shown(field, value, message):
    with pytest.raises(UserError, match=message) as error:
        override(CONFIG, {f"eval.{field}": value})
    assert "1234" not in str(error.value)
