"""Copies between CPU memory and the device, beside the computation.

Work is ordered by events and nothing else: a copy starts after the events it is given, and whoever
needs its result waits for the event it returns. On CUDA these are streams and events. On the CPU
device each copy is put off until its event is waited for, the latest moment that the rules allow,
so that a missing wait shows there too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import torch

Direction = Literal["up", "down"]
Event = Any
"""Made by the streams that it is given to; nobody else looks inside."""


class Copy(NamedTuple):
    """One piece to copy: tensors of one shape and dtype, both contiguous."""

    target: torch.Tensor
    source: torch.Tensor


class CopyStreams(Protocol):
    """A stream up to the device, a stream down from it, and the compute stream.

    Attributes:
        copied_bytes: bytes copied so far in each direction.
        synchronise: whether everything is waited for after every copy.
    """

    copied_bytes: dict[Direction, int]
    synchronise: bool

    def mark(self) -> Event:
        """Return the event of everything asked of the compute stream so far."""
        ...

    def copy(
        self,
        direction: Direction,
        pieces: Sequence[Copy],
        after: Iterable[Event],
        wipe: torch.Tensor | None = None,
    ) -> Event:
        """Copy the pieces, in the order of calls within a direction.

        Args:
            direction: "up" or "down".
            pieces: what to copy.
            after: events to wait for first.
            wipe: filled with NaN before the copy starts, to show reads of what it leaves out.

        Returns:
            The event of the copy's end.
        """
        ...

    def wait(self, event: Event) -> None:
        """Make the compute stream wait for an event."""
        ...

    def drain(self) -> None:
        """Wait, on the host, for every copy and computation asked for."""
        ...


class CudaStreams:
    """Two copy streams of a GPU beside its current stream. CPU memory should be pinned.

    Args:
        device: the GPU.
        synchronise: wait for the whole device after every copy, to see whether a fault is one of
            order.
    """

    def __init__(self, device: torch.device, *, synchronise: bool = False) -> None:
        self.copied_bytes: dict[Direction, int] = {"up": 0, "down": 0}
        self._device = device
        self.synchronise = synchronise
        self._streams: dict[Direction, torch.cuda.Stream] = {
            "up": torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
            "down": torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
        }

    def mark(self) -> Event:
        """Return an event of the compute stream; see `CopyStreams.mark`."""
        return torch.cuda.current_stream(self._device).record_event()

    def copy(
        self,
        direction: Direction,
        pieces: Sequence[Copy],
        after: Iterable[Event],
        wipe: torch.Tensor | None = None,
    ) -> Event:
        """Queue a copy; see `CopyStreams.copy`."""
        stream = self._streams[direction]
        for event in after:
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            if wipe is not None:
                wipe.fill_(float("nan"))
            for piece in pieces:
                piece.target.copy_(piece.source, non_blocking=True)
        self.copied_bytes[direction] += _bytes(pieces)
        event = stream.record_event()
        if self.synchronise:
            self.drain()
        return event

    def stream(self, direction: Direction) -> torch.cuda.Stream:
        """Return a copy stream."""
        return self._streams[direction]

    def wait(self, event: Event) -> None:
        """Make the compute stream wait; see `CopyStreams.wait`."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def drain(self) -> None:
        """Wait for the whole device; see `CopyStreams.drain`."""
        torch.cuda.synchronize(self._device)


class DeferredCopy:
    """A copy that has been asked for, and may have been done."""

    __slots__ = ("after", "direction", "done", "pieces")

    def __init__(
        self, direction: Direction, pieces: Sequence[Copy], after: Iterable[DeferredCopy]
    ) -> None:
        self.direction = direction
        self.pieces = pieces
        self.after = tuple(after)
        self.done = False


class DeferredStreams:
    """Streams of the CPU device. Computation runs at once; a copy runs when it is waited for.

    A wait performs the copies of that direction up to the one waited for, each after the copies
    that it waits for itself, and no others.

    Args:
        synchronise: perform every copy at once.
    """

    def __init__(self, *, synchronise: bool = False) -> None:
        self.copied_bytes: dict[Direction, int] = {"up": 0, "down": 0}
        self.synchronise = synchronise
        self._queues: dict[Direction, deque[DeferredCopy]] = {"up": deque(), "down": deque()}
        self._computed = DeferredCopy("up", (), ())
        self._computed.done = True

    def mark(self) -> DeferredCopy:
        """Return an event that is over: computation runs at once."""
        return self._computed

    def copy(
        self,
        direction: Direction,
        pieces: Sequence[Copy],
        after: Iterable[DeferredCopy],
        wipe: torch.Tensor | None = None,
    ) -> DeferredCopy:
        """Queue a copy, and wipe as soon as it may start; see `CopyStreams.copy`."""
        deferred = DeferredCopy(direction, pieces, after)
        if wipe is not None:
            for event in deferred.after:
                self._perform(event)
            wipe.fill_(float("nan"))
        self._queues[direction].append(deferred)
        if self.synchronise:
            self.drain()
        return deferred

    def wait(self, event: DeferredCopy) -> None:
        """Perform what the event stands for; see `CopyStreams.wait`."""
        self._perform(event)

    def drain(self) -> None:
        """Perform all copies; see `CopyStreams.drain`."""
        for queue in self._queues.values():
            while queue:
                self._perform(queue[-1])

    def _perform(self, event: DeferredCopy) -> None:
        queue = self._queues[event.direction]
        while not event.done:
            copy = queue.popleft()
            for earlier in copy.after:
                self._perform(earlier)
            for piece in copy.pieces:
                piece.target.copy_(piece.source)
            self.copied_bytes[copy.direction] += _bytes(copy.pieces)
            copy.done = True
            copy.after = ()


def make_streams(device: torch.device, *, synchronise: bool = False) -> CopyStreams:
    """Return the streams of a device; see `CudaStreams` for `synchronise`."""
    if device.type == "cpu":
        return DeferredStreams(synchronise=synchronise)
    return CudaStreams(device, synchronise=synchronise)


def _bytes(pieces: Sequence[Copy]) -> int:
    return sum(piece.target.nbytes for piece in pieces)
