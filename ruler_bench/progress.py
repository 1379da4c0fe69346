"""Progress of a run: a bar with running accuracy on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import NoReturn, Self

from tqdm import tqdm

from ruler_bench.records import Record

LINES_WITHOUT_TERMINAL = 10


class Progress:
    """Shows how many of a stream's samples are done and how many were right.

    Errors are counted apart: a sample that failed in the engine is neither right nor wrong. Nor is
    a request without a score, which belongs to an arm's procedure.
    """

    def __init__(self, title: str, total: int, done: list[Record]) -> None:
        self._title = title
        self._total = total
        self._count = len(done)
        self._correct = sum(bool(record.correct) for record in done)
        self._errors = sum(record.error is not None for record in done)
        self._scored = sum(record.score is not None for record in done)
        self._bar: tqdm[NoReturn] | None = None
        if sys.stderr.isatty():
            bar = tqdm(total=total, initial=self._count, desc=title, unit="sample")
            bar.set_postfix_str(self._accuracy())
            self._bar = bar

    def add(self, record: Record) -> None:
        """Count one finished sample and show it."""
        self._count += 1
        self._correct += bool(record.correct)
        self._errors += record.error is not None
        self._scored += record.score is not None
        if self._bar is not None:
            self._bar.update()
            self._bar.set_postfix_str(self._accuracy())
        elif self._due():
            text = f"{self._title}: {self._count}/{self._total} samples, {self._accuracy()}"
            print(text, file=sys.stderr, flush=True)

    def _due(self) -> bool:
        every = max(1, self._total // LINES_WITHOUT_TERMINAL)
        return self._count % every == 0 or self._count == self._total

    def _accuracy(self) -> str:
        errors = f", {self._errors} errors" if self._errors else ""
        return f"{self._correct}/{self._scored} right{errors}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
