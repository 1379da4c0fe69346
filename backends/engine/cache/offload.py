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

A sparse step reads whole layers instead, in buffers of their own; see `whole`. The sizes of all
buffers are in `offload_geometry`, the passes that read and fill them in `offload_steps`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil

import torch

from backends.base import OutOfMemory
from backends.engine.cache.base import KVLayout, Scalars, Sequence, StepPlan, poison
from backends.engine.cache.blocks import BlockPool
from backends.engine.cache.offload_geometry import OffloadGeometry, host_name
from backends.engine.cache.offload_steps import OffloadOneStep, OffloadStep, SparseOffloadStep
from backends.engine.cache.prefix import PrefixIndex, registrable_tokens, reusable_tokens
from backends.engine.cache.ring import SlotRing
from backends.engine.cache.whole import WholeLayers
from backends.engine.model import Room
from backends.engine.policy import Span
from backends.engine.streams import Copy, CopyStreams, Event


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
