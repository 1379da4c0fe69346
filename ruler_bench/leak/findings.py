"""The class of one index: what its answers show, by the first rule that applies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
)
from ruler_bench.leak.differences import BITS, Difference
from ruler_bench.leak.join import (
    FRESH,
    FRESH_AGAIN,
    PERSISTENT,
    PERSISTENT_AGAIN,
    REFERENCE,
    REFERENCE_AGAIN,
)
from ruler_bench.records import Record


@dataclass(frozen=True, slots=True)
class Finding:
    """The class of an index, and what it follows from.

    Attributes:
        verdict: one of CLASSES.
        reason: why, in a sentence.
        how: the difference that decides; None where none does.
        arms: between which it is.
    """

    verdict: str
    reason: str
    how: Difference | None = None
    arms: tuple[str, str] | None = None


def finding_of(case: Case, ordinal: int, proofs: Sequence[str]) -> Finding:
    """Return the class of one index; the first rule that applies."""
    if proofs:
        warm = _warm_differences(case, ordinal)
        how, arms = (warm[0][1], (warm[0][0], case.fresh or "")) if warm else (None, None)
        return Finding(LEAK, f"{proofs[0]}.", how, arms)
    if ordinal not in case.ordinals:
        return Finding(UNDECIDED, "Not compared: not every arm has answered it.")
    if ordinal in case.unstable:
        return Finding(
            UNSTABLE,
            "Two fresh engines answer differently.",
            case.unstable[ordinal],
            (FRESH, FRESH_AGAIN),
        )
    return (
        _warm_finding(case, ordinal)
        or _reference_finding(case, ordinal)
        or _agreed_finding(case, ordinal)
    )


def _warm_differences(case: Case, ordinal: int) -> list[tuple[str, Difference]]:
    """Return the warm arms that differ from the fresh one, and how."""
    if case.fresh is None or case.joined.get(case.fresh, ordinal) is None:
        return []
    found = []
    for name in sorted(case.warm, key=lambda name: name != case.main):
        if case.joined.get(name, ordinal) is not None:
            how = case.differ(name, case.fresh, ordinal)
            if how is not None:
                found.append((name, how))
    return found


def _warm_finding(case: Case, ordinal: int) -> Finding | None:
    """Return what the warm arms show, or None where they agree with the fresh one."""
    pair = case.warm_pair.get(ordinal)
    if pair is not None and case.fresh is not None and case.has_race and case.calm(ordinal):
        return Finding(
            RACE,
            "Two runs of the same stream in a warm engine differ, and fresh engines do not.",
            pair,
            (PERSISTENT, PERSISTENT_AGAIN),
        )
    if case.fresh is None:
        return _without_fresh(case, ordinal)
    found = _warm_differences(case, ordinal)
    if not found:
        return None
    name, how = next((one for one in found if one[0] in case.leaking), found[0])
    verdict, reason = _warm_class(case, ordinal, name, how)
    return Finding(verdict, reason, how, (name, case.fresh))


def _warm_class(case: Case, ordinal: int, name: str, how: Difference) -> tuple[str, str]:
    """Return class and reason of a warm answer that differs from the fresh one."""
    if ordinal in case.rounded:
        return NEAR_TIE, "A warm engine rounds differently, whatever it served before."
    if case.race_explains:
        return (
            RACE,
            f"{name} differs from the fresh answers; two warm runs do not differ alike.",
        )
    if name in case.leaking:
        seen = "in the logits alone" if how.level == BITS else f"in its {how.level}"
        return LEAK, f"The answer changes {seen} when the engine has served others."
    floor = case.noise_floor
    if how.gap is not None and floor is not None and not case.is_exact and how.gap <= floor.value:
        return NEAR_TIE, "Within the numeric noise of two fresh engines."
    if case.control is None:
        return (
            UNDECIDED,
            f"{name} differs from {case.fresh}; without {FRESH_AGAIN} noise cannot be told from a "
            "leak.",
        )
    return (
        UNSTABLE,
        f"{name} differs from two equal fresh answers, at too few indices to tell a leak from "
        "noise.",
    )


def _without_fresh(case: Case, ordinal: int) -> Finding | None:
    """Return what warm arms show among themselves."""
    for name in case.warm:
        if name == case.main or case.main is None or case.joined.get(name, ordinal) is None:
            continue
        how = case.differ(case.main, name, ordinal)
        if how is not None:
            return Finding(
                UNSTABLE,
                f"{case.main} and {name} answer differently; {FRESH} and {FRESH_AGAIN} would tell "
                "a leak or a race from noise.",
                how,
                (case.main, name),
            )
    return None


def _reference_finding(case: Case, ordinal: int) -> Finding | None:
    """Return what the reference shows against the engine's own answer, or None where it agrees."""
    own = case.fresh or case.main
    if own is None or not case.joined.has(REFERENCE):
        return None
    arms = (own, REFERENCE)
    how = case.differ(own, REFERENCE, ordinal)
    if how is None:
        return None
    if ordinal in case.reference_pair:
        return Finding(UNSTABLE, "The reference differs from itself between two runs.", how, arms)
    if how.level == BITS and case.control == FRESH_AGAIN and not case.is_exact:
        return None  # the engine's own bits vary at other indices: no promise to hold it to
    verdict, reason = _against_reference(case, how, ordinal, arms)
    return Finding(verdict, reason, how, arms)


def _against_reference(
    case: Case, how: Difference, ordinal: int, arms: tuple[str, str]
) -> tuple[str, str]:
    """Return class and reason of an answer that differs from the reference's."""
    mine, theirs = (case.answer(name, ordinal) for name in arms)
    if theirs.correct is False and mine.correct:
        return OK, "Right; the reference answers wrongly."
    verdict, reason = _other_path(case, how, theirs, arms)
    if verdict == ENGINE_FAULT and not _fresh_agree(case, ordinal):
        missing = FRESH if case.fresh is None else FRESH_AGAIN
        return (
            UNDECIDED,
            f"{reason} Whether fresh engines agree on it is not known: {missing} would tell an "
            "engine fault from a leak or noise.",
        )
    return verdict, reason


def _other_path(
    case: Case, how: Difference, theirs: Record, arms: tuple[str, str]
) -> tuple[str, str]:
    """Return class and reason of a difference between two code paths."""
    if case.bits_differ_by(*arms) is None:
        return (
            ENGINE_FAULT,
            f"Differs from the reference in its {how.what}, under settings that promise equal "
            "bits.",
        )
    floor = case.floor
    if how.gap is not None and floor is not None:
        if how.gap <= floor.value:
            return (
                NEAR_TIE,
                f"Another code path decides a near tie: {how.gap:.3g} logits, floor "
                f"{floor.value:.3g}.",
            )
        if theirs.correct or case.joined.has(REFERENCE_AGAIN):
            return (
                ENGINE_FAULT,
                f"Differs from the reference by at least {how.gap:.3g} logits, above the floor of "
                f"{floor.value:.3g}.",
            )
        return (
            UNDECIDED,
            f"Wrong, and the reference is wrong in another way; {REFERENCE_AGAIN} would tell "
            "whether it can be relied on.",
        )
    test = case.fault_test
    wrong = case.fresh is not None and theirs.correct
    if test is not None and test.carries_a_verdict and wrong:
        return (
            ENGINE_FAULT,
            f"Fresh engines are wrong where the reference is right at {test.count} of "
            f"{test.cases} indices that only one has right.",
        )
    return (
        NEAR_TIE,
        "Differs from the reference; without margins a near tie is not told from a fault.",
    )


def _fresh_agree(case: Case, ordinal: int) -> bool:
    """Whether two engines on the tested path are known to give the fresh answer."""
    if case.fresh is None:
        return False
    if case.joined.has(FRESH, FRESH_AGAIN):
        return True  # where they differ, an index is unstable before this is asked
    return any(
        case.joined.get(name, ordinal) is not None
        and case.differ(name, case.fresh, ordinal) is None
        for name in case.warm
    )


def _agreed_finding(case: Case, ordinal: int) -> Finding:
    """Return the class of an index at which the arms agree."""
    arms = [name for name in case.joined.answers if case.joined.get(name, ordinal) is not None]
    if len(arms) < 2:
        return Finding(UNDECIDED, "One arm alone: nothing to compare with.")
    own = case.fresh or case.main or arms[0]
    correct = case.answer(own, ordinal).correct
    if correct is None:
        return Finding(OK, "All arms agree; no expected answer is known.")
    if correct:
        return Finding(OK, "Right, and all arms agree.")
    if case.joined.has(REFERENCE):
        return Finding(MODEL_LIMIT, "All arms agree and are wrong.")
    return Finding(
        UNDECIDED,
        f"Wrong alike in all arms: no leak. A {REFERENCE} would tell the model's limit from a "
        "fault of the engine.",
    )


def faults_beside(case: Case) -> dict[int, Finding]:
    """Return the indices at which a prompt beside the samples shows a fault: another length of it,
    around a block or chunk, answered differently from the reference.
    """
    found: dict[int, Finding] = {}
    if case.fresh is None or not case.joined.has(REFERENCE):
        return found
    for record, theirs in case.joined.beside:
        if record.ordinal in found or record.arm not in case.joined.streams:
            continue
        how = case.beside(record, theirs)
        if how is None or (theirs.correct is False and record.correct):
            continue
        arms = (record.arm, REFERENCE)
        verdict, reason = _other_path(case, how, theirs, arms)
        if verdict == ENGINE_FAULT:
            length = f"At {record.prompt_tokens} tokens of prompt (arm {record.arm}): "
            found[record.ordinal] = Finding(verdict, length + reason, how, arms)
    return found
