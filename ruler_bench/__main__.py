"""`python -m ruler_bench`: compose, check, run, report, exit status."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from omegaconf import DictConfig

from backends.base import ConfigurationError
from ruler_bench.cli import (
    INTERRUPTED,
    USAGE_ERROR,
    JobResult,
    choices_and_overrides,
    print_error,
    read_statuses,
    run_app,
)
from ruler_bench.config import cells
from ruler_bench.manifest import now

STATUS_ORDER = (USAGE_ERROR, INTERRUPTED, 3, 4, 5, 6, 1)
SWEEPS = Path("results") / ".sweeps"


def main() -> int:
    """Run the command line in sys.argv and return the exit status."""
    try:
        if "-m" in sys.argv or "--multirun" in sys.argv:
            return _sweep()
        results = run_app("config", job)
    except ConfigurationError as error:
        print_error(error)
        return USAGE_ERROR
    return worst([result.status for result in results])


def worst(statuses: list[int]) -> int:
    """Return the status of several runs together: the first of STATUS_ORDER that occurs, else 0."""
    return next((status for status in STATUS_ORDER if status in statuses), 0)


def job(config: DictConfig) -> JobResult:
    """Run the cells of one composed configuration and print their table."""
    from ruler_bench.dry_run import describe_cell  # noqa: PLC0415
    from ruler_bench.report import terminal_table  # noqa: PLC0415
    from ruler_bench.run import run_cell  # noqa: PLC0415 (--help must not wait for torch)

    choices, overrides, sweep = choices_and_overrides()
    planned = cells(config, choices, overrides, sweep)
    if config.dry_run:
        for cell in planned:
            print(describe_cell(cell))
        return JobResult(0)
    outcomes = []
    for cell in planned:
        outcomes.append(run_cell(cell, config.overwrite))
        if outcomes[-1].status == INTERRUPTED:
            break
    if not sweep:  # whose tables are joined at its end
        print(terminal_table([outcome.run for outcome in outcomes]))
    for cell in planned[: len(outcomes)]:
        print(f"Records and report: {cell.folder}")
    return JobResult(
        worst([outcome.status for outcome in outcomes]), [cell.folder for cell in planned]
    )


def _sweep() -> int:
    """Run every job of a multirun, then join their tables; its folder keeps what each job did."""
    folder = SWEEPS / f"{now().replace(':', '-').removesuffix('+00-00')}_{os.getpid()}"
    sys.argv.append(f"hydra.sweep.dir={folder}")
    interrupted = False
    try:
        run_app("config", job)
    except KeyboardInterrupt:
        interrupted = True
    results = read_statuses(folder)
    _join(folder, results)
    return INTERRUPTED if interrupted else worst([result.status for result in results])


def _join(folder: Path, results: list[JobResult]) -> None:
    from ruler_bench.journal import read_run  # noqa: PLC0415
    from ruler_bench.report import terminal_table, write_reports  # noqa: PLC0415

    read = [read_run(one) for result in results for one in result.folders]
    runs = [run for run in read if run is not None]
    if runs:
        write_reports(folder, runs)
        print("All runs of the sweep:")
        print(terminal_table(runs))
        print(f"Joined report: {folder}")


if __name__ == "__main__":
    sys.exit(main())
