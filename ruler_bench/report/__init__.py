"""Reports: from records to summary.csv, report.md, report.html, a table for the terminal, and
predictions.
"""

from __future__ import annotations

from ruler_bench.report.markdown import failures_summary, write_reports
from ruler_bench.report.means import terminal_means
from ruler_bench.report.page import Page, Section, write_page
from ruler_bench.report.predictions import write_predictions
from ruler_bench.report.rows import Row, Run, build_row, build_rows
from ruler_bench.report.tables import terminal_table

__all__ = [
    "Page",
    "Row",
    "Run",
    "Section",
    "build_row",
    "build_rows",
    "failures_summary",
    "terminal_means",
    "terminal_table",
    "write_page",
    "write_predictions",
    "write_reports",
]
