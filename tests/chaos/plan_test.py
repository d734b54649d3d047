"""What a plan has, without carrying it out."""

import pytest

from chaos.plan import CONFIGS, INDEX, UNREADABLE, plan


def damages(seed, faults, without=()):
    """Return what the files meet in the runs that so many faults take."""
    plans, number = [], 0
    while sum(each.faults for each in plans) < faults:
        plans.append(plan(seed, number, without))
        number += 1
    return [episode.damage for each in plans for episode in each.episodes]


@pytest.mark.parametrize("seed", range(20))
def test_the_forty_faults_of_ci_have_what_is_rare(seed):
    assert {*UNREADABLE, INDEX, CONFIGS, "symlinked step"} <= set(damages(seed, 40))


def test_what_cannot_be_made_here_is_not_planned():
    assert not set(UNREADABLE) & set(damages(1, 400, without=UNREADABLE))


def test_other_damage_comes_as_well():
    dealt = damages(1, 400)
    assert min(dealt.count(each) for each in ("flipped bit", "truncated file", "removed manifest")) > 1
