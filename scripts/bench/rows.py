"""Rows of a benchmark: what is measured, how a failure is kept, and what its options share."""

from __future__ import annotations

import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from backends.base import ConfigurationError
from backends.engine.settings import resolve_device
from ruler_bench.errors import UsageError, one_line, unknown_name
from scripts.bench.journal import Journal, Row
from scripts.bench.shapes import Shape
from scripts.bench.timing import free_memory

DONE, FAILED, WRONG, INTERRUPTED = 0, 1, 2, 130
DTYPES = ("auto", "bfloat16", "float16", "float32")
SUSTAINED_SECONDS = {"cuda": 0.25, "cpu": 0.01}


@dataclass(frozen=True)
class Task:
    """One row to measure.

    Attributes:
        key: names the row in its folder.
        kind: what its figures are of; "prompt" for what continues a whole prompt.
        name: of the thing measured.
        length: prompt tokens; None where there is no prompt.
        settings: what was measured, as plain values.
        measure: returns the figures.
    """

    key: str
    kind: str
    name: str
    length: int | None
    settings: dict[str, Any]
    measure: Callable[[], dict[str, Any]]


def run(task: Task, journal: Journal, device: torch.device) -> bool:
    """Measure one row and write it; returns whether it could be measured."""
    row: Row = {
        "key": task.key,
        "kind": task.kind,
        "name": task.name,
        "length": task.length,
        "settings": task.settings,
        "error": None,
    }
    started = time.perf_counter()
    try:
        figures = task.measure()
        journal.add(row | {"figures": figures, "wall_seconds": time.perf_counter() - started})
    except Exception as error:  # whatever an engine raises, the other rows are worth having
        journal.add_error(f"{task.key}\n{traceback.format_exc()}")
        message = one_line(error).replace(f"{tempfile.gettempdir()}/", "")
        row = row | {"figures": {}, "error": f"{type(error).__name__}: {message}"}
        journal.add(row)
    # Only now, with no traceback left that holds on to a failed row's tensors.
    free_memory(device, collect=task.kind == "prompt")
    tell(f"{task.key}: {row['error'] or 'measured'} ({time.perf_counter() - started:.1f} s)")
    return row["error"] is None


def tell(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


# --- options ------------------------------------------------------------------------------------


def find_device(name: str) -> torch.device:
    """Return the device of that name.

    Raises:
        UsageError: there is none.
    """
    try:
        return resolve_device(name)
    except ConfigurationError as error:
        raise UsageError(f"--{error} On a CPU --shape tiny shows what the script does.") from error


def known_names(option: str, text: str, allowed: Sequence[str]) -> tuple[str, ...]:
    """Split a list of names; returns those of `allowed` that are in it, in the order of these.

    Raises:
        UsageError: one is unknown; names the nearest.
    """
    chosen = [name.strip() for name in text.split(",")]
    for name in chosen:
        if name not in allowed:
            raise unknown_name(option, name, allowed)
    return tuple(name for name in allowed if name in chosen)


def prompt_lengths(text: str | None, shape: Shape, new_tokens: int) -> list[int]:
    """Return the lengths of --lengths, ascending; those of the shape where there is none.

    Raises:
        UsageError: one is no whole number, or leaves no room in the shape.
    """
    longest = shape.max_tokens - new_tokens
    lengths = set()
    for word in text.split(",") if text is not None else map(str, shape.lengths):
        if not word.strip().isdecimal() or not 1 <= int(word) <= longest:
            raise UsageError(
                f"--lengths={word.strip()}: must be a whole number from 1 to {longest}, which "
                f"leaves room for {new_tokens} new tokens in the shape {shape.name}."
            )
        lengths.add(int(word))
    return sorted(lengths)


def require_least(option: str, value: float | None, least: float) -> None:
    """Refuse a number below the least that makes sense; None passes.

    Raises:
        UsageError: names the option.
    """
    if value is not None and not value >= least:
        raise UsageError(f"--{option.replace('_', '-')}={value}: must be at least {least}.")
