"""The steps of an offload cache: where new rows go, and the spans that each layer reads.

A span that lies in one slot, or in the tail, is read in place. Any other is gathered in a
scratch buffer. Either way the attention kernel sees the same rows with the same strides.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import TYPE_CHECKING

import torch

from backends.engine.cache.base import KVSpan, Scalars, Sequence, StepPlan
from backends.engine.cache.whole import WholeLayers
from backends.engine.model import Room
from backends.engine.policy import Span

if TYPE_CHECKING:
    from backends.engine.cache.offload import OffloadCache


class OffloadStep:
    """One pass through the layers, which loads blocks ahead in the order of need."""

    def __init__(self, cache: OffloadCache, sequence: Sequence, plan: StepPlan) -> None:
        self._cache = cache
        self._sequence = sequence
        self._plan = plan

    def room(self, layer: int) -> Room:
        """Return a stage for a chunk, the tail's next row for one token; see `Step.room`."""
        if self._plan.count == 1:
            return self._cache.tail_row(self._sequence, layer)
        self._cache.await_room(self._cache.stage_downloaded, layer % len(self._cache.stages))
        new = self.new(layer)
        return Room(new.keys, new.values, None)

    def written(self, layer: int) -> None:
        """Copy a staged chunk down; see `Step.written`."""
        if self._plan.count == 1:
            return
        stage = layer % len(self._cache.stages)
        self._cache.stage_downloaded[stage] = self._cache.download(
            self._sequence,
            layer,
            self._sequence.length,
            self._cache.stages[stage],
            self._plan.count,
        )

    def new(self, layer: int) -> KVSpan:
        """Return the stage, or the tail's row; see `Step.new`."""
        start = self._sequence.length
        if self._plan.count == 1:
            row = start - self._sequence.downloaded
            keys, values = self._cache.tail[layer, :, row : row + 1]
            return KVSpan(keys, values, start, "the tail")
        stage = self._cache.stages[layer % len(self._cache.stages)]
        keys, values = stage[:, : self._plan.count]
        return KVSpan(keys, values, start, "the chunk")

    def history(self, layer: int) -> Iterator[KVSpan]:
        """Yield the announced spans; see `Step.history`."""
        for span, _ in self._cache.reading(self._sequence, self._plan, layer):
            yield self._span(layer, span)

    def finish(self, following: StepPlan | None = None) -> None:
        """Count the new tokens as held; see `Step.finish`."""
        self._sequence.length += self._plan.count
        if self._plan.count > 1:
            self._sequence.downloaded = self._sequence.length
        self._cache.end(self._sequence, following)

    def _span(self, layer: int, span: Span) -> KVSpan:
        """Return the span's rows side by side: in the tail, in a slot, or in the scratch."""
        cache, downloaded = self._cache, self._sequence.downloaded
        size = cache.block_tokens
        if span.start >= downloaded:
            rows = cache.tail[layer, :, span.start - downloaded : span.stop - downloaded]
            return KVSpan(rows[0], rows[1], span.start, "the tail")
        first = span.start // size
        if span.stop <= (first + 1) * size:
            slot = cache.slot(layer, first)
            offset = span.start - first * size
            rows = cache.slots[slot, :, offset : offset + span.stop - span.start]
            place = f"slot {slot}"
        else:
            rows, place = cache.gather(self._sequence, layer, span)
        if span.stop > downloaded:
            new = span.stop - downloaded
            rows[:, downloaded - span.start :].copy_(cache.tail[layer, :, :new])
            place += " and the tail"
        return KVSpan(rows[0], rows[1], span.start, place)


class SparseOffloadStep(OffloadStep):
    """One pass of several tokens, which reads whole layers; see `SparseStep`."""

    def load_ahead(self, layer: int, blocks: torch.Tensor | None) -> None:
        """Start to load a layer's keys; see `SparseStep.load_ahead`."""
        self._whole.keys.load(self._cache, self._sequence, layer, blocks)

    def layer_keys(self, layer: int, blocks: torch.Tensor | None) -> torch.Tensor:
        """Return the layer's keys; see `SparseStep.layer_keys`."""
        self._whole.keys.load(self._cache, self._sequence, layer, blocks)
        return self._whole.keys.ready(self._cache, self.new(layer).keys, self._sequence.length)

    def layer_values(self, layer: int, blocks: torch.Tensor | None) -> torch.Tensor:
        """Return the layer's values; see `SparseStep.layer_values`."""
        self._whole.values.load(self._cache, self._sequence, layer, blocks)
        return self._whole.values.ready(self._cache, self.new(layer).values, self._sequence.length)

    def history(self, layer: int) -> Iterator[KVSpan]:
        """Yield the announced spans of whole layers that are there; see `Step.history`."""
        del layer
        for span in self._plan.spans:
            yield self._whole.span(*span)

    @property
    def _whole(self) -> WholeLayers:
        if self._cache.whole is None:
            raise AssertionError("a sparse step, and no buffers for whole layers")
        return self._cache.whole


class OffloadOneStep:
    """One token's pass. It reads the blocks one by one, or gathered spans, and the tail apart."""

    def __init__(
        self, cache: OffloadCache, sequence: Sequence, plan: StepPlan, scalars: Scalars
    ) -> None:
        self._cache = cache
        self._sequence = sequence
        self._plan = plan
        self._scalars = scalars

    def room(self, layer: int) -> Room:
        """Return the tail, and the token's row in it; see `OneStep.room`."""
        self._cache.await_room(self._cache.tail_downloaded, layer)
        return self._cache.tail_of_one(layer, self._scalars)

    def written(self, layer: int) -> None:
        """See `OneStep.written`."""

    def pieces(self, layer: int) -> Iterator[KVSpan]:
        """Yield blocks or spans; see `OneStep.pieces`. Tail rows lie elsewhere."""
        if self._cache.geometry.reads_blocks:
            yield from self._blocks(layer)
        else:
            yield from self._spans(layer)

    def tail(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tail; see `OneStep.tail`."""
        keys, values = self._cache.tail[layer]
        return keys, values

    def finish(self, following: StepPlan | None = None) -> None:
        """Count the new token as held; see `Step.finish`."""
        self._sequence.length += 1
        self._cache.end(self._sequence, following)

    def _blocks(self, layer: int) -> Iterator[KVSpan]:
        cache, size, stop = self._cache, self._cache.block_tokens, self._sequence.length + 1
        in_slots = set(cache.blocks_to_read(self._sequence, self._plan))
        for index in range(ceil(stop / size)):
            if index not in in_slots:
                yield self._only_tail(index * size, min(size, stop - index * size))
                continue
            slot = cache.slot(layer, index)
            keys, values = cache.slots[slot, :, : stop - index * size]
            yield KVSpan(keys, values, index * size, f"slot {slot}")
            cache.done_with(layer, index)
            cache.load_ahead(self._sequence)

    def _spans(self, layer: int) -> Iterator[KVSpan]:
        cache, downloaded = self._cache, self._sequence.downloaded
        for span, indices in cache.reading(self._sequence, self._plan, layer):
            if span.start >= downloaded:
                yield self._only_tail(span.start, span.stop - span.start)
            elif len(indices) == 1 and span.stop <= (indices[0] + 1) * cache.block_tokens:
                slot = cache.slot(layer, indices[0])
                offset = span.start - indices[0] * cache.block_tokens
                keys, values = cache.slots[slot, :, offset : offset + span.stop - span.start]
                yield KVSpan(keys, values, span.start, f"slot {slot}")
            else:
                rows, place = cache.gather(self._sequence, layer, span)
                yield KVSpan(rows[0], rows[1], span.start, place)

    def _only_tail(self, start: int, tokens: int) -> KVSpan:
        """Return a piece all of whose rows are read from the tail, whatever is given as rows."""
        unread = self._cache.slots[0, :, :tokens]
        return KVSpan(unread[0], unread[1], start, "the tail")
