"""`python -m ruler_bench`: compose, check, run, report, exit status."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ruler_bench.config import Cell
    from ruler_bench.leak.diagnose import Row
    from ruler_bench.leak.verdict import Verdict
    from ruler_bench.run import Outcome

from backends.base import ConfigurationError
from ruler_bench.cli import (
    GOES_ON,
    INTERRUPTED,
    USAGE_ERROR,
    CellRef,
    JobResult,
    asks_for_multirun,
    choices_and_overrides,
    print_error,
    read_statuses,
    refused,
    run_app,
    swept_keys_override,
)
from ruler_bench.config import cells
from ruler_bench.manifest import now

STATUS_ORDER = (USAGE_ERROR, INTERRUPTED, 3, 4, 5, 6, 1)
SWEEPS = Path("results") / ".sweeps"


def main() -> int:
    """Run the command line in sys.argv and return the exit status."""
    try:
        if any(asks_for_multirun(argument) for argument in sys.argv[1:]):
            return _sweep()
        results = run_app("config", job)
    except ConfigurationError as error:
        print_error(error)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print(GOES_ON, file=sys.stderr)
        return INTERRUPTED
    return worst([result.status for result in results])


def worst(statuses: list[int]) -> int:
    """Return the status of several runs together: the first of STATUS_ORDER that occurs, else 0."""
    return next((status for status in STATUS_ORDER if status in statuses), 0)


def job(config: DictConfig) -> JobResult:
    """Run the cells of one composed configuration and print their table."""
    from ruler_bench.dry_run import describe_cell  # noqa: PLC0415 (--help waits for none of this)
    from ruler_bench.report import failures_summary, terminal_table  # noqa: PLC0415
    from ruler_bench.run import run_cell  # noqa: PLC0415

    choices, overrides, swept = choices_and_overrides()
    planned = cells(config, choices, overrides, swept)
    result, runs = JobResult(0), []
    for cell in planned:
        try:
            if config.dry_run:
                print(describe_cell(cell, config.overwrite))
                continue
            outcome = run_cell(cell, config.overwrite)
        except ConfigurationError as error:
            # The other lengths of a list can still run.
            result.errors += refused(error).errors
            result.status = USAGE_ERROR
            continue
        runs += outcome.runs
        if outcome.diagnosis is not None and swept is None:
            print_diagnosis(outcome.diagnosis)
        if outcome.verdict is not None:
            print_verdict(outcome.verdict, in_full=swept is None)
        elif cell.note:
            print(cell.note)
        if cell.minimise and outcome.verdict is not None and outcome.status != INTERRUPTED:
            outcome = replace(outcome, status=reproduce(cell, outcome))
        result.cells.append(CellRef(str(cell.folder), cell.ordinals))
        result.status = worst([result.status, outcome.status])
        if outcome.status == INTERRUPTED:
            break
    if runs and swept is None:  # a sweep joins the tables of its jobs
        print(terminal_table(runs))
        for line in failures_summary(runs):
            print(line)
    for one in result.cells:
        print(f"Records and report: {one.folder}")
    if result.status == INTERRUPTED:
        print(GOES_ON, file=sys.stderr)
    return result


def print_verdict(verdict: Verdict, in_full: bool) -> None:
    """Print a verdict, of a job in a sweep its sentence alone; report.md has the rest."""
    from ruler_bench.leak.report import terminal_verdict  # noqa: PLC0415 (scipy takes long)

    print(terminal_verdict(verdict) + "\n" if in_full else verdict.sentence)


def reproduce(cell: Cell, outcome: Outcome) -> int:
    """With minimise=true, look for the smallest reproducer; return the status of the whole."""
    from ruler_bench.minimise import after_run  # noqa: PLC0415 (it builds engines)

    assert outcome.verdict is not None
    try:
        after_run(cell, outcome.verdict.verdict)
    except KeyboardInterrupt:
        return INTERRUPTED
    return outcome.status


def print_diagnosis(rows: Sequence[Row]) -> None:
    """Print the answers to the hypotheses."""
    from ruler_bench.leak.diagnose import terminal_diagnosis  # noqa: PLC0415

    print(terminal_diagnosis(rows) + "\n")


def _sweep() -> int:
    """Run every job of a multirun, then join their tables; its folder keeps what each job did."""
    folder = SWEEPS / f"{now().replace(':', '-').removesuffix('+00-00')}_{os.getpid()}"
    sys.argv += [
        f"hydra.sweep.dir={folder}",
        "hydra.sweep.subdir=${hydra.job.num}",
        swept_keys_override(sys.argv[1:]),
    ]
    interrupted = False
    try:
        run_app("config", job)
    except KeyboardInterrupt:
        interrupted = True
    results = read_statuses(folder)
    _join(folder, results)
    return INTERRUPTED if interrupted else worst([result.status for result in results])


def _join(folder: Path, results: list[JobResult]) -> None:
    """Print and write one table of the samples that each job asked for, then what failed."""
    from ruler_bench.journal import by_arm, read_run  # noqa: PLC0415
    from ruler_bench.report import failures_summary, terminal_table, write_reports  # noqa: PLC0415

    read = [read_run(Path(one.folder), one.ordinals) for result in results for one in result.cells]
    runs = [run for one in read if one is not None for run in by_arm(one)]
    if runs:
        write_reports(folder, runs)
        print("All runs of the sweep:")
        print(terminal_table(runs))
        for line in failures_summary(runs):
            print(line)
        print(f"Joined report: {folder / 'report.md'}")
    for result in results:
        for error in result.errors:
            print(f"Did not run: {' '.join(result.overrides)}: {error}")


if __name__ == "__main__":
    sys.exit(main())
