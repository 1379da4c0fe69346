"""Same settings, same bits: wherever keys and values lie, and whatever was served before."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from backends.base import Request
from backends.engine import gpu_only, offload
from backends.engine.cache.offload_geometry import blocks_in_span
from backends.engine.shape import FAMILIES

ROOT = Path(__file__).parents[3]
CHUNK, ATTEND, CONTEXT, NEW = 24, 8, 128, 9
BLOCKS = (1, 5, 8, 10, 12, 16, 24, 36, 128)
RINGS = [
    (slots, block)
    for slots in (2, 3, 4, 8)
    for block in BLOCKS
    if blocks_in_span(ATTEND, block, CONTEXT) <= slots
]


def around(*multiples):
    return sorted({length + shift for length in multiples for shift in (-1, 0, 1)} - {0})


@pytest.fixture(scope="module")
def reference(tiny, ask):
    """Answers of gpu_only for a prompt length, worked out once each."""
    engine = gpu_only(
        model_path=str(tiny), max_model_len=CONTEXT, chunk_tokens=CHUNK, attend_tokens=ATTEND
    )
    answers = {}

    def answer(tokens, new_tokens=NEW, stop=()):
        key = (tokens, new_tokens, tuple(stop))
        if key not in answers:
            answers[key] = ask(engine, tokens, new_tokens, stop)
        return answers[key]

    return answer


def build(tiny, slots, block, *, poison=True, **settings):
    settings = {
        "max_model_len": CONTEXT,
        "chunk_tokens": CHUNK,
        "attend_tokens": ATTEND,
        "num_gpu_blocks": slots,
        "kvcache_block_size": block,
        "poison": poison,
    } | settings
    return offload(model_path=str(tiny), **settings)


def assert_same(got, wanted):
    assert got.token_ids == wanted.token_ids
    assert got.logits_digest == wanted.logits_digest
    assert got.top2_margin == wanted.top2_margin
    assert got.finish_reason == wanted.finish_reason


def test_other_cuts_round_otherwise(tiny, reference, ask):
    """Equal digests mean something: the settings that promise nothing do change bits."""
    for cuts in ({"attend_tokens": ATTEND + 1}, {"chunk_tokens": CHUNK + 1}):
        settings = {"chunk_tokens": CHUNK, "attend_tokens": ATTEND} | cuts
        other = ask(gpu_only(model_path=str(tiny), max_model_len=CONTEXT, **settings), 90, NEW)
        assert other.logits_digest[0] != reference(90).logits_digest[0]


@pytest.mark.parametrize(("slots", "block"), RINGS)
def test_offload_has_the_bits_of_gpu_only(slots, block, tiny, reference, ask):
    engine = build(tiny, slots, block)
    lengths = {*around(CHUNK), *around(block, 3 * block)}
    if slots in {2, 4}:  # what the cuts do to a prompt does not hang on the slots
        lengths |= {*around(1, ATTEND, 3 * CHUNK)}
    for tokens in sorted(length for length in lengths if length <= CONTEXT - NEW):
        assert_same(ask(engine, tokens, NEW), reference(tokens))


@pytest.mark.parametrize(("slots", "block"), [(2, 8), (4, 10), (2, 128)])
def test_unpoisoned_too(slots, block, tiny, reference, ask):
    engine = build(tiny, slots, block, poison=False)
    for tokens in (*around(CHUNK, 2 * CHUNK), CONTEXT - NEW):
        assert_same(ask(engine, tokens, NEW), reference(tokens))


@pytest.mark.parametrize("tokens", around(2 * CHUNK))
def test_ended_by_a_stop_token(tokens, tiny, reference, ask):
    free = reference(tokens, 16)
    third = next(token for at, token in enumerate(free.token_ids) if at >= 2)
    length = free.token_ids.index(third) + 1
    got = ask(build(tiny, 2, 10), tokens, 16, stop=(third,))
    assert got.finish_reason == "stop"
    assert got.token_ids == free.token_ids[:length]
    assert got.logits_digest == free.logits_digest[:length]
    assert free.finish_reason == "length"


def test_decoding_across_many_blocks_and_the_tail(tiny, reference, ask):
    for block in (5, 24, 128):
        got = ask(build(tiny, 4, block), 30, CONTEXT - 30)
        assert_same(got, reference(30, CONTEXT - 30))
        assert len(got.token_ids) == CONTEXT - 30


def test_a_tail_shorter_than_the_block(tiny, reference, ask, monkeypatch):
    monkeypatch.setattr("backends.engine.cache.offload_geometry.MAX_TAIL_TOKENS", 3)
    for block in (5, 24, 128):
        assert_same(ask(build(tiny, 4, block), 30, 40), reference(30, 40))


@pytest.mark.parametrize("context", [60, 61, 200, 512])
def test_capacity_larger_than_the_prompt(context, tiny, reference, ask):
    engine = build(tiny, 3, 16, max_model_len=context)
    for tokens in (1, 25, 60 - NEW):
        assert_same(ask(engine, tokens, NEW), reference(tokens))


@pytest.mark.parametrize("chunk_tokens", [None, 1, 7])
@pytest.mark.parametrize("attend_tokens", [None, 3, 50])
def test_other_chunks_and_spans(chunk_tokens, attend_tokens, tiny, ask):
    cuts = {"chunk_tokens": chunk_tokens, "attend_tokens": attend_tokens}
    plain = gpu_only(model_path=str(tiny), max_model_len=CONTEXT, **cuts)
    engine = build(tiny, 8, 16, **cuts)
    for tokens in (6, 7, 8, 49, 50, 51):
        assert_same(ask(engine, tokens, NEW), ask(plain, tokens, NEW))


def test_layerwise_one_block_as_long_as_the_context(tiny, ask):
    cuts = {"chunk_tokens": None, "attend_tokens": None}
    plain = gpu_only(model_path=str(tiny), max_model_len=CONTEXT, **cuts)
    got = ask(build(tiny, 2, CONTEXT, **cuts), 90, 30)
    assert_same(got, ask(plain, 90, 30))


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("settings", [{"head_dim": 8, "num_key_value_heads": 1}, {"head_dim": 20}])
def test_rows_that_are_not_aligned(settings, architecture, save_model, ask):
    folder = save_model(architecture=architecture, sliding_window=None, **settings)
    plain = gpu_only(
        model_path=str(folder), max_model_len=CONTEXT, chunk_tokens=CHUNK, attend_tokens=ATTEND
    )
    for block in (5, 12):
        engine = build(folder, 3, block)
        for tokens in (23, 24, 50, 100):
            assert_same(ask(engine, tokens, NEW), ask(plain, tokens, NEW))


def test_offload_modes_mixed_within_one_engine(tiny, reference, ask):
    auto = build(tiny, 2, 10, offload="auto", resident_tokens=50)
    never = build(tiny, 2, 10, offload="never")
    for tokens in (70, 50 - NEW, 51 - NEW, 90, 20, 70):
        got = ask(auto, tokens, NEW)
        assert_same(got, reference(tokens))
        assert (got.bytes_up > 0) == (got.bytes_down > 0) == (tokens + NEW > 50)
        got = ask(never, tokens, NEW)
        assert_same(got, reference(tokens))
        assert got.bytes_up == got.bytes_down == 0


@pytest.mark.parametrize("poison", [True, False])
def test_requests_in_a_row_give_what_each_gives_alone(poison, tiny, reference, ask):
    engine = build(tiny, 2, 16, poison=poison)
    for at, tokens in enumerate((100, 7, 63, 64, 65, 7, 100, 1)):
        assert_same(ask(engine, tokens, NEW, request_id=at), reference(tokens))


PROGRAM = """
import json, sys
from backends.base import Request
from backends.engine import offload
order, settings, requests = json.loads(sys.argv[1])
engine = offload(**settings)
answers = {}
for at, name in enumerate(order):
    prompt, new_tokens = requests[name]
    answers[name] = engine.generate(Request(at, "", tuple(prompt), new_tokens)).logits_digest
print(json.dumps(answers))
"""


def test_three_processes_and_three_orders_give_the_same_digests(tiny, prompt):
    lengths = {"short": 17, "middle": 48, "long": 110}
    requests = {name: (prompt(tokens), NEW) for name, tokens in lengths.items()}
    settings = {
        "model_path": str(tiny),
        "max_model_len": CONTEXT,
        "chunk_tokens": CHUNK,
        "attend_tokens": ATTEND,
        "kvcache_block_size": 16,
        "num_gpu_blocks": 2,
    }
    orders = [
        ["short", "middle", "long"],
        ["long", "short", "middle", "long"],
        ["middle", "middle", "long", "short"],
    ]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps([order, settings, requests])],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for order in orders[:2]
    ]
    engine = offload(**settings)
    here = {
        name: engine.generate(Request(at, "", *requests[name])).logits_digest
        for at, name in enumerate(orders[2])
    }
    told = [json.loads(process.communicate(timeout=120)[0]) for process in running]
    assert [process.returncode for process in running] == [0, 0]
    answers = [*told, {name: list(digest) for name, digest in here.items()}]
    assert answers[0] == answers[1] == answers[2]
    assert len(set(map(tuple, answers[0].values()))) == 3


def test_the_presets_agree_on_the_probe(probe, ask, prompt):
    """With the settings of their YAML files, on a prompt over several chunks and blocks."""
    tokens = prompt(2100, vocabulary=4000)
    plain = gpu_only(
        model_path=str(probe), max_model_len=2200, chunk_tokens=1024, attend_tokens=512
    )
    engine = offload(model_path=str(probe), max_model_len=2200)
    wanted = ask(plain, tokens, 5)
    for at in range(2):
        got = ask(engine, tokens, 5, request_id=at)
        assert_same(got, wanted)
        assert got.bytes_up > got.bytes_down > 0
