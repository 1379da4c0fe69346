"""Journal: a run folder in use; what is recorded, what is missing, and the manifest beside it."""

from __future__ import annotations

import contextlib
import hashlib
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ruler_bench import device, manifest, model_files, source
from ruler_bench.cell import Cell
from ruler_bench.errors import UsageError
from ruler_bench.leak.arms import REFERENCE, REFERENCES, Arm, in_running_order, variant_of
from ruler_bench.leak.join import ArmFacts, arm_facts
from ruler_bench.questions import Questions
from ruler_bench.records import Record, RecordingError, RecordWriter, read_records, repair_last_line
from ruler_bench.report import Run
from ruler_bench.result_folder import backend_keys_without_results
from ruler_bench.score import score
from ruler_bench.sharing import portable_path, shareable
from ruler_bench.streams import Step, Stream
from ruler_bench.tasks import DataSpec, Sample
from ruler_bench.values import as_indices

SOURCES = "sources"
"""In the manifest: which code the engines are, see `ruler_bench.source`."""
OTHER_LENGTHS = ("length_mix", "boundary", REFERENCE)
"""Arms that also ask prompts of other lengths."""
OTHER_SETTINGS = REFERENCES
"""Arms whose engines are not of the run's backend as it was asked for."""


class Journal:
    """A run folder in use: what is recorded, what is missing, and the manifest beside it."""

    def __init__(
        self,
        cell: Cell,
        data: DataSpec,
        model: Path,
        overwrite: bool,
        only_look: bool = False,
    ) -> None:
        """Read what the folder holds.

        Args:
            cell: the run; its folder is locked, or only looked at.
            data: its samples.
            model: its model's folder.
            overwrite: what the folder holds is not gone on with.
            only_look: nothing is repaired.

        Raises:
            UsageError: the folder is damaged, or holds a run of other settings or other code.
        """
        self.folder = cell.folder
        self._config = cell.settings()
        self._quiet = backend_keys_without_results(cell.backend_settings)
        self._begun: dict[str, dict[str, Any]] = {}
        self._overwrite = overwrite
        self._model_names = {str(model): portable_path(cell.model_path)}
        self._records_path = self.folder / manifest.RECORDS
        self.manifest = self._open(cell, data, model)
        self._writer = RecordWriter(self._records_path)
        self._records: list[Record] = []
        if not overwrite:
            self._read_records(only_look)
        self._note_sources(cell)

    def _note_sources(self, cell: Cell) -> None:
        """Put into the manifest which code the engines are.

        Raises:
            UsageError: other code gave the answers that are recorded.
        """
        targets = (cell.backend_settings, *(one.settings for one in cell.references))
        here = source.sources(str(one["_target_"]) for one in targets)
        there = self.manifest.get(SOURCES) or {}
        if any(one.error is None for one in self._records):
            source.check_unchanged(self.folder, there, here)
        self.manifest[SOURCES] = there | here

    def _read_records(self, only_look: bool) -> None:
        cut = 0 if only_look else repair_last_line(self._records_path)
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
            "arms": {},
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

    @property
    def records(self) -> list[Record]:
        """The records of the folder, the last for each step."""
        return list(self._records)

    def arms(self) -> dict[str, ArmFacts]:
        """Return the arms that ran, by name."""
        return arm_facts(self.manifest, self._records)

    def finished(self, arm: str) -> list[Record]:
        """Return the arm's finished samples; those that failed are run again."""
        return [one for one in self._records if one.arm == arm and one.error is None]

    def verify(self, streams: Sequence[Stream], questions: Questions, cell: Cell) -> None:
        """Check every record against the request that it says it is about.

        Args:
            streams: of every arm that has records, for the ordinals that were asked.
            questions: of the steps that were made.
            cell: the run.

        Raises:
            UsageError: names the ordinal and the field that does not belong to this run.
        """
        steps = {(one.arm, step.step): step for one in streams for step in one.steps}
        known = {"persistent", *self.manifest.get("arms", {})}
        for record in self._records:
            field = None
            if record.task != cell.task.name:
                field = "task"
            elif record.arm not in known:
                field = "arm"
            elif (step := steps.get((record.arm, record.step))) is not None:
                field = self._foreign_field(record, step, questions, cell)
            elif record.ordinal in cell.ordinals:
                field = "step"
            if field is not None:
                raise UsageError(
                    f"{self._records_path}: the record of arm {record.arm}, step {record.step} "
                    f"does not belong to this run ({field} differs). Delete its line to run that "
                    "sample again, or start anew with overwrite=true."
                )

    def _foreign_field(
        self, record: Record, step: Step, questions: Questions, cell: Cell
    ) -> str | None:
        expected: dict[str, Any] = {"ordinal": step.ordinal}
        if questions.knows(step):
            asked = questions.asked(step)
            sample = asked.question.sample
            expected |= {
                "length": asked.length,
                "expected": sample.outputs,
                "prompt_sha256": prompt_hash(sample),
            }
            if record.error is None and asked.scored:
                points = score(cell.task.metric, record.output or "", sample.outputs)
                expected |= {"score": points, "correct": points == 100}
            elif record.error is None:
                expected |= {"score": None, "correct": None}
        return next((key for key, one in expected.items() if getattr(record, key) != one), None)

    def begin_life(self, arm: Arm, settings: dict[str, Any] | None, start_seconds: float) -> int:
        """Note a new engine in the manifest and return its number within the arm, from 1.

        Of an arm with an engine for each request, the manifest has one entry for all engines of
        one command, written with the first and at the end of the run.

        Args:
            arm: with the backend's name; its settings are filled in.
            settings: in force; None where the engine never told.
            start_seconds: how long it took to build.

        Raises:
            UsageError: its settings in force differ from those of the engines before it.
            RecordingError: the manifest cannot be written.
        """
        if settings is not None:
            self._note_arm(arm, settings)
        life = 1 + self._last_life(arm.name)
        entry = self._begun.get(arm.name)
        if entry is not None and arm.is_fresh:
            entry["engines"] += 1
            entry["start_seconds"] += start_seconds
            return life
        entry = {
            "arm": arm.name,
            "life": life,
            "engines": 1,
            "start_seconds": start_seconds,
            "started": manifest.now(),
            "versions": manifest.versions(),
            "command": manifest.command(),
        }
        self._begun[arm.name] = entry
        self.manifest["lives"].append(entry)
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

    def _last_life(self, arm: str) -> int:
        """Return the number of the arm's last engine, 0 where it had none."""
        noted: list[int] = [
            one.get("life", 1) + one.get("engines", 1) - 1
            for one in self.manifest["lives"]
            if one["arm"] == arm
        ]
        recorded = [one.life for one in self._records if one.arm == arm]
        return max([0, *noted, *recorded])

    def _note_arm(self, arm: Arm, settings: dict[str, Any]) -> None:
        described = {
            # The folder that the harness resolved is the user's model by another name.
            key: self._model_names.get(value, value) if isinstance(value, str) else value
            for key, value in settings.items()
        }
        in_force = shareable(described)
        entry = replace(arm, settings=in_force).to_manifest()
        held = self.manifest.setdefault("arms", {}).get(arm.name)
        if held is not None:
            there, here = ({"arms": {arm.name: self._arm_kept(one)}} for one in (held, entry))
            manifest.check_same(self.folder, there, here)
        if arm.name not in OTHER_SETTINGS and variant_of(arm.name) is None:
            if self.manifest["backend_in_force"] is not None:
                before = {"backend_in_force": self.manifest["backend_in_force"]}
                asked = {"backend_in_force": in_force}
                manifest.check_same(self.folder, self._decisive(before), self._decisive(asked))
            self.manifest |= {"config": self._config, "backend_in_force": in_force}
        self.manifest["arms"][arm.name] = entry

    def _arm_kept(self, entry: dict[str, Any]) -> dict[str, Any]:
        return entry | {"settings": self._kept(entry["settings"])}

    def note(self, key: str, value: Any) -> None:
        """Put something into the manifest; it is written with the next engine or at the end."""
        self.manifest[key] = value

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

    def log_error(self, where: str, text: str | None = None) -> None:
        """Keep a traceback: this text, else that of the error in hand."""
        # On a full disk the record's line still says what happened.
        with (
            contextlib.suppress(OSError),
            self.error_log.open("a", encoding="utf-8", errors="backslashreplace") as file,
        ):
            file.write(f"{manifest.now()} {where}\n{text or traceback.format_exc()}\n")

    def close(self, streams: Sequence[Stream], ordinals: Sequence[int]) -> Run:
        """Close the record file and return the records that were asked for, of all arms."""
        self._writer.close()
        asked = {(one.arm, step.step) for one in streams for step in one.steps}
        records = [one for one in self._records if (one.arm, one.step) in asked]
        complete = {(one.arm, one.step) for one in records} == asked
        self.manifest |= {
            "indices": as_indices(ordinals),
            "finished": manifest.now() if complete else None,
        }
        return Run(manifest=self.manifest, records=records)


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
        has_length = one.length == found["length"] or one.arm in OTHER_LENGTHS
        if one.task != found["task"] or not has_length:
            raise UsageError(
                f"{folder / manifest.RECORDS}: the record of ordinal {one.ordinal} is about "
                f"{one.task} at {one.length}, the manifest about {found['task']} at "
                f"{found['length']}."
            )
    chosen = None if ordinals is None else set(ordinals)
    return Run(found, [one for one in records if chosen is None or one.ordinal in chosen])


def by_arm(run: Run) -> list[Run]:
    """Return a run's arms as runs of their own, for tables: cheap arms first.

    Requests without a score, which belong to an arm's procedure, are left out; they stay in the
    records.
    """
    names = {one.arm for one in run.records}
    found = [
        Run(
            run.manifest,
            sorted(
                (
                    one
                    for one in run.records
                    if one.arm == name and (one.score is not None or one.error is not None)
                ),
                key=lambda one: one.step,
            ),
        )
        for name in in_running_order(names)
    ]
    return [one for one in found if one.records] or [Run(run.manifest, [])]
