"""Samples that somebody made already, in the reference's own layout: DIR/<task>/validation.jsonl.

A line is a sample: input, answer_prefix, outputs and length, as RULER writes them and
`python -m ruler_bench.prepare` too. RULER's `index` is no number of a sample and is left alone;
`ordinal` is, and where there is none the order of the lines counts.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ruler_bench.errors import UsageError
from ruler_bench.tasks.sample import Sample

if TYPE_CHECKING:
    from ruler_bench.tasks.spec import TaskSpec

FILE = "validation.jsonl"
PLACES = ("answer_offset", "answer_token_position")
"""Of the answer; only our own files have them."""
REQUIRED = ("input", "answer_prefix", "outputs", "length")


def samples_path(folder: Path, task: str) -> Path:
    """Return where the samples of a task are."""
    return folder / task / FILE


def fingerprint(folder: Path, task: str) -> str:
    """Return the hash of a task's file.

    Raises:
        UsageError: it is missing.
    """
    return hashlib.sha256(_content(folder, task)).hexdigest()


def read_samples(folder: Path, task: TaskSpec, length: int, num_samples: int) -> list[Sample]:
    """Return the first samples by ordinal.

    Args:
        folder: of the data.
        task: whose samples; it says how many tokens are generated and how they are scored.
        length: that no sample may exceed.
        num_samples: how many.

    Raises:
        UsageError: the file is missing, holds too few samples or longer ones, or a line is broken,
            lacks a field, or has an ordinal that another has; names file and line.
    """
    path = samples_path(folder, task.name)
    samples: dict[int, Sample] = {}
    lines: dict[int, int] = {}
    texts = _content(folder, task.name).split(b"\n")
    for number, text in enumerate(texts, start=1):
        if not text.strip() and number == len(texts):
            continue
        where = f"{path} line {number}"
        sample = _sample(where, _row(where, text), task, ordinal=number - 1)
        if sample.ordinal in samples:
            raise UsageError(
                f"{where}: ordinal {sample.ordinal} is that of line {lines[sample.ordinal]}, too;"
                " give each sample its own."
            )
        samples[sample.ordinal], lines[sample.ordinal] = sample, number
    missing = next((one for one in range(num_samples) if one not in samples), None)
    if missing is not None:
        raise UsageError(
            f"{path} has {len(samples)} samples and none with ordinal {missing}, which"
            f" num_samples={num_samples} asks for; use num_samples={missing} or less."
            if missing
            else f"{path} has no sample with ordinal 0."
        )
    longest = max(samples[ordinal].length for ordinal in range(num_samples))
    if longest > length:
        raise UsageError(
            f"length={length}: the samples of {path} take up to {longest} tokens; use"
            f" length={longest} or more."
        )
    return [samples[ordinal] for ordinal in range(num_samples)]


def _content(folder: Path, task: str) -> bytes:
    path = samples_path(folder, task)
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise UsageError(
            f"data={folder}: has no {task}/{FILE}; name the folder that holds one folder a task."
        ) from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}).") from error


def _row(where: str, text: bytes) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: is no JSON object ({error}).") from error
    if not isinstance(row, dict):
        raise UsageError(f"{where}: is {type(row).__name__}, not a JSON object.")
    for key in REQUIRED:
        if key not in row:
            hint = ' (where input already ends with it, add "answer_prefix": "")'
            raise UsageError(
                f"{where}: {key} is missing{hint if key == 'answer_prefix' else ''}; a sample needs"
                f" {', '.join(REQUIRED)}."
            )
    return row


def _sample(where: str, row: dict[str, Any], task: TaskSpec, ordinal: int) -> Sample:
    outputs = row["outputs"]
    if not isinstance(outputs, list) or not outputs:
        raise UsageError(f"{where}: outputs must be a list of at least one answer.")
    if not all(isinstance(one, str) for one in outputs):
        raise UsageError(f"{where}: outputs must be a list of text.")
    for key in ("input", "answer_prefix"):
        if not isinstance(row[key], str):
            raise UsageError(f"{where}: {key} must be text.")
    return Sample(
        task=task.name,
        ordinal=_number(where, "ordinal", row.get("ordinal", ordinal)),
        input=row["input"],
        answer_prefix=row["answer_prefix"],
        outputs=tuple(outputs),
        length=_number(where, "length", row["length"]),
        tokens_to_generate=task.tokens_to_generate,
        depth=_depth(where, row.get("depth")),
        **{key: _number(where, key, row[key]) for key in PLACES if row.get(key) is not None},
    )


def _number(where: str, key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise UsageError(f"{where}: {key} must be an integer of at least 0.")
    return value


def _depth(where: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise UsageError(f"{where}: depth must be a number in 0 to 1, or null.")
    return float(value)
