"""Keys and values in CPU memory; a ring of slots on the device holds what is being read.

The way of a token's keys and values: computed in prefill, they are staged on the device, read
there by their own chunk, and copied down to the request's blocks. Later steps load the blocks
into ring slots, ahead of need and in the order of need, and read them there. A single new token
(decode) goes to the tail, a small buffer on the device that is copied down when full.

A span that lies in one slot, or in the tail, is read in place. Any other is gathered in a
scratch buffer. Either way the attention kernel sees the same rows with the same strides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import ceil

import torch

from backends.base import ConfigurationError
from backends.engine.cache.base import KVLayout, KVSpan, Sequence, poison
from backends.engine.cache.blocks import BlockPool
from backends.engine.cache.ring import SlotRing
from backends.engine.policy import Span
from backends.engine.streams import Copy, CopyStreams, Event

STAGES = 2
"""Chunk buffers: one is copied down while the next layer fills the other."""

MAX_TAIL_TOKENS = 256
"""New tokens kept on the device before they are copied down; at most a block."""


def blocks_in_span(attend_tokens: int, block_tokens: int, context_tokens: int) -> int:
    """Return the most blocks that one span, cut at multiples of `attend_tokens`, touches."""
    starts = range(0, context_tokens, attend_tokens)
    return max(
        ceil(min(start + attend_tokens, context_tokens) / block_tokens) - start // block_tokens
        for start in starts
    )


class OffloadCache:
    """Blocks in CPU memory, a ring, two stages and a tail on the device.

    Args:
        layout: of a token.
        streams: to copy with.
        context_tokens: the longest request.
        block_tokens: tokens in a block, and in a slot.
        slots: of the ring; each holds keys and values of one layer for one block.
        chunk_tokens: the largest step.
        attend_tokens: the largest span.
        poisoned: fill what is freed or unwritten with NaN.

    Raises:
        ConfigurationError: a block is longer than the context, or a span needs more blocks at
            once than there are slots.
    """

    def __init__(
        self,
        layout: KVLayout,
        streams: CopyStreams,
        *,
        context_tokens: int,
        block_tokens: int,
        slots: int,
        chunk_tokens: int,
        attend_tokens: int,
        poisoned: bool,
    ) -> None:
        _check_sizes(context_tokens, block_tokens, slots, attend_tokens)
        self.layout = layout
        self.streams = streams
        self.block_tokens = block_tokens
        self.tail_tokens = min(block_tokens, MAX_TAIL_TOKENS)
        self.poisoned = poisoned
        self.ring = SlotRing(slots)
        self.pool = BlockPool(ceil(context_tokens / block_tokens))
        # First axis of each: keys, values. One tensor a layer, because PyTorch rounds the size of
        # pinned memory up to a power of two: the larger the tensor, the more it wastes.
        self.blocks = [
            layout.empty(2, self.pool.free_blocks, block_tokens, pinned_host=True)
            for _ in range(layout.layers)
        ]
        self.slots = layout.empty(2, slots, block_tokens)
        self.stages = layout.empty(STAGES, 2, min(chunk_tokens, context_tokens))
        self.tail = layout.empty(layout.layers, 2, self.tail_tokens)
        self.scratch: torch.Tensor | None = None
        if blocks_in_span(attend_tokens, block_tokens, context_tokens) > 1:
            self.scratch = layout.empty(2, min(attend_tokens, context_tokens))
        self._forget_events()
        if poisoned:
            poison(*self.blocks, *self.device_buffers().values())
        streams.drain()

    def _forget_events(self) -> None:
        """Start with no copy under way: each event below is of a copy or a read since."""
        layers = self.layout.layers
        self.loaded: dict[int, Event] = {}
        self.read: dict[int, Event] = {}
        self.stage_downloaded: list[Event | None] = [None] * STAGES
        self.tail_downloaded: list[Event | None] = [None] * layers
        self.layer_downloaded: list[Event | None] = [None] * layers

    def admit(self, request_id: int, tokens: int) -> Sequence:
        """Take blocks for the whole request; see `KVCache.admit`."""
        return Sequence(request_id, block_table=self.pool.take(ceil(tokens / self.block_tokens)))

    def begin(
        self, sequence: Sequence, count: int, spans: tuple[Span, ...], reading_layers: int
    ) -> OffloadStep:
        """Start a step, and load the first blocks; see `KVCache.begin`."""
        tail = sequence.length - sequence.downloaded
        if tail == self.tail_tokens or (tail and count > 1):
            self._download_tail(sequence)
        return OffloadStep(self, sequence, count, spans, reading_layers)

    def release(self, sequence: Sequence) -> None:
        """Give the blocks back once no copy touches them; see `KVCache.release`."""
        self.streams.drain()
        self.ring.abandon()
        self._forget_events()
        if self.poisoned:
            for layer_blocks in self.blocks:
                for block in sequence.block_table:
                    poison(layer_blocks[:, block])
            poison(*self.device_buffers().values())
            self.streams.drain()
        self.pool.give_back(sequence.block_table)
        sequence.block_table = []
        sequence.length = sequence.downloaded = 0

    def device_buffers(self) -> Mapping[str, torch.Tensor]:
        """Return the buffers on the device by name."""
        buffers = {"ring": self.slots, "stages": self.stages, "tail": self.tail}
        if self.scratch is not None:
            buffers["scratch"] = self.scratch
        return buffers

    def host_buffers(self) -> Mapping[str, torch.Tensor]:
        """Return the blocks of each layer by name."""
        return {f"blocks_layer_{layer}": blocks for layer, blocks in enumerate(self.blocks)}

    def download(
        self, sequence: Sequence, layer: int, start: int, rows: torch.Tensor, count: int
    ) -> Event:
        """Copy rows [2, at least `count`, kv_heads, head_dim] down to their blocks.

        Args:
            sequence: whose rows they are.
            layer: of these keys and values.
            start: position of the first row.
            rows: keys and values; those past `count` are not touched.
            count: rows to copy.
        """
        pieces = []
        done = 0
        while done < count:
            index, offset = divmod(start + done, self.block_tokens)
            size = min(count - done, self.block_tokens - offset)
            block = self.blocks[layer][:, sequence.block_table[index]]
            for kind in (0, 1):
                pieces.append(
                    Copy(block[kind, offset : offset + size], rows[kind, done : done + size])
                )
            done += size
        event = self.streams.copy("down", pieces, [self.streams.mark()])
        self.layer_downloaded[layer] = event
        return event

    def _download_tail(self, sequence: Sequence) -> None:
        count = sequence.length - sequence.downloaded
        for layer in range(self.layout.layers):
            self.tail_downloaded[layer] = self.download(
                sequence, layer, sequence.downloaded, self.tail[layer], count
            )
        sequence.downloaded = sequence.length


class OffloadStep:
    """One pass through the layers, which loads blocks ahead in the order of need."""

    def __init__(
        self,
        cache: OffloadCache,
        sequence: Sequence,
        count: int,
        spans: tuple[Span, ...],
        reading_layers: int,
    ) -> None:
        self._cache = cache
        self._sequence = sequence
        self._count = count
        self._spans = spans
        self._block_indices = self._blocks_to_read()
        self._wanted = iter(
            [(layer, index) for layer in range(reading_layers) for index in self._block_indices]
        )
        self._load_of: dict[tuple[int, int], int] = {}
        self._load_ahead()

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> KVSpan:
        """Stage a chunk and copy it down, or put one token in the tail; see `Step.append`."""
        start = self._sequence.length
        if self._count == 1:
            row = start - self._sequence.downloaded
            self._await(self._cache.tail_downloaded, layer)
            target, place = self._cache.tail[layer, :, row : row + 1], "the tail"
        else:
            stage = layer % STAGES
            self._await(self._cache.stage_downloaded, stage)
            target, place = self._cache.stages[stage, :, : self._count], "the chunk"
        target[0].copy_(keys)
        target[1].copy_(values)
        if self._count > 1:
            self._cache.stage_downloaded[layer % STAGES] = self._cache.download(
                self._sequence, layer, start, target, self._count
            )
        return KVSpan(target[0], target[1], start, place)

    def history(self, layer: int) -> Iterator[KVSpan]:
        """Yield the announced spans; see `Step.history`."""
        needed_later = list(self._block_indices)
        for number, span in enumerate(self._spans):
            yield self._span(layer, span)
            next_start = self._spans[number + 1].start if number + 1 < len(self._spans) else None
            while needed_later and (
                next_start is None or (needed_later[0] + 1) * self._cache.block_tokens <= next_start
            ):
                self._release(layer, needed_later.pop(0))
            self._load_ahead()

    def finish(self) -> None:
        """Count the new tokens as held."""
        self._sequence.length += self._count
        if self._count > 1:
            self._sequence.downloaded = self._sequence.length

    def _blocks_to_read(self) -> list[int]:
        """Return the indices in the block table of what the spans read from CPU memory."""
        size, downloaded = self._cache.block_tokens, self._sequence.downloaded
        indices: dict[int, None] = {}
        for span in self._spans:
            stop = min(span.stop, downloaded)
            if span.start < stop:
                indices.update(dict.fromkeys(range(span.start // size, ceil(stop / size))))
        return list(indices)

    def _load_ahead(self) -> None:
        """Start the next loads while slots are free."""
        while self._cache.ring.has_room:
            wanted = next(self._wanted, None)
            if wanted is None:
                return
            self._load(*wanted)

    def _load(self, layer: int, index: int) -> None:
        cache, sequence = self._cache, self._sequence
        grant = cache.ring.start()
        after = [cache.layer_downloaded[layer], cache.read.pop(grant.after, None)]
        rows = min(cache.block_tokens, sequence.downloaded - index * cache.block_tokens)
        slot = cache.slots[:, grant.slot]
        block = cache.blocks[layer][:, sequence.block_table[index]]
        cache.loaded[grant.load] = cache.streams.copy(
            "up",
            [Copy(slot[kind, :rows], block[kind, :rows]) for kind in (0, 1)],
            [event for event in after if event is not None],
            wipe=slot if cache.poisoned else None,
        )
        self._load_of[layer, index] = grant.load

    def _release(self, layer: int, index: int) -> None:
        cache, load = self._cache, self._load_of.pop((layer, index))
        cache.read[load] = cache.streams.mark()
        del cache.loaded[load]
        cache.ring.release(load)

    def _await(self, events: list[Event | None], index: int) -> None:
        event = events[index]
        if event is not None:
            self._cache.streams.wait(event)
            events[index] = None

    def _slot(self, layer: int, index: int) -> int:
        """Return the slot of a block that is needed now, once its load is done."""
        load = self._load_of[layer, index]
        self._cache.streams.wait(self._cache.loaded[load])
        return self._cache.ring.slot_of(load)

    def _span(self, layer: int, span: Span) -> KVSpan:
        """Return the span's rows side by side: in the tail, in a slot, or in the scratch."""
        downloaded, size = self._sequence.downloaded, self._cache.block_tokens
        if span.start >= downloaded:
            rows = self._cache.tail[layer, :, span.start - downloaded : span.stop - downloaded]
            return KVSpan(rows[0], rows[1], span.start, "the tail")
        first = span.start // size
        if span.stop <= (first + 1) * size:
            slot = self._slot(layer, first)
            offset = span.start - first * size
            rows = self._cache.slots[:, slot, offset : offset + span.stop - span.start]
            place = f"slot {slot}"
        else:
            rows, place = self._gather(layer, span)
        if span.stop > downloaded:
            new = span.stop - downloaded
            rows[:, downloaded - span.start :].copy_(self._cache.tail[layer, :, :new])
            place += " and the tail"
        return KVSpan(rows[0], rows[1], span.start, place)

    def _gather(self, layer: int, span: Span) -> tuple[torch.Tensor, str]:
        """Copy the span's rows out of several slots into the scratch buffer."""
        scratch = self._cache.scratch
        if scratch is None:
            raise AssertionError("a span over several blocks, and no scratch buffer")
        size = self._cache.block_tokens
        stop = min(span.stop, self._sequence.downloaded)
        used = []
        for index in range(span.start // size, ceil(stop / size)):
            slot = self._slot(layer, index)
            start_row, stop_row = max(span.start, index * size), min(stop, (index + 1) * size)
            rows = self._cache.slots[:, slot, start_row - index * size : stop_row - index * size]
            scratch[:, start_row - span.start : stop_row - span.start].copy_(rows)
            used.append(str(slot))
        return scratch[:, : span.stop - span.start], f"slots {', '.join(used)}"


def _check_sizes(context_tokens: int, block_tokens: int, slots: int, attend_tokens: int) -> None:
    if block_tokens > context_tokens:
        raise ConfigurationError(
            f"backend.kvcache_block_size={block_tokens} is longer than the context, "
            f"backend.max_model_len={context_tokens}; at most that is allowed."
        )
    needed = blocks_in_span(attend_tokens, block_tokens, context_tokens)
    if needed > slots:
        raise ConfigurationError(
            f"backend.attend_tokens={attend_tokens} can touch {needed} blocks of {block_tokens} "
            f"tokens at once, but backend.num_gpu_blocks={slots}: set attend_tokens to at most "
            f"{slots * block_tokens}, or num_gpu_blocks to {needed} or more."
        )
