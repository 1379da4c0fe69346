"""What travels between CPU memory and the device, against a model of the method in plain numbers.

The model knows no streams and no slots: every step needs, in every layer that reads, all rows that
lie in CPU memory, less what earlier steps left in slots that are kept.
"""

from itertools import pairwise
from math import ceil

import pytest

from backends.engine import gpu_only, offload, offload_layerwise
from backends.engine.cache.offload import OffloadCache
from backends.engine.streams import DeferredStreams

LAYERS, CONTEXT, TAIL = 3, 192, 8
ROW_BYTES = 2 * 2 * 16 * 4  # keys and values, heads, head_dim, float32
CUTS = {"chunk_tokens": 24, "attend_tokens": 8}


class Needed:
    """Counts the rows that a request has to move up and down.

    Args:
        block: tokens in a block.
        kept: how many blocks stay in slots, the first block of every layer first; None is all.
        blocks: of the whole request.
    """

    def __init__(self, block, kept, blocks):
        order = [(layer, index) for index in range(blocks) for layer in range(LAYERS)]
        self.block = block
        self.kept = dict.fromkeys(order if kept is None else order[:kept], 0)
        self.up = self.down = self.in_blocks = 0

    def step(self, reading_layers):
        for index in range(ceil(self.in_blocks / self.block)):
            rows = min(self.block, self.in_blocks - index * self.block)
            for layer in range(reading_layers):
                there = self.kept.get((layer, index), 0)
                if there < rows:  # a kept block that has grown comes anew
                    self.up += rows
                if (layer, index) in self.kept:
                    self.kept[layer, index] = rows

    def copied_down(self, tokens):
        self.down += tokens * LAYERS
        self.in_blocks += tokens


def needed_rows(tokens, new_tokens, *, chunk, block, slots, span_blocks=1):
    """Return rows up and rows down of a request."""
    blocks = ceil((tokens + new_tokens) / block)
    streaming = max(span_blocks + 1, 2)
    kept = None if LAYERS * blocks <= slots else max(slots - streaming, 0)
    needed = Needed(block, kept, blocks)
    waiting = 0
    edges = [*range(0, tokens, chunk), tokens]
    for start, stop in pairwise(edges):
        needed.step(LAYERS if stop == tokens else LAYERS - 1)
        if stop - start == 1:
            waiting += 1
        else:
            needed.copied_down(stop - start)
    for _ in range(new_tokens - 1):  # the last one is never fed back
        if waiting == min(TAIL, block):
            needed.copied_down(waiting)
            waiting = 0
        needed.step(LAYERS)
        waiting += 1
    if waiting == min(TAIL, block):
        needed.copied_down(waiting)
    return needed.up, needed.down


@pytest.fixture(autouse=True)
def _short_tail(monkeypatch):
    monkeypatch.setattr("backends.engine.cache.offload_geometry.MAX_TAIL_TOKENS", TAIL)


@pytest.fixture(scope="module")
def plain(tiny):
    return gpu_only(model_path=str(tiny), max_model_len=CONTEXT, **CUTS)


def build(tiny, block, slots, **settings):
    return offload(
        model_path=str(tiny),
        max_model_len=CONTEXT,
        kvcache_block_size=block,
        num_gpu_blocks=slots,
        **CUTS | settings,
    )


@pytest.mark.parametrize(
    ("block", "slots"), [(8, 3), (8, 20), (16, 4), (16, 40), (20, 3), (20, 7), (48, 4), (48, 12)]
)
def test_kept_blocks_are_not_copied_again(block, slots, tiny, plain, ask):
    engine = build(tiny, block, slots, poison=True)
    span_blocks = 2 if block == 20 else 1  # spans of 8 tokens cross blocks of 20
    for tokens, new_tokens in ((97, 12), (60, 20), (150, 1)):
        got, wanted = ask(engine, tokens, new_tokens), ask(plain, tokens, new_tokens)
        assert got.logits_digest == wanted.logits_digest
        up, down = needed_rows(
            tokens, new_tokens, chunk=24, block=block, slots=slots, span_blocks=span_blocks
        )
        assert (got.bytes_up / ROW_BYTES, got.bytes_down / ROW_BYTES) == (up, down)


@pytest.mark.parametrize("buffers", [2, 3, 4])
def test_kept_layers_are_not_copied_again(buffers, tiny, ask):
    engine = offload_layerwise(
        model_path=str(tiny), max_model_len=CONTEXT, num_kv_buffers=buffers, poison=True
    )
    for tokens, new_tokens in ((97, 12), (60, 30), (1, 20)):
        got = ask(engine, tokens, new_tokens)
        up, down = needed_rows(tokens, new_tokens, chunk=CONTEXT, block=CONTEXT, slots=buffers)
        assert (got.bytes_up / ROW_BYTES, got.bytes_down / ROW_BYTES) == (up, down)


def up_rows_of_one_more_token(engine, ask, tokens, new_tokens):
    more, less = (ask(engine, tokens, count).bytes_up for count in (new_tokens + 1, new_tokens))
    return (more - less) / ROW_BYTES


@pytest.mark.parametrize("slots", [2, 3, 5, 8, 9, 11, 30])
def test_a_decoded_token_copies_what_is_not_kept(slots, tiny, ask):
    """A prompt of 96 tokens, six whole blocks; all that a request of 112 can fill is 21 slots."""
    engine = build(tiny, 16, slots)
    kept = 6 * LAYERS if slots >= 7 * LAYERS else min(max(slots - 2, 0), 6 * LAYERS)
    per_token = up_rows_of_one_more_token(engine, ask, 96, 4)
    assert per_token == 96 * LAYERS - 16 * kept
    assert (per_token == 0) == (slots == 30)


def test_a_kept_block_that_the_tail_went_to_comes_up_once_more(tiny, plain, ask):
    """Block 6 holds positions 96 to 111; the first tail fills half of it, then the second all."""
    engine = build(tiny, 16, 30, poison=True)
    up = {count: ask(engine, 96, count).bytes_up // ROW_BYTES for count in (*range(8, 12), 17, 18)}
    # The ninth new token is fed back at 96 + 8, when a tail has just been copied down.
    assert up[9] - up[8] == 0
    assert up[10] - up[9] == 8 * LAYERS
    assert up[11] == up[17] == up[10]
    assert up[18] - up[17] == 16 * LAYERS
    got, all_on_device = ask(engine, 96, 60), ask(plain, 96, 60)
    assert got.logits_digest == all_on_device.logits_digest


def test_a_stop_token_wastes_at_most_the_loads_that_the_ring_has_room_for(tiny, ask):
    engine = build(tiny, 8, 4)
    free = ask(engine, 90, 12)
    third = next(token for at, token in enumerate(free.token_ids) if at >= 2)
    length = free.token_ids.index(third) + 1
    stopped = ask(engine, 90, 12, stop=(third,))
    exact = ask(engine, 90, length)
    assert stopped.logits_digest == exact.logits_digest
    assert 0 <= stopped.bytes_up - exact.bytes_up <= 4 * 8 * ROW_BYTES


# Loads that start during the step before.


@pytest.fixture
def journal(monkeypatch):
    """What the cache was told and what it asked for, in order."""
    entries = []
    begin, end, copy = OffloadCache.begin, OffloadCache.end, DeferredStreams.copy

    def spy_begin(cache, sequence, plan):
        entries.append(("begin", sequence.length))
        return begin(cache, sequence, plan)

    def spy_end(cache, sequence, following):
        entries.append(("end", None if following is None else following.reading_layers))
        return end(cache, sequence, following)

    def spy_copy(streams, direction, pieces, after, wipe=None):
        if direction == "up":
            entries.append(("load", sum(piece.target.nbytes for piece in pieces)))
        return copy(streams, direction, pieces, after, wipe)

    monkeypatch.setattr(OffloadCache, "begin", spy_begin)
    monkeypatch.setattr(OffloadCache, "end", spy_end)
    monkeypatch.setattr(DeferredStreams, "copy", spy_copy)
    return entries


@pytest.mark.parametrize("slots", [2, 3])
def test_the_first_loads_of_a_step_are_asked_for_during_the_step_before(slots, tiny, ask, journal):
    engine = build(tiny, 8, slots)
    ask(engine, 72, 4)
    text = "".join({"begin": "(", "load": ".", "end": "|"}[kind] for kind, _ in journal)
    between = [part.partition("|")[2] for part in text.split("(")[1:]]
    # Chunks from 24, 48 and 72 on, then three tokens; the last step announces none.
    # A third slot keeps a block of layer 0: loaded once, not in each of the five steps.
    kept = slots - 2
    assert between == ["." * slots] + [".."] * 4 + [""]
    loads = text.count(".")
    blocks = 3 * (LAYERS - 1) + 6 * LAYERS + 3 * 9 * LAYERS
    assert loads == blocks - 4 * kept


def test_all_buffers_but_the_one_being_read_are_loaded_ahead(tiny, ask, journal):
    """Layer-wise with one slot less than layers: as a token ends, the next has all slots."""
    engine = offload_layerwise(model_path=str(tiny), max_model_len=CONTEXT, num_kv_buffers=2)
    ask(engine, 50, 3)
    text = "".join({"begin": "(", "load": ".", "end": "|"}[kind] for kind, _ in journal)
    assert text == "(|..(.|..(.|"
