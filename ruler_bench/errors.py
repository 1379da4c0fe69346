"""Errors for people: one line with what was wrong, what is allowed and the nearest valid name."""

from __future__ import annotations

from collections.abc import Iterable

from rapidfuzz import process
from rapidfuzz.distance import DamerauLevenshtein

from backends.base import ConfigurationError


class UsageError(ConfigurationError):
    """A command, key, value or file of the user's is wrong; ends with status 2."""


def nearest(name: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed name closest to `name`, or None when none is close."""
    found = process.extractOne(
        name,
        sorted(allowed),
        scorer=DamerauLevenshtein.normalized_similarity,
        score_cutoff=0.5,
    )
    return None if found is None else str(found[0])


def unknown_name(what: str, name: str, allowed: Iterable[str]) -> UsageError:
    """Make the error for a name that is not one of `allowed`: names the nearest and all of them."""
    names = sorted(allowed)
    close = nearest(name, names)
    hint = f" Did you mean {close!r}?" if close else ""
    return UsageError(f"unknown {what} {name!r}.{hint} Allowed: {', '.join(names)}.")
