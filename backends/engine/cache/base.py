"""What the engine asks of a KV cache, whichever memory it lies in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from backends.engine.policy import Span


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What one token's keys and values look like, and where they are computed with."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def empty(self, *leading: int, pinned_host: bool = False) -> torch.Tensor:
        """Allocate [*leading, kv_heads, head_dim], on the device or in pinned CPU memory.

        On the CPU device there is nothing to pin.
        """
        size = (*leading, self.kv_heads, self.head_dim)
        if not pinned_host:
            return torch.empty(size, dtype=self.dtype, device=self.device)
        return torch.empty(size, dtype=self.dtype, pin_memory=self.device.type == "cuda")


class KVSpan(NamedTuple):
    """Keys and values of consecutive positions, each [tokens, kv_heads, head_dim].

    Attributes:
        start: position of the first.
        place: where they lie, in words for a message.
    """

    keys: torch.Tensor
    values: torch.Tensor
    start: int
    place: str


@dataclass(eq=False, slots=True)
class Sequence:
    """What a cache knows of one request. Nothing else remembers the request.

    Attributes:
        request_id: the request's counter, for messages.
        length: tokens whose keys and values the cache holds in all layers.
        block_table: CPU blocks in the order of positions, where there are any.
        downloaded: of `length`, how many tokens are in those blocks.
    """

    request_id: int
    length: int = 0
    block_table: list[int] = field(default_factory=list)
    downloaded: int = 0


class Step(Protocol):
    """One pass of some new tokens through all layers, in the order of layers."""

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> KVSpan:
        """Store the new tokens' keys and values, [tokens, kv_heads, head_dim], and return them."""
        ...

    def history(self, layer: int) -> Iterator[KVSpan]:
        """Yield the spans announced for this layer, in order.

        A span may be overwritten as soon as the next is asked for.
        """
        ...

    def finish(self) -> None:
        """Count the new tokens as held. Without it, the step leaves the sequence as it was."""
        ...


class KVCache(Protocol):
    """Holds one request at a time in buffers allocated once."""

    def admit(self, request_id: int, tokens: int) -> Sequence:
        """Make room for a request of `tokens` tokens in all.

        Raises:
            OutOfMemory: there is not enough room.
        """
        ...

    def begin(
        self, sequence: Sequence, count: int, spans: tuple[Span, ...], reading_layers: int
    ) -> Step:
        """Start a step of `count` new tokens.

        Args:
            sequence: the request.
            count: new tokens; when it is 1, the spans end with the new token itself.
            spans: what each reading layer will read, beside the new tokens.
            reading_layers: how many layers, from the first on, will read.
        """
        ...

    def release(self, sequence: Sequence) -> None:
        """Give the request's room back, whatever state it is in."""
        ...

    def device_buffers(self) -> Mapping[str, torch.Tensor]:
        """Return the buffers on the device by name."""
        ...

    def host_buffers(self) -> Mapping[str, torch.Tensor]:
        """Return the buffers in CPU memory by name, empty where there are none."""
        ...


def poison(*tensors: torch.Tensor) -> None:
    """Fill with NaN, so that a read of what is freed or was never written shows."""
    for tensor in tensors:
        tensor.fill_(float("nan"))
