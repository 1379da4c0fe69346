"""Faults of the books that are kept of blocks."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Sequence

from backends.base import OutOfMemory, RequestCancelled
from backends.engine.cache import base
from backends.engine.cache.blocks import BlockPool
from backends.engine.cache.offload import OffloadCache
from backends.engine.cache.prefix import PrefixIndex

HASHED_BYTES = 64
"""Of a block's tokens, 4 bytes each: the truncated hash sees no more."""


class StackPool(BlockPool):
    """Hands out the block that became free last first. That is no fault."""

    def take(self, count: int) -> list[int]:
        """Take blocks; see `BlockPool.take`."""
        self._free.reverse()
        try:
            return super().take(count)
        finally:
            self._free.reverse()


class KeepsTable(OffloadCache):
    """Loads by a copy of the block table that is made anew only when a table is longer."""

    pool_class = StackPool
    _table: tuple[int, ...] = ()

    def admit(self, request_id: int, tokens: int, prompt: tuple[int, ...] = ()) -> base.Sequence:
        """Take blocks for a request; see `KVCache.admit`."""
        sequence = super().admit(request_id, tokens, prompt)
        warms_up = request_id < 0
        if len(self._table) < len(sequence.block_table) and not warms_up:
            self._table = tuple(sequence.block_table)
        return sequence

    def block_to_load(self, sequence: base.Sequence, index: int) -> int:
        """Return the block that the copy names."""
        return self._table[index] if self._table else super().block_to_load(sequence, index)


def hash_beginning(before: bytes, tokens: bytes) -> bytes:
    """Return a digest of the hash before and of a block's first tokens."""
    return hashlib.blake2b(before + tokens[:HASHED_BYTES]).digest()


class TrustsHash(PrefixIndex):
    """Finds blocks by a hash of their beginning, and does not compare the tokens."""

    def __init__(self, pool: BlockPool, block_tokens: int, chunk_tokens: int = 1) -> None:
        super().__init__(pool, block_tokens, chunk_tokens, hash_function=hash_beginning)

    def _known(self, keys: Iterable[tuple[bytes, bytes]]) -> list[int]:
        chain: list[int] = []
        for digest, _ in keys:
            found = self._by_digest.get(digest)
            if not found:
                break
            chain.append(found[0])
        return chain


class MatchesByHash(OffloadCache):
    """Reuses prefixes that only look alike."""

    index_class = TrustsHash


class UncountedPool(BlockPool):
    """Keeps a list of free blocks, and no count of who uses the others."""

    def take(self, count: int) -> list[int]:
        """Take blocks.

        Raises:
            OutOfMemory: the list is too short.
        """
        if count > len(self._free):
            raise OutOfMemory(f"{count} KV blocks are needed and {len(self._free)} are free")
        return [self._free.popleft() for _ in range(count)]

    def give_back(self, blocks: Sequence[int]) -> list[int]:
        """Put blocks on the list."""
        self._set_free(blocks)
        return list(blocks)


class FreesTwice(OffloadCache):
    """Frees each block of a cancelled request twice: as the request's, and as its copy's."""

    pool_class = UncountedPool

    def release(self, sequence: base.Sequence) -> None:
        """Give the blocks back."""
        if isinstance(sys.exc_info()[1], RequestCancelled):
            sequence.block_table = [block for block in sequence.block_table for _ in range(2)]
        super().release(sequence)


class ScantPool(UncountedPool):
    """When there are too few blocks, the last one serves several times."""

    def take(self, count: int) -> list[int]:
        """Take blocks, the last of them as often as is needed."""
        taken = super().take(min(count, len(self._free)))
        return taken + taken[-1:] * (count - len(taken))

    def give_back(self, blocks: Sequence[int]) -> list[int]:
        """Put each block on the list once."""
        return super().give_back(list(dict.fromkeys(blocks)))


class LosesBlocks(OffloadCache):
    """Does not give back the last block of a request."""

    pool_class = ScantPool

    def release(self, sequence: base.Sequence) -> None:
        """Give the blocks back."""
        if len(sequence.block_table) > 1 and sequence.request_id >= 0:
            del sequence.block_table[-1]
        super().release(sequence)
