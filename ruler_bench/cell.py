"""Cell: one run, a task at one length on one backend, with all that was asked for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruler_bench.errors import UsageError, unknown_name
from ruler_bench.sharing import portable_path, shareable
from ruler_bench.suites import Suite
from ruler_bench.tasks import TaskSpec
from ruler_bench.tokenizer import PLAIN, Chat
from ruler_bench.values import MAX_ORDINAL, check_int

FRESH_ENGINES = ("process", "inprocess")
FRESH_STARTS = ("forkserver", "spawn")
FRESH_ON = ("all", "suspects")
STOP_ON = ("leak",)
PROGRESS = ("auto", "bar", "lines", "json", "none")


@dataclass(frozen=True)
class NamedBackend:
    """A composed backend configuration, `_target_` included, and its name."""

    name: str
    settings: dict[str, Any]


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
        progress: how it is told how the run goes: one of PROGRESS.
        is_diagnosis: whether the hypotheses of `ruler_bench.leak.diagnosis` are answered. Arms that
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
    progress: str = "auto"
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
