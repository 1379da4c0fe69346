"""The folder of a proof: what was asked for, every answer as it came, and what is still missing."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ruler_bench import manifest as files
from ruler_bench.errors import UsageError
from ruler_bench.journal import prompt_hash
from ruler_bench.records import Record, RecordWriter, read_records, repair_last_line
from ruler_bench.sharing import shareable
from ruler_bench.tasks import Question
from scripts.check.engines import EngineSpec
from scripts.check.memory import MemorySample
from scripts.check.serving import Done, Failure, Life, Message, Step, Stream

ROWS, MEMORY, REPORT = "rows.jsonl", "memory.jsonl", "report.md"
FORMAT_VERSION = 1
MEASURED = ("compile_seconds", "memory_plan")
"""What an engine describes that is no setting, and may differ with what else the machine does."""


class Ledger:
    """The folder of a proof; every message is on disk before the next one is taken.

    Args:
        folder: an existing one; what an earlier run left there is continued.

    Raises:
        UsageError: a file in it is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = _read_manifest(folder / files.MANIFEST)
        self._writer = RecordWriter(folder / ROWS)
        for name in (ROWS, MEMORY):
            repair_last_line(folder / name)
        self._records: dict[str, dict[int, Record]] = {}
        for record in read_records(folder / ROWS):
            self._keep(record)
        self._memory = _read_memory(folder / MEMORY)

    def begin(self, check: str, settings: dict[str, Any]) -> None:
        """Note a check that is about to run.

        Raises:
            UsageError: the folder holds it with other settings.
        """
        checks: dict[str, Any] = self.manifest["checks"]
        plain = json.loads(json.dumps(settings))
        differences = files.differences(checks.get(check, plain), plain)
        if differences:
            raise UsageError(
                f"{self.folder}: the check {check} was begun with other settings "
                f"({'; '.join(differences)}). Choose another folder with --out DIR."
            )
        checks[check] = plain
        self._write_manifest()

    def stream(
        self,
        arm: str,
        engine: EngineSpec,
        steps: Sequence[Step],
        *,
        whole: bool,
        fresh: bool = False,
        memory_every: int = 0,
    ) -> Stream | None:
        """Return what is still to be served of a stream, or None where that is nothing.

        Args:
            arm: name of the stream.
            engine: what serves it.
            steps: all of it.
            whole: one engine must serve all; if anything is missing, all of it is served again.
            fresh: see `Stream`.
            memory_every: see `Stream`.
        """
        records = self._records.get(arm, {})
        missing = [step for step in steps if not _answers(records.get(step.number), step)]
        if not missing:
            return None
        life = 1 + self.manifest["lives"].get(arm, 0)
        chosen = tuple(steps if whole else missing)
        return Stream(arm, engine, chosen, life, fresh=fresh, memory_every=memory_every)

    def take(self, message: Message) -> None:
        """Put a message on disk.

        Raises:
            RecordingError: the disk is full.
        """
        match message:
            case Record():
                self._writer.append(message)
                self._keep(message)
            case MemorySample():
                _append_line(self.folder / MEMORY, asdict(message))
                self._memory.append(message)
            case Life():
                self._begin_life(message)
            case Failure():
                print(f"{message.arm}: {message.reason}", file=sys.stderr, flush=True)
                self.manifest["failures"][message.arm] = message.reason
                self.manifest["wrong_settings"] |= message.by_configuration
                self._write_manifest()
            case Done():
                print(
                    f"{message.arm}: {message.requests} requests in {message.seconds:.1f} s",
                    file=sys.stderr,
                    flush=True,
                )

    def _begin_life(self, life: Life) -> None:
        arm = life.arm
        in_force = shareable(
            {key: one for key, one in life.in_force.items() if key not in MEASURED}
        )
        self.manifest["lives"][arm] = life.number
        self.manifest["failures"].pop(arm, None)
        if self.manifest["in_force"].setdefault(arm, in_force) != in_force:
            self.manifest["failures"][arm] = "its engines had different settings in force"
        self._write_manifest()

    def records(self, arm: str) -> list[Record]:
        """Return the answers of a stream in its order."""
        return [record for _, record in sorted(self._records.get(arm, {}).items())]

    def memory(self, arm: str) -> list[MemorySample]:
        """Return what was measured in the last life of a stream."""
        life = self.manifest["lives"].get(arm)
        return [one for one in self._memory if (one.arm, one.life) == (arm, life)]

    def in_force(self, arm: str) -> dict[str, Any]:
        """Return the settings in force of a stream's engines; none where none was started."""
        found: dict[str, Any] = self.manifest["in_force"].get(arm, {})
        return found

    def failures(self, prefix: str) -> list[str]:
        """Return what ended streams early, of those whose names begin so."""
        found: dict[str, str] = self.manifest["failures"]
        return [f"{arm}: {reason}" for arm, reason in found.items() if arm.startswith(prefix)]

    def begin_command(self, command: list[str], device: str) -> None:
        """Note a command that adds to the folder, once one of its checks begins."""
        self.manifest["wrong_settings"] = False
        self.manifest["commands"].append(
            {
                "command": command,
                "started": files.now(),
                "device": device,
                "versions": files.versions(),
            }
        )

    def close(self) -> None:
        """Close the file of answers."""
        self._writer.close()

    def _keep(self, record: Record) -> None:
        self._records.setdefault(record.arm, {})[record.step] = record

    def _write_manifest(self) -> None:
        files.write_manifest(self.folder, self.manifest)


@contextmanager
def open_ledger(folder: Path) -> Iterator[Ledger]:
    """Own a folder, which is made where missing, and continue what it holds.

    Raises:
        UsageError: another process owns it, or its content is no proof's.
    """
    with files.locked_folder(folder):
        ledger = Ledger(folder)
        try:
            yield ledger
        finally:
            ledger.close()


def steps(questions: Iterable[tuple[int, Question]]) -> tuple[Step, ...]:
    """Return numbered questions as steps."""
    return tuple(Step(number, question) for number, question in questions)


def _answers(record: Record | None, step: Step) -> bool:
    if record is None or record.error is not None:
        return False
    return record.prompt_sha256 == prompt_hash(step.question.sample)


def _read_manifest(path: Path) -> dict[str, Any]:
    empty: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "commands": [],
        "checks": {},
        "lives": {},
        "in_force": {},
        "failures": {},
        "wrong_settings": False,
    }
    if not path.exists():
        return empty
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict) or {name: type(one) for name, one in found.items()} != {
        name: type(one) for name, one in empty.items()
    }:
        raise UsageError(f"{path} is no manifest of this script; choose another --out DIR.")
    return found


def _read_memory(path: Path) -> list[MemorySample]:
    if not path.exists():
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [MemorySample(**json.loads(line)) for line in lines]
    except (ValueError, TypeError) as error:
        raise UsageError(f"{path} is damaged ({error}); choose another --out DIR.") from error


def _append_line(path: Path, values: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")
        file.flush()
        os.fsync(file.fileno())
