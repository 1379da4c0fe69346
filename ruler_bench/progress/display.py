"""Display: who is told how a run goes. This one says nothing: progress=none."""

from __future__ import annotations

from typing import TextIO

from ruler_bench.progress.state import RunState
from ruler_bench.records import Record


class Display:
    """Shows nothing; the others show something at some of these calls.

    All calls come with the lock of `ruler_bench.progress.Progress` held. `stream` is standard
    error as it was before: whatever fails in writing there must not end a run.
    """

    takes_stderr = False
    """Whether lines that others write to standard error have to come as `message`."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> None:
        """Write to standard error at once; say nothing more where nobody reads it."""
        try:
            self.stream.write(text)
            self.stream.flush()
        except (OSError, ValueError):  # ValueError: it is closed
            self.write = lambda text: None  # type: ignore[method-assign]

    def message(self, line: str) -> None:
        """Show a line that somebody else wrote."""
        self.write(f"{line}\n")

    def sweep(self, done: int, total: int | None, unit: str) -> None:
        """Show that so many of all cells or jobs of the command are done."""

    def run_starts(self, run: RunState) -> None:
        """Show that a run begins, before its samples are there."""

    def samples_made(self, run: RunState) -> None:
        """Show that samples were made ahead of a run; `run_starts` came before."""

    def run_counted(self, run: RunState) -> None:
        """Show how much there is to ask, and what is recorded already."""

    def arm_starts(self, run: RunState) -> None:
        """Show that an arm begins to ask."""

    def engine_started(self, run: RunState, seconds: float) -> None:
        """Show that an engine has started."""

    def answered(self, run: RunState, record: Record) -> None:
        """Show a record."""

    def tick(self, run: RunState) -> None:
        """Show that time passes; called about once a second."""

    def run_ends(self, run: RunState, status: int | None, error: str | None) -> None:
        """Show that a run ended, with its exit status or the error that ended it."""

    def close(self) -> None:
        """Leave the terminal as it was."""
