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
    """Return an error's message on one line."""
    return " ".join(str(error).split()) or type(error).__name__
