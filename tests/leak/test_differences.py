"""Where answers part, and the numeric floor, on two code paths whose logits are known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ruler_bench.leak.differences import (
    BOUNDS,
    FLOOR_FACTOR,
    difference,
    largest_shift,
    numeric_floor,
)

VOCABULARY = 12


def _paths(rng, length, sharpness, noise):
    """Two greedy decodings of the same logits, each with noise of its own."""
    first, second = [], []
    for _ in range(length):
        logits = rng.normal(0, sharpness, VOCABULARY)
        one, two = (logits + rng.normal(0, noise, VOCABULARY) for _ in range(2))
        first.append(one)
        second.append(two)
        if one.argmax() != two.argmax():
            break  # from here on the paths see other prefixes
    return first, second


def _record(made, ordinal, logits):
    ids = tuple(int(one.argmax()) for one in logits)
    margins = [float(np.sort(one)[-1] - np.sort(one)[-2]) for one in logits]
    return made.answer(
        "fresh", ordinal, output_tokens=ids, top2_margin=tuple(margins), logits_digest=None
    )


@given(st.integers(0, 10_000))
def test_where_two_paths_part_their_logits_differ_by_the_gap_at_least(made, seed):
    rng = np.random.default_rng(seed)
    first, second = _paths(rng, 40, 0.2, 0.05)
    how = difference(_record(made, 0, first), _record(made, 0, second), False)
    if how is None:
        assert all(a.argmax() == b.argmax() for a, b in zip(first, second, strict=True))
        return
    assert how.position == len(first) - 1
    shift = second[-1] - first[-1]
    a, b = first[-1].argmax(), second[-1].argmax()
    assert shift[b] - shift[a] >= how.gap - 1e-12


@given(st.integers(0, 10_000))
def test_where_they_agree_margins_differ_by_no_more_than_logits(made, seed):
    rng = np.random.default_rng(seed)
    first, second = _paths(rng, 40, 2.0, 0.05)
    agreed = [(a, b) for a, b in zip(first, second, strict=True) if a.argmax() == b.argmax()]
    if agreed:
        largest = max(np.ptp(b - a) for a, b in agreed)
        one, two = _record(made, 0, first), _record(made, 0, second)
        assert largest_shift(one, two) <= largest + 1e-12


def _pairs(made, noise, count=20, faulty=0, fault=0.5):
    rng = np.random.default_rng(0)
    pairs = []
    for ordinal in range(count):
        first, second = _paths(rng, 12, 3.0, fault if ordinal < faulty else noise)
        pairs.append((_record(made, ordinal, first), _record(made, ordinal, second)))
    return pairs


def test_the_floor_is_above_what_numerics_do(made):
    """At noise of 0.05 logits, 60 long answers part at near ties that all stay below it."""
    floor = numeric_floor(_pairs(made, 0.05), ["bfloat16", "bfloat16"])
    assert floor.typical == pytest.approx(0.12, abs=0.08)
    assert floor.value == pytest.approx(FLOOR_FACTOR * floor.typical)
    gaps = []
    for seed in range(60):
        first, second = _paths(np.random.default_rng(seed), 200, 0.5, 0.05)
        how = difference(_record(made, 0, first), _record(made, 0, second), False)
        gaps += [how.gap] if how else []
    assert len(gaps) > 20
    assert max(gaps) < floor.value


def test_a_fault_in_some_samples_does_not_raise_the_floor(made):
    clean = numeric_floor(_pairs(made, 0.05), ["bfloat16"])
    faulty = numeric_floor(_pairs(made, 0.05, faulty=8), ["bfloat16"])
    assert faulty.value < 2 * clean.value


def test_a_fault_in_all_samples_is_held_at_what_rounding_can_do(made):
    floor = numeric_floor(_pairs(made, 0.05, faulty=20), ["float32", "float32"])
    assert floor.value == BOUNDS["float32"][1]
    assert floor.is_beyond_rounding
    assert "held at" in floor.sentence()


def test_the_coarser_dtype_bounds_the_floor(made):
    assert numeric_floor(_pairs(made, 0.0), ["float32", "bfloat16"]).value == BOUNDS["bfloat16"][0]
    assert numeric_floor(_pairs(made, 0.0), ["float32", "float32"]).value == BOUNDS["float32"][0]


def test_too_little_to_measure_takes_the_bound(made):
    floor = numeric_floor(_pairs(made, 0.01, count=2), ["float32"])
    assert floor.typical is None
    assert floor.value == BOUNDS["float32"][1]
    assert "too little" in floor.sentence()


def test_bits_tokens_and_text(made):
    answer = made.answer
    same, other = answer("fresh", 0), answer("fresh", 0, bits="other")
    assert difference(same, same, True) is None
    assert difference(same, other, False) is None
    assert difference(same, other, True).level == "bits"
    assert not difference(same, other, True).is_visible
    changed = answer("fresh", 0, f" {made.number(0)}!")
    how = difference(same, changed, True)
    assert (how.level, how.position, how.gap) == ("tokens", 8, 20.0)
    text = answer("fresh", 0, tokens=False)
    assert difference(same, text, True) is None
    assert difference(same, answer("fresh", 0, " 12", tokens=False), True).level == "text"


def test_a_longer_answer_parts_where_the_shorter_ends(made):
    long = made.answer("fresh", 0, f" {made.number(0)}. And more")
    assert difference(made.answer("fresh", 0), long, False).position == 9
