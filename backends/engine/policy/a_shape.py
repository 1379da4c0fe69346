"""A-shape: the first tokens and the most recent ones, whatever they say.

Source: MInference 1.0 (arXiv 2407.02490), section 3.2, after StreamingLLM (arXiv 2309.17453).
"""

from __future__ import annotations

from typing import Any

import torch

from backends.engine.policy.base import BLOCK_TOKENS, Model, Place, causal_blocks
from backends.engine.settings import require_count


class AShapePolicy:
    """Reads every block with a key that some query of the block may see under A-shape.

    A query at position p sees keys 0 to first_tokens - 1, and p - recent_tokens + 1 to p. A block
    is read whole, as far as it is causal, so that more is read than the rule by tokens would.

    Args:
        model: its heads all read the same.
        first_tokens: keys at the beginning.
        recent_tokens: keys up to the query, itself included.

    Raises:
        ConfigurationError: a setting is no whole number from 1.
    """

    name = "a_shape"
    sparse = True
    reads_keys = False

    def __init__(self, model: Model, *, first_tokens: int = 128, recent_tokens: int = 3968) -> None:
        require_count("backend.policy.first_tokens", first_tokens)
        require_count("backend.policy.recent_tokens", recent_tokens)
        self._heads = model.heads
        self._first_tokens = first_tokens
        self._recent_tokens = recent_tokens

    def known(self, layer: int, place: Place) -> torch.Tensor:
        """Return the blocks, bool [heads, query_blocks, key_blocks]: one memory for all heads."""
        del layer
        return self._blocks(place, torch.device("cpu"))

    def select(
        self, query: torch.Tensor, keys: torch.Tensor, layer: int, place: Place
    ) -> torch.Tensor:
        """Return the same on the queries' device."""
        del keys, layer
        return self._blocks(place, query.device)

    def _blocks(self, place: Place, device: torch.device) -> torch.Tensor:
        first_query = place.start + BLOCK_TOKENS * torch.arange(place.query_blocks, device=device)
        first_key = BLOCK_TOKENS * torch.arange(place.key_blocks, device=device)
        last_key = first_key + BLOCK_TOKENS - 1
        recent = last_key > first_query[:, None] - self._recent_tokens
        kept = causal_blocks(place, device) & ((first_key < self._first_tokens) | recent)
        return kept.expand(self._heads, -1, -1)

    def scratch_bytes(self, queries: int, keys: int) -> int:
        """Return the bytes of a few masks of blocks, and of their first positions."""
        rows, columns = Place(0, queries, keys).query_blocks, Place(0, queries, keys).key_blocks
        return 6 * rows * columns + 64 * (rows + columns)

    def describe(self) -> dict[str, Any]:
        """Return the settings in force."""
        return {
            "name": self.name,
            "first_tokens": self._first_tokens,
            "recent_tokens": self._recent_tokens,
        }
