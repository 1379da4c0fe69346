"""Checkpoints as a few files of at most 15 MB, safe against being killed while they are written.

A generation is `state-<step>-<part>.bin` files and a `checkpoint.json` that names them with their
hashes. The new parts are written first, then checkpoint.json is replaced in one step, then the
old parts go; so at any moment checkpoint.json names a whole generation.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

INDEX = "checkpoint.json"
PART_BYTES = 14_500_000


class CheckpointError(Exception):
    """A checkpoint cannot be read; the message says which file and why."""


def save(folder: Path, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write a checkpoint and remove the one before.

    Args:
        folder: where; made when missing.
        step: names the generation.
        tensors: float32 tensors by name.
        state: whatever else JSON can hold.
    """
    folder.mkdir(parents=True, exist_ok=True)
    flat = [tensor.detach().to("cpu", torch.float32).contiguous() for tensor in tensors.values()]
    data = b"".join(tensor.numpy().tobytes() for tensor in flat)
    parts: list[dict[str, Any]] = []
    for number, start in enumerate(range(0, len(data), PART_BYTES)):
        part = data[start : start + PART_BYTES]
        name = f"state-{step:06d}-{number}.bin"
        _write(folder / name, part)
        parts.append({"file": name, "sha256": hashlib.sha256(part).hexdigest()})
    shapes = [[name, list(tensor.shape)] for name, tensor in tensors.items()]
    index = {"step": step, "tensors": shapes, "parts": parts, "state": state}
    _write(folder / INDEX, (json.dumps(index, indent=1) + "\n").encode())
    kept = {part["file"] for part in parts}
    for old in folder.glob("state-*.bin"):
        if old.name not in kept:
            old.unlink()


def load(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the checkpoint of a folder: its tensors and its state.

    Raises:
        CheckpointError: no checkpoint, or a part is missing or damaged.
    """
    try:
        index = json.loads((folder / INDEX).read_text())
        data = b"".join(_read_part(folder, part) for part in index["parts"])
    except (OSError, ValueError) as error:
        raise CheckpointError(f"no checkpoint in {folder}: {error}") from error
    tensors: dict[str, Tensor] = {}
    start = 0
    for name, shape in index["tensors"]:
        count = int(np.prod(shape, dtype=np.int64))
        values = np.frombuffer(data, np.float32, count, start).reshape(shape)
        tensors[name] = torch.from_numpy(values.copy())
        start += 4 * count
    return tensors, index["state"]


def _read_part(folder: Path, part: dict[str, str]) -> bytes:
    data = (folder / part["file"]).read_bytes()
    if hashlib.sha256(data).hexdigest() != part["sha256"]:
        raise CheckpointError(f"{folder / part['file']} is damaged: its hash is not the one noted")
    return data


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.part")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
