"""How a run goes, told while it does: a bar, lines, JSON events or nothing (`progress=`).

Everything is told on standard error; results are printed on standard output. `Progress` counts and
calls one `Display`; a thread lets it tick, so that nothing long is silent.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TextIO

from backends.base import ConfigurationError
from ruler_bench.cell import Cell
from ruler_bench.command_line import INTERRUPTED, USAGE_ERROR
from ruler_bench.errors import one_line
from ruler_bench.progress.display import Display
from ruler_bench.progress.job import Job
from ruler_bench.progress.state import ANSWER, ENGINE, REPORT, RunState, Tally
from ruler_bench.progress.stderr import lines_to
from ruler_bench.records import Record

__all__ = ["Progress", "RunProgress", "shown"]

TICK_SECONDS = 1.0


class RunProgress:
    """Counts one run and tells the display. `status` is what the run ends with."""

    def __init__(self, cell: Cell, arms: tuple[str, ...], label: str, parent: Progress) -> None:
        self._state = RunState(cell, arms, label)
        self._parent = parent
        self._counted: dict[str, tuple[int, int]] = {}
        self.status: int | None = None

    def counted(self, arms: Mapping[str, tuple[int, int]]) -> None:
        """Take how many requests each arm has, and how many of these are recorded already."""
        self._counted = dict(arms)
        with self._parent.display() as display:
            self._state.total = sum(total for total, _ in arms.values())
            self._state.done = sum(done for _, done in arms.values())
            self._state.started = time.monotonic()
            display.run_counted(self._state)

    def arm(self, name: str, total: int, recorded: Iterable[Record]) -> None:
        """Begin to ask an arm: so many requests, of which some are recorded."""
        tally = Tally(total)
        tally.count(recorded)
        counted, done = self._counted.get(name, (0, 0))
        with self._parent.display() as display:
            state = self._state
            state.arm, state.tally = name, tally
            state.total += total - counted
            state.done += tally.done - done
            state.wait_for(ENGINE)
            display.arm_starts(state)

    def without(self, name: str, total: int) -> None:
        """Take that nothing is asked of an arm, of whose requests so many are recorded."""
        counted, done = self._counted.get(name, (0, 0))
        with self._parent.display():
            self._state.total += total - counted
            self._state.done += total - done

    def engine_starts(self) -> None:
        """Wait for an engine from now on."""
        with self._parent.display():
            self._state.wait_for(ENGINE)

    def engine_started(self, seconds: float) -> None:
        """Wait for answers from now on; the engine took so long to start."""
        with self._parent.display() as display:
            self._state.engine_started()
            display.engine_started(self._state, seconds)

    def add(self, record: Record) -> None:
        """Count a record that came now."""
        with self._parent.display() as display:
            state = self._state
            state.tally.add(record)
            state.done += 1
            state.asked += 1
            state.wait_for(ANSWER)
            display.answered(state, record)

    def reports(self) -> None:
        """Wait for the reports from now on."""
        with self._parent.display():
            self._state.wait_for(REPORT)

    @contextmanager
    def going(self) -> Iterator[RunProgress]:
        """Tell the display when the run begins and how it ended."""
        error: str | None = None
        with self._parent.display(self._state) as display:
            display.run_starts(self._state)
        try:
            yield self
        except BaseException as raised:
            if isinstance(raised, KeyboardInterrupt):
                self.status = INTERRUPTED
            else:
                error = one_line(raised)
                self.status = USAGE_ERROR if isinstance(raised, ConfigurationError) else None
            raise
        finally:
            with self._parent.display(self._state, is_over=True) as display:
                display.run_ends(self._state, self.status, error)


class Progress:
    """The runs of one command, one after the other.

    Args:
        display: what tells of them.
        runs: how many there are.
        job: which job of a sweep the command is.
    """

    def __init__(self, display: Display, runs: int = 1, job: Job | None = None) -> None:
        self._display = display
        self._lock = threading.RLock()
        self._run: RunState | None = None
        self._runs, self._done, self._job = runs, 0, job

    @contextmanager
    def display(self, run: RunState | None = None, is_over: bool = False) -> Iterator[Display]:
        """Lend the display to one caller at a time; note which run it shows from now on."""
        with self._lock:
            try:
                yield self._display
            finally:
                if run is not None:
                    self._run = None if is_over else run

    @contextmanager
    def run(self, cell: Cell, arms: tuple[str, ...]) -> Iterator[RunProgress]:
        """Count a run from its beginning to its end."""
        self._tell_sweep()
        label = "" if self._job is None else self._job.label
        try:
            with RunProgress(cell, arms, label, self).going() as counted:
                yield counted
        finally:
            self._done += 1
            if self._done == self._runs:
                self._tell_sweep()

    @contextmanager
    def making_samples(self, cell: Cell) -> Iterator[None]:
        """Show that the samples of a cell are made ahead of its run."""
        state = RunState(cell, cell.arms)
        with self.display(state) as display:
            display.run_starts(state)
        try:
            yield
        finally:
            with self.display(state, is_over=True) as display:
                display.samples_made(state)

    def _tell_sweep(self) -> None:
        """Tell how many jobs of the sweep are done; without one, how many of several runs."""
        with self.display() as display:
            if self._job is None and self._runs > 1:
                display.sweep(self._done, self._runs, "cell")
            elif self._job is not None and self._job.is_alone:
                done = self._job.number + (self._done == self._runs)
                display.sweep(done, self._job.total, "job")

    def message(self, line: str) -> None:
        """Show a line that somebody else wrote to standard error."""
        with self.display() as display:
            display.message(line)

    def tick(self, is_over: threading.Event) -> None:
        """Let the display tick until it is over."""
        while not is_over.wait(TICK_SECONDS):
            with self.display() as display:
                if self._run is not None:
                    display.tick(self._run)


@contextmanager
def shown(cell: Cell, runs: int = 1, job: Job | None = None) -> Iterator[Progress]:
    """Show the runs of one command on standard error.

    Args:
        cell: the first of them.
        runs: how many there are.
        job: which job of a sweep the command is.
    """
    mode = cell.progress
    if mode == "auto" and cell.fresh.engine == "inprocess":
        mode = "lines"  # a bar would be drawn over the prompt of a debugger
    display = display_for(mode, sys.stderr, is_alone=job is None or job.is_alone)
    progress = Progress(display, runs, job)
    is_over = threading.Event()
    ticker = threading.Thread(target=progress.tick, args=[is_over], daemon=True)
    with ExitStack() as stack:
        if display.takes_stderr:
            stack.enter_context(lines_to(progress.message))
        ticker.start()
        try:
            yield progress
        finally:
            is_over.set()
            ticker.join()
            display.close()


def display_for(mode: str, stream: TextIO, is_alone: bool = True) -> Display:
    """Return the display that `progress=mode` names.

    Args:
        mode: auto, bar, lines, json or none.
        stream: standard error.
        is_alone: whether nobody else writes to the same terminal; bars would collide.
    """
    if mode == "auto":
        can_draw = stream.isatty() and os.environ.get("TERM") != "dumb"
        mode = "bar" if can_draw else "lines"
    if mode == "bar" and not is_alone:
        mode = "lines"
    if mode == "bar":
        from ruler_bench.progress.bar import Bars  # noqa: PLC0415 (only the one that is used)

        return Bars(stream)
    if mode == "json":
        from ruler_bench.progress.events import Events  # noqa: PLC0415

        return Events(stream)
    if mode == "lines":
        from ruler_bench.progress.lines import Lines  # noqa: PLC0415

        return Lines(stream)
    return Display(stream)
