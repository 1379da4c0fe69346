"""All keys and values on the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from backends.base import OutOfMemory
from backends.engine.cache.base import (
    KVLayout,
    KVSpan,
    Scalars,
    Sequence,
    StepPlan,
    poison,
    whole_blocks,
)
from backends.engine.memory import Buffer
from backends.engine.model import Room
from backends.engine.policy import Span

_PLACE = "the resident cache"


def resident_buffers(layout: KVLayout, capacity_tokens: int) -> tuple[Buffer, ...]:
    """Declare the buffers of a `ResidentCache`: [layers, tokens, kv_heads, head_dim] each."""
    return tuple(
        layout.buffer(f"resident_{name}", "device", "kv_device", layout.layers, capacity_tokens)
        for name in ("keys", "values")
    )


class ResidentCache:
    """One buffer for each of keys and values.

    Args:
        tensors: of `resident_buffers`.
        poisoned: fill what is freed or unwritten with NaN.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, poisoned: bool) -> None:
        self._keys = tensors["resident_keys"]
        self._values = tensors["resident_values"]
        self._poisoned = poisoned
        if poisoned:
            poison(self._keys, self._values)

    def admit(self, request_id: int, tokens: int, prompt: tuple[int, ...] = ()) -> Sequence:
        """Make room; see `KVCache.admit`. Nothing of a prompt is held already."""
        capacity = self._keys.shape[1]
        if tokens > capacity:
            raise OutOfMemory(
                f"request {request_id} needs KV for {tokens} tokens on the device, which holds "
                f"{capacity}"
            )
        return Sequence(request_id)

    def begin(self, sequence: Sequence, plan: StepPlan) -> ResidentStep:
        """Start a step; see `KVCache.begin`. Nothing has to be fetched ahead."""
        return ResidentStep(self._keys, self._values, sequence, plan)

    def begin_one(self, sequence: Sequence, plan: StepPlan, scalars: Scalars) -> ResidentOneStep:
        """Start a step of one token; see `KVCache.begin_one`."""
        return ResidentOneStep(self._keys, self._values, sequence, scalars)

    def release(self, sequence: Sequence) -> None:
        """Forget the request. Reads are bounded by lengths, so nothing has to be wiped."""
        if self._poisoned:
            poison(self._keys, self._values)
        sequence.length = 0

    def layer_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return those of the first layer; see `KVCache.layer_rows`."""
        return self._keys[0], self._values[0]

    def device_buffers(self) -> Mapping[str, torch.Tensor]:
        """Return the buffers on the device by name."""
        return {"resident_keys": self._keys, "resident_values": self._values}

    def host_buffers(self) -> Mapping[str, torch.Tensor]:
        """Return no buffers: none are in CPU memory."""
        return {}


class ResidentStep:
    """One pass through the layers; all spans are views."""

    def __init__(
        self, keys: torch.Tensor, values: torch.Tensor, sequence: Sequence, plan: StepPlan
    ) -> None:
        self._keys = keys
        self._values = values
        self._sequence = sequence
        self._new = Span(sequence.length, sequence.length + plan.count)
        self._spans = plan.spans

    def room(self, layer: int) -> Room:
        """Return the rows after the others; see `Step.room`."""
        new = self.new(layer)
        return Room(new.keys, new.values, None)

    def written(self, layer: int) -> None:
        """See `Step.written`."""

    def new(self, layer: int) -> KVSpan:
        """Return the new tokens' keys and values; see `Step.new`."""
        return self._view(layer, self._new)

    def history(self, layer: int) -> Iterator[KVSpan]:
        """Yield the announced spans; see `Step.history`."""
        for span in self._spans:
            yield self._view(layer, span)

    def load_ahead(self, layer: int, blocks: torch.Tensor | None) -> None:
        """See `SparseStep.load_ahead`: everything is there."""

    def layer_keys(self, layer: int, blocks: torch.Tensor | None) -> torch.Tensor:
        """Return the layer's keys; see `SparseStep.layer_keys`."""
        del blocks
        return self._whole(self._keys[layer])

    def layer_values(self, layer: int, blocks: torch.Tensor | None) -> torch.Tensor:
        """Return the layer's values; see `SparseStep.layer_values`."""
        del blocks
        return self._whole(self._values[layer])

    def finish(self, following: StepPlan | None = None) -> None:
        """Count the new tokens as held."""
        self._sequence.length = self._new.stop

    def _whole(self, rows: torch.Tensor) -> torch.Tensor:
        stop = self._new.stop
        rows[stop : whole_blocks(stop)].zero_()
        return rows

    def _view(self, layer: int, span: Span) -> KVSpan:
        rows = slice(span.start, span.stop)
        return KVSpan(self._keys[layer, rows], self._values[layer, rows], span.start, _PLACE)


class ResidentOneStep:
    """One token's pass. Its views are of whole layers, so that a captured step stays right."""

    def __init__(
        self, keys: torch.Tensor, values: torch.Tensor, sequence: Sequence, scalars: Scalars
    ) -> None:
        self._keys = keys
        self._values = values
        self._sequence = sequence
        self._position = scalars.position

    def room(self, layer: int) -> Room:
        """Return the layer, and the token's row in it; see `OneStep.room`."""
        return Room(self._keys[layer], self._values[layer], self._position)

    def written(self, layer: int) -> None:
        """See `OneStep.written`."""

    def pieces(self, layer: int) -> Iterator[KVSpan]:
        """Yield the whole layer; see `OneStep.pieces`."""
        yield KVSpan(self._keys[layer], self._values[layer], 0, _PLACE)

    def tail(self, layer: int) -> None:
        """Return None: all rows lie together."""

    def finish(self, following: StepPlan | None = None) -> None:
        """Count the new token as held."""
        self._sequence.length += 1
