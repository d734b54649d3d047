"""Results of difftx's commands, compared with golden.json. README.md explains how to renew the file."""

import functools

import pytest
from helpers.command_server import commands

from difftx.model.architectures import ARCHITECTURES
from golden import records

BUILT_IN = set(ARCHITECTURES)  # Copied before a test loads an extension.
RENEW = """\
{count} values differ from tests/golden/golden.json:
{table}

If the change of behaviour is intended: python -m tests.golden.renew --reason="why the numbers change"
If not, find the commit: python -m tests.golden.compare OLD NEW
"""


@pytest.mark.parametrize(
    "part",
    [
        *records.FAST_PARTS,
        *(pytest.param(part, marks=pytest.mark.long) for part in records.SLOW_PARTS),
        *(pytest.param(part, marks=pytest.mark.exhaustive) for part in records.SLOWEST_PARTS),
    ],
)
def test_numbers_equal_the_golden_record(part):
    if records.lacks_extra(part):
        pytest.skip("the extra `eval` is not installed")
    new = records.make_record(records.ROOT, part, functools.partial(commands().run, timeout=3600))
    old = {path: value for path, value in records.read_golden()[1].items() if path.startswith(f"{part}/")}
    found = records.differences(old, new, exact=False)
    if found:
        pytest.fail(RENEW.format(count=len(found), table=records.table(found)), pytrace=False)


def test_every_architecture_is_recorded():
    values = records.read_golden()[1]
    recorded = {path.split("/")[1] for path in values if path.startswith(("training/", "variants/"))}
    assert recorded >= BUILT_IN


def test_only_floats_may_differ_and_only_within_their_tolerance():
    """Integers, texts and structure are compared exactly, floats by the tolerance of their dtype or bit for bit."""
    old = {"a/loss": [2.0, 1.0], "bfloat16/loss": 2.0, "step": [1, 2], "text": "x", "hash": ["bits:1"], "gone": None}
    near = {"a/loss": [2.0, 1.00005], "bfloat16/loss": 2.01, "step": [1, 2], "text": "x", "hash": ["bits:2"]}
    assert [path for path, *_ in records.differences(old, near | {"gone": None}, exact=False)] == []
    exactly = records.differences(old, near, exact=True)
    assert [path for path, *_ in exactly] == ["a/loss", "bfloat16/loss", "gone", "hash"]
    far = {"a/loss": [2.001, 1.0], "bfloat16/loss": 2.1, "step": [1, 3], "text": "y", "new": 0}
    assert [path for path, *_ in records.differences(old, far, exact=False)] == [
        "a/loss", "bfloat16/loss", "gone", "new", "step", "text",
    ]  # fmt: skip
    for before, after in [(1, 1.0), ([1.0], [1.0, 1.0]), (1.0, float("nan")), (1.0, None), (0.0, 1e-5)]:
        assert records.differences({"x": before}, {"x": after}, exact=False), (before, after)
    assert records.table([("a/loss", 1.0, 2.0)]) == "a/loss\n  old 1.0\n  new 2.0"
