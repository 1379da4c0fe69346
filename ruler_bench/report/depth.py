"""Score by depth: where in the context an engine finds what is asked for, and where it does not."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from tabulate import tabulate

from ruler_bench.records import Record
from ruler_bench.report.rows import Row, Run, finished
from ruler_bench.report.text import csv_cell, markdown_cell

BINS = 10
DEPTH = "depth.csv"

LEGEND = (
    "Mean score of the samples whose first needle asked for stands in that tenth of the context, "
    "and how many there are. Depth 0 is the start."
)


def by_depth(records: Iterable[Record]) -> list[list[float]]:
    """Return the scores of the samples in each tenth of the context; depth 1 is in the last."""
    bins: list[list[float]] = [[] for _ in range(BINS)]
    for record in records:
        if record.depth is not None and record.score is not None:
            bins[min(int(record.depth * BINS), BINS - 1)].append(record.score)
    return bins


def write_depth(path: Path, runs: Sequence[Run], rows: Sequence[Row]) -> None:
    """Write a line for each run and tenth of the context; remove the file where none has a depth.

    Raises:
        OSError: it cannot be written, or the disk is full.
    """
    lines = [
        (*_names(row), number / BINS, (number + 1) / BINS, len(scores), _mean(scores))
        for run, row in zip(runs, rows, strict=True)
        for number, scores in enumerate(_bins(run))
    ]
    if not lines:
        path.unlink(missing_ok=True)
        return
    titles = ("task", "length_tokens", "backend", "model", "arm", "settings")
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*titles, "depth_from", "depth_to", "samples", "score"])
        writer.writerows(map(csv_cell, line) for line in lines)


def markdown_depth(runs: Sequence[Run], rows: Sequence[Row]) -> str | None:
    """Return the section on depth for report.md; None where no task has one."""
    told = [(row, bins) for run, row in zip(runs, rows, strict=True) if (bins := _bins(run))]
    if not told:
        return None
    shown = ["task", "length", "backend", "model", "arm"]
    places = {"task": 0, "length": 1, "backend": 2, "model": 3, "arm": 4, "settings": 5}
    shown += ["settings"] * any(row.settings for row, _ in told)
    titles = [*shown, *(f"{10 * number}-{10 * number + 10}%" for number in range(BINS))]
    lines = [
        [markdown_cell(str(_names(row)[places[one]] or "-")) for one in shown]
        + [f"{_mean(scores)} ({len(scores)})" if scores else "-" for scores in bins]
        for row, bins in told
    ]
    table = tabulate(lines, headers=titles, tablefmt="github", disable_numparse=True)
    return "\n\n".join(["## Score by depth", table, LEGEND])


def _bins(run: Run) -> list[list[float]]:
    """Return the scores by tenth; nothing where no sample has a depth."""
    bins = by_depth(finished(run))
    return bins if any(bins) else []


def _mean(scores: Sequence[float]) -> float | None:
    return round(sum(scores) / len(scores), 2) if scores else None


def _names(row: Row) -> tuple[str | int, ...]:
    return (row.task, row.length_tokens, row.backend, row.model, row.arm or "", row.settings)
