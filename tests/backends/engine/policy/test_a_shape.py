"""A-shape against its rule by tokens, pair by pair."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.engine.policy import BLOCK_TOKENS, Model, Place, make_policy

MODEL = Model(layers=1, heads=2, kv_heads=1, head_dim=8)


def sees(query, key, first, recent):
    return key <= query and (key < first or key > query - recent)


@settings(deadline=None, max_examples=40)
@given(
    tokens=st.sampled_from([1, 127, 128, 129, 383, 384, 385, 700]),
    first=st.sampled_from([1, 127, 128, 129, 300]),
    recent=st.sampled_from([1, 2, 127, 128, 129, 256, 257, 1000]),
    chunk=st.sampled_from([128, 256, None]),
)
def test_a_block_is_read_if_one_of_its_pairs_is(tokens, first, recent, chunk, whole):
    policy = make_policy({"name": "a_shape", "first_tokens": first, "recent_tokens": recent}, MODEL)
    found = whole(policy.select, torch.zeros(tokens, 2, 8), torch.zeros(tokens, 1, 8), chunk)
    assert torch.equal(found[0], found[1])
    blocks = found.shape[1]
    for i in range(blocks):
        # A block that is part full is judged as a whole, so that what follows changes nothing.
        queries = i * BLOCK_TOKENS, (i + 1) * BLOCK_TOKENS - 1
        for j in range(blocks):
            keys = range(j * BLOCK_TOKENS, (j + 1) * BLOCK_TOKENS)
            wanted = any(sees(query, key, first, recent) for query in queries for key in keys)
            assert found[0, i, j].item() == wanted


@pytest.mark.parametrize("place", [Place(0, 1, 1), Place(0, 300, 300), Place(8192, 700, 8892)])
def test_it_is_known_without_queries_and_keys(place):
    policy = make_policy({"name": "a_shape"}, MODEL)
    query, keys = torch.full((place.queries, 2, 8), torch.nan), torch.full((place.keys, 1, 8), 1.0)
    known = policy.known(0, place)
    assert known.shape == (2, place.query_blocks, place.key_blocks)
    assert torch.equal(known, policy.select(query, keys, 0, place))
    if place.start:
        # Positions 8192 - 3967 = 4225 to 8192 begin in block 33.
        assert known[0, 0].nonzero().flatten().tolist() == [0, *range(33, 65)]
