"""Output that nobody reads to its end (`| head`): a run goes on, and its status is its own."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from typing import TextIO


class _Forgiving(io.TextIOBase):
    """Passes text on for as long as somebody reads it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._send_to_nobody()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._send_to_nobody()

    def _send_to_nobody(self) -> None:
        """Let what is still held, and what others write to the descriptor, go nowhere."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, self._stream.fileno())
        finally:
            os.close(nowhere)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self._stream.errors

    @property
    def buffer(self) -> object:
        return self._stream.buffer


@contextlib.contextmanager
def unread_output() -> Iterator[None]:
    """Go on where standard output or standard error is closed by whoever should read it."""
    before = sys.stdout, sys.stderr
    ours = tuple(None if one is None else _Forgiving(one) for one in before)
    sys.stdout, sys.stderr = ours
    try:
        yield
    finally:
        for one in ours:
            if one is not None:
                one.flush()
        if sys.stdout is ours[0]:
            sys.stdout = before[0]
        if sys.stderr is ours[1]:
            sys.stderr = before[1]
