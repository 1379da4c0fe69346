"""Which blocks of CPU memory are free, and how many requests read each of the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from backends.base import OutOfMemory


class BlockPool:
    """Hands out block numbers 0 to `blocks` - 1, the longest free first, and counts references.

    Every block is one of: free; used, with one reference or more; idle, which is kept by the prefix
    cache alone, until it is evicted.

    Attributes:
        evict: asked to free so many idle blocks when too few are free. It drops what it kept
            by `drop`. None while nothing is kept.
        on_free: told of blocks that have become free, before anybody can take them.
    """

    def __init__(self, blocks: int) -> None:
        self.evict: Callable[[int], object] | None = None
        self.on_free: Callable[[Sequence[int]], object] | None = None
        self._blocks = blocks
        self._free = deque(range(blocks))
        self._references: dict[int, int] = {}
        self._kept: set[int] = set()

    @property
    def free_blocks(self) -> int:
        """How many blocks are free."""
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        """How many blocks have a reference."""
        return len(self._references)

    @property
    def idle_blocks(self) -> int:
        """How many blocks are kept by the prefix cache alone; `take` evicts them at need."""
        return self._blocks - len(self._free) - len(self._references)

    def references(self, block: int) -> int:
        """Return how many requests use a block; 0 if it is free or idle."""
        return self._references.get(block, 0)

    def take(self, count: int) -> list[int]:
        """Take blocks, each with one reference; evict idle ones if too few are free.

        Raises:
            OutOfMemory: fewer than `count` are free or idle; none is taken or evicted.
        """
        available = self._blocks - len(self._references)
        if count > available:
            raise OutOfMemory(
                f"{count} KV blocks are needed and {available} of {self._blocks} are free"
            )
        if count > len(self._free) and self.evict is not None:
            self.evict(count - len(self._free))
        taken = [self._free.popleft() for _ in range(count)]
        self._references.update(dict.fromkeys(taken, 1))
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block, used or idle.

        Raises:
            ValueError: one of them is free, or named twice; none is shared.
        """
        held = self._references.keys() | self._kept
        if len(set(blocks)) != len(blocks) or not held.issuperset(blocks):
            raise ValueError(f"blocks {list(blocks)} are not all in use or kept")
        for block in blocks:
            self._references[block] = self.references(block) + 1

    def give_back(self, blocks: Sequence[int]) -> list[int]:
        """Take a reference from each block, and return those that are free now.

        A block without a reference is free, unless the prefix cache keeps it.

        Raises:
            ValueError: one of them is not in use, or named twice; none is given back.
        """
        if len(set(blocks)) != len(blocks) or not self._references.keys() >= set(blocks):
            raise ValueError(f"blocks {list(blocks)} are not all in use")
        freed = []
        for block in blocks:
            self._references[block] -= 1
            if not self._references[block]:
                del self._references[block]
                if block not in self._kept:
                    freed.append(block)
        self._set_free(freed)
        return freed

    def keep(self, block: int) -> None:
        """Let a used block be idle, not free, when its last reference is gone.

        Raises:
            ValueError: it is not in use.
        """
        if block not in self._references:
            raise ValueError(f"block {block} is not in use")
        self._kept.add(block)

    def drop(self, block: int) -> None:
        """Undo `keep`: an idle block becomes free.

        Raises:
            ValueError: it is not kept.
        """
        if block not in self._kept:
            raise ValueError(f"block {block} is not kept")
        self._kept.remove(block)
        if block not in self._references:
            self._set_free([block])

    def _set_free(self, blocks: Sequence[int]) -> None:
        if self.on_free is not None:
            self.on_free(blocks)
        self._free.extend(blocks)
