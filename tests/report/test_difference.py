"""Differences: known intervals, pairs, and how often nothing is called something."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ruler_bench.report.difference import Scores, difference, mean_difference

SCORES = st.lists(st.sampled_from([0.0, 25.0, 50.0, 100.0]), min_size=1, max_size=30)


def by_ordinal(scores, first=0):
    return Scores(range(first, first + len(scores)), scores)


def right(count, of):
    return [100.0] * count + [0.0] * (of - count)


def test_separate_samples_as_in_newcombes_table():
    # R. G. Newcombe, Statistics in Medicine 17, 1998, 873-890, table II, method 10, 56/70 - 48/80.
    found = difference(by_ordinal(right(56, 70)), by_ordinal(right(48, 80), first=1000))
    assert not found.is_paired
    assert found.points == pytest.approx(20.0)
    assert (found.low, found.high) == (
        pytest.approx(5.24, abs=0.01),
        pytest.approx(33.39, abs=0.01),
    )


def test_the_same_ordinals_are_paired_and_the_rest_is_left_out():
    mine = Scores([1, 2, 3, 9], [100.0, 100.0, 0.0, 0.0])
    theirs = Scores([0, 1, 2, 3], [0.0, 100.0, 0.0, 0.0])
    found = difference(mine, theirs)
    assert found.is_paired
    assert found.samples == 3
    assert found.points == pytest.approx(100 / 3)


def test_what_both_get_right_narrows_the_interval_of_pairs():
    a, b = right(50, 100), right(40, 100)
    paired = difference(by_ordinal(a), by_ordinal(b))
    separate = difference(by_ordinal(a), by_ordinal(b, first=1000))
    assert paired.is_clear
    assert not separate.is_clear
    assert paired.high - paired.low < (separate.high - separate.low) / 2


def test_few_answers_are_never_clear():
    assert not difference(by_ordinal([100.0]), by_ordinal([0.0])).is_clear
    assert not difference(by_ordinal(right(20, 20)), by_ordinal(right(18, 20))).is_clear
    assert difference(by_ordinal([]), by_ordinal([0.0])) is None


@given(SCORES, SCORES)
def test_the_other_way_round_is_the_same_with_another_sign(a, b):
    one, other = difference(by_ordinal(a), by_ordinal(b)), difference(by_ordinal(b), by_ordinal(a))
    assert one.points == pytest.approx(-other.points)
    assert one.low == pytest.approx(-other.high)
    assert one.low <= one.points <= one.high


@given(SCORES)
def test_equal_answers_never_differ(scores):
    found = difference(by_ordinal(scores), by_ordinal(scores))
    assert found.points == 0
    assert not found.is_clear
    assert found.mark == ""


@pytest.mark.parametrize("share", [0.5, 0.9, 0.98])
def test_where_nothing_differs_about_one_in_twenty_is_marked(share):
    rng = np.random.default_rng(11)
    marked = 0
    for _ in range(400):
        hard = rng.random(60) < 0.5  # pairs have in common how hard they are
        chance = np.where(hard, max(0.0, 2 * share - 1), 1.0)
        a, b = ((rng.random(60) < chance) * 100.0 for _ in range(2))
        marked += difference(by_ordinal(a.tolist()), by_ordinal(b.tolist())).is_clear
    assert marked <= 32  # 8%


def test_the_mean_of_many_is_surer_than_each():
    one = difference(by_ordinal(right(50, 60)), by_ordinal(right(47, 60), first=100))
    whole = mean_difference([one] * 16)
    assert whole.points == pytest.approx(one.points)
    assert whole.high - whole.low == pytest.approx((one.high - one.low) / 4)
    assert mean_difference([]) is None
