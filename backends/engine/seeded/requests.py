"""Faults that carry something from one request to the next."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise
from math import ceil

from backends.engine.cache.base import Sequence, StepPlan
from backends.engine.cache.offload import OffloadCache
from backends.engine.cache.offload_steps import OffloadStep
from backends.engine.parts import TokenInput
from backends.engine.policy import Span


def prefill_is_over(sequence: Sequence, following: StepPlan | None) -> bool:
    """Say whether the step that ends was the last of a prompt, and a token's step is next."""
    if following is None or following.count > 1:
        return False
    return sequence.length == sequence.downloaded == len(sequence.prompt)


class ReadsPastLength(OffloadCache):
    """In prefill, reads on past the chunk: the blocks that any request has ever filled."""

    _held_tokens = 0

    def begin(self, sequence: Sequence, plan: StepPlan) -> OffloadStep:
        """Start a step that reads too far."""
        return super().begin(sequence, self._too_far(sequence, plan))

    def release(self, sequence: Sequence) -> None:
        """Give the blocks back, and remember how far they were filled."""
        self._held_tokens = max(self._held_tokens, sequence.downloaded)
        super().release(sequence)

    def _want(self, sequence: Sequence, plan: StepPlan) -> None:
        super()._want(sequence, self._too_far(sequence, plan))

    def _too_far(self, sequence: Sequence, plan: StepPlan) -> StepPlan:
        """Add the spans between the chunk's last block and the end of what is held."""
        size, step = self.block_tokens, self.geometry.attend_tokens
        start = ceil((sequence.length + plan.count) / size) * size
        held = min(self._held_tokens, len(sequence.block_table) * size)
        extended = bool(plan.spans) and plan.spans[-1].stop > sequence.length
        if plan.count == 1 or start >= held or extended:
            return plan
        # The step reads nothing of its own chunk from the blocks, whatever they are said to hold.
        sequence.downloaded = held
        cuts = [start, *range((start // step + 1) * step, held, step), held]
        spans = tuple(Span(first, stop) for first, stop in pairwise(cuts))
        return replace(plan, spans=(*plan.spans, *spans))


class KeepsDecodeRows(OffloadCache):
    """Does not set the number of rows in the tail back: an answer starts after the last one's."""

    _left_tokens = 0
    _kept_tokens = 0
    _new_tokens = 0

    def admit(self, request_id: int, tokens: int, prompt: tuple[int, ...] = ()) -> Sequence:
        """Take blocks for a request; see `KVCache.admit`."""
        sequence = super().admit(request_id, tokens, prompt)
        self._kept_tokens, self._new_tokens = 0, tokens - len(prompt)
        return sequence

    def end(self, sequence: Sequence, following: StepPlan | None) -> None:
        """After a prompt, count the rows that the last answer left."""
        if prefill_is_over(sequence, following):
            room = max(self.tail_tokens - self._new_tokens, 0)
            self._kept_tokens = min(self._left_tokens, room)
            sequence.length += self._kept_tokens
        if sequence.length + 1 >= self.geometry.context_tokens:
            sequence.length -= self._kept_tokens  # there are no more positions
            self._kept_tokens = 0
        super().end(sequence, None if self._kept_tokens else following)

    def release(self, sequence: Sequence) -> None:
        """Give the blocks back; the rows of the answer stay counted."""
        if sequence.prefilled:
            self._left_tokens = sequence.length - sequence.downloaded
        super().release(sequence)


class TracksById(OffloadCache):
    """Remembers where an answer starts by the `id()` of the request, and never forgets it.

    Request objects come from a pool, so that the next one has the same id for certain.
    """

    _spare: Sequence | None = None
    _new_tokens = 0

    def admit(self, request_id: int, tokens: int, prompt: tuple[int, ...] = ()) -> Sequence:
        """Take blocks for a request, and an object from the pool; see `KVCache.admit`."""
        sequence = super().admit(request_id, tokens, prompt)
        self._new_tokens = tokens - len(prompt)
        if self._spare is None:
            self._spare = sequence
            self._prompt_tokens: dict[int, int] = {}
        for field in fields(sequence):
            setattr(self._spare, field.name, getattr(sequence, field.name))
        return self._spare

    def end(self, sequence: Sequence, following: StepPlan | None) -> None:
        """After a prompt, let the answer start where one of this id has once started."""
        if prefill_is_over(sequence, following):
            start = self._prompt_tokens.setdefault(id(sequence), sequence.length)
            held = len(sequence.block_table) * self.block_tokens
            room = min(held, self.geometry.context_tokens)
            start = min(start, room - self._new_tokens)
            if start != sequence.length:
                sequence.length = sequence.downloaded = start
                following = None
        super().end(sequence, following)


class KeepsInput(TokenInput):
    """Fills the static input of a decode step only after the first step of a request has run.

    So that step reads what the last request left there. The first of all finds its own token: the
    buffer was made with it.
    """

    _request_id: int | None = None
    _token: int | None = None

    def lay(self, sequence: Sequence, token: int) -> int:
        """Return what lies in the buffer when the step runs."""
        late = self._token is not None and self._request_id != sequence.request_id
        laid = self._token if late and self._token is not None else token
        self._request_id, self._token = sequence.request_id, token
        return laid
