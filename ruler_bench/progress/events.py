"""progress=json: one JSON object a line on standard error, for programs.

docs/progress.md says what each event holds.
"""

from __future__ import annotations

import json
import time
from typing import Any, TextIO

from ruler_bench.progress.display import Display
from ruler_bench.progress.state import RunState
from ruler_bench.records import Record

VERSION = 1
FIRST_WAIT_SECONDS = 10.0


class Events(Display):
    """Writes events; what others write to standard error becomes an event, too."""

    takes_stderr = True

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._run: str | None = None
        self._waits_since: float | None = None
        self._next_wait = FIRST_WAIT_SECONDS

    def _emit(self, event: str, **fields: Any) -> None:
        head = {"version": VERSION, "event": event, "time": round(time.time(), 3)}
        self.write(json.dumps(head | {"run": self._run} | fields) + "\n")

    def message(self, line: str) -> None:
        """Write what somebody else wrote."""
        self._emit("message", text=line)

    def sweep(self, done: int, total: int | None, unit: str) -> None:
        """Write how much of the command is done."""
        self._emit("sweep", done=done, total=total, unit=unit)

    def run_starts(self, run: RunState) -> None:
        """Name the run."""
        self._run = str(run.cell.folder)

    def samples_made(self, run: RunState) -> None:
        """Name the run no longer."""
        self._run = None

    def run_counted(self, run: RunState) -> None:
        """Write what the run is and how much there is to ask."""
        self._emit(
            "start",
            task=run.cell.task.name,
            length=run.cell.length,
            backend=run.cell.backend,
            model=run.cell.model,
            arms=list(run.arms),
            done=run.done,
            total=run.total,
        )

    def arm_starts(self, run: RunState) -> None:
        """Write which arm begins."""
        self._emit("arm", **_of_arm(run), **_of_run(run))

    def engine_started(self, run: RunState, seconds: float) -> None:
        """Write how long the engine took."""
        self._emit("engine", arm=run.arm, seconds=_rounded(seconds))

    def answered(self, run: RunState, record: Record) -> None:
        """Write a record's result, and how far it is."""
        rate, left = run.per_second, run.left_seconds
        self._emit(
            "sample",
            **_of_arm(run),
            **_of_run(run),
            ordinal=record.ordinal,
            step=record.step,
            score=record.score,
            correct=record.correct,
            error=record.error,
            seconds=_rounded(record.total_seconds),
            per_minute=_rounded(None if rate is None else rate * 60),
            left_seconds=_rounded(left),
        )

    def tick(self, run: RunState) -> None:
        """Write what is waited for, at doubling intervals."""
        if run.waits_since != self._waits_since:
            self._waits_since, self._next_wait = run.waits_since, FIRST_WAIT_SECONDS
        if run.waited_seconds >= self._next_wait:
            self._emit(
                "waiting", arm=run.arm, what=run.waits_for, seconds=_rounded(run.waited_seconds)
            )
            self._next_wait *= 2

    def run_ends(self, run: RunState, status: int | None, error: str | None) -> None:
        """Write how it ended."""
        self._emit("end", **_of_run(run), seconds=_rounded(run.seconds), status=status, error=error)
        self._run = None


def _of_arm(run: RunState) -> dict[str, Any]:
    tally = run.tally
    return {
        "arm": run.arm,
        "arm_done": tally.done,
        "arm_total": tally.total,
        "right": tally.right,
        "scored": tally.scored,
        "errors": tally.errors,
    }


def _of_run(run: RunState) -> dict[str, Any]:
    return {"done": run.done, "total": run.total}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
