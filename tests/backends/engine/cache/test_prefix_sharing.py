import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backends.base import OutOfMemory
from backends.engine.cache.base import KVLayout
from backends.engine.cache.blocks import BlockPool
from backends.engine.cache.offload import OffloadCache
from backends.engine.cache.offload_geometry import OffloadGeometry
from backends.engine.streams import DeferredStreams

LAYOUT = KVLayout(2, 2, 3, torch.float32)
PROMPT = tuple(range(40))


@pytest.fixture
def cache():
    """Blocks of 8 tokens, chunks of 16, room for 64 tokens; knows the first 32 of a prompt."""
    geometry = OffloadGeometry(
        context_tokens=64,
        block_tokens=8,
        slots=2,
        chunk_tokens=16,
        attend_tokens=8,
        prefix_cache=True,
    )
    tensors = {one.name: torch.empty(one.shape) for one in geometry.buffers(LAYOUT)}
    cache = OffloadCache(LAYOUT, geometry, tensors, DeferredStreams(), poisoned=True)
    first = cache.admit(0, 41, PROMPT)
    for layer in range(LAYOUT.layers):
        cache.download(first, layer, 0, torch.ones(2, 40, 2, 3), 40)
    first.length = first.downloaded = 40
    first.prefilled = True
    cache.release(first)
    return cache


def test_a_hit_starts_with_what_is_held(cache):
    second = cache.admit(1, 41, PROMPT)
    assert second.length == second.downloaded == second.reused == 32
    assert len(second.block_table) == 6
    for layer in cache.blocks:
        shared, own = layer[second.block_table[:4]], layer[second.block_table[4:]]
        assert (shared == 1).all()
        assert own.isnan().all()


def test_shared_blocks_cannot_be_written(cache):
    second = cache.admit(1, 41, PROMPT)
    rows = torch.zeros(2, 9, 2, 3)
    for start in (0, 16, 31):
        with pytest.raises(AssertionError, match=rf"rows from {start} on, but 32 tokens are"):
            cache.download(second, 0, start, rows, 9)
    cache.download(second, 0, 32, rows, 9)
    cache.streams.drain()
    assert (cache.blocks[0][second.block_table[:4]] == 1).all()


def test_a_hit_that_finds_no_room_gives_back_what_it_shared(cache):
    with pytest.raises(OutOfMemory, match="5 KV blocks are needed and 4 of 8 are free"):
        cache.admit(1, 65, PROMPT)
    assert (cache.pool.used_blocks, cache.pool.idle_blocks, cache.pool.free_blocks) == (0, 4, 4)
    assert cache.admit(2, 64, PROMPT).reused == 32


def test_what_is_not_prefilled_is_not_known(cache):
    other = tuple(reversed(PROMPT))
    sequence = cache.admit(1, 41, other)
    sequence.length = sequence.downloaded = 40
    cache.release(sequence)
    assert cache.admit(2, 41, other).reused == 0


def test_evicted_blocks_are_poisoned(cache):
    sequence = cache.admit(1, 64, tuple(reversed(PROMPT)))
    assert cache.prefixes.known_blocks == 0
    assert all(layer[sequence.block_table].isnan().all() for layer in cache.blocks)


@given(
    context=st.integers(1, 200),
    block=st.integers(1, 40),
    extra=st.integers(0, 200),
)
def test_a_context_and_the_cache_have_blocks_of_their_own(context, block, extra):
    sizes = {"block_tokens": block, "slots": 2, "chunk_tokens": 1, "attend_tokens": 1}
    geometry = OffloadGeometry(context_tokens=context, prefix_cache_tokens=extra, **sizes)
    of_context = len(range(0, context, block))
    assert geometry.blocks == of_context + len(range(0, extra, block))
    [held] = {one.shape[0] for one in geometry.buffers(LAYOUT) if one.place == "host"}
    assert held == geometry.blocks


def test_a_pool_tells_of_free_blocks_before_they_are_taken():
    pool = BlockPool(3)
    heard = []
    pool.on_free = lambda blocks: heard.append((list(blocks), pool.free_blocks))
    blocks = pool.take(3)
    pool.keep(blocks[1])
    pool.give_back(blocks)
    pool.drop(blocks[1])
    assert heard == [([blocks[0], blocks[2]], 0), ([blocks[1]], 2)]
