"""`check_backend`: builds engines, asks them, and holds what comes against backends/base.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from backends.base import Backend
from ruler_bench.errors import one_line
from ruler_bench.testing.after import check_determinism, check_leakage, check_order
from ruler_bench.testing.alone import (
    check_answers,
    check_errors,
    check_limits,
    check_release,
    check_stop,
)
from ruler_bench.testing.bench import Bench, Unanswered
from ruler_bench.testing.prompts import make_prompts
from ruler_bench.testing.report import BackendContractError, Report, Result
from ruler_bench.testing.settings import check_describe, check_methods

DEFAULT_MODEL = "package:probe"
DEFAULT_LENGTH = 512
RELEASE_SECONDS = 20.0
Check = Callable[[Result, Bench, Backend], None]
ONE_REQUEST: Mapping[str, Check] = {
    "limits": check_limits,
    "stop": check_stop,
    "errors": check_errors,
    "determinism": check_determinism,
}
"""Checks of one engine, in order."""
ONE_AFTER_ANOTHER: Mapping[str, Check] = {"leakage": check_leakage, "order": check_order}
"""Checks of another one, which has served nothing before."""


def check_backend(
    factory: Callable[[], Backend],
    *,
    model: str = DEFAULT_MODEL,
    length: int = DEFAULT_LENGTH,
    asked: Mapping[str, Any] | None = None,
    equal_bits: bool = True,
    release_seconds: float = RELEASE_SECONDS,
) -> Report:
    """Check that an engine keeps the contract of backends/base.py; return what was checked.

    Six engines are built, all in this process and each closed before the next: what an engine
    leaves in its process is seen where it makes an answer another prompt's, and otherwise left to
    the leak lab, whose engines have processes of their own.

    Args:
        factory: builds one engine, for requests of `length` tokens at least; a class, a function,
            or a functools.partial of one, whose parameters `describe()` must then tell.
        model: folder, hub name or "package:probe": its tokenizer makes the prompts, and its
            configuration says at which tokens answers end.
        length: tokens of the longer prompts and their answers.
        asked: settings that the engine was built with, which `describe()` must echo.
        equal_bits: whether one prompt must have the same logits to the last bit each time, as far
            as answers tell logits. False for engines that promise equal tokens alone.
        release_seconds: how long `generate` may take to refuse a request after `close()`.

    Returns:
        One result a check.

    Raises:
        BackendContractError: an AssertionError, with one line a violation and the report.
        UsageError: the prompts cannot be made.
    """
    bench = Bench(factory, make_prompts(model, length), equal_bits)
    checks = _Checks()
    try:
        engine = bench.engine()
        checks.backend = type(engine).__qualname__
        if checks.run("methods", check_methods, engine):
            checks.run("describe", check_describe, factory, engine, asked)
            if checks.run("answers", check_answers, bench, engine):
                checks.run_on_one("one request", bench, ONE_REQUEST)
                checks.run_on_one("one after another", bench, ONE_AFTER_ANOTHER)
                checks.run("release", check_release, bench, release_seconds)
    finally:
        bench.close_all()
    report = Report(checks.backend, checks.results)
    if report.violations:
        raise BackendContractError(report)
    return report


class _Checks:
    """Runs one check after the other and keeps what came of each."""

    def __init__(self) -> None:
        self.backend = ""
        self.results: list[Result] = []

    def run_on_one(self, what: str, bench: Bench, several: Mapping[str, Check]) -> None:
        """Run several checks on one new engine, then close it."""
        try:
            engine = bench.engine()
            for name, check in several.items():
                self.run(name, check, bench, engine)
            bench.close(engine)
        except Unanswered as error:
            self.results.append(Result(what, [one_line(error)]))

    def run(self, name: str, check: Callable[..., None], *arguments: Any) -> bool:
        """Run one check; return whether all is as it must be."""
        result = Result(name)
        self.results.append(result)
        try:
            check(result, *arguments)
        except Unanswered as error:
            result.expect(False, one_line(error))
        return not result.violations
