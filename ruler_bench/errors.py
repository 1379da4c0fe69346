"""Errors for people: one line with what was wrong, what is allowed and the nearest valid name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from backends.base import ConfigurationError


class UsageError(ConfigurationError):
    """A command, key, value or file of the user's is wrong; ends with status 2."""


CUTOFF = 0.55
"""How alike a name must be to be suggested, 0 to 1."""


def nearest(name: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed name closest to `name`, or None when none is close.

    Of dotted names with the same beginning only the ends are compared: what all have in common
    makes nothing alike.
    """
    prefix, dot, end = name.rpartition(".")
    names = list(allowed)
    ends = [one.removeprefix(prefix + dot) for one in names if one.rpartition(".")[0] == prefix]
    if dot and ends:
        close = difflib.get_close_matches(end, ends, n=1, cutoff=CUTOFF)
        return prefix + dot + close[0] if close else None
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=CUTOFF)), None)


def unknown_name(
    what: str, name: str, allowed: Iterable[str], like: str | None = None
) -> UsageError:
    """Make the error for a name that is not one of `allowed`: names the nearest and all of them.

    Args:
        what: the name is of.
        name: as the user gave it.
        allowed: names.
        like: what is compared with these instead, where a habit has another word.
    """
    names = sorted(allowed)
    close = nearest(like or name, names)
    hint = f" Did you mean {close!r}?" if close else ""
    return UsageError(f"unknown {what} {name!r}.{hint} Allowed: {', '.join(names)}.")


def one_line(error: BaseException) -> str:
    """Return an error's message on one line, whatever its class makes of it."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # a __str__ of somebody's
        text = ""
    return text.encode("utf-8", "backslashreplace").decode() or type(error).__name__
