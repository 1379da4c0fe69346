"""The table of runs: as CSV for programs, as Markdown, and for the terminal."""

from __future__ import annotations

import csv
import dataclasses
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tabulate import tabulate

from ruler_bench.report.rows import Row, Run, build_rows
from ruler_bench.report.text import (
    csv_cell,
    human_bytes,
    human_number,
    human_percent,
    human_seconds,
    markdown_cell,
    visible,
)


def _interval(row: Row) -> str:
    if row.score_low_95 is None or row.score_high_95 is None:
        return "-"
    return f"{row.score_low_95:.1f} to {row.score_high_95:.1f}"


SETTINGS = "settings"
REUSED = "reused per sample"
HIDDEN = "copies hidden"
DENSITY = "density"
DENSE = "went dense"
ESTIMATION = "estimation per sample"
ATTENTION = "prefill attention per sample"
NOT_ALWAYS = (SETTINGS, REUSED, HIDDEN, DENSITY, DENSE, ESTIMATION, ATTENTION)
"""Columns that stand there only where they say something."""

COLUMNS: dict[str, Callable[[Row], str]] = {
    "task": lambda row: row.task,
    "length": lambda row: str(row.length_tokens),
    "backend": lambda row: row.backend,
    "model": lambda row: row.model,
    "arm": lambda row: row.arm or "-",
    SETTINGS: lambda row: row.settings or "-",
    "engines": lambda row: str(row.engines),
    "samples": lambda row: str(row.samples),
    "correct": lambda row: str(row.correct),
    "score": lambda row: human_number(row.score, 2),
    "95% interval": _interval,
    "errors": lambda row: str(row.errors),
    "nulls": lambda row: str(row.nulls),
    "truncated": lambda row: str(row.truncated),
    "time per sample": lambda row: human_seconds(row.seconds_per_sample),
    "time to first token": lambda row: human_seconds(row.ttft_seconds),
    "decode tokens/s": lambda row: human_number(row.decode_tokens_per_second, 1),
    "up per sample": lambda row: human_bytes(row.bytes_up_per_sample),
    "down per sample": lambda row: human_bytes(row.bytes_down_per_sample),
    "peak device memory": lambda row: human_bytes(row.peak_device_bytes),
    REUSED: lambda row: human_number(row.reused_tokens_per_sample or None, 1),
    HIDDEN: lambda row: human_percent(row.copy_hidden_share),
    DENSITY: lambda row: human_percent(row.density),
    DENSE: lambda row: human_percent(row.dense_share),
    ESTIMATION: lambda row: human_seconds(row.estimation_seconds),
    ATTENTION: lambda row: human_seconds(row.attention_seconds),
}
"""What people read: title and text of each column, in order."""


def shown_columns(rows: Sequence[Row]) -> dict[str, Callable[[Row], str]]:
    """Return the columns to show: of NOT_ALWAYS only those that say something."""
    silent = {title for title in NOT_ALWAYS if all(COLUMNS[title](row) == "-" for row in rows)}
    return {title: show for title, show in COLUMNS.items() if title not in silent}


GAP = 2


def write_summary(path: Path, rows: Iterable[Row]) -> None:
    """Write one line a run with plain numbers; column names are the fields of Row.

    Names are written by `csv_cell`, so that a run is one line whatever they hold.
    """
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(field.name for field in dataclasses.fields(Row))
        for row in rows:
            writer.writerow(map(csv_cell, dataclasses.astuple(row)))


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of cells that are Markdown already (see `markdown_cell`)."""
    return tabulate(list(rows), headers=titles, tablefmt="github", disable_numparse=True)


def markdown_runs(rows: Sequence[Row]) -> str:
    """Return the table of runs in Markdown, one line a run."""
    columns = shown_columns(rows)
    return markdown_table(
        list(columns),
        [[markdown_cell(show(row)) for show in columns.values()] for row in rows],
    )


def terminal_table(runs: Sequence[Run], width: int | None = None) -> str:
    """Return the table of runs for a terminal.

    One line a run where that fits; otherwise one line a field, with as many runs side by side as
    fit.

    Args:
        runs: at least one, for a table with content.
        width: columns of the terminal; None asks the terminal, which says 80 where there is none.

    Raises:
        UsageError: a manifest's metric is unknown.
    """
    width = shutil.get_terminal_size().columns if width is None else width
    rows = build_rows(runs)
    columns = shown_columns(rows)
    titles = list(columns)
    cells = [[visible(show(row)) for show in columns.values()] for row in rows]
    table = tabulate(cells, headers=titles, tablefmt="simple", disable_numparse=True)
    if all(len(line) <= width for line in table.splitlines()):
        return table
    groups = _side_by_side(titles, cells, width)
    return "\n\n".join(_fields_as_lines(titles, group) for group in groups)


def _side_by_side(
    titles: Sequence[str], cells: Sequence[Sequence[str]], width: int
) -> Iterable[list[Sequence[str]]]:
    """Yield groups of runs that fit beside the titles; one run where not even that fits."""
    left = max(len(title) for title in titles)
    group: list[Sequence[str]] = []
    used = left
    for run in cells:
        wide = GAP + max(len(cell) for cell in run)
        if group and used + wide > width:
            yield group
            group, used = [], left
        group.append(run)
        used += wide
    if group:
        yield group


def _fields_as_lines(titles: Sequence[str], group: Sequence[Sequence[str]]) -> str:
    lines = zip(titles, *group, strict=True)
    return tabulate(list(lines), tablefmt="plain", disable_numparse=True)
