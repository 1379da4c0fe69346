"""detector.md, detector.jsonl and detector.json: what the rows say."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from backends.engine.faults import FAULTS
from ruler_bench.leak.join import PERSISTENT_AGAIN
from ruler_bench.leak.taxonomy import KINDS
from ruler_bench.leak.tests_of_difference import excluded_rate
from ruler_bench.report.text import markdown_cell
from scripts.bench.journal import Row, read_manifest, read_rows
from scripts.detector.clean import ENGINES
from scripts.detector.judging import merged
from scripts.detector.noisy import NOISES

NAME = "detector"
NOTES = "detector_notes.md"
"""Where there is one: what a reader must know of how the rows came about, put at the end."""
ASKED_COMPARISONS = 150


def write(out: Path, parts: Sequence[str]) -> bool:
    """Write the three files from the rows of all parts.

    Returns:
        Whether anything is not as it must be: a fault missed or in another class, a false alarm,
        a row with an error.
    """
    rows = {part: list(read_rows(out / part).values()) for part in parts}
    manifests = {part: read_manifest(out / part) for part in parts}
    lines = [json.dumps(row) for part in parts for row in rows[part]]
    (out / f"{NAME}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    known = {part: one for part, one in manifests.items() if one is not None}
    (out / f"{NAME}.json").write_text(json.dumps(known, indent=2) + "\n")
    page = markdown(rows, known)
    notes = out / NOTES
    more = f"\n{notes.read_text(encoding='utf-8')}" if notes.is_file() else ""
    (out / f"{NAME}.md").write_text(page + more)
    return any(is_wrong(row) for found in rows.values() for row in found)


def is_wrong(row: Row) -> bool:
    """Tell whether a row is not as it must be."""
    found = row["figures"]
    if found is None:
        return True
    if row["kind"] == "faults":
        return not found["right_class"] or found["class_at"] is None
    return bool(found["false_alarm"])


def outcome(row: Row) -> str:
    """Return a row in a few words."""
    found = row["figures"]
    if found is None:
        return f"error: {row['error']}"
    if row["kind"] == "faults":
        return f"{found['verdict']} ({found['expected']} expected), from {found['class_at']} on"
    return f"{found['verdict']}{': FALSE ALARM' if found['false_alarm'] else ''}"


def markdown(
    rows: Mapping[str, Sequence[Row]],
    manifests: Mapping[str, Any],
) -> str:
    """Return the whole page.

    Args:
        rows: of each part.
        manifests: of each part that was begun.
    """
    parts = [
        "# Proof of the detector",
        "Made by `scripts/measure_detector.py` from detector.jsonl (a line for each row below); "
        "detector.json has commands, settings, versions and device. Probe model.",
        *_faults(rows.get("faults", ()), manifests.get("faults")),
        *_kinds(rows.get("faults", ())),
        *_clean(rows.get("clean", ()), manifests.get("clean")),
        *_noisy(rows.get("noisy", ()), manifests.get("noisy")),
        *_errors([one for found in rows.values() for one in found]),
        *_how(manifests),
    ]
    return "\n\n".join(parts) + "\n"


def _table(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(
        f"| {' | '.join(markdown_cell(str(one), None) for one in line)} |" for line in lines
    )


def _measured(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["figures"] is not None]


def _faults(rows: Sequence[Row], manifest: Any) -> Iterator[str]:
    done = sorted(_measured(rows), key=lambda row: list(FAULTS).index(row["name"]))
    if not done:
        return
    right = [row for row in done if not is_wrong(row)]
    settings = manifest["settings"]
    yield "## Seeded faults"
    yield (
        f"{len(right)} of {len(rows)} faults are found in their class, with "
        f"{_samples(done)} samples of niah_single_1 at {settings['length']} tokens each. "
        "Found after: the smallest number of samples of which the judge says so. Evidence: the "
        "strongest at that number, in the verdict's words. In the arm shuffled, the engine has "
        "served the other samples of the run in between. Seconds: all engines' starts and "
        "requests, one thread, beside other work on the machine."
    )
    yield _table(
        (
            "fault",
            "expected",
            "verdict",
            "class",
            "samples",
            "found after",
            "first evidence",
            "seconds",
        ),
        [
            (
                row["name"],
                row["figures"]["expected"],
                row["figures"]["verdict"],
                "right" if row["figures"]["right_class"] else "WRONG",
                row["figures"]["samples"],
                _found_after(row["figures"]),
                row["figures"]["evidence"] or "-",
                f"{row['figures']['seconds']:.0f}",
            )
            for row in done
        ],
    )
    yield _table(
        ("fault", "settings", "arms", "indices by class", "verdict of the first 1, 2, ... samples"),
        [
            (
                row["name"],
                row["figures"]["settings"],
                ", ".join(row["figures"]["arms"]),
                _counts(row["figures"]["indices"]),
                _runs(row["figures"]["verdicts"]),
            )
            for row in done
        ],
    )


def _samples(rows: Sequence[Row]) -> str:
    """Return how many samples the runs had: a number, or the least and the most."""
    counted = [row["figures"]["samples"] for row in rows]
    low, high = min(counted), max(counted)
    return str(low) if low == high else f"{low} to {high}"


def _found_after(found: Mapping[str, Any]) -> str:
    if found["class_at"] is None:
        other = found["alarm_at"]
        return "not found" if other is None else f"not found (another alarm after {other})"
    if found["alarm_at"] != found["class_at"]:
        return f"{found['class_at']} (another alarm after {found['alarm_at']})"
    return str(found["class_at"])


def _counts(found: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in found.items())


def _runs(verdicts: Sequence[str]) -> str:
    """Return verdicts with equal ones in a row taken together: 1-4 ok, 5-20 leak."""
    found: list[list[Any]] = []
    for place, name in enumerate(verdicts, start=1):
        if found and found[-1][0] == name:
            found[-1][2] = place
        else:
            found.append([name, place, place])
    return ", ".join(
        f"{low} {name}" if low == high else f"{low}-{high} {name}" for name, low, high in found
    )


def _kinds(rows: Sequence[Row]) -> Iterator[str]:
    done = _measured(rows)
    by_fault = {row["name"]: _kind_counts(row["figures"]["wrong_outputs"]) for row in done}
    by_fault = {name: counted for name, counted in by_fault.items() if counted}
    if not by_fault:
        return
    used = [kind for kind in KINDS if any(kind in counted for counted in by_fault.values())]
    yield "## Kinds of wrong outputs"
    yield (
        "What `ruler_bench.leak.taxonomy` calls the wrong outputs of the engines with faults, each "
        "output once an index. The rules were written on outputs of another engine; "
        "docs/taxonomy.md says how often a reader agrees with them here."
    )
    yield _table(
        ("fault", *used),
        [(name, *(counted.get(kind, "") for kind in used)) for name, counted in by_fault.items()],
    )


def _kind_counts(outputs: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    counted: dict[str, int] = {}
    for one in outputs:
        counted[one["kind"]] = counted.get(one["kind"], 0) + 1
    return counted


def _clean(rows: Sequence[Row], manifest: Any) -> Iterator[str]:
    done = _measured(rows)
    if not done:
        return
    alarms = sum(is_wrong(row) for row in done)
    # A run of hf with other threads is held against answers that are counted already.
    compared = sum(row["figures"]["comparisons"] for row in done if row["name"] in ENGINES)
    yield "## False alarms: sound engines"
    yield (
        f"{alarms} of {len(done)} runs raise an alarm (leak, race or engine fault, of the whole or "
        f"of any index), {_samples(done)} samples each at "
        f"{manifest['settings']['length']} tokens, {compared} answers of the five engines compared"
        + (f"; none in {compared} excludes {_bound(compared)} an answer" if not alarms else "")
        + f". The reference is {manifest['settings']['reference']}, that of hf gpu_only. hf's "
        "fresh engines are built anew in one process, the others' in a process each."
    )
    groups: dict[str, list[Row]] = {}
    for row in done:
        groups.setdefault(row["name"], []).append(row)
    yield from _shortfalls(groups)
    yield _table(
        (
            "engine", "tasks", "arms", "compared", "verdicts", "indices by class", "alarms",
            "excluded at 95%",
        ),
        [_clean_row(name, found) for name, found in groups.items()],
    )  # fmt: skip


def _compared(rows: Iterable[Row]) -> int:
    return sum(row["figures"]["comparisons"] for row in rows)


def _shortfalls(groups: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    """Say what these runs cannot show."""
    counted = {name: _compared(groups.get(name, ())) for name in ENGINES}
    few = [f"{name} {count}" for name, count in counted.items() if count < ASKED_COMPARISONS]
    if few:
        yield f"NOT ENOUGH: {ASKED_COMPARISONS} comparisons each are asked for; {', '.join(few)}."
    arms = [row["figures"]["arms"] for rows in groups.values() for row in rows]
    if not any(PERSISTENT_AGAIN in one for one in arms):
        yield (
            f"These runs have no arm {PERSISTENT_AGAIN}, without which no race can be called: they "
            "say nothing about false races."
        )


def _clean_row(name: str, rows: Sequence[Row]) -> list[str]:
    figures = [row["figures"] for row in rows]
    compared = sum(one["comparisons"] for one in figures)
    indices: dict[str, int] = {}
    for one in figures:
        indices = merged(indices, one["indices"])
    wrong = sum(map(is_wrong, rows))
    return [
        name,
        str(len(rows)),
        ", ".join(figures[0]["arms"]),
        str(compared),
        _counts(_tally(one["verdict"] for one in figures)),
        _counts(indices),
        str(wrong),
        "-" if wrong else _bound(compared),
    ]


def _tally(names: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in names:
        found[name] = found.get(name, 0) + 1
    return found


def _bound(count: int) -> str:
    rate = excluded_rate(0, count)
    return "-" if rate is None else f"more than {100 * rate:.2g}%"


def _noisy(rows: Sequence[Row], manifest: Any) -> Iterator[str]:
    done = _measured(rows)
    if not done:
        return
    alarms = sum(map(is_wrong, done))
    runner = sum("through the runner" in row["name"] for row in done)
    yield "## False alarms: noisy engines"
    yield (
        f"{alarms} of {len(done)} runs raise an alarm (leak, race or engine fault, of the whole "
        f"or of any index), {_samples(done)} samples each"
        + (f"; none in {len(done)} excludes {_bound(len(done))} of runs" if not alarms else "")
        + f". {runner} of them went through the runner, each fresh engine in a process of its own; "
        "the others were made in memory, by the same engine, orders of requests and scoring, and "
        "are repeatable; they ask the same samples of three tasks, with other noise each time. "
        "Arms: persistent, persistent_again, shuffled, fresh, fresh_again, "
        "reference. The noise is that of `scripts/detector/noisy.py`, at rates of 1, 2, 5 and 10%; "
        "in turn no, 30% and all answers round differently; the engine tells digests, margins, "
        "tokens or text alone; float32 or bfloat16."
    )
    groups: dict[str, list[Row]] = {}
    for row in done:
        groups.setdefault(row["name"], []).append(row)
    order = [f"{noise}, {how}" for noise in NOISES for how in ("in memory", "through the runner")]
    yield _table(
        ("noise", "what it does", "runs", "verdicts", "indices by class", "alarms"),
        [_noisy_row(name, groups[name]) for name in order if name in groups],
    )
    wrong = [row for row in done if row["figures"]["false_alarm"]]
    if wrong:
        yield "Alarms:\n\n" + "\n".join(
            f"- {row['key']} ({_trial(row['figures'])}): {row['figures']['sentence']}"
            for row in wrong
        )


def _trial(found: Mapping[str, Any]) -> str:
    return (
        f"rate {found['rate']:g}, rounding {found['rounding']:g}, tells {found['reveals']}, "
        f"{found['dtype']}, {found['task']}"
    )


def _noisy_row(name: str, rows: Sequence[Row]) -> list[str]:
    figures = [row["figures"] for row in rows]
    indices: dict[str, int] = {}
    for one in figures:
        indices = merged(indices, one["indices"])
    return [
        name,
        NOISES[figures[0]["noise"]],
        str(len(rows)),
        _counts(_tally(one["verdict"] for one in figures)),
        _counts(indices),
        str(sum(bool(one["false_alarm"]) for one in figures)),
    ]


def _errors(rows: Sequence[Row]) -> Iterator[str]:
    failed = [row for row in rows if row["figures"] is None]
    if failed:
        yield "## Not measured"
        yield "\n".join(f"- {row['kind']} {row['key']}: {row['error']}" for row in failed)


def _how(manifests: Mapping[str, Any]) -> Iterator[str]:
    yield "## How it was measured"
    commands = [run["command"] for one in manifests.values() for run in one["runs"]]
    yield "\n".join(f"    {one}" for one in dict.fromkeys(commands))
    for one in manifests.values():
        versions = ", ".join(
            f"{name} {value}" for name, value in one["settings"]["versions"].items()
        )
        yield f"{one['settings']['device']}, {one['settings']['platform']}; {versions}."
        break
