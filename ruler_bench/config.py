"""The schema of configs/, its range checks, and what becomes of it: one Cell for each run.

A command line is composed by Hydra into a RunConfig; `cells` checks it and turns it into Cells, one
a length, each with its own result folder. Nothing here needs torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ruler_bench.config_packages import register_config_packages
from ruler_bench.errors import UsageError, unknown_name
from ruler_bench.leak.arms import REFERENCES, SPELLINGS, kind_of, variant_of
from ruler_bench.leak.diagnose import arms_of_diagnosis
from ruler_bench.streams import SAMPLE, streams
from ruler_bench.suites import Suite, check_engine_per, suite_tasks
from ruler_bench.tasks import TaskSpec, make_task
from ruler_bench.tasks.template import CHAT
from ruler_bench.tokenizer import PLAIN, Chat

MAX_SEED = 2**32 - 1
PACKAGED_PREFIX = "package:"
GROUPS_IN_FOLDER_NAME = ("task", "suite", "backend", "model", "length")
KEYS_WITHOUT_RESULTS = frozenset(
    {
        "num_samples",
        "indices",
        "threads",
        "device",
        "workers",
        "overwrite",
        "out",
        "dry_run",
        "arms",
        "fresh.on",
        "fresh.audit",
        "fresh.start",
        "stop_on",
        "max_unstable",
        "minimise",
        "timeout_seconds",
        "note",
    }
)
"""Keys that may differ where a folder goes on: more samples, more arms, how they are run."""
ENGINE_TARGETS = "backends.engine."
ENGINE_KEYS_WITHOUT_RESULTS = frozenset(
    {"compile_seconds", "device_memory_gb", "host_memory_gb", "memory_plan"}
)
"""Of our engine: what decides whether it can run and how soon, neither its answers nor their times.

checkpoint, timeline and synchronise change no answer either, but what is recorded beside it and how
long it takes: such a run has a folder of its own.
"""


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


@dataclass(frozen=True)
class NamedBackend:
    """A composed backend configuration, `_target_` included, and its name."""

    name: str
    settings: dict[str, Any]


FRESH_ENGINES = ("process", "inprocess")
FRESH_STARTS = ("forkserver", "spawn")
FRESH_ON = ("all", "suspects")
STOP_ON = ("leak",)


@dataclass(frozen=True)
class Fresh:
    """How the arms with an engine for each request are run; a file of configs/fresh.

    Attributes:
        engine: "process" or "inprocess".
        start: of processes: "forkserver" or "spawn".
        on: "all" samples, or "suspects": what the other arms got wrong or disagree about.
        audit: with suspects, so many samples more, drawn by the seed.

    Raises:
        UsageError: a value is not allowed.
    """

    engine: str = "process"
    start: str | None = "forkserver"
    on: str = "all"
    audit: int = 0

    def __post_init__(self) -> None:
        if self.engine not in FRESH_ENGINES:
            raise unknown_name("fresh.engine", str(self.engine), FRESH_ENGINES)
        if self.engine == "process" and self.start not in FRESH_STARTS:
            raise unknown_name("fresh.start", str(self.start), FRESH_STARTS)
        if self.engine == "inprocess" and self.start is not None:
            raise UsageError(
                f"fresh.start={self.start}: with fresh=inprocess no process is started; leave it "
                "out, or use fresh=process."
            )
        if self.on not in FRESH_ON:
            raise unknown_name("fresh.on", str(self.on), FRESH_ON)
        check_int("fresh.audit", self.audit, 0, MAX_ORDINAL + 1)
        if self.audit and self.on == "all":
            raise UsageError(
                f"fresh.audit={self.audit}: with fresh.on=all every sample is asked anyway; add "
                "fresh.on=suspects, or leave it out."
            )


@dataclass(frozen=True)
class Cell:
    """One run: a task at one length on one backend, in its own folder.

    Attributes:
        task: what is asked.
        length: tokens of prompt and generation together.
        ordinals: the samples to run, ascending.
        seed, template: of the data.
        chat: what the model's own chat template is given, with template=chat.
        tokenizer: as the user named it; the model's where they named none.
        backend: name of the configuration.
        backend_settings: the composed backend configuration, `_target_` included.
        model: what tables call it.
        model_path: folder or hub name, as the user gave it (`package:probe` for ours).
        qa_data, data: folders of questions and of ready-made samples, or None.
        suite: what it is one task of, or None.
        good_length_tokens: up to where the model is known to be good, or None.
        device: "cpu", "cuda" or "cuda:N".
        threads: CPU threads of the engine.
        arms: streams to run.
        folder: where the results go.
        references: backends of the arm reference, the first that can load the model is used.
        fresh: how the arms with an engine for each request are run.
        workers: how many of these engines are alive at a time.
        timeout_seconds: how long an engine in a process of its own may take to start, for one
            request, or to close.
        stop_on: None, or "leak": stop when two arms contradict each other.
        max_unstable: share of the samples that may be unstable before the exit status says so.
        minimise: look for the shortest sequence of requests that shows a leak or a race.
        note: what is said with the table.
        is_diagnosis: whether the hypotheses of `ruler_bench.leak.diagnose` are answered. Arms that
            the backend refuses are then left out.
    """

    task: TaskSpec
    length: int
    ordinals: tuple[int, ...]
    seed: int
    template: str
    tokenizer: str
    backend: str
    backend_settings: dict[str, Any]
    model: str
    model_path: str
    good_length_tokens: int | None
    device: str
    threads: int
    arms: tuple[str, ...]
    folder: Path
    references: tuple[NamedBackend, ...] = ()
    fresh: Fresh = field(default_factory=Fresh)
    workers: int = 1
    timeout_seconds: float = 3600.0
    stop_on: str | None = None
    max_unstable: float = 0.0
    minimise: bool = False
    note: str | None = None
    is_diagnosis: bool = False
    qa_data: str | None = None
    data: str | None = None
    chat: Chat = PLAIN
    suite: Suite | None = None

    def settings(self) -> dict[str, Any]:
        """Return what decides the results, as plain JSON values, for the manifest and for resume.

        num_samples and indices are not part of it: a folder may grow.
        """
        return {
            "task": dataclasses.asdict(self.task),
            "length": self.length,
            "seed": self.seed,
            "template": self.template,
            "tokenizer": portable_path(self.tokenizer),
            **{key: one for key, one in dataclasses.asdict(self.chat).items() if one is not None},
            **{key: portable_path(path) for key, path in self.data_folders().items()},
            "backend": {"name": self.backend, **shareable(self.backend_settings)},
            "model": {"name": self.model, "path": portable_path(self.model_path)},
            "device": self.device,
            "threads": self.threads,
            **({} if self.suite is None else self.suite.settings()),
        }

    def data_folders(self) -> dict[str, str]:
        """Return the folders that samples are read from, as far as they were named."""
        named = {"qa_data": self.qa_data, "data": self.data}
        return {key: path for key, path in named.items() if path is not None}


def backend_keys_without_results(settings: dict[str, Any]) -> frozenset[str]:
    """Return the keys of a backend's settings that may differ where a folder goes on."""
    ours = str(settings.get("_target_")).startswith(ENGINE_TARGETS)
    return ENGINE_KEYS_WITHOUT_RESULTS if ours else frozenset()


def portable_path(text: str) -> str:
    """Return an absolute path relative to the working directory; anything else as it is.

    Manifests are shared: they should not tell where somebody's home folder lies. A path is what
    lies in a folder that is there, whether or not it has been made yet itself.
    """
    path = Path(text)
    if path.is_absolute() and any(_is_there(one) for one in (path, *path.parents[:-1])):
        return os.path.relpath(text)
    return text


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # too long for a name
        return False


_SECRET_KEY = re.compile(r"api_?key|secret|password|passphrase|credential|bearer", re.IGNORECASE)


def is_secret_key(key: str) -> bool:
    """Tell whether a setting's name says that its value must not be written down.

    What ends in _env names an environment variable, and not what it holds.
    """
    return bool(_SECRET_KEY.search(key)) and not key.endswith("_env")


def shareable(value: Any) -> Any:
    """Return settings as a manifest may hold them: paths relative, secrets not written down."""
    if isinstance(value, dict):
        return {
            key: "(not written down)"
            if is_secret_key(key) and inner is not None
            else shareable(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [shareable(inner) for inner in value]
    return portable_path(value) if isinstance(value, str) else value


# --- checks -------------------------------------------------------------------------------------


def check_int(key: str, value: Any, low: int, high: int | None = None) -> int:
    """Return `value` as an integer within [low, high].

    Raises:
        UsageError: it is no integer or out of range; names the key, the value and what is allowed.
    """
    allowed = f"an integer of at least {low}" if high is None else f"an integer in {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{key}={value}: must be {allowed}.")
    if value < low or (high is not None and value > high):
        raise UsageError(f"{key}={value}: out of range; must be {allowed}.")
    return value


def parse_lengths(value: Any) -> tuple[int, ...]:
    """Return the lengths that `length` names: an integer or a list of different integers."""
    values = value if isinstance(value, list) else [value]
    if not values:
        raise UsageError("length=[]: names no length; for instance length=4096 or [4096,8192].")
    lengths = tuple(check_int("length", one, 1, MAX_LENGTH) for one in values)
    if len(set(lengths)) != len(lengths):
        raise UsageError(f"length={_shown(values)}: names a length twice.")
    return lengths


_RANGE = re.compile(r"([0-9]+)-([0-9]+)")


def parse_ordinals(indices: Any, num_samples: int) -> tuple[int, ...]:
    """Return the ordinals to run, ascending: `indices` where given, else the first num_samples.

    Raises:
        UsageError: an entry is neither an ordinal nor a range LOW-HIGH, or appears twice.
    """
    if indices is None:
        return tuple(range(num_samples))
    if not isinstance(indices, list) or not indices:
        raise UsageError(
            f"indices={_shown(indices)}: must be a list of ordinals and ranges, "
            "for instance indices=[0-4,9] or indices=[17,37]."
        )
    ordinals: list[int] = []
    for entry in indices:
        ordinals.extend(_expand(entry))
    doubled = [one for one, count in Counter(ordinals).items() if count > 1]
    if doubled:
        raise UsageError(f"indices={_shown(indices)}: names ordinal {min(doubled)} twice.")
    return tuple(sorted(ordinals))


MAX_ORDINAL = 999_999
MAX_THREADS = 1024
MAX_TIMEOUT_SECONDS = 1_000_000
MAX_LENGTH = 1 << 24  # keeps a slip of the keyboard from filling memory with one sample


def _expand(entry: Any) -> Sequence[int]:
    if isinstance(entry, int) and not isinstance(entry, bool) and 0 <= entry <= MAX_ORDINAL:
        return [entry]
    match = _RANGE.fullmatch(entry) if isinstance(entry, str) else None
    if match:
        low, high = int(match[1]), int(match[2])
        if low <= high <= MAX_ORDINAL:
            return range(low, high + 1)
    raise UsageError(
        f"indices: {entry!r} is out of range; each entry must be an ordinal (0 to {MAX_ORDINAL}) "
        "or a range such as 0-4."
    )


def as_indices(ordinals: Sequence[int]) -> list[str]:
    """Return ascending ordinals as one would type them: "7" or "0-19"."""
    runs: list[list[int]] = []
    for one in ordinals:
        if runs and one == runs[-1][-1] + 1:
            runs[-1][1:] = [one]
        else:
            runs.append([one])
    return ["-".join(str(end) for end in run) for run in runs]


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ",".join(str(one) for one in value) + "]"
    return str(value)


def check_arms(arms: Sequence[str]) -> tuple[str, ...]:
    """Return the arms, each known and named once."""
    if not arms:
        raise UsageError(f"arms=[]: names no arm. Allowed: {', '.join(sorted(SPELLINGS))}.")
    for arm in arms:
        if not isinstance(arm, str):
            raise UsageError(f"arms={_shown(list(arms))}: {_shown(arm)} is no name of an arm.")
        kind_of(arm)
    if len(set(arms)) != len(arms):
        raise UsageError(f"arms={_shown(list(arms))}: names an arm twice.")
    return tuple(arms)


NEEDS_ARMS = (
    "experiment=leakcheck arms={arms}: one arm alone gives no verdict. A leak needs persistent and "
    "fresh; a race persistent_again, too; an unstable engine fresh and fresh_again; an engine "
    "fault fresh and reference."
)


def check_fresh(fresh: Fresh, arms: Sequence[str], workers: int) -> None:
    """Check how the arms with an engine for each request are to be run.

    Raises:
        UsageError: there are no suspects without other arms, or no workers without processes.
    """
    check_int("workers", workers, 1, MAX_THREADS)
    if workers > 1 and fresh.engine == "inprocess":
        raise UsageError(
            f"workers={workers}: with fresh=inprocess one engine lives at a time; use workers=1, "
            "or fresh=process."
        )
    if fresh.on == "suspects" and all(kind_of(arm).is_fresh for arm in arms):
        raise UsageError(
            f"fresh.on=suspects: arms={_shown(list(arms))} names no arm that could find suspects; "
            "add persistent, or use fresh.on=all."
        )


BIT_KEYS = ("chunk_tokens", "attend_tokens")
"""Settings whose other values promise other bits."""


def check_given(
    given: Collection[str], arms: Sequence[str], fresh: Fresh, workers: int = 1
) -> None:
    """Refuse settings that these arms would not use: what a user sets is never dropped in silence.

    Args:
        given: keys that the user set.
        arms: to run.
        fresh: how.
        workers: fresh engines at a time.

    Raises:
        UsageError: names the key and the arms that would use it.
    """
    named = f"arms={_shown(list(arms))}"
    needs_fresh = {"fresh.on", "fresh.audit"} | ({"workers"} if workers > 1 else set())
    if not any(kind_of(arm).is_fresh for arm in arms):
        for key in sorted(needs_fresh & set(given)):
            raise UsageError(
                f"{key}: {named} has no arm with an engine for each sample, so that it would do "
                "nothing; add fresh, or leave it out."
            )
    if "timeout_seconds" in given and fresh.engine == "inprocess":
        raise UsageError(
            "timeout_seconds: with fresh=inprocess nothing can end an engine that hangs, so that "
            "it would do nothing; use fresh=process, or leave it out."
        )
    same = [arm for arm in arms if _keeps_bits(arm)]
    if "stop_on" in given and len(same) < 2 and not any(map(_asks_twice, same)):
        raise UsageError(
            f"stop_on: {named} never asks the same twice under the same settings, so that it would "
            "do nothing; add fresh or persistent_again, or leave it out."
        )
    if "max_unstable" in given and len(arms) < 2:
        raise UsageError(
            f"max_unstable: {named} gives no verdict, so that it would do nothing; add fresh and "
            "fresh_again, or leave it out."
        )
    for key in sorted(given):
        if key.partition(".")[0] in ("backend@reference", "reference") and not (
            {*REFERENCES} & {*arms}
        ):
            raise UsageError(
                f"{key}: {named} has no arm reference, so that it would do nothing; add it, or "
                "leave the setting out."
            )


def _can_minimise(arms: Sequence[str]) -> bool:
    """Whether there is an arm of one engine, and a fresh one to hold it against."""
    fresh = [arm for arm in arms if kind_of(arm).is_fresh]
    warm = [arm for arm in arms if not kind_of(arm).is_fresh and arm not in REFERENCES]
    return bool(fresh and warm)


def _asks_twice(arm: str) -> bool:
    """Tell whether an arm asks a sample more than once, so that it can contradict itself."""
    (stream,) = streams([arm], [0], boundary_units=[2])
    asked = [one for one in stream.steps if one.source == SAMPLE and one.ordinal == 0]
    return sum(one.scored for one in asked) > 1


def _keeps_bits(arm: str) -> bool:
    """Tell whether an arm's answers may have to be those of the run's own settings."""
    variant = variant_of(arm)
    if arm in REFERENCES or variant is None:
        return arm not in REFERENCES
    return variant.preset is None and not any(
        key in BIT_KEYS for keys, _ in variant.settings for key in keys
    )


def resolve_device(device: str) -> str:
    """Return the device to use: "cpu", "cuda" or "cuda:N".

    Raises:
        UsageError: the name is unknown, or CUDA is asked for and not there.
    """
    if device == "cpu":
        return device
    if device != "auto" and not re.fullmatch(r"cuda(:\d+)?", device):
        raise unknown_name("device", device, ("auto", "cpu", "cuda", "cuda:0"))
    import torch  # noqa: PLC0415 (seconds; not needed where device=cpu)

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if not torch.cuda.is_available():
        raise UsageError(
            f"device={device}: torch {torch.__version__} sees no CUDA GPU here; "
            "use device=cpu, or install a CUDA build of torch."
        )
    number = int(device.partition(":")[2] or 0)
    if number >= torch.cuda.device_count():
        raise UsageError(
            f"device={device}: there are {torch.cuda.device_count()} GPUs, "
            f"cuda:0 to cuda:{torch.cuda.device_count() - 1}."
        )
    return device


def default_threads() -> int:
    """Return the cores this process may use, less one for everything else, at least 1."""
    return max(1, len(os.sched_getaffinity(0)) - 1)


# --- from composed configuration to cells -------------------------------------------------------


def task_spec(config: DictConfig) -> TaskSpec:
    """Return the checked task of a composed configuration."""
    return make_task(_plain(config.task))


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
    lengths = parse_lengths(_plain(config.length))
    ordinals = parse_ordinals(_plain(config.indices), config.num_samples)
    arms = check_arms(_plain(config.arms))
    backend_settings: dict[str, Any] = _plain(config.backend)
    given = {one.lstrip("+~").partition("=")[0] for one in overrides}
    specs = _task_specs(config, given)
    path = model_path(config)
    tokenizer = tokenizer_name(config)
    device = resolve_device(config.device)
    fresh = _fresh(config)
    check_fresh(fresh, arms, config.workers)
    if choices.get("experiment") == "leakcheck" and len(arms) == 1:
        raise UsageError(NEEDS_ARMS.format(arms=_shown(list(arms))))
    if not 0 < config.timeout_seconds <= MAX_TIMEOUT_SECONDS:
        raise UsageError(
            f"timeout_seconds={config.timeout_seconds:g}: out of range; must be above 0 and at "
            f"most {MAX_TIMEOUT_SECONDS}."
        )
    if not 0 <= config.max_unstable <= 1:
        raise UsageError(
            f"max_unstable={config.max_unstable:g}: out of range; must be a share, 0 to 1."
        )
    if config.minimise and not _can_minimise(arms):
        raise UsageError(
            f"minimise=true: arms={_shown(list(arms))} has no answer of an engine that served "
            "others beside one of a fresh engine, so that there would be nothing to look for; use "
            "arms=[persistent,fresh] or more, or leave it out."
        )
    if config.stop_on is not None and config.stop_on not in STOP_ON:
        raise unknown_name("stop_on", config.stop_on, STOP_ON)
    folder = _result_folder(config, choices, overrides, lengths, swept)
    is_diagnosis = choices.get("experiment") == "diagnose"
    chooses_arms = not is_diagnosis or "arms" in given
    first = arms if chooses_arms else arms_of_diagnosis(backend_settings, lengths[0])
    check_given(given - _set_to_nothing(overrides), first, fresh, config.workers)
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
            folder=_cell_folder(folder, length, lengths, spec, suite),
            suite=suite,
            references=_references(config, choices) if {*REFERENCES} & {*arms} else (),
            fresh=fresh,
            workers=config.workers,
            timeout_seconds=config.timeout_seconds,
            stop_on=config.stop_on,
            max_unstable=config.max_unstable,
            minimise=config.minimise,
            note=config.note,
            is_diagnosis=is_diagnosis,
        )
        for length in lengths
        for spec in specs
    ]


def _task_specs(config: DictConfig, given: Collection[str]) -> tuple[TaskSpec, ...]:
    """Return the tasks of a suite, else the one task."""
    if config.suite is None:
        return (task_spec(config),)
    return suite_tasks(_plain(config.suite), given, config_dir())


def _cell_folder(
    folder: Path, length: int, lengths: Sequence[int], spec: TaskSpec, suite: Suite | None
) -> Path:
    """Return the folder of one run within that of the command."""
    if len(lengths) > 1:
        folder = folder / str(length)
    return folder if suite is None else folder / spec.name


def _set_to_nothing(overrides: Sequence[str]) -> set[str]:
    """Return the keys that the user set to null, which leaves them out."""
    pairs = (one.lstrip("+~").partition("=") for one in overrides)
    return {key for key, _, value in pairs if value == "null"}


def _fresh(config: DictConfig) -> Fresh:
    values: dict[str, Any] = _plain(config.fresh)
    names = [one.name for one in dataclasses.fields(Fresh)]
    for key in values:
        if key not in names:
            raise unknown_name("key", f"fresh.{key}", [f"fresh.{name}" for name in names])
    return Fresh(**values)


DEFAULT_REFERENCES = ("hf", "gpu_only")


def _references(config: DictConfig, choices: dict[str, str]) -> tuple[NamedBackend, ...]:
    """Return the backends for the arm reference: the user's, else hf and after it gpu_only."""
    if config.reference is not None:
        return (NamedBackend(choices["backend@reference"], _plain(config.reference)),)
    return tuple(NamedBackend(name, _default_backend(name)) for name in DEFAULT_REFERENCES)


def _default_backend(name: str) -> dict[str, Any]:
    """Return a backend's file as it stands; a policy is left to the backend's own default."""
    path = config_dir() / "backend" / f"{name}.yaml"
    try:
        values: dict[str, Any] = _plain(OmegaConf.load(path))
    except (OSError, OmegaConfBaseException) as error:
        raise UsageError(f"{path} cannot be read; choose backend@reference=NAME.") from error
    return {key: value for key, value in values.items() if key != "defaults"}


def _plain(value: Any) -> Any:
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True)
    return value


def _backend(config: DictConfig) -> dict[str, Any]:
    return dict(_plain(config.get("backend")) or {})


def _result_folder(
    config: DictConfig,
    choices: dict[str, str],
    overrides: list[str],
    lengths: Sequence[int],
    swept: Sequence[str] | None,
) -> Path:
    """Name the folder after everything that changes results, so that no two runs share one."""
    if config.out is not None and not config.out.strip():
        raise UsageError("out: is empty; name a folder, or leave it out.")
    if config.out is not None and swept is None:
        return Path(config.out)
    swept = swept or ()
    joined = "-".join(str(length) for length in lengths)
    what = choices["task" if config.get("suite") is None else "suite"]
    parts = [what, choices["backend"], choices["model"], joined]
    quiet = KEYS_WITHOUT_RESULTS | {
        f"backend.{key}" for key in backend_keys_without_results(_backend(config))
    }
    quiet -= set(swept)
    for override in sorted(overrides):
        key, _, value = override.lstrip("+~").partition("=")
        if not (key in GROUPS_IN_FOLDER_NAME or key in quiet or is_secret_key(key)):
            parts.append(_folder_part(key, value))
    return Path(config.out or "results") / _short("_".join(parts))


MAX_FOLDER_NAME = 200


def _folder_part(key: str, value: str) -> str:
    """Return `key-value` in characters that suit a folder; a hash keeps changed values apart.

    Of a path only the last part is shown. `_` separates the parts of a name, so a value that has
    one is a changed value too.
    """
    safe_key = re.sub(r"[^A-Za-z0-9._]+", "~", key)
    safe_value = re.sub(r"[^A-Za-z0-9.,+-]+", "~", value.rstrip("/").rpartition("/")[2])
    if (safe_key, safe_value) == (key, value):
        return f"{key}-{value}"
    return f"{safe_key}-{safe_value}~{_digest(f'{key}={value}')}"


def _short(name: str) -> str:
    if len(name.encode()) <= MAX_FOLDER_NAME:
        return name
    return f"{name[:160]}~{_digest(name)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
