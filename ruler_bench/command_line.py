"""What the commands beside the runner have in common: how words are read, how they end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from backends.base import ConfigurationError
from ruler_bench.errors import UsageError, one_line

USAGE_ERROR, INTERRUPTED = 2, 130


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


def status_of(command: Callable[[], int]) -> int:
    """Run a command and return its exit status: its own, 2 for wrong usage, 130 for Ctrl-C."""
    try:
        return command()
    except ConfigurationError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `| head`
        sys.stderr.close()
        return 0
