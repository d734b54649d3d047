"""Tests of the contents of plans, which are not carried out."""

import pytest

from chaos.plan import CONFIGS, UNREADABLE, make_plan


def corruptions(seed, faults, without=()):
    """Return the corruption of each episode, in as many runs as it takes to reach the number of faults."""
    plans, number = [], 0
    while sum(each.faults for each in plans) < faults:
        plans.append(make_plan(seed, number, without))
        number += 1
    return [episode.corruption for each in plans for episode in each.episodes]


@pytest.mark.parametrize("seed", range(20))
def test_the_forty_faults_of_ci_include_rare_corruptions(seed):
    assert {*UNREADABLE, CONFIGS, "symlinked step"} <= set(corruptions(seed, 40))


def test_impossible_faults_are_not_planned():
    assert not set(UNREADABLE) & set(corruptions(1, 400, without=UNREADABLE))


def test_common_corruptions_are_planned_too():
    dealt = corruptions(1, 400)
    assert min(dealt.count(each) for each in ("flipped bit", "truncated file", "removed manifest")) > 1
