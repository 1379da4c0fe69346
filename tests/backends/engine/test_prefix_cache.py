"""A hit gives the bits of a miss, copies less, and leaves shared blocks as they are."""

import json
from math import ceil, lcm

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.base import ConfigurationError, NonFiniteLogits, OutOfMemory, RequestCancelled
from backends.engine import offload
from backends.engine.cache.offload_geometry import blocks_in_span
from backends.engine.cache.offload_steps import OffloadStep
from backends.engine.streams import DeferredStreams

CHUNK, ATTEND, CONTEXT, NEW, LAYERS = 24, 8, 128, 3, 3
ROW_BYTES = 2 * 2 * 16 * 4  # keys and values, heads, head_dim, float32


def build(tiny, block, slots=2, *, chunk=CHUNK, **settings):
    settings = {"prefix_cache": True, "poison": True, "max_model_len": CONTEXT} | settings
    return offload(
        model_path=str(tiny),
        kvcache_block_size=block,
        num_gpu_blocks=slots,
        chunk_tokens=chunk,
        attend_tokens=ATTEND,
        **settings,
    )


@pytest.fixture(scope="module")
def alone(tiny, ask):
    """Answers of an engine that serves this one request and has no prefix cache, once each."""
    answers = {}

    def answer(prompt, chunk=CHUNK, new_tokens=NEW):
        key = (prompt, chunk, new_tokens)
        if key not in answers:
            engine = build(tiny, 16, chunk=chunk, prefix_cache=False)
            answers[key] = ask(engine, prompt, new_tokens)
            engine.close()
        return answers[key]

    return answer


@pytest.fixture(scope="module")
def branch(prompt):
    """Make a prompt that begins like all others of its family, and goes its own way at `fork`."""

    def make(tokens, fork=None, way=1, family=0):
        trunk = prompt(CONTEXT, seed=f"family {family}")
        fork = tokens if fork is None else min(fork, tokens)
        return trunk[:fork] + prompt(CONTEXT, seed=f"way {way}")[: tokens - fork]

    return make


def assert_same(got, wanted):
    assert got.token_ids == wanted.token_ids
    assert got.logits_digest == wanted.logits_digest
    assert got.top2_margin == wanted.top2_margin


def known_tokens(prompt, earlier, block, chunk):
    """The longest beginning that an earlier prompt has too, cut as the method allows."""
    step = lcm(block, chunk)
    longest = 0
    for other in earlier:
        usable = min(len(other), len(prompt) - 1) // step * step
        while prompt[:usable] != other[:usable]:
            usable -= step
        longest = max(longest, usable)
    return longest


SHAPES = [(24, 24), (24, 8), (24, 48), (24, 1), (24, 16), (10, 15)]
"""Of a chunk and a block: equal, whole parts, multiples, and such as meet later."""


@pytest.mark.parametrize("shape", SHAPES)
@settings(
    deadline=None,
    max_examples=2,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(data=st.data())
def test_a_hit_gives_the_bits_of_a_miss(shape, data, tiny, ask, alone, branch):  # noqa: PLR0917
    chunk, block = shape
    least = max(blocks_in_span(ATTEND, block, CONTEXT), 2)
    slots = data.draw(st.integers(least, max(least, 8)), label="slots")
    roomy = data.draw(st.booleans(), label="roomy")
    engine = build(tiny, block, slots, chunk=chunk, prefix_cache_tokens=1000 if roomy else None)
    lengths, forks = st.sampled_from([1, 48, 49, 97, 120]), st.sampled_from([23, 48, 50, 120])
    prompts = st.builds(branch, lengths, forks)
    earlier = []
    for at, prompt in enumerate(data.draw(st.lists(prompts, min_size=2, max_size=5), label="ask")):
        got = ask(engine, prompt, NEW, request_id=at)
        assert_same(got, alone(prompt, chunk))
        known = known_tokens(prompt, earlier, block, chunk)
        assert got.reused_tokens == known if roomy else got.reused_tokens <= known
        earlier.append(prompt)
    engine.close()


def test_the_last_prompt_is_reused_without_extra_room(tiny, ask, alone, branch):
    engine = build(tiny, 8)
    reused = []
    for at, (tokens, fork) in enumerate([(120, 120), (120, 100), (120, 60), (120, 100), (97, 97)]):
        prompt = branch(tokens, fork, way=at)
        got = ask(engine, prompt, NEW, request_id=at)
        assert_same(got, alone(prompt))
        reused.append(got.reused_tokens)
    assert reused == [0, 96, 48, 48, 96]


@pytest.mark.parametrize("poison", [True, False])
def test_colliding_hashes_change_nothing(poison, tiny, ask, alone, branch):
    engine = build(tiny, 8, prefix_cache_tokens=256, poison=poison)
    engine._offload.prefixes._hash = lambda before, tokens: b"same"
    earlier = []
    for at, (tokens, fork) in enumerate([(100, 30), (100, 60), (73, 73), (100, 30), (100, 0)]):
        prompt = branch(tokens, fork, way=at % 2)
        got = ask(engine, prompt, NEW, request_id=at)
        assert_same(got, alone(prompt))
        assert got.reused_tokens == known_tokens(prompt, earlier, 8, CHUNK)
        earlier.append(prompt)


def test_the_least_recently_used_gives_way(tiny, ask, alone, branch):
    """Nine blocks; a request takes four and leaves three, the ends of the oldest go first."""
    engine = build(tiny, 24, prefix_cache_tokens=72)
    reused = []
    for at, family in enumerate([0, 1, 0, 2, 3, 0, 1]):
        prompt = branch(75, family=family)
        got = ask(engine, prompt, NEW, request_id=at)
        assert_same(got, alone(prompt))
        reused.append(got.reused_tokens)
        pool, held = engine._offload.pool, engine._offload.blocks[0]
        assert pool.used_blocks == 0
        assert pool.free_blocks + pool.idle_blocks == ceil(CONTEXT / 24) + 3
        written = [bool(held[block].isfinite().all()) for block in range(len(held))]
        assert sum(written) == pool.idle_blocks
        assert all(one or bool(held[number].isnan().all()) for number, one in enumerate(written))
    assert reused == [0, 0, 72, 0, 0, 48, 0]


def during_prefill(monkeypatch, act):
    """Call `act` when the third chunk is in its second layer."""
    written = OffloadStep.written

    def interrupted(step, layer):
        if layer == 1 and step._sequence.length == 2 * CHUNK:
            act()
        return written(step, layer)

    monkeypatch.setattr(OffloadStep, "written", interrupted)


def fail():
    raise MemoryError


@pytest.mark.parametrize("what", ["cancel", "out of memory"])
def test_a_prompt_that_was_not_finished_is_not_known(what, tiny, ask, alone, monkeypatch):
    engine, prompt = build(tiny, 8), tuple(range(100))
    with monkeypatch.context() as patch:
        during_prefill(patch, (lambda: engine.cancel(1)) if what == "cancel" else fail)
        with pytest.raises(RequestCancelled if what == "cancel" else OutOfMemory):
            ask(engine, prompt, NEW, request_id=1)
    assert engine._offload.prefixes.known_blocks == 0
    assert engine._offload.pool.free_blocks == CONTEXT // 8
    for at, reused in ((2, 0), (3, 96)):
        got = ask(engine, prompt, NEW, request_id=at)
        assert_same(got, alone(prompt))
        assert got.reused_tokens == reused


def test_a_hit_that_was_not_finished_harms_nobody(tiny, ask, alone, branch, monkeypatch):
    engine = build(tiny, 8)
    ask(engine, branch(60), NEW)
    with monkeypatch.context() as patch:
        during_prefill(patch, fail)
        with pytest.raises(OutOfMemory):
            ask(engine, branch(100), NEW, request_id=1)
    assert engine._offload.pool.idle_blocks == 48 // 8
    got = ask(engine, branch(100), NEW, request_id=2)
    assert_same(got, alone(branch(100)))
    assert got.reused_tokens == 48


def test_a_prompt_with_nan_is_not_known(tiny, ask, branch):
    engine = build(tiny, 8, poison=False)
    with torch.inference_mode():
        engine._decoder._norm[3] = float("nan")
    with pytest.raises(NonFiniteLogits):
        ask(engine, branch(100), NEW)
    assert engine._offload.prefixes.known_blocks == 0


def test_a_request_cancelled_while_it_decodes_leaves_its_prompt(
    tiny, ask, alone, branch, monkeypatch
):
    engine = build(tiny, 8)
    room = OffloadStep.room

    def cancelled(step, layer):
        if step._sequence.length == 101:
            engine.cancel(1)
        return room(step, layer)

    with monkeypatch.context() as patch:
        patch.setattr(OffloadStep, "room", cancelled)
        with pytest.raises(RequestCancelled):
            ask(engine, branch(100), NEW, request_id=1)
    got = ask(engine, branch(100), NEW, request_id=2)
    assert_same(got, alone(branch(100)))
    assert got.reused_tokens == 96


@pytest.mark.parametrize("slots", [12, LAYERS * CONTEXT // 8])
def test_kept_slots_hold_shared_blocks(slots, tiny, ask, alone, branch):
    engine, streaming = build(tiny, 8, slots), build(tiny, 8, 2)
    for at, (tokens, fork) in enumerate([(110, 110), (110, 80), (50, 30), (110, 110)]):
        prompt = branch(tokens, fork)
        got, other = (ask(one, prompt, 12, request_id=at) for one in (engine, streaming))
        assert_same(got, alone(prompt, new_tokens=12))
        assert got.reused_tokens == other.reused_tokens
        assert got.bytes_up < other.bytes_up
    assert got.reused_tokens == 72


def test_resident_requests_in_between(tiny, ask, alone, branch):
    engine = build(tiny, 8, offload="auto", resident_tokens=60)
    reused = []
    for at, (tokens, fork) in enumerate([(100, 100), (50, 50), (100, 60), (57, 20), (80, 80)]):
        prompt = branch(tokens, fork)
        got = ask(engine, prompt, NEW, request_id=at)
        assert_same(got, alone(prompt))
        assert (got.bytes_down == 0) == (tokens + NEW <= 60)
        reused.append(got.reused_tokens)
    assert reused == [0, 0, 48, 0, 72]


def test_bytes_are_those_of_what_is_left(tiny, ask, branch):
    engine = build(tiny, 16, 2)
    miss = ask(engine, branch(120), 1)
    hit = ask(engine, branch(120), 1, request_id=1)
    assert (miss.reused_tokens, hit.reused_tokens) == (0, 96)
    assert miss.bytes_down == 120 * LAYERS * ROW_BYTES
    assert hit.bytes_down == (120 - 96) * LAYERS * ROW_BYTES
    last_chunk_reads = 96 * LAYERS
    others_read = (24 + 48 + 72) * (LAYERS - 1)  # a chunk without logits reads a layer less
    assert hit.bytes_up == last_chunk_reads * ROW_BYTES
    assert miss.bytes_up == (last_chunk_reads + others_read) * ROW_BYTES


def test_shared_blocks_are_never_written(tiny, ask, branch):
    engine = build(tiny, 8, prefix_cache_tokens=64)
    ask(engine, branch(100), NEW)
    index, held = engine._offload.prefixes, engine._offload.blocks
    known = index.match(branch(100), 96)
    before = [layer[known].clone() for layer in held]
    for at, (tokens, fork) in enumerate([(100, 100), (120, 70), (97, 97), (73, 73)]):
        ask(engine, branch(tokens, fork), NEW, request_id=at + 1)
        assert index.match(branch(100), 96) == known
        for layer, rows in zip(held, before, strict=True):
            assert torch.equal(layer[known], rows)


def test_blocks_not_yet_copied_down_would_show(tiny, ask, branch, monkeypatch):
    """What release waits for: without it, a hit reads rows that are not there."""
    engine = build(tiny, 8)
    with monkeypatch.context() as patch:
        patch.setattr(DeferredStreams, "drain", lambda self: None)
        ask(engine, branch(CHUNK), 1)  # a chunk that nobody reads in this request
        with pytest.raises(NonFiniteLogits, match=r"request 1, layer \d, slot"):
            ask(engine, branch(30), 1, request_id=1)


def test_one_chunk_a_token(tiny, ask, alone, branch):
    """Rows of a prompt may be in the tail, and never in a block, when the request ends."""
    engine = build(tiny, 5, 4, chunk=1)
    for at, reused in enumerate((0, 30, 30)):
        got = ask(engine, branch(34), NEW, request_id=at)
        assert_same(got, alone(branch(34), 1))
        assert got.reused_tokens == reused


def test_a_checkpoint_counts_the_chunks_that_were_reused(tiny, ask, branch, tmp_path):
    engine = build(tiny, 8, checkpoint=str(tmp_path / "checkpoint"))
    for at in range(2):
        ask(engine, branch(100), 2, request_id=at)
    engine.close()

    def recorded(at):
        lines = (tmp_path / "checkpoint" / f"request_{at:06}.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        return {(one["chunk"], one["start"]) for one in records if one.get("name") == "key"}

    assert recorded(0) == {(0, 0), (1, 24), (2, 48), (3, 72), (4, 96), (5, 100)}
    assert recorded(1) == {(4, 96), (5, 100)}


def test_the_plan_counts_what_is_kept(tiny):
    sizes = {}
    for extra in (None, 1, 40):
        described = build(tiny, 16, prefix_cache_tokens=extra).describe()
        assert described["prefix_cache"] is True
        assert described["prefix_cache_tokens"] == (extra or 0)
        sizes[extra] = described["host_buffer_bytes"]
    plain = build(tiny, 16, prefix_cache=False).describe()
    assert plain["host_buffer_bytes"] == sizes[None] == 128 * LAYERS * ROW_BYTES
    assert sizes[1] == (128 + 16) * LAYERS * ROW_BYTES
    assert sizes[40] == (128 + 48) * LAYERS * ROW_BYTES


def test_too_large_a_cache_is_refused_with_what_fits(tiny):
    with pytest.raises(ConfigurationError, match=r"backend\.prefix_cache_tokens") as error:
        build(tiny, 16, prefix_cache_tokens=10**9, host_memory_gb=0.5)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"prefix_cache_tokens": 0}, r"prefix_cache_tokens=0 is below 1"),
        ({"prefix_cache_tokens": 1.5}, r"prefix_cache_tokens=1\.5 is not a whole number"),
        (
            {"prefix_cache": False, "prefix_cache_tokens": 64},
            r"prefix_cache_tokens=64 has no effect with backend\.prefix_cache=false",
        ),
        ({"offload": "never"}, r"prefix_cache=true has no effect with backend\.offload=never"),
        ({"chunk": None}, r"prefix_cache=true needs backend\.chunk_tokens"),
        ({"chunk": 25}, r"prefix_cache=true has no effect.*=16 and .*=25.*400.*=128"),
        ({"max_model_len": 48}, r"no effect.* common one, 48, is not below .*=48 less one"),
    ],
)
def test_settings_that_cannot_be_honoured(changed, message, tiny):
    with pytest.raises(ConfigurationError, match=message) as error:
        build(tiny, 16, **changed)
    assert "\n" not in str(error.value)


def test_without_a_prefix_cache_nothing_is_reused(tiny, ask, branch):
    engine = build(tiny, 8, prefix_cache=False)
    for at in range(2):
        assert ask(engine, branch(100), NEW, request_id=at).reused_tokens == 0
