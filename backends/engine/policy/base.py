"""What the engine asks a policy."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Span(NamedTuple):
    """Positions `start` to `stop` - 1, read by one attention call."""

    start: int
    stop: int


class Policy(Protocol):
    """Chooses the spans of keys that a step reads."""

    name: str

    def spans(self, keys: int, attend_tokens: int | None) -> tuple[Span, ...]:
        """Return the spans of positions 0 to `keys` - 1 to read, ascending and apart.

        They must follow from the arguments alone: not from where keys are stored, and not from
        earlier requests.
        """
        ...
