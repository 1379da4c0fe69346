"""The one sentence that comes first."""

from __future__ import annotations

from collections.abc import Sequence

from ruler_bench.leak.case import Case
from ruler_bench.leak.classes import (
    ENGINE_FAULT,
    LEAK,
    MODEL_LIMIT,
    NEAR_TIE,
    OK,
    RACE,
    UNDECIDED,
    UNSTABLE,
    IndexVerdict,
)
from ruler_bench.leak.join import FRESH, FRESH_AGAIN, PERSISTENT, PERSISTENT_AGAIN, SHUFFLED
from ruler_bench.leak.tests_of_difference import CONFIDENCE, VERDICT_ALPHA


def sentence(
    case: Case,
    overall: str,
    found: Sequence[IndexVerdict],
    excluded: float | None,
    audited: int,
) -> str:
    """Return the verdict in words: the class, how many, the first, the strongest evidence.

    Args:
        case: the arms.
        overall: class of the whole.
        found: the verdict of each index.
        excluded: share of leaks that is excluded, or None.
        audited: answers that this counts.
    """
    of = len(case.ordinals)
    by_class = {name: [one for one in found if one.verdict == name] for name in _ENDINGS}
    first = {
        LEAK: lambda: _leak(case, by_class[LEAK], of),
        RACE: lambda: _race(by_class[RACE], of),
        ENGINE_FAULT: lambda: _fault(by_class[ENGINE_FAULT], of),
        UNSTABLE: lambda: _unstable(case, by_class[UNSTABLE], of),
        UNDECIDED: lambda: _undecided(case, found, of),
        OK: lambda: _ok(case, of),
    }[overall]()
    others = [
        _ENDINGS[name].format(len(ones), "s" * (len(ones) != 1), "is" if len(ones) == 1 else "are")
        for name, ones in by_class.items()
        if ones and name != overall and not (overall == UNDECIDED and name == UNDECIDED)
    ]
    rest = f" Besides: {'; '.join(others)}." if others else ""
    bound = ""
    if excluded is not None and overall not in (LEAK, RACE):
        what = "Leaks that end with their engine," if case.shares_process else "Leaks"
        bound = (
            f" {what} in more than {excluded:.1%} of answers are excluded at {CONFIDENCE:.0%} "
            f"({audited} audited)."
        )
    return f"{overall.upper().replace('_', ' ')}. {first}{rest}{bound}"


_ENDINGS = {
    LEAK: "{0} answer{1} changed by what was served before",
    RACE: "{0} answer{1} that differ between two warm runs",
    ENGINE_FAULT: "{0} fault{1} of the engine that fresh ones have too",
    UNSTABLE: "{0} unstable answer{1}",
    NEAR_TIE: "{0} near tie{1}",
    MODEL_LIMIT: "{0} wrong answer{1} that {2} the model's",
    UNDECIDED: "{0} answer{1} not decided",
}


def _number(count: int, of: int) -> str:
    return f"{count} of {of} answer{'s' * (of != 1)}"


def _leak(case: Case, ones: Sequence[IndexVerdict], of: int) -> str:
    arm = "" if case.main in case.leaking or not case.leaking else f" (arm {case.leaking[0]})"
    verb = "changes" if len(ones) == 1 else "change"
    parts = [f"{_number(len(ones), of)} {verb} when the engine has served others{arm}"]
    parts += _first(ones)
    if case.proofs:
        proof = min(case.proofs, key=lambda one: (one.arm != case.main, one.position))
        of_whom = f"of index {proof.owner}"
        if proof.is_same_context:
            of_whom = "to another question on its context, asked before"
        parts.append(f"index {proof.ordinal} prints the answer {of_whom}")
    right = sum(one.correct.get(case.main or "") is True for one in ones)
    if right:
        parts.append(f"{right} of them still scored right")
    return "; ".join(parts) + "."


def _first(ones: Sequence[IndexVerdict]) -> list[str]:
    places = [one.position for one in ones if one.position is not None]
    return [f"first at position {min(places)}"] if places else []


def _race(ones: Sequence[IndexVerdict], of: int) -> str:
    verb = "differs" if len(ones) == 1 else "differ"
    parts = [
        f"{_number(len(ones), of)} {verb} when the engine has served others, not alike in two runs "
        "of the same stream, and not between two fresh engines"
    ]
    return "; ".join([*parts, *_first(ones)]) + "."


def _fault(ones: Sequence[IndexVerdict], of: int) -> str:
    verb = "differs" if len(ones) == 1 else "differ"
    listed = ", ".join(str(one.ordinal) for one in ones[:5]) + ", ..." * (len(ones) > 5)
    return (
        f"{_number(len(ones), of)} {verb} from the reference, in a fresh engine too, by more than "
        f"numerics account for (index {listed})."
    )


def _unstable(case: Case, ones: Sequence[IndexVerdict], of: int) -> str:
    fresh = [one for one in ones if one.ordinal in case.unstable]
    if fresh:
        verb = "differs" if len(fresh) == 1 else "differ"
        text = f"{_number(len(fresh), of)} {verb} between two fresh engines"
        rest = len(ones) - len(fresh)
        return f"{text}, and {rest} more between other runs." if rest else f"{text}."
    verb = "differs" if len(ones) == 1 else "differ"
    if case.fresh is None:
        return f"{_number(len(ones), of)} {verb} between runs of a warm engine."
    if all(one.ordinal in case.reference_pair for one in ones):
        return f"{_number(len(ones), of)} {verb} between two runs of the reference."
    differ = f"{_number(len(ones), of)} {verb} between a warm engine and fresh ones"
    counted = [case.exact_test, case.race_test, *case.pooled_tests.values()]
    counted += [found for one in case.warm_tests for found in one.tests.values()]
    best = min((one.p_value for one in counted if one is not None), default=1.0)
    if best <= VERDICT_ALPHA:
        # No noise of single answers; what is left is noise that an engine keeps.
        return (
            f"{differ}: an engine that rounds differently for its whole life is not excluded; "
            f"{_more_lives(case)}."
        )
    help_ = "ask more samples"
    if not case.is_exact:
        help_ += ", or record digests of the logits"
    elif not case.joined.has(PERSISTENT, PERSISTENT_AGAIN):
        help_ += f", or run {PERSISTENT_AGAIN}"
    return f"{differ}: too few to tell a leak from noise (p = {best:.2g}); {help_}."


def _more_lives(case: Case) -> str:
    """Say what would exclude noise of a life."""
    missing = [one for one in (PERSISTENT_AGAIN, SHUFFLED) if not case.joined.has(one)]
    return f"record margins, or run {missing[0]}" if missing else "record margins, or ask more"


def _undecided(case: Case, found: Sequence[IndexVerdict], of: int) -> str:
    arms = sorted(case.joined.answers)
    if len(arms) == 1:
        wrong = sum(one.correct.get(arms[0]) is False for one in found)
        return (
            f"One arm alone ({arms[0]}, {of} answers, {wrong} wrong): {FRESH} and {FRESH_AGAIN} "
            "are needed to see a leak, and a reference to see a fault of the engine."
        )
    ones = [one for one in found if one.verdict == UNDECIDED and one.differs]
    verb = "differs" if len(ones) == 1 else "differ"
    missing = FRESH if case.fresh is None else FRESH_AGAIN
    return (
        f"{_number(len(ones), of)} {verb} between {', '.join(arms)}; these arms cannot tell why: "
        f"{missing} is needed."
    )


def _ok(case: Case, of: int) -> str:
    names = ", ".join(sorted(case.joined.answers))
    if case.fresh is None:
        return f"{of} answers show no fault in {names}; without {FRESH} a leak is not excluded."
    if case.shares_process:
        return (
            f"No answer of {of} changes when the engine has served others of its own ({names}). "
            "Its fresh engines were built in the same process (fresh=inprocess), so that a leak "
            "through what outlives an engine there, such as caches and module state, is not "
            "excluded; fresh=process would tell."
        )
    return f"No answer of {of} changes when the engine has served others ({names})."
