"""Canaries: answers of earlier samples that turn up where they have no business.

Every needle task hides values that nobody can guess. When an output prints the whole answer of a
sample that the same engine served before, and that answer stands neither in this prompt nor in any
other sample, then it came through the engine: proof. A wrong seven-digit output meets one of 100
others by chance about once in 100000. Parts of an answer are hints, and hints count only where they
come from earlier samples clearly more often than from later ones, which cannot have leaked.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from ruler_bench.leak.tests_of_difference import Counted, binomial_tail
from ruler_bench.records import Record

HINT_DIGITS, HINT_HEX = 6, 8

_NUMBER = re.compile(r"[0-9]{6,}")
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_DIGIT_RUN = re.compile(r"[0-9]+")
_HEX_RUN = re.compile(r"[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class Canary:
    """The whole answer of an earlier sample in an output.

    Attributes:
        arm, ordinal, position: the output in which it stands.
        owner: ordinal of the sample that it belongs to.
        owner_position: when that sample was served, in the same life.
        value: the answer.
        is_same_context: the sample is this one, asked for another needle of its context before;
            `ruler_bench.leak.stale_question`. The request before may be another arm's.
    """

    arm: str
    ordinal: int
    position: int
    owner: int
    owner_position: int
    value: str
    is_same_context: bool = False

    def __str__(self) -> str:
        if self.is_same_context:
            return (
                f"{self.arm} prints {self.value}, the answer to another question on the same "
                f"context, which this engine was asked before, at position {self.position}"
            )
        return (
            f"{self.arm} prints {self.value}, the answer of index {self.owner}, which this engine "
            f"served at position {self.owner_position}, at position {self.position}"
        )


@dataclass(frozen=True, slots=True)
class Hint:
    """A part of another sample's answer in an output.

    Attributes:
        arm, ordinal: the output.
        owner: the sample whose answer has it.
        is_earlier: whether that sample was served before; otherwise it is a control.
        part: the digits.
    """

    arm: str
    ordinal: int
    owner: int
    is_earlier: bool
    part: str


@dataclass(frozen=True)
class Canaries:
    """What a scan found.

    Attributes:
        proofs: whole answers.
        hints: parts of answers, earlier and later ones.
        outputs: how many outputs were scanned.
        test: outputs with a part of an earlier answer, among those with a part of any, against
            the share of earlier ones among all pairs of an output and an answer.
    """

    proofs: tuple[Canary, ...] = ()
    hints: tuple[Hint, ...] = ()
    outputs: int = 0
    test: Counted = field(default_factory=lambda: Counted(0, 0, 1.0))

    @property
    def earlier_hits(self) -> int:
        """Outputs with a part of an earlier answer."""
        return self.test.count

    @property
    def later_hits(self) -> int:
        """Outputs with a part of a later answer: the control."""
        return self.test.cases - self.test.count


def can_be_canary(value: str) -> bool:
    """Whether an answer is one that nobody guesses: a number of 6 digits or more, or a UUID."""
    return bool(_NUMBER.fullmatch(value) or _UUID.fullmatch(value.lower()))


Sample = tuple[int, tuple[str, ...]]
"""A sample is its ordinal and its answers: some arms ask an ordinal at another length, too."""


def scan(streams: Mapping[str, Sequence[Record]], prompts: Mapping[str, str]) -> Canaries:
    """Look for answers of other samples in the outputs of engines that served several.

    Args:
        streams: records of each arm, in any order; failed ones were served, too.
        prompts: texts of prompts by their hash (`Record.prompt_sha256`); an output whose prompt is
            not here is passed over.
    """
    everything = {_sample(record) for stream in streams.values() for record in stream}
    owners, parts = _owners(everything), _parts(everything)
    proofs: list[Canary] = []
    hints: list[Hint] = []
    outputs = pairs_before = pairs_after = 0
    for stream in streams.values():
        for served in _lives(stream):
            first: dict[Sample, int] = {}
            for record in served:
                first.setdefault(_sample(record), record.position)
            for record in served:
                prompt = prompts.get(record.prompt_sha256)
                if prompt is None or not record.output:
                    continue
                outputs += 1
                others = [when for one, when in first.items() if one != _sample(record)]
                pairs_before += sum(when < record.position for when in others)
                pairs_after += sum(when > record.position for when in others)
                proofs += _proofs(record, prompt, owners, first)
                hints += _hints(record, prompt, parts, first)
    return Canaries(tuple(proofs), tuple(hints), outputs, _test(hints, pairs_before, pairs_after))


def _sample(record: Record) -> Sample:
    return record.ordinal, record.expected


def _lives(stream: Sequence[Record]) -> Iterator[list[Record]]:
    lives: dict[int, list[Record]] = {}
    for record in stream:
        lives.setdefault(record.life, []).append(record)
    for served in lives.values():
        if len(served) > 1:
            yield sorted(served, key=lambda one: one.position)


def _owners(samples: Collection[Sample]) -> dict[str, Sample]:
    """Return the sample that each answer belongs to; answers of several are left out."""
    found: dict[str, Sample] = {}
    shared: set[str] = set()
    for sample in samples:
        for value in {one.lower() for one in sample[1] if can_be_canary(one)}:
            if found.setdefault(value, sample) != sample:
                shared.add(value)
    # A number may also be a part of another sample's longer answer.
    texts = [(sample, "\n".join(sample[1]).lower()) for sample in samples]
    longest = max((len(value) for _, text in texts for value in text.split("\n")), default=0)
    for value, sample in found.items():
        if len(value) < longest and any(value in text for one, text in texts if one != sample):
            shared.add(value)
    return {value: sample for value, sample in found.items() if value not in shared}


def _proofs(
    record: Record, prompt: str, owners: Mapping[str, Sample], first: Mapping[Sample, int]
) -> Iterator[Canary]:
    text, asked = (record.output or "").lower(), prompt.lower()
    for value in dict.fromkeys(delimited(text)):
        owner = owners.get(value)
        if owner is None or owner == _sample(record) or value in asked:
            continue
        when = first.get(owner)
        if when is not None and when < record.position:
            yield Canary(record.arm, record.ordinal, record.position, owner[0], when, value)


def delimited(text: str) -> Iterator[str]:
    """Yield the numbers and UUIDs of a text that no letter, digit or hyphen continues."""
    for pattern in (_NUMBER, _UUID):
        for match in pattern.finditer(text):
            before, after = text[: match.start()][-1:], text[match.end() :][:1]
            if not (before.isalnum() or after.isalnum() or before == "-" or after == "-"):
                yield match[0]


# --- hints --------------------------------------------------------------------------------------


def _compact(text: str) -> str:
    return text.lower().replace("-", "")


def _windows(text: str, pattern: re.Pattern[str], length: int) -> Iterator[str]:
    for run in pattern.findall(text):
        for start in range(len(run) - length + 1):
            yield run[start : start + length]


def _kind(value: str) -> tuple[re.Pattern[str], int]:
    return (_HEX_RUN, HINT_HEX) if _UUID.fullmatch(value.lower()) else (_DIGIT_RUN, HINT_DIGITS)


def _parts(samples: Collection[Sample]) -> dict[str, Sample]:
    """Return the sample to which each part of an answer belongs; shared parts are left out."""
    found: dict[str, Sample] = {}
    shared: set[str] = set()
    for sample in samples:
        for value in filter(can_be_canary, sample[1]):
            for part in _windows(_compact(value), *_kind(value)):
                if found.setdefault(part, sample) != sample:
                    shared.add(part)
    return {part: sample for part, sample in found.items() if part not in shared}


def _hints(
    record: Record, prompt: str, parts: Mapping[str, Sample], first: Mapping[Sample, int]
) -> Iterator[Hint]:
    text = _compact(record.output or "")
    asked = _compact(prompt)
    seen: set[Sample] = set()
    for pattern, length in ((_DIGIT_RUN, HINT_DIGITS), (_HEX_RUN, HINT_HEX)):
        for part in _windows(text, pattern, length):
            owner = parts.get(part)
            if owner is None or owner == _sample(record) or owner in seen or part in asked:
                continue
            when = first.get(owner)
            if when is not None and when != record.position:
                seen.add(owner)
                yield Hint(record.arm, record.ordinal, owner[0], when < record.position, part)


def _test(hints: Sequence[Hint], pairs_before: int, pairs_after: int) -> Counted:
    """Test earlier against later hits; an output counts once on each side."""
    earlier = len({(one.arm, one.ordinal) for one in hints if one.is_earlier})
    later = len({(one.arm, one.ordinal) for one in hints if not one.is_earlier})
    if not earlier or not pairs_before:
        return Counted(earlier, earlier + later, 1.0)
    chance = Fraction(pairs_before, pairs_before + pairs_after)
    return Counted(earlier, earlier + later, binomial_tail(earlier, earlier + later, chance))
