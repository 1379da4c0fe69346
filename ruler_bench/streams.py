"""A run is a list of streams: which samples, in which order, on which engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """One request of a stream: its place and the sample it asks.

    The place does not depend on which other samples were chosen, so that a folder can grow.
    """

    step: int
    ordinal: int


@dataclass(frozen=True, slots=True)
class Stream:
    """Samples that one engine answers one after the other.

    Attributes:
        arm: name under which the records are kept.
        steps: the requests, in order.
    """

    arm: str
    steps: tuple[Step, ...]


def streams(arms: Sequence[str], ordinals: Sequence[int]) -> list[Stream]:
    """Return the streams of a run. `persistent`: one engine, samples in order of their ordinal."""
    in_order = tuple(Step(step=ordinal, ordinal=ordinal) for ordinal in sorted(ordinals))
    return [Stream(arm=arm, steps=in_order) for arm in arms]
