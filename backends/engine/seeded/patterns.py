"""Faults of sparse prefill: what a prompt reads follows from another prompt."""

from __future__ import annotations

import torch

from backends.engine.policy import Place, Policy, causal_blocks
from backends.engine.sparse import Selection


class KeepsFirstPattern(Selection):
    """Asks the policy for the first request alone; every later one reads the same blocks.

    Blocks of queries and keys that the first prompt did not have are read as by dense attention.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self._first_id: int | None = None
        self._patterns: dict[tuple[int, int], torch.Tensor | None] = {}

    def select(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        layer: int,
        place: Place,
        request_id: int,
    ) -> torch.Tensor | None:
        """Return the blocks that the first request read there."""
        if request_id < 0:  # a warm-up
            return super().select(query, keys, layer, place, request_id)
        if self._first_id is None:
            self._first_id = request_id
        chunk = layer, place.first_block
        if request_id == self._first_id:
            self._patterns[chunk] = super().select(query, keys, layer, place, request_id)
            return self._patterns[chunk]
        pattern = self._patterns.get(chunk)
        return None if pattern is None else _fitted(pattern, place)


def _fitted(pattern: torch.Tensor, place: Place) -> torch.Tensor:
    """Return a pattern for a chunk of another length that begins at the same block."""
    causal = causal_blocks(place, pattern.device)
    fitted = causal.expand(pattern.shape[0], -1, -1).clone()
    rows, columns = (min(pair) for pair in zip(pattern.shape[1:], causal.shape, strict=True))
    fitted[:, :rows, :columns] = pattern[:, :rows, :columns]
    return fitted
