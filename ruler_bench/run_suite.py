"""Runs the cells of one command in order; those of a suite after all of them were checked.

What a suite leaves, beside the folder of each task: suite.json (what it is), and at its end a
report over all tasks.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from backends.base import ConfigurationError
from ruler_bench import manifest
from ruler_bench.bench import check_cell, prepared
from ruler_bench.cell import Cell
from ruler_bench.engines import new_life
from ruler_bench.errors import UsageError, one_line
from ruler_bench.kept import Kept
from ruler_bench.leak.arms import in_running_order, kind_of
from ruler_bench.lives import Life
from ruler_bench.progress import Progress, shown
from ruler_bench.progress.job import current_job
from ruler_bench.report import Run, write_page, write_reports
from ruler_bench.run import INTERRUPTED, Outcome, run_cell
from ruler_bench.suites import PER_SUITE, Suite

SUITE_FILE = "suite.json"
FORMAT_VERSION = 1

Ran = tuple[Cell, Outcome | ConfigurationError]


def run_cells(cells: Sequence[Cell], overwrite: bool = False) -> Iterator[Ran]:
    """Run cells and yield what became of each, in order; one that is refused stops no other.

    Args:
        cells: of one command: one a length, or one a length and task of a suite.
        overwrite: start their folders anew.

    Raises:
        UsageError: a task of a suite cannot run; nothing was started, and each reason was printed.
    """
    runs = len(cells)
    if cells[0].suite is not None and cells[0].suite.engine_per == PER_SUITE:
        runs *= len(passes(cells[0].arms))
    with shown(cells[0], runs, current_job()) as progress:
        yield from _run_cells(cells, overwrite, progress)


def _run_cells(cells: Sequence[Cell], overwrite: bool, progress: Progress) -> Iterator[Ran]:
    suite = cells[0].suite
    if suite is None:
        for cell in cells:
            yield cell, _outcome(cell, overwrite, progress)
        return
    check_suite_folder(suite.folder)
    contexts = check_all(cells, overwrite, progress)
    cells = [replace(cell, good_length_tokens=None) for cell in cells]  # it was said
    with manifest.owned_folder(suite.folder):
        write_suite_file(suite, cells)
        for length, of_length in groupby(cells, key=lambda cell: cell.length):
            if suite.engine_per == PER_SUITE:
                yield from _on_one_engine(list(of_length), overwrite, contexts[length], progress)
            else:
                yield from _one_by_one(of_length, overwrite, progress)


def _outcome(cell: Cell, overwrite: bool, progress: Progress) -> Outcome | ConfigurationError:
    try:
        return run_cell(cell, overwrite, progress=progress)
    except ConfigurationError as error:
        return error


def _one_by_one(cells: Iterator[Cell], overwrite: bool, progress: Progress) -> Iterator[Ran]:
    """Run the tasks of one length; where the first engine cannot start, no other will."""
    for number, cell in enumerate(cells):
        outcome = _outcome(cell, overwrite, progress)
        yield cell, outcome
        if isinstance(outcome, ConfigurationError) and number == 0:
            return


def check_all(cells: Sequence[Cell], overwrite: bool, progress: Progress) -> dict[int, int]:
    """Make the samples of every task, and check all that shows without an engine.

    Returns:
        For each length the context in tokens that suits all of its tasks.

    Raises:
        UsageError: a task cannot run; what is wrong with each was printed, a line each.
    """
    contexts: dict[int, int] = {}
    refused: list[tuple[Cell, str]] = []
    for cell in cells:
        good = None if cell.length in contexts else cell.good_length_tokens
        try:
            model = check_cell(replace(cell, good_length_tokens=good))
            manifest.check_folder(cell.folder)
            # The samples are not kept: those of all tasks may not fit the memory.
            with progress.making_samples(cell):
                tokens = prepared(cell, model, overwrite, only_look=True).context_tokens
            contexts[cell.length] = max(tokens, contexts.get(cell.length, 0))
        except ConfigurationError as error:
            refused.append((cell, one_line(error)))
    reasons = list(dict.fromkeys(reason for _, reason in refused))
    if len(reasons) == 1:  # such as a wrong setting, which every task has
        raise UsageError(reasons[0])
    for cell, reason in refused:
        print(f"error: {cell.task.name} at {cell.length}: {reason}", file=sys.stderr)
    if refused:
        names = ", ".join(dict.fromkeys(cell.task.name for cell, _ in refused))
        raise UsageError(
            f"nothing was run: {len(refused)} of {len(cells)} tasks cannot ({names}); see above."
        )
    return contexts


def check_suite_folder(folder: Path) -> None:
    """Refuse a folder that holds something else than a suite.

    Raises:
        UsageError: names what stands there.
    """
    try:
        names = {one.name for one in folder.iterdir()} if folder.is_dir() else set()
    except OSError as error:
        raise UsageError(f"{folder}: cannot be read ({error.strerror}).") from error
    if manifest.MANIFEST in names:
        raise UsageError(
            f"out={folder}: holds a run of one task; choose another folder for the suite."
        )
    others = names - {manifest.LOCK}
    if others and SUITE_FILE not in names:
        raise UsageError(
            f"out={folder}: holds files that no suite wrote ({min(others)}); choose an empty or "
            "new folder."
        )


def write_suite_file(suite: Suite, cells: Sequence[Cell]) -> None:
    """Write what the suite is, so that its folder can be told from others.

    Raises:
        UsageError: the folder cannot be written.
    """
    content = {
        "format_version": FORMAT_VERSION,
        "suite": suite.name,
        "engine_per": suite.engine_per,
        "tasks": list(suite.tasks),
        "lengths": list(dict.fromkeys(cell.length for cell in cells)),
        "command": manifest.command(),
    }
    path = suite.folder / SUITE_FILE
    try:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror}).") from error


def write_suite_report(suite: Suite, runs: Sequence[Run]) -> bool:
    """Write the report over all tasks; a full disk is said.

    Returns:
        Whether it was written.
    """
    try:
        write_reports(suite.folder, runs)
        write_page(suite.folder, runs)
    except OSError as error:
        print(
            f"error: could not write the report in {suite.folder}: {one_line(error)}. What was "
            "recorded is kept; make room and run the same command again.",
            file=sys.stderr,
        )
        return False
    return True


# --- one engine for all tasks -------------------------------------------------------------------


def passes(arms: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the arms that each pass through the tasks asks, so that one engine lives at a time.

    An arm of one engine has a pass of its own; arms with an engine for each sample come last.
    """
    ordered = in_running_order(arms)
    warm: list[tuple[str, ...]] = [(one,) for one in ordered if not kind_of(one).is_fresh]
    fresh = tuple(one for one in ordered if kind_of(one).is_fresh)
    return [*warm, fresh] if fresh else warm


def _on_one_engine(
    cells: Sequence[Cell], overwrite: bool, context_tokens: int, progress: Progress
) -> Iterator[Ran]:
    """Run all tasks of one length, arm by arm, and yield the outcomes of the last pass."""
    last: list[Ran] = []
    settled: tuple[str, ...] = ()
    for arms in passes(cells[0].arms):
        last = []
        anew = overwrite and not settled
        for cell, outcome in _pass(cells, (settled, arms), anew, context_tokens, progress):
            last.append((cell, outcome))
            # After a task that was not asked, others would not meet the engine that they should.
            if not isinstance(outcome, Outcome) or outcome.status == INTERRUPTED:
                yield from last
                return
        settled += arms
    yield from last


def _pass(
    cells: Sequence[Cell],
    arms_of_pass: tuple[tuple[str, ...], tuple[str, ...]],
    overwrite: bool,
    context_tokens: int,
    progress: Progress,
) -> Iterator[Ran]:
    """Ask the engine of one arm every task, or new engines those of the last arms.

    Arms are those that earlier passes asked, and those of this one.
    """
    settled, arms = arms_of_pass
    shared = {"max_model_len": context_tokens, "run_folder": str(cells[0].folder.parent)}
    with closing(Kept(functools.partial(new_life, cells[0]))) as kept:

        def lend(settings: Mapping[str, Any], harness: Mapping[str, Any]) -> Life:
            return kept(settings, {**harness, **shared})

        for cell in cells:
            so_far = replace(cell, arms=(*settled, *arms))
            try:
                yield cell, run_cell(so_far, overwrite, lend, settled, progress)
            except ConfigurationError as error:
                yield cell, error
