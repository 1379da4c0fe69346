"""Vertical-slash against a float64 reading of the published rule, in loops over queries and keys.

The rule: attention of the last 64 queries; columns summed up, the first 30 always kept; diagonals
summed up, the nearest 100 always kept; the heaviest until `vertical` and `slash` are kept, or until
they hold the share `budget`. Here a block of 128 x 128 is read where a kept line meets a pair of a
query and a key in it that is causal.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import ConfigurationError
from backends.engine.policy import BLOCK_TOKENS, Model, Place, make_policy
from backends.engine.policy.minference import blocks_of_lines, line_mass

FEW = settings(deadline=None, derandomize=True, max_examples=10)
TOLERANCE = 1e-5  # relative: nearer to the cut float32 may decide otherwise
MODELS = st.sampled_from([Model(1, 1, 1, 16), Model(1, 4, 2, 8), Model(1, 3, 1, 20)])
LENGTHS = st.sampled_from([1, 64, 100, 128, 384, 1024, 1408, 1408]).flatmap(
    lambda unit: st.sampled_from([max(unit - 1, 1), unit, unit + 1])
)


def line_masses_of(query, keys, start):
    """Mass of columns and of diagonals, each a list by position or distance, of one head."""
    columns, diagonals = [0.0] * len(keys), [0.0] * len(keys)
    first = max(len(query) - 64, 0)
    for row in range(first, len(query)):
        position = start + row
        products = keys[: position + 1].astype(np.float64) @ query[row].astype(np.float64)
        scores = (products / math.sqrt(query.shape[1])).tolist()
        top = max(scores)
        weights = [math.exp(score - top) for score in scores]
        whole = sum(weights)
        for j, weight in enumerate(weights):
            columns[j] += weight / whole
            diagonals[position - j] += weight / whole
    return columns, diagonals


def kept_lines(mass, forced, count, budget):
    """Which lines the rule keeps, and whether the last of them is as heavy as the next."""
    kept = set(range(min(forced, len(mass))))
    whole = sum(mass)
    before = sum(mass[line] for line in kept)
    last = None
    for line in sorted(set(range(len(mass))) - kept, key=lambda line: -mass[line]):
        if len(kept) >= count if budget is None else before >= budget * whole:
            return kept, last is not None and last - mass[line] < TOLERANCE * last
        kept.add(line)
        before += mass[line]
        last = mass[line]
    return kept, False


def blocks_with(verticals, slashes, start, queries):
    """Blocks that hold a causal pair on a kept line, as pairs of query block and key block."""
    met = set()
    for i in range(start, start + queries):
        lines = [j for j in verticals if j <= i] + [i - apart for apart in slashes if apart <= i]
        met.update(((i - start) // BLOCK_TOKENS, j // BLOCK_TOKENS) for j in lines)
    return met


def blocks_for(columns, diagonals, sizes, place):
    """Blocks that the rule keeps, and whether rounding may decide otherwise."""
    vertical, slash, budget = sizes
    found, near = [], False
    for off in (-TOLERANCE, TOLERANCE):
        nudged = budget and budget + off
        verticals, near_vertical = kept_lines(columns, 30, vertical, nudged)
        slashes, near_slash = kept_lines(diagonals, 100, slash, nudged)
        found.append(blocks_with(verticals, slashes, place.start, place.queries))
        near = near or near_vertical or near_slash
    return found[0], near or found[0] != found[1]


@pytest.mark.parametrize("chunk", [None, 256])
def test_blocks_are_those_of_the_published_rule(chunk, draw):
    heads, near_heads, left_out = 0, 0, 0

    @FEW
    @given(
        model=MODELS,
        tokens=LENGTHS,
        sizes=st.sampled_from([(1, 1, None), (30, 101, None), (31, 100, None), (33, 103, None)])
        | st.sampled_from([(None, None, budget) for budget in (0.2, 0.4, 0.9)]),
        seed=st.integers(0, 1000),
    )
    def check(model, tokens, sizes, seed):
        nonlocal heads, near_heads, left_out
        given = dict(zip(("vertical", "slash", "budget"), sizes, strict=True))
        policy = make_policy({"name": "minference"} | given, model)
        query, keys = draw(tokens, model, seed)
        start = 0 if chunk is None else (tokens - 1) // chunk * chunk
        place = Place(start, tokens - start, tokens)
        found = policy.select(query[start:], keys, 0, place)
        assert found.shape == (model.heads, place.query_blocks, place.key_blocks)
        for head in range(model.heads):
            kv_head = head // (model.heads // model.kv_heads)
            columns, diagonals = line_masses_of(
                query[start:, head].numpy(), keys[:, kv_head].numpy(), start
            )
            wanted, near = blocks_for(columns, diagonals, sizes, place)
            got = {tuple(pair) for pair in found[head].nonzero().tolist()}
            heads += 1
            near_heads += near
            causal = sum(place.first_block + row + 1 for row in range(place.query_blocks))
            left_out += len(got) < causal
            assert got == wanted or near
            for row in range(place.query_blocks):
                own = place.first_block + row
                assert {(row, 0), (row, own)} <= got
                assert not any(pair[0] == row and pair[1] > own for pair in got)

    check()
    assert heads > 30
    assert near_heads <= max(heads / 50, 1)
    assert left_out > heads / 10


@settings(deadline=None)
@given(
    tokens=st.sampled_from([1, 127, 128, 129, 255, 384, 385, 500]),
    first=st.integers(0, 2),
    lines=st.lists(st.integers(-1, 4).map(lambda block: 128 * block), min_size=2, max_size=4),
    off=st.sampled_from([-1, 0, 1, 2, 57]),
)
def test_lines_at_the_edges_of_blocks(tokens, first, lines, off):
    place = Place(128 * first, tokens, 128 * first + tokens)
    lines = [line + off for line in lines if 0 <= line + off < place.keys]
    verticals, slashes = lines[::2], lines[1::2]
    masks = torch.zeros(2, 1, place.keys, dtype=torch.bool)
    masks[0, 0, verticals] = True
    masks[1, 0, slashes] = True
    found = blocks_of_lines(*masks, place)
    got = {tuple(pair) for pair in found[0].nonzero().tolist()}
    assert got == blocks_with(verticals, slashes, place.start, tokens)


def test_sums_of_lines_add_up(draw):
    model = Model(1, 4, 2, 16)
    query, keys = draw(300, model)
    found = line_mass(query[-64:], keys)
    for lines in found:
        assert lines.shape == (4, 300)
        assert (lines.sum(1) / 2.0**40).tolist() == pytest.approx([64.0] * 4)
    assert (found[0][:, :30] > 0).all()


def test_all_lines_read_every_block(draw, whole):
    model = Model(1, 2, 1, 16)
    query, keys = draw(500, model)
    causal = torch.ones(2, 4, 4, dtype=torch.bool).tril()
    for sizes in ({"vertical": 500}, {"slash": 10**6}, {}):
        policy = make_policy({"name": "minference"} | sizes, model)
        assert torch.equal(whole(policy.select, query, keys), causal)


def test_a_full_budget_is_dense(draw):
    model = Model(1, 2, 1, 16)
    policy = make_policy({"name": "minference", "budget": 1}, model)
    assert policy.select(*draw(500, model), 0, Place(0, 500, 500)) is None


@pytest.mark.parametrize("sizes", [{"vertical": 40, "slash": 110}, {"budget": 0.5}])
def test_a_nan_key_is_read_by_every_head_that_sees_it(sizes, whole):
    model = Model(1, 2, 2, 16)
    policy = make_policy({"name": "minference"} | sizes, model)
    query, keys = torch.ones(640, 2, 16), torch.zeros(640, 2, 16)
    keys[:20] = keys[-50:] = 10.0
    keys[200, 1, 3] = torch.nan
    found = whole(policy.select, query, keys)
    assert found[0].sum() == 12  # the first column of blocks, the diagonal, and the one below it
    assert torch.equal(found[1], torch.ones(5, 5, dtype=torch.bool).tril())


def test_settings_in_force():
    model = Model(2, 4, 2, 16)
    by_default = make_policy({"name": "minference"}, model).describe()
    assert by_default == {"name": "minference", "vertical": 1000, "slash": 6096, "budget": None}
    by_budget = make_policy({"name": "minference", "budget": 0.9}, model).describe()
    assert by_budget == {"name": "minference", "vertical": None, "slash": None, "budget": 0.9}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"vertical": 0}, r"policy\.vertical=0 is below 1"),
        ({"slash": 2.5}, r"policy\.slash=2\.5 is not a whole number"),
        ({"budget": 0}, r"policy\.budget=0: allowed are null and a number above 0 and at most 1"),
        ({"budget": 1.5}, r"policy\.budget=1\.5: allowed"),
        ({"budget": True}, r"policy\.budget=True: allowed"),
        ({"budget": "half"}, r"policy\.budget='half': allowed"),
        ({"budget": math.nan}, r"policy\.budget=nan: allowed"),
        ({"budget": 0.5, "slash": 200}, r"policy\.slash=200 has no effect with .*budget=0\.5"),
        ({"verticals": 3}, r"policy\.verticals is no setting.*Did you mean 'vertical'"),
    ],
)
def test_bad_settings_are_refused(given, message):
    with pytest.raises(ConfigurationError, match=message):
        make_policy({"name": "minference"} | given, Model(2, 4, 2, 16))
