"""Faults at the edges of chunks, blocks and buffers, which every engine shows when it is fresh."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from backends.engine.attention import Attended
from backends.engine.cache.base import Scalars, Sequence, StepPlan
from backends.engine.cache.offload import OffloadCache, OffloadOneStep, OffloadStep
from backends.engine.model import Decoder, LayerRooms, Observer, Room
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


class DropsLastSpan(OffloadCache):
    """Takes the last block of the history for an unfinished one when it is exactly full."""

    def reading(
        self, sequence: Sequence, plan: StepPlan, layer: int
    ) -> Iterator[tuple[Span, list[int]]]:
        """Yield the spans; see `OffloadCache.reading`."""
        full = plan.count > 1 and sequence.length % self.block_tokens == 0
        for span, indices in super().reading(sequence, plan, layer):
            if not (full and span.stop == sequence.length):
                yield span, indices


class KeepsOldScale(Attention):
    """Adds a piece's share to the accumulator, and leaves the accumulator at its old scale."""

    def _merge(self, part: Attended) -> None:
        merged = self._merged(part.output.shape[0])
        total = torch.logaddexp(merged.log_sum_exp, part.log_sum_exp)
        share = (part.log_sum_exp - total).exp_().unsqueeze(-1)
        merged.output.add_((part.output.float() * share).to(merged.output.dtype))
        merged.log_sum_exp.copy_(total)


class ShortTail(OffloadCache):
    """Has a tail of one row too few: the token that fills it lands on the first row again."""

    def begin(self, sequence: Sequence, plan: StepPlan) -> OffloadStep:
        """Start a step; see `KVCache.begin`."""
        super().begin(sequence, plan)
        overflows = plan.count == 1 and self.overflows(sequence)
        return (_OverflowingStep if overflows else OffloadStep)(self, sequence, plan)

    def begin_one(self, sequence: Sequence, plan: StepPlan, scalars: Scalars) -> OffloadOneStep:
        """Start a step of one token; see `KVCache.begin_one`."""
        step = super().begin_one(sequence, plan, scalars)
        if not self.overflows(sequence):
            return step
        scalars.tail_row.zero_()
        return _OverflowingOneStep(self, sequence, plan, scalars)

    def overflows(self, sequence: Sequence) -> bool:
        """Say whether the next token fills the tail."""
        return sequence.length - sequence.downloaded == self.tail_tokens - 1


class _OverflowingStep(OffloadStep):
    def room(self, layer: int) -> Room:
        super().room(layer)
        keys, values = self._cache.tail[layer, :, :1]
        return Room(keys, values, None)

    def written(self, layer: int) -> None:
        wrap(self._cache, layer)


class _OverflowingOneStep(OffloadOneStep):
    def written(self, layer: int) -> None:
        wrap(self._cache, layer)


def wrap(cache: OffloadCache, layer: int) -> None:
    """Let the last row be the first one again: the ring has started anew."""
    cache.tail[layer, :, -1].copy_(cache.tail[layer, :, 0])
