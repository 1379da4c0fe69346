"""report.html: the run on one page that needs no network and runs no script.

Whatever a model put out is escaped by the template engine, and the page's own policy
(Content-Security-Policy) forbids scripts, so that even a hole in the escaping would run nothing.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ruler_bench.report.depth import BINS
from ruler_bench.report.digest import (
    ALL_KEPT_RUNS,
    FAILURES_KEPT,
    STATES,
    Digest,
    digest,
    name_parts,
    total_kinds,
    with_settings,
)
from ruler_bench.report.memory import PLANNED, planned_memory
from ruler_bench.report.provenance import shared_and_own
from ruler_bench.report.rows import Run
from ruler_bench.report.strips import strips_of
from ruler_bench.report.tables import COLUMNS, shown_columns
from ruler_bench.report.text import human_number, human_seconds, visible

if TYPE_CHECKING:
    from jinja2 import Template

PAGE = "report.html"
LISTED_RUNS, LISTED_ROWS = 40, 400
TAIL_CHARACTERS = 300

SCORE_COLUMNS = (
    "task",
    "length",
    "backend",
    "model",
    "settings",
    "arm",
    "score",
    "95% interval",
    "correct",
    "samples",
    "errors",
    "nulls",
    "truncated",
    "engines",
)
TITLE_COLUMNS = ("task", "length", "backend", "model", "settings")
TIMES = {
    "total_seconds": "time per sample",
    "ttft_seconds": "time to first token",
    "decode_seconds": "decode",
    "estimation_seconds": "estimation",
    "attention_seconds": "prefill attention",
}
"""Measures of which a page tells median and 95th percentile."""


@dataclass(frozen=True)
class Page:
    """What a page says beside the figures of its runs.

    Attributes:
        title: its heading.
        verdict: what verdict.json holds, or None.
        notes: sentences above the tables.
        tails: ends of prompts by the hash in the records.
        sections: further tables: title, sentence, column titles and rows of text.
        links: address of each run's own page, by number of the run.
    """

    title: str
    verdict: Mapping[str, Any] | None = None
    notes: Sequence[str] = ()
    tails: Mapping[str, str] | None = None
    sections: Sequence[Section] = ()
    links: Mapping[int, str] | None = None


@dataclass(frozen=True)
class Section:
    """A table of text under a title."""

    title: str
    text: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def write_page(
    folder: Path,
    runs: Sequence[Run],
    page: Page | None = None,
    prompts: Iterable[tuple[str, str]] = (),
) -> None:
    """Write report.html into a folder.

    Args:
        folder: of a run, or of a sweep.
        runs: the arms of a run, or of several.
        page: verdict and further tables; title and ends of prompts are filled in.
        prompts: hash and text of prompts, of which the ends are shown.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
        UsageError: a manifest's metric is unknown.
    """
    numbers: dict[int, int] = {}
    keep = None if len({id(one.manifest) for one in runs}) <= ALL_KEPT_RUNS else FAILURES_KEPT
    digests = [
        digest(one, numbers.setdefault(id(one.manifest), len(numbers)), failures_only=keep)
        for one in runs
    ]
    rows = with_settings(digests)
    page = replace(page or Page(""), title=title_of(rows), tails=tails_of(prompts))
    (folder / PAGE).write_text(render(rows, page), encoding="utf-8", newline="\n")


def title_of(digests: Sequence[Digest]) -> str:
    """Return what to call one run, or several together."""
    runs = len({one.run for one in digests})
    if runs == 1:
        return ", ".join(name_parts(digests[0].row))
    tasks = sorted({one.row.task for one in digests})
    lengths = sorted({one.row.length_tokens for one in digests})
    named = visible(tasks[0]) if len(tasks) == 1 else f"{len(tasks)} tasks"
    span = f"{lengths[0]} tokens" if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]} tokens"
    return f"{runs} runs: {named}, {span}"


def tails_of(prompts: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the ends of prompts, printable, by hash."""
    return {key: visible(text[-TAIL_CHARACTERS:]) for key, text in prompts}


def render(digests: Sequence[Digest], page: Page) -> str:
    """Return the page as HTML."""
    rows = [one.row for one in digests]
    there = shown_columns(rows)
    columns = {name: there[name] for name in SCORE_COLUMNS if name in there}
    # What all rows have in common stands in the title.
    for name in TITLE_COLUMNS:
        if name in columns and len({columns[name](row) for row in rows}) == 1:
            del columns[name]
    shared, own = shared_and_own([one.manifest for one in digests])
    cards, strips, left_out = strips_of(digests, page.tails or {}, page.links or {})
    return _template().render(
        page=page,
        headline=_headline(digests, page.verdict),
        columns=list(columns),
        score_rows=[
            ({name: visible(show(row)) for name, show in columns.items()}, row)
            for row in rows[:LISTED_ROWS]
        ],
        more_rows=max(0, len(rows) - LISTED_ROWS),
        heat=_heat(digests),
        bins=[f"{n * 100 // BINS}%" for n in range(BINS)],
        strips=strips,
        cards=cards,
        left_out=left_out,
        states=STATES,
        failures_only=len({one.run for one in digests}) > ALL_KEPT_RUNS,
        timing=_timing(digests),
        picture=_times_picture(digests),
        kinds=total_kinds(digests) if len({one.run for one in digests}) > 1 else None,
        digests=digests[:LISTED_ROWS],
        shared=shared,
        own=_own_settings(digests, own),
    )


@functools.cache
def _template() -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # noqa: PLC0415 (0.1 s)

    environment = Environment(
        loader=PackageLoader("ruler_bench.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["shown"] = visible
    environment.filters["number"] = human_number
    environment.filters["seconds"] = human_seconds
    return environment.get_template("page.html.jinja")


# --- figures ------------------------------------------------------------------------------------


def _headline(digests: Sequence[Digest], verdict: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return a class of colour, and the sentence above everything."""
    if verdict is not None and verdict.get("sentence"):
        bad = {"leak", "race", "engine_fault"}
        name = str(verdict.get("verdict"))
        tone = "bad" if name in bad else "good" if verdict.get("status") == 0 else "unsure"
        return tone, visible(str(verdict["sentence"]))
    samples = sum(one.row.samples for one in digests)
    correct = sum(one.row.correct for one in digests)
    errors = sum(one.row.errors for one in digests)
    if not samples and not errors:
        return "unsure", "No sample has been run."
    text = f"{correct} of {samples} answers right"
    if len(digests) == 1 and digests[0].row.score is not None:
        row = digests[0].row
        text += f", score {row.score:.2f} (95% interval {COLUMNS['95% interval'](row)})"
    text += f"; {errors} failed in the engine." if errors else "; none failed in the engine."
    return ("good" if correct == samples and not errors else "unsure"), text


def _heat(digests: Sequence[Digest]) -> list[tuple[str, str, list[tuple[float, int] | None]]]:
    """Return a line for each arm and length whose samples have a depth: names, then the tenths."""
    several_tasks = len({(one.row.task, one.row.backend, one.run) for one in digests}) > 1
    found = []
    for one in digests[:LISTED_ROWS]:
        if any(one.depths):
            parts = [
                name for name in name_parts(one.row) if name != f"{one.row.length_tokens} tokens"
            ]
            name = ", ".join([*parts, one.arm]) if several_tasks else one.arm
            found.append((visible(name), str(one.row.length_tokens), list(one.depths)))
    return found


def _timing(digests: Sequence[Digest]) -> tuple[list[str], list[list[str]]]:
    """Return titles and rows: medians and 95th percentiles of times, then memory and traffic."""
    rows = [one.row for one in digests]
    columns = shown_columns(rows)
    measures = [name for name in TIMES if any(name in one.spreads for one in digests)]
    others = [
        name
        for name in list(columns)
        if name not in SCORE_COLUMNS
        and name not in ("time per sample", "time to first token")
        and any(columns[name](row) != "-" for row in rows)
    ]
    several = len({(row.task, row.length_tokens, row.backend, row.model) for row in rows}) > 1
    plans = [planned_memory(one.manifest, one.arm) for one in digests[:LISTED_ROWS]]
    planned = [title for title in PLANNED.values() if any(title in one for one in plans)]
    table = []
    for one, plan in zip(digests, plans, strict=False):
        name = ", ".join([*name_parts(one.row), one.arm]) if several else one.arm
        cells = [visible(name)]
        for measure in measures:
            spread = one.spreads.get(measure)
            cells.append(
                "-"
                if spread is None
                else f"{human_seconds(spread.median)} (95%: {human_seconds(spread.high)})"
            )
        cells += [visible(columns[name](one.row)) for name in others]
        table.append([*cells, *(plan.get(title, "-") for title in planned)])
    return ["arm", *(TIMES[name] for name in measures), *others, *planned], table


@dataclass(frozen=True)
class Picture:
    """A scatter of times over the engine's life, in a box of 600 by 160."""

    series: Sequence[tuple[str, Sequence[tuple[float, float]]]]
    most_seconds: str
    last_position: int


WIDE, HIGH = 600, 160
SERIES = 8


def _times_picture(digests: Sequence[Digest]) -> Picture | None:
    """Return the picture; None for several runs, whose times say nothing about each other."""
    drawn = [one for one in digests if one.times][:SERIES]
    if not drawn or len({one.run for one in digests}) > 1:
        return None
    most = max(seconds for one in drawn for _, seconds in one.times) or 1.0
    last = max(position for one in drawn for position, _ in one.times)
    if last == 0:
        return None
    series = [
        (
            visible(one.arm),
            [(round(x / last * WIDE, 1), round(HIGH - y / most * HIGH, 1)) for x, y in one.times],
        )
        for one in drawn
    ]
    return Picture(series, human_seconds(most), last)


def _own_settings(
    digests: Sequence[Digest], own: Sequence[Mapping[str, str]]
) -> list[tuple[str, Mapping[str, str]]]:
    """Return what is each run's own, once a run."""
    found: dict[int, tuple[str, Mapping[str, str]]] = {}
    for one, settings in zip(digests, own, strict=True):
        if settings and one.run not in found:
            found[one.run] = (", ".join(name_parts(one.row)), settings)
    return list(found.values())[:LISTED_RUNS]


def link_to(page: Path, target: Path) -> str:
    """Return the address of a file as a page beside it names it."""
    return quote(Path(os.path.relpath(target, page)).as_posix())
