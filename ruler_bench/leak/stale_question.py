"""Answers to another question on the same context: what a cache that keeps too much gives.

Two questions on one context have the same needles in their prompts, so that no whole answer is a
canary. A model that errs prints some needle of the context; a server that takes the second question
for the first prints the one that it was asked for before, every time. With m other needles an error
hits that one in one of m, so that a few hits are proof, of servers that nobody can start anew, too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from ruler_bench.leak.arms import in_running_order
from ruler_bench.leak.canary import Canary, can_be_canary, delimited
from ruler_bench.leak.tests_of_difference import VERDICT_ALPHA, binomial_tail
from ruler_bench.records import Record

_NEEDLE_VALUE = re.compile(r" for [^:\n]+? is: ([0-9a-f-]+)\.", re.IGNORECASE)


@dataclass(frozen=True)
class _Error:
    """An output that prints another needle of its context than the one it was asked for.

    Attributes:
        chance: of hitting by chance a needle that was asked for before.
        hit: that one, where it is printed.
    """

    chance: Fraction
    hit: Canary | None


def stale_questions(
    streams: Mapping[str, Sequence[Record]],
    prompts: Mapping[str, str],
    one_server: Collection[str] = (),
    controls: Iterable[Record] = (),
) -> tuple[Canary, ...]:
    """Return answers to a question that was asked before on the same context, where there are more
    of them than errors account for (`VERDICT_ALPHA`).

    Args:
        streams: records of each arm of one engine, in any order.
        prompts: texts of prompts by their hash; an output whose prompt is not here is passed over.
        one_server: arms that one and the same server answered, one after the other.
        controls: of other engines, fresh ones and the reference: what these print, too, is the
            model's own error.
    """
    own = {pair for record in controls for pair in _printed(record)}
    errors = list(_errors(streams, prompts, one_server, own))
    hits = [one.hit for one in errors if one.hit is not None]
    if not hits:
        return ()
    chance = max(one.chance for one in errors)
    return tuple(hits) if binomial_tail(len(hits), len(errors), chance) <= VERDICT_ALPHA else ()


def _errors(
    streams: Mapping[str, Sequence[Record]],
    prompts: Mapping[str, str],
    one_server: Collection[str],
    own: set[tuple[str, str]],
) -> Iterator[_Error]:
    """Yield the first error at each question that others on its context were asked before.

    `own` holds prompts, by hash, with what the model prints by itself; it grows by what an engine
    prints that was asked nothing else on the context yet.
    """
    seen: set[str] = set()
    for served in _lives(streams, one_server):
        asked: dict[int, dict[str, Record]] = {}
        for record in served:
            before = asked.setdefault(record.ordinal, {})
            others = {value: one for value, one in before.items() if value not in record.expected}
            error = _error(record, prompts.get(record.prompt_sha256), others)
            if not others:
                own.update(_printed(record))
            elif error is not None and record.prompt_sha256 not in seen:
                seen.add(record.prompt_sha256)
                if error.hit is None or (record.prompt_sha256, error.hit.value) not in own:
                    yield error
            if len(record.expected) == 1 and can_be_canary(record.expected[0]):
                before.setdefault(record.expected[0].lower(), record)


def _printed(record: Record) -> Iterator[tuple[str, str]]:
    for value in delimited((record.output or "").lower()):
        yield record.prompt_sha256, value


def _error(record: Record, prompt: str | None, others: Mapping[str, Record]) -> _Error | None:
    if prompt is None or not record.output or len(record.expected) != 1 or record.correct:
        return None
    needles = {one.lower() for one in _NEEDLE_VALUE.findall(prompt)} - {record.expected[0].lower()}
    printed = needles & set(delimited(record.output.lower()))
    known = others.keys() & needles
    if not printed or not known:
        return None
    chance = min(Fraction(1), Fraction(len(printed) * len(known), len(needles)))
    value = next((one for one in known if one in printed), None)
    if value is None:
        return _Error(chance, None)
    owner = others[value]
    hit = Canary(
        record.arm,
        record.ordinal,
        record.position,
        owner.ordinal,
        owner.position,
        value,
        is_same_context=True,
    )
    return _Error(chance, hit)


def _lives(
    streams: Mapping[str, Sequence[Record]], one_server: Collection[str]
) -> Iterator[list[Record]]:
    """Yield what each engine was asked, in order; arms of one server are one engine's."""
    shared: list[Record] = []
    for arm in in_running_order(streams):
        stream = sorted(streams[arm], key=lambda one: (one.life, one.position))
        if arm in one_server:
            shared += stream
            continue
        for life in sorted({one.life for one in stream}):
            yield [one for one in stream if one.life == life]
    if shared:
        yield shared
