"""One engine for several runs in a row that ask for the same settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from backends.base import Request
from ruler_bench.lives import Failure, Life, Reply, Several

BuildLife = Callable[[Mapping[str, Any], Mapping[str, Any]], Life]
"""Builds an engine from a backend's settings and the harness's arguments."""

NOT_THE_ENGINES = ("run_folder",)
"""What differs from run to run and decides nothing of an engine."""


class Kept:
    """Builds an engine for the first run that asks for its settings, and lends it to the others.

    An engine whose process is over is built anew.
    """

    def __init__(self, build: BuildLife) -> None:
        self._build = build
        self._key = ""
        self._lent: _Lent | None = None

    def __call__(self, settings: Mapping[str, Any], harness: Mapping[str, Any]) -> Life:
        """Return the engine of these settings.

        Raises:
            ConfigurationError: a setting is wrong.
            StartFailed: the engine's own code failed.
        """
        decisive = {key: one for key, one in harness.items() if key not in NOT_THE_ENGINES}
        key = json.dumps(decisive | dict(settings), sort_keys=True)
        if self._lent is None or self._lent.is_over or key != self._key:
            self.close()  # two models need not fit
            self._lent, self._key = _Lent(self._build(settings, harness)), key
        self._lent.begin_run()
        return self._lent

    def close(self) -> None:
        """End the engine."""
        lent, self._lent = self._lent, None
        if lent is not None:
            lent.really_close()


class _Lent:
    """An engine that outlives the runs that it is lent to.

    Requests get new numbers: those of two runs begin at 0 each, and an engine must never see one
    twice.
    """

    def __init__(self, life: Life) -> None:
        self._life = life
        self._served = 0
        self.is_over = False
        self.settings = life.settings
        self.can_cancel = life.can_cancel
        self.concurrency = life.concurrency
        self.earlier_requests: int | None = 0

    def begin_run(self) -> None:
        """Note how many requests runs before this one had asked."""
        self.earlier_requests = self._served

    def ask(self, request: Request, cancel_after_seconds: float | None = None) -> Reply:
        """Ask one request; see `Life`."""
        reply = self._life.ask(self._numbered(request), cancel_after_seconds)
        self._note(reply)
        return reply

    def ask_several(self, requests: Sequence[Request]) -> Several:
        """Ask several requests; see `Life`."""
        numbered = [self._numbered(one) for one in requests]
        with closing(self._life.ask_several(numbered)) as replies:
            for place, reply in replies:
                self._note(reply)
                yield place, reply

    def close(self) -> Failure | None:
        """Do nothing: the next run needs it. One that is over has no other run."""
        return self._life.close() if self.is_over else None

    def really_close(self) -> Failure | None:
        """End it."""
        return self._life.close()

    def end(self) -> None:
        """End its process at once; see `Life`."""
        self.is_over = True
        self._life.end()

    def interrupt(self) -> None:
        """Have it closed in the middle of a request; see `Life`."""
        self.is_over = True
        self._life.interrupt()

    def printed(self) -> list[str]:
        """Return what its process printed; see `Life`."""
        return self._life.printed()

    def _numbered(self, request: Request) -> Request:
        self._served += 1
        return replace(request, request_id=self._served - 1)

    def _note(self, reply: Reply) -> None:
        self.is_over |= isinstance(reply.answer, Failure) and reply.answer.is_over
