"""Exact tests of the verdict: how surprising a count is where nothing but noise is at work.

Every figure is worked out from binomial coefficients, which takes no import and no approximation;
the tests hold them against scipy and against enumeration. docs/leak_lab.md says which test answers
which question.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

SHOWN_ALPHA = 0.05
"""Level at which a test is called significant in the tables, as readers expect it."""

VERDICT_ALPHA = 0.002
"""Level at which a test alone carries a verdict. In 300 clean runs with two tests each, a level of
0.05 would raise the alarm about ten times."""

EXACT_ALPHA = 0.0125
"""Level where fresh engines are equal to the last bit: noise that rounds is ruled out there, and
what remains is an engine that now and then answers anything. Four odd ones suffice."""

CONFIDENCE = 0.95
LARGEST_EXACT_COUNT = 400
"""Beyond so many answers, the trend's distribution is approximated by a normal one."""


@dataclass(frozen=True, slots=True)
class Counted:
    """A count out of a number of cases, and how likely so many or more are by chance.

    Attributes:
        count: cases that went one way.
        cases: all of them.
        p_value: 1.0 where there was no case.
    """

    count: int
    cases: int
    p_value: float

    @property
    def is_shown(self) -> bool:
        """Whether readers would call it significant."""
        return self.p_value <= SHOWN_ALPHA

    @property
    def carries_a_verdict(self) -> bool:
        """Whether it is rare enough to raise an alarm on."""
        return self.p_value <= VERDICT_ALPHA


def binomial_tail(count: int, cases: int, chance: Fraction) -> float:
    """Return the probability of `count` or more successes of `cases`, each of this chance.

    Raises:
        ValueError: the count is not between 0 and the number of cases.
    """
    if not 0 <= count <= cases:
        raise ValueError(f"count={count} must be 0 to {cases}")
    yes, no = chance.numerator, chance.denominator - chance.numerator
    ways = sum(
        math.comb(cases, one) * yes**one * no ** (cases - one) for one in range(count, cases + 1)
    )
    return float(Fraction(ways, chance.denominator**cases))


def odd_one_out(odd: int, cases: int) -> Counted:
    """Test whether one of three arms is the odd one more often than the other two.

    Without an effect, the three are exchangeable, so that each is the odd one in a third of the
    cases: one-sided Binomial(cases, 1/3).

    Args:
        odd: cases in which the arm under suspicion differs from the other two.
        cases: indices at which exactly one of the three differs from the other two.
    """
    return Counted(odd, cases, binomial_tail(odd, cases, Fraction(1, 3)))


def warm_against_fresh(cases: Sequence[Sequence[int]]) -> Counted:
    """Test whether warm arms differ from two equal fresh ones more than any other choice of two.

    The odd-one-out test for several warm arms at once. Without an effect the arms are exchangeable
    at each index, so that any two of them might as well be the fresh ones. The statistic counts the
    warm answers that differ from two equal fresh ones; its distribution over all choices of two,
    index by index, is counted out.

    Args:
        cases: for each index, which answer each arm gave, as numbers: the warm arms' first, those
            of the two fresh ones last.

    Returns:
        The statistic, its largest possible value, and the share of choices that reach it.
    """
    total, ways = 0, [1]
    choices = 1
    for answers in cases:
        if len(set(answers)) < 2:
            continue
        arms = range(len(answers))
        pairs = list(itertools.combinations(arms, 2))
        found = [
            sum(one != answers[a] for one in answers) if answers[a] == answers[b] else 0
            for a, b in pairs
        ]
        total += found[-1]  # the last two are the fresh ones
        choices *= len(pairs)
        longer = [0] * (len(ways) + len(answers) - 2)
        for value in found:
            for place, count in enumerate(ways):
                longer[place + value] += count
        ways = longer
    return Counted(total, len(ways) - 1, float(Fraction(sum(ways[total:]), choices)))


def one_of_two(count: int, cases: int) -> Counted:
    """Test whether one of two exchangeable sides has more: one-sided Binomial(cases, 1/2)."""
    return Counted(count, cases, binomial_tail(count, cases, Fraction(1, 2)))


def all_in(groups: Iterable[tuple[int, int]]) -> float:
    """Return how likely it is that all bad answers are warm where the arms are exchangeable.

    At an index with `warm` arms and two fresh ones, `bad` of which give another answer than the
    rest, C(warm, bad) of C(warm + 2, bad) choices are all warm.

    Args:
        groups: warm arms and bad answers of each index.

    Raises:
        ValueError: more answers are bad than are warm.
    """
    share = Fraction(1)
    for warm, bad in groups:
        if bad > warm:
            raise ValueError(f"{bad} bad answers of {warm}")
        share *= Fraction(math.comb(warm, bad), math.comb(warm + 2, bad))
    return float(share)


# --- noise that an engine keeps for its life ----------------------------------------------------
#
# An engine may take another kernel when it starts, which rounds differently in all its answers.
# Then the answers of one life are one observation. How common that kernel is nobody knows, so that
# each p-value below is that at the share for which it is largest.

_SHARES = tuple(1 / (1 + math.exp(-step / 10)) for step in range(-80, 81))


@functools.lru_cache(maxsize=4096)
def lives_apart(lives: int, odd: int, cases: int) -> float:
    """Return the p-value of warm lives that are apart from fresh ones, answers of a life being one.

    The lives took a kernel of some share. Of two fresh engines at an index that it changes, both
    took another with chance (1 - share)^2, and one of them with 2 share (1 - share); where both
    took the same one as the lives, nothing shows.

    Args:
        lives: warm lives, each of which differs from two equal fresh engines at all `odd` indices.
        odd: indices at which it does.
        cases: these, and those at which the two fresh engines differ.
    """
    return _largest(lambda share: share**lives * _tail(odd, cases, (1 - share) / (1 + share)))


@functools.lru_cache(maxsize=4096)
def lives_apart_in_bits(lives: int, odd: int, equal: int) -> float:
    """Return the same where bits are compared and any two fresh engines are equal at each index.

    Another kernel changes the bits of every answer, so that fresh engines with the bits of the warm
    lives took the same kernel as these. Counted are outcomes with so many odd indices or more, and
    with an equal one where there is one.

    Args:
        lives: warm lives, equal among each other.
        odd: indices at which both fresh engines have other bits.
        equal: those at which both have the same.
    """
    cases = odd + equal
    counts = range(odd, cases + (equal == 0))

    def chance(share: float) -> float:
        other = 1 - share
        ways = (
            math.comb(cases, one) * other ** (2 * one) * share ** (2 * (cases - one))
            for one in counts
        )
        return share**lives * sum(ways)

    return _largest(chance)


def _largest(chance: Callable[[float], float]) -> float:
    return min(1.0, max(map(chance, _SHARES)))


def _tail(count: int, cases: int, chance: float) -> float:
    return sum(
        math.comb(cases, one) * chance**one * (1 - chance) ** (cases - one)
        for one in range(count, cases + 1)
    )


def mcnemar(first_only: int, second_only: int) -> float:
    """Return the two-sided p-value of McNemar's exact test (Q. McNemar, Psychometrika 12, 1947).

    Args:
        first_only: indices that only the first arm has right.
        second_only: indices that only the second arm has right.
    """
    cases = first_only + second_only
    tail = binomial_tail(max(first_only, second_only), cases, Fraction(1, 2))
    return min(1.0, 2 * tail)


def clean_start(positions: Sequence[int], served: int) -> Counted | None:
    """Test whether the first bad answer of a life comes later than it would at random.

    With the bad answers at random places, the first `k` are all good with probability
    C(served - k, bad) / C(served, bad).

    Args:
        positions: where in the life the bad answers are, 0 for its first answer.
        served: how many answers were compared.

    Returns:
        The number of good answers before the first bad one, or None where none is bad.
    """
    if not positions:
        return None
    clean = min(positions)
    bad = len(positions)
    return Counted(
        clean, served, float(Fraction(math.comb(served - clean, bad), math.comb(served, bad)))
    )


@dataclass(frozen=True, slots=True)
class Trend:
    """Whether bad answers gather late in an engine's life.

    Attributes:
        p_value: of bad answers as late or later, where their places are random.
        first_half, second_half: bad answers in each half of the life.
        exact: whether every placing was counted, or a normal distribution used.
    """

    p_value: float
    first_half: int
    second_half: int
    exact: bool


def trend(positions: Sequence[int], served: int) -> Trend | None:
    """Test for a trend over the life: Cochran-Armitage with the place as score, one-sided.

    For places without ties it is the rank-sum test, whose distribution can be counted out.

    Args:
        positions: ranks of the bad answers, 0 for the first that was compared.
        served: how many answers were compared.

    Returns:
        None where no answer, or every answer, is bad.
    """
    bad = len(positions)
    if not 0 < bad < served:
        return None
    exact = served <= LARGEST_EXACT_COUNT and bad * (served - bad) <= LARGEST_EXACT_COUNT * 25
    half = served / 2
    first = sum(place + 1 <= half for place in positions)
    total = sum(positions)
    p_value = _exact_trend(total, bad, served) if exact else _normal_trend(total, bad, served)
    return Trend(p_value, first, bad - first, exact)


def _exact_trend(total: int, bad: int, served: int) -> float:
    """Return the share of subsets of `bad` places whose sum is `total` or more."""
    # Sums of subsets of {0..served-1} without the least one possible: partitions that fit into a
    # box of bad x (served - bad), counted by the product formula of Gauss's binomial.
    good = served - bad
    counts = [1] + [0] * (bad * good)
    for part in range(1, min(bad, good) + 1):
        step = max(bad, good) + part
        for place in range(len(counts) - 1, step - 1, -1):
            counts[place] -= counts[place - step]
        for place in range(part, len(counts)):
            counts[place] += counts[place - part]
    least = bad * (bad - 1) // 2
    return float(Fraction(sum(counts[total - least :]), math.comb(served, bad)))


def _normal_trend(total: int, bad: int, served: int) -> float:
    mean = bad * (served - 1) / 2
    variance = bad * (served - bad) * (served + 1) / 12
    return 0.5 * math.erfc((total - 0.5 - mean) / math.sqrt(2 * variance))


def fisher(both: int, first_only: int, second_only: int, neither: int) -> float:
    """Return the one-sided p-value of Fisher's exact test for a positive association.

    Args:
        both: indices that are bad in both arms.
        first_only: bad in the first alone.
        second_only: bad in the second alone.
        neither: bad in none.
    """
    bad_first, bad_second = both + first_only, both + second_only
    total = both + first_only + second_only + neither
    ways = sum(
        math.comb(bad_first, one) * math.comb(total - bad_first, bad_second - one)
        for one in range(both, min(bad_first, bad_second) + 1)
    )
    return float(Fraction(ways, math.comb(total, bad_second)))


def excluded_rate(count: int, audited: int) -> float | None:
    """Return the rate above which `count` leaks among `audited` answers exclude it at 95%.

    Clopper and Pearson's one-sided bound (Biometrika 26, 1934); without a leak it is
    1 - 0.05^(1/audited), about 3 over their number.

    Returns:
        A share of 1, or None where nothing was audited.
    """
    if not audited:
        return None
    if count >= audited:
        return 1.0
    if count == 0:
        return float(1 - (1 - CONFIDENCE) ** (1 / audited))
    low, high = count / audited, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        at_most = sum(
            math.comb(audited, one) * rate**one * (1 - rate) ** (audited - one)
            for one in range(count + 1)
        )
        low, high = (rate, high) if at_most > 1 - CONFIDENCE else (low, rate)
    return high
