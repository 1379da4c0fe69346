"""What RULER makes of the scores of its tasks: means by family, of all thirteen, over lengths.

https://github.com/NVIDIA/RULER/blob/c3f5e3b/README.md: a model's figure at a length is the plain
mean of thirteen tasks; its averages are over six lengths, plain, and weighted 1 to 6 towards the
long ones (inc) or the short ones (dec); its effective length is the last one at which it reaches
what Llama-2-7B has at 4K. The families are those of the paper, https://arxiv.org/abs/2404.06654.
"""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tabulate import tabulate

from ruler_bench.errors import UsageError
from ruler_bench.report.rows import Row, Run, build_rows
from ruler_bench.report.text import csv_cell, human_number, markdown_cell, visible

FAMILIES = {
    "retrieval": (
        *(f"niah_single_{number}" for number in (1, 2, 3)),
        *(f"niah_multikey_{number}" for number in (1, 2, 3)),
        "niah_multivalue",
        "niah_multiquery",
    ),
    "tracing": ("vt",),
    "aggregation": ("cwe", "fwe"),
    "qa": ("qa_1", "qa_2"),
}
TASKS = tuple(task for family in FAMILIES.values() for task in family)
LENGTHS_TOKENS = (4096, 8192, 16384, 32768, 65536, 131072)
EFFECTIVE = 85.6
MEANS, AVERAGES = "means.csv", "averages.csv"


@dataclass(frozen=True, slots=True)
class MeanRow:
    """The tasks of one length together; the fields are the columns of means.csv.

    Attributes:
        backend, model, arm, settings: as in the rows of its tasks.
        length_tokens: which length.
        tasks: how many of RULER's tasks have a score, at the settings of their own files.
        samples, errors, nulls, truncated: of these tasks together.
        retrieval, tracing, aggregation, qa: mean score of each family; None where a task is
            missing.
        mean_13: mean score of all thirteen; None where one is missing.
    """

    backend: str
    model: str
    arm: str | None
    settings: str
    length_tokens: int
    tasks: int
    samples: int
    errors: int
    nulls: int
    truncated: int
    retrieval: float | None
    tracing: float | None
    aggregation: float | None
    qa: float | None
    mean_13: float | None


@dataclass(frozen=True, slots=True)
class AverageRow:
    """All lengths together; the fields are the columns of averages.csv.

    Attributes:
        backend, model, arm, settings: as in the rows of its tasks.
        lengths: how many lengths have a mean of thirteen tasks.
        average, wavg_inc, wavg_dec: over RULER's six lengths; None where one is missing.
        effective_length_tokens: the last length whose mean is at least EFFECTIVE, as text: "<4096"
            where even the shortest one asked is below, ">=8192" where the longest one asked is not.
    """

    backend: str
    model: str
    arm: str | None
    settings: str
    lengths: int
    average: float | None
    wavg_inc: float | None
    wavg_dec: float | None
    effective_length_tokens: str


def mean_of(scores: Mapping[str, float], tasks: Sequence[str]) -> float | None:
    """Return the mean score of tasks with two decimals, None where one of them has no score."""
    if any(task not in scores for task in tasks):
        return None
    return round(sum(scores[task] for task in tasks) / len(tasks), 2)


def averages(means: Mapping[int, float]) -> tuple[float, float, float] | None:
    """Return average, wAvg (inc) and wAvg (dec) of the means by length; None where one is missing.

    Lengths beside RULER's six do not count.
    """
    if any(length not in means for length in LENGTHS_TOKENS):
        return None
    values = [means[length] for length in LENGTHS_TOKENS]
    rising = range(1, len(values) + 1)
    falling = range(len(values), 0, -1)
    return (
        _weighted(values, [1] * len(values)),
        _weighted(values, rising),
        _weighted(values, falling),
    )


def _weighted(values: Sequence[float], weights: Sequence[int]) -> float:
    products = (weight * value for weight, value in zip(weights, values, strict=True))
    return round(sum(products) / sum(weights), 2)


def effective_length(means: Mapping[int, float]) -> str:
    """Return the last length whose mean is at least EFFECTIVE, see `AverageRow`.

    Raises:
        ValueError: there is no mean.
    """
    enough = [length for length, mean in means.items() if mean >= EFFECTIVE]
    if not enough:
        return f"<{min(means)}"
    return f">={max(enough)}" if max(enough) == max(means) else str(max(enough))


def mean_rows(runs: Sequence[Run], rows: Sequence[Row]) -> list[MeanRow]:
    """Return a row for each length of each engine, in the order of the runs.

    A task with other parameters than in its own file is another task, and does not count; nor does
    one of which there are several runs.

    Args:
        runs: one arm each.
        rows: of each.
    """
    groups: dict[tuple[Engine, int], list[Row]] = {}
    for run, row in zip(runs, rows, strict=True):
        if is_rulers_own(run.manifest):
            groups.setdefault((_engine(row), row.length_tokens), []).append(row)
    return [_mean_row(engine, length, group) for (engine, length), group in groups.items()]


class Engine(NamedTuple):
    """What tables call an engine."""

    backend: str
    model: str
    arm: str | None
    settings: str


def _engine(row: Row | MeanRow) -> Engine:
    return Engine(row.backend, row.model, row.arm, row.settings)


def _mean_row(engine: Engine, length_tokens: int, group: Sequence[Row]) -> MeanRow:
    names = [row.task for row in group]
    counted = [row for row in group if names.count(row.task) == 1]
    scores = {row.task: row.score for row in counted if row.score is not None}
    return MeanRow(
        backend=engine.backend,
        model=engine.model,
        arm=engine.arm,
        settings=engine.settings,
        length_tokens=length_tokens,
        tasks=len(scores),
        samples=sum(row.samples for row in counted),
        errors=sum(row.errors for row in counted),
        nulls=sum(row.nulls for row in counted),
        truncated=sum(row.truncated for row in counted),
        retrieval=mean_of(scores, FAMILIES["retrieval"]),
        tracing=mean_of(scores, FAMILIES["tracing"]),
        aggregation=mean_of(scores, FAMILIES["aggregation"]),
        qa=mean_of(scores, FAMILIES["qa"]),
        mean_13=mean_of(scores, TASKS),
    )


def is_rulers_own(manifest: Mapping[str, Any]) -> bool:
    """Tell whether a run's task is one of the thirteen, with the parameters of its own file."""
    from ruler_bench.config import config_dir  # noqa: PLC0415 (it takes hydra)
    from ruler_bench.suites import task_from_file  # noqa: PLC0415

    if manifest["task"] not in TASKS:
        return False
    asked = (manifest.get("config") or {}).get("task")
    try:
        own = dataclasses.asdict(task_from_file(config_dir(), manifest["task"]))
    except UsageError:  # somebody's own configuration folder
        return False
    return asked is None or asked == json.loads(json.dumps(own))


def average_rows(means: Sequence[MeanRow]) -> list[AverageRow]:
    """Return a row for each engine that has a mean of thirteen tasks at some length."""
    groups: dict[Engine, dict[int, float]] = {}
    for row in means:
        if row.mean_13 is not None:
            groups.setdefault(_engine(row), {})[row.length_tokens] = row.mean_13
    found = []
    for engine, by_length in groups.items():
        average, inc, dec = averages(by_length) or (None, None, None)
        effective = effective_length(by_length)
        found.append(AverageRow(*engine, len(by_length), average, inc, dec, effective))
    return found


def tell_something(means: Sequence[MeanRow]) -> bool:
    """Tell whether there is a mean over more than one task."""
    return any(
        one is not None
        for row in means
        for one in (row.retrieval, row.aggregation, row.qa, row.mean_13)
    )


# --- files and tables ---------------------------------------------------------------------------

LEGEND = (
    "Families: retrieval (eight needle tasks), tracing (vt), aggregation (cwe, fwe), qa (qa_1, "
    "qa_2). A mean is there only where all of its tasks are, at RULER's settings. The averages are "
    "over RULER's six lengths; inc weighs them 1 to 6 towards the long ones, dec towards the short "
    f"ones. Effective length: the last one with a mean of at least {EFFECTIVE}."
)


def write_means(folder: Path, runs: Sequence[Run], rows: Sequence[Row]) -> None:
    """Write means.csv and averages.csv where there is a mean to tell; remove older ones.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    means = mean_rows(runs, rows)
    averaged = average_rows(means)
    _write(folder / MEANS, MeanRow, means if tell_something(means) else [])
    _write(folder / AVERAGES, AverageRow, averaged)


def _write(path: Path, kind: type[MeanRow | AverageRow], rows: Iterable[Any]) -> None:
    lines = [dataclasses.astuple(row) for row in rows]
    if not lines:
        path.unlink(missing_ok=True)
        return
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(field.name for field in dataclasses.fields(kind))
        writer.writerows(map(csv_cell, line) for line in lines)


def markdown_means(runs: Sequence[Run], rows: Sequence[Row]) -> str | None:
    """Return the section on means for report.md; None where there is none to tell."""
    tables = _tables(runs, rows)
    if not tables:
        return None
    parts = ["## Means over tasks"]
    for titles, lines in tables:
        cells = [[markdown_cell(cell) for cell in line] for line in lines]
        parts.append(tabulate(cells, headers=titles, tablefmt="github", disable_numparse=True))
    return "\n\n".join([*parts, LEGEND])


def terminal_means(runs: Sequence[Run]) -> str | None:
    """Return the means for a terminal; None where there is none to tell."""
    rows = build_rows(runs)
    tables = [
        tabulate(
            [[visible(cell) for cell in line] for line in lines],
            headers=titles,
            tablefmt="simple",
            disable_numparse=True,
        )
        for titles, lines in _tables(runs, rows)
    ]
    return "\n\n".join(tables) or None


Table = tuple[list[str], list[list[str]]]
"""Titles and cells."""


def _tables(runs: Sequence[Run], rows: Sequence[Row]) -> list[Table]:
    """Return the table of means, and that of averages where there is one."""
    means = mean_rows(runs, rows)
    if not tell_something(means):
        return []
    names = ["backend", "model", "arm", *["settings"] * any(row.settings for row in means)]
    averaged = average_rows(means)
    tables = [_table(names, means, MEAN_COLUMNS)]
    return [*tables, _table(names, averaged, AVERAGE_COLUMNS)] if averaged else tables


MEAN_COLUMNS = {
    "length": "length_tokens",
    **{one: one for one in ("tasks", "samples", "errors", "nulls", "truncated", *FAMILIES)},
    "mean of 13": "mean_13",
}
AVERAGE_COLUMNS = {
    "lengths": "lengths",
    "average": "average",
    "wAvg (inc)": "wavg_inc",
    "wAvg (dec)": "wavg_dec",
    "effective length": "effective_length_tokens",
}


def _table(
    names: Sequence[str], rows: Sequence[MeanRow | AverageRow], columns: Mapping[str, str]
) -> Table:
    fields = [*names, *columns.values()]
    return [*names, *columns], [[_cell(getattr(row, one)) for one in fields] for row in rows]


def _cell(value: str | float | None) -> str:
    if value is None or value == "":
        return "-"
    return human_number(value, 2) if isinstance(value, float) else str(value)
