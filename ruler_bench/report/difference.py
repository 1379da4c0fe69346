"""How far two scores lie apart, with a 95% interval; paired where both have the same samples.

The interval is MOVER's, the method of variance estimates recovery: G. Y. Zou, A. Donner,
"Construction of confidence limits about effect measures", Statistics in Medicine 27, 2008. It makes
the interval of a difference or a mean from those of its parts. Of right and wrong answers, whose
intervals are Wilson's, it is method 10 of R. G. Newcombe (Statistics in Medicine 17, 1998: 857-872
for separate samples, 2635-2650 for pairs), which does not claim certainty where nothing differs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ruler_bench.statistics import score_interval


@dataclass(frozen=True, slots=True)
class Difference:
    """A score less another, in points.

    Attributes:
        points: of the means over the samples that were compared.
        low, high: bounds of the 95% interval.
        samples: pairs, or the fewer of the two where there are none.
        is_paired: whether the same ordinals were compared.
    """

    points: float
    low: float
    high: float
    samples: int
    is_paired: bool

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes zero: only then is a difference marked."""
        return self.low > 0 or self.high < 0

    @property
    def mark(self) -> str:
        """An arrow for a clear difference, else nothing."""
        if not self.is_clear:
            return ""
        return "▲" if self.points > 0 else "▼"

    def text(self) -> str:
        """Return it for a table."""
        return f"{self.points:+.2f} ({self.low:+.1f} to {self.high:+.1f}) {self.mark}".rstrip()


Scores = tuple[Sequence[int], Sequence[float]]
"""Ordinals, each once, and the score of each, 0 to 100."""


def difference(mine: Scores, theirs: Scores) -> Difference | None:
    """Return how much higher `mine` are than `theirs`; None where either is empty.

    Where ordinals are the same in both, those are compared pair by pair and the rest is left out.
    """
    if list(mine[0]) == list(theirs[0]):
        return _between(mine[1], theirs[1], is_paired=True)
    other = dict(zip(*theirs, strict=True))
    pairs = [(one, other[ordinal]) for ordinal, one in zip(*mine, strict=True) if ordinal in other]
    if pairs:
        return _between(*zip(*pairs, strict=True), is_paired=True)
    return _between(mine[1], theirs[1], is_paired=False)


def _between(a: Sequence[float], b: Sequence[float], is_paired: bool) -> Difference | None:
    first, second = score_interval(a), score_interval(b)
    if first is None or second is None:
        return None
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    points = mean_a - mean_b
    correlation = _correlation(a, b, mean_a, mean_b) if is_paired else 0.0
    below = _distance(mean_a - first.low, second.high - mean_b, correlation)
    above = _distance(first.high - mean_a, mean_b - second.low, correlation)
    return Difference(points, points - below, points + above, min(len(a), len(b)), is_paired)


def _distance(a: float, b: float, correlation: float) -> float:
    return math.sqrt(max(0.0, a * a - 2 * correlation * a * b + b * b))


def _correlation(a: Sequence[float], b: Sequence[float], mean_a: float, mean_b: float) -> float:
    """Return Pearson's correlation; 0 where one side does not vary."""
    both = left = right = 0.0
    for one, other in zip(a, b, strict=True):
        x, y = one - mean_a, other - mean_b
        both += x * y
        left += x * x
        right += y * y
    return both / math.sqrt(left * right) if left and right else 0.0


def mean_difference(parts: Sequence[Difference]) -> Difference | None:
    """Return the mean of independent differences, each counting alike; None where there is none."""
    if not parts:
        return None
    count = len(parts)
    points = sum(one.points for one in parts) / count
    below = math.sqrt(sum((one.points - one.low) ** 2 for one in parts)) / count
    above = math.sqrt(sum((one.high - one.points) ** 2 for one in parts)) / count
    return Difference(
        points,
        points - below,
        points + above,
        sum(one.samples for one in parts),
        all(one.is_paired for one in parts),
    )
