"""Serves jobs, each in a process of its own and several at a time, or one by one in this one."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from scripts.check.serving import Done, Emit, Failure, Job, Message, serve

ROOT = Path(__file__).resolve().parents[2]

Launch = Callable[[Sequence[Job], int, Emit], None]
"""Serves jobs, at most so many at a time; messages come in the caller's thread."""


def here(jobs: Sequence[Job], at_once: int, emit: Emit) -> None:
    """Serve jobs one by one in this process."""
    for job in jobs:
        serve(job, emit)


def in_processes(jobs: Sequence[Job], at_once: int, emit: Emit) -> None:
    """Serve each job in a process of its own; they end with this one, and on an exception."""
    waiting = list(jobs)
    messages: queue.Queue[Message | None] = queue.Queue()
    with _process_group() as processes:
        running = 0
        while waiting or running:
            while waiting and running < at_once:
                _start(waiting.pop(0), processes, messages)
                running += 1
            message = messages.get()
            if message is None:
                running -= 1
            else:
                emit(message)


@contextmanager
def _process_group() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def _start(
    job: Job,
    processes: list[subprocess.Popen[bytes]],
    messages: queue.Queue[Message | None],
) -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-m", "scripts.check.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path},
    )
    processes.append(process)
    threading.Thread(target=_converse, args=(job, process, messages), daemon=True).start()


def _converse(
    job: Job, process: subprocess.Popen[bytes], messages: queue.Queue[Message | None]
) -> None:
    """Hand over the job, pass on what comes back, and say what a dead process left undone."""
    undone = {stream.arm for stream in job.streams}
    with contextlib.suppress(BrokenPipeError), _pipe(process.stdin) as pipe:
        pickle.dump(job, pipe)
    with _pipe(process.stdout) as pipe, contextlib.suppress(EOFError, pickle.UnpicklingError):
        while True:
            message: Message = pickle.load(pipe)
            if isinstance(message, Done | Failure):
                undone.discard(message.arm)
            messages.put(message)
    status = process.wait()
    for arm in sorted(undone):
        messages.put(Failure(arm, f"its process ended early, with status {status}"))
    messages.put(None)


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:
        raise AssertionError("a process without its pipes")
    return pipe
