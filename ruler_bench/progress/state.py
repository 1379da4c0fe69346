"""What is counted of a run that goes on; every display says the same of it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from ruler_bench.cell import Cell
from ruler_bench.leak.arms import kind_of
from ruler_bench.records import Record

SAMPLES, ENGINE, ANSWER, REPORT = "samples", "engine", "answer", "report"
"""What a run may be waiting for: its samples to be made, an engine to start, an answer, reports."""


@dataclass
class Tally:
    """Requests of one arm that are done, and how they came out.

    Errors are counted apart: a request that failed in the engine is neither right nor wrong. Nor is
    one without a score, which belongs to an arm's procedure.

    Attributes:
        total: requests of the arm.
        done: of these, asked now or recorded before.
        right, scored, errors: of those that are done.
        asked: how many were asked now, since `started` (`time.monotonic`).
        last: when the latest answer came.
    """

    total: int = 0
    done: int = 0
    right: int = 0
    scored: int = 0
    errors: int = 0
    asked: int = 0
    started: float = field(default_factory=time.monotonic)
    last: float = field(default_factory=time.monotonic)

    def count(self, records: Iterable[Record]) -> None:
        """Count records as done."""
        for record in records:
            self.done += 1
            self.right += bool(record.correct)
            self.scored += record.score is not None
            self.errors += record.error is not None

    def add(self, record: Record) -> None:
        """Count a record that came now."""
        self.count([record])
        self.asked += 1
        self.last = time.monotonic()

    @property
    def accuracy(self) -> str:
        """How many are right, in words."""
        errors = f", {self.errors} error{'s' * (self.errors != 1)}" if self.errors else ""
        return f"{self.right}/{self.scored} right{errors}"

    @property
    def per_second(self) -> float | None:
        """Answers a second, engine starts included; None before the first."""
        return self.asked / max(self.last - self.started, 1e-9) if self.asked else None


@dataclass
class RunState:
    """One run: all arms of one cell.

    Attributes:
        cell: what runs.
        arms: that are asked, in order.
        label: of a job of a sweep, its settings that no title has.
        arm: that is asked now; None before the first.
        tally: of that arm.
        total, done: requests over all arms; `total` may fall where `fresh.on` chooses samples.
        asked: requests asked now.
        waits_for: SAMPLES, ENGINE, ANSWER or REPORT.
        waits_since: `time.monotonic`.
        started: likewise, from when the samples are there.
    """

    cell: Cell
    arms: tuple[str, ...]
    label: str = ""
    arm: str | None = None
    tally: Tally = field(default_factory=Tally)
    total: int = 0
    done: int = 0
    asked: int = 0
    waits_for: str = SAMPLES
    waits_since: float = field(default_factory=time.monotonic)
    started: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        """Task, length and backend, and of a job of a sweep what else it is swept over."""
        name = f"{self.cell.task.name} {self.cell.length} {self.cell.backend}"
        return f"{name} {self.label}" if self.label else name

    @property
    def title(self) -> str:
        """The same with the arm that runs, where there are several."""
        return (
            self.name if self.arm is None or len(self.cell.arms) < 2 else f"{self.name} {self.arm}"
        )

    @property
    def per_second(self) -> float | None:
        """Answers a second of the arm that runs; of the whole run before its first."""
        if self.tally.asked:
            return self.tally.per_second
        return self.asked / max(self.seconds, 1e-9) if self.asked else None

    @property
    def left_seconds(self) -> float | None:
        """Seconds until all is asked, at the rate of now; None where nothing has been answered."""
        if self.done >= self.total:
            return 0.0
        rate = self.per_second
        if rate is None:
            return None
        since_last = time.monotonic() - self.tally.last
        return max(0.0, (self.total - self.done) / rate - since_last)

    @property
    def seconds(self) -> float:
        """How long it has been running, the making of its samples apart."""
        return time.monotonic() - self.started

    @property
    def waited_seconds(self) -> float:
        """How long it has been waiting for what it waits for."""
        return time.monotonic() - self.waits_since

    def engine_started(self) -> None:
        """Wait for answers; the pace of an arm of one engine is counted from its start on."""
        self.wait_for(ANSWER)
        if self.arm is not None and not kind_of(self.arm).is_fresh and not self.tally.asked:
            self.tally.started = self.tally.last = self.waits_since

    def wait_for(self, what: str) -> None:
        """Note what is waited for from now on."""
        self.waits_for, self.waits_since = what, time.monotonic()


WORDS = {
    SAMPLES: "makes the samples",
    ENGINE: "waits for its engine",
    ANSWER: "waits for an answer",
    REPORT: "writes its reports",
}
"""What `RunState.waits_for` is called."""


def clock(seconds: float | None) -> str:
    """Return a time as minutes and seconds, "1:04", or hours before them; "?" for None."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def pace(per_second: float | None) -> str:
    """Return how many a minute, in words: "36 a minute"."""
    if per_second is None:
        return "? a minute"
    minute = per_second * 60
    return f"{minute:.0f} a minute" if minute >= 10 else f"{minute:.2g} a minute"
