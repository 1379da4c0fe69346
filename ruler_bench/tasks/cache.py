"""Prepared samples on disk, under the fingerprint of everything that decides them.

An entry is a folder that `datasets` wrote, with a note of what it holds:

    <cache>/niah_single_1-4096-0f3a.../20-81c2.../data-00000-of-00001.arrow ...
                                                 /entry.json

It is written beside its place and renamed, so that it is there whole or not at all; its name is
its own, so that two processes never write the same one; and its content is hashed, so that a
damaged one is thrown away.
"""

from __future__ import annotations

import contextlib
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
from ruler_bench.tasks.sample import Question, Sample
from ruler_bench.tasks.spec import DataSpec
from ruler_bench.tokenizer import Tokenizer

ENTRY_FILE = "entry.json"

_log = logging.getLogger(__name__)


def load_questions(
    spec: DataSpec,
    encoder: Tokenizer,
    num_samples: int,
    cache_dir: Path,
    progress: Callable[[str], None] | None = None,
) -> list[Question]:
    """Return the first `num_samples` samples and their tokens, from the cache where possible.

    A cached run serves every shorter one. A cache that cannot be written costs a warning and
    nothing else.

    Args:
        spec: what decides the data.
        encoder: the tokenizer of the model that will be asked.
        num_samples: how many.
        cache_dir: folder of all entries; made where missing.
        progress: see `generate`.

    Raises:
        UsageError: see `generate`.
    """
    fingerprint = _fingerprint(spec, encoder)
    folder = cache_dir / f"{spec.task.name}-{spec.length}-{fingerprint[:16]}"
    for _, entry in sorted(_entries(folder)):
        questions = _read(entry, fingerprint)
        if questions is None:
            shutil.rmtree(entry, ignore_errors=True)
        elif len(questions) >= num_samples:
            return questions[:num_samples]
    questions = [
        Question(sample, tuple(encoder.encode_prompt(sample.prompt)))
        for sample in generate(spec, num_samples, progress)
    ]
    try:
        _write(folder, fingerprint, questions)
    except OSError as error:
        _log.warning("prepared samples are not kept: %s: %s", folder, error.strerror or error)
    return questions


def _fingerprint(spec: DataSpec, encoder: Tokenizer) -> str:
    text = f"{spec.fingerprint()} {encoder.fingerprint}"
    return hashlib.sha256(text.encode()).hexdigest()


def _entries(folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield the finished entries with the number of their samples, as their names tell it."""
    with contextlib.suppress(OSError):  # a folder that cannot be read holds nothing
        for path in folder.glob("[0-9]*-*"):
            number = path.name.partition("-")[0]
            if number.isdigit():
                yield int(number), path


def _read(entry: Path, fingerprint: str) -> list[Question] | None:
    """Return the questions of an entry; None if it is damaged or holds something else."""
    try:
        note = json.loads((entry / ENTRY_FILE).read_text(encoding="utf-8"))
        if note["fingerprint"] != fingerprint:
            return None
        questions = [_from_row(row) for row in _load_rows(entry)]
    except Exception as error:  # whatever a damaged file makes of the readers
        _log.warning("a damaged cache entry is thrown away: %s: %s", entry, error)
        return None
    if _hash(questions) != note["sha256"]:
        _log.warning("a damaged cache entry is thrown away: %s: its content changed", entry)
        return None
    return questions


def _write(folder: Path, fingerprint: str, questions: Sequence[Question]) -> None:
    """Write an entry, then drop those that it supersedes."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{len(questions)}-{secrets.token_hex(8)}"
    draft = folder / f"draft-{name}"
    try:
        _save_rows([_to_row(question) for question in questions], draft)
        note = {"fingerprint": fingerprint, "sha256": _hash(questions)}
        (draft / ENTRY_FILE).write_text(json.dumps(note), encoding="utf-8")
        draft.rename(folder / name)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    for number, entry in _entries(folder):
        if number < len(questions):
            shutil.rmtree(entry, ignore_errors=True)


def _hash(questions: Sequence[Question]) -> str:
    digest = hashlib.sha256()
    for question in questions:
        digest.update(json.dumps(_to_row(question)).encode() + b"\n")
    return digest.hexdigest()


def _to_row(question: Question) -> dict[str, Any]:
    return {
        **dataclasses.asdict(question.sample),
        "prompt_token_ids": list(question.prompt_token_ids),
    }


def _from_row(row: dict[str, Any]) -> Question:
    ids = tuple(row.pop("prompt_token_ids"))
    return Question(Sample(**{**row, "outputs": tuple(row["outputs"])}), ids)


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
            "prompt_token_ids": datasets.List(datasets.Value("int32")),
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
