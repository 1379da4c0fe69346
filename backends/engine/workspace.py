"""The device buffers that a step computes in, allocated once for the largest step.

Products are taken over slices of `SLICE_ROWS` rows, so that the wide rows between them (of the
MLP above all) need memory for one slice and not for the whole prompt. The slices are cut at
multiples of `SLICE_ROWS` within a step, whatever was served before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from backends.engine.memory import Buffer
from backends.engine.shape import ModelShape

SLICE_ROWS = 8192
"""On an H200 the products of a Llama-3.1-8B are as fast on 8192 rows as on 32768."""


@dataclass(frozen=True, slots=True)
class StepSize:
    """What decides the size of the buffers.

    Attributes:
        rows: tokens of the largest step.
        merges: whether a step attends to more than one piece of keys.
        query_rows: rows of queries and of what attention makes of them; more than `rows` where
            these come in whole blocks.
    """

    rows: int
    merges: bool
    query_rows: int


def workspace_buffers(shape: ModelShape, dtype: torch.dtype, size: StepSize) -> tuple[Buffer, ...]:
    """Declare the buffers of a `Workspace`."""
    rows = size.rows
    sliced = min(rows, SLICE_ROWS)
    query_heads = (size.query_rows, shape.heads, shape.head_dim)
    projected = (shape.heads + 2 * shape.kv_heads) * shape.head_dim

    def buffer(name: str, dims: tuple[int, ...], kind: torch.dtype = dtype) -> Buffer:
        return Buffer(name, dims, kind, "device", "activations")

    buffers = [
        buffer("hidden", (rows, shape.hidden)),
        buffer("query", query_heads),
        buffer("attended", query_heads),
        buffer("normed", (sliced, shape.hidden)),
        buffer("wide", (sliced * max(projected, 2 * shape.intermediate),)),
        buffer("gated", (sliced, shape.intermediate)),
        buffer("logits", (1, shape.vocabulary), torch.float32),
    ]
    if size.merges:
        buffers += [
            buffer("merged", query_heads, torch.float32),
            buffer("merged_log_sum_exp", (rows, shape.heads), torch.float32),
        ]
    return tuple(buffers)


class Workspace:
    """The buffers by name, and views of them for a step of `rows` rows."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.hidden = tensors["hidden"]
        self.query = tensors["query"]
        self.attended = tensors["attended"]
        self.normed = tensors["normed"]
        self.gated = tensors["gated"]
        self.logits = tensors["logits"]
        self.merged = tensors.get("merged")
        self.merged_log_sum_exp = tensors.get("merged_log_sum_exp")
        self.partial_output = tensors.get("partial_output")
        self.partial_log_sum_exp = tensors.get("partial_log_sum_exp")

    def wide(self, rows: int, width: int) -> torch.Tensor:
        """Return [rows, width] of the buffer that all wide products share."""
        return self._tensors["wide"][: rows * width].view(rows, width)


def slices(rows: int) -> Iterator[slice]:
    """Yield the slices of a step of so many rows."""
    for start in range(0, rows, SLICE_ROWS):
        yield slice(start, min(start + SLICE_ROWS, rows))
