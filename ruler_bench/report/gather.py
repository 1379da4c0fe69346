"""Runs of many folders, read one after another and made small, on all cores."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruler_bench.errors import UsageError, nearest
from ruler_bench.manifest import FORMAT_VERSION, MANIFEST, RECORDS
from ruler_bench.report.digest import ALL_KEPT_RUNS, FAILURES_KEPT, Digest, digest, with_settings
from ruler_bench.report.rows import Run

FEW_BYTES = 50_000_000
"""Records that one process reads while others would still be starting."""


@dataclass(frozen=True)
class Gathered:
    """What was read.

    Attributes:
        digests: one an arm of a run, with the settings in which the runs differ.
        notes: what was left out or has to be known, one sentence each.
    """

    digests: tuple[Digest, ...]
    notes: tuple[str, ...]


def run_folders(named: Sequence[str]) -> list[Path]:
    """Return the run folders that are named, or lie below what is named, each once.

    Args:
        named: folders, or patterns as a shell has them.

    Raises:
        UsageError: a name is empty or leads to no run; says what does.
    """
    found: dict[Path, Path] = {}
    for name in named:
        if not name.strip():
            raise UsageError(
                "an empty name: names no runs; name a folder, such as results, or . for all that "
                "lies below this one."
            )
        if Path(name).is_file() and not _is_of_a_run(Path(name)):
            raise UsageError(
                f"{name}: is a file of no run; name the folder of a run, one above it, or a run's "
                f"{MANIFEST} or {RECORDS}."
            )
        places = [Path(name)] if Path(name).exists() else _matching(name)
        if not places:
            raise UsageError(f"{name}: there is no such folder.{_nearest_folder(Path(name))}")
        folders = [folder for place in sorted(places) for folder in _below(place)]
        if not folders:
            raise UsageError(
                f"{name}: no run lies there ({MANIFEST} beside {RECORDS}); name the folder that "
                "python -m ruler_bench printed, or one above it."
            )
        for folder in folders:
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def _matching(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    root = Path(path.anchor)
    return sorted(root.glob(str(path.relative_to(root)))) if path.parts else []


def _below(place: Path) -> list[Path]:
    if place.is_file():
        return [place.parent] if _is_of_a_run(place) else []
    folders = [one.parent for one in place.rglob(MANIFEST) if (one.parent / RECORDS).exists()]
    return sorted(folders, key=_by_number)


def _is_of_a_run(file: Path) -> bool:
    """Tell whether a file is the manifest or the records of a run."""
    own = (MANIFEST, RECORDS)
    return file.name in own and all((file.parent / one).is_file() for one in own)


def _by_number(folder: Path) -> list[tuple[int, str]]:
    """Return what sorts names as people do: 8192 before 16384."""
    pieces = re.split(r"(\d+)", str(folder))
    return [(int(one), "") if one.isdecimal() else (0, one) for one in pieces]


def _nearest_folder(path: Path) -> str:
    above = path.parent
    names = [one.name for one in above.iterdir() if one.is_dir()] if above.is_dir() else []
    close = nearest(path.name, names)
    return f" Did you mean {above / close}?" if close else ""


def gather(named: Sequence[str], processes: int | None = None) -> Gathered:
    """Read all runs that are named.

    Args:
        named: see `run_folders`.
        processes: that read; None takes one a core, where there is much to read.

    Raises:
        UsageError: there is no run, or one is damaged or of another version.
    """
    folders = run_folders(named)
    keep = None if len(folders) <= ALL_KEPT_RUNS else FAILURES_KEPT
    if processes is None:
        total = sum((folder / RECORDS).stat().st_size for folder in folders)
        processes = (os.cpu_count() or 1) if total > FEW_BYTES else 1
    jobs = [(number, folder, keep) for number, folder in enumerate(folders)]
    if processes == 1:
        read = [_read(job) for job in jobs]
    else:
        with ProcessPoolExecutor(processes) as pool:
            read = list(pool.map(_read, jobs, chunksize=max(1, len(jobs) // (processes * 8))))
    digests = [one for digests, _ in read for one in digests]
    notes = [note for _, notes in read for note in notes]
    if not digests:
        raise UsageError(f"{', '.join(named)}: the runs have no answers yet; run them first.")
    named_digests = with_settings(digests)
    return Gathered(tuple(named_digests), tuple(notes + _mixed(named_digests)))


def _read(job: tuple[int, Path, int | None]) -> tuple[list[Digest], list[str]]:
    from ruler_bench.journal import by_arm, read_run  # noqa: PLC0415 (it imports this package)

    number, folder, keep = job
    check_version(folder)
    run = read_run(folder)
    notes = []
    if run is None or not run.records:
        return [], [f"{folder}: has no answers yet and was left out."]
    if _is_cut(folder / RECORDS):
        notes.append(f"{folder}: the last line of {RECORDS} is half-written and was left out.")
    if run.manifest.get("finished") is None:
        notes.append(f"{folder}: the run is not finished; the answers that it has are counted.")
    shown: list[Run] = [one for one in by_arm(run) if one.records]
    return [digest(one, number, str(folder), keep) for one in shown], notes


def _is_cut(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def check_version(folder: Path) -> None:
    """Refuse a run of another version of the format, with what can be done about it.

    Raises:
        UsageError: the manifest is of another version; damage is told by who reads it.
    """
    try:
        manifest: Any = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        version = manifest["format_version"]
    except (OSError, ValueError, TypeError, KeyError):
        return
    if isinstance(version, int) and version != FORMAT_VERSION:
        newer = version > FORMAT_VERSION
        advice = (
            "read it with the ruler_bench that wrote it or a later one"
            if newer
            else "run it again with this one"
        )
        raise UsageError(
            f"{folder}: has format {version}, this program reads {FORMAT_VERSION}; {advice}, or "
            "name the other folders alone."
        )


# --- what must be kept apart --------------------------------------------------------------------


def data_of(one: Digest) -> str:
    """Return the fingerprint of a digest's samples."""
    data = one.manifest.get("data")
    return str(data.get("fingerprint", "")) if isinstance(data, dict) else ""


def model_of(one: Digest) -> str:
    """Return the fingerprint of a digest's model."""
    return str(one.manifest.get("model_fingerprint") or "")


def _mixed(digests: Sequence[Digest]) -> list[str]:
    """Say where one name stands for several sets of samples or models, or one cell is doubled."""
    samples: dict[tuple[str, int], set[str]] = {}
    models: dict[str, set[str]] = {}
    cells: dict[tuple[str, ...], list[str]] = {}
    for one in digests:
        row = one.row
        samples.setdefault((row.task, row.length_tokens), set()).add(data_of(one))
        models.setdefault(row.model, set()).add(model_of(one))
        key = (row.task, str(row.length_tokens), row.backend, row.model, one.arm, row.settings)
        cells.setdefault((*key, data_of(one), model_of(one)), []).append(one.folder)
    notes = [
        f"{task} {length}: {len(found)} sets of samples (fingerprints "
        f"{', '.join(sorted(key[:8] for key in found))}); they are kept apart and not compared."
        for (task, length), found in samples.items()
        if len(found) > 1
    ]
    notes += [
        f"model {name}: {len(found)} sets of weights go by that name; they are kept apart."
        for name, found in models.items()
        if len(found) > 1
    ]
    doubled = [folders for folders in cells.values() if len(folders) > 1]
    if doubled:
        notes.append(
            f"cells that are there more than once: {len(doubled)}, such as in "
            f"{' and '.join(doubled[0][:3])}; each stands by itself, none is averaged."
        )
    return notes
