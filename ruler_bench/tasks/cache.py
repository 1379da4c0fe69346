"""Prepared samples on disk, under the fingerprint of everything that decides them.

An entry is a folder that `datasets` wrote, with a note of what it holds:

    <cache>/niah_single_1-4096-0f3a.../20-81c2.../data-00000-of-00001.arrow ...
                                                 /entry.json

It is written beside its place and renamed, so that it is there whole or not at all; its name is
its own, so that two processes never write the same one; and its content is hashed, so that a
damaged one is thrown away.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ruler_bench.tasks.generate import generate
from ruler_bench.tasks.sample import Sample
from ruler_bench.tasks.spec import DataSpec

ENTRY_FILE = "entry.json"

_log = logging.getLogger(__name__)


def load_samples(
    spec: DataSpec,
    num_samples: int,
    cache_dir: Path,
    progress: Callable[[str], None] | None = None,
) -> list[Sample]:
    """Return the first `num_samples` samples, from the cache where they are in it.

    A cached run serves every shorter one. A cache that cannot be written costs a warning and
    nothing else.

    Args:
        spec: what decides the data.
        num_samples: how many.
        cache_dir: folder of all entries; made where missing.
        progress: see `generate`.

    Raises:
        UsageError: see `generate`.
    """
    fingerprint = spec.fingerprint()
    folder = cache_dir / f"{spec.task.name}-{spec.length}-{fingerprint[:16]}"
    for _, entry in sorted(_entries(folder)):
        samples = _read(entry, fingerprint)
        if samples is None:
            shutil.rmtree(entry, ignore_errors=True)
        elif len(samples) >= num_samples:
            return samples[:num_samples]
    samples = generate(spec, num_samples, progress)
    try:
        _write(folder, fingerprint, samples)
    except OSError as error:
        _log.warning("prepared samples are not kept: %s: %s", folder, error.strerror or error)
    return samples


def _entries(folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield the finished entries with the number of their samples, as their names tell it."""
    for path in folder.glob("[0-9]*-*"):
        number = path.name.partition("-")[0]
        if number.isdigit():
            yield int(number), path


def _read(entry: Path, fingerprint: str) -> list[Sample] | None:
    """Return the samples of an entry; None if it is damaged or holds something else."""
    try:
        note = json.loads((entry / ENTRY_FILE).read_text(encoding="utf-8"))
        if note["fingerprint"] != fingerprint:
            return None
        samples = [_from_row(row) for row in _load_rows(entry)]
    except Exception as error:  # whatever a damaged file makes of the readers
        _log.warning("a damaged cache entry is thrown away: %s: %s", entry, error)
        return None
    if _hash(samples) != note["sha256"]:
        _log.warning("a damaged cache entry is thrown away: %s: its content changed", entry)
        return None
    return samples


def _write(folder: Path, fingerprint: str, samples: Sequence[Sample]) -> None:
    """Write an entry, then drop those that it supersedes."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{len(samples)}-{secrets.token_hex(8)}"
    draft = folder / f"draft-{name}"
    try:
        _save_rows([dataclasses.asdict(sample) for sample in samples], draft)
        note = {"fingerprint": fingerprint, "sha256": _hash(samples)}
        (draft / ENTRY_FILE).write_text(json.dumps(note), encoding="utf-8")
        draft.rename(folder / name)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    for number, entry in _entries(folder):
        if number < len(samples):
            shutil.rmtree(entry, ignore_errors=True)


def _hash(samples: Sequence[Sample]) -> str:
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(json.dumps(dataclasses.asdict(sample)).encode() + b"\n")
    return digest.hexdigest()


def _from_row(row: dict[str, Any]) -> Sample:
    return Sample(**{**row, "outputs": tuple(row["outputs"])})


def _load_rows(entry: Path) -> Iterator[dict[str, Any]]:
    import datasets  # noqa: PLC0415 (seconds)

    yield from datasets.load_from_disk(str(entry))


def _save_rows(rows: list[dict[str, Any]], folder: Path) -> None:
    import datasets  # noqa: PLC0415

    text, integer = datasets.Value("large_string"), datasets.Value("int64")
    features = datasets.Features(
        {
            "task": text,
            "ordinal": integer,
            "input": text,
            "answer_prefix": text,
            "outputs": datasets.List(text),
            "length": integer,
            "tokens_to_generate": integer,
            "depth": datasets.Value("float64"),
            "answer_offset": integer,
            "answer_token_position": integer,
        }
    )
    with _without_progress_bars(datasets):
        datasets.Dataset.from_list(rows, features=features).save_to_disk(str(folder))


@contextmanager
def _without_progress_bars(datasets: Any) -> Iterator[None]:
    shown = datasets.are_progress_bars_disabled() is False
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
