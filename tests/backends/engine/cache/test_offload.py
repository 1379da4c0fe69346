from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import ConfigurationError, OutOfMemory
from backends.engine.cache.base import KVLayout, Scalars, StepPlan
from backends.engine.cache.offload import OffloadCache
from backends.engine.cache.offload_geometry import OffloadGeometry, blocks_in_span
from backends.engine.cache.resident import ResidentCache, resident_buffers
from backends.engine.policy import dense_spans
from backends.engine.streams import DeferredStreams

CONTEXT = 60
LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 3
LAYOUT = KVLayout(LAYERS, KV_HEADS, HEAD_DIM, torch.float32)
TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * 4


def allocate(buffers):
    return {one.name: torch.empty(one.shape, dtype=one.dtype) for one in buffers}


def make_cache(block, slots, chunk, attend, *, split=1):
    geometry = OffloadGeometry(
        context_tokens=CONTEXT,
        block_tokens=block,
        slots=slots,
        chunk_tokens=min(chunk or CONTEXT, CONTEXT),
        attend_tokens=min(attend or CONTEXT, CONTEXT),
        split_tokens=split,
    )
    geometry.check()
    tensors = allocate(geometry.buffers(LAYOUT))
    return OffloadCache(LAYOUT, geometry, tensors, DeferredStreams(), poisoned=True)


def make_resident(poisoned):
    tensors = allocate(resident_buffers(LAYOUT, CONTEXT))
    return ResidentCache(tensors, poisoned=poisoned)


def plan_steps(prompt_tokens, new_tokens, chunk, attend):
    """Return the steps of a request as an engine plans them: (first token, plan)."""
    edges = [*range(0, prompt_tokens, chunk or prompt_tokens)]
    edges += range(prompt_tokens, prompt_tokens + new_tokens + 1)
    steps = []
    for start, stop in pairwise(edges):
        count = stop - start
        spans = dense_spans(start + (count == 1), attend)
        # Layers that read nothing come last, as in a chunk whose logits nobody wants.
        reading = LAYERS if stop >= prompt_tokens else LAYERS - 1
        steps.append((start, StepPlan(count, spans, reading)))
    return steps


def check_step(cache, sequence, plan, truth):
    """Run a step that stores the true rows, and compare every span that it reads with them."""
    start, stop = sequence.length, sequence.length + plan.count
    step = cache.begin(sequence, plan)
    for layer in range(LAYERS):
        room = step.room(layer)
        first = 0 if room.row is None else int(room.row)
        assert room.keys.shape[0] - first >= plan.count
        for target, rows in zip(room[:2], truth[layer, :, start:stop], strict=True):
            target[first : first + plan.count] = rows
        step.written(layer)
        new = step.new(layer)
        assert torch.equal(torch.stack(new[:2]), truth[layer, :, start:stop])
        assert new.start == start
        if layer >= plan.reading_layers:
            continue
        for span, got in zip(plan.spans, step.history(layer), strict=True):
            wanted = truth[layer, :, span.start : span.stop]
            assert torch.equal(torch.stack(got[:2]), wanted), (start, layer, got.place)
            assert got.start == span.start
    return step


def check_one_step(cache, sequence, plan, truth, split):
    """Run a step of one token; compare every position that pieces and tail describe."""
    position, scalars = sequence.length, Scalars.on(torch.device("cpu"))
    scalars.position.fill_(position)
    scalars.stop.fill_(position + 1)
    step = cache.begin_one(sequence, plan, scalars)
    for layer in range(LAYERS):
        room = step.room(layer)
        for target, row in zip(room[:2], truth[layer, :, position], strict=True):
            target[int(room.row)] = row
        step.written(layer)
        tail = step.tail(layer)
        tail_start = int(scalars.tail_start) if tail is not None else position + 1
        covered = 0
        for piece in step.pieces(layer):
            assert piece.start == covered, "pieces follow one another"
            assert piece.start % split == 0
            covered = min(piece.start + piece.keys.shape[0], position + 1)
            for at in range(piece.start, covered):
                if at >= tail_start:
                    rows = [one[at - tail_start] for one in tail]
                else:
                    rows = [piece.keys[at - piece.start], piece.values[at - piece.start]]
                assert torch.equal(torch.stack(rows), truth[layer, :, at]), (at, piece.place)
        assert covered == position + 1
    return step


def serve(cache, prompt_tokens, new_tokens, chunk, attend, *, room=0, split=None, followed=None):
    """Store random rows as a request does; check every span against rows kept in a list.

    With `split`, steps of one token go through `begin_one`. `followed` changes what a step is told
    of the next.
    """
    truth = torch.randn(LAYERS, 2, prompt_tokens + new_tokens, KV_HEADS, HEAD_DIM)
    sequence = cache.admit(0, prompt_tokens + new_tokens + room)
    steps = plan_steps(prompt_tokens, new_tokens, chunk, attend)
    for number, (start, plan) in enumerate(steps):
        assert sequence.length == start
        if split is not None and plan.count == 1:
            every_layer = StepPlan(plan.count, plan.spans, LAYERS)
            step = check_one_step(cache, sequence, every_layer, truth, split)
        else:
            step = check_step(cache, sequence, plan, truth)
        following = steps[number + 1][1] if number + 1 < len(steps) else None
        step.finish(following if followed is None else followed(following, start + plan.count))
    assert sequence.length == prompt_tokens + new_tokens
    return sequence


@st.composite
def geometries(draw, most_split=1):
    """Draw sizes that are allowed: (block, slots, chunk, attend, split)."""
    split = draw(st.integers(1, most_split), label="split")
    block = draw(st.integers(1, 20), label="block")
    attend = draw(st.one_of(st.none(), st.integers(1, 30 // split)), label="spans")
    attend = None if attend is None else attend * split
    needed = max(blocks_in_span(attend or CONTEXT, block, CONTEXT), 2)
    slots = draw(st.integers(needed, needed + 4) | st.integers(needed, needed + 140))
    return block, slots, draw(st.none() | st.integers(1, CONTEXT), label="chunk"), attend, split


@st.composite
def lengths(draw):
    return draw(st.integers(1, CONTEXT - 20), label="prompt"), draw(st.integers(0, 20), label="new")


def shorten_tail(cache, data):
    cache.tail_tokens = data.draw(st.integers(1, cache.tail_tokens), label="tail")


def assert_empty(cache):
    assert cache.pool.free_blocks == cache.geometry.blocks
    for buffer in (*cache.host_buffers().values(), *cache.device_buffers().values()):
        assert buffer.isnan().all()


@settings(deadline=None, max_examples=50)
@given(sizes=geometries(), data=st.data())
def test_every_span_holds_its_own_rows(sizes, data):
    block, slots, chunk, attend, _ = sizes
    cache = make_cache(block, slots, chunk, attend)
    shorten_tail(cache, data)
    for _ in range(2):
        cache.release(serve(cache, *data.draw(lengths()), chunk, attend))
        assert_empty(cache)


@settings(deadline=None, max_examples=60)
@given(sizes=geometries(most_split=6), data=st.data())
def test_every_position_of_a_one_token_step_holds_its_own_row(sizes, data):
    block, slots, chunk, attend, split = sizes
    cache = make_cache(block, slots, chunk, attend, split=split)
    assert cache.geometry.reads_blocks == (block % split == 0)
    shorten_tail(cache, data)
    for _ in range(2):
        cache.release(serve(cache, *data.draw(lengths()), chunk, attend, split=split))
        assert_empty(cache)


@settings(deadline=None, max_examples=50)
@given(sizes=geometries(most_split=4), one=st.booleans(), data=st.data())
def test_a_step_that_differs_from_its_announcement_reads_its_own_rows(sizes, one, data):
    """What was loaded ahead for another step, or for none, does no harm."""
    block, slots, chunk, attend, split = sizes
    cache = make_cache(block, slots, chunk, attend, split=split)
    shorten_tail(cache, data)

    def otherwise(following, held):
        kind = data.draw(st.sampled_from(["right", "none", "other"]), label="announced")
        if kind == "right":
            return following
        if kind == "none":
            return None
        keys = data.draw(st.integers(0, held), label="keys")
        spans = dense_spans(keys, data.draw(st.integers(1, 30), label="cut"))
        first = data.draw(st.integers(0, len(spans)), label="first span")
        return StepPlan(1, spans[first:], data.draw(st.integers(0, LAYERS), label="reading"))

    for _ in range(2):
        split_steps = split if one else None
        served = serve(
            cache, *data.draw(lengths()), chunk, attend, split=split_steps, followed=otherwise
        )
        cache.release(served)
        assert_empty(cache)


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
    sequence = serve(cache, 45, 0, 20, 8)
    cache.streams.drain()
    assert cache.streams.copied_bytes["down"] == 45 * TOKEN_BYTES * LAYERS
    # Chunk 2 reads 20 rows in the first layer; chunk 3 reads 40 in both.
    assert cache.streams.copied_bytes["up"] == (20 + 2 * 40) * TOKEN_BYTES
    last = cache.blocks[0][sequence.block_table[5]]
    assert last[:, :5].isfinite().all()
    assert last[:, 5:].isnan().all()


def test_a_request_that_ends_as_announced_loads_nothing_that_it_does_not_read():
    for split in (None, 4):
        cache = make_cache(block=8, slots=2, chunk=20, attend=8, split=split or 1)
        sequence = serve(cache, 45, 3, 20, 8, split=split)
        cache.streams.drain()
        # As above, and each of three new tokens reads 45 rows in both layers.
        assert cache.streams.copied_bytes["up"] == (20 + 2 * 40 + 3 * 2 * 45) * TOKEN_BYTES
        cache.release(sequence)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_request_released_in_mid_step_leaves_nothing_behind(layer):
    cache = make_cache(block=8, slots=2, chunk=20, attend=8)
    sequence = serve(cache, 40, 0, 20, 8, room=5)
    step = cache.begin(sequence, StepPlan(5, dense_spans(40, 8), LAYERS))
    for before in range(layer):
        step.room(before)
        step.written(before)
        list(step.history(before))
    room = step.room(layer)
    room.keys.normal_()
    step.written(layer)
    next(iter(step.history(layer)))
    cache.release(sequence)
    assert_empty(cache)
    cache.release(serve(cache, 40, 5, 20, 8))


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_request_released_in_mid_decode_leaves_nothing_behind(layer):
    cache = make_cache(block=8, slots=2, chunk=20, attend=8, split=4)
    sequence = serve(cache, 40, 3, 20, 8, room=5, split=4)
    plan = StepPlan(1, dense_spans(44, 8), LAYERS)
    step = cache.begin_one(sequence, plan, Scalars.on(torch.device("cpu")))
    for before in range(layer):
        step.room(before)
        step.written(before)
        list(step.pieces(before))
    step.room(layer)
    next(iter(step.pieces(layer)))
    cache.release(sequence)
    assert_empty(cache)
    cache.release(serve(cache, 40, 5, 20, 8, split=4))


def test_pools_refuse_what_they_cannot_hold():
    with pytest.raises(OutOfMemory, match="9 KV blocks are needed and 8 of 8 are free"):
        make_cache(block=8, slots=2, chunk=20, attend=8).admit(3, 65)
    with pytest.raises(OutOfMemory, match="request 3 needs KV for 61 tokens"):
        make_resident(poisoned=False).admit(3, 61)


@pytest.mark.parametrize("poisoned", [True, False])
@pytest.mark.parametrize("split", [None, 4])
def test_the_resident_cache_holds_the_same_rows(poisoned, split):
    cache = make_resident(poisoned)
    for tokens in (50, 30):
        cache.release(serve(cache, tokens, 10, 16, 7, split=split))
        (keys, values) = cache.device_buffers().values()
        assert bool(keys.isnan().all() and values.isnan().all()) == poisoned
