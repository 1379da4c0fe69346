"""The lists of blocks for FlexAttention against a plain reading of them.

In a process with TRITON_INTERPRET=1, which test_interpreted.py starts, Triton's kernel makes them.
"""

import os

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.engine import block_mask
from backends.engine.block_mask import BlockLists, find_lay_blocks
from backends.engine.policy import BLOCK_TOKENS, Place, causal_blocks

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
UNTOUCHED = 77


def lay_blocks(*given):
    """The function under test."""
    if not INTERPRETED:
        return block_mask.lay_blocks(*given)
    from backends.engine import block_mask_triton

    return block_mask_triton.lay_blocks(*given)


def empty_lists(heads, rows, room):
    kinds = (1, heads, rows, room), (1, heads, rows)
    return BlockLists(
        *(torch.full(shape, UNTOUCHED, dtype=torch.int32) for shape in (*kinds, *kinds))
    )


def check(blocks, place, lists):
    heads, rows, room = lists.full.shape[1:]
    for head in range(heads):
        for row in range(rows):
            at = 0, head, row
            if row >= place.query_blocks:
                assert lists.partial_counts[at] == lists.full_counts[at] == 0
                continue
            own = place.first_block + row
            kept = blocks[head, row].nonzero()[:, 0].tolist()
            assert lists.partial_counts[at] == (own in kept)
            assert lists.partial[at][0] == own
            others = [block for block in kept if block != own]
            assert lists.full_counts[at] == len(others)
            left = [block for block in range(place.key_blocks) if block not in others]
            wanted = others + left + [UNTOUCHED] * (room - place.key_blocks)
            assert lists.full[at].tolist() == wanted


@settings(max_examples=6 if INTERPRETED else 60, deadline=None)
@given(data=st.data())
def test_the_lists_are_those_of_the_kept_blocks(data):
    heads, rows = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6))
    first = data.draw(st.integers(0, 4))
    queries = data.draw(st.integers(1, rows * BLOCK_TOKENS))
    place = Place(first * BLOCK_TOKENS, queries, first * BLOCK_TOKENS + queries)
    lists = empty_lists(heads, rows, place.key_blocks + data.draw(st.integers(0, 3)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    share = data.draw(st.sampled_from([0.0, 0.3, 1.0]))
    one = causal_blocks(place)
    blocks = (torch.rand(heads, *one.shape, generator=generator) < share) & one
    if data.draw(st.booleans()):  # as a policy gives them whose heads share memory
        blocks = blocks[:1].expand(heads, -1, -1)
    lay_blocks(blocks, place, lists)
    check(blocks, place, lists)


def test_slices_of_rows_and_of_columns(monkeypatch):
    """More rows and columns than are done at once, and blocks that are part of a larger tensor."""
    monkeypatch.setattr(block_mask, "MASK_ROWS", 2)
    heads, first, rows = 2, 600, 3
    place = Place(first * BLOCK_TOKENS, 300, first * BLOCK_TOKENS + 300)
    generator = torch.Generator().manual_seed(1)
    larger = torch.rand(heads, rows + 2, place.key_blocks + 1, generator=generator) < 0.5
    blocks = larger[:, 1 : rows + 1, : place.key_blocks] & causal_blocks(place)
    larger[:, 1 : rows + 1, : place.key_blocks] = blocks
    lists = empty_lists(heads, rows + 1, place.key_blocks)
    lay_blocks(larger[:, 1 : rows + 1, : place.key_blocks], place, lists)
    check(blocks, place, lists)


def test_a_cpu_lays_with_pytorch():
    assert find_lay_blocks(torch.device("cpu")) is block_mask.lay_blocks
