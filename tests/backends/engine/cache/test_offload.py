from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import ConfigurationError, OutOfMemory
from backends.engine.cache.base import KVLayout
from backends.engine.cache.offload import OffloadCache, blocks_in_span
from backends.engine.cache.resident import ResidentCache
from backends.engine.policy import FullPolicy
from backends.engine.streams import DeferredStreams

CONTEXT = 60
LAYOUT = KVLayout(2, 2, 3, torch.float32, torch.device("cpu"))


def make_cache(block, slots, chunk, attend, context=CONTEXT):
    return OffloadCache(
        LAYOUT,
        DeferredStreams(),
        context_tokens=context,
        block_tokens=block,
        slots=slots,
        chunk_tokens=chunk,
        attend_tokens=attend,
        poisoned=True,
    )


def serve(cache, prompt_tokens, new_tokens, chunk, attend, *, room=0):
    """Store random rows as a request does; check every span against rows kept in a list."""
    layers = LAYOUT.layers
    truth = torch.randn(layers, 2, prompt_tokens + new_tokens, 2, 3)
    sequence = cache.admit(0, prompt_tokens + new_tokens + room)
    edges = [*range(0, prompt_tokens, chunk), *range(prompt_tokens, prompt_tokens + new_tokens + 1)]
    for start, stop in pairwise(edges):
        count = stop - start
        spans = FullPolicy().spans(start + (count == 1), attend)
        # Layers that read nothing come last, as in a chunk whose logits nobody wants.
        reading = layers if stop >= prompt_tokens else layers - 1
        step = cache.begin(sequence, count, spans, reading)
        for layer in range(layers):
            new = step.append(layer, *truth[layer, :, start:stop])
            torch.testing.assert_close(torch.stack(new[:2]), truth[layer, :, start:stop])
            if layer >= reading:
                continue
            for span, got in zip(spans, step.history(layer), strict=True):
                wanted = truth[layer, :, span.start : span.stop]
                assert torch.equal(torch.stack(got[:2]), wanted), (start, layer, got.place)
                assert got.start == span.start
        step.finish()
    assert sequence.length == prompt_tokens + new_tokens
    return sequence


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_every_span_holds_its_own_rows(data):
    block = data.draw(st.integers(1, 20), label="block")
    attend = data.draw(st.integers(1, 30), label="attend")
    needed = blocks_in_span(attend, block, CONTEXT)
    slots = data.draw(st.integers(max(needed, 2), max(needed, 2) + 3), label="slots")
    chunk = data.draw(st.integers(1, CONTEXT), label="chunk")
    cache = make_cache(block, slots, chunk, attend)
    cache.tail_tokens = data.draw(st.integers(1, cache.tail_tokens), label="tail")
    for _ in range(2):
        prompt_tokens = data.draw(st.integers(1, CONTEXT - 20), label="prompt")
        new_tokens = data.draw(st.integers(0, 20), label="new")
        sequence = serve(cache, prompt_tokens, new_tokens, chunk, attend)
        cache.release(sequence)
        assert cache.pool.free_blocks == -(-CONTEXT // block)
        for buffer in (*cache.host_buffers().values(), *cache.device_buffers().values()):
            assert buffer.isnan().all()


@settings(deadline=None)
@given(
    attend=st.integers(1, 40),
    block=st.integers(1, 40),
    context=st.integers(1, 120),
)
def test_blocks_in_span_counts_blocks(attend, block, context):
    most = max(
        len({position // block for position in range(start, min(start + attend, context))})
        for start in range(0, context, attend)
    )
    assert blocks_in_span(attend, block, context) == most


def test_the_largest_span_that_the_error_names_works():
    with pytest.raises(ConfigurationError, match=r"touch 5 blocks of 8.*to at most 24") as error:
        make_cache(block=8, slots=3, chunk=16, attend=33)
    assert "num_gpu_blocks to 5 or more" in str(error.value)
    serve(make_cache(block=8, slots=3, chunk=16, attend=24), 50, 5, 16, 24)
    serve(make_cache(block=8, slots=5, chunk=16, attend=33), 50, 5, 16, 33)


def test_the_whole_history_must_fit_the_ring():
    with pytest.raises(ConfigurationError, match="touch 8 blocks of 8"):
        make_cache(block=8, slots=7, chunk=16, attend=CONTEXT)
    serve(make_cache(block=8, slots=8, chunk=16, attend=CONTEXT), 50, 10, 16, None)


def test_a_block_longer_than_the_context_is_refused():
    with pytest.raises(
        ConfigurationError, match=r"block_size=61 is longer than .*max_model_len=60"
    ):
        make_cache(block=61, slots=2, chunk=16, attend=8)
    serve(make_cache(block=60, slots=2, chunk=60, attend=60), 55, 5, 60, None)


def test_rows_travel_once_down_and_bounded_by_the_length():
    cache = make_cache(block=8, slots=2, chunk=20, attend=8)
    token_bytes = 2 * 2 * 3 * 4
    sequence = serve(cache, 45, 0, 20, 8)
    cache.streams.drain()
    assert cache.streams.copied_bytes["down"] == 45 * token_bytes * LAYOUT.layers
    # Chunk 2 reads 20 rows in the first layer; chunk 3 reads 40 in both.
    assert cache.streams.copied_bytes["up"] == (20 + 2 * 40) * token_bytes
    last = cache.blocks[0][:, sequence.block_table[5]]
    assert last[:, :5].isfinite().all()
    assert last[:, 5:].isnan().all()


def test_a_request_released_in_mid_step_leaves_nothing_behind():
    cache = make_cache(block=8, slots=2, chunk=20, attend=8)
    sequence = serve(cache, 40, 0, 20, 8, room=5)
    step = cache.begin(sequence, 5, FullPolicy().spans(40, 8), 2)
    step.append(0, *torch.randn(2, 5, 2, 3))
    next(iter(step.history(0)))
    cache.release(sequence)
    cache.release(serve(cache, 40, 5, 20, 8))


def test_pools_refuse_what_they_cannot_hold():
    with pytest.raises(OutOfMemory, match="9 KV blocks are needed and 8 of 8 are free"):
        make_cache(block=8, slots=2, chunk=20, attend=8).admit(3, 65)
    with pytest.raises(OutOfMemory, match="request 3 needs KV for 61 tokens"):
        ResidentCache(LAYOUT, CONTEXT, poisoned=False).admit(3, 61)


@pytest.mark.parametrize("poisoned", [True, False])
def test_the_resident_cache_holds_the_same_rows(poisoned):
    cache = ResidentCache(LAYOUT, CONTEXT, poisoned=poisoned)
    for tokens in (50, 30):
        cache.release(serve(cache, tokens, 10, 16, 7))
        (keys, values) = cache.device_buffers().values()
        assert bool(keys.isnan().all() and values.isnan().all()) == poisoned
