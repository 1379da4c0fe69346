"""Checks of what shows without a request: methods, parameters, `describe()`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from backends.base import HARNESS_ARGUMENTS, Backend
from ruler_bench.errors import UsageError, one_line
from ruler_bench.host import METHODS, described, holds_tensors, parameter_hints
from ruler_bench.testing.report import Result

AUTO = "auto"


def check_methods(result: Result, engine: object) -> None:
    """Check that all methods are there."""
    for name in METHODS:
        has = callable(getattr(engine, name, None))
        result.expect(has, f"there is no method {name}")


def check_describe(
    result: Result,
    factory: Callable[[], Backend],
    engine: Backend,
    asked: Mapping[str, Any] | None,
) -> None:
    """Check that `describe()` is plain JSON, the same each time, and tells every setting."""
    parameters = _parameters(factory, engine)
    for one in parameters.values():
        result.expect(
            one.kind is not inspect.Parameter.VAR_KEYWORD,
            f"the constructor takes **{one.name}, so that a typing error would go unseen; name its "
            "parameters",
        )
        result.expect(
            one.kind is not inspect.Parameter.POSITIONAL_ONLY,
            f"the constructor's {one.name} is positional-only; settings are given by name",
        )
    try:
        found = described(engine)
    except UsageError as error:
        result.expect(False, one_line(error))
        return
    result.expect(described(engine) == found, "describe() says something else when called again")
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    settings = [name for name, one in parameters.items() if one.kind not in variadic]
    for name in dict.fromkeys([*settings, *(asked or {})]):
        if name not in HARNESS_ARGUMENTS and not name.startswith("_"):
            result.expect(name in found, f"describe() does not tell the setting {name}")
    for name, value in (asked or {}).items():
        if name in found:
            result.expect(
                _agrees(value, found[name]),
                f"describe() says {name}={found[name]!r} where {value!r} was asked for",
            )


def _agrees(asked: Any, found: Any) -> bool:
    """Tell whether a setting is in force; null, "auto" or a word for a number is the engine's."""
    if isinstance(asked, dict) and isinstance(found, dict):
        return all(key in found and _agrees(one, found[key]) for key, one in asked.items())
    is_word = isinstance(asked, str) and not isinstance(found, str)
    plain = list(asked) if isinstance(asked, tuple) else asked
    return asked is None or asked == AUTO or is_word or plain == found


def _parameters(factory: Callable[[], Backend], engine: Backend) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of what builds engines, tensors left out: those cannot be settings.

    Those of the engine's class where a function without parameters builds it.
    """
    inner: Callable[..., Any] = factory
    while isinstance(inner, functools.partial):
        inner = inner.func
    found = _signature(inner)
    if not found:
        inner = type(engine)
        found = _signature(inner)
    hints = parameter_hints(inner)
    return {name: one for name, one in found.items() if not holds_tensors(hints.get(name))}


def _signature(callable_: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(callable_).parameters
    except (TypeError, ValueError):
        return {}
