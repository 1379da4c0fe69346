"""Runs as pandas frames: `from ruler_bench import load_records, compare`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from ruler_bench.errors import UsageError
from ruler_bench.journal import read_run
from ruler_bench.records import Record
from ruler_bench.report.difference import difference
from ruler_bench.report.digest import Digest
from ruler_bench.report.gather import check_version, gather, run_folders
from ruler_bench.report.joined import Joined, Place, all_differences, join, scores_of

Runs = str | Path | Sequence[str | Path]
"""Run folders, folders above them, or patterns."""

FIELDS = tuple(field.name for field in dataclasses.fields(Record))
OF_THE_RUN = ("run", "backend", "model", "data_fingerprint", "model_fingerprint")
COMPARED = (
    "task",
    "length_tokens",
    "data_fingerprint",
    "a",
    "b",
    "score_a",
    "score_b",
    "difference",
    "low_95",
    "high_95",
    "samples",
    "is_paired",
    "is_clear",
)


def load_records(runs: Runs) -> pd.DataFrame:
    """Return a line for each record of the runs.

    Args:
        runs: run folders, folders above them, or patterns such as "results/niah_*".

    Returns:
        The columns of OF_THE_RUN, of which `run` is the folder, then the fields of
        `ruler_bench.records.Record` under their names: `score` is 0 to 100, times are in seconds,
        what an engine cannot tell is missing. Lists, such as `output_tokens`, are
        tuples.

    Raises:
        UsageError: there is no run, or one is damaged or of another version.
    """
    columns: dict[str, list[object]] = {name: [] for name in (*OF_THE_RUN, *FIELDS)}
    for folder in run_folders(_names(runs)):
        check_version(folder)
        run = read_run(folder)
        if run is None:
            continue
        of_run = (
            str(folder),
            run.manifest["backend"],
            run.manifest["model"],
            (run.manifest.get("data") or {}).get("fingerprint"),
            run.manifest.get("model_fingerprint"),
        )
        for name, value in zip(OF_THE_RUN, of_run, strict=True):
            columns[name] += [value] * len(run.records)
        for name in FIELDS:
            columns[name] += [getattr(one, name) for one in run.records]
    return pd.DataFrame(columns)


def compare(a: Runs, b: Runs | None = None) -> pd.DataFrame:
    """Return how the scores of `b` differ from those of `a`, a line for each pair of cells.

    Cells are compared where task, length, samples and arm are the same, whatever the backend, the
    model and the settings. Samples that both have are compared in pairs.

    Args:
        a: runs, as for `load_records`.
        b: other runs; None compares what `a` holds (arms, backends, settings) with the first of it.

    Returns:
        The columns of COMPARED: `a` and `b` name what answered, scores are 0 to 100, `difference`
        is in points, b less a, with a 95% interval; `is_clear` tells whether that excludes zero,
        `samples` how many pairs there are (answers of the smaller side where not `is_paired`).

    Raises:
        UsageError: there is no run, one is damaged, or no cell is in both.
    """
    rows = list(_within(join(gather(_names(a)).digests)) if b is None else _between(a, b))
    if not rows and b is not None:
        raise UsageError(
            "no cell is in both; compare runs of the same tasks, lengths, samples and arms."
        )
    return pd.DataFrame(rows, columns=list(COMPARED))


def _names(runs: Runs) -> list[str]:
    return [str(runs)] if isinstance(runs, str | Path) else [str(one) for one in runs]


def _within(joined: Joined) -> Iterator[tuple[object, ...]]:
    for setup, base, place, found in all_differences(joined):
        own, other = joined.cells[setup][place], joined.cells[base][place]
        yield (
            *dataclasses.astuple(place),
            joined.titles[base],
            joined.titles[setup],
            other.row.score,
            own.row.score,
            *dataclasses.astuple(found),
            found.is_clear,
        )


def _between(a: Runs, b: Runs) -> Iterator[tuple[object, ...]]:
    first, second = join(gather(_names(a)).digests), join(gather(_names(b)).digests)
    known: dict[tuple[Place, str], list[tuple[str, Digest]]] = {}
    for setup, cells in first.cells.items():
        for place, one in cells.items():
            known.setdefault((place, setup.arm), []).append((setup.title, one))
    for setup, cells in second.cells.items():
        for place, one in cells.items():
            for title, other in known.get((place, setup.arm), []):
                found = difference(scores_of(one), scores_of(other))
                if found is not None:
                    yield (
                        *dataclasses.astuple(place),
                        title,
                        setup.title,
                        other.row.score,
                        one.row.score,
                        *dataclasses.astuple(found),
                        found.is_clear,
                    )
