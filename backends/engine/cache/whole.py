"""A whole layer's keys and values, side by side on the device: what sparse prefill reads.

Two buffers as long as the context, one of keys and one of values, hold one layer at a time. What
earlier chunks left in CPU blocks is copied up into its place, only blocks that are read, and the
chunk's own rows are copied from their stage. So offloaded prefill runs the same kernels on the same
rows as with all keys and values on the device.

A layer's keys can be loaded as soon as the attention of the layer before has been asked for; its
values once it is known which are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from backends.engine.cache.base import KVSpan, Sequence, poison, whole_blocks
from backends.engine.policy import BLOCK_TOKENS
from backends.engine.streams import Copy, Event

if TYPE_CHECKING:
    from backends.engine.cache.offload import OffloadCache

NO_LAYER = -1


class LayerBuffer:
    """Keys, or values, of one layer at a time.

    Args:
        rows: the buffer, [whole blocks, kv_heads, head_dim].
        kind: 0 for keys, 1 for values, as in CPU blocks.
    """

    def __init__(self, rows: torch.Tensor, kind: int) -> None:
        self.rows = rows
        self._kind = kind
        self.forget()

    def forget(self) -> None:
        """Hold nothing: the request has come to its end."""
        self._layer = NO_LAYER
        self._held: set[int] = set()
        self._loads: list[Event] = []

    def load(
        self, cache: OffloadCache, sequence: Sequence, layer: int, blocks: torch.Tensor | None
    ) -> None:
        """Start to copy up what is missing of the blocks that are read.

        Whatever else reads this buffer must have been asked of the compute stream.

        Args:
            cache: whose blocks they are.
            sequence: of which the first `length` tokens are in CPU memory.
            layer: to hold from now on.
            blocks: see `SparseStep`.
        """
        if layer != self._layer:
            self.forget()
            self._layer = layer
            if cache.poisoned:
                poison(self.rows)
        count = sequence.length // BLOCK_TOKENS
        read = range(count) if blocks is None else blocks[:count].nonzero()[:, 0].tolist()
        missing = [block for block in read if block not in self._held]
        if not missing:
            return
        self._held.update(missing)
        pieces = [piece for run in _runs(missing) for piece in self._pieces(cache, sequence, *run)]
        after = [cache.streams.mark(), cache.downloaded_event(layer)]
        event = cache.streams.copy("up", pieces, [one for one in after if one is not None])
        self._loads.append(event)

    def ready(self, cache: OffloadCache, new: torch.Tensor, start: int) -> torch.Tensor:
        """Return the buffer for kernels that are asked for next.

        Args:
            cache: whose copies are waited for.
            new: the chunk's rows, [tokens, kv_heads, head_dim].
            start: position of the first of them.
        """
        for event in self._loads:
            cache.await_load(event)
        self._loads.clear()
        stop = start + new.shape[0]
        self.rows[start:stop].copy_(new)
        self.rows[stop : whole_blocks(stop)].zero_()
        return self.rows

    def _pieces(
        self, cache: OffloadCache, sequence: Sequence, first: int, last: int
    ) -> Iterator[Copy]:
        """Yield the copies of blocks `first` to `last`, cut where CPU blocks end."""
        start, stop, size = first * BLOCK_TOKENS, (last + 1) * BLOCK_TOKENS, cache.block_tokens
        while start < stop:
            index, offset = divmod(start, size)
            rows = min(stop - start, size - offset)
            block = cache.blocks[self._layer][cache.block_to_load(sequence, index)]
            source = block[self._kind, offset : offset + rows]
            yield Copy(self.rows[start : start + rows], source)
            start += rows


class WholeLayers:
    """The two buffers, for the steps of a cache.

    Args:
        keys, values: [whole blocks, kv_heads, head_dim].
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys = LayerBuffer(keys, 0)
        self.values = LayerBuffer(values, 1)

    def forget(self) -> None:
        """Hold nothing."""
        self.keys.forget()
        self.values.forget()

    def span(self, start: int, stop: int) -> KVSpan:
        """Return positions `start` to `stop` - 1 of the layer that is held."""
        keys, values = self.keys.rows[start:stop], self.values.rows[start:stop]
        return KVSpan(keys, values, start, "the layer's rows")


def _runs(blocks: list[int]) -> Iterator[tuple[int, int]]:
    """Yield first and last of each run of consecutive numbers among ascending ones."""
    first = last = blocks[0]
    for block in blocks[1:]:
        if block != last + 1:
            yield first, last
            first = block
        last = block
    yield first, last
