import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ruler_bench.statistics import score_interval


def test_91_of_100():
    interval = score_interval([100.0] * 91 + [0.0] * 9)
    assert (round(interval.low, 1), round(interval.high, 1)) == (83.8, 95.2)
    assert interval.method == "wilson"


@given(st.integers(1, 600).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_equals_scipy(counts):
    successes, samples = counts
    interval = score_interval([100.0] * successes + [0.0] * (samples - successes))
    expected = stats.binomtest(successes, samples).proportion_ci(method="wilson")
    assert interval.low == pytest.approx(100 * expected.low, abs=1e-9)
    assert interval.high == pytest.approx(100 * expected.high, abs=1e-9)
    assert 0 <= interval.low <= 100 * successes / samples + 1e-9
    assert 100 * successes / samples - 1e-9 <= interval.high <= 100


def test_bounds_at_the_ends_are_exact():
    assert score_interval([100.0] * 20).high == 100.0
    assert score_interval([0.0] * 20).low == 0.0


def test_fractional_scores_take_a_seeded_bootstrap():
    scores = [25.0, 100.0, 75.0, 50.0, 100.0, 100.0, 75.0, 0.0] * 10
    interval = score_interval(scores)
    assert interval.method == "bootstrap"
    assert interval == score_interval(scores)
    mean = np.mean(scores)
    normal = 1.96 * np.std(scores) / np.sqrt(len(scores))
    assert interval.low == pytest.approx(mean - normal, abs=1.0)
    assert interval.high == pytest.approx(mean + normal, abs=1.0)


def test_the_bootstrap_is_that_of_scipy():
    scores = np.random.default_rng(3).choice([0.0, 25.0, 50.0, 100.0], size=80)
    interval = score_interval(scores.tolist())
    theirs = stats.bootstrap((scores,), np.mean, method="percentile", rng=1).confidence_interval
    assert interval.low == pytest.approx(theirs.low, abs=0.6)
    assert interval.high == pytest.approx(theirs.high, abs=0.6)


def test_the_bootstrap_covers_the_true_mean_about_95_times_in_100():
    rng = np.random.default_rng(7)
    true = [0.0, 50.0, 75.0, 100.0]
    covered = 0
    for _ in range(100):
        interval = score_interval(rng.choice(true, size=60).tolist())
        covered += interval.low <= np.mean(true) <= interval.high
    assert 88 <= covered <= 100


@pytest.mark.parametrize("scores", [[75.0], [75.0] * 8])
def test_equal_fractional_scores_do_not_claim_certainty(scores):
    interval = score_interval(scores)
    assert interval.low < 60
    assert interval.high > 90


def test_no_scores_have_no_interval():
    assert score_interval([]) is None


def test_the_usual_run_does_not_wait_for_scipy():
    program = (
        "import sys; from ruler_bench.statistics import score_interval; "
        "score_interval([100.0, 0.0]); print('scipy' in sys.modules or 'numpy' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
