"""Seven hypotheses about answers lost with long prompts, each answered by a small comparison.

They were written down for the case that the leak lab grew out of (docs/leak_lab.md). Each names
arms, which run like those of any other run, and a rule that reads the answer off their records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ruler_bench.leak.diagnosis import rules
from ruler_bench.leak.diagnosis.arms import (
    Setup,
    chunk_arms,
    layer_arms,
    life_arms,
    merge_arms,
    place_arms,
    position_arms,
    slot_arms,
)
from ruler_bench.leak.diagnosis.evidence import Evidence
from ruler_bench.leak.diagnosis.rules import CANNOT_SAY, SUPPORTED, Finding


@dataclass(frozen=True, slots=True)
class Row:
    """The answer to one hypothesis.

    Attributes:
        hypothesis, question: its name, and what is asked of the arms.
        verdict: SUPPORTED, NOT_SUPPORTED or CANNOT_SAY.
        why: the figures in words.
        arms: which were compared.
        samples: of each comparison; of several the fewest.
        token_differences: answers whose tokens differ, over all comparisons; None where no answers
            were compared.
        bit_differences: likewise of logits; None where equal bits are not promised.
        largest_gap: logits by which paths differ at least where answers part; None where none
            does or that is not known.
        floor: what correct paths may differ by, in logits.
    """

    hypothesis: str
    question: str
    verdict: str
    why: str
    arms: tuple[str, ...] = ()
    samples: int = 0
    token_differences: int | None = None
    bit_differences: int | None = None
    largest_gap: float | None = None
    floor: float | None = None


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A cause that is thought of, and how it is tried.

    Attributes:
        name, question: for the table.
        arms: the arms that try it, for a run.
        answer: reads the answer off the records.
        is_direct: the answer is not read off generated answers, which a race or a leak may change.
    """

    name: str
    question: str
    arms: Callable[[Setup], list[str]]
    answer: Callable[[Evidence], Finding]
    is_direct: bool = False


CHUNKS, RACE, POSITIONS, LAYERS, MERGE, SWITCHING, AGE = (
    "chunk-boundary precision",
    "ring-buffer race",
    "positions restart in each chunk",
    "interference between layers",
    "unstable log-sum-exp merge",
    "switching by length",
    "memory fragmentation",
)

HYPOTHESES: tuple[Hypothesis, ...] = (
    Hypothesis(CHUNKS, "Do other chunk sizes turn near ties?", chunk_arms, rules.chunk_precision),
    Hypothesis(
        RACE,
        "Do runs or numbers of slots differ, and with forced synchronisation not?",
        slot_arms,
        rules.ring_race,
    ),
    Hypothesis(
        POSITIONS,
        "Do first keys depend on where the prompt is cut?",
        position_arms,
        rules.positions,
        is_direct=True,
    ),
    Hypothesis(
        LAYERS,
        "Does the engine a layer at a time differ from one with all on the device?",
        layer_arms,
        rules.layers,
    ),
    Hypothesis(
        MERGE, "Do answers depend on the pieces that attention merges?", merge_arms, rules.merge
    ),
    Hypothesis(
        SWITCHING,
        "Do answers depend on whether keys and values leave the device?",
        place_arms,
        rules.switching,
    ),
    Hypothesis(AGE, "Do answers depend on the requests before?", life_arms, rules.age),
)
"""The seven, in the order of the table."""


def arms_of_diagnosis(backend: Mapping[str, Any], length: int) -> tuple[str, ...]:
    """Return the arms that all hypotheses need, each once.

    Args:
        backend: composed settings; what they do not name is taken for missing.
        length: tokens of prompt and generation together.
    """
    setup = Setup(backend, length)
    return tuple(dict.fromkeys(arm for one in HYPOTHESES for arm in one.arms(setup)))


def diagnose(evidence: Evidence) -> list[Row]:
    """Answer every hypothesis from the records of a run.

    What a race or a leak explains supports no other hypothesis.
    """
    findings = {one.name: one.answer(evidence) for one in HYPOTHESES}
    for cause, what in ((RACE, "a race"), (AGE, "what earlier requests leave")):
        if findings[cause].verdict == SUPPORTED:
            for one in HYPOTHESES:
                found = findings[one.name]
                if one.name not in (RACE, cause) and not one.is_direct:
                    findings[one.name] = _explained(found, what)
    return [_row(one, findings[one.name]) for one in HYPOTHESES]


def _explained(finding: Finding, cause: str) -> Finding:
    if finding.verdict != SUPPORTED:
        return finding
    return replace(
        finding,
        verdict=CANNOT_SAY,
        why=f"{finding.why} But {cause} alone may do that; end it first.",
    )


def _row(hypothesis: Hypothesis, finding: Finding) -> Row:
    pairs = finding.pairs
    gaps = [one.gap for one in pairs if one.gap is not None and one.gap != float("inf")]
    bitwise = [one for one in pairs if one.is_bitwise]
    return Row(
        hypothesis=hypothesis.name,
        question=hypothesis.question,
        verdict=finding.verdict,
        why=finding.why,
        arms=finding.arms or tuple(dict.fromkeys(arm for one in pairs for arm in (one.a, one.b))),
        samples=finding.samples or min((len(one.ordinals) for one in pairs), default=0),
        token_differences=sum(len(one.tokens) for one in pairs) if pairs else None,
        bit_differences=sum(len(one.bits) for one in bitwise) if bitwise else None,
        largest_gap=max(gaps, default=None),
        floor=max((one.floor for one in pairs), default=None),
    )
