"""What `backend.checkpoint=DIR` wrote, read back: folders, requests, digests of rows, rows."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ruler_bench.errors import UsageError, nearest, one_line

# The format is backends.engine.checkpoint's, which says what each file and name means.
FORMAT, FORMAT_VERSION = "ruler_bench checkpoint", 1
MANIFEST = "checkpoint.json"
TENSOR_NAME = "rows"
NAMES = ("rotation", "query", "key", "value", "attention", "hidden", "logits")
WITHOUT_LAYER = ("rotation", "logits")
DIGEST = np.dtype("<u8")
_INDEX = re.compile(r"request_([0-9]{6,})\.jsonl")
_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
Key = tuple[str, int]
"""What a row is: a name of NAMES and a layer."""
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Record:
    """Rows of one name, layer and chunk.

    Attributes:
        start: position of the first row.
        shape: of all rows together, [rows, ...].
        first_digest: number of the first row's digest in the digest file.
        tensor: file of the rows within the folder, or None where they were not kept.
    """

    name: str
    layer: int
    chunk: int
    start: int
    shape: tuple[int, ...]
    dtype: str
    first_digest: int
    tensor: str | None

    @property
    def rows(self) -> int:
        """How many positions it holds."""
        return self.shape[0]


@dataclass(frozen=True, slots=True)
class Recording:
    """What one run recorded of one request.

    Attributes:
        digests: one a row, in the order of the records.
        finished: whether its end was reached; false after a crash.
    """

    folder: Path
    request_id: int
    prompt_token_ids: list[int]
    records: list[Record]
    digests: NDArray[np.uint64]
    finished: bool


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """What one run left: its settings, and which requests it recorded."""

    path: Path
    settings: dict[str, Any]
    request_ids: list[int]


def open_folder(path: Path) -> CheckpointFolder:
    """Read what a checkpoint folder is.

    Raises:
        UsageError: there is no such folder, or no run recorded it.
    """
    if not path.is_dir():
        raise _no_folder(path)
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        names = sorted(one.name for one in path.iterdir())
    except FileNotFoundError as error:
        raise UsageError(
            f"{path}: is no checkpoint folder, it has no {MANIFEST}; name one that "
            "backend.checkpoint=DIR wrote."
        ) from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{path / MANIFEST}: cannot be read ({one_line(error)}).") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UsageError(f"{path}: is no checkpoint folder, its {MANIFEST} is something else's.")
    if manifest.get("format_version") != FORMAT_VERSION:
        raise UsageError(
            f"{path}: its format version is {manifest.get('format_version')}, and only "
            f"{FORMAT_VERSION} is known; record it again."
        )
    # An index without a whole first line is of a process that died before it recorded anything.
    matches = (_INDEX.fullmatch(name) for name in names if _has_line(path / name))
    return CheckpointFolder(
        path=path,
        settings=dict(manifest.get("settings") or {}),
        request_ids=sorted(int(match[1]) for match in matches if match),
    )


def _has_line(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.readline().endswith(b"\n")
    except OSError:
        return True  # whoever reads it says what is wrong


def _no_folder(path: Path) -> UsageError:
    if path.exists():
        return UsageError(f"{path}: is no folder; name one that backend.checkpoint=DIR wrote.")
    try:
        siblings = [one.name for one in path.parent.iterdir() if one.is_dir()]
    except OSError:
        siblings = []
    close = nearest(path.name, siblings)
    hint = f" Did you mean {str(path.parent / close)!r}?" if close else ""
    return UsageError(f"{path}: no such folder.{hint}")


def read_recording(folder: Path, request_id: int) -> Recording:
    """Read the index and digests of one request; a half-written last line is left out.

    Raises:
        UsageError: a file is missing or damaged.
    """
    index = folder / f"request_{request_id:06d}.jsonl"
    try:
        *lines, _half = index.read_bytes().split(b"\n")
        raw = index.with_suffix(".digests").read_bytes()
    except OSError as error:
        raise UsageError(f"{error.filename}: cannot be read ({error.strerror}).") from error
    digests = np.frombuffer(raw[: len(raw) // DIGEST.itemsize * DIGEST.itemsize], dtype=DIGEST)
    prompt: list[int] = []
    records: list[Record] = []
    finished = False
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
            if number == 1:
                prompt = list(values["prompt_token_ids"])
            elif "records" in values:
                finished = values["records"] == len(records)
            else:
                records.append(_record(values, len(digests)))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise UsageError(
                f"{index} line {number}: is damaged ({type(error).__name__}: {one_line(error)}); "
                "record the run again."
            ) from error
    return Recording(folder, request_id, prompt, records, digests, finished)


def _record(values: dict[str, Any], digests: int) -> Record:
    record = Record(**values | {"shape": tuple(values["shape"])})
    if record.name not in NAMES:
        raise ValueError(f"unknown name {record.name!r}")
    if record.first_digest + record.rows > digests:
        raise ValueError("its digests are missing")
    return record


@functools.lru_cache(maxsize=4)  # rows come in order, so each file is read once
def read_rows(path: Path) -> Floats:
    """Return the rows of a tensor file as [rows, width].

    Raises:
        UsageError: the file is missing or damaged, or holds no floats.
    """
    from safetensors import SafetensorError, deserialize  # noqa: PLC0415 (digests need none)

    try:
        tensor = dict(deserialize(path.read_bytes()))[TENSOR_NAME]  # type: ignore[no-untyped-call]
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}).") from error
    except (SafetensorError, KeyError) as error:
        raise UsageError(f"{path}: is damaged ({one_line(error)}).") from error
    dtype, data = tensor["dtype"], bytes(tensor["data"])
    if dtype == "BF16":  # the upper half of a float32
        values = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    elif dtype in _FLOATS:
        values = np.frombuffer(data, _FLOATS[dtype])
    else:
        raise UsageError(f"{path}: holds {dtype}, whose differences this command cannot measure.")
    return values.astype(np.float64).reshape(tensor["shape"][0], -1)


def place(key: Key) -> str:
    """Return what a person calls the rows of a name and layer."""
    name, layer = key
    return name if name in WITHOUT_LAYER else f"layer {layer}, {name}"
