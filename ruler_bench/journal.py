"""Journal: a run folder in use; what is recorded, what is missing, and the manifest beside it."""

from __future__ import annotations

import contextlib
import hashlib
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ruler_bench import device, manifest, model_files
from ruler_bench.config import (
    ARMS,
    Cell,
    as_indices,
    backend_keys_without_results,
    portable_path,
    shareable,
)
from ruler_bench.errors import UsageError
from ruler_bench.records import (
    Record,
    RecordingError,
    RecordWriter,
    read_records,
    repair_last_line,
)
from ruler_bench.report import Run
from ruler_bench.score import score
from ruler_bench.tasks import DataSpec, Question, Sample


class Journal:
    """A run folder in use: what is recorded, what is missing, and the manifest beside it."""

    def __init__(
        self, folder: Path, cell: Cell, data: DataSpec, model: Path, overwrite: bool
    ) -> None:
        self.folder = folder
        self._config = cell.settings()
        self._quiet = backend_keys_without_results(cell.backend_settings)
        self._overwrite = overwrite
        self._model_names = {str(model): portable_path(cell.model_path)}
        self._records_path = folder / manifest.RECORDS
        self.manifest = self._open(cell, data, model)
        self._writer = RecordWriter(self._records_path)
        self._records: list[Record] = []
        if not overwrite:
            self._read_records()

    def _read_records(self) -> None:
        cut = repair_last_line(self._records_path)
        if cut:
            print(
                f"{self._records_path}: the last line was half-written ({cut} bytes); cut it off, "
                "its sample runs again.",
                file=sys.stderr,
            )
        self._records = read_records(self._records_path)

    def _open(self, cell: Cell, data: DataSpec, model: Path) -> dict[str, Any]:
        fixed = {
            "task": cell.task.name,
            "length": cell.length,
            "backend": cell.backend,
            "model": cell.model,
            "metric": cell.task.metric,
            "tokens_to_generate": cell.task.tokens_to_generate,
            "config": self._config,
            "data": {**data.describe(), "fingerprint": data.fingerprint()},
            "model_fingerprint": model_files.fingerprint(model),
        }
        old = None if self._overwrite else manifest.read_manifest(self.folder)
        if old is not None:
            held = {key: old.get(key) for key in fixed}
            manifest.check_same(self.folder, self._decisive(held), self._decisive(fixed))
            return old
        if (
            not self._overwrite
            and self._records_path.exists()
            and self._records_path.stat().st_size
        ):
            raise UsageError(
                f"{self.folder} has {manifest.RECORDS} and no {manifest.MANIFEST}, so that nobody "
                "can tell what was run. Restore it from a copy, choose another folder with "
                "out=DIR, or start anew with overwrite=true."
            )
        return {
            "format_version": manifest.FORMAT_VERSION,
            **fixed,
            "backend_in_force": None,
            "device": device.device_name(cell.device),
            "versions": manifest.versions(),
            "command": manifest.command(),
            "started": manifest.now(),
            "finished": None,
            "indices": as_indices(cell.ordinals),
            "lives": [],
        }

    def _decisive(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return settings without what may differ between the engines of one folder."""
        found = dict(settings)
        if isinstance(found.get("backend_in_force"), dict):
            found["backend_in_force"] = self._kept(found["backend_in_force"])
        config = found.get("config")
        if isinstance(config, dict) and isinstance(config.get("backend"), dict):
            found["config"] = config | {"backend": self._kept(config["backend"])}
        return found

    def _kept(self, backend: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in backend.items() if key not in self._quiet}

    @property
    def holds_another_run(self) -> bool:
        """Whether the folder still has the run that is to be overwritten: no engine has started."""
        return self._overwrite

    def finished(self, arm: str) -> list[Record]:
        """Return the arm's finished samples; those that failed are run again."""
        return [one for one in self._records if one.arm == arm and one.error is None]

    def verify(self, questions: Sequence[Question], cell: Cell) -> None:
        """Check every record against the sample that it says it is about.

        Raises:
            UsageError: names the ordinal and the field that does not belong to this run.
        """
        for record in self._records:
            field = self._foreign_field(record, questions, cell)
            if field is not None:
                raise UsageError(
                    f"{self._records_path}: the record of arm {record.arm}, step {record.step} "
                    f"does not belong to this run ({field} differs). Delete its line to run that "
                    "sample again, or start anew with overwrite=true."
                )

    def _foreign_field(
        self, record: Record, questions: Sequence[Question], cell: Cell
    ) -> str | None:
        expected = {"task": cell.task.name, "length": cell.length, "step": record.ordinal}
        if record.arm not in ARMS:
            return "arm"
        if record.ordinal < len(questions):
            sample = questions[record.ordinal].sample
            expected |= {
                "expected": sample.outputs,
                "prompt_sha256": prompt_hash(sample),
            }
            if record.error is None:
                points = score(cell.task.metric, record.output or "", sample.outputs)
                expected |= {"score": points, "correct": points == 100}
        return next((key for key, one in expected.items() if getattr(record, key) != one), None)

    def begin_life(self, arm: str, settings: dict[str, Any]) -> int:
        """Note a new engine in the manifest and return its number within the arm, from 1.

        Raises:
            UsageError: its settings in force differ from those of the engines before it.
            RecordingError: the manifest cannot be written.
        """
        described = {
            # The folder that the harness resolved is the user's model by another name.
            key: self._model_names.get(value, value) if isinstance(value, str) else value
            for key, value in settings.items()
        }
        in_force = shareable(described)
        if self.manifest["backend_in_force"] is not None:
            held = {"backend_in_force": self.manifest["backend_in_force"]}
            asked = {"backend_in_force": in_force}
            manifest.check_same(self.folder, self._decisive(held), self._decisive(asked))
        self.manifest |= {"config": self._config, "backend_in_force": in_force}
        life: int = 1 + sum(one["arm"] == arm for one in self.manifest["lives"])
        self.manifest["lives"].append(
            {
                "arm": arm,
                "life": life,
                "started": manifest.now(),
                "versions": manifest.versions(),
                "command": manifest.command(),
            }
        )
        try:
            if self._overwrite:
                manifest.empty(self.folder)
                self._overwrite = False
            manifest.write_manifest(self.folder, self.manifest)
        except OSError as error:
            raise RecordingError(
                f"could not write the manifest in {self.folder}: {error.strerror}. Nothing was "
                "run; make room and run the same command again."
            ) from error
        return life

    def append(self, record: Record) -> None:
        """Put a record on disk.

        Raises:
            RecordingError: the disk is full.
        """
        self._writer.append(record)
        self._records = [
            one for one in self._records if (one.arm, one.step) != (record.arm, record.step)
        ]
        self._records.append(record)

    @property
    def error_log(self) -> Path:
        """Where tracebacks are kept; records have one line only."""
        return self.folder / manifest.ERROR_LOG

    def log_error(self, where: str) -> None:
        """Keep the traceback of the error in hand."""
        # On a full disk the record's line still says what happened.
        with (
            contextlib.suppress(OSError),
            self.error_log.open("a", encoding="utf-8", errors="backslashreplace") as file,
        ):
            file.write(f"{manifest.now()} {where}\n{traceback.format_exc()}\n")

    def close(self, ordinals: Sequence[int]) -> Run:
        """Close the record file and return the records of the samples that were asked for."""
        self._writer.close()
        chosen = set(ordinals)
        records = [one for one in self._records if one.ordinal in chosen]
        complete = {one.ordinal for one in records} == chosen
        self.manifest |= {
            "indices": as_indices(ordinals),
            "finished": manifest.now() if complete else None,
        }
        return Run(
            manifest=self.manifest, records=sorted(records, key=lambda one: (one.arm, one.step))
        )


def prompt_hash(sample: Sample) -> str:
    """Return the hash by which a record names its prompt."""
    return hashlib.sha256(sample.prompt.encode()).hexdigest()


def read_run(folder: Path, ordinals: Sequence[int] | None = None) -> Run | None:
    """Return what a run folder holds, or None where no run has begun.

    Args:
        folder: of one cell.
        ordinals: only these samples; None for all.

    Raises:
        UsageError: manifest or records are damaged.
    """
    found = manifest.read_manifest(folder)
    if found is None:
        return None
    records = read_records(folder / manifest.RECORDS)
    for one in records:
        if (one.task, one.length) != (found["task"], found["length"]):
            raise UsageError(
                f"{folder / manifest.RECORDS}: the record of ordinal {one.ordinal} is about "
                f"{one.task} at {one.length}, the manifest about {found['task']} at "
                f"{found['length']}."
            )
    chosen = None if ordinals is None else set(ordinals)
    return Run(found, [one for one in records if chosen is None or one.ordinal in chosen])
