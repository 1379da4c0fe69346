"""All keys and values on the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from backends.base import OutOfMemory
from backends.engine.cache.base import KVLayout, KVSpan, Sequence, poison
from backends.engine.policy import Span


class ResidentCache:
    """One buffer for each of keys and values, [layers, capacity_tokens, kv_heads, head_dim].

    Args:
        layout: of a token.
        capacity_tokens: what the longest request needs.
        poisoned: fill what is freed or unwritten with NaN.
    """

    def __init__(self, layout: KVLayout, capacity_tokens: int, *, poisoned: bool) -> None:
        self._keys = layout.empty(layout.layers, capacity_tokens)
        self._values = layout.empty(layout.layers, capacity_tokens)
        self._capacity_tokens = capacity_tokens
        self._poisoned = poisoned
        if poisoned:
            poison(self._keys, self._values)

    def admit(self, request_id: int, tokens: int) -> Sequence:
        """Make room; see `KVCache.admit`."""
        if tokens > self._capacity_tokens:
            raise OutOfMemory(
                f"request {request_id} needs KV for {tokens} tokens on the device, which holds "
                f"{self._capacity_tokens}"
            )
        return Sequence(request_id)

    def begin(
        self, sequence: Sequence, count: int, spans: tuple[Span, ...], reading_layers: int
    ) -> ResidentStep:
        """Start a step; see `KVCache.begin`. Nothing has to be fetched ahead."""
        return ResidentStep(self._keys, self._values, sequence, count, spans)

    def release(self, sequence: Sequence) -> None:
        """Forget the request. Reads are bounded by lengths, so nothing has to be wiped."""
        if self._poisoned:
            poison(self._keys, self._values)
        sequence.length = 0

    def device_buffers(self) -> Mapping[str, torch.Tensor]:
        """Return the buffers on the device by name."""
        return {"resident_keys": self._keys, "resident_values": self._values}

    def host_buffers(self) -> Mapping[str, torch.Tensor]:
        """Return no buffers: none are in CPU memory."""
        return {}


class ResidentStep:
    """One pass through the layers; all spans are views."""

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        sequence: Sequence,
        count: int,
        spans: tuple[Span, ...],
    ) -> None:
        self._keys = keys
        self._values = values
        self._sequence = sequence
        self._new = Span(sequence.length, sequence.length + count)
        self._spans = spans

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> KVSpan:
        """Store the new tokens after the others; see `Step.append`."""
        new = self._view(layer, self._new)
        new.keys.copy_(keys)
        new.values.copy_(values)
        return new

    def history(self, layer: int) -> Iterator[KVSpan]:
        """Yield the announced spans; see `Step.history`."""
        for span in self._spans:
            yield self._view(layer, span)

    def finish(self) -> None:
        """Count the new tokens as held."""
        self._sequence.length = self._new.stop

    def _view(self, layer: int, span: Span) -> KVSpan:
        rows = slice(span.start, span.stop)
        return KVSpan(
            self._keys[layer, rows], self._values[layer, rows], span.start, "the resident cache"
        )
