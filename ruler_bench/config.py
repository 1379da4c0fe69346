"""The schema of configs/ and what becomes of it: one Cell for each run.

A command line is composed by Hydra into a RunConfig; `cells` checks it and turns it into Cells, one
a length, each with its own result folder. Nothing here needs torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ruler_bench.arm_checks import NEEDS_ARMS, can_minimise, check_arms, check_fresh, check_given
from ruler_bench.cell import PROGRESS, STOP_ON, Cell, Fresh, NamedBackend
from ruler_bench.config_packages import register_config_packages
from ruler_bench.errors import UsageError, unknown_name
from ruler_bench.host import check_threads
from ruler_bench.leak.arms import REFERENCES
from ruler_bench.leak.diagnosis.hypotheses import arms_of_diagnosis
from ruler_bench.result_folder import cell_folder, result_folder
from ruler_bench.suites import Suite, check_engine_per, suite_tasks
from ruler_bench.tasks import TaskSpec, make_task
from ruler_bench.tasks.template import CHAT
from ruler_bench.tokenizer import Chat
from ruler_bench.values import (
    MAX_ORDINAL,
    MAX_SEED,
    MAX_THREADS,
    MAX_TIMEOUT_SECONDS,
    check_int,
    default_threads,
    parse_lengths,
    parse_ordinals,
    plain,
    resolve_device,
    shown,
)

PACKAGED_PREFIX = "package:"


@dataclass
class DataConfig:
    """Keys that decide the samples; shared by both commands."""

    task: Any = MISSING
    model: Any = MISSING
    length: Any = 4096
    num_samples: int = 20
    seed: int = 42
    template: str = "base"
    tokenizer: str | None = None
    system: str | None = None
    thinking: bool | None = None
    qa_data: str | None = None
    data: str | None = None


@dataclass
class RunConfig(DataConfig):
    """Keys of `python -m ruler_bench`; docs/design.md and --help say what each means."""

    backend: Any = MISSING
    experiment: Any = None
    suite: Any = None
    engine_per: str = "task"
    indices: Any = None
    device: str = "auto"
    threads: int | None = None
    arms: list[str] = field(default_factory=lambda: ["persistent"])
    reference: Any = None
    fresh: Any = MISSING
    workers: int = 1
    timeout_seconds: float = 3600.0
    stop_on: str | None = None
    max_unstable: float = 0.0
    minimise: bool = False
    note: str | None = None
    progress: str = "auto"
    out: str | None = None
    overwrite: bool = False
    dry_run: bool = False


@dataclass
class PrepareConfig(DataConfig):
    """Keys of `python -m ruler_bench.prepare`."""

    out: str = MISSING


def register_schemas() -> None:
    """Make known to Hydra the schemas, under the names that configs/*.yaml use, and what installed
    packages bring.
    """
    store = ConfigStore.instance()
    store.store(name="run_schema", node=RunConfig)
    store.store(name="prepare_schema", node=PrepareConfig)
    register_config_packages()


def config_dir() -> Path:
    """Return the folder of the YAML files: inside the installed package, else the checkout's."""
    packaged = Path(__file__).parent / "configs"
    return packaged if packaged.is_dir() else Path(__file__).parent.parent / "configs"


# --- from composed configuration to cells ---------------------------------------------------------


def task_spec(config: DictConfig) -> TaskSpec:
    """Return the checked task of a composed configuration."""
    return make_task(plain(config.task))


def tokenizer_name(config: DictConfig) -> str:
    """Return the tokenizer's name: the user's, else the model's."""
    return config.tokenizer or model_path(config)


def model_path(config: DictConfig) -> str:
    """Return the model's path as the user gave it.

    Raises:
        UsageError: model=local without model.path.
    """
    if OmegaConf.is_missing(config.model, "path"):
        raise UsageError(
            "model.path is missing: say where the model is, "
            "for instance model=local model.path=DIR_OR_HUB_NAME."
        )
    path = config.model.path
    if not isinstance(path, str) or not path:
        raise UsageError(f"model.path={path}: must be a folder or a hub name.")
    return path


MODEL_KEYS = ("path", "good_length_tokens")


def model_name(choice: str, path: str) -> str:
    """Return what tables call a model: its configuration's name, or of your own the folder's."""
    return choice if choice != "local" else Path(path).name or path


def check_keys(config: DictConfig, schema: type[DataConfig]) -> None:
    """Refuse keys that `+key=value` added and nothing reads.

    Raises:
        UsageError: names the key and the nearest known one.
    """
    known = {one.name for one in dataclasses.fields(schema)}
    for key in config:
        if key not in known:
            raise unknown_name("key", str(key), known)
    for key in config.model:
        if key not in MODEL_KEYS:
            raise unknown_name("key", f"model.{key}", [f"model.{name}" for name in MODEL_KEYS])


def check_data_keys(config: DictConfig) -> None:
    """Check the values of the keys that both commands share."""
    check_int("num_samples", config.num_samples, 1, MAX_ORDINAL + 1)
    check_int("seed", config.seed, 0, MAX_SEED)
    for key in ("qa_data", "data"):
        folder = config[key]
        if folder is not None and not Path(folder).expanduser().is_dir():
            raise UsageError(f"{key}={folder}: is no folder.")
    for key in ("system", "thinking"):
        if config[key] is not None:
            check_chat_key(config, key)


def check_chat_key(config: DictConfig, key: str) -> None:
    """Refuse a setting of chats that would be dropped.

    Raises:
        UsageError: there is no chat template, or nothing to put into it.
    """
    if config.template != CHAT:
        raise UsageError(
            f"{key}: template={config.template} has no place for it; add template=chat, or leave "
            "it out."
        )
    if config.data is not None:
        raise UsageError(f"{key}: the samples of data={config.data} are asked as they are.")
    if key == "system" and not config.system.strip():
        raise UsageError("system: is blank; write the message, or leave it out.")


def chat_of(config: DictConfig) -> Chat:
    """Return what the chat template is given beside the user's message."""
    return Chat(config.system, config.thinking)


def cells(
    config: DictConfig,
    choices: dict[str, str],
    overrides: list[str],
    swept: Sequence[str] | None = None,
) -> list[Cell]:
    """Turn a composed configuration into the runs it names, one a length and task.

    Args:
        config: the composed RunConfig.
        choices: Hydra's choice for each config group.
        overrides: the user's overrides, `key=value`, groups included.
        swept: for one job of a multirun, the keys that vary; its `out` holds one folder a job.

    Raises:
        UsageError: a value is out of range or names nothing known.
    """
    check_keys(config, RunConfig)
    check_data_keys(config)
    threads = default_threads() if config.threads is None else config.threads
    check_int("threads", threads, 1, MAX_THREADS)
    good = config.model.get("good_length_tokens")
    if good is not None:
        check_int("model.good_length_tokens", good, 1)
    lengths = parse_lengths(plain(config.length))
    ordinals = parse_ordinals(plain(config.indices), config.num_samples)
    arms = check_arms(plain(config.arms))
    backend_settings: dict[str, Any] = plain(config.backend)
    given = {one.lstrip("+~").partition("=")[0] for one in overrides}
    specs = _task_specs(config, given)
    path = model_path(config)
    tokenizer = tokenizer_name(config)
    device = resolve_device(config.device)
    fresh = _fresh(config)
    check_fresh(fresh, arms, config.workers)
    if choices.get("experiment") == "leakcheck" and len(arms) == 1:
        raise UsageError(NEEDS_ARMS.format(arms=shown(list(arms))))
    if not 0 < config.timeout_seconds <= MAX_TIMEOUT_SECONDS:
        raise UsageError(
            f"timeout_seconds={config.timeout_seconds:g}: out of range; must be above 0 and at "
            f"most {MAX_TIMEOUT_SECONDS}."
        )
    if not 0 <= config.max_unstable <= 1:
        raise UsageError(
            f"max_unstable={config.max_unstable:g}: out of range; must be a share, 0 to 1."
        )
    if config.minimise and not can_minimise(arms):
        raise UsageError(
            f"minimise=true: arms={shown(list(arms))} has no answer of an engine that served "
            "others beside one of a fresh engine, so that there would be nothing to look for; use "
            "arms=[persistent,fresh] or more, or leave it out."
        )
    if config.stop_on is not None and config.stop_on not in STOP_ON:
        raise unknown_name("stop_on", config.stop_on, STOP_ON)
    if config.progress not in PROGRESS:
        raise unknown_name("progress", config.progress, PROGRESS)
    folder = result_folder(config, choices, overrides, lengths, swept)
    is_diagnosis = choices.get("experiment") == "diagnose"
    chooses_arms = not is_diagnosis or "arms" in given
    first = arms if chooses_arms else arms_of_diagnosis(backend_settings, lengths[0])
    check_given(given - _set_to_nothing(overrides), first, fresh, config.workers)
    references = _references(config, choices) if {*REFERENCES} & {*arms} else ()
    if config.threads is not None and "threads" in given:
        check_threads(backend_settings, *(one.settings for one in references))
    check_engine_per(
        config.engine_per,
        has_suite=config.suite is not None,
        arms=arms,
        minimise=config.minimise,
        is_diagnosis=is_diagnosis,
    )
    suite = None
    if config.suite is not None:
        names = tuple(one.name for one in specs)
        suite = Suite(choices["suite"], names, folder, config.engine_per)
    return [
        Cell(
            task=spec,
            length=length,
            ordinals=ordinals,
            seed=config.seed,
            template=config.template,
            chat=chat_of(config),
            tokenizer=tokenizer,
            qa_data=config.qa_data,
            data=config.data,
            backend=choices["backend"],
            backend_settings=backend_settings,
            model=model_name(choices["model"], path),
            model_path=path,
            good_length_tokens=good,
            device=device,
            threads=threads,
            arms=arms if chooses_arms else arms_of_diagnosis(backend_settings, length),
            folder=cell_folder(folder, length, lengths, spec, suite),
            suite=suite,
            references=references,
            fresh=fresh,
            workers=config.workers,
            timeout_seconds=config.timeout_seconds,
            stop_on=config.stop_on,
            max_unstable=config.max_unstable,
            minimise=config.minimise,
            note=config.note,
            progress=config.progress,
            is_diagnosis=is_diagnosis,
        )
        for length in lengths
        for spec in specs
    ]


def _task_specs(config: DictConfig, given: Collection[str]) -> tuple[TaskSpec, ...]:
    """Return the tasks of a suite, else the one task."""
    if config.suite is None:
        return (task_spec(config),)
    return suite_tasks(plain(config.suite), given, config_dir())


def _set_to_nothing(overrides: Sequence[str]) -> set[str]:
    """Return the keys that the user set to null, which leaves them out."""
    pairs = (one.lstrip("+~").partition("=") for one in overrides)
    return {key for key, _, value in pairs if value == "null"}


def _fresh(config: DictConfig) -> Fresh:
    values: dict[str, Any] = plain(config.fresh)
    names = [one.name for one in dataclasses.fields(Fresh)]
    for key in values:
        if key not in names:
            raise unknown_name("key", f"fresh.{key}", [f"fresh.{name}" for name in names])
    return Fresh(**values)


DEFAULT_REFERENCES = ("hf", "gpu_only")


def _references(config: DictConfig, choices: dict[str, str]) -> tuple[NamedBackend, ...]:
    """Return the backends for the arm reference: the user's, else hf and after it gpu_only."""
    if config.reference is not None:
        return (NamedBackend(choices["backend@reference"], plain(config.reference)),)
    return tuple(NamedBackend(name, _default_backend(name)) for name in DEFAULT_REFERENCES)


def _default_backend(name: str) -> dict[str, Any]:
    """Return a backend's file as it stands; a policy is left to the backend's own default."""
    path = config_dir() / "backend" / f"{name}.yaml"
    try:
        values: dict[str, Any] = plain(OmegaConf.load(path))
    except (OSError, OmegaConfBaseException) as error:
        raise UsageError(f"{path} cannot be read; choose backend@reference=NAME.") from error
    return {key: value for key, value in values.items() if key != "defaults"}
