"""A sweep: all jobs of a multirun, under whatever launcher, then one table and one exit status.

Both are read from what the jobs left in the folder of the sweep, one subfolder a job, so that they
are the same wherever the jobs ran. Results are in each cell's own folder, by which the same command
goes on: it makes a new folder here, and asks only for what is missing there.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException

from backends.base import ConfigurationError
from ruler_bench.cli import (
    LAUNCHER_KEYS,
    SAMPLE_ERRORS,
    JobResult,
    asks_for_multirun,
    check_launcher_settings,
    compose_and_call,
    print_error,
    read_statuses,
    swept_keys_override,
    worst,
)
from ruler_bench.command_line import INTERRUPTED, USAGE_ERROR, terminable
from ruler_bench.config import config_dir
from ruler_bench.config_packages import config_names
from ruler_bench.errors import UsageError
from ruler_bench.launch import SweepTask
from ruler_bench.launch_packages import launcher_name
from ruler_bench.manifest import now

SWEEPS = Path("results") / ".sweeps"
NOT_RUN = "Jobs that did not run or did not end"
STOPPED = "interrupted; the same command goes on"
FAILED_TITLES = ("settings", "why")


def run_sweep() -> int:
    """Run every job of the command line in sys.argv, join their tables, and return the status.

    Raises:
        UsageError: the command line cannot be composed, names a job twice, or its launcher cannot
            start a job.
    """
    arguments = sys.argv[1:]
    alone = [one for one in arguments if not one.lstrip("+").startswith(LAUNCHER_KEYS)]
    if "dry_run=true" in arguments:  # what would run is said here and now
        check_launcher_settings(arguments)
        arguments = alone
    check_jobs(arguments)
    planned = planned_jobs(arguments)
    folder = SWEEPS / f"{now().replace(':', '-').removesuffix('+00-00')}_{os.getpid()}"
    sys.argv[1:] = with_overrides(
        arguments,
        f"hydra.sweep.dir={folder}",
        "hydra.sweep.subdir=${hydra.job.num}",
        swept_keys_override(arguments),
    )
    why = "no result"
    lost: dict[int, str] = {}
    interrupted = False
    try:
        with terminable(), waiting_for_all(lost):
            compose_and_call("config", SweepTask(tuple(alone)))
    except KeyboardInterrupt:
        interrupted, why = True, STOPPED
    except ConfigurationError:
        raise
    except Exception as error:
        why = _words_of_launcher(error, folder, arguments)
    if not any(folder.glob("[0-9]*")) and not interrupted:
        return 0  # Hydra only printed something
    results = with_missing(read_statuses(folder), planned, lost, why)
    join(folder, results)
    return INTERRUPTED if interrupted else worst(one.status for one in results)


def with_overrides(arguments: Sequence[str], *more: str) -> list[str]:
    """Return a command line with more settings; the flag stands first, so that all are together."""
    words = ["-m", *(one for one in arguments if not asks_for_multirun(one))]
    own = [number for number, one in enumerate(words) if "=" in one and one[0] != "-"]
    place = max(own, default=0) + 1
    return [*words[:place], *more, *words[place:]]


def planned_jobs(arguments: Sequence[str]) -> list[list[str]]:
    """Return the settings of each job that a command line asks for, in Hydra's order."""
    return [list(one) for one in itertools.product(*_settings(arguments).values())]


def _settings(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Return every setting that a key has in a sweep, such as seed=1 and seed=2, by key."""
    parser = OverridesParser.create()
    keys: dict[str, list[str]] = {}
    for argument in arguments:
        try:
            override = parser.parse_override(argument)
        except HydraException:
            continue  # Hydra's to refuse, or one of its flags
        if override.is_hydra_override():
            continue
        key = override.get_key_element()
        keys[key] = [f"{key}={value}" for value in _values(override, argument)]
    return keys


def check_jobs(arguments: Sequence[str]) -> None:
    """Refuse two jobs with the same settings: at once they would fight for one result folder.

    Raises:
        UsageError: names the value that a key has twice.
    """
    for key, settings in _settings(arguments).items():
        doubled = next((one for one in settings if settings.count(one) > 1), None)
        if doubled is not None:
            raise UsageError(
                f"{key}: {doubled} is there twice, and two jobs of a sweep would be the same run; "
                "name each value once. arms=[persistent,persistent_again] asks all samples a "
                "second time."
            )


def _values(override: Override, argument: str) -> list[str]:
    """Return the values that a setting has in a sweep, as typed."""
    value = override.value()
    if isinstance(value, Glob):
        return list(value.filter(config_names(override.key_or_group, config_dir())))
    if override.is_discrete_sweep():
        return list(override.sweep_string_iterator())
    return [argument.partition("=")[2]]


def with_missing(
    found: Mapping[int, JobResult],
    planned: Sequence[list[str]],
    lost: Mapping[int, str],
    why: str,
) -> list[JobResult]:
    """Return a result for each job: its own, or why it has none or is not at its end.

    Args:
        found: what jobs wrote, by number.
        planned: the settings of each job.
        lost: what the launcher says of single jobs, by number.
        why: what holds for all others.
    """
    missing = {
        number: JobResult(SAMPLE_ERRORS, errors=[lost.get(number, why)], overrides=overrides)
        for number, overrides in enumerate(planned)
    }
    for number, result in found.items():
        if result.status == INTERRUPTED and not result.errors:
            result.errors.append(lost.get(number, STOPPED))
    return [one for _, one in sorted((missing | dict(found)).items())]


@contextlib.contextmanager
def waiting_for_all(lost: dict[int, str]) -> Iterator[None]:
    """Let submitit wait for every job; its launcher leaves at the first that has no result.

    Args:
        lost: gets what submitit says of those, by number of the job.
    """
    try:
        core = importlib.import_module("submitit.core.core")  # an extra
        utils = importlib.import_module("submitit.core.utils")
    except ImportError:
        yield
        return
    results, numbers = core.Job.results, itertools.count()

    def results_if_any(job: Any) -> list[Any]:
        number = next(numbers)  # the launcher asks in order
        try:
            return list(results(job))
        except utils.FailedJobError as error:
            lost[number] = f"its launcher failed: {str(error).strip().splitlines()[-1]}"
        except utils.UncompletedJobError:
            what = f"the launcher's job {job.job_id} left no result (state {job.state})"
            lost[number] = f"{what}; the same command goes on"
        return [JobReturn(status=JobStatus.COMPLETED)]

    core.Job.results = results_if_any
    try:
        yield
    finally:
        core.Job.results = results


def _words_of_launcher(error: Exception, folder: Path, arguments: Sequence[str]) -> str:
    """Say what a launcher raised, on stderr and for the jobs that have no status.

    Raises:
        UsageError: it started no job.
    """
    # Ray's messages begin with a traceback of the other process.
    text = next(reversed(str(error).strip().splitlines()), "") or type(error).__name__
    if not (folder / "multirun.yaml").exists():  # what Hydra writes before it launches
        raise UsageError(f"the command line cannot be read: {text}") from error
    if not any(folder.glob("[0-9]*")):
        name = launcher_name(arguments) or "basic"
        raise UsageError(f"hydra/launcher={name}: it could not start a job: {text}") from error
    print_error(RuntimeError(f"the launcher gave up: {text}"))
    return f"no result; the launcher gave up: {text}"


# --- one table ----------------------------------------------------------------------------------


def join(folder: Path, results: Sequence[JobResult]) -> None:
    """Print and write one table of the samples that each job asked for, then what failed."""
    from ruler_bench.job import print_tables  # noqa: PLC0415 (it imports this)
    from ruler_bench.journal import by_arm, read_run  # noqa: PLC0415
    from ruler_bench.report import Page, Section, write_page, write_reports  # noqa: PLC0415

    read = [read_run(Path(one.folder), one.ordinals) for result in results for one in result.cells]
    runs = [run for one in read if one is not None for run in by_arm(one)]
    folder.mkdir(parents=True, exist_ok=True)
    failed = [(_shown(one), error) for one in results for error in one.errors]
    if runs:
        write_reports(folder, runs, _markdown(failed) if failed else None)
        section = Section(NOT_RUN, "", FAILED_TITLES, failed)
        write_page(folder, runs, Page("", sections=[section] if failed else []))
        print("All runs of the sweep:")
        print_tables(runs)
    elif failed:
        text = f"# RULER: no runs\n\n{_markdown(failed)}\n"
        (folder / "report.md").write_text(text, encoding="utf-8", newline="\n")
    if runs or failed:
        print(f"Joined report: {folder / 'report.md'}")
    for line in failed_lines(results):
        print(line)


def failed_lines(results: Sequence[JobResult]) -> list[str]:
    """Return a line for each error; of one that several jobs share, how many: the report has which.

    Args:
        results: of all jobs of the sweep.
    """
    jobs: dict[tuple[str, str], list[str]] = {}
    for result in results:
        verb = "run" if result.status == USAGE_ERROR else "end"
        for error in result.errors:
            jobs.setdefault((verb, error), []).append(_shown(result))
    return [
        f"Did not {verb}: {shown[0] if len(shown) == 1 else f'{len(shown)} jobs'}: {error}"
        for (verb, error), shown in jobs.items()
    ]


def _shown(result: JobResult) -> str:
    return " ".join(result.overrides)


def _markdown(failed: Sequence[tuple[str, str]]) -> str:
    from ruler_bench.report.tables import markdown_table  # noqa: PLC0415
    from ruler_bench.report.text import markdown_cell  # noqa: PLC0415

    rows = [[markdown_cell(one, limit=None) for one in row] for row in failed]
    return f"## {NOT_RUN}\n\n{markdown_table(FAILED_TITLES, rows)}"
