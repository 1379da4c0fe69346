"""A server of our own: started on a free port, waited for, ended with all its processes."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from backends.openai_server import guard
from backends.openai_server.answers import shown

LOGS = "servers"
POLL_SECONDS = 0.05
SHOWN_LINES = 3


class ServerFailed(RuntimeError):  # noqa: N818 (what happened)
    """A server ended, or was not ready in time, before it answered."""


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        port: int = one.getsockname()[1]
    return port


def new_log(run_folder: str | None) -> Path:
    """Return a new file for what a server prints: in the run's folder, else a temporary one."""
    if run_folder is None:
        with tempfile.NamedTemporaryFile(
            prefix="ruler_bench_server_", suffix=".log", delete=False
        ) as file:
            return Path(file.name)
    folder = Path(run_folder) / LOGS
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.iterdir()))
    while True:
        number += 1
        path = folder / f"{number:04}.log"
        with contextlib.suppress(FileExistsError):
            path.touch(exist_ok=False)
            return path


class Server:
    """A running server and the guard that ends it, whatever becomes of this process."""

    def __init__(self, command: Sequence[str], log: Path, key_variable: str | None) -> None:
        """Start it.

        Args:
            command: program and arguments.
            log: where its output goes.
            key_variable: environment variable whose value must not get there.
        """
        self.log = log
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, str(log), key_variable or "", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def ending(self, patience_seconds: float = 0.0) -> str | None:
        """Return how the server ended, or None while it runs.

        Args:
            patience_seconds: how long to wait for its end, where something broke off.
        """
        status = self._guard.poll()
        if status is None and patience_seconds:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self._guard.wait(patience_seconds)
        return None if status is None else f"ended with status {status}"

    def wait_until(self, is_ready: Callable[[], bool], startup_seconds: float) -> None:
        """Wait until it is ready.

        Raises:
            ServerFailed: it ended, or took too long; names its log and its last lines.
        """
        deadline = time.monotonic() + startup_seconds
        while not is_ready():
            ending = self.ending()
            if ending is not None:
                raise ServerFailed(
                    f"backend.serve.command: the server {ending} before it was ready; "
                    f"{self.last_words()}"
                )
            if time.monotonic() > deadline:
                raise ServerFailed(
                    f"the server was not ready within backend.serve.startup_seconds="
                    f"{startup_seconds:g}; {self.last_words()}"
                )
            time.sleep(POLL_SECONDS)

    def last_words(self) -> str:
        """Return where the log is, and its last lines."""
        lines = self.log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
        return f"{self.log} ends with: {shown(' | '.join(lines))}"

    def stop(self) -> None:
        """End the server and every process that it started. A second call does nothing."""
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(2 * guard.STOP_SECONDS)
            return
        self._guard.kill()
        self._guard.wait()
