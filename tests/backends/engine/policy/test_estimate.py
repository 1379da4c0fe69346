# ruff: noqa: PLR0917  (arguments are fixtures and drawn values)
"""XAttention's estimate against a float64 reading of the paper, in loops over its cells.

The rule: Q'K'^T sums up the antidiagonals of every stride x stride tile of QK^T, scaled by
1 / (sqrt(d) * stride * norm); causal by tiles; softmax over a row of tiles; a block's mass is the
sum of its cells; the first block and the block's own are kept; the others by descending mass while
the mass kept before is below threshold * the row's mass. Tokens beyond the end are zeros, rows of
tiles without a query do not exist.
"""

import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.engine.policy import BLOCK_TOKENS, Model, Place
from backends.engine.policy.estimate import Rule
from backends.engine.policy.mass import keep_share

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
FEW = settings(deadline=None, derandomize=True, max_examples=2 if INTERPRETED else 25)
SLOW = pytest.mark.skipif(INTERPRETED, reason="others cover it, and the interpreter is slow")
MODEL = Model(1, 2, 1, 16)
TOLERANCE = 1e-5  # of a row's mass: nearer to the threshold float32 may decide otherwise
MODELS = st.sampled_from(
    [Model(1, 1, 1, 16), Model(1, 4, 2, 8), Model(1, 2, 1, 20), Model(1, 3, 1, 32)]
)
LENGTHS = st.sampled_from([1, 8, 16, 128, 256, 384, 640]).flatmap(
    lambda unit: st.sampled_from([max(unit - 1, 1), unit, unit + 1])
)
SHARES = st.sampled_from([0.2, 0.5, 0.8, 0.9, 0.95, 0.99])


def cells_of(query, keys, stride, scale):
    """Scores of tiles [rows][columns up to the row], from every single product of one head."""
    tokens = len(query)
    products = query.astype(np.float64) @ keys.astype(np.float64).T
    rows = []
    for row in range(math.ceil(tokens / stride)):
        scores = []
        for column in range(row + 1):
            total = 0.0
            for step in range(stride):
                i, j = row * stride + stride - 1 - step, column * stride + step
                if i < tokens and j < tokens:
                    total += products[i, j]
            scores.append(total * scale)
        rows.append(scores)
    return rows


def masses_of(rows, stride):
    """Mass [query blocks][key blocks up to it] from the scores of tiles."""
    cells = BLOCK_TOKENS // stride
    blocks = math.ceil(len(rows) / cells)
    masses = [[0.0] * (block + 1) for block in range(blocks)]
    for row, scores in enumerate(rows):
        top = max(scores)
        weights = [math.exp(score - top) for score in scores]
        whole = sum(weights)
        for column, weight in enumerate(weights):
            masses[row // cells][column // cells] += weight / whole
    return masses


def kept_of(mass, share):
    """The blocks that the rule keeps of one row, and whether rounding may decide otherwise."""
    own = len(mass) - 1
    kept = {0, own}
    before = sum(mass[block] for block in kept)
    needed = share * sum(mass)
    others = sorted(set(range(own)) - kept, key=lambda block: -mass[block])
    near = False
    for place, block in enumerate(others):
        near = near or abs(before - needed) < TOLERANCE * sum(mass)
        if before >= needed:
            last = others[place - 1] if place else None
            near = near or (last is not None and mass[last] - mass[block] < TOLERANCE * sum(mass))
            break
        kept.add(block)
        before += mass[block]
    return kept, near


def rule_for(model, stride, share, norm=1.0):
    shares = torch.full((model.heads,), share, dtype=torch.float64)
    return Rule(stride, 1 / (math.sqrt(model.head_dim) * stride * norm), shares)


def selector(estimator, rule):
    return lambda query, keys, layer, place: estimator.select_blocks(query, keys, place, rule)


def test_blocks_are_those_of_the_published_rule(estimator, draw, whole):
    rows, near_rows = 0, 0

    @FEW
    @given(
        model=MODELS,
        tokens=LENGTHS,
        stride=st.sampled_from([8, 16]),
        share=SHARES,
        norm=st.sampled_from([1.0, 0.25]),
        seed=st.integers(0, 1000),
    )
    def check(model, tokens, stride, share, norm, seed):
        nonlocal rows, near_rows
        query, keys = draw(tokens, model, seed)
        rule = rule_for(model, stride, share, norm)
        found = whole(selector(estimator, rule), query, keys)
        scale = 1 / (math.sqrt(model.head_dim) * stride * norm)
        for head in range(model.heads):
            kv_head = head // (model.heads // model.kv_heads)
            scores = cells_of(query[:, head].numpy(), keys[:, kv_head].numpy(), stride, scale)
            for block, mass in enumerate(masses_of(scores, stride)):
                wanted, near = kept_of(mass, share)
                rows += 1
                near_rows += near
                got = set(found[head, block].nonzero().flatten().tolist())
                assert got == wanted or near
                assert {0, block} <= got <= set(range(block + 1))

    check()
    assert rows > (1 if INTERPRETED else 100)
    assert near_rows <= rows / 100


@pytest.mark.parametrize(
    ("tokens", "stride", "head_dim", "dtype"),
    [
        (1, 8, 24, torch.float32),
        (129, 16, 24, torch.float32),
        (391, 8, 24, torch.float32),
        (300, 4, 24, torch.float32),
        (260, 128, 24, torch.float32),
        (130, 1, 24, torch.float32),
        (391, 8, 24, torch.float16),
        (391, 8, 24, torch.bfloat16),
        (1030, 8, 64, torch.float16),  # a whole tile, and what is left
    ],
)
def test_log_sum_exps_are_those_of_the_cells(tokens, stride, head_dim, dtype, estimator, draw):
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16 as integers")
    model = Model(1, 2, 1, head_dim)
    query, keys = draw(tokens, model, dtype=dtype)
    place, rule = Place(0, tokens, tokens), rule_for(model, stride, 0.9)
    found = estimator.log_sum_exps(query, keys, place, rule)
    assert found.shape == (2, place.query_blocks * rule.cells, place.key_blocks)
    for head in range(2):
        of_head = query[:, head].float().numpy(), keys[:, 0].float().numpy()
        rows = cells_of(*of_head, stride, rule.scale)
        for row, scores in enumerate(rows):
            for block in range(row // rule.cells + 1):
                cells = scores[block * rule.cells : (block + 1) * rule.cells]
                wanted = math.log(sum(map(math.exp, cells))) if cells else -math.inf
                assert found[head, row, block].item() == pytest.approx(wanted, abs=2e-5)
        assert found[head, len(rows) :, 0].isneginf().all()


@SLOW
@FEW
@given(
    model=MODELS,
    tokens=st.sampled_from([200, 255, 256, 257, 383, 384, 385, 511, 640, 650]),
    chunk=st.sampled_from([128, 256, 384]),
    stride=st.sampled_from([8, 16]),
    share=SHARES,
    seed=st.integers(0, 1000),
)
def test_chunks_change_nothing(model, tokens, chunk, stride, share, seed, estimator, draw, whole):
    query, keys = draw(tokens, model, seed)
    select = selector(estimator, rule_for(model, stride, share))
    assert torch.equal(whole(select, query, keys, chunk), whole(select, query, keys))


def test_tiles_and_slices_change_nothing(estimator, draw, whole, monkeypatch):
    # Longer than a tile of keys.
    model, tokens, stride = (Model(1, 1, 1, 16), 300, 2) if INTERPRETED else (MODEL, 4225, 16)
    query, keys = draw(tokens, model)
    select = selector(estimator, rule_for(model, stride, 0.7))
    wanted = whole(select, query, keys)
    monkeypatch.setattr("backends.engine.policy.estimate.SLICE_TOKENS", 256)
    assert torch.equal(whole(select, query, keys), wanted)
    assert torch.equal(whole(select, query, keys, 128 if INTERPRETED else 1280), wanted)


@SLOW
def test_of_equals_the_first_is_kept(estimator, whole):
    query, keys = torch.zeros(1024, 2, 16), torch.ones(1024, 1, 16)
    found = whole(selector(estimator, rule_for(MODEL, 8, 0.5)), query, keys)
    for block, row in enumerate(found[0]):
        kept = row.nonzero().flatten().tolist()
        assert kept == sorted({*range(len(kept) - 1), block})
    assert 3 <= len(kept) <= 5
    assert torch.equal(found[0], found[1])


@SLOW
def test_infinity_keeps_every_block(estimator, draw, whole):
    query, keys = draw(500, MODEL)
    keys[130:260] = -100.0  # far from all attention
    shares = torch.tensor([math.inf, 0.3], dtype=torch.float64)
    rule = rule_for(MODEL, 8, 0.9)._replace(share=shares)
    found = whole(selector(estimator, rule), query, keys)
    assert torch.equal(found[0], torch.ones(4, 4, dtype=torch.bool).tril())
    assert found[1].sum() < found[0].sum()


def test_a_nan_key_is_read_by_all_who_see_it(estimator, draw, whole):
    query, keys = draw(500, MODEL)
    select = selector(estimator, rule_for(MODEL, 16, 0.3))
    before = whole(select, query, keys)
    keys[200, 0, 3] = torch.nan
    found = whole(select, query, keys)
    assert torch.equal(found[:, 2:], torch.ones(2, 4, 4, dtype=torch.bool).tril()[:, 2:])
    assert torch.equal(found[:, :2], before[:, :2])


def test_what_lies_after_the_chunk_changes_nothing(estimator, draw):
    query, keys = draw(300, MODEL)
    rule, place = rule_for(MODEL, 16, 0.6), Place(0, 300, 300)
    wanted = estimator.select_blocks(query, keys, place, rule)
    room = torch.full((512, 3, 2, 16), torch.nan)
    room[:300, 1, :1] = keys
    rows = torch.full((512, 2, 16), torch.nan)
    rows[:300] = query
    found = estimator.select_blocks(rows[:300], room[:300, 1, :1], place, rule)
    assert torch.equal(found, wanted)


@pytest.mark.skipif(not INTERPRETED, reason="Triton's kernel alone searches instead of sorting")
@FEW
@given(
    data=st.data(),
    heads=st.integers(1, 2),
    first=st.integers(0, 6),
    blocks=st.integers(1, 4),
    share=st.sampled_from([1e-9, 0.3, 0.5, 0.9, 0.999999, math.inf]),
)
def test_searching_keeps_what_sorting_keeps(data, heads, first, blocks, share, estimator):
    length = first + blocks
    numbers = st.sampled_from([0, 1, 2, 3, 2**20, 2**46]) | st.integers(0, 2**46)
    rows = st.lists(numbers, min_size=length, max_size=length)
    mass = torch.tensor([[data.draw(rows) for _ in range(blocks)] for _ in range(heads)])
    shares = torch.full((heads,), share, dtype=torch.float64)
    place = Place(first * BLOCK_TOKENS, blocks * BLOCK_TOKENS, length * BLOCK_TOKENS)
    found = torch.zeros(heads, blocks, length, dtype=torch.bool)
    estimator.keep_blocks(mass, shares, place, found)
    for block in range(blocks):
        own = first + block
        column = torch.arange(own + 1)
        forced = (column == 0) | (column == own)
        wanted = keep_share(mass[:, block, : own + 1], forced, shares[:, None])
        assert torch.equal(found[:, block, : own + 1], wanted)
        assert not found[:, block, own + 1 :].any()
