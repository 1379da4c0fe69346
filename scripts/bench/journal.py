"""The folder of one table: rows.jsonl, a line as soon as a row is measured, and manifest.json."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from ruler_bench.device import device_name
from ruler_bench.errors import UsageError
from ruler_bench.manifest import differences, now, versions

FORMAT_VERSION = 1
ROWS, MANIFEST, TABLE, ERRORS = "rows.jsonl", "manifest.json", "table.md", "errors.log"
NVIDIA_SMI_FIELDS = (
    "driver_version",
    "clocks.current.sm",
    "clocks.current.memory",
    "clocks.max.sm",
    "clocks.max.memory",
    "power.limit",
    "temperature.gpu",
    "persistence_mode",
)

Row = dict[str, Any]
"""One measured thing: key, kind, name, length, settings, run, and figures or error."""


class Journal:
    """Rows of one or more runs into one folder; the last row of a key counts.

    Args:
        folder: is made where it is not there.
        settings: what all rows must have in common.
        command: that started this run, without paths.
        facts: of this run, for the manifest.

    Raises:
        UsageError: the folder cannot be written, holds something else, or rows of other settings.
    """

    def __init__(
        self, folder: Path, settings: dict[str, Any], command: str, facts: dict[str, Any]
    ) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"--out {folder}: cannot be made ({error.strerror}); name another folder."
            ) from error
        manifest = read_manifest(folder)
        if manifest is None:
            others = sorted(one.name for one in folder.iterdir())
            if others:
                raise UsageError(
                    f"--out {folder}: holds files that are not of a benchmark ({others[0]}); name "
                    "an empty or new folder."
                )
            manifest = {"format_version": FORMAT_VERSION, "settings": settings, "runs": []}
        found = differences(manifest["settings"], json.loads(json.dumps(settings)))
        if found:
            raise UsageError(
                f"--out {folder}: was measured with other settings ({'; '.join(found)}); name "
                "another folder."
            )
        self._manifest = manifest
        self._this_run: dict[str, Any] = {"command": command, "started": now()} | facts
        self._has_begun = False
        self._rows = read_rows(folder)
        self._write_manifest()

    def has(self, key: str) -> bool:
        """Tell whether a row of that key was measured without an error."""
        row = self._rows.get(key)
        return row is not None and row["error"] is None

    def add(self, row: Row) -> None:
        """Write a row, on disk before this returns."""
        if not self._has_begun:  # a run that measured nothing is none
            self._has_begun = True
            self._manifest["runs"].append(self._this_run)
            self._write_manifest()
        row = {"run": len(self._manifest["runs"]) - 1, "date": now(), **row}
        path = self._folder / ROWS
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._rows[str(row["key"])] = row

    def add_error(self, text: str) -> None:
        """Append a traceback to errors.log."""
        with (self._folder / ERRORS).open("a", encoding="utf-8") as file:
            file.write(text + "\n")

    def _write_manifest(self) -> None:
        path = self._folder / MANIFEST
        part = path.with_suffix(".json.part")
        part.write_text(json.dumps(self._manifest, indent=2) + "\n", encoding="utf-8")
        part.replace(path)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the folder's manifest, or None where there is none.

    Raises:
        UsageError: it is damaged or of another format.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        version = manifest["format_version"]
        if not isinstance(manifest["settings"], dict) or not isinstance(manifest["runs"], list):
            raise TypeError("settings or runs are missing")
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{path} is damaged ({error}); name another folder.") from error
    if version != FORMAT_VERSION:
        raise UsageError(
            f"{path} has format {version}, this program reads format {FORMAT_VERSION}; name "
            "another folder."
        )
    return manifest


def read_rows(folder: Path) -> dict[str, Row]:
    """Return the rows by key, in the order in which they were first measured.

    A half-written last line, as a kill leaves it, is cut off.

    Raises:
        UsageError: another line is damaged.
    """
    path = folder / ROWS
    if not path.is_file():
        return {}
    text = path.read_text(encoding="utf-8")
    whole, newline, rest = text.rpartition("\n")
    if rest:
        path.write_text(whole + newline, encoding="utf-8")
    rows: dict[str, Row] = {}
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            row = json.loads(line)
            rows[row["key"]] = row
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(
                f"{path}, line {number}: damaged; delete the line to measure its row again."
            ) from error
    return rows


def environment(device: torch.device) -> dict[str, Any]:
    """Return versions and the device's name: what must be equal for rows of one table."""
    return {
        "device": device_name(str(device)),
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": versions() | _cuda_versions(device),
    }


def _cuda_versions(device: torch.device) -> dict[str, str]:
    if device.type != "cuda":
        return {}
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return {"cuda": str(torch.version.cuda), "cudnn": str(cudnn)}


def gpu_state(device: torch.device) -> dict[str, str]:
    """Return driver, clocks and limits as nvidia-smi finds them now; nothing where it cannot."""
    program = shutil.which("nvidia-smi")
    if device.type != "cuda" or program is None:
        return {}
    done = subprocess.run(
        [program, f"--id={device.index or 0}", f"--query-gpu={','.join(NVIDIA_SMI_FIELDS)}",
         "--format=csv,noheader"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    values = done.stdout.strip().split(", ")
    if done.returncode or len(values) != len(NVIDIA_SMI_FIELDS):
        return {}
    return dict(zip(NVIDIA_SMI_FIELDS, values, strict=True))


def command_line(script: str, arguments: list[str] | None) -> str:
    """Return the command as one would type it in the checkout; of a path only the last part."""
    words = sys.argv[1:] if arguments is None else arguments
    return " ".join(["python", f"scripts/{script}", *map(_without_path, words)])


def _without_path(word: str) -> str:
    option, equals, value = word.rpartition("=")
    return f"{option}{equals}{Path(value).name if Path(value).is_absolute() else value}"
