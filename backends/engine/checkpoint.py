"""Checkpoints: what one request computed, layer by layer, to find where two runs part.

A folder holds:

- `checkpoint.json`: the format, its version, whether tensors are kept, and the engine's settings.
- `request_000007.jsonl`: the index of request 7. The first line holds the prompt; then one line a
  record: name, layer, chunk, position of the first row, shape, dtype, where its digests start, and
  the file of its tensor. The last line says that the request is over; without it the process died.
- `request_000007.digests`: 8 bytes a row, in the order of the index: blake2b of the row's bytes.
- `request_000007/000042.safetensors`: the rows of record 42 under the name "rows", where tensors
  are kept.

`python -m ruler_bench.divergence A B` compares two such folders; its reader needs no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import save

from backends.base import ConfigurationError, RequestError

FORMAT = "ruler_bench checkpoint"
FORMAT_VERSION = 1
MANIFEST = "checkpoint.json"
DIGEST_BYTES = 8
TENSOR_NAME = "rows"
NAMES = ("rotation", "query", "key", "value", "attention", "hidden", "logits")
"""What is recorded, in the order of computation within a layer.

rotation: cosines and sines of the positions, at layer -1; they depend on nothing but positions.
query, key: after RoPE. value: as it is cached. attention: mixed values before the output matrix.
hidden: the residual rows after the layer. logits: after the last layer; their layer is the number
of layers.
"""


class CheckpointWriter:
    """Records what requests compute, one set of files a request.

    A tool for debugging: every record waits for the device and is copied to CPU memory, so that
    the times of a recorded request are not speed figures. Each record is handed to the operating
    system before the next, so that a crash of the process loses none.

    Args:
        folder: where to write; made when it is not there. Requests of an earlier engine with the
            same settings may lie there, and one that is asked again is recorded anew.
        tensors: whether to keep the rows themselves, not only their digests. For a model of 8B
            parameters in bfloat16 they take about 1 MB a token.

    Raises:
        ConfigurationError: the folder cannot be used, holds something else, or holds checkpoints
            recorded with another choice of `tensors`.
    """

    def __init__(self, folder: Path, *, tensors: bool) -> None:
        self._folder = folder
        self._tensors = tensors
        self._request: _RequestFiles | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            manifest = _read_manifest(folder)
            if manifest is None and any(folder.iterdir()):
                raise ConfigurationError(
                    f"backend.checkpoint={folder}: holds other files and no {MANIFEST}; name a "
                    "new or an empty folder."
                )
        except OSError as error:
            raise ConfigurationError(
                f"backend.checkpoint={folder}: cannot be used ({error.strerror}); name a folder "
                "that can be written."
            ) from error
        if manifest is not None and manifest.get("tensors") != tensors:
            raise _recorded_otherwise(folder, "checkpoint_tensors", manifest["tensors"], tensors)

    def begin(
        self, request_id: int, prompt_token_ids: tuple[int, ...], settings: Mapping[str, Any]
    ) -> None:
        """Start recording a request; the one before it is over.

        Args:
            request_id: the request's counter; names its files.
            prompt_token_ids: its prompt.
            settings: the engine's, as plain JSON values; equal for all requests of a folder.

        Raises:
            ConfigurationError: the folder holds checkpoints of other settings, or another prompt
                under this counter.
            RequestError: the files cannot be written.
        """
        self.end()
        try:
            # Tuples are lists in JSON.
            self._check_settings(json.loads(json.dumps(dict(settings))))
            self._check_prompt(request_id, prompt_token_ids)
            self._request = _RequestFiles(self._folder, request_id, self._tensors)
            self._request.write_line(
                {"request_id": request_id, "prompt_token_ids": list(prompt_token_ids)}
            )
        except OSError as error:
            raise self._not_written(request_id, error) from error

    def record(self, name: str, layer: int, chunk: int, start: int, rows: torch.Tensor) -> None:
        """Write down rows of the current request. No rows leave no record.

        Args:
            name: one of NAMES.
            layer: from 0; -1 for rotation, the number of layers for logits.
            chunk: number of the prefill or decode step within the request, from 0.
            start: position of the first row.
            rows: [n, ...] for positions start to start + n - 1; any device and dtype. The same
                position of a name and layer is recorded once in a request.

        Raises:
            RequestError: the files cannot be written; nothing more of this request is recorded.
        """
        if name not in NAMES:
            raise AssertionError(f"no such record: {name!r}")
        if self._request is None:
            raise AssertionError("record() outside of begin() and end()")
        if not rows.shape[0]:
            return
        try:
            self._request.add(
                {"name": name, "layer": layer, "chunk": chunk, "start": start},
                rows.detach().to("cpu").contiguous(),
            )
        except OSError as error:
            failed = self._not_written(self._request.request_id, error)
            self._abandon()
            raise failed from error

    def end(self) -> None:
        """Finish the current request, also one that failed. Without one, do nothing."""
        if self._request is None:
            return
        request_id, records = self._request.request_id, self._request.records
        try:
            self._request.write_line({"records": records})
        except OSError as error:
            raise self._not_written(request_id, error) from error
        finally:
            self._abandon()

    def _abandon(self) -> None:
        if self._request is not None:
            self._request.close()
            self._request = None

    def _check_settings(self, settings: dict[str, Any]) -> None:
        manifest = _read_manifest(self._folder)
        if manifest is None:
            _write_manifest(self._folder, settings, self._tensors)
            return
        held = manifest["settings"]
        for key in sorted(held.keys() | settings.keys()):
            if held.get(key) != settings.get(key):
                raise _recorded_otherwise(self._folder, key, held.get(key), settings.get(key))

    def _check_prompt(self, request_id: int, prompt_token_ids: tuple[int, ...]) -> None:
        path = index_path(self._folder, request_id)
        if not path.exists():
            return
        with path.open(encoding="utf-8") as file:
            first = file.readline()
        try:
            same = json.loads(first)["prompt_token_ids"] == list(prompt_token_ids)
        except (ValueError, KeyError, TypeError):  # died in its first line
            same = not first.endswith("\n")
        if not same:
            raise ConfigurationError(
                f"backend.checkpoint={self._folder}: {path.name} holds another prompt than this "
                f"run's request {request_id}; name another folder, or delete this one."
            )

    def _not_written(self, request_id: int, error: OSError) -> RequestError:
        return RequestError(
            f"request {request_id}: the checkpoint in {self._folder} cannot be written "
            f"({error.strerror}); make room, or set backend.checkpoint=null"
        )


class _RequestFiles:
    """The files of one request, opened anew."""

    def __init__(self, folder: Path, request_id: int, tensors: bool) -> None:
        self.request_id = request_id
        self.records = 0
        self._rows = 0
        self._folder = folder
        self._tensors = folder / index_path(folder, request_id).stem if tensors else None
        index = index_path(folder, request_id)
        shutil.rmtree(index.with_suffix(""), ignore_errors=True)
        if self._tensors is not None:
            self._tensors.mkdir()
        self._digests: BinaryIO = index.with_suffix(".digests").open("wb")
        self._index: BinaryIO = index.open("wb")

    def add(self, line: dict[str, Any], rows: torch.Tensor) -> None:
        """Write digests, then the tensor, then the line that speaks of both."""
        self._digests.write(row_digests(rows))
        self._digests.flush()
        tensor = None
        if self._tensors is not None:
            path = self._tensors / f"{self.records:06d}.safetensors"
            path.write_bytes(save({TENSOR_NAME: rows}))
            tensor = path.relative_to(self._folder).as_posix()
        self.write_line(
            line
            | {
                "shape": list(rows.shape),
                "dtype": str(rows.dtype).removeprefix("torch."),
                "first_digest": self._rows,
                "tensor": tensor,
            }
        )
        self.records += 1
        self._rows += rows.shape[0]

    def write_line(self, values: dict[str, Any]) -> None:
        self._index.write(json.dumps(values).encode() + b"\n")
        self._index.flush()

    def close(self) -> None:
        # A disk that was full when a record was written is still full.
        for file in (self._digests, self._index):
            with contextlib.suppress(OSError):
                file.close()


def index_path(folder: Path, request_id: int) -> Path:
    """Return the index of a request; its other files have the same name but for the suffix."""
    return folder / f"request_{request_id:06d}.jsonl"


def row_digests(rows: torch.Tensor) -> bytes:
    """Return DIGEST_BYTES a row of a contiguous CPU tensor [n, ...], n at least 1."""
    flat = memoryview(rows.reshape(-1).view(torch.uint8).numpy().data)
    size = len(flat) // rows.shape[0]
    return b"".join(
        hashlib.blake2b(flat[place : place + size], digest_size=DIGEST_BYTES).digest()
        for place in range(0, len(flat), size)
    )


def _write_manifest(folder: Path, settings: dict[str, Any], tensors: bool) -> None:
    values = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "tensors": tensors,
        "settings": settings,
    }
    part = folder / f".{MANIFEST}.part"
    part.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    part.replace(folder / MANIFEST)


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return what `checkpoint.json` holds, or None where there is none.

    Raises:
        ConfigurationError: it was not written by this version of the project.
    """
    path = folder / MANIFEST
    if not path.exists():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        known = (values["format"], values["format_version"]) == (FORMAT, FORMAT_VERSION)
        known &= isinstance(values["tensors"], bool) and isinstance(values["settings"], dict)
    except (ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise ConfigurationError(
            f"backend.checkpoint={folder}: its {MANIFEST} is not of format version "
            f"{FORMAT_VERSION}; name another folder."
        )
    return dict(values)


def _recorded_otherwise(folder: Path, key: str, held: object, asked: object) -> ConfigurationError:
    return ConfigurationError(
        f"backend.checkpoint={folder}: holds checkpoints recorded with {key}="
        f"{json.dumps(held)}, not {json.dumps(asked)}; name another folder, or delete this one."
    )
