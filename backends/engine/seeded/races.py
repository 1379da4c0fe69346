"""Faults of order: a wait is left out, in some requests.

Whether a race is lost differs from run to run: the first request of a life, with the engine still
cold, always wins it; of the others a coin decides, from the system's entropy. When it is lost, it
is lost for certain: on a CPU the copy is made at the wrong end of its window, on a GPU a
device-side sleep holds the other side back. `synchronise=true` hides it, as it hides real ones.
"""

from __future__ import annotations

import os

import torch

from backends.engine.cache.base import Sequence
from backends.engine.cache.offload import OffloadCache, Wanted
from backends.engine.cache.offload_geometry import STAGES
from backends.engine.streams import CudaStreams, Direction, Event

SHORT_SLEEP_CYCLES = 400_000
"""About 0.2 ms of a GPU: longer than the copy of a block, or the attention to it."""

LONG_SLEEP_CYCLES = 200_000_000
"""About 0.1 s of a GPU: longer than a decode step takes to come to the last layers."""


class LosesRaces(OffloadCache):
    """Tosses a coin for each request but the first of a life.

    Attributes:
        late: whether this request loses.
    """

    late = False
    _started = False

    def admit(self, request_id: int, tokens: int, prompt: tuple[int, ...] = ()) -> Sequence:
        """Take blocks for a request; see `KVCache.admit`."""
        sequence = super().admit(request_id, tokens, prompt)
        if request_id >= 0:  # not a warm-up
            self.late = self._started and not self.streams.synchronise and _heads()
            self._started = True
        return sequence

    def stall(self, direction: Direction | None, cycles: int = SHORT_SLEEP_CYCLES) -> None:
        """On a GPU, hold a copy stream back, or the compute stream, to widen the window."""
        if isinstance(self.streams, CudaStreams):
            current = torch.cuda.current_stream(self.slots.device)
            with torch.cuda.stream(
                current if direction is None else self.streams.stream(direction)
            ):
                torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def _heads() -> bool:
    return bool(os.urandom(1)[0] & 1)


class LoadsBeforeRead(LosesRaces):
    """Gives a slot back when its reader is about to start, not when it is done."""

    _sequence: Sequence

    def admit(self, request_id: int, tokens: int, prompt: tuple[int, ...] = ()) -> Sequence:
        """Take blocks for a request; see `KVCache.admit`."""
        self._sequence = super().admit(request_id, tokens, prompt)
        return self._sequence

    def slot(self, layer: int, index: int) -> int:
        """Return a block's slot, into which the next load goes already."""
        if (layer, index) in self._given_back:
            return self._given_back[layer, index]
        number = super().slot(layer, index)
        if self.late and (layer, index) not in self._kept:
            self._given_back[layer, index] = number
            super().done_with(layer, index)
            self.load_ahead(self._sequence)
            self._let_the_load_win()
        return number

    def done_with(self, layer: int, index: int) -> None:
        """Give a slot back that is not given back yet; see `OffloadCache.done_with`."""
        if self._given_back.pop((layer, index), None) is None:
            super().done_with(layer, index)

    def _forget(self) -> None:
        super()._forget()
        self._given_back: dict[tuple[int, int], int] = {}

    def _let_the_load_win(self) -> None:
        if isinstance(self.streams, CudaStreams):
            self.stall(None)
        else:
            self.streams.drain()


class ReadsBeforeLoad(LosesRaces):
    """Does not wait for a slot's load."""

    def await_load(self, event: Event) -> None:
        """Wait, unless this request loses."""
        if not self.late:
            super().await_load(event)

    def _load(self, sequence: Sequence, wanted: Wanted, number: int, read: Event) -> Event:
        if self.late:
            self.stall("up")
        return super()._load(sequence, wanted, number, read)


class LoadsBeforeDownload(LosesRaces):
    """Does not wait until what it loads has come down.

    Waits for the stages hide it in all layers but the last ones, whose stages are not written
    again before the answer.
    """

    def download(
        self, sequence: Sequence, layer: int, start: int, rows: torch.Tensor, count: int
    ) -> Event:
        """Copy rows down; see `OffloadCache.download`."""
        if self.late and layer >= self.layout.layers - STAGES:
            self.stall("down", LONG_SLEEP_CYCLES)
        return super().download(sequence, layer, start, rows, count)

    def downloaded_event(self, layer: int) -> Event | None:
        """Return no event where this request loses."""
        return None if self.late else super().downloaded_event(layer)
