"""Record: one finished sample; one JSON object a line of records.jsonl."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
from dataclasses import MISSING, asdict, dataclass, fields
from io import FileIO
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from ruler_bench.errors import UsageError


@dataclass(frozen=True, slots=True)
class Record:
    """One sample in one arm, finished or failed. None means that the backend cannot tell.

    Attributes:
        arm: name of the stream, such as persistent.
        step: place in the arm's stream; (arm, step) is the key and the last line for a key wins.
        ordinal: number of the sample within its task.
        task: name of the task.
        length: tokens of prompt and generation together, as asked for.
        life: how many engines this arm has started, this one included.
        position: requests this engine had served before, of this run.
        predecessor: ordinal of the request before, None for the first of a life.
        expected: the reference answers.
        depth: place of the first needle asked for, 0 to 1.
        prompt_sha256: hash of the prompt's UTF-8 text.
        prompt_tokens: tokens the engine saw, BOS included.
        output: generated text without special tokens.
        output_tokens: generated ids, end-of-text included.
        logits_digest: a hex digest a generated token.
        top2_margin: best minus second best logit, one a generated token.
        finish_reason: "stop" or "length".
        score: 0 to 100 by the task's rule; None where the sample failed in the engine.
        correct: score == 100.
        error: what failed in the engine, on one line.
        total_seconds: the whole call, as the harness measured it.
        ttft_seconds, decode_seconds: to the first token, and from there to the last.
        bytes_up, bytes_down: KV bytes copied to the device and from it.
        peak_device_bytes: peak device memory; on a CPU the cache's own buffers.
        kernel: the attention kernel that ran.
        density: share of causal key blocks computed, for sparse prefill.
        dense_share: share of its layers and chunks that went through dense attention.
        estimation_seconds, attention_seconds: what its choice of blocks took, and its attention.
        copy_hidden_share: share of the KV copies' time on the device during which a kernel ran,
            too; of a traced request.
        reused_tokens: prompt tokens whose keys and values an earlier request had left.
        retries: how often the request was sent to a server again.
        earlier_requests: what this engine had served of other tasks before, where one engine
            answers a suite.
    """

    arm: str
    step: int
    ordinal: int
    task: str
    length: int
    life: int
    position: int
    predecessor: int | None
    expected: tuple[str, ...]
    depth: float | None
    prompt_sha256: str
    prompt_tokens: int
    output: str | None = None
    output_tokens: tuple[int, ...] | None = None
    logits_digest: tuple[str, ...] | None = None
    top2_margin: tuple[float, ...] | None = None
    finish_reason: str | None = None
    score: float | None = None
    correct: bool | None = None
    error: str | None = None
    total_seconds: float | None = None
    ttft_seconds: float | None = None
    decode_seconds: float | None = None
    bytes_up: int | None = None
    bytes_down: int | None = None
    peak_device_bytes: int | None = None
    kernel: str | None = None
    density: float | None = None
    dense_share: float | None = None
    estimation_seconds: float | None = None
    attention_seconds: float | None = None
    copy_hidden_share: float | None = None
    reused_tokens: int | None = None
    retries: int | None = None
    earlier_requests: int | None = None


def to_line(record: Record) -> str:
    """Return the record as one line of JSON, newline included."""
    return json.dumps(asdict(record), ensure_ascii=True, allow_nan=False) + "\n"


_FIELDS = {one.name for one in fields(Record)}
_REQUIRED = {one.name for one in fields(Record) if one.default is MISSING}


def from_line(line: str) -> Record:
    """Return the record that a line holds.

    Raises:
        ValueError: the line is no JSON object with a record's fields, each of its type.
    """
    try:
        values = _DECODER.decode(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    # Nearly every line is like the one before: a large report reads a million.
    for name, elements in _to_convert(tuple(values), tuple(map(type, values.values()))):
        one = values[name]
        if elements is not None and set(map(type, one)) == elements:
            values[name] = tuple(one)
        else:
            values[name] = _typed(name, one, _hints()[name])
    return Record(**values)


@functools.lru_cache(maxsize=1024)
def _to_convert(
    names: tuple[str, ...], types: tuple[type, ...]
) -> tuple[tuple[str, set[type] | None], ...]:
    """Return the fields whose values are not of their type as they are.

    Each stands with the type of its elements where it is a list, else with None.

    Raises:
        ValueError: the fields are not a record's.
    """
    missing, unknown = _REQUIRED - set(names), set(names) - _FIELDS
    if unknown and not missing:
        raise ValueError(f"has fields that a later ruler_bench wrote: {', '.join(sorted(unknown))}")
    if missing:
        raise ValueError(f"not a record: missing {sorted(missing)}, unknown {sorted(unknown)}")
    plain, elements = _plain_types(), _element_types()
    return tuple(
        (name, elements.get(name) if kind is list else None)
        for name, kind in zip(names, types, strict=True)
        if kind not in plain[name]
    )


@functools.cache
def _hints() -> dict[str, Any]:
    return get_type_hints(Record)


@functools.cache
def _plain_types() -> dict[str, frozenset[type]]:
    """Return for each field the types of JSON values that need no conversion."""
    return {
        name: frozenset(kind for kind in _kinds(hint) if get_origin(kind) is not tuple)
        for name, hint in _hints().items()
    }


@functools.cache
def _element_types() -> dict[str, set[type]]:
    """Return for each field of a list the type of its elements."""
    return {
        name: {get_args(kind)[0]}
        for name, hint in _hints().items()
        for kind in _kinds(hint)
        if get_origin(kind) is tuple
    }


def _kinds(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) is UnionType else (hint,)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"holds {name}, which JSON does not have")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _typed(name: str, value: Any, hint: Any) -> Any:
    """Return a JSON value as the field's type: lists become tuples, whole numbers floats."""
    kinds = _kinds(hint)
    if value is None and NoneType in kinds:
        return None
    for kind in kinds:
        if get_origin(kind) is tuple and isinstance(value, list):
            return tuple(_typed(name, one, get_args(kind)[0]) for one in value)
        if type(value) is kind:
            return value
        if kind is float and type(value) is int and abs(value) < _EXACT_FLOAT:
            return float(value)
    raise ValueError(f"{name} is of the wrong type")


_EXACT_FLOAT = 2**53


def read_records(path: Path) -> list[Record]:
    """Return the records of a complete file; the last line for a key wins.

    A half-written last line, as a killed process leaves it, is not read.

    Raises:
        UsageError: a line before the last is damaged; names the line.
    """
    if not path.exists():
        return []
    latest: dict[tuple[str, int], Record] = {}
    text = path.read_bytes().decode("utf-8", errors="replace")
    for number, line in enumerate(_complete_lines(text), start=1):
        try:
            record = from_line(line)
        except ValueError as error:
            raise UsageError(
                f"{path} line {number} is damaged ({error}). Restore the file from a copy, delete "
                "that line to run its sample again, or start anew with overwrite=true."
            ) from error
        latest[record.arm, record.step] = record
    return sorted(latest.values(), key=lambda record: (record.arm, record.step))


def _complete_lines(text: str) -> list[str]:
    return text.split("\n")[:-1]


def repair_last_line(path: Path) -> int:
    """Cut off a half-written last line; return how many bytes were cut, 0 for a whole file."""
    if not path.exists():
        return 0
    data = path.read_bytes()
    half = len(data) - (data.rfind(b"\n") + 1)
    if half:
        with path.open("r+b") as file:
            file.truncate(len(data) - half)
            os.fsync(file.fileno())
    return half


class RecordingError(RuntimeError):
    """A record could not be written (a full disk); what was written before is kept."""


class RecordWriter:
    """Appends records to a file, each on disk before `append` returns.

    The file is created with the first record, so that a run that cannot start leaves none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: FileIO | None = None

    def append(self, record: Record) -> None:
        """Write one line and wait until it is on disk.

        Raises:
            RecordingError: the line could not be written whole; it is taken back.
        """
        if self._file is None:
            self._file = FileIO(self.path, "a")
        start = self._file.seek(0, os.SEEK_END)
        data = to_line(record).encode()
        try:
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file.fileno())
        except OSError as error:
            # A full disk still allows shrinking; if even that fails, resume repairs the line.
            with contextlib.suppress(OSError):
                self._file.truncate(start)
            raise RecordingError(
                f"could not record ordinal {record.ordinal} in {self.path}: {error.strerror}. "
                "The samples before it are kept; make room and run the same command again."
            ) from error

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
