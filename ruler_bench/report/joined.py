"""Many runs in one: tables by task, length, settings and policy, and what differs between them."""

from __future__ import annotations

import csv
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ruler_bench.report.difference import Difference, Scores, difference, mean_difference
from ruler_bench.report.digest import Digest
from ruler_bench.report.gather import data_of, model_of
from ruler_bench.report.page import Section
from ruler_bench.report.rows import Row
from ruler_bench.report.tables import markdown_table
from ruler_bench.report.text import csv_cell, markdown_cell

CELLS, DIFFERENCES = "cells.csv", "differences.csv"
LISTED = 200
FULL = "full"
"""Policy of an engine that names none: it reads every key."""


@dataclass(frozen=True, slots=True, order=True)
class Setup:
    """What answered: everything that tells it from others, its samples aside."""

    backend: str
    model: str
    arm: str
    settings: str
    policy: str
    weights: str
    again: int = 0

    @property
    def title(self) -> str:
        """Its name where nothing is known about the others."""
        again = f"({self.again + 1})" if self.again else ""
        parts = (self.backend, self.model, self.arm, self.settings, again)
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Which samples: a task at a length, and the fingerprint of its samples."""

    task: str
    length_tokens: int
    data: str


@dataclass(frozen=True)
class Joined:
    """Cells by what answered and by which samples.

    Attributes:
        cells: of each setup, in the order in which they were named, its digests by place.
        titles: of each setup, no longer than tells it from the others.
    """

    cells: Mapping[Setup, Mapping[Place, Digest]]
    titles: Mapping[Setup, str]

    @functools.cached_property
    def differences(self) -> Mapping[Setup, Mapping[Place, Difference]]:
        """How every other setup differs from the first, at the samples that both were asked."""
        base, first = next(iter(self.cells.items()))
        return {
            setup: {
                place: found
                for place in sorted(own.keys() & first.keys())
                if (found := difference(scores_of(own[place]), scores_of(first[place])))
            }
            for setup, own in self.cells.items()
            if setup != base
        }

    @property
    def places(self) -> list[Place]:
        """All samples that were asked, by task and length."""
        return sorted({place for one in self.cells.values() for place in one})

    @property
    def common(self) -> list[Place]:
        """The samples that all setups were asked."""
        return sorted(set.intersection(*(set(one) for one in self.cells.values())))


def join(digests: Iterable[Digest]) -> Joined:
    """Put digests into cells; a second one of a cell becomes a setup of its own."""
    cells: dict[Setup, dict[Place, Digest]] = {}
    for one in digests:
        row = one.row
        place = Place(row.task, row.length_tokens, data_of(one))
        setup = Setup(
            row.backend, row.model, one.arm, row.settings, policy_of(one), model_of(one)[:8]
        )
        while place in cells.get(setup, {}):
            setup = dataclasses.replace(setup, again=setup.again + 1)
        cells.setdefault(setup, {})[place] = one
    return Joined(cells, _titles(list(cells)))


def policy_of(one: Digest) -> str:
    """Return the name of the policy that chose what prefill reads."""
    in_force = one.manifest.get("backend_in_force")
    policy = in_force.get("policy") if isinstance(in_force, dict) else None
    name = policy.get("name") if isinstance(policy, dict) else policy
    return name if isinstance(name, str) else FULL


def _titles(setups: Sequence[Setup]) -> dict[Setup, str]:
    if len(setups) == 1:
        return {setups[0]: setups[0].title}
    varied = [
        field.name
        for field in dataclasses.fields(Setup)
        if len({getattr(one, field.name) for one in setups}) > 1
    ]
    if "backend" in varied and "policy" in varied:
        varied.remove("policy")  # the backend or its settings tell it
    titles = {}
    for one in setups:
        parts = [str(getattr(one, name)) for name in varied if name != "again"]
        parts += [f"({one.again + 1})"] * bool(one.again)
        titles[one] = ", ".join(part for part in parts if part) or one.title
    return (
        titles if len(set(titles.values())) == len(setups) else {one: one.title for one in setups}
    )


def scores_of(one: Digest) -> Scores:
    """Return a digest's scores by ordinal, with the interval that its row has of them."""
    low, high = one.row.score_low_95, one.row.score_high_95
    # A row counts each answer, a comparison each sample once: those that were asked several times
    # have no such interval yet.
    known = low is not None and high is not None and one.row.samples == len(one.scores)
    interval = (low, high) if known and low is not None and high is not None else None
    return Scores(one.ordinals, one.scores, interval)


# --- tables -------------------------------------------------------------------------------------


def sections(joined: Joined) -> list[Section]:
    """Return the tables: task by length, setups, model by policy, and what differs."""
    found = [_by_length(joined)]
    if len(joined.cells) > 1:
        found.append(_setups(joined))
    if len({one.model for one in joined.cells}) > 1 or len({o.policy for o in joined.cells}) > 1:
        found.append(_by_policy(joined))
    if len(joined.cells) > 1:
        found.append(_clear_differences(joined))
    return found


def _by_length(joined: Joined) -> Section:
    lengths = sorted({place.length_tokens for place in joined.places})
    mixed = _mixed_places(joined.places)
    rows = []
    for setup, cells in joined.cells.items():
        lines: dict[tuple[str, str], dict[int, str]] = {}
        for place, one in sorted(cells.items()):
            data = place.data[:8] if (place.task, place.length_tokens) in mixed else ""
            lines.setdefault((place.task, data), {})[place.length_tokens] = _score(one.row)
        for (task, data), by_length in lines.items():
            name = f"{task} (samples {data})" if data else task
            rows.append([joined.titles[setup], name, *(by_length.get(one, "-") for one in lengths)])
    columns = ["", "task", *map(str, lengths)]
    if len(joined.cells) == 1:
        columns, rows = columns[1:], [row[1:] for row in rows]
    text = "Score, with its 95% interval."
    if len(rows) > LISTED:
        text += f" {len(rows) - LISTED} more rows are in {CELLS}."
    return Section("Tasks by length", text, columns, rows[:LISTED])


def _mixed_places(places: Iterable[Place]) -> set[tuple[str, int]]:
    seen: dict[tuple[str, int], set[str]] = {}
    for one in places:
        seen.setdefault((one.task, one.length_tokens), set()).add(one.data)
    return {key for key, found in seen.items() if len(found) > 1}


def _score(row: Row) -> str:
    if row.score is None:
        return f"- ({row.errors} errors)"
    return f"{row.score:.2f} ({row.score_low_95:.1f} to {row.score_high_95:.1f})"


def _mean(cells: Mapping[Place, Digest], places: Sequence[Place]) -> str:
    known = [one.row.score for place in places if (one := cells.get(place)) is not None]
    scores = [one for one in known if one is not None]
    return f"{sum(scores) / len(scores):.2f}" if scores else "-"


def _cells(count: int) -> str:
    return f"{count} {'cell' if count == 1 else 'cells'}"


def _setups(joined: Joined) -> Section:
    common = joined.common
    base = next(iter(joined.cells))
    rows = []
    for setup, cells in joined.cells.items():
        parts = list(joined.differences.get(setup, {}).values())
        whole = None if setup == base else mean_difference(parts)
        rows.append(
            [
                joined.titles[setup],
                setup.policy,
                str(len(cells)),
                _mean(cells, common),
                "" if setup == base else "-" if whole is None else whole.text(),
                str(sum(one.points > 0 and one.is_clear for one in parts)),
                str(sum(one.points < 0 and one.is_clear for one in parts)),
            ]
        )
    shared = f"over {_cells(len(common))} that all have" if common else "no cell is common to all"
    text = (
        f"Mean: {shared}. Difference: the mean over all cells in "
        f"common with {joined.titles[base]}, with its 95% interval; ▲ and ▼ stand only where that "
        "excludes zero."
    )
    columns = ["", "policy", "cells", "mean", "difference", "cells better", "cells worse"]
    return Section("Backends and settings", text, columns, rows)


def _by_policy(joined: Joined) -> Section:
    policies = list(dict.fromkeys(one.policy for one in joined.cells))
    models = list(dict.fromkeys((one.model, one.weights) for one in joined.cells))
    names = [name for name, _ in models]
    common = joined.common
    rows = []
    for model, weights in models:
        name = f"{model} ({weights})" if names.count(model) > 1 else model
        cells = []
        for policy in policies:
            setups = [
                own
                for setup, own in joined.cells.items()
                if (setup.model, setup.weights, setup.policy) == (model, weights, policy)
            ]
            means = [_mean(own, common) for own in setups]
            spread = sorted(float(one) for one in means if one != "-")
            cells.append(
                "-"
                if not spread
                else means[0]
                if spread[0] == spread[-1]
                else f"{spread[0]:.2f} to {spread[-1]:.2f} ({len(spread)} setups)"
            )
        rows.append([name, *cells])
    text = f"Mean score over {_cells(len(common))} that all have."
    return Section("Models by policy", text, ["model", *policies], rows)


def _clear_differences(joined: Joined) -> Section:
    found = list(all_differences(joined))
    clear = [one for one in found if one[3].is_clear]
    clear.sort(key=lambda one: -abs(one[3].points))
    base = joined.titles[next(iter(joined.cells))]
    text = (
        f"Against {base}: {len(clear)} of {len(found)} compared cells differ by more than chance "
        "explains (95% interval excludes zero; of cells that do not differ, up to 5 in 100 are "
        "marked)."
    )
    if len(clear) > LISTED:
        text += f" The largest {LISTED} follow, all are in {DIFFERENCES}."
    rows = [
        [
            joined.titles[setup],
            place.task,
            str(place.length_tokens),
            one.text(),
            f"{one.samples} {'pairs' if one.is_paired else 'samples, not paired'}",
        ]
        for setup, _, place, one in clear[:LISTED]
    ]
    return Section("What differs", text, ["", "task", "length", "difference", "over"], rows)


def all_differences(joined: Joined) -> Iterator[tuple[Setup, Setup, Place, Difference]]:
    """Yield every setup's differences from the first: setup, base, samples, difference."""
    base = next(iter(joined.cells))
    for setup, cells in joined.differences.items():
        for place, found in cells.items():
            yield setup, base, place, found


# --- files --------------------------------------------------------------------------------------


def markdown(title: str, notes: Sequence[str], found: Sequence[Section]) -> str:
    """Return the tables as Markdown, ready to paste."""
    parts = [f"# {markdown_cell(title, None)}"]
    if notes:
        parts.append("\n".join(f"- {markdown_cell(note, None)}" for note in notes))
    for one in found:
        parts.append(f"## {markdown_cell(one.title)}")
        if one.text:
            parts.append(markdown_cell(one.text, None))
        if one.rows:
            cells = [[markdown_cell(cell) for cell in row] for row in one.rows]
            parts.append(markdown_table([markdown_cell(name) for name in one.columns], cells))
    return "\n\n".join(parts) + "\n"


def write_cells(path: Path, digests: Iterable[Digest]) -> None:
    """Write a line a cell, for pandas: the fields of Row, then policy, fingerprints and folder."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        names = [field.name for field in dataclasses.fields(Row)]
        writer.writerow([*names, "policy", "data_fingerprint", "model_fingerprint", "folder"])
        for one in digests:
            more = (policy_of(one), data_of(one), model_of(one), one.folder)
            writer.writerow(map(csv_cell, (*dataclasses.astuple(one.row), *more)))


def write_differences(path: Path, joined: Joined) -> None:
    """Write a line for each cell and setup that is compared with the first."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            ["task", "length_tokens", "data_fingerprint", "setup", "against", "difference",
             "low_95", "high_95", "samples", "is_paired", "is_clear"]
        )  # fmt: skip
        for setup, base, place, one in all_differences(joined):
            names = (place.task, place.length_tokens, place.data, setup.title, base.title)
            figures = (one.points, one.low, one.high, one.samples, one.is_paired, one.is_clear)
            writer.writerow(map(csv_cell, (*names, *figures)))
