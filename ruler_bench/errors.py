"""Errors for people: one line with what was wrong, what is allowed and the nearest valid name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from backends.base import ConfigurationError


class UsageError(ConfigurationError):
    """A command, key, value or file of the user's is wrong; ends with status 2."""


def nearest(name: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed name closest to `name`, or None when none is close."""
    return next(iter(difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.5)), None)


def unknown_name(what: str, name: str, allowed: Iterable[str]) -> UsageError:
    """Make the error for a name that is not one of `allowed`: names the nearest and all of them."""
    names = sorted(allowed)
    close = nearest(name, names)
    hint = f" Did you mean {close!r}?" if close else ""
    return UsageError(f"unknown {what} {name!r}.{hint} Allowed: {', '.join(names)}.")


def one_line(error: BaseException) -> str:
    """Return an error's message on one line, whatever its class makes of it."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # a __str__ of somebody's
        text = ""
    return text.encode("utf-8", "backslashreplace").decode() or type(error).__name__
