"""Rows of a batch for transformers' `generate`: padded on the left, traced, cut where each ends."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from transformers import LogitsProcessor

from backends.base import NonFiniteLogits
from backends.digest import LogitsTrace, trace_logits

PADDING_ID = 0
"""Any token does: what is padded is masked."""


def padded(
    prompts: Sequence[Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and attention mask, each (prompts, longest prompt), padded on the left."""
    longest = max(len(one) for one in prompts)
    ids = [[PADDING_ID] * (longest - len(one)) + list(one) for one in prompts]
    mask = [[0] * (longest - len(one)) + [1] * len(one) for one in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def ended(row: Sequence[int], stop_token_ids: Sequence[int], limit: int) -> tuple[int, ...]:
    """Return a row up to its first stop token, that included, and no longer than its limit."""
    ids = tuple(row[:limit])
    places = (place for place, one in enumerate(ids) if one in stop_token_ids)
    return ids[: next(places, len(ids)) + 1]


class Trace(LogitsProcessor):  # type: ignore[misc]
    """Notes each token's logits and the time they were there; changes nothing."""

    def __init__(self, rows: int) -> None:
        self._rows: list[list[LogitsTrace]] = [[] for _ in range(rows)]
        self.seconds: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Note `scores`, (rows, vocab), the raw logits: no other processor runs before this one.

        Raises:
            NonFiniteLogits: the only row has logits that no token can be chosen from.
        """
        for row, logits in zip(self._rows, scores, strict=True):
            row.append(trace_logits(logits))
        self.seconds.append(time.perf_counter())
        if len(self._rows) == 1:  # of several, others go on
            self.logits(0, len(self.seconds))
        return scores

    def logits(self, number: int, count: int) -> list[LogitsTrace]:
        """Return what was noted of the first tokens of a row; what comes after them is padding.

        Raises:
            NonFiniteLogits: names the first token of those whose logits are not finite.
        """
        rows = self._rows[number][:count]
        bad = next((place for place, one in enumerate(rows) if not one.finite), None)
        if bad is not None:
            raise NonFiniteLogits(f"the logits of generated token {bad} hold NaN or infinity")
        return rows
