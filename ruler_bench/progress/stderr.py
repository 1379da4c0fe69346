"""Standard error while a display owns it: what others write comes to it line by line."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterator
from typing import TextIO


class _Lines(io.TextIOBase):
    """Takes the place of sys.stderr. Who kept it writes to the stream itself once that is over."""

    def __init__(self, stream: TextIO, take: Callable[[str], None]) -> None:
        self._stream = stream
        self._take: Callable[[str], None] | None = take
        self._half = ""

    def write(self, text: str) -> int:
        if self._take is None:
            return self._stream.write(text)
        *lines, self._half = (self._half + text).split("\n")
        for line in lines:
            self._take(line.rpartition("\r")[2])
        return len(text)

    def end(self) -> None:
        if self._take is not None and self._half:
            self._take(self._half)
        self._take, self._half = None, ""

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding


@contextlib.contextmanager
def lines_to(take: Callable[[str], None]) -> Iterator[None]:
    """Give each line that is written to sys.stderr to `take`, without its end."""
    before = sys.stderr
    lines = _Lines(before, take)
    sys.stderr = lines
    try:
        yield
    finally:
        if sys.stderr is lines:
            sys.stderr = before
        lines.end()
