"""One engine for all runs of a process that ask for the same settings."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from backends.base import HARNESS_ARGUMENTS, Request
from ruler_bench.lives import Failure, Life, LocalLife, Reply, Several

NOT_THE_ENGINES = ("run_folder",)
"""What differs from run to run and no engine here takes."""


class Kept:
    """Builds an engine for the first run that asks for its settings, and lends it to the others.

    Building one costs seconds (weights, compiled kernels, captured graphs), a short run as much
    again.
    """

    def __init__(self) -> None:
        self._lives: dict[str, _Lent] = {}

    def __call__(self, settings: Mapping[str, Any], harness: Mapping[str, Any]) -> Life:
        """Return the engine of these settings.

        Raises:
            ConfigurationError: a setting is wrong.
            StartFailed: the engine's own code failed.
        """
        decisive = {
            key: harness[key] for key in HARNESS_ARGUMENTS if key not in NOT_THE_ENGINES
        } | dict(settings)
        key = json.dumps(decisive, sort_keys=True)
        if key not in self._lives:
            self.close()  # two models need not fit
            self._lives[key] = _Lent(LocalLife(settings, harness))
        return self._lives[key]

    def close(self) -> None:
        """End the engines."""
        for life in self._lives.values():
            life.really_close()
        self._lives.clear()


class _Lent:
    """An engine that outlives the runs that it is lent to.

    Requests get new numbers: those of two runs begin at 0 each, and an engine must never see one
    twice.
    """

    def __init__(self, life: LocalLife) -> None:
        self._life = life
        self._numbers = itertools.count()
        self.settings = life.settings
        self.can_cancel = life.can_cancel
        self.concurrency = life.concurrency

    def ask(self, request: Request, cancel_after_seconds: float | None = None) -> Reply:
        """Ask one request; see `Life`."""
        return self._life.ask(self._numbered(request), cancel_after_seconds)

    def ask_several(self, requests: Sequence[Request]) -> Several:
        """Ask several requests; see `Life`."""
        return self._life.ask_several([self._numbered(one) for one in requests])

    def close(self) -> Failure | None:
        """Do nothing: the next run needs it."""
        return None

    def really_close(self) -> None:
        """End it."""
        self._life.close()

    def end(self) -> None:
        """Do nothing; see `Life`."""

    def interrupt(self) -> None:
        """Do nothing; see `Life`."""

    def printed(self) -> list[str]:
        """Return nothing; see `Life`."""
        return []

    def _numbered(self, request: Request) -> Request:
        return replace(request, request_id=next(self._numbers))
