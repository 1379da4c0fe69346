"""Gathering: requests that several threads ask at a time, answered together, so many in one go."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from backends.base import Generation, Request

Answers = Sequence[Generation | Exception]
WAIT_SECONDS = 0.05
"""How long the first request waits for others: threads that ask at a time do so within this."""


@dataclass(eq=False)
class _Waiting:
    request: Request
    since_seconds: float = field(default_factory=time.monotonic)
    found: Generation | Exception | None = None


class Gathering:
    """Collects up to `size` requests and answers them in one call.

    One of the threads that ask makes the call, the others wait for it; what comes meanwhile is the
    next batch. A batch holds requests that may be answered together, in the order in which they
    came, and less than `size` of them where no more came within WAIT_SECONDS.
    """

    def __init__(
        self,
        size: int,
        answer: Callable[[Sequence[Request]], Answers],
        may_share: Callable[[Request, Request], bool],
    ) -> None:
        """Prepare to gather.

        Args:
            size: the most requests in one call.
            answer: answers a batch: one Generation, or the error that the request raises, each.
            may_share: whether a request may be in one batch with its first.
        """
        self._size, self._answer, self._may_share = size, answer, may_share
        self._changed = threading.Condition()
        self._waiting: list[_Waiting] = []
        self._is_answering = False

    def ask(self, request: Request) -> Generation:
        """Answer one request, together with others that are asked at the time.

        Raises:
            Exception: what the request's place in the answers holds, or what `answer` raised.
        """
        mine = _Waiting(request)
        with self._changed:
            self._waiting.append(mine)
            self._changed.notify_all()
        while mine.found is None:
            batch = self._next_batch(mine)
            if batch:
                self._answer_batch(batch)
        if isinstance(mine.found, Exception):
            raise mine.found
        return mine.found

    def _next_batch(self, mine: _Waiting) -> list[_Waiting]:
        """Wait until `mine` is answered, or a batch is to be answered by this thread."""
        with self._changed:
            while mine.found is None:
                left_seconds = self._seconds_to_wait()
                if left_seconds is not None and left_seconds <= 0:
                    self._is_answering = True
                    return self._take()
                self._changed.wait(left_seconds)
        return []

    def _seconds_to_wait(self) -> float | None:
        """Return how long the next batch waits for more; None while another is answered."""
        if self._is_answering or not self._waiting:
            return None
        if len(self._waiting) >= self._size:
            return 0.0
        return self._waiting[0].since_seconds + WAIT_SECONDS - time.monotonic()

    def _take(self) -> list[_Waiting]:
        first = self._waiting[0].request
        fitting = [one for one in self._waiting if self._may_share(one.request, first)]
        batch = fitting[: self._size]
        self._waiting = [one for one in self._waiting if one not in batch]
        return batch

    def _answer_batch(self, batch: list[_Waiting]) -> None:
        found: Answers
        try:
            found = self._answer([one.request for one in batch])
        except Exception as error:
            found = [error] * len(batch)
        except BaseException:
            self._finish(batch, [RuntimeError("the batch was interrupted")] * len(batch))
            raise
        self._finish(batch, found)

    def _finish(self, batch: list[_Waiting], found: Answers) -> None:
        with self._changed:
            for one, answer in zip(batch, found, strict=True):
                one.found = answer
            self._is_answering = False
            self._changed.notify_all()
