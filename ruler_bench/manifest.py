"""The run folder: manifest.json beside records.jsonl, and a lock so that one process owns it."""

from __future__ import annotations

import datetime
import errno
import fcntl
import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from ruler_bench.errors import UsageError
from ruler_bench.leak.arms import arms_of
from ruler_bench.sharing import is_secret_key, portable_path

FORMAT_VERSION = 1
MANIFEST, RECORDS, LOCK = "manifest.json", "records.jsonl", ".lock"
PART, ERROR_LOG = "manifest.json.part", "errors.log"
SERVERS = "servers"
"""Folder of what servers printed that a backend started."""
REPORTED_PACKAGES = (
    "ruler-bench",
    "torch",
    "transformers",
    "tokenizers",
    "numpy",
    "wonderwords",
    "triton",
    "flash-attn",
    "fa3-fwd",
)


def now() -> str:
    """Return the time as ISO 8601 in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages that decide bits."""
    found = {"python": platform.python_version()}
    for package in REPORTED_PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def command() -> list[str]:
    """Return the command line that started this process, without secrets and home folders."""
    arguments = ["python", "-m", "ruler_bench"]
    for argument in sys.argv[1:]:
        key, equals, value = argument.partition("=")
        if key.lstrip("+").startswith("hydra."):
            continue  # the harness's own, such as where a sweep keeps its jobs
        if equals and is_secret_key(key):
            value = "(not written down)"
        # A sweep's value may be several paths.
        value = ",".join(portable_path(one) for one in value.split(","))
        arguments.append(f"{key}={value}" if equals else portable_path(key))
    return arguments


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the folder's manifest, or None where there is none.

    Raises:
        UsageError: the file is damaged or of another format.
    """
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        manifest = _loaded(path)
        problem = _problem(manifest)
    except ValueError as error:
        manifest, problem = {}, str(error)
    if problem:
        raise UsageError(
            f"{path} is damaged ({problem}). Restore it from a copy, or start anew with "
            "overwrite=true."
        )
    version = manifest["format_version"]
    if version != FORMAT_VERSION:
        raise UsageError(
            f"{path} has format {version}, this program reads format {FORMAT_VERSION}. "
            "Choose another folder with out=DIR, or start anew with overwrite=true."
        )
    return manifest


def _loaded(path: Path) -> dict[str, Any]:
    """Return the object that a file holds.

    Raises:
        ValueError: it holds none; says why in the user's words.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise ValueError("is no UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is no JSON from line {error.lineno}, column {error.colno} on") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("is no JSON object")
    return found


_TEXT_KEYS = ("task", "backend", "model", "metric")


def _problem(manifest: dict[str, Any]) -> str | None:
    """Return what is wrong with a manifest's own fields, or None."""
    if "format_version" not in manifest:
        return "has no format_version"
    if type(manifest["format_version"]) is not int:
        return "format_version is no number"
    for key in _TEXT_KEYS:
        if not isinstance(manifest.get(key), str):
            return f"{key} is no text"
    if type(manifest.get("length")) is not int:
        return "length is no number"
    try:
        arms_of(manifest)
    except ValueError as error:
        return str(error)
    return _problem_of_engines(manifest)


def _problem_of_engines(manifest: dict[str, Any]) -> str | None:
    sources = manifest.get("sources", {})
    if not isinstance(sources, dict) or not all(isinstance(one, dict) for one in sources.values()):
        return "sources is no list of packages"
    lives = manifest.get("lives")
    if not isinstance(lives, list) or not all(
        isinstance(one, dict) and isinstance(one.get("arm"), str) for one in lives
    ):
        return "lives is no list of engines"
    return None


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Replace the folder's manifest in one step, so that a kill leaves the old or the new one."""
    path = folder / MANIFEST
    temporary = folder / PART
    with temporary.open("w") as file:
        json.dump(manifest, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def differences(old: Any, new: Any, key: str = "") -> list[str]:
    """Return one `key: OLD there, NEW here` for each leaf in which two settings differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        found = []
        for name in sorted(old.keys() | new.keys()):
            inner = f"{key}.{name}" if key else name
            found += differences(old.get(name), new.get(name), inner)
        return found
    return [] if old == new else [f"{key}: {old} there, {new} here"]


def check_same(folder: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Refuse a folder whose settings are not the ones asked for now.

    Raises:
        UsageError: names what differs.
    """
    # A manifest has been through JSON: tuples are lists there.
    found = differences(old, json.loads(json.dumps(new)))
    if found:
        raise UsageError(
            f"{folder} was made with other settings ({'; '.join(found)}). Choose another folder "
            "with out=DIR, or start anew with overwrite=true."
        )


@contextmanager
def locked_folder(folder: Path) -> Iterator[Path]:
    """Create the folder and own it; take it away again if no run has begun in it.

    Raises:
        UsageError: it is a file, cannot be written, or another process owns it.
    """
    with owned_folder(folder):
        _check_files(folder)
        try:
            yield folder
        finally:
            _remove_if_unused(folder)


@contextmanager
def owned_folder(folder: Path) -> Iterator[None]:
    """Create the folder and own it, whatever it holds.

    Raises:
        UsageError: it is a file, cannot be written, or another process owns it.
    """
    with _open_lock(folder) as lock:
        _take(lock, folder)
        yield


def check_folder(folder: Path) -> None:
    """Check that a run could have the folder, without making or changing anything.

    Raises:
        UsageError: see `locked_folder`.
    """
    try:
        if folder.is_dir():
            if (folder / LOCK).exists():
                with (folder / LOCK).open() as lock:
                    _take(lock, folder)
            _check_files(folder)
        elif _exists(folder):
            raise UsageError(f"out={folder}: is a file; name a folder.")
        there = next(one for one in (folder, *folder.absolute().parents) if _exists(one))
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _not_writable(folder, error) from error


def _exists(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _take(lock: IO[str], folder: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UsageError(
            f"{folder} is in use by another ruler_bench process. Wait for it, or choose "
            "another folder with out=DIR."
        ) from error


def _not_writable(folder: Path, error: OSError) -> UsageError:
    return UsageError(
        f"out={folder}: cannot be written ({error.strerror}). Choose another folder with out=DIR."
    )


def _open_lock(folder: Path) -> IO[str]:
    try:
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"out={folder}: is a file; name a folder.")
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / LOCK).open("w")
    except OSError as error:
        raise _not_writable(folder, error) from error


def _remove_if_unused(folder: Path) -> None:
    """Remove a folder in which no run has begun, such as after a setting that was refused."""
    if [one.name for one in folder.iterdir()] == [LOCK]:
        shutil.rmtree(folder, ignore_errors=True)


RUN_FILES = (
    MANIFEST,
    RECORDS,
    ERROR_LOG,
    "report.md",
    "report.html",
    "summary.csv",
    "depth.csv",
    "verdict.json",
    "junit.xml",
)
REPRODUCER = "reproducer"
RUN_FOLDERS = ("predictions", REPRODUCER)


def _check_files(folder: Path) -> None:
    """Refuse a folder that is no run's, or whose files are not files.

    Raises:
        UsageError: names what stands there.
    """
    for name in RUN_FILES:
        path = folder / name
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise UsageError(f"{path} is no ordinary file: choose another folder with out=DIR.")
    if (folder / MANIFEST).exists() or (folder / RECORDS).exists():
        return
    others = {one.name for one in folder.iterdir()} - {LOCK, ERROR_LOG, PART, SERVERS}
    if others:
        raise UsageError(
            f"out={folder}: holds files that no run wrote ({min(others)}); choose an empty or new "
            "folder."
        )


def empty(folder: Path) -> None:
    """Remove what a run writes, and nothing else that a user may keep there."""
    for name in RUN_FILES:
        (folder / name).unlink(missing_ok=True)
    for name in RUN_FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)
