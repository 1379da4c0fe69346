"""The reproducer: a folder with the shortest sequence of requests after which an answer changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ruler_bench.errors import UsageError
from ruler_bench.leak.probe import LEVELS, Answer, Ask

FORMAT_VERSION = 1
ABOUT, REQUESTS, EXPECTED, WRONG, README = (
    "reproducer.json",
    "requests.jsonl",
    "expected.json",
    "wrong.json",
    "README.md",
)


@dataclass(frozen=True)
class Engine:
    """The engine that a reproducer is about.

    Attributes:
        backend: name of its configuration.
        settings: the composed configuration, `_target_` included.
        model: what tables call the model.
        model_path: as the user gave it.
        device: "cpu", "cuda" or "cuda:N".
        threads: CPU threads.
        max_model_len: tokens of the context it is built for where the settings do not say.
        timeout_seconds: for its start, and for each request.
    """

    backend: str
    settings: dict[str, Any]
    model: str
    model_path: str
    device: str
    threads: int
    max_model_len: int
    timeout_seconds: float


@dataclass(frozen=True)
class Reproducer:
    """A reproducer as its folder holds it.

    Attributes:
        task, arm, ordinal: of the victim.
        engine: what it was found with.
        asks: the requests, the victim last.
        level: how its answer changes.
        expected, wrong: its answer alone, and after the others.
        shown, tries: in how many of how many repeats it changed.
        about: everything else that is told: settings in force, versions, how it was found.
    """

    task: str
    arm: str
    ordinal: int
    engine: Engine
    asks: tuple[Ask, ...]
    level: str
    expected: Answer
    wrong: Answer
    shown: int
    tries: int
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tries_needed(self) -> int:
        """How often to ask these requests before it may be said that the change does not show."""
        return 1 if self.shown == self.tries else self.tries


def check_folder(folder: Path, option: str) -> None:
    """Refuse a folder that holds something else than a reproducer.

    Raises:
        UsageError: names what stands there.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{option}{folder}: is a file; name a folder with --out DIR.")
    if folder.is_dir() and not (folder / ABOUT).exists() and any(folder.iterdir()):
        raise UsageError(
            f"{option}{folder}: holds files that are no reproducer; name an empty or new folder "
            "with --out DIR."
        )


def write_reproducer(folder: Path, found: Reproducer, readme: str) -> None:
    """Write a reproducer's folder.

    Raises:
        UsageError: it cannot be written.
    """
    about = {
        "format_version": FORMAT_VERSION,
        "task": found.task,
        "arm": found.arm,
        "ordinal": found.ordinal,
        "level": found.level,
        "shown": found.shown,
        "tries": found.tries,
        "engine": asdict(found.engine),
        **found.about,
    }
    last = len(found.asks) - 1
    rows = [
        {"role": "victim" if place == last else "predecessor", **asdict(ask)}
        for place, ask in enumerate(found.asks)
    ]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(one, allow_nan=False) + "\n" for one in rows)
        (folder / REQUESTS).write_text(lines)
        for name, value in (
            (EXPECTED, asdict(found.expected)),
            (WRONG, asdict(found.wrong)),
            (ABOUT, about),
        ):
            (folder / name).write_text(json.dumps(value, indent=2, allow_nan=False) + "\n")
        (folder / README).write_text(readme, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--out {folder}: cannot be written ({error.strerror}).") from error


def read_reproducer(folder: Path) -> Reproducer:
    """Read a reproducer's folder.

    Raises:
        UsageError: it is none, or damaged; names the file.
    """
    about = _read(folder, ABOUT, json.loads)
    rows = _read(folder, REQUESTS, lambda text: [json.loads(one) for one in text.splitlines()])
    answers = {name: _read(folder, name, json.loads) for name in (EXPECTED, WRONG)}
    try:
        if about["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format {about['format_version']}, not {FORMAT_VERSION}")
        asks = tuple(_ask_of(row) for row in rows)
        if len(asks) < 2 or len({one.request_id for one in asks}) < len(asks):
            raise ValueError(f"{REQUESTS} needs two requests or more, each with its own id")
        if about["level"] not in LEVELS:
            raise ValueError(f"level is {about['level']!r}")
        return Reproducer(
            task=str(about["task"]),
            arm=str(about["arm"]),
            ordinal=int(about["ordinal"]),
            engine=Engine(**about["engine"]),
            asks=asks,
            level=about["level"],
            expected=_answer_of(answers[EXPECTED]),
            wrong=_answer_of(answers[WRONG]),
            shown=int(about["shown"]),
            tries=int(about["tries"]),
            about=about,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{folder}: is damaged ({type(error).__name__}: {error}); make it anew with "
            "python -m ruler_bench.minimise RUN."
        ) from error


def _read(folder: Path, name: str, parse: Callable[[str], Any]) -> Any:
    path = folder / name
    try:
        return parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"{path}: cannot be read ({error.strerror}); name a folder that python -m "
            "ruler_bench.minimise RUN made."
        ) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{path}: is damaged ({error}); make it anew with python -m ruler_bench.minimise RUN."
        ) from error


def _ask_of(row: Mapping[str, Any]) -> Ask:
    values = {key: value for key, value in row.items() if key != "role"}
    for key in ("prompt_token_ids", "stop_token_ids"):
        values[key] = tuple(int(one) for one in values[key])
    return Ask(**values)


def _answer_of(values: Mapping[str, Any]) -> Answer:
    kept: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
    }
    return Answer(**kept)
