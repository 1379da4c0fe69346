"""One job: the cells of one composed configuration, run, told about, and their exit status."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from omegaconf import DictConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ruler_bench.cell import Cell
    from ruler_bench.leak.diagnosis.hypotheses import Row
    from ruler_bench.report import Run
    from ruler_bench.run import Outcome

from backends.base import ConfigurationError
from ruler_bench.cli import (
    SAMPLE_ERRORS,
    CellRef,
    JobResult,
    choices_and_overrides,
    refused,
    unfinished,
    worst,
    write_status,
)
from ruler_bench.command_line import GOES_ON, INTERRUPTED, USAGE_ERROR
from ruler_bench.config import cells


def job(config: DictConfig) -> JobResult:
    """Run the cells of one composed configuration and print their table."""
    from ruler_bench.run_suite import run_cells  # noqa: PLC0415 (--help does not wait for it)

    choices, overrides, swept = choices_and_overrides()
    planned = cells(config, choices, overrides, swept)
    if config.dry_run:
        return describe(planned, config.overwrite)
    if swept is not None:
        write_status(unfinished((str(one.folder), one.ordinals) for one in planned))
    result, runs = JobResult(0), []
    is_judged = False
    for cell, outcome in run_cells(planned, config.overwrite):
        if isinstance(outcome, ConfigurationError):
            result.errors += refused(outcome).errors
            result.status = worst([result.status, USAGE_ERROR])
            continue
        runs += outcome.runs
        is_judged |= outcome.verdict is not None
        print_findings(cell, outcome, is_sweep=swept is not None)
        status = reproduce(cell, outcome) if cell.minimise else outcome.status
        result.cells.append(CellRef(str(cell.folder), cell.ordinals))
        result.status = worst([result.status, status])
        if status == INTERRUPTED:
            break
    if config.note and runs and not is_judged:  # a verdict has it
        print(config.note)
    finish(planned[0], result, runs, is_sweep=swept is not None)
    return result


def finish(cell: Cell, result: JobResult, runs: Sequence[Run], is_sweep: bool) -> None:
    """Print the table of a job and where its records are; write the report of a suite."""
    from ruler_bench.run_suite import write_suite_report  # noqa: PLC0415

    if runs and not is_sweep:  # a sweep joins the tables of its jobs
        print_tables(runs)
    folders = [one.folder for one in result.cells]
    if cell.suite is not None and runs:
        if not write_suite_report(cell.suite, runs):
            result.status = worst([result.status, SAMPLE_ERRORS])
        folders = [str(cell.suite.folder)]
    for folder in folders:
        print(f"Records and report: {folder}")
    if result.status == INTERRUPTED:
        print(GOES_ON, file=sys.stderr)


def print_tables(runs: Sequence[Run]) -> None:
    """Print the table of runs, their means over tasks, and what failed."""
    from ruler_bench.report import failures_summary, terminal_means, terminal_table  # noqa: PLC0415

    print(terminal_table(runs))
    means = terminal_means(runs)
    if means is not None:
        print(f"\n{means}")
    for line in failures_summary(runs):
        print(line)


def describe(planned: Sequence[Cell], overwrite: bool) -> JobResult:
    """Say what would run, for dry_run=true; one that would be refused hides no other."""
    from ruler_bench.dry_run import describe_cell  # noqa: PLC0415

    result = JobResult(0)
    for cell in planned:
        try:
            print(describe_cell(cell, overwrite))
        except ConfigurationError as error:
            result.errors += refused(error).errors
            result.status = USAGE_ERROR
    return result


def print_findings(cell: Cell, outcome: Outcome, is_sweep: bool) -> None:
    """Print diagnosis and verdict; of many the sentence alone, since report.md has the rest."""
    from ruler_bench.leak.report import terminal_verdict  # noqa: PLC0415 (scipy takes long)

    if outcome.diagnosis is not None and not is_sweep:
        print_diagnosis(outcome.diagnosis)
    if outcome.verdict is None:
        return
    if cell.suite is not None:
        print(f"{cell.length} {outcome.verdict.sentence}")
    else:
        print(outcome.verdict.sentence if is_sweep else terminal_verdict(outcome.verdict) + "\n")


def reproduce(cell: Cell, outcome: Outcome) -> int:
    """With minimise=true, look for the smallest reproducer; return the status of the whole."""
    from ruler_bench.minimise_search import after_run  # noqa: PLC0415 (it builds engines)

    if outcome.verdict is None or outcome.status == INTERRUPTED:
        return outcome.status
    try:
        after_run(cell, outcome.verdict.verdict)
    except KeyboardInterrupt:
        return INTERRUPTED
    return outcome.status


def print_diagnosis(rows: Sequence[Row]) -> None:
    """Print the answers to the hypotheses."""
    from ruler_bench.leak.diagnosis.table import terminal_diagnosis  # noqa: PLC0415

    print(terminal_diagnosis(rows) + "\n")
