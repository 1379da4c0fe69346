"""Which blocks of CPU memory are free."""

from __future__ import annotations

from collections import deque

from backends.base import OutOfMemory


class BlockPool:
    """Hands out block numbers 0 to `blocks` - 1, the longest free first."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._free = deque(range(blocks))
        self._used: set[int] = set()

    @property
    def free_blocks(self) -> int:
        """How many blocks are free."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Take blocks.

        Raises:
            OutOfMemory: fewer than `count` are free; none is taken.
        """
        if count > len(self._free):
            raise OutOfMemory(
                f"{count} KV blocks are needed and {len(self._free)} of {self._blocks} are free"
            )
        taken = [self._free.popleft() for _ in range(count)]
        self._used.update(taken)
        return taken

    def give_back(self, blocks: list[int]) -> None:
        """Return blocks.

        Raises:
            ValueError: one of them is not in use; none is returned.
        """
        if len(set(blocks)) != len(blocks) or not self._used.issuperset(blocks):
            raise ValueError(f"blocks {blocks} are not all in use")
        self._used.difference_update(blocks)
        self._free.extend(blocks)
