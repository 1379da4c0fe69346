# ruff: noqa: PLR0917  (arguments are fixtures)
"""The estimate's kernels on a GPU: realistic sizes against float64, equal bits, no compilation."""

import math

import pytest
import torch

from backends.engine.policy import BLOCK_TOKENS, Model, Place, estimate, make_policy
from backends.engine.policy.estimate import Rule

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

MODEL = Model(layers=2, heads=32, kv_heads=8, head_dim=128)
DTYPE = torch.bfloat16


@pytest.fixture(scope="module")
def kernels():
    pytest.importorskip("triton")
    from backends.engine.policy import estimate_triton

    assert estimate.find_select_blocks(torch.device("cuda")) is estimate_triton.select_blocks
    return estimate_triton


@pytest.fixture(scope="module")
def data():
    """Make queries and keys on the GPU, whose attention is neither flat nor a single peak."""

    def make(tokens, model=MODEL, seed=0, dtype=DTYPE):
        generator = torch.Generator("cuda").manual_seed(seed)
        made = []
        for heads, factor in ((model.heads, 4), (model.kv_heads, 1)):
            size = tokens, heads, model.head_dim
            made.append(factor * torch.randn(size, generator=generator, device="cuda"))
        return made[0].to(dtype), made[1].to(dtype)

    return make


def rule_for(model, stride, share):
    shares = torch.full((model.heads,), share, dtype=torch.float64, device="cuda")
    return Rule(stride, 1 / (math.sqrt(model.head_dim) * stride), shares)


def reduced(tokens, stride):
    """Lay `stride` tokens side by side: float64 [heads, reduced tokens, stride * head_dim]."""
    missing = -len(tokens) % BLOCK_TOKENS
    tokens = torch.cat((tokens.double(), tokens.new_zeros(missing, *tokens.shape[1:]).double()))
    return tokens.unflatten(0, (-1, stride)).permute(2, 0, 1, 3)


@pytest.mark.parametrize(
    ("tokens", "stride", "model", "dtype"),
    [
        (4096, 8, MODEL, DTYPE),
        (4097, 16, MODEL, DTYPE),
        (3000, 8, MODEL, torch.float16),
        (3000, 8, MODEL, torch.float32),
        (2000, 4, Model(1, 4, 4, 64), DTYPE),
        (2000, 8, Model(1, 28, 4, 80), DTYPE),
        (2000, 16, Model(1, 4, 2, 256), DTYPE),
        (1000, 8, Model(1, 4, 2, 16), torch.float32),
    ],
)
def test_log_sum_exps(tokens, stride, model, dtype, kernels, data):
    query, keys = data(tokens, model, dtype=dtype)
    place, rule = Place(0, tokens, tokens), rule_for(model, stride, 0.9)
    found = kernels.log_sum_exps(query, keys, place, rule)
    assert torch.equal(found[:, :, 0], kernels.log_sum_exps(query, keys, place, rule)[:, :, 0])
    columns = reduced(keys, stride).flatten(2)
    rows = reduced(query, stride).flip(2).flatten(2)
    group = model.heads // model.kv_heads
    row, column = torch.arange(rows.shape[1], device="cuda"), torch.arange(columns.shape[1])
    future = column.cuda() > row[:, None]
    real = row < -(-tokens // stride)
    past = torch.arange(place.key_blocks, device="cuda") <= (row // rule.cells)[:, None]
    for head in range(model.heads):
        scores = rows[head] @ columns[head // group].T * rule.scale
        scores = scores.masked_fill(future, -torch.inf)
        wanted = scores.unflatten(1, (-1, rule.cells)).logsumexp(2)
        error = (found[head] - wanted)[past & real[:, None] & ~wanted.isinf()]
        assert error.abs().max() < 1e-3
        assert found[head, ~real, 0].isneginf().all()


@pytest.mark.parametrize("stride", [8, 16])
def test_blocks_are_those_of_pytorch(stride, kernels, data):
    query, keys = data(10_000)
    place, rule = Place(0, 10_000, 10_000), rule_for(MODEL, stride, 0.8)
    found = kernels.select_blocks(query, keys, place, rule)
    on_cpu = rule._replace(share=rule.share.cpu())
    wanted = estimate.select_blocks(query.cpu(), keys.cpu(), place, on_cpu)
    other_rows = (found.cpu() != wanted).any(-1).float().mean()
    assert other_rows < 0.01  # those in which a block lies at the threshold
    assert 0.2 < wanted.sum() / (32 * 79 * 80 / 2) < 0.95


@pytest.mark.parametrize("stride", [8, 16])
def test_chunks_change_nothing(stride, kernels, data):
    tokens = 20_001
    query, keys = data(tokens)
    rule = rule_for(MODEL, stride, 0.8)
    whole = kernels.select_blocks(query, keys, Place(0, tokens, tokens), rule)
    for chunk in (128, 1024, 8192 + 128):
        for start in range(0, tokens, chunk if chunk > 128 else 5 * 1024):
            stop = min(start + chunk, tokens)
            place = Place(start, stop - start, stop)
            found = kernels.select_blocks(query[start:stop], keys[:stop], place, rule)
            rows = slice(place.first_block, place.first_block + place.query_blocks)
            assert torch.equal(found, whole[:, rows, : place.key_blocks])


@pytest.mark.parametrize(
    "given",
    [{"name": "xattention", "threshold": 0.8}, {"name": "minference", "budget": 0.5}],
    ids=str,
)
def test_the_same_call_gives_the_same_blocks(given, kernels, data):
    policy = make_policy(given, MODEL)
    query, keys = data(9000)
    place = Place(0, 9000, 9000)
    first = policy.select(query, keys, 0, place)
    policy.select(*data(5000, seed=1), 1, Place(0, 5000, 5000))
    assert torch.equal(policy.select(query, keys, 0, place), first)
    assert first.diagonal(dim1=1, dim2=2).all()
    assert first[:, :, 0].all()
    assert not first.triu(1).any()


@pytest.mark.parametrize("given", [{"budget": 0.5}, {"vertical": 100, "slash": 300}], ids=str)
def test_lines_are_those_of_the_cpu(given, data):
    policy = make_policy({"name": "minference"} | given, MODEL)
    query, keys = data(9000)
    place = Place(4096, 9000 - 4096, 9000)
    found = policy.select(query[4096:], keys, 0, place)
    wanted = policy.select(query[4096:].cpu(), keys.cpu(), 0, place)
    assert (found.cpu() != wanted).float().mean() < 0.01


@pytest.mark.parametrize(
    "given",
    [{"name": "xattention"}, {"name": "minference", "budget": 0.5}, {"name": "a_shape"}],
    ids=str,
)
@pytest.mark.parametrize(("start", "queries"), [(0, 128), (0, 20_000), (32_768, 1024)])
def test_scratch_is_no_more_than_said(given, start, queries, kernels, data):
    policy = make_policy(given, MODEL)
    query, keys = data(start + queries)
    place = Place(start, queries, start + queries)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    policy.select(query[start:], keys, 0, place)
    taken = torch.cuda.max_memory_allocated() - before
    rounding = 40 * 512  # the allocator's, for some forty tensors
    assert taken <= policy.scratch_bytes(place.queries, place.keys) + rounding


def test_nothing_is_compiled_while_serving(kernels, data, monkeypatch):
    import triton

    policy = make_policy({"name": "xattention"}, MODEL)
    query, keys = data(20_000)
    policy.select(query[:128], keys[:128], 0, Place(0, 128, 128))
    compiled = []
    monkeypatch.setattr(
        triton.knobs.runtime,
        "jit_post_compile_hook",
        lambda **found: compiled.append(found["repr"]),
    )
    for start, stop in ((0, 1), (0, 17), (128, 1024), (1024, 1025), (0, 20_000), (2048, 19_999)):
        policy.select(query[start:stop], keys[:stop], 0, Place(start, stop - start, stop))
    assert not compiled
