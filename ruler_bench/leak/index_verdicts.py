"""The verdict of each index, with the evidence for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ruler_bench.leak.case import Case
from ruler_bench.leak.classes import (
    CANARY,
    CORRECT,
    HINT,
    MODEL_LIMIT,
    NEAR_TIE,
    OK,
    PATH,
    UNDECIDED,
    Evidence,
    IndexVerdict,
)
from ruler_bench.leak.findings import Finding, faults_beside, finding_of
from ruler_bench.records import Record


def index_verdicts(case: Case) -> list[IndexVerdict]:
    """Return the verdict of every index, ascending."""
    proofs: dict[int, list[str]] = {}
    for one in case.proofs:
        proofs.setdefault(one.ordinal, []).append(str(one))
    # Engines that had served others answered beside the samples: a leak may explain what they show.
    beside = {} if case.leaking or case.has_race or proofs else faults_beside(case)
    found = []
    for ordinal in case.joined.known:
        finding = finding_of(case, ordinal, proofs.get(ordinal, []))
        if finding.verdict in (OK, NEAR_TIE, MODEL_LIMIT, UNDECIDED):
            finding = beside.get(ordinal, finding)
        found.append(_entry(case, ordinal, finding, proofs.get(ordinal, [])))
    return found


def _entry(case: Case, ordinal: int, finding: Finding, proofs: Sequence[str]) -> IndexVerdict:
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
    finding: Finding,
    proofs: Sequence[str],
    answers: Mapping[str, Record],
) -> list[Evidence]:
    found = [Evidence(CANARY, ordinal, text) for text in proofs]
    if finding.how is not None and finding.arms is not None:
        how, (a, b) = finding.how, finding.arms
        gap = "" if how.gap is None else f", {how.gap:.3g} logits apart"
        found.append(Evidence(PATH, ordinal, f"{a} and {b} differ in {how.where}{gap}"))
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
