"""What the judge says of the first samples of a run, for every number of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ruler_bench.leak.classes import ENGINE_FAULT, LEAK, RACE
from ruler_bench.leak.verdict import Verdict, judge
from ruler_bench.records import Record
from ruler_bench.streams import AGING_ORDINALS
from scripts.detector.runner import Finished

ALARMS = (LEAK, RACE, ENGINE_FAULT)
"""Verdicts that a sound engine must never get."""


@dataclass(frozen=True)
class Found:
    """From how many samples on the judge says what is wrong.

    Attributes:
        verdicts: of the first 1, 2, ... samples.
        verdict: of all of them.
        alarm_at: the smallest number of samples with a verdict of ALARMS; None where there is none.
        class_at: the smallest with the class expected, likewise.
        evidence: the strongest one there (without it, at the first alarm), in the verdict's words.
    """

    verdicts: tuple[str, ...]
    verdict: Verdict
    alarm_at: int | None
    class_at: int | None
    evidence: str | None


def judged(finished: Finished) -> Verdict:
    """Judge all records of a run."""
    return judge(finished.records, finished.facts, prompts=finished.prompts)


def first(records: Sequence[Record], samples: int) -> list[Record]:
    """Return the records of the first samples, and of requests that only age the engine.

    It is what a run of so many samples records, but for the arm shuffled: its engine has served
    other samples in between.
    """
    return [one for one in records if one.ordinal < samples or one.ordinal >= AGING_ORDINALS]


def found(finished: Finished, samples: int, expected: str) -> Found:
    """Judge the first 1, 2, ... samples of a run."""
    verdicts: list[Verdict] = []
    for count in range(1, samples + 1):
        chosen = first(finished.records, count)
        verdicts.append(judge(chosen, finished.facts, prompts=finished.prompts))
    names = [one.verdict for one in verdicts]
    alarm_at = next((place for place, name in enumerate(names, 1) if name in ALARMS), None)
    class_at = next((place for place, name in enumerate(names, 1) if name == expected), None)
    place = class_at or alarm_at
    return Found(
        verdicts=tuple(names),
        verdict=verdicts[-1],
        alarm_at=alarm_at,
        class_at=class_at,
        evidence=None if place is None else evidence_of(verdicts[place - 1], names[place - 1]),
    )


def evidence_of(verdict: Verdict, name: str) -> str | None:
    """Return the strongest evidence at an index of a class, in words."""
    indices = {one.ordinal for one in verdict.indices if one.verdict == name}
    chosen = next((one for one in verdict.evidence if one.ordinal in indices), None)
    return None if chosen is None else f"index {chosen.ordinal}, {chosen.kind}: {chosen.text}"


def counts(verdict: Verdict) -> dict[str, int]:
    """Return how many indices are in each class that occurs."""
    names = [one.verdict for one in verdict.indices]
    return {name: names.count(name) for name in dict.fromkeys(names)}


def merged(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    """Return the sums of two counts."""
    return {name: a.get(name, 0) + b.get(name, 0) for name in {**a, **b}}
