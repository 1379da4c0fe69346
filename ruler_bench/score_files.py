"""`python -m ruler_bench.score FILES`: the score of prediction files, without an engine.

    python -m ruler_bench.score results/RUN/predictions/niah_single_1.jsonl
    python -m ruler_bench.score pred/*.jsonl --out DIR
    python -m ruler_bench.score answers.jsonl --task qa_1

Each line of a file is an object with pred and outputs, as the reference's call_api.py and our own
runs write them. The task, which decides the rule, is the file's name (niah_single_1.jsonl; chunks
such as niah_single_1-0.jsonl and -1.jsonl in one folder count together), or --task. --out writes
the reference's summary.csv. The scores are those of the reference's evaluate.py, to two decimals.

Exit status: 0, or 2 for wrong usage.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from ruler_bench.command_line import Parser, status_of
from ruler_bench.config import config_dir
from ruler_bench.errors import UsageError
from ruler_bench.leak.files import json_rows
from ruler_bench.report.means import FAMILIES, TASKS, mean_of
from ruler_bench.report.predictions import Scored, write_reference_summary
from ruler_bench.report.text import visible
from ruler_bench.score import cell_score, is_null
from ruler_bench.suites import task_from_file, task_names

_CHUNK = re.compile(r"(.*[^_])-\d+")
"""How the reference names the parts of a task's predictions."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to score.

    Attributes:
        files: of predictions.
        task: of all of them, or None where their names tell.
        out: folder for the reference's summary, or None.
    """

    files: tuple[Path, ...]
    task: str | None
    out: Path | None


@dataclass(frozen=True, slots=True)
class Predictions:
    """The answers to one task.

    Attributes:
        task: its name.
        files: where they are from, one folder.
        outputs: as predicted.
        expected: the references of each.
        notes: what is to be said about them.
    """

    task: str
    files: tuple[Path, ...]
    outputs: tuple[str, ...]
    expected: tuple[tuple[str | None, ...], ...]
    notes: tuple[str, ...]

    def scored(self) -> Scored:
        """Score them by the rule of the task."""
        metric = task_from_file(config_dir(), self.task).metric
        nulls = sum(is_null(output) for output in self.outputs)
        score = cell_score(metric, self.outputs, self.expected)
        return Scored(self.task, score, nulls, len(self.outputs))


def main() -> int:
    """Run the command line in sys.argv and return the exit status."""
    return status_of(lambda: run(parse(sys.argv[1:])))


def run(options: Options) -> int:
    """Score the files, print the table, write the summary where asked for, and return 0.

    Raises:
        UsageError: a file cannot be read or scored.
    """
    found = read_predictions(options)
    scored = [one.scored() for one in found]
    for note in (note for one in found for note in one.notes):
        print(f"note: {note}", file=sys.stderr)
    print(table(found, scored))
    if options.out is not None:
        print(f"Summary: {write_summary(options.out, scored)}")
    return 0


def parse(arguments: Sequence[str]) -> Options:
    """Check the command line.

    Raises:
        UsageError: it is wrong.
    """
    parser = Parser("score", __doc__, "FILE [...] [--task NAME] [--out DIR]")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="TASK.jsonl")
    parser.add_argument("--task", metavar="NAME", help="the task, where file names do not tell")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the reference's summary")
    read = parser.parse_args(arguments)
    return Options(tuple(read.files), read.task, read.out)


def read_predictions(options: Options) -> list[Predictions]:
    """Read the files, chunks of a task in one folder together, in the order given.

    Raises:
        UsageError: a file is missing, damaged or named twice, or its task is not known.
    """
    groups: dict[tuple[Path, str], list[Path]] = {}
    for path in options.files:
        if not path.is_file():
            what = "is a folder; name its files" if path.is_dir() else "there is no such file"
            raise UsageError(f"{path}: {what}, such as niah_single_1.jsonl.")
        chunk = _CHUNK.fullmatch(path.stem)
        key = (path.parent, chunk[1] if chunk else path.name)
        groups.setdefault(key, []).append(path)
    return [_read(sorted(paths), options.task) for paths in groups.values()]


def _read(paths: Sequence[Path], task: str | None) -> Predictions:
    if len({path.resolve() for path in paths}) < len(paths):
        raise UsageError(f"{paths[0]}: is given twice.")
    name = _task_name(paths[0], task)
    outputs: list[str] = []
    expected: list[tuple[str | None, ...]] = []
    notes = _other_name(paths[0], name)
    for path in paths:
        rows, said = json_rows(path)
        notes += said
        for number, row in enumerate(rows, start=1):
            where = f"{path} line {number}"
            outputs.append(_prediction(where, row))
            expected.append(_references(where, row))
        if any(isinstance(row.get("outputs"), str) for row in rows):
            notes.append(
                f"{path}: outputs is text in some lines and counts as one reference; the "
                "reference's scorer would look for each of its letters."
            )
    return Predictions(name, tuple(paths), tuple(outputs), tuple(expected), tuple(notes))


def _task_name(path: Path, task: str | None) -> str:
    chunk = _CHUNK.fullmatch(path.stem)
    try:
        return task_from_file(config_dir(), task or (chunk[1] if chunk else path.stem)).name
    except UsageError as error:
        if task is not None:
            raise
        raise UsageError(f"{path}: its name tells no task ({error}) Say it with --task.") from error


def _other_name(path: Path, task: str) -> list[str]:
    """Return a note where a file's name says another task than the one whose rule is taken."""
    chunk = _CHUNK.fullmatch(path.stem)
    told = chunk[1] if chunk else path.stem
    if told == task or told not in task_names(config_dir()):
        return []
    return [f"{path}: its name says {told}; it is scored by the rule of {task}, as --task asks."]


def _prediction(where: str, row: Mapping[str, Any]) -> str:
    if "pred" not in row:
        raise UsageError(
            f"{where}: has no pred; predictions have pred and outputs (found: "
            f"{', '.join(sorted(map(str, row))[:6])})."
        )
    if not isinstance(row["pred"], str):
        raise UsageError(f"{where}: pred is {_kind(row['pred'])}; must be text.")
    return str(row["pred"])


def _references(where: str, row: Mapping[str, Any]) -> tuple[str | None, ...]:
    """Return the references; like the reference, those of `output` where there is no `outputs`."""
    if "outputs" not in row and "output" not in row:
        raise UsageError(f"{where}: has no outputs, the answers that are expected.")
    value = row["outputs"] if "outputs" in row else [row["output"]]
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not values:
        what = "empty" if values == [] else _kind(values)
        raise UsageError(f"{where}: outputs is {what}; must be a list of at least one text.")
    for one in values:
        if one is not None and not isinstance(one, str):
            raise UsageError(f"{where}: outputs holds {_kind(one)}; must be a list of text.")
    return tuple(values)


def _kind(value: Any) -> str:
    names = {list: "a list", dict: "an object", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


# --- what is told -------------------------------------------------------------------------------


def table(found: Sequence[Predictions], scored: Sequence[Scored]) -> str:
    """Return a line for each task, and the means as far as the tasks go."""
    lines = [
        [one.task, str(one.samples), f"{one.score:.2f}", str(one.nulls), visible(_shown(of))]
        for of, one in zip(found, scored, strict=True)
    ]
    text = tabulate(
        lines,
        headers=["task", "samples", "score", "nulls", "file"],
        tablefmt="simple",
        disable_numparse=True,
    )
    return "\n".join([text, *_mean_lines(found, scored)])


def _shown(found: Predictions) -> str:
    more = len(found.files) - 1
    return f"{found.files[0]}" + (f" and {more} more" if more else "")


def _mean_lines(found: Sequence[Predictions], scored: Sequence[Scored]) -> Iterator[str]:
    """Yield the means over all files, or by folder where a task is there more than once."""
    tasks = [one.task for one in scored]
    is_one_run = len(set(tasks)) == len(tasks)
    groups: dict[str, list[Scored]] = {}
    for of, one in zip(found, scored, strict=True):
        name = "all files" if is_one_run else visible(str(of.files[0].parent))
        groups.setdefault(name, []).append(one)
    for name_of_group, here in groups.items():
        names = [one.task for one in here]
        scores = {one.task: one.score for one in here if names.count(one.task) == 1}
        told = {name: mean_of(scores, group) for name, group in FAMILIES.items() if len(group) > 1}
        told["mean of 13"] = mean_of(scores, TASKS)
        known = [f"{name} {mean:.2f}" for name, mean in told.items() if mean is not None]
        if known:
            yield f"{name_of_group}: {', '.join(known)}"


def write_summary(folder: Path, scored: Sequence[Scored]) -> Path:
    """Write the reference's summary and return its path: summary.csv, of one task summary-TASK.csv.

    Raises:
        UsageError: a task is there twice, or the folder cannot be written.
    """
    tasks = [one.task for one in scored]
    doubled = next((one for one in tasks if tasks.count(one) > 1), None)
    if doubled is not None:
        raise UsageError(
            f"--out {folder}: {doubled} is there twice and has one column; score each set of files "
            "for itself."
        )
    path = folder / (f"summary-{tasks[0]}.csv" if len(tasks) == 1 else "summary.csv")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_reference_summary(path, sorted(scored, key=lambda one: _order(one.task)))
    except OSError as error:
        raise UsageError(f"--out {folder}: cannot be written ({error.strerror}).") from error
    return path


def _order(task: str) -> int:
    return TASKS.index(task) if task in TASKS else len(TASKS)
