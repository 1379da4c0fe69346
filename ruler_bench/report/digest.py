"""Digest: one arm of a run, made small: what pages and comparisons need, without its records."""

from __future__ import annotations

import re
import statistics
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ruler_bench.records import Record
from ruler_bench.report.depth import by_depth
from ruler_bench.report.provenance import KEYS_LEFT_OUT
from ruler_bench.report.rows import Row, Run, build_row, finished, varied_settings
from ruler_bench.report.text import visible
from ruler_bench.score import is_null

RIGHT, PARTLY, WRONG, ERROR = "right", "partly", "wrong", "error"
STATES = (RIGHT, PARTLY, WRONG, ERROR)
SHOWN_CHARACTERS = 200
LISTED_ORDINALS = 20
FAILURES_KEPT = 50
"""Answers of an arm that is not right that a page of many runs may show."""
ALL_KEPT_RUNS = 8
"""With at most so many runs, every answer is kept, so that strips show all indices."""
POINTS = 300
"""Requests in a picture of times; of more, every n-th."""

MEASURES = (
    "total_seconds",
    "ttft_seconds",
    "decode_seconds",
    "estimation_seconds",
    "attention_seconds",
)


@dataclass(frozen=True, slots=True)
class Shown:
    """One answer as a page shows it: texts are cut and printable."""

    ordinal: int
    state: str
    expected: str
    got: str
    position: int
    predecessor: int | None
    depth: float | None
    score: float | None
    ended_by: str
    total_seconds: float | None
    ttft_seconds: float | None
    prompt_sha256: str


@dataclass(frozen=True, slots=True)
class Spread:
    """A measure over samples: median, and what 95 in 100 stay below."""

    median: float
    high: float
    samples: int


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of failure: its name, what it means, how many there are, and the first ordinals."""

    name: str
    meaning: str
    count: int
    ordinals: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Digest:
    """One arm of a run.

    Attributes:
        run: number of its run among those of one report; arms of a run share it.
        folder: where the run is, as it was named; empty where nobody knows.
        row: its figures.
        manifest: of its run, without the list of engines.
        depths: mean score (0 to 100) and samples by tenth of the context; None without samples.
        kinds: its failures, the most frequent first.
        spreads: of each of MEASURES that is recorded.
        times: position in the engine's life and seconds of whole requests.
        ordinals, scores: of finished samples, by ordinal, where each has one answer.
        shown: answers, all or the first of those that are not right.
    """

    run: int
    folder: str
    row: Row
    manifest: Mapping[str, Any]
    depths: tuple[tuple[float, int] | None, ...]
    kinds: tuple[Kind, ...]
    spreads: Mapping[str, Spread]
    times: tuple[tuple[int, float], ...]
    ordinals: array[int]
    scores: array[float]
    shown: tuple[Shown, ...]

    @property
    def arm(self) -> str:
        """Name of the arm."""
        return self.row.arm or "-"


def digest(run: Run, number: int = 0, folder: str = "", failures_only: int | None = None) -> Digest:
    """Make one arm of a run small.

    Args:
        run: records of one arm, and the manifest.
        number: of the run in the report.
        folder: of the run, as it is to be shown.
        failures_only: keep only so many answers that are not right; None keeps all.

    Raises:
        UsageError: the manifest's metric is unknown.
    """
    records = finished(run)
    by_ordinal = {one.ordinal: one.score for one in records if one.score is not None}
    ordinals = sorted(by_ordinal)
    kept: Iterable[Record] = run.records
    if failures_only is not None:
        kept = [one for one in run.records if not one.correct][:failures_only]
    return Digest(
        run=number,
        folder=folder,
        row=build_row(run),
        manifest={key: one for key, one in run.manifest.items() if key not in KEYS_LEFT_OUT},
        depths=_depths(records),
        kinds=_kinds(run),
        spreads={name: one for name in MEASURES if (one := _spread(records, name)) is not None},
        times=_times(records),
        ordinals=array("q", ordinals),
        scores=array("d", [by_ordinal[one] for one in ordinals]),
        shown=tuple(_shown(one) for one in kept),
    )


def with_settings(digests: Sequence[Digest]) -> list[Digest]:
    """Return the digests with the settings in which their runs differ."""
    settings = varied_settings([one.manifest for one in digests])
    return [
        replace(one, row=replace(one.row, settings=text))
        for one, text in zip(digests, settings, strict=True)
    ]


def name_parts(row: Row) -> list[str]:
    """Return what tells a run from others, without its arm."""
    parts = [row.task, f"{row.length_tokens} tokens", row.backend, row.model, row.settings]
    return [visible(part) for part in parts if part]


def state_of(record: Record) -> str:
    """Return one of STATES."""
    if record.error is not None:
        return ERROR
    if record.correct:
        return RIGHT
    return PARTLY if record.score else WRONG


def _shown(record: Record) -> Shown:
    got = record.error if record.error is not None else record.output or ""
    return Shown(
        ordinal=record.ordinal,
        state=state_of(record),
        expected=visible(", ".join(record.expected), SHOWN_CHARACTERS),
        got=visible(got, SHOWN_CHARACTERS),
        position=record.position,
        predecessor=record.predecessor,
        depth=record.depth,
        score=record.score,
        ended_by=visible(record.finish_reason or "-", SHOWN_CHARACTERS),
        total_seconds=record.total_seconds,
        ttft_seconds=record.ttft_seconds,
        prompt_sha256=record.prompt_sha256,
    )


def _depths(records: Iterable[Record]) -> tuple[tuple[float, int] | None, ...]:
    return tuple(
        (sum(scores) / len(scores), len(scores)) if scores else None for scores in by_depth(records)
    )


def _spread(records: Iterable[Record], name: str) -> Spread | None:
    values = sorted(one for record in records if (one := getattr(record, name)) is not None)
    if not values:
        return None
    return Spread(statistics.median(values), values[int(0.95 * (len(values) - 1))], len(values))


def _times(records: Sequence[Record]) -> tuple[tuple[int, float], ...]:
    timed = [(one.position, one.total_seconds) for one in records if one.total_seconds is not None]
    return tuple(timed[:: -(-len(timed) // POINTS) or 1])


# --- failures by kind ---------------------------------------------------------------------------


def _kinds(run: Run) -> tuple[Kind, ...]:
    failed = [record for record in run.records if not record.correct]
    holders = _holders(run.records) if failed else {}
    found: dict[tuple[str, str], list[int]] = {}
    for record in failed:
        found.setdefault(_kind(record, run.manifest["metric"], holders), []).append(record.ordinal)
    kinds = [
        Kind(name, meaning, len(ordinals), tuple(sorted(set(ordinals))[:LISTED_ORDINALS]))
        for (name, meaning), ordinals in found.items()
    ]
    return tuple(sorted(kinds, key=lambda one: (-one.count, one.name)))


_VALUE = re.compile(r"[0-9a-f-]{6,}")


def _holders(records: Iterable[Record]) -> dict[str, dict[int, Sequence[str]]]:
    """Return by value the samples that it is an answer of: most outputs hold no such value."""
    found: dict[str, dict[int, Sequence[str]]] = {}
    for record in records:
        for value in record.expected:
            found.setdefault(value.lower(), {})[record.ordinal] = record.expected
    return found


def _kind(
    record: Record, metric: str, holders: Mapping[str, Mapping[int, Sequence[str]]]
) -> tuple[str, str]:
    """Return name and meaning: of an error how its message begins, else the taxonomy's."""
    from ruler_bench.leak.taxonomy import KINDS, classify  # noqa: PLC0415 (numpy takes a while)

    if record.error is not None:
        return ERROR, visible(record.error.split(":")[0], 80)
    output = record.output or ""
    if is_null(output):
        return "empty", "nothing but blanks"
    if not record.expected:
        return "no_reference", "no expected answer is recorded"
    others: dict[int, Sequence[str]] = {}
    for value in _VALUE.findall(output.lower()):
        others |= holders.get(value, {})
    others.pop(record.ordinal, None)
    label = classify(
        output,
        record.expected,
        other_answers=others,
        metric="part" if metric == "part" else "all",
    )
    return label.name, KINDS[label.name]


def total_kinds(digests: Iterable[Digest]) -> list[Kind]:
    """Return the kinds of several arms together; ordinals are left out, they mean several runs."""
    counts: Counter[tuple[str, str]] = Counter()
    for one in digests:
        for kind in one.kinds:
            counts[kind.name, kind.meaning] += kind.count
    return [Kind(name, meaning, count, ()) for (name, meaning), count in counts.most_common()]
