"""Flat memory, against figures made up and against memory that is really kept."""

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.check.memory import (
    GPU_RSS_BOUND_BYTES,
    LATE_BOUND_BYTES,
    RESERVED_BOUND_BYTES,
    RSS_BOUND_BYTES,
    MemorySample,
    growths,
    resident_bytes,
)
from scripts.check.soak import draw_lengths, pick_evenly

MIB = 1 << 20


def samples(rss, allocated=None, reserved=None):
    empty = [None] * len(rss)
    figures = zip(rss, allocated or empty, reserved or empty, strict=True)
    return [
        MemorySample("soak", 1, 10 * number, one[1], one[2], one[0])
        for number, one in enumerate(figures)
    ]


def test_what_comes_before_the_tenth_request_does_not_count():
    (host,) = growths(samples([0, 900 * MIB, 900 * MIB + 5, 900 * MIB]))
    assert (host.first, host.last, host.largest) == (900 * MIB, 900 * MIB, 900 * MIB + 5)
    assert host.flat


@pytest.mark.parametrize(("spike", "flat"), [(0, True), (1, False), (-1, False)])
def test_allocated_device_memory_is_equal_to_the_byte(spike, flat):
    allocated = [0, 500, 500 + spike, 500]
    found = growths(samples([1] * 4, allocated, [600] * 4))
    assert {one.name: one.flat for one in found}["device, allocated"] == flat


def test_bounds_of_the_others_are_kept_by_every_sample():
    for over in (0, 1):
        rss = [0, 0, GPU_RSS_BOUND_BYTES + over, 0]
        reserved = [0, 0, 0, RESERVED_BOUND_BYTES + over]
        found = {one.name: one.flat for one in growths(samples(rss, [7] * 4, reserved))}
        assert found["host, resident"] == found["device, reserved"] == (not over)
        (host,) = growths(samples([0, 0, RSS_BOUND_BYTES + over, 0]))
        assert host.flat == (not over)


@pytest.mark.parametrize("over", [0, 1])
def test_a_slow_leak_shows_late_in_the_life(over):
    """What libraries load for new shapes comes early; a leak goes on."""
    early = [0, 0, *[40 * MIB] * 4]
    late = [40 * MIB, 40 * MIB + LATE_BOUND_BYTES + over]
    found = {one.name: one for one in growths(samples(early + late, [7] * 8, [9] * 8))}
    assert found["host, resident"].late_bytes == LATE_BOUND_BYTES + over
    assert found["host, resident"].flat == (not over)


@given(st.lists(st.integers(0, 10**9), min_size=3, max_size=30))
def test_the_slope_is_that_of_numpy(rss):
    (host,) = growths(samples(rss))
    numbers = 10 * np.arange(1, len(rss))
    assert host.slope == pytest.approx(np.polyfit(numbers, rss[1:], 1)[0], rel=1e-6, abs=1e-3)


def test_too_few_samples_say_nothing():
    assert growths(samples([1, 2])) == []


def test_memory_that_is_kept_shows_and_memory_that_is_freed_does_not():
    resident_bytes()
    before = resident_bytes()
    kept = bytearray(os.urandom(64 * MIB))
    during = resident_bytes()
    del kept
    after = resident_bytes()
    assert during - before > 60 * MIB
    assert after - before < 8 * MIB


@given(st.integers(1, 300), st.integers(1, 300))
def test_picked_requests_are_spread_over_the_life(requests, picked):
    found = pick_evenly(requests, picked)
    assert len(found) == len(set(found)) == min(requests, picked)
    assert found == sorted(found)
    assert found[-1] == requests - 1
    if picked > 1:
        assert found[0] == 0
        gaps = np.diff(found)
        assert requests == 1 or gaps.max() - gaps.min() <= 1


def test_lengths_are_log_uniform_and_begin_with_the_extremes():
    drawn = draw_lengths(4000, 16, 8192, seed=3)
    assert drawn == draw_lengths(4000, 16, 8192, seed=3)
    assert drawn[:2] == [(8192, 16), (16, 1)]
    tokens = np.array([one for one, _ in drawn])
    assert tokens.min() == 16
    assert tokens.max() == 8192
    # A ninth of the requests falls into each doubling from 16 to 8192.
    counts, _ = np.histogram(np.log2(tokens), bins=np.arange(4, 14))
    assert np.abs(counts / 4000 - 1 / 9).max() < 0.02
    assert {new for _, new in drawn} == set(range(1, 17))
