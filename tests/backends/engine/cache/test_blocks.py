import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from backends.base import OutOfMemory
from backends.engine.cache.blocks import BlockPool

BLOCKS = 7


class Pool(RuleBasedStateMachine):
    """Random requests against a plain set of who holds what."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.held = []

    @rule(count=st.integers(0, BLOCKS + 2))
    def take(self, count):
        free = BLOCKS - sum(map(len, self.held))
        if count > free:
            with pytest.raises(OutOfMemory, match=f"{count} KV blocks are needed and {free} of"):
                self.pool.take(count)
        else:
            self.held.append(self.pool.take(count))
            assert len(self.held[-1]) == count

    @rule(data=st.data())
    def give_back(self, data):
        if self.held:
            self.pool.give_back(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def nothing_is_shared_or_lost(self):
        used = [block for blocks in self.held for block in blocks]
        assert len(used) == len(set(used))
        assert set(used) <= set(range(BLOCKS))
        assert self.pool.free_blocks == BLOCKS - len(used)


TestPool = Pool.TestCase
TestPool.settings = settings(deadline=None, max_examples=50)


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


def test_the_longest_free_goes_first():
    pool = BlockPool(3)
    first = pool.take(1)
    pool.give_back(first)
    assert pool.take(3) == [1, 2, 0]
