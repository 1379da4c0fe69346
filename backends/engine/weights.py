"""Reads a model's weights from safetensors files, single or sharded."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from backends.base import ConfigurationError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class Checkpoint:
    """The tensors of a folder by name, read one at a time. Use it as a context manager.

    Raises:
        ConfigurationError: the folder has no safetensors weights, or a shard is missing or broken.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_of = _files_by_tensor(folder)
        self._unused = set(self._file_of)
        self._files: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def copy_into(self, name: str, target: torch.Tensor) -> None:
        """Copy one tensor into `target`, which sets its device and dtype.

        The copy matters on a CPU: a mapped file is not aligned as a fresh tensor is, and matrix
        products may round by alignment.

        Raises:
            ConfigurationError: there is no such tensor, or its shape is not that of `target`.
        """
        if name not in self._file_of:
            raise ConfigurationError(f"{self._folder}: the weights lack the tensor {name!r}.")
        tensor = self._open(self._file_of[name]).get_tensor(name)
        if tensor.shape != target.shape:
            raise ConfigurationError(
                f"{self._folder}: tensor {name!r} has the shape {tuple(tensor.shape)}, but "
                f"config.json asks for {tuple(target.shape)}."
            )
        target.copy_(tensor)
        self._unused.discard(name)

    def unused(self) -> list[str]:
        """Return the names that nobody has read."""
        return sorted(self._unused)

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            self._files[path] = self._stack.enter_context(_open_file(path))
        return self._files[path]


def _files_by_tensor(folder: Path) -> dict[str, Path]:
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if index.is_file():
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return {name: folder / file for name, file in weight_map.items()}
    if single.is_file():
        with _open_file(single) as file:
            return dict.fromkeys(file.keys(), single)
    raise ConfigurationError(
        f"{folder} holds no weights: {SINGLE_FILE} or {INDEX_FILE} is needed. "
        "Save the model with save_pretrained(..., safe_serialization=True)."
    )


def _open_file(path: Path) -> Any:
    if not path.is_file():
        raise ConfigurationError(f"{path} is named in {INDEX_FILE} and is missing.")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ConfigurationError(f"{path} is not a readable safetensors file: {error}.") from error
