"""A run is a list of streams: which requests, in which order, on which engines.

Orders, by name, for a sample A with ordinal n (step: the request's place in the arm's stream):

| order | requests | step |
|---|---|---|
| ordinal | every sample, ascending | n |
| shuffled | the same, in an order that the run's seed decides; `Record.position` tells it | n |
| aged | AGING_REQUESTS of the same task with another seed, then every sample | 50 + n |
| axa | A, its neighbour, A again | 3n to 3n + 2 |
| repeat | A, three times | 3n to 3n + 2 |
| length_mix | A, the task at half or a quarter of the length, A again | 3n to 3n + 2 |
| boundary | A cut to -1, 0, +1 around whole blocks, and chunks | 6n to 6n + 5 |
| fill | A up to the last free token, whatever the model says; then A | 2n, 2n + 1 |
| cancel | A's neighbour, cancelled on the way; then A | 2n, 2n + 1 |
| resend | A, cancelled on the way; then A again | 2n, 2n + 1 |
| flood | every sample, AGING_REQUESTS as in aged, every sample again | 2n, 10000000 on, 2n + 1 |
| two_questions | another question on the context of A; then A | 2n, 2n + 1 |

The neighbour of 0 is 1 and that of 1 is 0, and so on. A step does not depend on which other
samples were chosen, so that a folder can grow.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ruler_bench.leak.arms import (
    CANCEL,
    FILL,
    REFERENCE,
    Kind,
    in_running_order,
    kind_of,
)
from ruler_bench.records import Record

SAMPLE, AGING, HALF, QUARTER, CUT = "sample", "aging", "half", "quarter", "cut"
OTHER = "other_question"
AGING_REQUESTS = 50
AGING_ORDINALS = 1_000_000
"""Ordinals from here on are requests that only age an engine: no sample of the run has them."""
FLOOD_STEPS = 10_000_000
"""In the arm flood: steps from here on are the requests in between."""
BESIDE = {"boundary": 10_000_000, "length_mix": 20_000_000, "two_questions": 30_000_000}
"""In the arm reference: steps from here on are the prompts that only that other arm asks."""


@dataclass(frozen=True, slots=True)
class Step:
    """One request of a stream.

    Attributes:
        step: its place, unique within the arm.
        ordinal: the sample it asks.
        source: which prompt of that ordinal: the sample's own, or one of AGING (another seed),
            HALF and QUARTER (another length), CUT (the sample's, shorter), OTHER (another
            question on its context).
        unit_tokens, avoided_tokens, beyond_tokens: of CUT: the prompt is cut to the largest
            multiple of `unit_tokens` that it exceeds and that is, where there is such a one, no
            multiple of `avoided_tokens`, plus `beyond_tokens`.
        action: FILL, CANCEL or None.
        scored: whether the answer is held against the expected one.
        group: requests that only mean something together, in one engine.
        opening: a request that every engine of the stream begins with.
    """

    step: int
    ordinal: int
    source: str = SAMPLE
    unit_tokens: int = 0
    avoided_tokens: int = 0
    beyond_tokens: int = 0
    action: str | None = None
    scored: bool = True
    group: int | None = None
    opening: bool = False


@dataclass(frozen=True, slots=True)
class Stream:
    """Requests that an arm asks one after the other.

    Attributes:
        arm: name under which the records are kept.
        steps: the requests, in order.
        kind: order, actions, and whether each request has an engine of its own.
    """

    arm: str
    steps: tuple[Step, ...]
    kind: Kind

    def pending(self, done: Collection[int]) -> list[Step]:
        """Return the requests to ask, given the steps that are recorded.

        A new engine does not remember what its predecessor was asked: a group of which one request
        is missing is asked again as a whole, and so is what opens the stream.
        """
        missing = {one.step for one in self.steps if one.step not in done and not one.opening}
        groups = {one.group for one in self.steps if one.step in missing and one.group is not None}
        if not missing:
            return [one for one in self.steps if one.step not in done]
        return [
            one
            for one in self.steps
            if one.step in missing or one.opening or (one.group is not None and one.group in groups)
        ]

    def left(self, records: Iterable[Record]) -> Left:
        """Return the requests to ask, given what is recorded.

        What failed is asked again, and an engine that had served others may have failed for that
        reason: then all that it served is asked again, of one new engine and in the same order, so
        that the failure meets what it met before and later answers keep what they followed.

        Args:
            records: of any arm, the last for each step.
        """
        mine = {one.step: one for one in records if one.arm == self.arm}
        places = {one.step: place for place, one in enumerate(self.steps)}
        again: set[int] = set()
        kept: set[int] = set()
        for record in mine.values():
            place = places.get(record.step)
            if record.error is None or not record.position or place is None:
                continue
            if place < record.position:  # it was asked after requests that this stream has not
                kept.add(record.step)
                continue
            before = self.steps[place - record.position : place]
            again |= {one.step for one in before}
            again |= {one.step for one in mine.values() if one.life == record.life}
        done = {step for step, one in mine.items() if one.error is None and step not in again}
        return Left(
            pending=self.pending(done | kept),
            again=frozenset(again & {step for step, one in mine.items() if one.error is None}),
            kept=frozenset(kept),
        )

    def only(self, ordinals: Collection[int]) -> Stream:
        """Return the stream of these samples alone."""
        return replace(self, steps=tuple(one for one in self.steps if one.ordinal in ordinals))


@dataclass(frozen=True, slots=True)
class Left:
    """What is left of a stream.

    Attributes:
        pending: the requests to ask, in order.
        again: steps of those that were answered before, by an engine that failed at another.
        kept: steps that failed in an engine that had served requests which this stream has not;
            a new engine, asked without those, would show nothing.
    """

    pending: list[Step]
    again: frozenset[int]
    kept: frozenset[int]


def streams(
    arms: Sequence[str],
    ordinals: Sequence[int],
    seed: int = 0,
    boundary_units: Sequence[int] = (),
) -> list[Stream]:
    """Return the streams of a run, cheap ones first.

    Args:
        arms: their names.
        ordinals: the samples to ask.
        seed: decides the order of `shuffled`.
        boundary_units: the lengths in tokens around which `boundary` asks.
    """
    settings = _Settings(seed, tuple(boundary_units))
    found = []
    for arm in in_running_order(arms):
        kind = kind_of(arm)
        steps = tuple(_ORDERS[kind.order](sorted(ordinals), settings))
        if arm == REFERENCE:
            steps += tuple(_beside(arms, sorted(ordinals), settings))
        found.append(Stream(arm=arm, steps=steps, kind=kind))
    return found


@dataclass(frozen=True, slots=True)
class _Settings:
    seed: int
    boundary_units: tuple[int, ...]


def _ordinal(ordinals: Sequence[int], settings: _Settings) -> Iterable[Step]:
    return (Step(step=one, ordinal=one) for one in ordinals)


def drawn(ordinals: Iterable[int], seed: int, purpose: str) -> list[int]:
    """Return ordinals in an order that the seed decides, each one's place relative to the others
    independent of which others there are.
    """
    return sorted(
        ordinals,
        key=lambda one: hashlib.sha256(f"{purpose} {seed} {one}".encode()).digest(),
    )


def _shuffled(ordinals: Sequence[int], settings: _Settings) -> Iterable[Step]:
    return _ordinal(drawn(ordinals, settings.seed, "shuffled"), settings)


def _aged(ordinals: Sequence[int], settings: _Settings) -> Iterable[Step]:
    for one in range(AGING_REQUESTS):
        yield Step(one, AGING_ORDINALS + one, source=AGING, scored=False, opening=True)
    for one in ordinals:
        yield Step(AGING_REQUESTS + one, one)


def neighbour(ordinal: int) -> int:
    """Return the sample that is asked between or before others: 1 for 0, 0 for 1, and so on."""
    return ordinal ^ 1


def _axa(ordinals: Sequence[int], settings: _Settings) -> Iterable[Step]:
    for one in ordinals:
        for place, asked in enumerate((one, neighbour(one), one)):
            yield Step(3 * one + place, asked, group=one)


def _repeat(ordinals: Sequence[int], settings: _Settings) -> Iterable[Step]:
    for one in ordinals:
        for place in range(3):
            yield Step(3 * one + place, one, group=one)


def _length_mix(ordinals: Sequence[int], settings: _Settings) -> Iterable[Step]:
    for one in ordinals:
        yield Step(3 * one, one, group=one)
        yield Step(3 * one + 1, one, source=QUARTER if one % 2 else HALF, group=one)
        yield Step(3 * one + 2, one, group=one)


def _boundary(ordinals: Sequence[int], settings: _Settings) -> Iterable[Step]:
    for one in ordinals:
        units = settings.boundary_units
        for number, unit in enumerate(units):
            # A multiple of both would be asked twice.
            avoided = next((other for other in units[number + 1 :] if other % unit == 0), 0)
            for place, beyond in enumerate((-1, 0, 1)):
                yield Step(
                    6 * one + 3 * number + place,
                    one,
                    source=CUT,
                    unit_tokens=unit,
                    avoided_tokens=avoided,
                    beyond_tokens=beyond,
                )


def _fill(ordinals: Sequence[int], settings: _Settings) -> Iterable[Step]:
    for one in ordinals:
        yield Step(2 * one, one, action=FILL, scored=False, group=one)
        yield Step(2 * one + 1, one, group=one)


def _cancel(ordinals: Sequence[int], settings: _Settings) -> Iterable[Step]:
    for one in ordinals:
        yield Step(2 * one, neighbour(one), action=CANCEL, scored=False, group=one)
        yield Step(2 * one + 1, one, group=one)


def _resend(ordinals: Sequence[int], settings: _Settings) -> Iterable[Step]:
    for one in ordinals:
        yield Step(2 * one, one, action=CANCEL, scored=False, group=one)
        yield Step(2 * one + 1, one, group=one)


def _flood(ordinals: Sequence[int], settings: _Settings) -> Iterable[Step]:
    for one in ordinals:
        yield Step(2 * one, one, scored=False, opening=True)
    for one in range(AGING_REQUESTS):
        ordinal = AGING_ORDINALS + one
        yield Step(FLOOD_STEPS + one, ordinal, source=AGING, scored=False, opening=True)
    for one in ordinals:
        yield Step(2 * one + 1, one)


def _two_questions(ordinals: Sequence[int], settings: _Settings) -> Iterable[Step]:
    for one in ordinals:
        yield Step(2 * one, one, source=OTHER, group=one)
        yield Step(2 * one + 1, one, group=one)


def _beside(arms: Sequence[str], ordinals: Sequence[int], settings: _Settings) -> Iterable[Step]:
    """Yield the prompts that only other arms ask, so that the reference has an answer to each."""
    for arm, offset in BESIDE.items():
        if arm in arms:
            for one in _ORDERS[arm](ordinals, settings):
                if one.source != SAMPLE:
                    yield replace(one, step=offset + one.step, group=None)


_ORDERS: Mapping[str, Callable[[Sequence[int], _Settings], Iterable[Step]]] = {
    "ordinal": _ordinal,
    "shuffled": _shuffled,
    "aged": _aged,
    "axa": _axa,
    "repeat": _repeat,
    "length_mix": _length_mix,
    "boundary": _boundary,
    "fill": _fill,
    "cancel": _cancel,
    "resend": _resend,
    "flood": _flood,
    "two_questions": _two_questions,
}
