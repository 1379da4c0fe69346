"""How sure a score is: a 95% interval beside every mean of scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from ruler_bench.score import FULL_SCORE

LEVEL = 0.95
RESAMPLES = 9999
SEED = 0


@dataclass(frozen=True, slots=True)
class Interval:
    """A 95% interval of a mean score.

    Attributes:
        low, high: bounds, 0 to 100.
        method: how it was found.
    """

    low: float
    high: float
    method: Literal["wilson", "bootstrap"]


def score_interval(scores: Sequence[float]) -> Interval | None:
    """Return the 95% interval of the mean of scores, or None without scores.

    Scores of 0 and 100 alone are counts, so Wilson's interval is used. Fractional scores take a
    seeded percentile bootstrap over samples. Where these are all equal, or there is one, a
    bootstrap would claim certainty: then Wilson's interval at their mean is used, which is on the
    safe side, since no score between 0 and 100 varies more around its mean than all-or-nothing
    ones do.

    Args:
        scores: one a sample, 0 to 100.
    """
    if not scores:
        return None
    if all(score in (0.0, FULL_SCORE) for score in scores) or len(set(scores)) == 1:
        return _wilson(sum(scores) / FULL_SCORE, len(scores))
    return _bootstrap(scores)


def _wilson(successes: float, samples: int) -> Interval:
    """Return Wilson's score interval (E. B. Wilson, JASA 22, 1927).

    Written out because scipy.stats, which has it too, takes two seconds to import, and nearly
    every run ends with one of these.
    """
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    share = successes / samples
    centre = share + z**2 / (2 * samples)
    spread = z * math.sqrt(share * (1 - share) / samples + (z / (2 * samples)) ** 2)
    scale = FULL_SCORE / (1 + z**2 / samples)
    return Interval(
        # At the ends the formula gives 0 and 100 exactly; floating point only nearly so.
        low=0.0 if successes == 0 else scale * (centre - spread),
        high=FULL_SCORE if successes == samples else scale * (centre + spread),
        method="wilson",
    )


def _bootstrap(scores: Sequence[float]) -> Interval:
    """Return the percentile bootstrap's interval (B. Efron, Annals of Statistics 7, 1979).

    A sample drawn with replacement is how often each score occurs in it, a multinomial draw: of
    the few scores that a task can give that is many times faster than to draw every sample, as
    scipy.stats.bootstrap does, and the distribution is the same.
    """
    import numpy as np  # noqa: PLC0415 (only here: nearly no run needs it)

    values, counts = np.unique(np.asarray(scores), return_counts=True)
    rng = np.random.default_rng(SEED)
    drawn = rng.multinomial(len(scores), counts / len(scores), size=RESAMPLES)
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(drawn @ values / len(scores), [tail, 1 - tail])
    return Interval(low=float(low), high=float(high), method="bootstrap")
