"""Keys and values in CPU memory; a ring of slots on the device holds what is being read.

The way of a token's keys and values: computed in prefill, they are staged on the device, read
there by their own chunk, and copied down to the request's blocks. Later steps load the blocks
into ring slots, ahead of need and in the order of need, and read them there; the first loads of a
step start during the step before it. A single new token (decode) goes to the tail, a small buffer
on the device that is copied down when full.

Slots that streaming does not need keep blocks for as long as the request lives, the first block of
every layer first, so that the copying is spread evenly over the layers.

With a prefix cache, the blocks of a prompt stay when its request is over. A later prompt that
begins alike finds them at the head of its block table and reads them like its own; it never writes
them. They are registered when the request is released: until then a download may be under way.

A sparse step reads whole layers instead, in buffers of their own; see `whole`.

A span that lies in one slot, or in the tail, is read in place. Any other is gathered in a
scratch buffer. Either way the attention kernel sees the same rows with the same strides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil, lcm

import torch

from backends.base import ConfigurationError, OutOfMemory
from backends.engine.cache.base import (
    KVLayout,
    KVSpan,
    Scalars,
    Sequence,
    StepPlan,
    poison,
    whole_blocks,
)
from backends.engine.cache.blocks import BlockPool
from backends.engine.cache.prefix import PrefixIndex, registrable_tokens, reusable_tokens
from backends.engine.cache.ring import SlotRing
from backends.engine.cache.whole import WholeLayers
from backends.engine.memory import Buffer
from backends.engine.model import Room
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


@dataclass(frozen=True, slots=True)
class OffloadGeometry:
    """The sizes that decide the buffers of an `OffloadCache`.

    Attributes:
        context_tokens: the longest request.
        block_tokens: tokens in a block, and in a slot.
        slots: of the ring; each holds keys and values of one layer for one block.
        chunk_tokens: the largest step, at most the context.
        attend_tokens: the largest span, at most the context.
        split_tokens: a multiple of which each piece of a one-token step starts at.
        prefix_cache: whether a later request may reuse the blocks of a prompt.
        prefix_cache_tokens: tokens kept for that beyond one context.
        sparse: whether steps read whole layers, side by side.
    """

    context_tokens: int
    block_tokens: int
    slots: int
    chunk_tokens: int
    attend_tokens: int
    split_tokens: int = 1
    prefix_cache: bool = False
    prefix_cache_tokens: int = 0
    sparse: bool = False

    @property
    def blocks(self) -> int:
        """CPU blocks of each layer: a context, and what is kept beyond it."""
        sizes = (self.context_tokens, self.prefix_cache_tokens)
        return sum(ceil(tokens / self.block_tokens) for tokens in sizes)

    @property
    def tail_tokens(self) -> int:
        """Rows of the tail."""
        return min(self.block_tokens, MAX_TAIL_TOKENS)

    @property
    def span_blocks(self) -> int:
        """The most blocks that one span touches."""
        return blocks_in_span(self.attend_tokens, self.block_tokens, self.context_tokens)

    @property
    def stages_are_slots(self) -> bool:
        """Whether slots serve as stages: a prompt that is one step reads no history."""
        return self.chunk_tokens == self.context_tokens == self.block_tokens

    @property
    def reads_blocks(self) -> bool:
        """Whether a one-token step can read blocks one by one, wherever spans are cut."""
        return self.block_tokens % self.split_tokens == 0

    def check(self) -> None:
        """Raise ConfigurationError if a span or a block does not fit."""
        if self.block_tokens > self.context_tokens:
            raise ConfigurationError(
                f"backend.kvcache_block_size={self.block_tokens} is longer than the context, "
                f"backend.max_model_len={self.context_tokens}; at most that is allowed."
            )
        if self.span_blocks > self.slots:
            raise ConfigurationError(
                f"backend.attend_tokens={self.attend_tokens} can touch {self.span_blocks} blocks "
                f"of {self.block_tokens} tokens at once, but backend.num_gpu_blocks={self.slots}: "
                f"set attend_tokens to at most {self.slots * self.block_tokens}, or "
                f"num_gpu_blocks to {self.span_blocks} or more."
            )
        longest_prompt = self.context_tokens - 1
        if self.prefix_cache and not self._reusable(longest_prompt):
            raise ConfigurationError(
                f"backend.prefix_cache=true has no effect: what is reused ends at multiples of "
                f"backend.kvcache_block_size={self.block_tokens} and of backend.chunk_tokens="
                f"{self.chunk_tokens}, and the first common one, "
                f"{lcm(self.block_tokens, self.chunk_tokens)}, is not below backend.max_model_len="
                f"{self.context_tokens} less one: lower one of the two, or set prefix_cache to "
                "false."
            )

    def _reusable(self, prompt_tokens: int) -> int:
        return reusable_tokens(prompt_tokens, self.block_tokens, self.chunk_tokens)

    def buffers(self, layout: KVLayout) -> tuple[Buffer, ...]:
        """Declare all buffers. The axis of two: keys, values."""
        buffers = [
            layout.buffer("ring", "device", "kv_ring", self.slots, 2, self.block_tokens),
            layout.buffer("tail", "device", "kv_ring", layout.layers, 2, self.tail_tokens),
        ]
        if not self.stages_are_slots:
            stages = layout.buffer("stages", "device", "kv_ring", STAGES, 2, self.chunk_tokens)
            buffers.append(stages)
        if self.sparse:
            rows = whole_blocks(self.context_tokens)
            buffers += [
                layout.buffer(f"layer_{name}", "device", "kv_ring", rows)
                for name in ("keys", "values")
            ]
        if self.span_blocks > 1:
            buffers.append(layout.buffer("scratch", "device", "kv_ring", 2, self.attend_tokens))
        buffers += [
            layout.buffer(host_name(layer), "host", "kv_host", self.blocks, 2, self.block_tokens)
            for layer in range(layout.layers)
        ]
        return tuple(buffers)


def host_name(layer: int) -> str:
    """Return the name of the buffer with a layer's blocks."""
    return f"blocks_layer_{layer}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A block of a layer that a step reads, and how many of its rows."""

    layer: int
    index: int
    rows: int


@dataclass(slots=True)
class _Kept:
    """A block that stays in a slot.

    Attributes:
        rows: how many of its rows are there.
        loaded: the event of their load; None until the first.
    """

    slot: int
    rows: int = 0
    loaded: Event | None = None


class OffloadCache:
    """Blocks in CPU memory, a ring, two stages and a tail on the device.

    Args:
        layout: of a token.
        geometry: the sizes, checked.
        tensors: of `OffloadGeometry.buffers`.
        streams: to copy with.
        poisoned: fill what is freed or unwritten with NaN.
    """

    pool_class: type[BlockPool] = BlockPool
    index_class: type[PrefixIndex] = PrefixIndex

    def __init__(
        self,
        layout: KVLayout,
        geometry: OffloadGeometry,
        tensors: Mapping[str, torch.Tensor],
        streams: CopyStreams,
        *,
        poisoned: bool,
    ) -> None:
        self.layout = layout
        self.geometry = geometry
        self.streams = streams
        self.block_tokens = geometry.block_tokens
        self.tail_tokens = geometry.tail_tokens
        self.poisoned = poisoned
        self.pool = self.pool_class(geometry.blocks)
        self.prefixes: PrefixIndex | None = None
        if geometry.prefix_cache:
            self.prefixes = self.index_class(
                self.pool, geometry.block_tokens, geometry.chunk_tokens
            )
        self.blocks = [tensors[host_name(layer)] for layer in range(layout.layers)]
        self.slots = tensors["ring"]
        self.stages = self.slots if geometry.stages_are_slots else tensors["stages"]
        self.tail = tensors["tail"]
        self.scratch = tensors.get("scratch")
        self.whole: WholeLayers | None = None
        if geometry.sparse:
            self.whole = WholeLayers(tensors["layer_keys"], tensors["layer_values"])
        self._forget()
        if poisoned:
            self.pool.on_free = self._poison_blocks
            poison(*self.blocks, *self.device_buffers().values())
        streams.drain()

    def _forget(self) -> None:
        """Start with empty slots and no copy under way: each event is of one since."""
        layers = self.layout.layers
        self._ring = SlotRing(self.geometry.slots)
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._load_of: dict[tuple[int, int], int] = {}
        self._loaded: dict[int, Event] = {}
        self._read: dict[int, Event] = {}
        self._planned: list[Wanted] = []
        self._queue: deque[Wanted] = deque()
        self.stage_downloaded: list[Event | None] = [None] * self.stages.shape[0]
        self.tail_downloaded: list[Event | None] = [None] * layers
        self.layer_downloaded: list[Event | None] = [None] * layers
        if self.whole is not None:
            self.whole.forget()

    def admit(self, request_id: int, tokens: int, prompt: tuple[int, ...] = ()) -> Sequence:
        """Take blocks for the whole request, known ones first; see `KVCache.admit`."""
        shared = self._share(prompt)
        try:
            own = self.pool.take(ceil(tokens / self.block_tokens) - len(shared))
        except OutOfMemory:
            self.pool.give_back(shared)
            raise
        table, reused = shared + own, len(shared) * self.block_tokens
        self._share_out_slots(len(table))
        return Sequence(request_id, reused, table, reused, prompt, reused)

    def _share(self, prompt: tuple[int, ...]) -> list[int]:
        """Take a reference to each block of the longest known beginning, and return them."""
        if self.prefixes is None:
            return []
        geometry = self.geometry
        limit = reusable_tokens(len(prompt), geometry.block_tokens, geometry.chunk_tokens)
        shared = self.prefixes.match(prompt, limit)
        self.pool.share(shared)
        return shared

    def _register(self, sequence: Sequence) -> None:
        """Make the prompt's blocks known; all that was copied down has arrived."""
        if self.prefixes is None or not sequence.prefilled:
            return
        geometry = self.geometry
        held = min(len(sequence.prompt), sequence.downloaded)
        tokens = registrable_tokens(held, geometry.block_tokens, geometry.chunk_tokens)
        self.prefixes.register(sequence.prompt, sequence.block_table, tokens)

    def _poison_blocks(self, blocks: Iterable[int]) -> None:
        for layer_blocks in self.blocks:
            for block in blocks:
                poison(layer_blocks[block])

    def _share_out_slots(self, blocks: int) -> None:
        """Decide which blocks of a request stay in slots, and which slots stream the others."""
        slots, layers = self.geometry.slots, self.layout.layers
        if layers * blocks <= slots:
            keeping = layers * blocks
        else:
            # One slot more than a span needs is loaded while the span is read.
            keeping = max(slots - max(self.geometry.span_blocks + 1, 2), 0)
        pairs = [(layer, index) for index in range(blocks) for layer in range(layers)]
        streaming = slots - keeping
        self._kept = {pair: _Kept(streaming + n) for n, pair in enumerate(pairs[:keeping])}
        self._ring = SlotRing(streaming)

    def begin(self, sequence: Sequence, plan: StepPlan) -> OffloadStep:
        """Start a step, and its first loads; see `KVCache.begin`."""
        if plan.count > 1 and sequence.length > sequence.downloaded:
            self._download_tail(sequence)
        self._want(sequence, plan)
        if plan.sparse:
            return SparseOffloadStep(self, sequence, plan)
        return OffloadStep(self, sequence, plan)

    def begin_one(self, sequence: Sequence, plan: StepPlan, scalars: Scalars) -> OffloadOneStep:
        """Start a step of one token; see `KVCache.begin_one`."""
        self._want(sequence, plan)
        scalars.tail_start.fill_(sequence.downloaded)
        scalars.tail_row.fill_(sequence.length - sequence.downloaded)
        return OffloadOneStep(self, sequence, plan, scalars)

    def end(self, sequence: Sequence, following: StepPlan | None) -> None:
        """After a step: empty a full tail, and start the next step's first loads."""
        if sequence.length - sequence.downloaded == self.tail_tokens:
            self._download_tail(sequence)
        self._drop_loads()
        if following is not None:
            self._want(sequence, following)

    def release(self, sequence: Sequence) -> None:
        """Give the blocks back once no copy touches them; see `KVCache.release`."""
        self.streams.drain()
        self._forget()
        if self.poisoned:
            poison(*self.device_buffers().values())
            self.streams.drain()
        self._register(sequence)
        self.pool.give_back(sequence.block_table)
        sequence.block_table, sequence.prompt = [], ()
        sequence.length = sequence.downloaded = sequence.reused = 0
        sequence.prefilled = False

    def layer_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the buffers for whole layers; see `KVCache.layer_rows`."""
        if self.whole is None:
            raise AssertionError("no buffers for whole layers")
        return self.whole.keys.rows, self.whole.values.rows

    def device_buffers(self) -> Mapping[str, torch.Tensor]:
        """Return the buffers on the device by name."""
        buffers = {"ring": self.slots, "tail": self.tail}
        if not self.geometry.stages_are_slots:
            buffers["stages"] = self.stages
        if self.scratch is not None:
            buffers["scratch"] = self.scratch
        if self.whole is not None:
            buffers["layer_keys"] = self.whole.keys.rows
            buffers["layer_values"] = self.whole.values.rows
        return buffers

    def host_buffers(self) -> Mapping[str, torch.Tensor]:
        """Return the blocks of each layer by name."""
        return {host_name(layer): blocks for layer, blocks in enumerate(self.blocks)}

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

        Raises:
            AssertionError: they belong in blocks that another request may read, too.
        """
        if start < sequence.reused:
            raise AssertionError(f"rows from {start} on, but {sequence.reused} tokens are shared")
        pieces = []
        done = 0
        while done < count:
            index, offset = divmod(start + done, self.block_tokens)
            size = min(count - done, self.block_tokens - offset)
            block = self.blocks[layer][sequence.block_table[index]]
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

    def blocks_to_read(self, sequence: Sequence, plan: StepPlan) -> list[int]:
        """Return the indices in the block table of what the step reads through slots."""
        if plan.sparse:
            return []
        size, downloaded = self.block_tokens, sequence.downloaded
        indices: dict[int, None] = {}
        for span in plan.spans:
            stop = min(span.stop, downloaded)
            if span.start < stop:
                indices.update(dict.fromkeys(range(span.start // size, ceil(stop / size))))
        return list(indices)

    def _want(self, sequence: Sequence, plan: StepPlan) -> None:
        """Load what a step reads next, in the order of need, unless that is under way."""
        size, indices = self.block_tokens, self.blocks_to_read(sequence, plan)
        wanted = [
            Wanted(layer, index, min(size, sequence.downloaded - index * size))
            for layer in range(plan.reading_layers)
            for index in indices
        ]
        if wanted != self._planned:
            self._drop_loads()
            self._planned, self._queue = wanted, deque(wanted)
        self.load_ahead(sequence)

    def _drop_loads(self) -> None:
        """Forget what is loaded and was not read; the copy stream keeps these loads in order."""
        self._load_of.clear()
        self._loaded.clear()
        self._ring.abandon()
        self._planned, self._queue = [], deque()

    def load_ahead(self, sequence: Sequence) -> None:
        """Start the next loads while slots are free."""
        while self._queue:
            wanted = self._queue[0]
            kept = self._kept.get((wanted.layer, wanted.index))
            if kept is not None:
                if kept.rows < wanted.rows:
                    # Its readers so far are on the compute stream, and all asked for.
                    kept.loaded = self._load(sequence, wanted, kept.slot, self.streams.mark())
                    kept.rows = wanted.rows
            elif self._ring.has_room:
                grant = self._ring.start()
                event = self._read.pop(grant.after, None)
                if event is None:  # a slot's first load, or one after an unread load
                    event = self.streams.mark()
                self._loaded[grant.load] = self._load(sequence, wanted, grant.slot, event)
                self._load_of[wanted.layer, wanted.index] = grant.load
            else:
                return
            self._queue.popleft()

    def _load(self, sequence: Sequence, wanted: Wanted, number: int, read: Event) -> Event:
        """Copy a block's rows up to a slot, after its last reader is done; return the event."""
        slot = self.slots[number]
        block = self.blocks[wanted.layer][self.block_to_load(sequence, wanted.index)]
        after = [read, self.downloaded_event(wanted.layer)]
        if self.geometry.stages_are_slots:
            after.append(self.stage_downloaded[number])
        if wanted.rows == self.block_tokens:
            pieces = [Copy(slot, block)]
        else:
            rows = wanted.rows
            pieces = [Copy(slot[kind, :rows], block[kind, :rows]) for kind in (0, 1)]
        return self.streams.copy(
            "up",
            pieces,
            [event for event in after if event is not None],
            wipe=slot if self.poisoned else None,
        )

    def block_to_load(self, sequence: Sequence, index: int) -> int:
        """Return the block of CPU memory with the rows of `index` in the block table."""
        return sequence.block_table[index]

    def downloaded_event(self, layer: int) -> Event | None:
        """Return the event of a layer's last copy down, which its loads wait for."""
        return self.layer_downloaded[layer]

    def await_load(self, event: Event) -> None:
        """Make readers wait for a load."""
        self.streams.wait(event)

    def slot(self, layer: int, index: int) -> int:
        """Return the slot of a block that is needed now, once its load is done."""
        kept = self._kept.get((layer, index))
        if kept is not None:
            self.await_load(kept.loaded)
            return kept.slot
        load = self._load_of[layer, index]
        self.await_load(self._loaded[load])
        return self._ring.slot_of(load)

    def done_with(self, layer: int, index: int) -> None:
        """Give a block's slot back: the layer's last read of it has been asked for."""
        if (layer, index) in self._kept:
            return
        load = self._load_of.pop((layer, index))
        self._read[load] = self.streams.mark()
        del self._loaded[load]
        self._ring.release(load)

    def await_room(self, events: list[Event | None], index: int) -> None:
        """Make the compute stream wait until a buffer has been copied down."""
        event = events[index]
        if event is not None:
            self.streams.wait(event)
            events[index] = None

    def tail_row(self, sequence: Sequence, layer: int) -> Room:
        """Return the tail's next free row."""
        self.await_room(self.tail_downloaded, layer)
        row = sequence.length - sequence.downloaded
        keys, values = self.tail[layer, :, row : row + 1]
        return Room(keys, values, None)

    def tail_of_one(self, layer: int, scalars: Scalars) -> Room:
        """Return the tail and, on the device, its next free row."""
        keys, values = self.tail[layer]
        return Room(keys, values, scalars.tail_row)

    def gather(self, sequence: Sequence, layer: int, span: Span) -> tuple[torch.Tensor, str]:
        """Copy a span's rows out of several slots into the scratch buffer."""
        if self.scratch is None:
            raise AssertionError("a span over several blocks, and no scratch buffer")
        size = self.block_tokens
        stop = min(span.stop, sequence.downloaded)
        used = []
        for index in range(span.start // size, ceil(stop / size)):
            slot = self.slot(layer, index)
            start_row, stop_row = max(span.start, index * size), min(stop, (index + 1) * size)
            rows = self.slots[slot, :, start_row - index * size : stop_row - index * size]
            self.scratch[:, start_row - span.start : stop_row - span.start].copy_(rows)
            used.append(str(slot))
        return self.scratch[:, : span.stop - span.start], f"slots {', '.join(used)}"

    def reading(
        self, sequence: Sequence, plan: StepPlan, layer: int
    ) -> Iterator[tuple[Span, list[int]]]:
        """Yield the spans, and give each block's slot back once no later span needs it."""
        size, downloaded = self.block_tokens, sequence.downloaded
        held: list[int] = []
        for number, span in enumerate(plan.spans):
            stop = min(span.stop, downloaded)
            indices = list(range(span.start // size, ceil(stop / size)))
            held += [index for index in indices if span.start < stop and index not in held]
            yield span, indices
            following = plan.spans[number + 1 :]
            while held and not (following and following[0].start < (held[0] + 1) * size):
                self.done_with(layer, held.pop(0))
            self.load_ahead(sequence)


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
