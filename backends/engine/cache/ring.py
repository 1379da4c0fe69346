"""Which slot holds which load, in plain integers.

Loads are numbered in the order in which they are asked for and take the slots in turn. Each is
released once its last reader has been started. The ring knows no streams: it says which event a
load has to wait for, and its user keeps the events.
"""

from __future__ import annotations

from typing import NamedTuple


class Grant(NamedTuple):
    """Leave to load into a slot.

    Attributes:
        load: number of the load.
        slot: where it goes.
        after: the load that held the slot before; its last reader must be done before the copy
            starts. -1 while the slot is untouched.
    """

    load: int
    slot: int
    after: int


class SlotRing:
    """Hands out slots in turn.

    Args:
        slots: how many there are.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._started = 0
        self._released = 0

    @property
    def has_room(self) -> bool:
        """Whether a slot is free to be loaded."""
        return self._started - self._released < self._slots

    def start(self) -> Grant:
        """Take the next slot for a load.

        Raises:
            RuntimeError: every slot holds a load that is not released.
        """
        if not self.has_room:
            raise RuntimeError("every slot of the ring is in use")
        load = self._started
        self._started += 1
        return Grant(load, load % self._slots, max(load - self._slots, -1))

    def slot_of(self, load: int) -> int:
        """Return the slot of a load that may be read once its copy is done.

        Raises:
            RuntimeError: the load is not started, or is released already.
        """
        if not self._released <= load < self._started:
            raise RuntimeError(
                f"load {load} is not in the ring, which holds {self._released} to "
                f"{self._started - 1}"
            )
        return load % self._slots

    def release(self, load: int) -> None:
        """Give a slot back: all readers of this load have been started.

        Raises:
            RuntimeError: it is not the oldest load in the ring.
        """
        if load != self._released or load >= self._started:
            raise RuntimeError(f"load {load} is not the oldest in the ring, {self._released}")
        self._released += 1

    def abandon(self) -> None:
        """Release every load, with readers or without: the request has come to its end."""
        self._released = self._started
