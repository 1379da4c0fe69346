"""A diagnosis for people: its sentence and its table, on a terminal, in Markdown, on the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ruler_bench.leak.diagnosis.hypotheses import Row
from ruler_bench.leak.diagnosis.rules import CANNOT_SAY, SUPPORTED

if TYPE_CHECKING:
    from ruler_bench.report.page import Section

TITLES = ("hypothesis", "verdict", "compared", "samples", "tokens", "bits", "why")


def _cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    return [
        (
            one.hypothesis,
            one.verdict,
            ", ".join(one.arms) or "-",
            str(one.samples),
            "-" if one.token_differences is None else str(one.token_differences),
            "-" if one.bit_differences is None else str(one.bit_differences),
            one.why,
        )
        for one in rows
    ]


def sentence(rows: Sequence[Row]) -> str:
    """Return what the table says in one sentence."""
    found = [one.hypothesis for one in rows if one.verdict == SUPPORTED]
    open_ones = sum(one.verdict == CANNOT_SAY for one in rows)
    start = f"Supported: {', '.join(found)}" if found else "No hypothesis is supported"
    return f"{start}; {open_ones} of {len(rows)} cannot be said."


def terminal_diagnosis(rows: Sequence[Row]) -> str:
    """Return the sentence and the table for a terminal."""
    from tabulate import tabulate  # noqa: PLC0415

    from ruler_bench.report.text import visible  # noqa: PLC0415

    cells = [[visible(cell) for cell in row] for row in _cells(rows)]
    widths = [22, None, 30, None, None, None, 60]
    table = tabulate(
        cells, headers=TITLES, tablefmt="simple", disable_numparse=True, maxcolwidths=widths
    )
    return f"Diagnosis. {sentence(rows)}\n\n{table}"


def markdown_diagnosis(rows: Sequence[Row]) -> str:
    """Return the sentence and the table as a section of a Markdown report."""
    from ruler_bench.report.tables import markdown_table  # noqa: PLC0415
    from ruler_bench.report.text import markdown_cell  # noqa: PLC0415

    cells = [[markdown_cell(cell, None) for cell in row] for row in _cells(rows)]
    table = markdown_table(TITLES, cells)
    return "\n\n".join(["## Diagnosis", f"**{markdown_cell(sentence(rows), None)}**", table])


def diagnosis_section(rows: Sequence[Row]) -> Section:
    """Return the sentence and the table for report.html."""
    from ruler_bench.report.page import Section  # noqa: PLC0415

    return Section("Diagnosis", sentence(rows), TITLES, _cells(rows))
