from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.engine.cache.ring import SlotRing


class Device:
    """Two streams that run side by side, each in order, and slots that they share.

    A load overwrites a slot in two moments; a read looks at it in two. Whatever interleaving the
    waits allow may happen.
    """

    def __init__(self, slots):
        self.content = [None] * slots
        self.loaded = set()
        self.read_done = set()
        self.queues = {"copy": deque(), "compute": deque()}
        self.wrong = []

    def load(self, load, slot, after):
        def begin():
            self.content[slot] = "torn"

        def end():
            self.content[slot] = load
            self.loaded.add(load)

        self.queues["copy"] += [(lambda: after < 0 or after in self.read_done, begin)]
        self.queues["copy"] += [(lambda: True, end)]

    def read(self, load, slot):
        def look():
            if self.content[slot] != load:
                self.wrong.append((load, slot, self.content[slot]))

        self.queues["compute"] += [(lambda: load in self.loaded, look), (lambda: True, look)]

    def mark_read(self, load):
        self.queues["compute"].append((lambda: True, lambda: self.read_done.add(load)))

    def advance(self, queue):
        if self.queues[queue] and self.queues[queue][0][0]():
            self.queues[queue].popleft()[1]()
            return True
        return False

    def run_out(self):
        while self.advance("copy") or self.advance("compute"):
            pass
        assert not any(self.queues.values()), "deadlock"


@settings(deadline=None)
@given(slots=st.integers(1, 5), data=st.data())
def test_no_schedule_loads_too_early_or_reads_too_early(slots, data):
    ring, device = SlotRing(slots), Device(slots)
    in_ring = deque()
    for _ in range(data.draw(st.integers(1, 60), label="actions")):
        action = data.draw(
            st.sampled_from(["load", "read", "release", "abandon", "copy", "compute"]),
            label="action",
        )
        if action == "load" and ring.has_room:
            grant = ring.start()
            in_ring.append(grant.load)
            device.load(grant.load, grant.slot, grant.after)
        elif action == "read" and in_ring:
            load = data.draw(st.sampled_from(list(in_ring)), label="load")
            device.read(load, ring.slot_of(load))
        elif action == "release" and in_ring:
            load = in_ring.popleft()
            ring.release(load)
            device.mark_read(load)
        elif action == "abandon":
            # As its user does: what comes next waits for all that was asked for so far.
            ring.abandon()
            while in_ring:
                device.mark_read(in_ring.popleft())
        elif action in device.queues:
            device.advance(action)
        assert len(in_ring) <= slots
        assert ring.has_room == (len(in_ring) < slots)
        assert len({ring.slot_of(load) for load in in_ring}) == len(in_ring)
    device.run_out()
    assert not device.wrong


def test_the_model_sees_a_load_that_does_not_wait_for_the_reader():
    ring, device = SlotRing(1), Device(1)
    first = ring.start()
    device.load(first.load, first.slot, first.after)
    device.read(first.load, first.slot)
    ring.release(first.load)
    device.mark_read(first.load)
    second = ring.start()
    device.load(second.load, second.slot, -1)
    for queue in ("copy", "copy", "copy", "compute"):
        device.advance(queue)
    assert device.wrong == [(0, 0, "torn")]


def test_slots_are_taken_in_turn():
    ring = SlotRing(3)
    assert [ring.start() for _ in range(3)] == [(0, 0, -1), (1, 1, -1), (2, 2, -1)]
    assert not ring.has_room
    ring.release(0)
    assert ring.start() == (3, 0, 0)


def test_misuse_is_refused():
    ring = SlotRing(2)
    with pytest.raises(RuntimeError, match="load 0 is not in the ring"):
        ring.slot_of(0)
    with pytest.raises(RuntimeError, match="not the oldest"):
        ring.release(0)
    ring.start()
    ring.start()
    with pytest.raises(RuntimeError, match="every slot of the ring is in use"):
        ring.start()
    with pytest.raises(RuntimeError, match="load 1 is not the oldest in the ring, 0"):
        ring.release(1)
    ring.release(0)
    with pytest.raises(RuntimeError, match="load 0 is not in the ring"):
        ring.slot_of(0)


def test_abandoned_loads_leave_their_slots():
    ring = SlotRing(2)
    ring.start()
    ring.start()
    ring.abandon()
    assert ring.start() == (2, 0, 0)


def test_a_ring_without_slots_has_no_room():
    ring = SlotRing(0)
    assert not ring.has_room
    ring.abandon()
    with pytest.raises(RuntimeError, match="every slot of the ring is in use"):
        ring.start()
