"""Hydra for people: one app runner whose errors are one line, with the nearest valid name.

Hydra's own messages take several lines and end in a hint about HYDRA_FULL_ERROR. Here its
exceptions are let through and put into the project's words; jobs of a sweep write their status
into their folder, since `hydra.main` drops return values and jobs may run in other processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.hydra import Hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from backends.base import ConfigurationError
from ruler_bench.command_line import GOES_ON, INTERRUPTED, USAGE_ERROR, terminable
from ruler_bench.config import config_dir, register_schemas
from ruler_bench.config_packages import check_one_provider, config_names
from ruler_bench.errors import UsageError, nearest, one_line, unknown_name
from ruler_bench.launch_packages import GROUP as LAUNCHER
from ruler_bench.launch_packages import PACKAGES

SAMPLE_ERRORS = 1
STATUS_ORDER = (USAGE_ERROR, INTERRUPTED, 3, 4, 5, 6, SAMPLE_ERRORS)
STATUS_FILE = "status.json"
SWEPT_KEYS = "RULER_BENCH_SWEPT_KEYS"

Job = Callable[[DictConfig], "JobResult"]


@dataclass(frozen=True)
class CellRef:
    """Where a cell's records are, and which samples were asked for: a folder may hold more."""

    folder: str
    ordinals: tuple[int, ...]


@dataclass
class JobResult:
    """What a job tells the sweep it belongs to.

    Attributes:
        status: exit status.
        cells: the cells that ran.
        errors: one line for each cell that could not start, or why the job has no end.
        overrides: the job's settings, as typed.
    """

    status: int
    cells: list[CellRef] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)


def worst(statuses: Iterable[int]) -> int:
    """Return the status of several runs together: the first of STATUS_ORDER that occurs, else 0."""
    found = set(statuses)
    return next((status for status in STATUS_ORDER if status in found), 0)


def run_app(config_name: str, job: Job) -> list[JobResult]:
    """Compose the command line and run `job` once.

    Args:
        config_name: a file of configs/, without its suffix.
        job: gets the composed configuration; its own errors are printed and become status 2.

    Returns:
        Its result. Empty when Hydra only printed something (`--help`, `--cfg`).

    Raises:
        UsageError: the command line cannot be composed.
    """
    results: list[JobResult] = []
    in_job = False

    def task(config: DictConfig) -> None:
        nonlocal in_job
        in_job = True
        results.append(_guarded(job, config))
        in_job = False

    try:
        compose_and_call(config_name, task)
    except ConfigurationError:
        raise
    except Exception as error:
        if in_job:  # an error of ours, whose traceback tells more than a line
            raise
        raise UsageError(f"the command line cannot be read: {one_line(error)}") from error
    return results


def compose_and_call(config_name: str, task: Callable[[DictConfig], None]) -> None:
    """Compose the command line and have Hydra call `task`, once or for each job of a sweep.

    Args:
        config_name: a file of configs/, without its suffix.
        task: gets the composed configuration. Under a launcher it travels to other processes.

    Raises:
        UsageError: the command line cannot be composed.
        Exception: whatever the task or a launcher raises.
    """
    register_schemas()
    # Let exceptions through instead of printing them Hydra's way.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    _check_values(sys.argv[1:])
    app = hydra.main(
        version_base="1.3", config_path=str(config_dir().absolute()), config_name=config_name
    )(task)
    try:
        with _flags_for_people(config_name), _mode_as_typed(sys.argv[1:]):
            app()
    except (HydraException, OmegaConfBaseException) as error:
        raise _in_our_words(error, config_name) from error


@contextlib.contextmanager
def _mode_as_typed(arguments: Sequence[str]) -> Iterator[None]:
    """Spare Hydra composing everything twice: it does so first for hydra.mode alone.

    A command line that has only settings and perhaps -m, and does not name hydra.mode, leaves it
    at its default, None. Others are Hydra's to look at.
    """
    flags = {one for one in arguments if one.startswith("-")}
    names_it = any("hydra" in one and "mode" in one for one in arguments)
    if names_it or not flags <= {"-m", "--multirun"}:
        yield
        return

    def mode(hydra: Hydra, config_name: str | None, overrides: list[str]) -> None:
        return None

    before = Hydra.get_mode
    Hydra.get_mode = mode
    try:
        yield
    finally:
        Hydra.get_mode = before


@contextlib.contextmanager
def _flags_for_people(config_name: str) -> Iterator[None]:
    """Let wrong flags be an error of one line; Hydra's parser prints every flag that it has.

    Raises:
        UsageError: names the flag and, of a setting with dashes, how it is written.
    """

    def error(parser: argparse.ArgumentParser, message: str) -> NoReturn:
        raise _wrong_flag(message, config_name)

    before = argparse.ArgumentParser.error
    argparse.ArgumentParser.error = error  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        argparse.ArgumentParser.error = before  # type: ignore[method-assign]


def _guarded(job: Job, config: DictConfig) -> JobResult:
    # An exception inside one job of a sweep must not take the other jobs with it.
    try:
        with terminable():
            return job(config)
    except ConfigurationError as error:
        return refused(error)
    except OmegaConfBaseException as error:
        return refused(UsageError(_first_line(error)))
    except KeyboardInterrupt:
        print(GOES_ON, file=sys.stderr)
        return JobResult(INTERRUPTED)


def run_job_of_sweep(job: Job, config: DictConfig) -> JobResult:
    """Run one job of a sweep and leave its result in its folder, whatever becomes of it."""
    try:
        result = _guarded(job, config)
    except Exception as error:  # an error of ours must not take the other jobs with it
        traceback.print_exc()
        result = JobResult(SAMPLE_ERRORS, errors=[f"{type(error).__name__}: {one_line(error)}"])
    write_status(result)
    return result


def refused(error: ConfigurationError) -> JobResult:
    """Print why a job could not start, and return that as its result."""
    print_error(error)
    return JobResult(USAGE_ERROR, errors=[one_line(error)])


def print_error(error: Exception) -> None:
    """Print an error as one line on stderr."""
    print(f"error: {one_line(error)}", file=sys.stderr)


def _is_sweep() -> bool:
    return bool(HydraConfig.get().mode == RunMode.MULTIRUN)


def choices_and_overrides() -> tuple[dict[str, str], list[str], list[str] | None]:
    """Return Hydra's choice of each group, this job's overrides, and the keys its sweep varies.

    The last is None where this is no sweep.
    """
    config = HydraConfig.get()
    choices = {str(group): str(choice) for group, choice in config.runtime.choices.items()}
    overrides = list(config.overrides.task)
    if not _is_sweep():
        return choices, overrides, None
    return choices, overrides, os.environ.get(SWEPT_KEYS, "").split(",")


def asks_for_multirun(argument: str) -> bool:
    """Tell whether an argument asks Hydra for a sweep: its flag, a beginning of that, its key."""
    return argument in ("-m", "hydra.mode=MULTIRUN") or (
        argument.startswith("--m") and "--multirun".startswith(argument)
    )


def swept_keys_override(arguments: list[str]) -> str:
    """Return the override that tells each job, in whatever process, which keys the sweep varies."""
    parser = OverridesParser.create()
    keys = []
    for argument in arguments:
        # What cannot be parsed is Hydra's to refuse.
        with contextlib.suppress(HydraException):
            override = parser.parse_override(argument)
            if override.is_sweep_override():
                keys.append(override.key_or_group)
    return f"+hydra.job.env_set.{SWEPT_KEYS}='{','.join(keys)}'"


# --- the status of each job of a sweep ----------------------------------------------------------


def job_folder() -> Path:
    """Return the folder of the job that runs, within that of its sweep."""
    return Path(HydraConfig.get().runtime.output_dir)


def write_status(result: JobResult) -> None:
    """Leave the result of the job that runs in its folder, whole or not at all."""
    folder = job_folder()
    folder.mkdir(parents=True, exist_ok=True)
    result.overrides = list(HydraConfig.get().overrides.task)
    part = folder / f"{STATUS_FILE}.part"
    part.write_text(json.dumps(asdict(result), indent=2) + "\n", encoding="utf-8")
    part.replace(folder / STATUS_FILE)


def unfinished(cells: Iterable[tuple[str, tuple[int, ...]]]) -> JobResult:
    """Return the result that a job leaves when it starts, for the case that it is killed.

    Args:
        cells: folder and ordinals of each; what is recorded there by then is shown.
    """
    return JobResult(INTERRUPTED, [CellRef(*one) for one in cells])


def read_status(folder: Path) -> JobResult | None:
    """Return what a job wrote into its folder; None where it did not come to that."""
    try:
        values = json.loads((folder / STATUS_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    values["cells"] = [CellRef(one["folder"], tuple(one["ordinals"])) for one in values["cells"]]
    return JobResult(**values)


def read_statuses(sweep: Path) -> dict[int, JobResult]:
    """Return the results that the jobs of a sweep wrote, by the number of the job."""
    results = {}
    for path in sweep.glob(f"*/{STATUS_FILE}"):
        result = read_status(path.parent)
        if path.parent.name.isdigit() and result is not None:
            results[int(path.parent.name)] = result
    return dict(sorted(results.items()))


# --- the user's words ---------------------------------------------------------------------------


def _check_values(arguments: list[str]) -> None:
    """Refuse overrides that Hydra would take in silence and that mean nothing.

    Raises:
        UsageError: `key=` without a value, arms without brackets, a group without a name, or a
            name in it that several packages have.
    """
    for argument in arguments:
        if argument.startswith("-") or "=" not in argument:
            continue
        key, _, value = argument.partition("=")
        if not key:
            raise UsageError(f"{argument}: has no key; settings are key=value.")
        if value == "":
            raise UsageError(f"{argument}: has no value; write {key}=VALUE or {key}=null.")
        if key == "arms" and value[0] not in "[$'\"":
            raise UsageError(
                f"{argument}: must be a list in brackets, for instance arms=[persistent,fresh]."
            )
        if key in GROUPS:
            _check_choices(key, value)
        if key in (*GROUPS, REFERENCE_GROUP):
            for name in value.split(","):
                check_one_provider(key.partition("@")[0], name, config_dir())


REFERENCE_GROUP = "backend@reference"
LAUNCHER_KEYS = (f"{LAUNCHER}=", "hydra.launcher.")
GROUPS = ("task", "suite", "backend", "model", "experiment", "fresh")
_CHOICES = re.compile(r"[A-Za-z_][\w-]*(,[A-Za-z_][\w-]*)*")


def _check_choices(group: str, value: str) -> None:
    """Refuse what can be no name of a configuration: null, numbers, lists, paths.

    Raises:
        UsageError: names the configurations there are.
    """
    if value in ("null", "true", "false") or not _CHOICES.fullmatch(value):
        names = config_names(group, config_dir())
        raise UsageError(f"{group}={value}: must be one of {', '.join(names)}.")


def _wrong_flag(message: str, config_name: str) -> UsageError:
    """Put into our words what Hydra's parser says of an argument that begins with a dash."""
    what, _, words = message.partition(": ")
    if what != "unrecognized arguments":
        return UsageError(f"{message.replace('argument ', '', 1)}. --help lists the settings.")
    flag = words.split()[0]
    key, equals, value = flag.lstrip("-").partition("=")
    known = _known_keys(config_name)
    close = nearest(key.replace("-", "_"), [*known, *GROUPS])
    hint = f" Did you mean {close}={value if equals else 'VALUE'}?" if close else ""
    return UsageError(
        f"{flag}: there is no such option; settings are key=value, without dashes.{hint} "
        "--help lists them."
    )


def _in_our_words(error: Exception, config_name: str) -> UsageError:
    if isinstance(error, MissingConfigException):
        return _unknown_choice(error)
    if isinstance(error, OverrideParseException):
        return UsageError(
            f"{error.override}: cannot be read. Settings are key=value; a value with =, brackets, "
            "commas, spaces or ~ goes in two pairs of quotes: 'key=\"VALUE\"'."
        )
    chain = [error, error.__cause__, error.__context__]
    for one in chain:
        key = getattr(one, "full_key", None)
        if isinstance(one, OmegaConfBaseException) and key:
            return _bad_key(str(key), one, config_name)
    text = _first_line(error)
    if text.startswith("Ambiguous value"):
        several = "call prepare once for each" if config_name == "prepare" else "add -m"
        return UsageError(
            f"a value with commas names several runs: {several}, or write a list in brackets, "
            "for instance length=[4096,8192]."
        )
    match = re.match(r"Could not override '([^']+)'", text)
    if match:
        return _unknown_key(match[1], config_name)
    return UsageError(text)


def _unknown_choice(error: MissingConfigException) -> UsageError:
    group, _, name = str(error.missing_cfg_file or "").rpartition("/")
    if error.options is None or not group:
        return UsageError(_first_line(error))
    options = {str(one) for one in error.options}
    if group == LAUNCHER:  # also those whose packages are missing
        options |= PACKAGES.keys()
    return unknown_name(group.split("@")[0], name, options)


def _bad_key(key: str, error: OmegaConfBaseException, config_name: str) -> UsageError:
    text = _first_line(error)
    if re.match(r"Key '.*' (is )?not in ", text):
        return _unknown_key(key, config_name)
    match = re.match(r"Value '(.*)' of type '.*' could not be converted to (\w+)", text)
    if match:
        kind = {"Integer": "an integer", "Float": "a number"}.get(match[2], match[2])
        return UsageError(f"{key}={match[1]}: must be {kind}.")
    match = re.match(r"Cannot convert '.*' to string: '(.*)'", text)
    if match:
        return UsageError(f"{key}={match[1]}: must be text.")
    if text.endswith("is not Optional"):
        return UsageError(f"{key}=null: must have a value; leave it out for the default.")
    match = re.match(r"Value '(.*)' is not a valid bool", text)
    if match:
        return UsageError(f"{key}={match[1]}: must be true or false.")
    return UsageError(f"{key}: {text}")


def _unknown_key(key: str, config_name: str) -> UsageError:
    if "backend=custom" in sys.argv and key.startswith("backend."):
        return UsageError(f"unknown key {key}: write +{key}=VALUE, since no file lists it.")
    if key.startswith("reference.") and not any(
        one.startswith(f"{REFERENCE_GROUP}=") for one in sys.argv[1:]
    ):
        return UsageError(
            f"unknown key {key}: choose the reference first, {REFERENCE_GROUP}=gpu_only for "
            "instance; its settings are then reference.KEY=VALUE."
        )
    known = _known_keys(config_name, with_hydra=key.startswith("hydra."))
    if key.startswith("hydra.launcher."):
        known = [one for one in known if one.startswith("hydra.launcher.")]
    # A dotted key belongs to one group: listing that group's keys says more than listing all.
    prefix = key.rpartition(".")[0]
    siblings = [one for one in known if one.rpartition(".")[0] == prefix]
    end = key.rpartition(".")[2]  # of a run's own key that begins alike, given as a group's
    above = [one for one in known if one[:3] == end[:3] and "." not in one]
    close = nearest(key, known) or nearest(end, above)
    hint = f" Did you mean {close}?" if close else ""
    return UsageError(f"unknown key {key}.{hint} Allowed: {', '.join(siblings or known)}.")


def _known_keys(config_name: str, with_hydra: bool = False) -> list[str]:
    """Return every key of the configuration with the user's own choice of groups."""
    chosen = [
        argument.split(",")[0]
        for argument in sys.argv[1:]
        if argument.partition("=")[0] in (*GROUPS, REFERENCE_GROUP, LAUNCHER)
    ]
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(config_dir().absolute()), version_base="1.3"):
        try:
            config = hydra.compose(config_name, chosen, return_hydra_config=with_hydra)
        except (HydraException, OmegaConfBaseException):
            config = hydra.compose(config_name)
    return sorted(_flat_keys(OmegaConf.to_container(config)))


def check_launcher_settings(arguments: Iterable[str]) -> None:
    """Refuse what a launcher would refuse, without starting one: a dry run leaves its words out.

    Raises:
        UsageError: the launcher or a key of it does not exist, or has a wrong value.
    """
    chosen = [one for one in arguments if one.lstrip("+").startswith(LAUNCHER_KEYS)]
    _check_values(chosen)
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(config_dir().absolute()), version_base="1.3"):
        try:
            hydra.compose("config", chosen, return_hydra_config=True)
        except (HydraException, OmegaConfBaseException) as error:
            raise _in_our_words(error, "config") from error


def _flat_keys(values: Any, prefix: str = "") -> list[str]:
    keys = []
    for name, value in values.items():
        if isinstance(value, dict):
            keys += _flat_keys(value, f"{prefix}{name}.")
        elif name != "_target_" or prefix == "backend.":
            keys.append(f"{prefix}{name}")
    return keys


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
