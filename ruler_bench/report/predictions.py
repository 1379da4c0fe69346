"""Predictions in the reference's own files, so that its tools and others can read a run.

Source of the formats: https://github.com/NVIDIA/RULER/blob/c3f5e3b/scripts/pred/call_api.py (one
object a line) and https://github.com/NVIDIA/RULER/blob/c3f5e3b/scripts/eval/evaluate.py (summary).
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruler_bench.records import Record
from ruler_bench.report.rows import Run, finished
from ruler_bench.score import cell_score, is_null
from ruler_bench.tasks.sample import Sample

FOLDER = "predictions"
NOT_TRUNCATED = -1


def write_predictions(folder: Path, run: Run, samples: Iterable[Sample]) -> None:
    """Write predictions/<task>.jsonl and predictions/summary-<task>.csv into a run folder.

    Samples that failed in the engine are left out: the reference has no place for them. `index`
    is the ordinal; the reference writes the answer's character offset there by mistake.

    Args:
        folder: the run folder.
        run: the records of one arm.
        samples: at least those of the finished records.

    Raises:
        KeyError: the sample of a finished record is missing.
        OSError: the folder cannot be written, or the disk is full.
    """
    task = run.manifest["task"]
    records = sorted(finished(run), key=lambda record: record.ordinal)
    by_ordinal = {sample.ordinal: sample for sample in samples}
    target = folder / FOLDER
    target.mkdir(exist_ok=True)
    with (target / f"{task}.jsonl").open("w", encoding="utf-8", newline="\n") as file:
        for record in records:
            file.write(_line(record, by_ordinal[record.ordinal]))
    scored = _scored(task, run.manifest["metric"], records)
    write_reference_summary(target / f"summary-{task}.csv", [scored])


def _line(record: Record, sample: Sample) -> str:
    row: dict[str, Any] = {
        "index": record.ordinal,
        "pred": record.output,
        "input": sample.prompt,
        "outputs": list(sample.outputs),
        "others": {},
        "truncation": NOT_TRUNCATED,
        "length": sample.length,
    }
    return json.dumps(row) + "\n"


@dataclass(frozen=True, slots=True)
class Scored:
    """What the reference's summary says of a task."""

    task: str
    score: float
    nulls: int
    samples: int


def _scored(task: str, metric: str, records: Sequence[Record]) -> Scored:
    outputs = [record.output or "" for record in records]
    expected = [record.expected for record in records]
    # The reference scores nothing as 0.
    score = cell_score(metric, outputs, expected) if records else 0.0
    return Scored(task, score, sum(is_null(output) for output in outputs), len(outputs))


def write_reference_summary(path: Path, tasks: Sequence[Scored]) -> None:
    """Write the reference's summary of some tasks: a column each.

    Raises:
        OSError: the file cannot be written, or the disk is full.
    """
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(
            [
                # The first line is what pandas writes for columns without names.
                range(len(tasks) + 1),
                ["Tasks", *(one.task for one in tasks)],
                ["Score", *(one.score for one in tasks)],
                ["Nulls", *(f"{one.nulls}/{one.samples}" for one in tasks)],
            ]
        )
