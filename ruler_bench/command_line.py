"""What the commands beside the runner have in common: how words are read, how they end."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

from backends.base import ConfigurationError
from ruler_bench.errors import UsageError, one_line
from ruler_bench.unread import unread_output

USAGE_ERROR, INTERRUPTED = 2, 130
GOES_ON = "Interrupted: the same command goes on."
"""What a command says on Ctrl-C that keeps what it has."""


class Parser(argparse.ArgumentParser):
    """Reads the words of `python -m ruler_bench.NAME` and says what is wrong in one line."""

    def __init__(self, name: str, description: str | None, usage: str) -> None:
        super().__init__(
            prog=f"python -m ruler_bench.{name}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self._words = usage

    def error(self, message: str) -> NoReturn:
        """Refuse the command line.

        Raises:
            UsageError: always; says how the command is used.
        """
        raise UsageError(f"{message}; usage: {self.prog} {self._words}")


def status_of(command: Callable[[], int], on_interrupt: str = "") -> int:
    """Run a command and return its exit status: its own, 2 for wrong usage, 130 for Ctrl-C.

    Args:
        command: returns its status.
        on_interrupt: what to say on Ctrl-C; "" for nothing.
    """
    with unread_output():
        try:
            return command()
        except ConfigurationError as error:
            print(f"error: {one_line(error)}", file=sys.stderr)
            return USAGE_ERROR
        except KeyboardInterrupt:
            if on_interrupt:
                print(on_interrupt, file=sys.stderr)
            return INTERRUPTED


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM end what runs as Ctrl-C does."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
