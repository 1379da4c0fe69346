"""Engines that misbehave in one way each, for tests of arms; they answer needle tasks."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from backends.base import ConfigurationError, Generation, RequestCancelled
from backends.oracle import answer_from_needles

SERVED = []


class Plain:
    """Answers right."""

    def __init__(self, *, delay_seconds: float = 0.0) -> None:
        self.delay_seconds = delay_seconds

    def generate(self, request):
        time.sleep(self.delay_seconds)
        return Generation(text=answer_from_needles(request.prompt), finish_reason="stop")

    def describe(self):
        return {"delay_seconds": self.delay_seconds, "max_model_len": 1024}

    def close(self):
        pass


class Leaky(Plain):
    """Answers what it was asked before, from its second request on."""

    def __init__(self) -> None:
        super().__init__()
        self.before = None

    def generate(self, request):
        answer = answer_from_needles(request.prompt)
        before, self.before = self.before, answer
        return Generation(text=before or answer, finish_reason="stop")


class LeakyModule(Plain):
    """The same, by state of its module, which outlives the engine in its process."""

    def generate(self, request):
        SERVED.append(answer_from_needles(request.prompt))
        return Generation(text=SERVED[max(0, len(SERVED) - 2)], finish_reason="stop")


class Fragile(Plain):
    """Hangs, dies or fails at one request, or at its start; a file remembers that it did."""

    def __init__(self, *, hang: int = -1, die: int = -1, fail: int = -1, start: str = "") -> None:
        super().__init__()
        self.hang, self.die, self.fail = hang, die, fail
        if start and os.path.exists(start):  # noqa: PTH110
            raise OSError(98, "Address already in use")

    def generate(self, request):
        if request.request_id == self.hang:
            time.sleep(600)
        if request.request_id == self.die:
            os.kill(os.getpid(), signal.SIGKILL)
        if request.request_id == self.fail:
            raise RuntimeError("nothing to say")
        return super().generate(request)


class Clinging(Plain):
    """Holds a port that close() does not free."""

    def __init__(self, *, port: int) -> None:
        super().__init__()
        self.socket = socket.create_server(("127.0.0.1", port))
        KEPT.append(self.socket)


KEPT = []


class Locking(Plain):
    """Holds a lock on a file, and so does a helper process that outlives close()."""

    def __init__(self, *, lock: str) -> None:
        super().__init__()
        self.file = Path(lock).open("w")  # noqa: SIM115
        fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        waits = [sys.executable, "-c", "import time; time.sleep(600)"]
        helper = subprocess.Popen(waits, pass_fds=[self.file.fileno()], start_new_session=True)
        with Path(lock + ".pids").open("a") as pids:
            pids.write(f"{helper.pid}\n")


class Cancellable(Plain):
    """Can be cancelled; says which requests were."""

    def __init__(self, *, deaf: bool = False) -> None:
        super().__init__(delay_seconds=0.0)
        self.cancelled = threading.Event()
        self.deaf = deaf
        self.asked = 0

    def generate(self, request):
        self.asked += 1
        # Only a request that will be cancelled waits long enough for it.
        if not self.deaf and request.request_id % 2 == 0 and self.cancelled.wait(20):
            self.cancelled.clear()
            raise RequestCancelled(f"request {request.request_id} was cancelled")
        return super().generate(request)

    def cancel(self, request_id):
        self.cancelled.set()


def unlike_a_class(*, phrase: str = "x"):
    """Build an engine without cancel, which only shows when it is built."""
    return Plain()


class Telling(Plain):
    """Puts out what it was asked: limit, stop tokens, tokens of the prompt."""

    def generate(self, request):
        told = f"{request.max_new_tokens} {len(request.stop_token_ids)}"
        ids = tuple(request.prompt_token_ids)[: request.max_new_tokens]
        return Generation(text=told, token_ids=ids, finish_reason="stop")


class Tired(Plain):
    """Fails at one request, unless it is the first that it is asked."""

    def __init__(self, *, at: int, note: str = "") -> None:
        super().__init__()
        self.at, self.note, self.served = at, note, 0

    def generate(self, request):
        self.served += 1
        is_mended = self.note and os.path.exists(self.note)  # noqa: PTH110
        if request.request_id == self.at and self.served > 1 and not is_mended:
            raise RuntimeError("tired")
        return super().generate(request)


class Slow(Plain):
    """Takes its time to answer, prints that it does, and leaves a file when it is closed."""

    def __init__(self, *, mark: str = "", seconds: float = 0.0, close_seconds: float = 0.0) -> None:
        super().__init__()
        self.mark, self.seconds, self.close_seconds = mark, seconds, close_seconds

    def generate(self, request):
        print(f"asked {request.request_id}", flush=True)
        time.sleep(self.seconds)
        return super().generate(request)

    def close(self):
        time.sleep(self.close_seconds)
        if self.mark:
            with open(self.mark, "w"):  # noqa: PTH123
                pass


class Exiting(Plain):
    """Ends its process at one request, without a word."""

    def __init__(self, *, at: int, status: int = 0) -> None:
        super().__init__()
        self.at, self.status = at, status

    def generate(self, request):
        if request.request_id == self.at:
            os._exit(self.status)
        return super().generate(request)


class Together(Plain):
    """Answers once so many requests are in it at a time."""

    def __init__(self, *, together: int, fail: int = -1, refuse: int = -1, die: int = -1) -> None:
        super().__init__()
        self.concurrency = together
        self.fail, self.refuse, self.die = fail, refuse, die
        self.barrier = threading.Barrier(together)

    def generate(self, request):
        if request.request_id == self.refuse:
            raise ConfigurationError("a setting cannot be honoured")
        if request.request_id == self.fail:
            raise RuntimeError("nothing to say")
        if request.request_id == self.die:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.refuse < 0 and self.fail < 0 and self.die < 0:
            self.barrier.wait(20)
        return Generation(text=f"{request.request_id} of {self.concurrency}")
