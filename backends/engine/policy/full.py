"""Dense attention: every query reads all earlier keys."""

from __future__ import annotations

from typing import Any

import torch

from backends.engine.policy.base import Model, Place


class FullPolicy:
    """Reads everything."""

    name = "full"
    sparse = False
    reads_keys = False

    def __init__(self, model: Model) -> None:
        del model

    def known(self, layer: int, place: Place) -> torch.Tensor | None:
        """Return None: a dense policy is not asked."""
        del layer, place
        return None

    def select(
        self, query: torch.Tensor, keys: torch.Tensor, layer: int, place: Place
    ) -> torch.Tensor | None:
        """Return None: every block is read."""
        del query, keys, layer, place
        return None

    def scratch_bytes(self, queries: int, keys: int) -> int:
        """Return 0."""
        del queries, keys
        return 0

    def describe(self) -> dict[str, Any]:
        """Return the name; there are no settings."""
        return {"name": self.name}
