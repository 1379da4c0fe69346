"""Exact attention: every query reads all earlier keys."""

from __future__ import annotations

from backends.engine.policy.base import Span


class FullPolicy:
    """Reads everything, cut at the multiples of `attend_tokens`."""

    name = "full"

    def spans(self, keys: int, attend_tokens: int | None) -> tuple[Span, ...]:
        """Return [0, attend_tokens), [attend_tokens, 2 * attend_tokens), ... up to `keys`."""
        step = attend_tokens or max(keys, 1)
        return tuple(Span(start, min(start + step, keys)) for start in range(0, keys, step))
