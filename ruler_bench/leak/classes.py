"""The classes that an index may be in, and the evidence for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

OK, LEAK, RACE, ENGINE_FAULT = "ok", "leak", "race", "engine_fault"
NEAR_TIE, MODEL_LIMIT, UNSTABLE = "near_tie", "model_limit", "unstable"
UNDECIDED = "undecided"
CLASSES = (LEAK, RACE, ENGINE_FAULT, UNSTABLE, UNDECIDED, NEAR_TIE, MODEL_LIMIT, OK)
"""What an index may be, the gravest first. Undecided is no verdict: the arms cannot tell."""

STATUS = {LEAK: 3, RACE: 3, ENGINE_FAULT: 4, UNSTABLE: 5}

CANARY, PATH, CORRECT, HINT = "canary", "same path", "correctness", "hint"
STRENGTH = (CANARY, PATH, CORRECT, HINT)
"""Kinds of evidence, the strongest first."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One observation at one index.

    Attributes:
        kind: one of STRENGTH.
        ordinal: the index.
        text: what was seen.
    """

    kind: str
    ordinal: int
    text: str


@dataclass(frozen=True, slots=True)
class IndexVerdict:
    """What is wrong with one sample's answer.

    Attributes:
        ordinal: the sample.
        verdict: one of CLASSES.
        reason: why, in a sentence.
        position, predecessor: of the warm arm, where it was served; None where nobody can tell.
        first_difference: the generated token (of text the character) from which on answers differ,
            in their logits where these are compared.
        differs: whether two arms that should agree do not.
        correct: by arm; None where the answer was not scored.
        outputs: by arm.
        evidence: the strongest first.
    """

    ordinal: int
    verdict: str
    reason: str
    position: int | None = None
    predecessor: int | None = None
    first_difference: int | None = None
    differs: bool = False
    correct: Mapping[str, bool | None] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    evidence: tuple[Evidence, ...] = ()
