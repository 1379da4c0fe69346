"""Which verdicts a set of arms can give, and what the others need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ruler_bench.leak.case import Case
from ruler_bench.leak.classes import (
    ENGINE_FAULT,
    LEAK,
    MODEL_LIMIT,
    NEAR_TIE,
    RACE,
    UNSTABLE,
)
from ruler_bench.leak.join import (
    FRESH,
    FRESH_AGAIN,
    PERSISTENT,
    PERSISTENT_AGAIN,
    REFERENCE,
)
from ruler_bench.leak.life_noise import are_too_many
from ruler_bench.leak.tests_of_difference import (
    EXACT_ALPHA,
    VERDICT_ALPHA,
    lives_apart,
    odd_one_out,
    one_of_two,
)


@dataclass(frozen=True, slots=True)
class Support:
    """Whether a verdict can be given.

    Attributes:
        verdict: the class.
        is_possible: whether these arms can show it.
        how: on what it rests, or what it needs.
    """

    verdict: str
    is_possible: bool
    how: str


def least_odd(level: float = VERDICT_ALPHA) -> int:
    """Return the least number of odd ones, with no other difference, that carries a verdict."""
    return next(n for n in range(1, 100) if odd_one_out(n, n).p_value <= level)


def least_of_two(level: float = VERDICT_ALPHA) -> int:
    """Return the least number of cases, all one way, of two sides that carries a verdict."""
    return next(n for n in range(1, 100) if one_of_two(n, n).p_value <= level)


def least_apart(lives: int, answers: int) -> int:
    """Return the least number of answers that carries a verdict where each of some warm lives
    differs in all of them, and a life may have another kernel.
    """
    enough = (
        n
        for n in range(1, 200)
        if lives_apart(lives, n, n) <= VERDICT_ALPHA or (n <= answers and are_too_many(n, answers))
    )
    return max(least_odd() if lives == 1 else 1, next(enough))


def support(case: Case) -> Iterator[Support]:
    """Yield one entry for each class of fault."""
    yield Support(LEAK, *_leak(case))
    missing = _missing(case, PERSISTENT, PERSISTENT_AGAIN, FRESH, FRESH_AGAIN)
    need = f"{least_of_two(EXACT_ALPHA if case.is_exact else VERDICT_ALPHA)} answers"
    yield Support(
        RACE,
        not missing,
        f"needs {missing}" if missing else f"{need} that differ between warm runs alone",
    )
    yield Support(ENGINE_FAULT, *_fault(case))
    missing = _missing(case, REFERENCE)
    yield Support(
        MODEL_LIMIT,
        not missing and len(case.joined.answers) > 1,
        f"needs {missing}" if missing else "wrong answers on which all arms agree",
    )
    floor = case.floor or case.noise_floor
    measured = floor is not None and floor.typical is not None
    yield Support(
        NEAR_TIE,
        measured,
        "margins of both code paths" if measured else "needs top-2 margins in both code paths",
    )
    missing = _missing(case, FRESH, FRESH_AGAIN)
    yield Support(
        UNSTABLE, not missing, f"needs {missing}" if missing else "fresh against fresh again"
    )


def _missing(case: Case, *names: str) -> str:
    return " and ".join(name for name in names if not case.joined.has(name))


def _leak(case: Case) -> tuple[bool, str]:
    canary = "a canary proves one at any index" if case.canaries else ""
    if case.main is None:
        return False, f"needs {PERSISTENT}"
    if case.fresh is None:
        needs = f"otherwise needs {FRESH} and {FRESH_AGAIN}" if canary else ""
        return bool(canary), "; ".join(filter(None, [canary, needs])) or (
            f"needs {FRESH} and {FRESH_AGAIN}, or the prompts for canaries"
        )
    if case.control is None:
        least = max(least_of_two(), least_apart(1, len(case.ordinals)))
        rest = (
            f"{least_of_two()} answers right in fresh engines alone where margins are known, "
            f"otherwise {least}; {FRESH_AGAIN} would count answers that differ in any way"
        )
    elif case.is_exact:
        least, again = (
            least_odd(EXACT_ALPHA),
            f"1 that both {PERSISTENT} and {PERSISTENT_AGAIN} give",
        )
        has_again = case.joined.has(PERSISTENT, PERSISTENT_AGAIN)
        rest = "fresh engines are equal to the bit, so that " + (
            f"{again} suffices" if has_again else f"{least} that differ suffice, or {again}"
        )
    else:
        lives = len(case.warm_tests)
        least = least_apart(lives, len(case.ordinals))
        rest = f"{least} answers that differ between {'all ' * (lives > 1)}warm and fresh alone"
        if least > least_odd():
            rest += f", {least_odd()} by more than rounding where margins are known"
    return True, "; ".join(filter(None, [canary, rest]))


def _fault(case: Case) -> tuple[bool, str]:
    missing = _missing(case, REFERENCE) or (case.fresh is None and FRESH)
    if missing:
        return False, f"needs {missing}"
    if case.bits_differ_by(case.fresh or "", REFERENCE) is None:
        return True, "the reference must have equal bits"
    if case.floor is not None and case.floor.tokens:
        return True, "one answer that differs from the reference by more than the floor"
    return True, (
        f"{least_of_two()} answers right in the reference alone; margins would make it one answer"
    )
