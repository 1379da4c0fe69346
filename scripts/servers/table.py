"""servers.md: a row for each server and setting, and what was found."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ruler_bench.device import device_name
from ruler_bench.report.text import markdown_cell
from scripts.servers.figures import Figures
from scripts.servers.kinds import Trial

NAME, NOTES = "servers.md", "servers_notes.md"
"""The second, where there is one: what a reader must know besides, put at the end."""
HEADS = (
    "server",
    "setting",
    "asked with",
    "right",
    "verdict",
    "errors",
    "answers not as fresh",
    "margins moved, logits",
    "of a repeated prompt from a cache",
    "first token, new prompt / again",
    "engines",
    "time of requests",
)


@dataclass(frozen=True)
class Row:
    """One trial.

    Attributes:
        trial: the server and its setting.
        version: of the server.
        figures: what its run says; None where there was no verdict.
        why: there was none.
    """

    trial: Trial
    version: str
    figures: Figures | None = None
    why: str = ""


def write(folder: Path, rows: Sequence[Row], command: str, asked: str, device: str) -> None:
    """Write the table and what was found.

    Args:
        folder: of the table.
        rows: in the order of the table.
        command: that measured them.
        asked: what each server was asked, in words.
        device: that servers ran on, as torch names it.
    """
    notes = folder / NOTES
    more = f"\n{notes.read_text(encoding='utf-8')}" if notes.is_file() else ""
    page = markdown(rows, command, asked, device_name(device))
    (folder / NAME).write_text(page + more, encoding="utf-8")


def markdown(rows: Sequence[Row], command: str, asked: str, device: str) -> str:
    """Return the page."""
    versions = dict.fromkeys((one.trial.server, one.version) for one in rows)
    lines = [
        "# Servers that were run",
        f"Each was asked with the probe: {asked}. Every arm of one engine has a server of its own, "
        "fresh and fresh_again have one a sample; the reference is transformers.",
        "",
        f"    {command}",
        "",
        f"{device}; Python {platform.python_version()}. Versions:",
        "",
        *(f"- {server}: {version}" for server, version in versions),
        "",
        *_table(HEADS, [_cells(one) for one in rows]),
        "",
        '"Margins moved" is the largest difference of top-2 margins, between an answer and the '
        "fresh engine's to the same prompt, where both have the same tokens so far.",
        "",
        "## What was found",
        *(line for one in rows for line in _found(one)),
    ]
    return "\n".join(lines) + "\n"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [heads, ["---"] * len(heads), *([markdown_cell(one) for one in row] for row in rows)]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _cells(row: Row) -> list[str]:
    name = [row.trial.server, row.trial.setting]
    found = row.figures
    if found is None:
        return [*name, *["-"] * (len(HEADS) - 2)]
    return [
        *name,
        found.asked_as,
        f"{found.right}/{found.samples}",
        found.verdict,
        str(found.errors),
        str(found.turned),
        "-" if found.moved is None else f"{found.moved:.1g}",
        "-" if found.reused is None else f"{found.reused:.0%}",
        f"{_seconds(found.first_seconds)} / {_seconds(found.again_seconds)}",
        str(found.engines),
        f"{found.seconds:.0f} s",
    ]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g} s"


def _found(row: Row) -> list[str]:
    head = f"\n### {row.trial.server}, {row.trial.setting}"
    found = row.figures
    if found is None:
        return [head, f"No verdict: {row.why}"]
    return [
        head,
        found.sentence,
        "",
        f"- Arms: {', '.join(found.arms)}.",
        *(f"- {one}" for one in (*found.reasons, *found.notes)),
    ]
