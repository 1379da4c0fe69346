"""Attention to chosen blocks, against float64 in the most direct way, and FlexAttention's mask."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import ConfigurationError
from backends.engine.block_attention import (
    FlexAttention,
    MaskedAttention,
    block_buffers,
    check_head_dim,
    make_block_kernel,
)
from backends.engine.policy import BLOCK_TOKENS, Place, causal_blocks
from backends.engine.sparse import causal_count, check_chunk

NAN = float("nan")
CONTEXT = 6 * BLOCK_TOKENS


def random_blocks(place, heads, share, generator):
    """Keep a block with this probability, and always the one of the same positions."""
    causal = causal_blocks(place)
    kept = torch.rand(heads, *causal.shape, generator=generator) < share
    rows = torch.arange(place.query_blocks)
    kept[:, rows, rows + place.first_block] = True
    return kept & causal


def random_rows(place, shape, generator, unread=None):
    """Queries in whole blocks, keys and values as long as the context; NaN where nobody reads."""
    heads, kv_heads, head_dim = shape
    query = torch.randn(place.query_blocks * BLOCK_TOKENS, heads, head_dim, generator=generator)
    keys, values = (torch.randn(CONTEXT, kv_heads, head_dim, generator=generator) for _ in "kv")
    for rows in (keys, values):
        rows[place.keys : place.key_blocks * BLOCK_TOKENS] = 0
        rows[place.key_blocks * BLOCK_TOKENS :] = NAN
        for block in unread if unread is not None else ():
            rows[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS] = NAN
    return query, keys, values


def in_float64(query, keys, values, blocks, position):
    """One query [heads, head_dim], over the keys of each head's blocks up to its own position."""
    group, found = query.shape[0] // keys.shape[1], []
    for head, own in enumerate(blocks):
        seen = [key for key in range(position + 1) if own[key // BLOCK_TOKENS]]
        own_keys, own_values = (rows[seen, head // group].double() for rows in (keys, values))
        scores = own_keys @ query[head].double() / math.sqrt(query.shape[1])
        found.append(scores.softmax(0) @ own_values)
    return torch.stack(found)


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_masked_attention_is_the_rule_in_float64(data):
    """Rows are sampled: what is not the last of a chunk is checked where blocks begin and end."""
    start = data.draw(st.integers(0, 3)) * BLOCK_TOKENS
    queries = data.draw(st.sampled_from([2, 64, 127, 128, 129, 255, 256]))
    kv_heads, group = data.draw(st.sampled_from([(1, 1), (2, 2), (1, 3)]))
    shape = kv_heads * group, kv_heads, data.draw(st.sampled_from([8, 20]))
    place = Place(start, queries, start + queries)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    blocks = random_blocks(place, shape[0], data.draw(st.sampled_from([0.0, 0.3, 1.0])), generator)
    unread = (~blocks.any(0).any(0)).nonzero()[:, 0].tolist()
    query, keys, values = random_rows(place, shape, generator, unread)
    out = torch.full_like(query, NAN)
    got = MaskedAttention(out).attend(query, keys, values, blocks, place)[:queries]
    for row in sorted({0, 1, 63, 126, 127, 128, queries - 2, queries - 1} & set(range(queries))):
        of_row = blocks[:, row // BLOCK_TOKENS].tolist()
        wanted = in_float64(query[row], keys, values, of_row, start + row)
        torch.testing.assert_close(got[row].double(), wanted, rtol=1e-5, atol=1e-5)


def test_blocks_of_queries_that_read_nothing_are_left_out():
    place, shape = Place(128, 256, 384), (2, 1, 8)
    generator = torch.Generator().manual_seed(1)
    query, keys, values = random_rows(place, shape, generator)
    blocks = random_blocks(place, 2, 0.5, generator)
    whole = MaskedAttention(torch.full_like(query, NAN)).attend(query, keys, values, blocks, place)
    last = blocks.clone()
    last[:, 0] = False
    alone = MaskedAttention(torch.full_like(query, NAN)).attend(query, keys, values, last, place)
    assert alone[:128].isnan().all()
    assert torch.equal(alone[128:], whole[128:])


def test_a_block_of_queries_has_the_same_bits_however_the_prompt_is_cut():
    generator = torch.Generator().manual_seed(2)
    whole = Place(0, 600, 600)
    query, keys, values = random_rows(whole, (4, 2, 16), generator)
    blocks = random_blocks(whole, 4, 0.4, generator)
    attention = MaskedAttention(torch.empty_like(query))
    wanted = attention.attend(query, keys, values, blocks, whole)[:600].clone()
    for start, stop in ((0, 256), (256, 512), (512, 600)):
        place = Place(start, stop - start, stop)
        rows = slice(place.first_block, place.first_block + place.query_blocks)
        part = blocks[:, rows, : place.key_blocks]
        got = attention.attend(query[start:], keys, values, part, place)[: stop - start]
        assert torch.equal(got, wanted[start:stop])


@pytest.mark.parametrize("last", [False, True])
def test_causal_blocks_are_counted(last):
    for start in range(0, 5 * BLOCK_TOKENS, BLOCK_TOKENS):
        for queries in (1, 127, 128, 129, 500):
            place = Place(start, queries, start + queries)
            rows = causal_blocks(place)[-1:] if last else causal_blocks(place)
            assert causal_count(place, last=last) == int(rows.sum())


# FlexAttention's mask. Without a compiler the lists of blocks are ignored, so they are read here.


def flex_tensors(heads, query_rows, key_rows):
    buffers = block_buffers(torch.device("cuda"), heads, query_rows, key_rows)
    return {one.name: torch.full(one.shape, 7, dtype=one.dtype) for one in buffers}


def lists(flex, kind):
    """The blocks that the kernel would read, a list for each head and block of queries."""
    mask = flex.mask(CONTEXT)
    counts = mask.kv_num_blocks if kind == "partial" else mask.full_kv_num_blocks
    indices = mask.kv_indices if kind == "partial" else mask.full_kv_indices
    return [
        [indices[0, head, row, : counts[0, head, row]].tolist() for row in range(counts.shape[2])]
        for head in range(counts.shape[1])
    ]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_mask_lists_the_kept_blocks_whatever_was_laid_before(data):
    heads, query_rows = 3, 3 * BLOCK_TOKENS
    flex = FlexAttention(flex_tensors(heads, query_rows, CONTEXT), compiled=False)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    for _ in range(3):
        start = data.draw(st.integers(0, 3)) * BLOCK_TOKENS
        queries = data.draw(st.integers(1, query_rows))
        place = Place(start, queries, start + queries)
        share = data.draw(st.sampled_from([0.0, 0.4, 1.0]))
        blocks = random_blocks(place, heads, share, generator)
        if data.draw(st.booleans()):
            blocks[:, :-1] = False
        flex.lay(blocks, place)
        partial, full = lists(flex, "partial"), lists(flex, "full")
        for head in range(heads):
            for row in range(query_rows // BLOCK_TOKENS):
                kept = []
                if row < place.query_blocks:
                    kept = blocks[head, row].nonzero()[:, 0].tolist()
                own = [place.first_block + row]
                assert partial[head][row] == [one for one in own if one in kept]
                assert full[head][row] == [one for one in kept if [one] != own]  # and ascending
        dense = flex.mask(CONTEXT).to_dense()[0].bool()
        assert torch.equal(dense[:, : place.query_blocks, : place.key_blocks], blocks)
        assert int(dense.sum()) == int(blocks.sum())


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("shape", [(4, 2, 16), (2, 2, 20)])
def test_flex_attention_with_all_blocks_is_causal_attention(shape):
    heads = shape[0]
    flex = FlexAttention(flex_tensors(heads, 2 * BLOCK_TOKENS, CONTEXT), compiled=False)
    generator = torch.Generator().manual_seed(4)
    for start, queries in ((0, 256), (256, 130), (512, 256)):
        place = Place(start, queries, start + queries)
        blocks = causal_blocks(place).expand(heads, -1, -1)
        query, keys, values = random_rows(Place(0, 256, CONTEXT), shape, generator)
        got = flex.attend(query, keys, values, blocks, place)
        assert got.is_contiguous()
        wanted = MaskedAttention(torch.empty_like(query)).attend(query, keys, values, blocks, place)
        torch.testing.assert_close(got[:queries], wanted[:queries], rtol=1e-5, atol=1e-5)


@pytest.mark.slow  # a C++ compiler takes half a minute
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_flex_attention_is_masked_attention_and_compiled_once(dtype):
    shape, rows = (4, 2, 16), 3 * BLOCK_TOKENS
    generator = torch.Generator().manual_seed(5)
    flex = FlexAttention(flex_tensors(4, rows, CONTEXT))
    masked = MaskedAttention(torch.empty(rows, 4, 16, dtype=dtype))
    whole = random_rows(Place(0, rows, CONTEXT), shape, generator)
    query, keys, values = (one.to(dtype) for one in whole)
    with torch.inference_mode():
        flex.warm_up(query, keys, values)
        assert flex.compile_seconds > 0
        with torch._dynamo.config.patch(error_on_recompile=True):
            for start in (0, 128, 384):
                for queries in (1, 127, 128, 129, 300, 384):
                    place = Place(start, queries, start + queries)
                    blocks = random_blocks(place, 4, 0.4, generator)
                    got = flex.attend(query, keys, values, blocks, place)[:queries]
                    wanted = masked.attend(query, keys, values, blocks, place)[:queries]
                    limit = 1e-5 if dtype == torch.float32 else 2e-2
                    torch.testing.assert_close(got, wanted, rtol=limit, atol=limit)
        for _ in range(torch._dynamo.config.recompile_limit + 1):  # other engines of the process
            FlexAttention(flex_tensors(4, rows, CONTEXT)).warm_up(query, keys, values)


def test_the_kernel_follows_from_the_device():
    out = torch.empty(128, 2, 16)
    assert make_block_kernel(torch.device("cpu"), {}, out).name == "masked"
    tensors = flex_tensors(2, 128, CONTEXT)
    assert make_block_kernel(torch.device("cuda"), tensors, out).name == "flex"
    assert block_buffers(torch.device("cpu"), 2, 128, CONTEXT) == ()


# Bad input.


@pytest.mark.parametrize(
    ("chunk", "context", "advice"),
    [(100, 1000, "use 128."), (1000, 4096, "use 896 or 1024."), (129, 130, "use 128 or 256.")],
)
def test_chunks_that_begin_within_a_block_are_refused(chunk, context, advice):
    with pytest.raises(ConfigurationError, match=f"chunk_tokens={chunk}.*multiple") as error:
        check_chunk(chunk, context, "xattention")
    assert str(error.value).endswith(advice)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("chunk", "context"), [(None, 999), (128, 999), (1000, 1000), (999, 500)])
def test_chunks_that_begin_with_a_block_are_not(chunk, context):
    check_chunk(chunk, context, "xattention")


def test_heads_that_flex_attention_cannot_take_are_refused():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    for head_dim in (1, 8, 15):
        check_head_dim(cpu, head_dim, "xattention")
        with pytest.raises(ConfigurationError, match=f"heads are {head_dim} wide.*16 or more"):
            check_head_dim(gpu, head_dim, "xattention")
    for head_dim in (16, 20, 64, 128, 256):
        check_head_dim(gpu, head_dim, "xattention")
