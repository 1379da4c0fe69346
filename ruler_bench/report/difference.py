"""How far two scores lie apart, with a 95% interval; paired where both have the same samples.

The interval is MOVER's, the method of variance estimates recovery: G. Y. Zou, A. Donner,
"Construction of confidence limits about effect measures", Statistics in Medicine 27, 2008. It makes
the interval of a difference or a mean from those of its parts. Of right and wrong answers, whose
intervals are Wilson's, it is method 10 of R. G. Newcombe (Statistics in Medicine 17, 1998: 857-872
for separate samples, 2635-2650 for pairs), which does not claim certainty where nothing differs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
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


@dataclass(frozen=True, slots=True)
class Scores:
    """One side of a comparison.

    Attributes:
        ordinals: each once.
        values: the score of each, 0 to 100.
        interval: bounds of the mean's 95% interval, where it is known already.
    """

    ordinals: Sequence[int]
    values: Sequence[float]
    interval: tuple[float, float] | None = None


def difference(mine: Scores, theirs: Scores) -> Difference | None:
    """Return how much higher `mine` are than `theirs`; None where either is empty.

    Where ordinals are the same in both, those are compared pair by pair and the rest is left out.
    """
    if list(mine.ordinals) == list(theirs.ordinals):
        return _between(mine, theirs, is_paired=True)
    common = set(mine.ordinals) & set(theirs.ordinals)
    if common:
        return _between(_only(mine, common), _only(theirs, common), is_paired=True)
    return _between(mine, theirs, is_paired=False)


def _only(scores: Scores, ordinals: Collection[int]) -> Scores:
    kept = sorted(
        (ordinal, value)
        for ordinal, value in zip(scores.ordinals, scores.values, strict=True)
        if ordinal in ordinals
    )
    return Scores([one for one, _ in kept], [value for _, value in kept])


def _between(mine: Scores, theirs: Scores, is_paired: bool) -> Difference | None:
    first, second = _interval(mine), _interval(theirs)
    if first is None or second is None:
        return None
    a, b = mine.values, theirs.values
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    points = mean_a - mean_b
    correlation = _correlation(a, b, mean_a, mean_b) if is_paired else 0.0
    below = _distance(mean_a - first[0], second[1] - mean_b, correlation)
    above = _distance(first[1] - mean_a, mean_b - second[0], correlation)
    return Difference(points, points - below, points + above, min(len(a), len(b)), is_paired)


def _interval(scores: Scores) -> tuple[float, float] | None:
    if scores.interval is not None:
        return scores.interval
    found = score_interval(scores.values)
    return None if found is None else (found.low, found.high)


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
