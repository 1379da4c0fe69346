"""Reads a model's weights from safetensors files, single or sharded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open

from backends.base import ConfigurationError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_COPY_ANEW = "save or copy the model anew."


class WeightSource(Protocol):
    """The tensors of a model by transformers' names.

    Attributes:
        name: where they come from, for messages.
    """

    name: str

    def __contains__(self, name: str) -> bool: ...

    def copy_into(self, name: str, target: torch.Tensor) -> None:
        """Copy one tensor into `target`, which sets its device and dtype."""
        ...

    def unused(self) -> list[str]:
        """Return the names that nobody has read."""
        ...


class StateDict:
    """Weights that are in memory already, such as another model's state_dict().

    Args:
        tensors: by transformers' names, on any device and of any float dtype.
    """

    name = "weights"

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._unused = set(tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def copy_into(self, name: str, target: torch.Tensor) -> None:
        """Copy one tensor; see `WeightSource.copy_into`.

        Raises:
            ConfigurationError: there is no such tensor, or its shape is not that of `target`.
        """
        if name not in self._tensors:
            raise ConfigurationError(f"{self.name}: the weights lack the tensor {name!r}.")
        tensor = self._tensors[name]
        _require_shape(self.name, name, tensor, target)
        target.copy_(tensor)
        self._unused.discard(name)

    def unused(self) -> list[str]:
        """Return the names that nobody has read."""
        return sorted(self._unused)


class Checkpoint:
    """The tensors of a folder by name, read one at a time. Use it as a context manager.

    Raises:
        ConfigurationError: the folder has no safetensors weights, its index is broken, or a shard
            is missing or broken.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.name = str(folder)
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
            ConfigurationError: there is no such tensor, it cannot be read, or its shape is not
                that of `target`.
        """
        if name not in self._file_of:
            raise ConfigurationError(f"{self._folder}: the weights lack the tensor {name!r}.")
        path = self._file_of[name]
        try:
            tensor = self._open(path).get_tensor(name)
        except SafetensorError as error:
            raise ConfigurationError(
                f"{path}: the tensor {name!r} cannot be read ({error}); {_COPY_ANEW}"
            ) from error
        _require_shape(self.name, name, tensor, target)
        target.copy_(tensor)
        self._unused.discard(name)

    def unused(self) -> list[str]:
        """Return the names that nobody has read."""
        return sorted(self._unused)

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            self._files[path] = self._stack.enter_context(_open_file(path))
        return self._files[path]


def _require_shape(source: str, name: str, tensor: torch.Tensor, target: torch.Tensor) -> None:
    if tensor.shape != target.shape:
        raise ConfigurationError(
            f"{source}: tensor {name!r} has the shape {tuple(tensor.shape)}, but "
            f"config.json asks for {tuple(target.shape)}."
        )


def _files_by_tensor(folder: Path) -> dict[str, Path]:
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if _is_there(index):
        return {name: folder / file for name, file in _read_weight_map(index).items()}
    if _is_there(single):
        with _open_file(single) as file:
            return dict.fromkeys(file.keys(), single)
    raise ConfigurationError(
        f"{folder} holds no weights: {SINGLE_FILE} or {INDEX_FILE} is needed. "
        "Save the model with save_pretrained(..., safe_serialization=True)."
    )


def _is_there(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def _read_weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor, by name, as an index of shards gives it."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{index} is no JSON file ({error}); {_COPY_ANEW}") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) for file in weight_map.values()
    ):
        raise ConfigurationError(
            f"{index} holds no weight_map, an object with the file of each tensor; {_COPY_ANEW}"
        )
    return weight_map


def _open_file(path: Path) -> Any:
    if not _is_there(path):
        raise ConfigurationError(
            f"{path} is named in {INDEX_FILE} and is missing; copy it there too."
        )
    if not path.is_file():
        what = "no regular file" if path.exists() else "a link to nothing"
        raise ConfigurationError(f"{path} is {what}; {_COPY_ANEW}")
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ConfigurationError(
            f"{path} is not a readable safetensors file ({error}); {_COPY_ANEW}"
        ) from error
