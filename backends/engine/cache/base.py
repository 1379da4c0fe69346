"""What the engine asks of a KV cache, whichever memory it lies in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from backends.engine.memory import Buffer, Part, Place
from backends.engine.model import Room
from backends.engine.policy import BLOCK_TOKENS, Span


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What one token's keys and values look like."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def buffer(self, name: str, place: Place, part: Part, *leading: int) -> Buffer:
        """Declare a buffer [*leading, kv_heads, head_dim]."""
        return Buffer(name, (*leading, self.kv_heads, self.head_dim), self.dtype, place, part)


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
        prompt: token ids of the prompt, empty where nobody needs to know them.
        reused: tokens at the beginning whose blocks an earlier request wrote: only read from.
        prefilled: whether the prompt's keys and values were all computed, and led to finite
            logits, so that a later request may reuse them.
    """

    request_id: int
    length: int = 0
    block_table: list[int] = field(default_factory=list)
    downloaded: int = 0
    prompt: tuple[int, ...] = ()
    reused: int = 0
    prefilled: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a step will do.

    Attributes:
        count: new tokens; when it is 1, the spans end with the new token itself.
        spans: what each reading layer reads, beside the new tokens.
        reading_layers: how many layers, from the first on, read.
        sparse: whether the step asks for whole layers, side by side, and is a `SparseStep`.
    """

    count: int
    spans: tuple[Span, ...]
    reading_layers: int
    sparse: bool = False


@dataclass(frozen=True, slots=True)
class Scalars:
    """Numbers of a one-token step that its kernels read on the device, each int64 [1].

    Attributes:
        token: the token's id.
        position: its position.
        stop: position + 1, the keys that it sees.
        tail_start: position of the first row of the tail.
        tail_row: the row of the tail that the token takes.
    """

    token: torch.Tensor
    position: torch.Tensor
    stop: torch.Tensor
    tail_start: torch.Tensor
    tail_row: torch.Tensor

    @classmethod
    def on(cls, device: torch.device) -> Scalars:
        """Allocate them."""
        return cls(*(torch.zeros(1, dtype=torch.int64, device=device) for _ in range(5)))


class Step(Protocol):
    """One pass of some new tokens through all layers, in the order of layers."""

    def room(self, layer: int) -> Room:
        """Return where the layer's new keys and values go, once that is free."""
        ...

    def written(self, layer: int) -> None:
        """Take note that they are there."""
        ...

    def new(self, layer: int) -> KVSpan:
        """Return the new tokens' keys and values."""
        ...

    def history(self, layer: int) -> Iterator[KVSpan]:
        """Yield the announced spans for this layer, in order.

        A span may be overwritten as soon as the next is asked for.
        """
        ...

    def finish(self, following: StepPlan | None = None) -> None:
        """Count the new tokens as held. Without it, the step leaves the sequence as it was.

        Args:
            following: the next step, if there is one, so that its first loads can start.
        """
        ...


class SparseStep(Step, Protocol):
    """A step of several tokens that reads a layer's keys, and values, in one piece.

    Both come as [rows, kv_heads, head_dim] from position 0 on, as many rows as the cache can hold,
    in whole blocks of BLOCK_TOKENS. Of the last block that holds a token, the rows after that
    token are zero. `blocks` says which blocks are read, bool [key blocks] in CPU memory, or None
    for all; the rows of others may hold anything.
    """

    def load_ahead(self, layer: int, blocks: torch.Tensor | None) -> None:
        """Start to load a layer's keys: those of the layers before have been asked for."""
        ...

    def layer_keys(self, layer: int, blocks: torch.Tensor | None) -> torch.Tensor:
        """Return the layer's keys, once they are there."""
        ...

    def layer_values(self, layer: int, blocks: torch.Tensor | None) -> torch.Tensor:
        """Return the layer's values, once they are there."""
        ...


class OneStep(Protocol):
    """One pass of one new token, for kernels that read its place on the device."""

    def room(self, layer: int) -> Room:
        """Return where the layer's new key and value go, once that is free."""
        ...

    def written(self, layer: int) -> None:
        """Take note that they are there."""
        ...

    def pieces(self, layer: int) -> Iterator[KVSpan]:
        """Yield what the token reads, in order, each starting at a multiple of a split.

        What lies beyond the held rows is not read. A piece may be overwritten as soon as the
        next is asked for.
        """
        ...

    def tail(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return keys and values from `Scalars.tail_start` on, where they lie apart."""
        ...

    def finish(self, following: StepPlan | None = None) -> None:
        """Count the new token as held; see `Step.finish`."""
        ...


class KVCache(Protocol):
    """Holds one request at a time in buffers allocated once."""

    def admit(self, request_id: int, tokens: int, prompt: tuple[int, ...] = ()) -> Sequence:
        """Make room for a request of `tokens` tokens in all.

        Args:
            request_id: the request's counter.
            tokens: of prompt and answer.
            prompt: token ids that it begins with. The sequence may come with the keys and values
                of some of them, `Sequence.length`; at least one is left to compute.

        Raises:
            OutOfMemory: there is not enough room.
        """
        ...

    def begin(self, sequence: Sequence, plan: StepPlan) -> Step:
        """Start a step."""
        ...

    def begin_one(self, sequence: Sequence, plan: StepPlan, scalars: Scalars) -> OneStep:
        """Start a step of one token, after setting what its kernels read."""
        ...

    def release(self, sequence: Sequence) -> None:
        """Give the request's room back, whatever state it is in."""
        ...

    def layer_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values such as a `SparseStep` gives, whatever they hold."""
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


def whole_blocks(tokens: int) -> int:
    """Return the tokens in all blocks of BLOCK_TOKENS that hold some of so many."""
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS
