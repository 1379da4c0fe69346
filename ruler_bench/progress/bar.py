"""progress=bar: a bar for the run and, above it, one for the sweep, on a terminal."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, NoReturn, TextIO

from tqdm import tqdm

from ruler_bench.progress.display import Display
from ruler_bench.progress.lines import ending
from ruler_bench.progress.state import ANSWER, ENGINE, SAMPLES, WORDS, RunState, clock, pace
from ruler_bench.records import Record

LEAST_BAR = 8
"""Columns below which a bar is left out."""
SPOKEN_OF_AFTER_SECONDS = 3.0
"""From when on an answer or an engine that has not come is spoken of."""
LEAST_SECONDS = 0.1
"""Between two answers that are drawn."""
DEFAULT_COLUMNS = 80
STARTED = time.time()
"""When this process began: a sweep is one process, and its bar is made anew for each job."""

if TYPE_CHECKING:
    _Tqdm = tqdm[NoReturn]
else:
    _Tqdm = tqdm


class _Bar(_Tqdm):
    """A bar that is drawn when it is refreshed, and not before."""

    monitor_interval = 0

    def __init__(self, stream: TextIO, total: int | None, started: float) -> None:
        super().__init__(total=total, file=stream, leave=False, delay=1)
        self.delay = 0
        self.start_t = started


# The lock that tqdm makes is one for processes, and starts one.
_Bar.set_lock(threading.RLock())


class Bars(Display):
    """A bar of tqdm for the run: all arms, with the accuracy of the arm that runs.

    Lines of others are written above the bars. Between runs there is no bar on the screen, since
    others write to standard output then.
    """

    takes_stderr = True

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._run: _Bar | None = None
        self._sweep: _Bar | None = None
        self._place: tuple[int, int | None, str] | None = None
        self._drawn = 0.0

    def message(self, line: str) -> None:
        """Write a line above the bars."""
        with tqdm.external_write_mode(file=self.stream):
            self.write(f"{line}\n")

    def sweep(self, done: int, total: int | None, unit: str) -> None:
        """Note how much is done; it is shown while a run is."""
        self._place = done, total, unit

    def run_starts(self, run: RunState) -> None:
        """Show the bars, the run's without a length yet."""
        if self._place is not None:
            done, total, unit = self._place
            self._sweep = _Bar(self.stream, total, STARTED)
            self._sweep.n, self._sweep.desc, self._sweep.unit = done, "sweep: ", f"{unit}s"
        self._run = _Bar(self.stream, None, time.time())
        self._draw(run)

    def samples_made(self, run: RunState) -> None:
        """Take the bars away."""
        self.close()

    def run_counted(self, run: RunState) -> None:
        """Give the bar its length."""
        self._draw(run)

    def arm_starts(self, run: RunState) -> None:
        """Name the arm."""
        self._draw(run)

    def engine_started(self, run: RunState, seconds: float) -> None:
        """Speak no longer of the engine."""
        self._draw(run)

    def answered(self, run: RunState, record: Record) -> None:
        """Move the bar, where it was not moved just now or the arm is at its end."""
        is_last = run.tally.done == run.tally.total
        if is_last or time.monotonic() - self._drawn >= LEAST_SECONDS:
            self._draw(run)

    def tick(self, run: RunState) -> None:
        """Show the time."""
        self._draw(run)

    def run_ends(self, run: RunState, status: int | None, error: str | None) -> None:
        """Take the bars away and leave a line."""
        self.close()
        if run.asked:
            self.write(f"{ending(run)}\n")

    def close(self) -> None:
        """Take the bars away."""
        for one in (self._run, self._sweep):
            if one is not None:
                one.close()
        self._run = self._sweep = None

    def _draw(self, run: RunState) -> None:
        self._drawn = time.monotonic()
        columns = self._columns()
        if self._sweep is not None:
            self._sweep.bar_format = (
                "{l_bar}{bar}| {n_fmt}/{total_fmt} {unit} [{elapsed}<{remaining}]"
            )
            self._sweep.ncols = columns
            self._sweep.refresh()
        if self._run is not None:
            self._run.n, self._run.total = run.done, run.total or None
            self._run.bar_format, self._run.ncols = layout(run, columns), columns
            self._run.refresh()

    def _columns(self) -> int:
        try:
            found = os.get_terminal_size(self.stream.fileno()).columns
        except (OSError, ValueError):
            found = 0
        return (found or DEFAULT_COLUMNS) - 1  # the last column would wrap on some terminals


def layout(run: RunState, columns: int) -> str:
    """Return the `bar_format` of a run that fits into so many columns.

    What goes first is task and length, then the bar, then pace and arm.
    """
    if run.waits_for == SAMPLES:
        text = f"{WORDS[SAMPLES]} {clock(run.waited_seconds)}"
        named = f"{run.title}: {text}"
        return _escaped(named if len(named) <= columns else text)
    tally, left = run.tally, clock(run.left_seconds)
    counted = f"{run.done}/{run.total}"
    words = [tally.accuracy] if tally.done else []
    if run.per_second is not None:
        words.append(pace(run.per_second))
    if _is_spoken_of(run):
        words.insert(0, f"{WORDS[run.waits_for]} {clock(run.waited_seconds)}")
    tail = f"{counted} [{', '.join([f'{clock(run.seconds)}<{left}', *words])}]"
    short = run.arm if run.arm is not None and len(run.cell.arms) > 1 else run.cell.task.name
    percentage = 100 * run.done // max(1, run.total)
    for name in (run.title, short):
        head = f"{name}: {percentage:3}%|"
        if len(head) + LEAST_BAR + len("| ") + len(tail) <= columns:
            return f"{_escaped(head)}{{bar}}| {_escaped(tail)}"
    texts = (f"{short}: {tail}", f"{short}: {counted} <{left}, {tally.accuracy}")
    fitting = [one for one in texts if len(one) <= columns]
    return _escaped(fitting[0] if fitting else f"{counted} <{left}")


def _is_spoken_of(run: RunState) -> bool:
    if run.waits_for == ENGINE and not run.tally.asked:
        return True
    is_soon = run.waits_for in (ENGINE, ANSWER)
    return not is_soon or run.waited_seconds >= SPOKEN_OF_AFTER_SECONDS


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")
