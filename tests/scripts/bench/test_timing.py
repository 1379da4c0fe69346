"""The stopwatch, on a clock that the test moves."""

import time

import pytest
import torch

from scripts.bench.timing import Stopwatch


class Clock:
    """Moves only when something is called; each call takes the next of the times given."""

    def __init__(self, times):
        self.now = 0.0
        self.calls = 0
        self.times = times

    def __call__(self):
        return self.now

    def work(self):
        self.now += self.times[min(self.calls, len(self.times) - 1)]
        self.calls += 1


@pytest.fixture
def clock_of(monkeypatch):
    def make(*times):
        clock = Clock(times)
        monkeypatch.setattr(time, "perf_counter", clock)
        return clock

    return make


def test_short_calls_are_repeated_until_they_last(clock_of):
    clock = clock_of(5.0, 0.125)
    seconds = Stopwatch(torch.device("cpu"), 1.0).seconds_per_call(clock.work, repeats=2)
    assert seconds == 0.125
    assert clock.calls == 1 + 1 + 2 * 8  # warm-up, trial, two runs


def test_the_best_run_counts(clock_of):
    clock = clock_of(9.0, 0.5, 0.75, 0.75, 0.5, 0.5)
    assert Stopwatch(torch.device("cpu"), 1.0).seconds_per_call(clock.work, repeats=2) == 0.5


def test_a_long_call_runs_once_after_its_warm_up(clock_of):
    clock = clock_of(9.0, 2.0)
    assert Stopwatch(torch.device("cpu"), 1.0).seconds_per_call(clock.work) == 2.0
    assert clock.calls == 2
