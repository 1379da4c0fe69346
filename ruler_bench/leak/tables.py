"""What was tested across indices, as rows of a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ruler_bench.leak.case import Case, WarmTest
from ruler_bench.leak.differences import ANSWERS, BITS, CORRECTNESS, LOGITS
from ruler_bench.leak.join import FRESH, FRESH_AGAIN, PERSISTENT, SHUFFLED
from ruler_bench.leak.tests_of_difference import (
    Counted,
    clean_start,
    fisher,
    mcnemar,
    trend,
)


@dataclass(frozen=True, slots=True)
class Test:
    """One test across indices.

    Attributes:
        name: what it is called.
        question: what it asks.
        finding: the counts, in words.
        p_value: how likely as much or more is by chance.
    """

    # It is no test of pytest's.
    __test__ = False

    name: str
    question: str
    finding: str
    p_value: float


_LEVEL_WORDS = {
    BITS: "the logits or the answer",
    LOGITS: "the logits, by more than rounding",
    ANSWERS: "the answer",
    CORRECTNESS: "whether it is right",
}


def tests(case: Case) -> Iterator[Test]:
    """Yield what was tested, the strongest first."""
    for level, pooled in case.pooled_tests.items():
        if level == LOGITS and pooled == case.pooled_tests[ANSWERS]:
            continue
        yield Test(
            "warm against fresh" + ", logits" * (level == LOGITS),
            f"In {_LEVEL_WORDS[level]}: do all warm arms together differ from {case.fresh} and "
            f"{case.control}, these being equal, more than from any other two?",
            f"{pooled.count} warm answers differ, of {pooled.cases} at most",
            pooled.p_value,
        )
    yield from _lives(case)
    for warm in case.warm_tests:
        yield from _warm(case, warm)
    if case.exact_test is not None:
        yield _counted(
            "bit-stable engine",
            f"{case.fresh} and {case.control} are equal to the bit: is all that differs warm?",
            "answers that differ, in bits or tokens; warm",
            case.exact_test,
        )
    if case.race_test is not None:
        yield _counted(
            "race",
            "Do two warm runs differ where two fresh ones do not?",
            "indices where only one of the two pairs differs; the warm pair in",
            case.race_test,
        )
    if case.fault_test is not None:
        yield _counted(
            "engine fault",
            "Is the reference right where fresh engines are wrong?",
            "indices that only one of them has right; the reference in",
            case.fault_test,
        )
    yield from _over_life(case)
    yield from _order(case)
    if case.canaries is not None and case.canaries.test.cases:
        found = case.canaries
        yield Test(
            "canary hints",
            "Do parts of answers come from earlier samples rather than later ones?",
            f"{found.earlier_hits} outputs with a part of an earlier answer, {found.later_hits} "
            "with one of a later answer (control)",
            found.test.p_value,
        )


def _lives(case: Case) -> Iterator[Test]:
    apart = case.life_noise.apart[ANSWERS]
    if apart is not None and apart.odd:
        count = len(apart.lives)
        yield Test(
            "lives as units",
            "Could engines that round differently for their whole life show as much, however "
            "common they are?",
            f"{count} warm {'life' if count == 1 else 'lives'} with at least {apart.odd} answers "
            "that differ from two equal fresh ones",
            apart.p_value,
        )


def _counted(name: str, question: str, what: str, found: Counted) -> Test:
    return Test(name, question, f"{found.cases} {what} {found.count}", found.p_value)


def _warm(case: Case, warm: WarmTest) -> Iterator[Test]:
    for level, found in warm.tests.items():
        if level in (BITS, LOGITS) and found == warm.tests.get(ANSWERS, warm.tests[CORRECTNESS]):
            continue  # nothing was compared bit by bit, or by logits
        if case.control is None:
            yield _counted(
                f"{warm.arm}, one-sided" + ", logits" * (level == LOGITS),
                f"Is {FRESH} right where {warm.arm} is wrong?",
                f"indices that only one of them has right; {FRESH} in",
                found,
            )
        else:
            yield _counted(
                f"odd one out, {level}",
                f"In {_LEVEL_WORDS[level]}: is {warm.arm} the odd one of {warm.arm}, {case.fresh} "
                f"and {case.control} more than a third of the time?",
                f"indices with one odd; {warm.arm} in",
                found,
            )
    yield Test(
        "McNemar, two-sided",
        f"Do {warm.arm} and {case.fresh} have equally many right?",
        f"only {warm.arm} right: {warm.right_only}; only {case.fresh} right: {warm.wrong_only}",
        mcnemar(warm.right_only, warm.wrong_only),
    )


def _over_life(case: Case) -> Iterator[Test]:
    """Yield onset and trend over the engine's life, of the arm that the sentence is about."""
    if not case.warm_tests or not case.facts(case.warm_tests[0].arm).order_known:
        return
    warm = case.warm_tests[0]
    bad = set(warm.differing)
    served = sorted(
        case.both(warm.arm, case.fresh or ""),
        key=lambda one: (case.answer(warm.arm, one).life, case.answer(warm.arm, one).position),
    )
    places = [rank for rank, ordinal in enumerate(served) if ordinal in bad]
    onset = clean_start(places, len(served))
    if onset is None:
        return
    ordinal = served[onset.count]
    yield Test(
        "onset",
        "Do differences begin later than at random places?",
        f"{onset.count} equal answers before the first that differs, index {ordinal} at position "
        f"{case.answer(warm.arm, ordinal).position}",
        onset.p_value,
    )
    found = trend(places, len(served))
    if found is not None:
        yield Test(
            "trend over the life (Cochran-Armitage)",
            "Do differences gather late in the engine's life?",
            f"{found.first_half} in the first half, {found.second_half} in the second",
            found.p_value,
        )


def _order(case: Case) -> Iterator[Test]:
    """Yield whether the same indices differ in another order of requests."""
    differing = {one.arm: set(one.differing) for one in case.warm_tests}
    if PERSISTENT not in differing or SHUFFLED not in differing:
        return
    first, second = differing[PERSISTENT], differing[SHUFFLED]
    if not first | second:
        return
    total = len(case.both(PERSISTENT, SHUFFLED, case.fresh or FRESH_AGAIN))
    both = len(first & second)
    neither = total - len(first | second)
    yield Test(
        "dependence on the predecessor (Fisher)",
        "Do the same indices differ in both orders? If not, what was served before decides.",
        f"in both orders {both}, in {PERSISTENT} alone {len(first - second)}, in {SHUFFLED} alone "
        f"{len(second - first)}, in none {neither}",
        fisher(both, len(first - second), len(second - first), neither),
    )
