"""Noise that an engine keeps for its life: could it be behind what the warm engines show?

An engine may take another kernel when it starts, as libraries do that choose by a measurement or by
an address. All answers of its life then round differently together, so that no test may count them
one by one. docs/leak_lab.md says what is asked of differences before they become a verdict.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from ruler_bench.leak.differences import (
    ANSWERS,
    BITS,
    CORRECTNESS,
    dtype_bounds,
    largest_shift,
)
from ruler_bench.leak.tests_of_difference import VERDICT_ALPHA, binomial_tail, lives_apart

if TYPE_CHECKING:
    from ruler_bench.leak.case import Case

NEAR_TIES_AT_MOST = Fraction(1, 10)
"""Share of answers that rounding may turn. Of 200 in bfloat16, another chunking turned 1."""


def are_too_many(differing: int, answers: int) -> bool:
    """Whether more answers differ to the eye than near ties could make: shown to be more than
    NEAR_TIES_AT_MOST.
    """
    return binomial_tail(differing, answers, NEAR_TIES_AT_MOST) <= VERDICT_ALPHA


@dataclass(frozen=True, slots=True)
class Life:
    """One life of a warm arm against two fresh engines an index.

    Attributes:
        arm: its arm.
        odd: indices at which it differs from two equal fresh engines.
        cases: these, and those at which the two fresh engines differ.
        answers: indices at which all three answered.
    """

    arm: str
    odd: int
    cases: int
    answers: int


@dataclass(frozen=True, slots=True)
class Apart:
    """The warm lives that are least likely to have taken another kernel by chance.

    Attributes:
        lives: which.
        p_value: that so many lives, of those there are, took one that so few fresh engines took.
    """

    lives: tuple[Life, ...]
    p_value: float

    @property
    def arms(self) -> frozenset[str]:
        """The arms of these lives."""
        return frozenset(one.arm for one in self.lives)

    @property
    def odd(self) -> int:
        """Indices at which each of them differs, at least."""
        return min(one.odd for one in self.lives)

    @property
    def carries_a_verdict(self) -> bool:
        """Whether another kernel for a life is excluded."""
        return self.p_value <= VERDICT_ALPHA


class LifeNoise:
    """Holds the differences of a case against engines that round differently for their life."""

    def __init__(self, case: Case) -> None:
        self._case = case

    @functools.cached_property
    def is_promised_away(self) -> bool:
        """Whether all engines are ours, which promise equal bits in every life."""
        case = self._case
        names = [*case.warm, *(one for one in (case.fresh, case.control) if one)]
        return all("attend_tokens" in case.facts(one).arm.settings for one in names)

    def is_beyond_rounding(self, a: str, b: str, ordinal: int) -> bool:
        """Whether two answers differ by more logits than rounding accounts for in their dtype."""
        case = self._case
        how = case.differ(a, b, ordinal)
        if how is None:
            return False
        high = dtype_bounds(case.facts(name).arm.settings.get("dtype") for name in (a, b))[1]
        moved = largest_shift(case.answer(a, ordinal), case.answer(b, ordinal))
        return (how.gap or 0.0) > high or high < moved < math.inf

    @functools.cached_property
    def apart(self) -> dict[str, Apart | None]:
        """The warm lives that are apart, by level; None where there are no two fresh engines.

        Any of the lives there are may be the ones that took another kernel, so that the chance is
        multiplied by the ways to choose them.
        """
        found = {level: self._least_likely(list(self._lives(level))) for level in (BITS, ANSWERS)}
        return {**found, CORRECTNESS: found[ANSWERS]}

    def _least_likely(self, lives: Sequence[Life]) -> Apart | None:
        ranked = sorted(lives, key=lambda one: lives_apart(1, one.odd, one.cases))
        found = []
        for count in range(1, len(ranked) + 1):
            chosen = ranked[:count]
            chance = max(lives_apart(count, one.odd, one.cases) for one in chosen)
            ways = math.comb(len(ranked), count)
            found.append(Apart(tuple(chosen), min(1.0, ways * chance)))
        return min(found, key=lambda one: one.p_value, default=None)

    def _lives(self, level: str) -> Iterator[Life]:
        case = self._case
        fresh, control = case.fresh, case.control
        if fresh is None or control is None:
            return
        same = case.sameness(level)
        for arm in case.warm:
            by_life: dict[int, list[int]] = {}
            for one in case.both(arm, fresh, control):
                by_life.setdefault(case.answer(arm, one).life, []).append(one)
            for ordinals in by_life.values():
                calm = [one for one in ordinals if same(fresh, control, one)]
                odd = sum(not same(arm, fresh, one) for one in calm)
                yield Life(arm, odd, odd + len(ordinals) - len(calm), len(ordinals))

    def excludes(self, arm: str, level: str) -> bool:
        """Whether what an arm shows at a level is more than noise that its engine kept."""
        apart = self.apart[level]
        is_apart = apart is not None and apart.carries_a_verdict and arm in apart.arms
        return is_apart or (level != BITS and self.is_seen_too_often(arm))

    def is_no_near_tie(self, a: str, b: str, ordinal: int) -> bool:
        """Whether two answers differ to the eye, and not by margins that rounding accounts for."""
        how = self._case.differ(a, b, ordinal)
        if how is None or not how.is_visible:
            return False
        return how.gap is None or self.is_beyond_rounding(a, b, ordinal)

    def is_seen_too_often(self, arm: str) -> bool:
        """Whether more answers of an arm differ to the eye than near ties could make."""
        return self._case.fresh is not None and are_too_many(*self._seen[arm])

    @functools.cached_property
    def _seen(self) -> dict[str, tuple[int, int]]:
        """How many answers of each warm arm differ to the eye from the fresh ones, near ties apart,
        and how many there are.
        """
        case, fresh = self._case, self._case.fresh or ""
        same = case.sameness(ANSWERS)
        found = {}
        for arm in case.warm:
            ordinals = case.both(arm, fresh)
            calm = [one for one in ordinals if self._is_calm(same, one)]
            odd = sum(self.is_no_near_tie(arm, fresh, one) for one in calm)
            found[arm] = (odd, len(ordinals))
        return found

    def _is_calm(self, same: Callable[[str, str, int], bool], ordinal: int) -> bool:
        fresh, control = self._case.fresh, self._case.control
        known = fresh is not None and control is not None
        return not known or same(fresh or "", control or "", ordinal)
