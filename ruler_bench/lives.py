"""Lives of engines: in this process, or each in a process of its own.

A process of its own is forked from a server that has imported torch and the project's engines and
has built nothing, so that it starts within milliseconds; `spawn` imports everything anew. The
server runs one thread and does not touch a GPU, so that forking it is safe; a backend of the
user's is imported after the fork, since its module may do anything.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Protocol

from backends.base import (
    Backend,
    ConfigurationError,
    EngineDied,
    Generation,
    Request,
    RequestError,
)
from ruler_bench.answer import checked_generation
from ruler_bench.errors import UsageError, one_line
from ruler_bench.host import described, start_backend
from ruler_bench.overlap import concurrency_of, in_flight

LEAST_PRELOADED = ("ruler_bench.lives",)
MODELS_PRELOADED = (
    "torch",
    "backends.engine",
    # What our engine reads a model's configuration with; each takes long, and none is found by
    # importing transformers alone.
    "transformers.models.auto.modeling_auto",
    *(f"transformers.models.{one}.configuration_{one}" for one in ("llama", "mistral")),
    *(f"transformers.models.{one}.configuration_{one}" for one in ("qwen2", "qwen3")),
)
"""What the fork server imports; nothing here starts a thread or touches a GPU when imported."""
WITHOUT_MODEL = ("backends.oracle", "backends.openai_server")
CLOSE_SECONDS = 60
SHOWN_LINES = 20
ENDED_TOGETHER_SECONDS = 0.5
INTERRUPT_SECONDS = 5
"""How long an engine may take to close when the run is interrupted."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong in an engine.

    Attributes:
        message: one line.
        traceback: text of the traceback; "" where the engine named the error itself.
        is_over: whether the engine is gone with it: its process died, or hung and was ended.
    """

    message: str
    traceback: str = ""
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of one request.

    Attributes:
        answer: the engine's, checked, or what went wrong.
        seconds: of the whole call.
    """

    answer: Generation | Failure
    seconds: float | None = None


Several = Generator[tuple[int, Reply], None, None]
"""Place and reply of each of several requests, as they come."""


class StartFailed(RuntimeError):  # noqa: N818 (what happened)
    """An engine could not be built for another reason than a setting."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Life(Protocol):
    """One engine, from its start to its end."""

    settings: dict[str, Any]
    """As its `describe()` says."""
    can_cancel: bool
    """Whether it has a method `cancel(request_id)`."""
    concurrency: int
    """How many requests it may be asked at a time."""
    earlier_requests: int | None
    """How many it was asked in runs before this one, where it is kept; None for one run's own."""

    def ask(self, request: Request, cancel_after_seconds: float | None = None) -> Reply:
        """Ask one request, and cancel it after a while where that is asked for.

        Raises:
            ConfigurationError: a setting cannot be honoured; it would fail every request.
        """
        ...

    def ask_several(self, requests: Sequence[Request]) -> Several:
        """Ask requests, `concurrency` of them at a time; yield place and reply as they come.

        Raises:
            ConfigurationError: see `ask`.
        """
        ...

    def close(self) -> Failure | None:
        """End the engine; return what went wrong at it. A second call does nothing."""
        ...

    def end(self) -> None:
        """End a process at once, whatever it does; an engine in this process is left to close."""
        ...

    def interrupt(self) -> None:
        """Have the engine closed in the middle of a request, and end its process in seconds."""
        ...

    def printed(self) -> list[str]:
        """Return the lines that a process of its own printed since the last call."""
        ...


class LocalLife:
    """An engine in this process."""

    earlier_requests: int | None = None

    def __init__(self, settings: Mapping[str, Any], harness: Mapping[str, Any]) -> None:
        """Build the engine.

        Raises:
            ConfigurationError: a setting is wrong.
            StartFailed: the engine's own code failed.
        """
        self._backend: Backend | None = None
        try:
            self._backend = start_backend(dict(settings), dict(harness))
            self.settings = described(self._backend)
        except (ConfigurationError, KeyboardInterrupt):
            self.close()
            raise
        except BaseException as error:
            self.close()
            raise StartFailed(_failure(error)) from error
        self.can_cancel = callable(getattr(self._backend, "cancel", None))
        self.concurrency = concurrency_of(self._backend)

    def ask(self, request: Request, cancel_after_seconds: float | None = None) -> Reply:
        """Ask one request; see `Life`."""
        if self._backend is None:
            raise AssertionError("the engine is closed")
        return _ask(self._backend, request, cancel_after_seconds)

    def ask_several(self, requests: Sequence[Request]) -> Several:
        """Ask several requests at a time; see `Life`."""
        return in_flight(self.ask, requests, self.concurrency)

    def close(self) -> Failure | None:
        """End the engine; see `Life`."""
        backend, self._backend = self._backend, None
        return None if backend is None else _close(backend)

    def end(self) -> None:
        """Do nothing; see `Life`."""

    def interrupt(self) -> None:
        """Do nothing; see `Life`."""

    def printed(self) -> list[str]:
        """Return nothing: this process has printed it; see `Life`."""
        return []


def _failure(error: BaseException) -> Failure:
    text = "" if isinstance(error, RequestError) else _formatted(error)
    is_over = isinstance(error, EngineDied)
    return Failure(f"{type(error).__name__}: {one_line(error)}", text, is_over)


def _formatted(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception:  # a __str__ of somebody's
        return type(error).__name__


def _ask(backend: Backend, request: Request, cancel_after_seconds: float | None) -> Reply:
    timer = None
    if cancel_after_seconds is not None:
        cancel = getattr(backend, "cancel")  # noqa: B009 (no part of the protocol)
        timer = threading.Timer(cancel_after_seconds, cancel, [request.request_id])
        timer.start()
    started = time.perf_counter()
    try:
        generation = checked_generation(backend.generate(request))
        return Reply(generation, time.perf_counter() - started)
    except (KeyboardInterrupt, ConfigurationError):
        # A setting that cannot be honoured fails every sample alike: it ends the run.
        raise
    except BaseException as error:
        # An engine under test may fail in any way, sys.exit() included; that is a finding, not
        # the harness's end.
        return Reply(_failure(error), time.perf_counter() - started)
    finally:
        if timer is not None:
            timer.cancel()
            timer.join()


def _close(backend: Backend) -> Failure | None:
    try:
        backend.close()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return _failure(error)
    return None


# --- processes ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Refused:
    """A ConfigurationError, on its way from a process to this one."""

    message: str
    is_usage: bool

    def error(self) -> ConfigurationError:
        return UsageError(self.message) if self.is_usage else ConfigurationError(self.message)


@dataclass(frozen=True, slots=True)
class _Ready:
    settings: dict[str, Any]
    can_cancel: bool
    concurrency: int


class ProcessLife:
    """An engine in a process of its own."""

    earlier_requests: int | None = None

    def __init__(
        self,
        settings: Mapping[str, Any],
        harness: Mapping[str, Any],
        start: str = "forkserver",
        timeout_seconds: float | None = None,
    ) -> None:
        """Start a process and build the engine in it.

        Args:
            settings: of the backend, `_target_` included.
            harness: see `ruler_bench.host.start_backend`.
            start: "forkserver" or "spawn".
            timeout_seconds: for the start, for each request and for the end; None waits for ever.

        Raises:
            ConfigurationError: a setting is wrong.
            StartFailed: the engine's own code failed, or its process died or hung.
        """
        self._timeout_seconds = timeout_seconds
        self._end_lock = threading.RLock()
        self._output = tempfile.NamedTemporaryFile(  # noqa: SIM115 (lives as long as the process)
            mode="r", prefix="ruler_bench_", suffix=".log", errors="replace"
        )
        self._half_line = ""
        context = _context(start, settings)
        self._connection, theirs = context.Pipe()
        self._process: BaseProcess | None = context.Process(
            target=_serve,
            args=(theirs, dict(settings), dict(harness), str(Path.cwd()), self._output.name),
            daemon=False,
        )
        try:
            with _STARTING, _without_main():
                self._process.start()
                _PROCESSES.add(self._process)
        except Exception as error:  # pickle raises several types
            self._process = None
            self.close()
            raise UsageError(
                "the backend's settings cannot be handed to a new process "
                f"({type(error).__name__}: {one_line(error)}); give plain values, or use "
                "fresh=inprocess."
            ) from error
        finally:
            theirs.close()
        try:
            found = self._receive("its start")
        except BaseException:
            self.end()
            raise
        if isinstance(found, _Refused):
            self.end()
            raise found.error()
        if isinstance(found, Failure):
            self.end()
            raise StartFailed(found)
        self.settings: dict[str, Any] = found.settings
        self.can_cancel: bool = found.can_cancel
        self.concurrency: int = found.concurrency

    def _receive(self, what: str) -> Any:
        """Return the process's next message, or a Failure where it died or took too long."""
        process = self._process
        if process is None:
            return Failure("EngineDied: the engine's process is over", is_over=True)
        try:
            if self._connection.poll(self._timeout_seconds):
                return self._connection.recv()
        except (EOFError, OSError):
            self._join(process, CLOSE_SECONDS)
            if process.exitcode == -signal.SIGKILL:
                # Who ends a whole tree of processes, as joblib does on Ctrl-C, ends this one in a
                # moment, too. Then it is no error of the request.
                time.sleep(ENDED_TOGETHER_SECONDS)
            self.end()
            return Failure(
                f"EngineDied: the engine's process ended during {what} ({_ending(process)})",
                self._last_printed(),
                is_over=True,
            )
        self.end()
        return Failure(
            f"EngineHung: {what} took more than timeout_seconds={self._timeout_seconds:g}; the "
            "engine's process was ended",
            self._last_printed(),
            is_over=True,
        )

    def _join(self, process: BaseProcess, seconds: float | None) -> None:
        """Wait for the end of the process, one thread at a time: only one is told its status."""
        if self._end_lock.acquire(timeout=-1 if seconds is None else seconds):
            try:
                process.join(seconds)
            finally:
                self._end_lock.release()

    def _last_printed(self) -> str:
        """Return the last lines that the process printed, for errors.log."""
        lines: list[str] = []
        with contextlib.suppress(OSError):
            lines = Path(self._output.name).read_text(errors="replace").splitlines()
        return "\n".join(["What the process printed last:", *lines[-SHOWN_LINES:]])

    def printed(self) -> list[str]:
        """Return the lines that the engine's process printed since the last call; see `Life`."""
        with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
            *lines, self._half_line = (self._half_line + self._output.read()).split("\n")
            return lines
        return []

    def ask(self, request: Request, cancel_after_seconds: float | None = None) -> Reply:
        """Ask one request; see `Life`."""
        with contextlib.suppress(OSError):  # it died since the last answer: receiving says how
            self._connection.send((request, cancel_after_seconds))
        found = self._receive("this request")
        if isinstance(found, _Refused):
            raise found.error()
        return Reply(found) if isinstance(found, Failure) else found

    def ask_several(self, requests: Sequence[Request]) -> Several:
        """Ask several requests at a time; see `Life`. Whoever stops early ends the process."""
        left = set(range(len(requests)))
        with contextlib.suppress(OSError):  # it died: receiving says how
            self._connection.send(list(requests))
        try:
            while left:
                found = self._receive("these requests")
                if isinstance(found, _Refused):
                    raise found.error()
                place, reply = (min(left), Reply(found)) if isinstance(found, Failure) else found
                left.discard(place)
                yield place, reply
                if self._process is None:
                    return
        finally:
            if left:
                self.end()

    def close(self) -> Failure | None:
        """End the engine and its process; see `Life`."""
        process = self._process
        if process is None:
            self._output.close()
            return None
        failure: Failure | None = None
        with contextlib.suppress(OSError, EOFError):
            self._connection.send(None)
            if self._connection.poll(self._timeout_seconds):
                failure = self._connection.recv()
            else:
                failure = Failure(
                    "EngineHung: close() took more than timeout_seconds="
                    f"{self._timeout_seconds:g}; the engine's process was ended"
                )
        # What an engine left to run at exit has the same time.
        self._join(process, self._timeout_seconds if failure is None else 1)
        self.end()
        return failure

    def interrupt(self) -> None:
        """Have the engine closed, whatever it does, and end its process; see `Life`."""
        process = self._process
        try:
            if process is not None:
                process.terminate()
                self._join(process, INTERRUPT_SECONDS)
        finally:
            self.end()

    def end(self) -> None:
        """End the process at once, whatever it does; from any thread."""
        process = self._process
        if process is not None:
            process.kill()  # so that a thread that waits for its end lets go of the lock
        with self._end_lock:
            process, self._process = self._process, None
            if process is not None:
                process.join()
                _PROCESSES.discard(process)
            self._connection.close()


_STARTING = threading.Lock()
_PROCESSES: set[BaseProcess] = set()


def kill_processes() -> None:
    """End every engine's process at once, from any thread; those who wait for it find it dead."""
    for process in list(_PROCESSES):
        with contextlib.suppress(ValueError):  # closed meanwhile
            process.kill()


def _ending(process: BaseProcess) -> str:
    code = process.exitcode
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
    return f"exit status {code}"


def _context(start: str, settings: Mapping[str, Any]) -> ForkServerContext | SpawnContext:
    if start == "spawn":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preloaded(str(settings.get("_target_", ""))))
    return context


def preloaded(target: str) -> list[str]:
    """Return the modules that the fork server imports for a backend.

    The first engine of a program decides, since there is one server; what it has not imported
    costs each process time and nothing else.
    """
    module = target.rpartition(".")[0]
    if module in WITHOUT_MODEL:
        return [*LEAST_PRELOADED, module]
    own = [module] if module.startswith("backends.") else []
    return [*LEAST_PRELOADED, *MODELS_PRELOADED, *own]


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Keep multiprocessing from importing this program's main module anew in the process.

    Nothing there is needed, and a caller's script may lack the guard against being run twice.
    """
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    main.__spec__ = None
    if file is not None:
        del main.__file__
    try:
        yield
    finally:
        main.__spec__ = spec
        if file is not None:
            main.__file__ = file


def _serve(
    connection: Connection,
    settings: dict[str, Any],
    harness: dict[str, Any],
    folder: str,
    output: str,
) -> None:
    """Build an engine and answer requests until None comes. Runs in a process of its own."""
    os.chdir(folder)
    gc.freeze()  # what was imported before the fork need not be searched for garbage here
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the harness, which ends this
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _print_into(output)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        backend = start_backend(settings, harness)
        can_cancel = callable(getattr(backend, "cancel", None))
        ready = _Ready(described(backend), can_cancel, concurrency_of(backend))
    except BaseException as error:
        connection.send(_told(error))
        return
    connection.send(ready)
    try:
        signal.signal(signal.SIGTERM, _interrupted)
        _answer(connection, backend)
    except KeyboardInterrupt:
        _close(backend)


def _interrupted(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough; the harness kills what hangs
    raise KeyboardInterrupt


def _answer(connection: Connection, backend: Backend) -> None:
    """Answer requests until None comes.

    Raises:
        KeyboardInterrupt: the run was interrupted.
    """
    while True:
        message = connection.recv()
        if message is None:
            connection.send(_close(backend))
            return
        if isinstance(message, list):
            _answer_several(connection, backend, message)
            continue
        request, cancel_after_seconds = message
        try:
            reply: Any = _ask(backend, request, cancel_after_seconds)
        except ConfigurationError as error:
            reply = _told(error)
        connection.send(reply)


def _answer_several(connection: Connection, backend: Backend, requests: Sequence[Request]) -> None:
    """Send place and reply of each request as it is answered."""

    def ask(request: Request) -> Reply:
        return _ask(backend, request, None)

    try:
        for found in in_flight(ask, requests, concurrency_of(backend)):
            connection.send(found)
    except ConfigurationError as error:
        connection.send(_told(error))


def _told(error: BaseException) -> _Refused | Failure:
    if isinstance(error, ConfigurationError):
        return _Refused(str(error), isinstance(error, UsageError))
    return _failure(error)


def _print_into(path: str) -> None:
    """Let everything that this process prints go to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    with Path(path).open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def _end_with_parent() -> None:
    """End this process when the harness is gone, even in the middle of a request."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
