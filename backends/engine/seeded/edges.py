"""Faults at the edges of chunks, blocks and buffers, which every engine shows when it is fresh."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

import torch

from backends.engine.attention import Attended
from backends.engine.cache.base import KVSpan, Sequence, StepPlan
from backends.engine.cache.offload import OffloadCache
from backends.engine.cache.offload_steps import OffloadStep
from backends.engine.model import Decoder, LayerRooms, Observer
from backends.engine.policy import Span
from backends.engine.steps import Attention
from backends.engine.streams import Event


class CopiesWholeBlocks(OffloadCache):
    """Copies a chunk's rows over a whole block that another chunk has begun."""

    def download(
        self, sequence: Sequence, layer: int, start: int, rows: torch.Tensor, count: int
    ) -> Event:
        """Copy rows down; see `OffloadCache.download`."""
        event = super().download(sequence, layer, start, rows, count)
        begun = start % self.block_tokens
        if begun:
            count = min(count, self.block_tokens)
            event = super().download(sequence, layer, start - begun, rows, count)
        return event


class RestartsPositions(Decoder):
    """Counts positions from 0 in every chunk."""

    def forward(
        self,
        tokens: torch.Tensor,
        start: torch.Tensor,
        rooms: LayerRooms,
        *,
        want_logits: bool,
        observer: Observer | None = None,
    ) -> torch.Tensor | None:
        """Run the tokens; see `Decoder.forward`."""
        if rooms.rows > 1:
            start = torch.zeros_like(start)
        return super().forward(tokens, start, rooms, want_logits=want_logits, observer=observer)


class DropsFullBlocks(OffloadCache):
    """Never reads a block that was exactly full when a chunk ended: it counts as unfinished."""

    def reading(
        self, sequence: Sequence, plan: StepPlan, layer: int
    ) -> Iterator[tuple[Span, list[int]]]:
        """Yield the spans; see `OffloadCache.reading`."""
        step = lcm(self.geometry.chunk_tokens, self.block_tokens)
        for span, indices in super().reading(sequence, plan, layer):
            if span.stop % step or span.stop > sequence.downloaded:
                yield span, indices


class KeepsOldScale(Attention):
    """Adds a piece's share to the accumulator, and leaves the accumulator at its old scale."""

    def _merge(self, part: Attended) -> None:
        merged = self._merged(part.output.shape[0])
        total = torch.logaddexp(merged.log_sum_exp, part.log_sum_exp)
        share = (part.log_sum_exp - total).exp_().unsqueeze(-1)
        merged.output.add_((part.output.float() * share).to(merged.output.dtype))
        merged.log_sum_exp.copy_(total)


class EmptyWhenFull(OffloadCache):
    """Takes the ring of new tokens for empty when it is full.

    So the token that fills it sees itself and what is in blocks, and none of the others.
    """

    def begin(self, sequence: Sequence, plan: StepPlan) -> OffloadStep:
        """Start a step; see `KVCache.begin`."""
        step = super().begin(sequence, plan)
        if plan.count == 1 and sequence.length - sequence.downloaded == self.tail_tokens - 1:
            return _LonelyStep(self, sequence, plan)
        return step


class _LonelyStep(OffloadStep):
    def history(self, layer: int) -> Iterator[KVSpan]:
        for span in super().history(layer):
            held = min(self._sequence.downloaded - span.start, span.keys.shape[0])
            if held > 0:
                yield KVSpan(span.keys[:held], span.values[:held], span.start, span.place)
        yield self.new(layer)
