# ruff: noqa: PLR0917  (arguments are fixtures)
"""Triton's kernels on a GPU: realistic sizes in bfloat16 against float64, and equal bits."""

import pytest
import torch

from backends.engine.ops import SPLIT_TOKENS, make_ops, splits_for

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

DTYPE = torch.bfloat16
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER = 32, 8, 128, 4096, 14336
LONG = 131_072


@pytest.fixture(scope="module")
def kernels():
    pytest.importorskip("triton")
    found = make_ops(torch.device("cuda"), DTYPE)
    assert found.name == "triton"
    return found


@pytest.fixture(scope="module")
def data():
    """Make normal random tensors on the GPU."""

    def make(*size, seed=0, dtype=DTYPE):
        generator = torch.Generator("cuda").manual_seed(seed)
        return torch.randn(size, generator=generator, device="cuda").to(dtype)

    return make


@pytest.fixture(scope="module")
def place(scalar):
    return lambda value: scalar(value, "cuda")


def twice(run, *outs):
    """Run twice from the same start; the bits must be equal."""
    start = [out.clone() for out in outs]
    run()
    first = [out.clone() for out in outs]
    for out, before in zip(outs, start, strict=True):
        out.copy_(before)
    run()
    for out, before in zip(outs, first, strict=True):
        assert torch.equal(out.nan_to_num(7), before.nan_to_num(7))


def normalised(rows, weight):
    rows = rows.double()
    return rows / (rows.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", [DTYPE, torch.float16, torch.float32])
@pytest.mark.parametrize("hidden", [256, 576, 3584, HIDDEN, 8192])
def test_rms_norm(dtype, hidden, kernels, data, near):
    rows, weight = data(3000, hidden, dtype=dtype), data(hidden, seed=1, dtype=dtype)
    out = torch.empty_like(rows)
    twice(lambda: kernels.rms_norm(rows, weight, 1e-5, out), out)
    near(out, normalised(rows, weight))
    one = torch.empty_like(rows[:1])
    kernels.rms_norm(rows[77:78], weight, 1e-5, one)
    assert torch.equal(one, out[77:78])


@pytest.mark.parametrize("inner", [1536, INNER, 18944])
def test_silu_mul(inner, kernels, data, near):
    gate_up = data(700, 2 * inner)
    out = torch.empty(700, inner, device="cuda", dtype=DTYPE)
    twice(lambda: kernels.silu_mul(gate_up, out), out)
    gate, up = gate_up.double().chunk(2, -1)
    near(out, gate * torch.sigmoid(gate) * up)


def test_offsets_beyond_32_bits(kernels, data):
    rows = LONG
    gate_up = torch.zeros(rows, 2 * 8704, device="cuda", dtype=DTYPE)  # 2.3e9 cells
    gate_up[-1] = data(2 * 8704)
    out = torch.full((rows, 8704), 7.0, device="cuda", dtype=DTYPE)
    kernels.silu_mul(gate_up, out)
    alone = torch.empty(1, 8704, device="cuda", dtype=DTYPE)
    kernels.silu_mul(gate_up[-1:], alone)
    assert torch.equal(out[-1:], alone)
    assert not out[:-1].any()


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("with_norm", [False, True])
def test_rotate(head_dim, with_norm, kernels, data, near, place):
    rows, start, offset, row = 2000, 100_000, 29_000, 50
    projected = data(rows, HEADS + 2 * KV_HEADS, head_dim)
    norm = data(HEADS + KV_HEADS, head_dim, seed=1) if with_norm else None
    half = torch.arange(head_dim // 2, device="cuda")
    frequencies = 500_000 ** (-half.float() / (head_dim // 2))
    query = torch.empty(rows, HEADS, head_dim, device="cuda", dtype=DTYPE)
    nothing = torch.full(
        (2, rows + 60, 2, KV_HEADS, head_dim), float("nan"), device="cuda", dtype=DTYPE
    )
    key, value = nothing[:, :, 1]

    def run():
        kernels.rotate(
            projected, place(start), offset, frequencies, 1.2, norm, 1e-5, query, key, value,
            place(row),
        )  # fmt: skip

    twice(run, query, key, value)
    heads, values = projected.double().split((HEADS + KV_HEADS, KV_HEADS), 1)
    if norm is not None:
        heads = normalised(heads, norm)
    positions = torch.arange(start + offset, start + offset + rows, device="cuda")
    angles = (positions.float()[:, None] * frequencies).double()[:, None]
    left, right = heads.chunk(2, -1)
    cosines, sines = angles.cos() * 1.2, angles.sin() * 1.2
    turned = torch.cat((left * cosines - right * sines, right * cosines + left * sines), -1)
    near(query, turned[:, :HEADS], 1.5)
    near(key[row : row + rows], turned[:, HEADS:], 1.5)
    assert torch.equal(value[row : row + rows].double(), values)
    for out in (key, value):
        assert out[:row].isnan().all()
        assert out[row + rows :].isnan().all()

    one_key, one_value = torch.empty_like(key[:1]), torch.empty_like(value[:1])
    kernels.rotate(
        projected[900:901], place(start + 900), offset, frequencies, 1.2, norm, 1e-5, None, one_key,
        one_value, None,
    )  # fmt: skip
    assert torch.equal(one_key[0], key[row + 900])


def test_merge_into(kernels, data, near):
    rows = 4000
    output, part = data(rows, HEADS, HEAD_DIM, dtype=torch.float32), data(HEADS, rows, HEAD_DIM)
    part = part.transpose(0, 1)
    sums, part_sums = (data(HEADS, rows, seed=s, dtype=torch.float32).T * 9 for s in (1, 2))
    sums[:5], part_sums[3:9] = -torch.inf, -torch.inf
    both = torch.stack((sums, part_sums)).double()
    total = both.logsumexp(0)
    shares = (both - total).exp().nan_to_num(0)[..., None]
    wanted = output.double() * shares[0] + part.double() * shares[1]
    twice(lambda: kernels.merge_into(output, sums, part, part_sums), output, sums)
    near(output, wanted, 4)
    torch.testing.assert_close(sums.double(), total, rtol=0, atol=1e-5)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(
    ("outputs", "inputs"),
    [(6144, 4096), (4096, 14336), (3584, 18944), (1001, 576), (151_936, 1024)],
)
def test_project_one(outputs, inputs, add, kernels, data, near):
    row, weight, bias = data(1, inputs), data(outputs, inputs, seed=1), data(outputs, seed=2)
    weight /= inputs**0.5
    norm, residual = data(inputs, seed=3), data(1, outputs, seed=4)
    for factors, dtype in ((None, DTYPE), (norm, DTYPE), (norm, torch.float32)):
        out = residual.to(dtype, copy=True)

        def run(out=out, factors=factors):
            kernels.project_one(row, weight, bias, out, norm=factors, epsilon=1e-5, add=add)

        twice(run, out)
        whole = row.double() if factors is None else normalised(row, factors)
        wanted = whole @ weight.double().T + bias.double()
        near(out, wanted + residual.double() if add else wanted, 3)


@pytest.mark.parametrize(("inner", "inputs"), [(INNER, HIDDEN), (18944, 3584), (1537, 576)])
def test_gated_one(inner, inputs, kernels, data, near):
    row, weight, bias = data(1, inputs), data(2 * inner, inputs, seed=1), data(2 * inner, seed=2)
    weight /= inputs**0.5
    norm = data(inputs, seed=3)
    out = torch.empty(1, inner, device="cuda", dtype=DTYPE)
    twice(lambda: kernels.gated_one(row, weight, bias, out, norm=norm, epsilon=1e-5), out)
    gate, up = (normalised(row, norm) @ weight.double().T + bias.double()).chunk(2, -1)
    near(out, gate * torch.sigmoid(gate) * up, 2)


def attended(query, keys, values):
    group = query.shape[0] // keys.shape[1]
    outputs = []
    for head in range(query.shape[0]):
        scores = keys[:, head // group].double() @ query[head].double() * query.shape[1] ** -0.5
        outputs.append(scores.softmax(0) @ values[:, head // group].double())
    return torch.stack(outputs)


@pytest.mark.parametrize("dtype", [DTYPE, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("stop", "shape"),
    [
        (1, (HEADS, KV_HEADS, HEAD_DIM)),
        (SPLIT_TOKENS, (HEADS, KV_HEADS, HEAD_DIM)),
        (33_000, (HEADS, KV_HEADS, HEAD_DIM)),
        (LONG, (HEADS, KV_HEADS, HEAD_DIM)),
        (5000, (28, 4, 80)),
        (5000, (64, 8, 64)),
        (5000, (8, 8, 96)),
        (5000, (16, 4, 256)),
    ],
)
def test_attention(stop, shape, dtype, kernels, data, place):
    heads, kv_heads, head_dim = shape
    query = data(heads, head_dim, dtype=dtype)
    cache = data(stop, 2, kv_heads, head_dim, seed=1, dtype=dtype)
    keys, values = cache[:, 0], cache[:, 1]
    outputs = torch.full((splits_for(stop), heads, head_dim), float("nan"), device="cuda")
    sums = torch.full((splits_for(stop), heads), float("nan"), device="cuda")
    out = torch.empty_like(query)
    scale = head_dim**-0.5

    def whole():
        kernels.attend_splits(
            query, keys, values, 0, place(stop), None, None, None, stop, scale, outputs, sums
        )
        kernels.combine_splits(outputs, sums, place(stop), out)

    twice(whole, outputs, sums, out)
    wanted = attended(query, keys, values)
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    assert (out.double() - wanted).norm() / wanted.norm() < limit
    if stop <= SPLIT_TOKENS:
        return

    bits = outputs.clone(), sums.clone()
    cut, late = splits_for(stop) // 2 * SPLIT_TOKENS, stop - SPLIT_TOKENS - 9
    poison = torch.full_like(cache[:40], float("nan"))
    early, tail = torch.cat((cache[cut:late], poison)), torch.cat((cache[late:], poison))
    for part in (outputs, sums):
        part.fill_(float("nan"))
    kernels.attend_splits(
        query, keys[:cut], values[:cut], 0, place(stop), None, None, None, cut, scale, outputs, sums
    )
    kernels.attend_splits(
        query, early[:, 0], early[:, 1], cut, place(stop), tail[:, 0], tail[:, 1], place(late),
        LONG, scale, outputs, sums,
    )  # fmt: skip
    assert torch.equal(outputs, bits[0])
    assert torch.equal(sums, bits[1])


def test_captured_attention_reads_lengths_when_replayed(kernels, data):
    capacity = 4 * SPLIT_TOKENS
    query = data(HEADS, HEAD_DIM)
    cache = data(capacity, 2, KV_HEADS, HEAD_DIM, seed=1)
    outputs = torch.empty(4, HEADS, HEAD_DIM, device="cuda")
    sums, out = torch.empty(4, HEADS, device="cuda"), torch.empty_like(query)
    stop = torch.tensor([1], device="cuda")

    def run():
        kernels.attend_splits(
            query, cache[:, 0], cache[:, 1], 0, stop, None, None, None, capacity, HEAD_DIM**-0.5,
            outputs, sums,
        )  # fmt: skip
        kernels.combine_splits(outputs, sums, stop, out)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for length in (1, SPLIT_TOKENS, SPLIT_TOKENS + 1, capacity):
        stop.fill_(length)
        graph.replay()
        wanted = attended(query, cache[:length, 0], cache[:length, 1])
        assert (out.double() - wanted).norm() / wanted.norm() < 1e-2


def test_nothing_is_compiled_while_serving(kernels, data, place, monkeypatch):
    import triton

    query, cache = data(HEADS, HEAD_DIM), data(3000, 2, KV_HEADS, HEAD_DIM)
    keys, values = cache[:, 0], cache[:, 1]
    outputs = torch.empty(20, HEADS, HEAD_DIM, device="cuda")
    sums = torch.empty(20, HEADS, device="cuda")
    weight = data(HIDDEN, seed=1)
    frequencies = torch.rand(HEAD_DIM // 2, device="cuda")

    def step(rows, offset, first, max_keys):
        hidden, gate_up = data(rows, HIDDEN), data(rows, 2 * INNER)
        kernels.rms_norm(hidden, weight, 1e-5, torch.empty_like(hidden))
        kernels.silu_mul(gate_up, torch.empty_like(gate_up[:, :INNER].contiguous()))
        projected = data(rows, HEADS + 2 * KV_HEADS, HEAD_DIM)
        kernels.rotate(
            projected, place(3), offset, frequencies, 1.0, None, 1e-5,
            torch.empty_like(projected[:, :HEADS].contiguous()), keys, values, place(0),
        )  # fmt: skip
        output = data(rows, HEADS, HEAD_DIM, dtype=torch.float32)
        part = data(HEADS, rows, HEAD_DIM).transpose(0, 1)
        part_sums = data(HEADS, rows + offset, dtype=torch.float32)[:, offset:].T
        kernels.merge_into(output, data(rows, HEADS, dtype=torch.float32), part, part_sums)
        for tail in ((None, None, None), (keys[offset:], values[offset:], place(max_keys))):
            kernels.attend_splits(
                query, keys[:max_keys], values[:max_keys], first, place(2000), *tail, max_keys, 0.1,
                outputs, sums,
            )  # fmt: skip

    step(16, 16, 0, 512)
    compiled = []
    monkeypatch.setattr(
        triton.knobs.runtime,
        "jit_post_compile_hook",
        lambda **found: compiled.append(found["repr"]),
    )
    for sizes in ((1, 1, 0, 1), (1, 0, 256, 17), (17, 5, 512, 1000), (1000, 1000, 0, 2999)):
        step(*sizes)
    assert not compiled
