"""The verdict: what is wrong with an answer, index by index, and what the whole run shows.

docs/leak_lab.md says what each class means, on which evidence, and what a set of arms can show.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backends.base import OUTLIVES_CLOSE
from ruler_bench.leak.arms import Arm
from ruler_bench.leak.case import Case
from ruler_bench.leak.classes import (
    CANARY,
    CLASSES,
    CORRECT,
    ENGINE_FAULT,
    HINT,
    LEAK,
    MODEL_LIMIT,
    NEAR_TIE,
    OK,
    PATH,
    RACE,
    STATUS,
    STRENGTH,
    UNDECIDED,
    UNSTABLE,
    Evidence,
    IndexVerdict,
)
from ruler_bench.leak.differences import BITS, Difference
from ruler_bench.leak.join import (
    FRESH,
    FRESH_AGAIN,
    PERSISTENT,
    PERSISTENT_AGAIN,
    REFERENCE,
    REFERENCE_AGAIN,
    ArmFacts,
    arm_facts,
    join,
)
from ruler_bench.leak.sentence import sentence
from ruler_bench.leak.support import Support, support
from ruler_bench.leak.tables import Test, tests
from ruler_bench.leak.tests_of_difference import excluded_rate
from ruler_bench.records import Record

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Verdict:
    """What a set of arms shows.

    Attributes:
        title: what was run, such as niah_single_1.
        verdict: one of CLASSES, of the whole.
        sentence: the whole in one sentence or a few.
        status: exit status, 0, 3, 4 or 5.
        indices: one entry a sample, ascending.
        compared: how many samples every core arm has answered.
        tests: what was tested across indices.
        support: which verdicts these arms can give, and what the others need.
        notes: what a reader must know: what was left out, which arms are not compared bit by bit.
        arms: one entry an arm, with its lifetime and backend.
        excluded_leak_rate: share of leaks that a run without one excludes at 95%; None where it
            has leaks, or nothing was audited.
        audited: answers that this bound counts.
    """

    title: str
    verdict: str
    sentence: str
    status: int
    indices: tuple[IndexVerdict, ...]
    compared: int
    tests: tuple[Test, ...]
    support: tuple[Support, ...]
    notes: tuple[str, ...]
    arms: Mapping[str, Mapping[str, Any]]
    excluded_leak_rate: float | None
    audited: int

    def count(self, verdict: str) -> int:
        """Return how many indices have a verdict."""
        return sum(one.verdict == verdict for one in self.indices)

    @property
    def evidence(self) -> list[Evidence]:
        """All evidence, the strongest first."""
        found = [one for index in self.indices for one in index.evidence]
        return sorted(found, key=lambda one: (STRENGTH.index(one.kind), one.ordinal))


def judge(
    records: Sequence[Record],
    arms: Mapping[str, Arm | ArmFacts],
    *,
    title: str | None = None,
    prompts: Mapping[str, str] | None = None,
    audited: Collection[int] | None = None,
    max_unstable: float = 0.0,
    notes: Sequence[str] = (),
) -> Verdict:
    """Say what is wrong with a backend's answers, as far as the arms given can show it.

    Args:
        records: of all arms, in any order.
        arms: what is known of each arm; with `ArmFacts` also versions and device, without which
            two arms count as run on the same machine.
        title: what was run; by default the task.
        prompts: prompts by their hash (`Record.prompt_sha256`), for canaries.
        audited: ordinals that were chosen for fresh engines without regard to their answers; by
            default all that have fresh answers. The bound on leaks counts these alone.
        max_unstable: share of the compared indices, 0 to 1, that may be unstable or undecided
            before the exit status says so.
        notes: sentences to pass on.

    Raises:
        UsageError: the arms answered different questions, or there is nothing to compare.
    """
    facts = {
        name: one if isinstance(one, ArmFacts) else ArmFacts(one) for name, one in arms.items()
    }
    joined = join(records, facts)
    case = Case(joined, prompts)
    found = _indices(case)
    audit = [
        one for one in case.ordinals if case.fresh and (audited is None or one in set(audited))
    ]
    clean = not any(one.verdict in (LEAK, RACE) for one in found) and not any(
        set(test.differing) - case.rounded for test in case.warm_tests
    )
    excluded = excluded_rate(0, len(audit)) if clean and case.main is not None else None
    overall = _overall(case, found)
    shaky = sum(one.verdict in (UNSTABLE, UNDECIDED) and one.differs for one in found)
    status = STATUS.get(overall, 0)
    if overall in (UNSTABLE, UNDECIDED):
        allowed = max_unstable * len(case.ordinals)
        status = STATUS[UNSTABLE] if shaky > allowed else 0
    name = title or records[0].task
    words = sentence(case, overall, found, excluded, len(audit))
    failed = _failed_when_warm(case)
    if overall == OK and failed:
        overall, words = UNDECIDED, _failures(failed)
        status = STATUS[UNSTABLE] if len(failed) > max_unstable * len(case.ordinals) else 0
    return Verdict(
        title=name,
        verdict=overall,
        sentence=f"{name}: {words}",
        status=status,
        indices=tuple(found),
        compared=len(case.ordinals),
        tests=tuple(tests(case)),
        support=tuple(support(case)),
        notes=(*notes, *_notes(case, max_unstable, shaky)),
        arms={name: _arm(facts) for name, facts in joined.facts.items()},
        excluded_leak_rate=excluded,
        audited=len(audit),
    )


def judge_run(
    manifest: Mapping[str, Any],
    records: Sequence[Record],
    prompts: Mapping[str, str] | None = None,
    max_unstable: float = 0.0,
) -> Verdict:
    """Judge one run of several arms; see `judge`.

    Args:
        manifest: the run's.
        records: of all its arms.
        prompts: by their hash.
        max_unstable: share of unstable answers that passes.

    Raises:
        UsageError: see `judge`; or the manifest is damaged.
    """
    return judge(
        records,
        arm_facts(manifest, records),
        title=manifest.get("task"),
        prompts=prompts,
        audited=audited(manifest),
        max_unstable=max_unstable,
    )


def audited(manifest: Mapping[str, Any]) -> list[int] | None:
    """Return the ordinals that were given fresh engines whatever their answers; None for all."""
    fresh = manifest.get("fresh")
    found = fresh.get("audited") if isinstance(fresh, dict) else None
    return found if isinstance(found, list) else None


def _arm(facts: ArmFacts) -> dict[str, Any]:
    return {
        "lifetime": facts.arm.lifetime if facts.is_known or facts.order_known else None,
        "backend": facts.arm.backend or None,
        "order": facts.arm.order if facts.order_known else None,
        "source": facts.source,
    }


def _failed_when_warm(case: Case) -> list[int]:
    """Return the ordinals at which a warm engine failed and a fresh one answered."""
    fresh = case.joined.answers.get(case.fresh or "", {})
    return sorted(
        {
            record.ordinal
            for name in case.warm
            for record in case.joined.streams.get(name, ())
            if record.error is not None and record.ordinal in fresh
        }
    )


def _failures(failed: Sequence[int]) -> str:
    """Say that what failed is no answer that could be compared, and not nothing either."""
    several = len(failed) > 1
    return (
        f"UNDECIDED. {len(failed)} sample{'s' * several} failed in an engine that had served "
        f"others, and fresh engines answered {'them' if several else 'it'}; the other answers "
        f"agree. First at index {failed[0]}."
    )


def _overall(case: Case, found: Sequence[IndexVerdict]) -> str:
    """Return the gravest class of any index; of leak and race the more frequent one."""
    counts = {name: sum(one.verdict == name for one in found) for name in CLASSES}
    if counts[RACE] > counts[LEAK]:
        return RACE
    for name in (LEAK, ENGINE_FAULT, UNSTABLE):
        if counts[name]:
            return name
    arms = len(case.joined.answers)
    if arms == 1 or any(one.verdict == UNDECIDED and one.differs for one in found):
        return UNDECIDED
    return OK


def _notes(case: Case, max_unstable: float, shaky: int) -> list[str]:
    notes = list(case.joined.notes)
    names = sorted(case.joined.answers, key=lambda name: name != (case.fresh or case.main))
    for name in names[1:]:
        why = case.bits_differ_by(names[0], name)
        if why is not None:
            notes.append(f"{names[0]} and {name} are compared by tokens, not bit by bit ({why}).")
    for name in names:
        if case.facts(name).arm.lifetime == "engine_per_sample_in_process":
            notes.append(
                f"{name}: engines of one process; ports, allocators and caches of the process "
                "outlive them, so that these are less than fresh."
            )
        if not case.facts(name).order_known:
            notes.append(f"{name}: the order in which the requests were served is not known.")
    managed = [name for name in names if case.facts(name).arm.settings.get(OUTLIVES_CLOSE)]
    if managed:
        notes.append(
            f"{', '.join(sorted(managed))}: the server is managed by others. It may have served "
            "others before, and what one arm leaves there the next one meets: these arms show no "
            "engine's whole life, and none of them is fresh."
        )
    for floor in (case.floor, case.noise_floor if case.unstable else None):
        if floor is not None:
            notes.append(floor.sentence())
    if case.floor is not None and case.floor.is_beyond_rounding:
        notes.append(
            "The engine and the reference differ by more than rounding even where they agree: "
            "another dtype, other weights, or a fault that moves every logit."
        )
    if case.canaries is None:
        notes.append("Canaries were not looked for: no prompts, or no order of serving, at hand.")
    if shaky and max_unstable:
        notes.append(f"max_unstable={max_unstable:g}: {shaky} of {len(case.ordinals)} are.")
    return notes


# --- one index ----------------------------------------------------------------------------------


def _indices(case: Case) -> list[IndexVerdict]:
    proofs: dict[int, list[str]] = {}
    for one in case.proofs:
        proofs.setdefault(one.ordinal, []).append(str(one))
    beside = _faults_beside(case)
    found = []
    for ordinal in case.joined.known:
        finding = _finding(case, ordinal, proofs.get(ordinal, []))
        if finding.verdict in (OK, NEAR_TIE, MODEL_LIMIT, UNDECIDED) and ordinal in beside:
            if case.leaking or case.has_race or proofs:
                pass  # that arm's engine had served others: the leak may explain it
            else:
                finding = beside[ordinal]
        found.append(_entry(case, ordinal, finding, proofs.get(ordinal, [])))
    return found


@dataclass(frozen=True, slots=True)
class _Finding:
    verdict: str
    reason: str
    how: Difference | None = None
    arms: tuple[str, str] | None = None


def _finding(case: Case, ordinal: int, proofs: Sequence[str]) -> _Finding:
    """Return the class of one index; the first rule that applies."""
    if proofs:
        warm = _warm_differences(case, ordinal)
        how, arms = (warm[0][1], (warm[0][0], case.fresh or "")) if warm else (None, None)
        return _Finding(LEAK, f"{proofs[0]}.", how, arms)
    if ordinal not in case.ordinals:
        return _Finding(UNDECIDED, "Not compared: not every arm has answered it.")
    if ordinal in case.unstable:
        return _Finding(
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


def _warm_finding(case: Case, ordinal: int) -> _Finding | None:
    """Return what the warm arms show, or None where they agree with the fresh one."""
    pair = case.warm_pair.get(ordinal)
    if pair is not None and case.fresh is not None and case.has_race and case.calm(ordinal):
        return _Finding(
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
    return _Finding(verdict, reason, how, (name, case.fresh))


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


def _without_fresh(case: Case, ordinal: int) -> _Finding | None:
    """Return what warm arms show among themselves."""
    for name in case.warm:
        if name == case.main or case.main is None or case.joined.get(name, ordinal) is None:
            continue
        how = case.differ(case.main, name, ordinal)
        if how is not None:
            return _Finding(
                UNSTABLE,
                f"{case.main} and {name} answer differently; {FRESH} and {FRESH_AGAIN} would tell "
                "a leak or a race from noise.",
                how,
                (case.main, name),
            )
    return None


def _reference_finding(case: Case, ordinal: int) -> _Finding | None:
    """Return what the reference shows against the engine's own answer, or None where it agrees."""
    own = case.fresh or case.main
    if own is None or not case.joined.has(REFERENCE):
        return None
    arms = (own, REFERENCE)
    how = case.differ(own, REFERENCE, ordinal)
    if how is None:
        return None
    if ordinal in case.reference_pair:
        return _Finding(UNSTABLE, "The reference differs from itself between two runs.", how, arms)
    if how.level == "bits" and case.control == FRESH_AGAIN and not case.is_exact:
        return None  # the engine's own bits vary at other indices: no promise to hold it to
    verdict, reason = _against_reference(case, how, ordinal, arms)
    return _Finding(verdict, reason, how, arms)


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
            f"Differs from the reference in its {how.level}, under settings that promise equal "
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


def _agreed_finding(case: Case, ordinal: int) -> _Finding:
    """Return the class of an index at which the arms agree."""
    arms = [name for name in case.joined.answers if case.joined.get(name, ordinal) is not None]
    if len(arms) < 2:
        return _Finding(UNDECIDED, "One arm alone: nothing to compare with.")
    own = case.fresh or case.main or arms[0]
    correct = case.answer(own, ordinal).correct
    if correct is None:
        return _Finding(OK, "All arms agree; no expected answer is known.")
    if correct:
        return _Finding(OK, "Right, and all arms agree.")
    if case.joined.has(REFERENCE):
        return _Finding(MODEL_LIMIT, "All arms agree and are wrong.")
    return _Finding(
        UNDECIDED,
        f"Wrong alike in all arms: no leak. A {REFERENCE} would tell the model's limit from a "
        "fault of the engine.",
    )


def _faults_beside(case: Case) -> dict[int, _Finding]:
    """Return the indices at which a prompt beside the samples shows a fault: another length of it,
    around a block or chunk, answered differently from the reference.
    """
    found: dict[int, _Finding] = {}
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
            found[record.ordinal] = _Finding(verdict, length + reason, how, arms)
    return found


def _entry(case: Case, ordinal: int, finding: _Finding, proofs: Sequence[str]) -> IndexVerdict:
    answers = {
        name: by_ordinal[ordinal]
        for name, by_ordinal in case.joined.answers.items()
        if ordinal in by_ordinal
    }
    main = answers.get(case.main or "")
    if finding.arms is not None and finding.arms[0] in case.warm:
        main = answers.get(finding.arms[0], main)
    known = main is not None and case.facts(main.arm).order_known
    return IndexVerdict(
        ordinal=ordinal,
        verdict=finding.verdict,
        reason=finding.reason,
        position=main.position if main is not None and known else None,
        predecessor=main.predecessor if main is not None and known else None,
        first_difference=finding.how.position if finding.how is not None else None,
        differs=finding.how is not None,
        correct={name: record.correct for name, record in answers.items()},
        outputs={name: record.output or "" for name, record in answers.items()},
        evidence=tuple(_evidence(case, ordinal, finding, proofs, answers)),
    )


def _evidence(
    case: Case,
    ordinal: int,
    finding: _Finding,
    proofs: Sequence[str],
    answers: Mapping[str, Record],
) -> list[Evidence]:
    found = [Evidence(CANARY, ordinal, text) for text in proofs]
    if finding.how is not None and finding.arms is not None:
        how, (a, b) = finding.how, finding.arms
        unit = "character" if how.level == "text" else "token"
        gap = "" if how.gap is None else f", {how.gap:.3g} logits apart"
        found.append(
            Evidence(
                PATH, ordinal, f"{a} and {b} differ in {how.level} from {unit} {how.position}{gap}"
            )
        )
        if a in answers and b in answers and answers[a].correct is not answers[b].correct:
            right = {True: "right", False: "wrong", None: "not scored"}
            found.append(
                Evidence(
                    CORRECT,
                    ordinal,
                    f"{a} is {right[answers[a].correct]}, {b} is {right[answers[b].correct]}",
                )
            )
    for hint in case.canaries.hints if case.canaries and not proofs else ():
        if hint.ordinal == ordinal and hint.is_earlier:
            found.append(
                Evidence(
                    HINT,
                    ordinal,
                    f"{hint.arm} prints {hint.part}, a part of the answer of index "
                    f"{hint.owner}, served before",
                )
            )
    return found
