"""servers.md: a row for each server and setting, and what was found."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ruler_bench.device import device_name
from ruler_bench.report.text import markdown_cell
from scripts.servers.figures import Figures
from scripts.servers.figures import read as read_figures
from scripts.servers.kinds import NAMES

NAME, NOTES, RUNS = "servers.md", "servers_notes.md", "runs"
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
class Entry:
    """What is written down of a run, beside its folder.

    Attributes:
        server, setting: of the trial.
        version: of the server.
        command: that ran it.
        device: that the server ran on, as torch names it.
        status: of the run.
    """

    server: str
    setting: str
    version: str
    command: str
    device: str
    status: int


@dataclass(frozen=True)
class Row:
    """A run.

    Attributes:
        entry: what is written down of it.
        figures: what its folder says; None where there was no verdict.
    """

    entry: Entry
    figures: Figures | None


def add(folder: Path, run: str, entry: Entry) -> None:
    """Write down that a run is over.

    Args:
        folder: of the table.
        run: name of its folder in `RUNS`.
        entry: of it.
    """
    path = folder / RUNS / f"{run}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(entry), indent=2) + "\n", encoding="utf-8")


def write(folder: Path) -> None:
    """Write the table of all runs that are over, and what was found."""
    notes = folder / NOTES
    more = f"\n{notes.read_text(encoding='utf-8')}" if notes.is_file() else ""
    (folder / NAME).write_text(markdown(read(folder)) + more, encoding="utf-8")


def read(folder: Path) -> list[Row]:
    """Return the runs of a folder, in the order of the servers' names in `kinds.NAMES`."""
    rows = []
    for path in sorted((folder / RUNS).glob("*.json")):
        entry = Entry(**json.loads(path.read_text(encoding="utf-8")))
        try:
            found = read_figures(path.with_suffix(""))
        except FileNotFoundError:
            found = None
        rows.append(Row(entry, found))
    return sorted(rows, key=lambda one: NAMES.index(one.entry.server))


def markdown(rows: Sequence[Row]) -> str:
    """Return the page."""
    entries = [one.entry for one in rows]
    versions = dict.fromkeys((one.server, one.version) for one in entries)
    devices = dict.fromkeys(device_name(one.device) for one in entries)
    lines = [
        "# Servers that were run",
        "Each was asked with the probe, every arm of one engine in a server of its own, fresh and "
        "fresh_again in one a sample; the reference is transformers.",
        "",
        *(f"    {one}" for one in dict.fromkeys(one.command for one in entries)),
        "",
        f"{', '.join(devices)}; Python {platform.python_version()}. Versions:",
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
    name = [row.entry.server, row.entry.setting]
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
    head = f"\n### {row.entry.server}, {row.entry.setting}"
    found = row.figures
    if found is None:
        return [head, f"No verdict: the run ended with status {row.entry.status}."]
    return [
        head,
        found.sentence,
        "",
        f"- Arms: {', '.join(found.arms)}.",
        *(f"- {one}" for one in (*found.reasons, *found.notes)),
    ]
