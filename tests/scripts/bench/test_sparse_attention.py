"""What is measured is checked before: wrong attention and wrong blocks are not timed."""

import math

import pytest
import torch

from backends.engine.attention import choose_kernel
from backends.engine.policy import BLOCK_TOKENS
from scripts.bench import sparse_attention
from scripts.bench.ceilings import Bench
from scripts.bench.shapes import SHAPES
from scripts.bench.sparse_attention import (
    Alone,
    causal_count,
    checked_rows,
    random_blocks,
    reference,
    rule_in_float64,
    unlike_share,
    xattention,
)
from scripts.bench.structured import FirstLayer
from scripts.bench.timing import Stopwatch

TINY = SHAPES["tiny"]
CPU = torch.device("cpu")
BENCH = Bench(TINY, CPU, torch.float32, Stopwatch(CPU, 0.0001))
TOKENS = 5 * BLOCK_TOKENS + 7


def layer_of(tokens):
    generator = torch.Generator().manual_seed(tokens)

    def rows(heads):
        return 3 * torch.randn(tokens, heads, TINY.head_dim, generator=generator)

    return FirstLayer(rows(TINY.heads), rows(TINY.kv_heads), rows(TINY.kv_heads))


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 5 * 128 + 7])
@pytest.mark.parametrize("share", [0.05, 0.4, 1.0])
def test_random_blocks_are_causal_with_the_diagonal(tokens, share):
    blocks = random_blocks(BENCH, tokens, share)
    count = math.ceil(tokens / BLOCK_TOKENS)
    assert blocks.shape == (TINY.heads, count, count)
    assert not blocks.triu(1).any()
    assert blocks.diagonal(dim1=1, dim2=2).all()
    if share == 1:
        assert int(blocks.sum()) == TINY.heads * causal_count(tokens)


def test_random_blocks_are_as_many_as_asked_for():
    blocks = random_blocks(BENCH, 100 * BLOCK_TOKENS, 0.3)
    assert int(blocks.sum()) / (TINY.heads * causal_count(12800)) == pytest.approx(0.3, abs=0.02)


def test_the_reference_is_plain_attention():
    layer = layer_of(200)
    rows = slice(150, 166)
    got = reference(layer.query[rows], layer.key, layer.value, rows, None)
    group = TINY.heads // TINY.kv_heads
    for row in (150, 165):
        for head in range(TINY.heads):
            keys, values = (one[: row + 1, head // group] for one in (layer.key, layer.value))
            shares = (keys @ layer.query[row, head] / math.sqrt(TINY.head_dim)).softmax(0)
            wanted = (shares @ values).double()
            torch.testing.assert_close(got[row - 150, head], wanted, rtol=1e-4, atol=1e-5)


def test_checked_rows_lie_in_one_block_each_and_reach_the_end():
    for tokens in (1, 5, 128, 129, 1000):
        rows = checked_rows(tokens)
        assert rows[-1].stop == tokens
        assert all(one.start // BLOCK_TOKENS == (one.stop - 1) // BLOCK_TOKENS for one in rows)


def test_attention_alone_is_measured_and_right():
    alone = Alone(BENCH, TOKENS)
    heads = (TINY.heads, TINY.kv_heads, TINY.head_dim)
    dense = alone.dense(choose_kernel("auto", CPU, torch.float32, heads))
    sparse = alone.sparse(0.5)
    for found in (dense, sparse):
        assert found["seconds"] > 0
        assert found["largest_relative_error"] < 1e-4
    assert sparse["kept_share"] < 1


def test_wrong_attention_is_not_timed(monkeypatch):
    make = sparse_attention.make_kernel

    def wrong(bench, rows):
        kernel = make(bench, rows)
        attend = kernel.attend
        monkeypatch.setattr(
            kernel, "attend", lambda q, k, v, blocks, place: 1.1 * attend(q, k, v, blocks, place)
        )
        return kernel

    monkeypatch.setattr(sparse_attention, "make_kernel", wrong)
    with pytest.raises(AssertionError, match="not timed"):
        Alone(BENCH, TOKENS).sparse(0.5)


@pytest.mark.parametrize("stride", [8, 16])
@pytest.mark.parametrize("tokens", [128, 640, TOKENS])
def test_the_policy_and_the_rule_in_float64_agree(stride, tokens):
    layer = layer_of(tokens)
    place = sparse_attention.whole(tokens)
    kept = xattention(BENCH, stride, 0.7).select(layer.query, layer.key, 0, place)
    assert unlike_share(kept, layer, stride, 0.7) == 0
    last = place.query_blocks - 1
    assert rule_in_float64(layer, last, stride, 0.7)[:, [0, last]].all()


def test_wrong_blocks_are_not_timed(monkeypatch):
    layer = layer_of(TOKENS)
    other = layer._replace(query=layer.query.flip(0))
    place = sparse_attention.whole(TOKENS)
    wrong = xattention(BENCH, 8, 0.7).select(other.query, other.key, 0, place)
    assert unlike_share(wrong, layer, 8, 0.7) > sparse_attention.LARGEST_SHARE_UNLIKE

    class Wrong:
        def select(self, query, keys, layer, place):
            return wrong

    monkeypatch.setattr(sparse_attention, "xattention", lambda *_: Wrong())
    with pytest.raises(AssertionError, match="not timed"):
        sparse_attention.estimation(BENCH, layer, 8, 0.7)
