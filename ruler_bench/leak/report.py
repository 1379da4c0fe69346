"""The verdict for people and for programs: terminal, Markdown, verdict.json, JUnit XML."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tabulate import tabulate

from ruler_bench.leak.classes import (
    CLASSES,
    ENGINE_FAULT,
    LEAK,
    OK,
    RACE,
    UNDECIDED,
    UNSTABLE,
    IndexVerdict,
)
from ruler_bench.leak.diagnosis.hypotheses import Row
from ruler_bench.leak.verdict import SCHEMA_VERSION, Verdict
from ruler_bench.report.tables import markdown_table
from ruler_bench.report.text import markdown_cell, visible

VERDICT_JSON, JUNIT_XML = "verdict.json", "junit.xml"
LISTED = 20
SHOWN_OUTPUT = 60
FAILURES = (LEAK, RACE, ENGINE_FAULT)

INDEX_TITLES = ("index", "verdict", "position", "parts at", "right in", "why")
TEST_TITLES = ("test", "question", "finding", "p")
SUPPORT_TITLES = ("verdict", "can be shown", "how")


# --- people -------------------------------------------------------------------------------------


def terminal_verdict(verdict: Verdict) -> str:
    """Return sentence, table, evidence and limits for a terminal."""
    parts = [visible(verdict.sentence)]
    rows = list(_index_rows(verdict))
    if rows:
        parts.append(_plain(INDEX_TITLES, rows) + _rest(verdict))
    if verdict.evidence:
        parts.append("Evidence, strongest first:\n" + "\n".join(_evidence_lines(verdict)))
    cells = [
        (one.name, one.finding, f"{one.p_value:.2g}") for one in verdict.tests if one.p_value < 1
    ]
    if cells:
        parts.append(_plain(("test", "finding", "p"), cells))
    parts.append(_plain(SUPPORT_TITLES, list(_support_rows(verdict))))
    parts += [visible(note) for note in verdict.notes]
    return "\n\n".join(parts)


def markdown_verdict(verdict: Verdict, heading: str = "##") -> str:
    """Return the verdict as a section of a Markdown report.

    Args:
        verdict: of a run.
        heading: how its title is marked; those within get one mark more.
    """
    parts = [f"{heading} Verdict", f"**{markdown_cell(verdict.sentence, None)}**"]
    rows = list(_index_rows(verdict))
    if rows:
        parts.append(_marked(INDEX_TITLES, rows))
        parts += [markdown_cell(rest.strip()) for rest in [_rest(verdict)] if rest]
    if verdict.evidence:
        parts.append(f"{heading}# Evidence, strongest first")
        parts.append("\n".join(f"- {markdown_cell(one)}" for one in _evidence_lines(verdict)))
    if verdict.tests:
        parts.append(f"{heading}# Across indices")
        cells = [
            (one.name, one.question, one.finding, f"{one.p_value:.2g}") for one in verdict.tests
        ]
        parts.append(_marked(TEST_TITLES, cells))
    parts.append(f"{heading}# What these arms can show")
    parts.append(_marked(SUPPORT_TITLES, list(_support_rows(verdict))))
    if verdict.notes:
        parts.append("\n".join(f"- {markdown_cell(note, None)}" for note in verdict.notes))
    return "\n\n".join(parts)


def _plain(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [[visible(cell) for cell in row] for row in rows]
    return tabulate(cells, headers=titles, tablefmt="simple", disable_numparse=True)


def _marked(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return markdown_table(titles, [[markdown_cell(cell) for cell in row] for row in rows])


def _index_rows(verdict: Verdict) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the indices that are not plainly right, the gravest first."""
    found = sorted(_listed(verdict), key=lambda one: (CLASSES.index(one.verdict), one.ordinal))
    for one in found[:LISTED]:
        right = ", ".join(name for name, correct in one.correct.items() if correct) or "none"
        yield (
            str(one.ordinal),
            one.verdict,
            _known(one.position),
            _known(one.first_difference),
            right,
            one.reason,
        )


def _listed(verdict: Verdict) -> list[IndexVerdict]:
    return [
        one
        for one in verdict.indices
        if one.verdict != OK
        and not (one.verdict == UNDECIDED and len(verdict.arms) == 1 and all(one.correct.values()))
    ]


def _rest(verdict: Verdict) -> str:
    more = len(_listed(verdict)) - LISTED
    return f"\n{more} more are in {VERDICT_JSON}." if more > 0 else ""


def _known(value: int | None) -> str:
    return "-" if value is None else str(value)


def _evidence_lines(verdict: Verdict) -> list[str]:
    found = verdict.evidence
    lines = [f"{one.kind}, index {one.ordinal}: {one.text}" for one in found[:LISTED]]
    if len(found) > LISTED:
        lines.append(f"{len(found) - LISTED} more are in {VERDICT_JSON}.")
    return lines


def _support_rows(verdict: Verdict) -> Iterator[tuple[str, ...]]:
    for one in verdict.support:
        yield one.verdict, "yes" if one.is_possible else "no", one.how


# --- programs -----------------------------------------------------------------------------------


def to_json(verdict: Verdict) -> dict[str, Any]:
    """Return the whole verdict as plain JSON values; docs/leak_lab.md describes the fields."""
    return {
        "schema_version": SCHEMA_VERSION,
        "title": verdict.title,
        "verdict": verdict.verdict,
        "sentence": verdict.sentence,
        "status": verdict.status,
        "compared": verdict.compared,
        "counts": {name: verdict.count(name) for name in CLASSES},
        "excluded_leak_rate": verdict.excluded_leak_rate,
        "audited": verdict.audited,
        "arms": {name: dict(arm) for name, arm in verdict.arms.items()},
        "indices": [_index_json(one) for one in verdict.indices],
        "tests": [dataclasses.asdict(one) for one in verdict.tests],
        "support": [dataclasses.asdict(one) for one in verdict.support],
        "notes": list(verdict.notes),
    }


def _index_json(one: IndexVerdict) -> dict[str, Any]:
    return {
        "ordinal": one.ordinal,
        "verdict": one.verdict,
        "reason": one.reason,
        "position": one.position,
        "predecessor": one.predecessor,
        "first_difference": one.first_difference,
        "differs": one.differs,
        "correct": dict(one.correct),
        "outputs": dict(one.outputs),
        "evidence": [{"kind": each.kind, "text": each.text} for each in one.evidence],
    }


_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(verdict: Verdict) -> str:
    """Return the verdict as JUnit XML: one test case an index.

    Leak, race and engine fault are failures; unstable and undecided indices are too where the exit
    status says so, and skipped otherwise; wrong answers that are the model's pass.
    """
    suite = ElementTree.Element("testsuite", name=_xml(verdict.title))
    counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for one in verdict.indices:
        case = ElementTree.SubElement(
            suite, "testcase", classname=_xml(verdict.title), name=f"index {one.ordinal}"
        )
        counts["tests"] += 1
        outcome = _outcome(verdict, one)
        if outcome is not None:
            counts[{"failure": "failures", "skipped": "skipped"}[outcome]] += 1
            found = ElementTree.SubElement(case, outcome, message=_xml(one.reason))
            if outcome == "failure":
                found.set("type", one.verdict)
                found.text = _xml("\n".join(_details(one)))
    for key, value in counts.items():
        suite.set(key, str(value))
    properties = ElementTree.Element("properties")
    for name, text in (("verdict", verdict.verdict), ("sentence", verdict.sentence)):
        ElementTree.SubElement(properties, "property", name=name, value=_xml(text))
    suite.insert(0, properties)
    root = ElementTree.Element("testsuites", dict(suite.attrib))
    root.append(suite)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _outcome(verdict: Verdict, one: IndexVerdict) -> str | None:
    if one.verdict in FAILURES:
        return "failure"
    if one.verdict in (UNSTABLE, UNDECIDED):
        return "failure" if verdict.status and one.differs else "skipped"
    return None


def _details(one: IndexVerdict) -> Iterator[str]:
    for each in one.evidence:
        yield f"{each.kind}: {each.text}"
    for name, output in one.outputs.items():
        yield f"{name}: {visible(output, SHOWN_OUTPUT)}"


def _xml(text: str) -> str:
    """Return text that XML 1.0 can hold: what it cannot becomes an escape."""
    return _NOT_IN_XML.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def write_verdict(
    folder: Path, verdict: Verdict | None, diagnosis: Sequence[Row] | None = None
) -> None:
    """Write verdict.json and junit.xml into an existing folder.

    Args:
        folder: where to.
        verdict: over the arms; None where there is none, and then no junit.xml either.
        diagnosis: answers to hypotheses, under "diagnose".

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    values: dict[str, Any] = {} if verdict is None else to_json(verdict)
    if diagnosis is not None:
        values["diagnose"] = [dataclasses.asdict(one) for one in diagnosis]
    text = json.dumps(values, indent=2, ensure_ascii=True, allow_nan=False)
    (folder / VERDICT_JSON).write_text(text + "\n", encoding="utf-8", newline="\n")
    if verdict is not None:
        (folder / JUNIT_XML).write_text(junit_xml(verdict), encoding="utf-8", newline="\n")
