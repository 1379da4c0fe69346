"""Where files that outlive a run are kept."""

from __future__ import annotations

import os
from pathlib import Path


def folder_of(name: str | None) -> Path | None:
    """Return the folder that a setting names, or None where it names none."""
    return None if name is None else Path(name).expanduser()


def cache_dir() -> Path:
    """Return where prepared data are kept: RULER_BENCH_CACHE, else the user's cache folder."""
    named = os.environ.get("RULER_BENCH_CACHE")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ruler_bench"


def sources_dir() -> Path:
    """Return where scripts/fetch_data.py puts the files that samples are made from."""
    return cache_dir() / "sources"
