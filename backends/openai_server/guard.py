"""Runs a server beside a backend, and ends all its processes when the backend is gone.

A program of its own that needs the standard library alone: `guard.py LOG VARIABLE COMMAND...`. It
lives in a session of its own, so that neither Ctrl-C nor the end of the backend's process takes it
along, and reads its standard input, which is open as long as the backend lives: even after
`kill -9` of that process the server is ended. What the server prints goes to LOG with the value of
the environment variable VARIABLE masked. The exit status is the server's.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import IO

MAX_LINE_BYTES = 1 << 20
STOP_SECONDS = 10.0
POLL_SECONDS = 0.05
PR_SET_CHILD_SUBREAPER = 36
LEAST_SECRET_CHARACTERS = 8
"""As in secret.py, which cannot be imported here."""


def main(log_path: str, variable: str, command: list[str]) -> int:
    """Run a command until it ends or standard input does."""
    stop = threading.Event()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    # A process that leaves the server's group becomes a child of this one when its parent ends.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with open(log_path, "ab", buffering=0) as log:  # noqa: PTH123 (starts faster)
        log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {command[0]}\n".encode())
        try:
            server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            log.write(f"{command[0]}: {error.strerror}\n".encode())
            return 127
        secret = os.environ.get(variable, "").strip().encode()
        writer = threading.Thread(target=_keep, args=(server.stdout, log, secret), daemon=True)
        writer.start()
        while server.poll() is None and not stop.is_set():
            if select.select([0], [], [], POLL_SECONDS)[0] and not os.read(0, 1):
                break
        _end(server)
        writer.join(1.0)
        status = server.returncode
        log.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} ended ({status})\n".encode())
    return status if status >= 0 else 128 - status


def _keep(output: IO[bytes], log: IO[bytes], secret: bytes) -> None:
    """Copy what a server prints, line by line, without the key."""
    is_secret = len(secret) >= LEAST_SECRET_CHARACTERS
    while line := output.readline(MAX_LINE_BYTES):
        log.write(line.replace(secret, b"(key)") if is_secret else line)


def _end(server: subprocess.Popen[bytes]) -> None:
    """End the server's group and what became of its children; kill what does not end in time."""
    for number, patience_seconds in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, 5.0)):
        _signal_group(server.pid, number)
        for one in _descendants():
            _signal(one, number)
        deadline = time.monotonic() + patience_seconds
        while time.monotonic() < deadline:
            server.poll()
            _reap(server.pid)
            if server.returncode is not None and not _descendants():
                return
            time.sleep(POLL_SECONDS)
    server.wait()


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def _reap(server: int) -> None:
    """Take leave of adopted processes that have ended; the server's status is `Popen`'s to read."""
    for pid in _children().get(os.getpid(), []):
        if pid != server and _state(pid) == "Z":
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue


def _descendants() -> list[int]:
    """Return the living processes below this one."""
    children = _children()
    found, left = [], list(children.get(os.getpid(), []))
    while left:
        pid = left.pop()
        left += children.get(pid, [])
        if _state(pid) not in ("Z", "X", ""):
            found.append(pid)
    return found


def _children() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 (starts faster)
        if name.isdigit():
            fields = _stat(int(name))
            if fields:
                found.setdefault(int(fields[1]), []).append(int(name))
    return found


def _state(pid: int) -> str:
    fields = _stat(pid)
    return fields[0] if fields else ""


def _stat(pid: int) -> list[str]:
    """Return state, parent and what follows in /proc/PID/stat; [] where the process is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
