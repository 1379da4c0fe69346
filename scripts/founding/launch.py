"""Starts commands of `python -m ruler_bench`, and ends them with this process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).resolve().parents[2]
END_SECONDS = 30
"""For a command that is interrupted to write down where it stands."""
INTERRUPTED = 130


class Launch(Protocol):
    """Runs the harness."""

    def __call__(self, arguments: Sequence[str], log: Path) -> int:
        """Run it with these arguments and return its exit status; its output goes to a file."""
        ...

    def end(self) -> None:
        """End what runs, and start nothing more."""
        ...


class Processes:
    """Runs the harness in processes of their own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._is_over = False

    def __call__(self, arguments: Sequence[str], log: Path) -> int:
        """Run one command; see `Launch`."""
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with log.open("ab") as output:
            with self._lock:
                if self._is_over:
                    return INTERRUPTED
                process = subprocess.Popen(
                    [sys.executable, "-m", "ruler_bench", *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=os.environ | {"PYTHONPATH": path},
                    start_new_session=True,  # Ctrl-C reaches this process, which ends the others
                )
                self._running.add(process)
            try:
                return process.wait()
            finally:
                with self._lock:
                    self._running.discard(process)

    def end(self) -> None:
        """Interrupt every command, and kill those that do not end."""
        with self._lock:
            self._is_over = True
            running = list(self._running)
        for process in running:
            with contextlib.suppress(OSError):
                process.send_signal(signal.SIGTERM)
        for process in running:
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)
