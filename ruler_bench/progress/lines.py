"""progress=lines: a line now and then, for logs."""

from __future__ import annotations

import time
from typing import TextIO

from ruler_bench.leak.arms import kind_of
from ruler_bench.progress.display import Display
from ruler_bench.progress.state import WORDS, RunState, clock, pace
from ruler_bench.records import Record

EVERY_SECONDS = 10.0
"""A line comes after so long, or with each tenth of an arm, whichever is sooner."""
PARTS = 10


class Lines(Display):
    """A line as an arm starts, with its tenths, every ten seconds with news, and at the end.

    While nothing comes, the pauses between lines double.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._said = time.monotonic()
        self._pause = EVERY_SECONDS

    def _say(self, text: str) -> None:
        self.write(f"{text}\n")
        self._said = time.monotonic()

    def run_starts(self, run: RunState) -> None:
        """Begin to count time; `tick` says so where samples take long."""
        self._said, self._pause = time.monotonic(), EVERY_SECONDS

    def arm_starts(self, run: RunState) -> None:
        """Say how much there is to ask."""
        tally = run.tally
        recorded = f", {tally.done} recorded already" if tally.done else ""
        each = (
            "an engine for each" if run.arm and kind_of(run.arm).is_fresh else "starts its engine"
        )
        self._say(f"{run.title}: {tally.total} samples{recorded}; {each}")
        self._pause = EVERY_SECONDS

    def answered(self, run: RunState, record: Record) -> None:
        """Say it where a tenth is full or ten seconds have passed."""
        tally = run.tally
        self._pause = EVERY_SECONDS
        part = max(1, tally.total // PARTS)
        is_due = tally.done % part == 0 or tally.done == tally.total
        if is_due or time.monotonic() - self._said >= EVERY_SECONDS:
            self._say(f"{run.title}: {counts(run)}")

    def tick(self, run: RunState) -> None:
        """Say what is waited for."""
        if time.monotonic() - self._said >= self._pause:
            self._say(f"{run.title}: {WORDS[run.waits_for]}, {clock(run.waited_seconds)}")
            self._pause *= 2

    def run_ends(self, run: RunState, status: int | None, error: str | None) -> None:
        """Say what was asked, in which time."""
        if run.asked:
            self._say(ending(run))


def counts(run: RunState) -> str:
    """Return how far the arm that runs has come, and the run where it has several arms."""
    tally = run.tally
    parts = [f"{tally.done}/{tally.total} samples", tally.accuracy, pace(run.per_second)]
    if run.total > tally.total:
        parts.append(f"{run.done}/{run.total} of all arms")
    return ", ".join([*parts, f"{clock(run.left_seconds)} left"])


def ending(run: RunState) -> str:
    """Return the line that a run leaves; its time ends with the last answer."""
    seconds = run.tally.last - run.started
    one_arm = f", {run.tally.accuracy}" if run.total == run.tally.total else ""
    return f"{run.name}: {run.done}/{run.total} samples in {clock(seconds)}{one_arm}"
