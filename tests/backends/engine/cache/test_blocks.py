from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from backends.base import OutOfMemory
from backends.engine.cache.blocks import BlockPool

BLOCKS = 7


class Pool(RuleBasedStateMachine):
    """Random requests against plain lists of who holds what, who is kept, and what is free."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.pool.evict = self.evict
        self.held = []
        self.kept = []
        self.free = list(range(BLOCKS))

    @property
    def references(self):
        return Counter(block for blocks in self.held for block in blocks)

    def idle(self):
        return [block for block in self.kept if block not in self.references]

    def evict(self, count):
        """Drop the longest kept; the pool must not ask for more than it has."""
        for block in self.idle()[:count]:
            self.drop(block)
            count -= 1
        assert count == 0

    def drop(self, block):
        if block not in self.references:
            self.free.append(block)
        self.kept.remove(block)
        self.pool.drop(block)

    @rule(count=st.integers(0, BLOCKS + 2))
    def take(self, count):
        available = len(self.free) + len(self.idle())
        if count > available:
            message = f"{count} KV blocks are needed and {available} of {BLOCKS} are free"
            with pytest.raises(OutOfMemory, match=message):
                self.pool.take(count)
        else:
            taken = self.pool.take(count)
            assert taken == self.free[:count]
            del self.free[:count]
            self.held.append(taken)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data):
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        freed = [b for b in blocks if b not in self.references and b not in self.kept]
        assert self.pool.give_back(blocks) == freed
        self.free += freed

    @rule(blocks=st.lists(st.integers(-1, BLOCKS), max_size=3))
    def share(self, blocks):
        known = self.references.keys() | set(self.kept)
        if len(set(blocks)) == len(blocks) and known.issuperset(blocks):
            self.pool.share(blocks)
            self.held.append(blocks)
        else:
            with pytest.raises(ValueError, match="not all in use or kept"):
                self.pool.share(blocks)

    @rule(blocks=st.lists(st.integers(-1, BLOCKS), min_size=1, max_size=3))
    def give_back_what_nobody_holds(self, blocks):
        if len(set(blocks)) < len(blocks) or any(block not in self.references for block in blocks):
            with pytest.raises(ValueError, match="not all in use"):
                self.pool.give_back(blocks)

    @rule(block=st.integers(-1, BLOCKS))
    def keep(self, block):
        if block in self.references:
            self.pool.keep(block)
            self.kept += [] if block in self.kept else [block]
        else:
            with pytest.raises(ValueError, match="is not in use"):
                self.pool.keep(block)

    @rule(block=st.integers(-1, BLOCKS))
    def let_go(self, block):
        if block in self.kept:
            self.drop(block)
        else:
            with pytest.raises(ValueError, match="is not kept"):
                self.pool.drop(block)

    @invariant()
    def every_block_is_one_of_free_used_idle(self):
        everyone = [*self.free, *self.references, *self.idle()]
        assert sorted(everyone) == list(range(BLOCKS))
        assert self.pool.free_blocks == len(self.free)
        assert self.pool.used_blocks == len(self.references)
        assert self.pool.idle_blocks == len(self.idle())
        for block in range(BLOCKS):
            assert self.pool.references(block) == self.references[block]


TestPool = Pool.TestCase
TestPool.settings = settings(deadline=None, max_examples=40)


def test_a_block_is_given_back_once():
    pool = BlockPool(3)
    blocks = pool.take(2)
    with pytest.raises(ValueError, match="not all in use"):
        pool.give_back([blocks[0], blocks[0]])
    with pytest.raises(ValueError, match="not all in use"):
        pool.give_back([2])
    pool.give_back(blocks)
    with pytest.raises(ValueError, match="not all in use"):
        pool.give_back(blocks)
    assert pool.free_blocks == 3


def test_a_shared_block_is_free_when_the_last_gives_it_back():
    pool = BlockPool(3)
    blocks = pool.take(2)
    pool.share(blocks[:1])
    assert pool.give_back(blocks) == [1]
    assert (pool.references(0), pool.free_blocks) == (1, 2)
    assert pool.give_back([0]) == [0]
    assert pool.free_blocks == 3


def test_the_longest_free_goes_first():
    pool = BlockPool(3)
    first = pool.take(1)
    pool.give_back(first)
    assert pool.take(3) == [1, 2, 0]


def test_blocks_that_cannot_be_had_evict_nothing():
    pool = BlockPool(3)
    pool.evict = lambda count: pytest.fail("evicted in vain")
    blocks = pool.take(2)
    pool.keep(0)
    pool.give_back(blocks[:1])
    with pytest.raises(OutOfMemory, match="3 KV blocks are needed and 2 of 3 are free"):
        pool.take(3)
    assert (pool.free_blocks, pool.idle_blocks) == (1, 1)
