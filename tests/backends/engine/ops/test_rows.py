# ruff: noqa: PLR0917  (arguments are fixtures and drawn values)
"""Operations on any number of rows, against float64."""

import math
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAN = float("nan")
FEW = settings(
    deadline=None,
    derandomize=True,
    max_examples=4 if os.environ.get("TRITON_INTERPRET") == "1" else 15,
)


def normalised(rows, weight, epsilon):
    rows = rows.double()
    return rows / (rows.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@FEW
@given(rows=st.integers(1, 5), hidden=st.sampled_from([1, 2, 63, 256, 257, 300, 1536]))
def test_rms_norm(dtype, rows, hidden, ops, near, randn):
    values, weight = randn(rows, hidden, dtype=dtype), randn(hidden, seed=1, dtype=dtype)
    out = torch.full_like(values, NAN)
    ops.rms_norm(values, weight, 1e-5, out)
    near(out, normalised(values, weight, 1e-5))


def test_rms_norm_of_strided_rows_and_in_place(ops, near, randn):
    wide, weight = randn(4, 2, 96), randn(96, seed=1)
    wanted = normalised(wide[:, 1], weight, 0.5)
    other = wide[:, 0].clone()
    ops.rms_norm(wide[:, 1], weight, 0.5, wide[:, 1])
    near(wide[:, 1], wanted)
    assert torch.equal(wide[:, 0], other)


def test_rms_norm_rounds_once(ops, randn):
    if ops.name == "triton":
        pytest.skip("Triton's interpreter cuts bfloat16 off instead of rounding")
    values, weight = (randn(n, 512, seed=n, dtype=torch.bfloat16) for n in (8, 1))
    out = torch.empty_like(values)
    ops.rms_norm(values, weight[0], 1e-5, out)
    wanted = normalised(values, weight[0], 1e-5).bfloat16()
    assert (out != wanted).float().mean() < 0.002  # where float64 is next to a tie


@pytest.mark.parametrize("dtype", DTYPES)
@FEW
@given(rows=st.integers(1, 4), inner=st.sampled_from([1, 80, 127, 2048, 2500]))
def test_silu_mul(dtype, rows, inner, ops, near, randn):
    gate_up = randn(rows, 2 * inner, dtype=dtype) * 4
    out = torch.full((rows, inner), NAN, dtype=dtype)
    ops.silu_mul(gate_up, out)
    gate, up = gate_up.double().chunk(2, -1)
    near(out, gate * torch.sigmoid(gate) * up)


def test_silu_mul_of_extremes(ops):
    gate_up = torch.tensor([[-1e4, -100.0, 0.0, 1e4, 1.0, 2.0, 3.0, 4.0]])
    out = torch.empty(1, 4)
    ops.silu_mul(gate_up, out)
    torch.testing.assert_close(out, torch.tensor([[0.0, 0.0, 0.0, 4e4]]))


def rotated(heads, positions, frequencies, scaling):
    """Rotate by complex multiplication; [rows, heads, head_dim]."""
    half = heads.shape[-1] // 2
    angles = (positions.float()[:, None] * frequencies).double()[:, None]
    pairs = torch.complex(heads[..., :half], heads[..., half:])
    turned = pairs * torch.polar(torch.full_like(angles, scaling), angles)
    return torch.cat((turned.real, turned.imag), -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_norm", [False, True])
@FEW
@given(
    rows=st.integers(1, 3),
    heads=st.sampled_from([(1, 1), (4, 2), (18, 1), (9, 9)]),
    head_dim=st.sampled_from([2, 16, 64, 80, 96, 256]),
    start=st.sampled_from([0, 1, 300, 131_000]),
    offset=st.sampled_from([0, 1, 4096]),
    row=st.none() | st.integers(0, 3),
    scaling=st.sampled_from([1.0, 1.25]),
)
def test_rotate(
    dtype, with_norm, rows, heads, head_dim, start, offset, row, scaling, ops, near, randn, scalar
):
    heads, kv_heads = heads
    projected = randn(rows, heads + 2 * kv_heads, head_dim, dtype=dtype)
    norm = randn(heads + kv_heads, head_dim, seed=1, dtype=dtype) if with_norm else None
    frequencies = 10_000 ** -torch.linspace(0, 1, head_dim // 2)
    query_out = torch.full((rows, heads, head_dim), NAN, dtype=dtype)
    key_out, value_out = torch.full((2, 9, 2, kv_heads, head_dim), NAN, dtype=dtype)[:, :, 1]
    ops.rotate(
        projected,
        scalar(start),
        offset,
        frequencies,
        scaling,
        norm,
        1e-6,
        query_out,
        key_out,
        value_out,
        None if row is None else scalar(row),
    )
    turned, values = projected.double().split((heads + kv_heads, kv_heads), 1)
    if with_norm:
        turned = normalised(turned, norm, 1e-6)
    positions = start + offset + torch.arange(rows)
    queries, keys = rotated(turned, positions, frequencies, scaling).split((heads, kv_heads), 1)
    near(query_out, queries, 1.5)
    first = row or 0
    near(key_out[first : first + rows], keys, 1.5)
    assert torch.equal(value_out[first : first + rows].double(), values)
    for out in (key_out, value_out):
        assert out[:first].isnan().all()
        assert out[first + rows :].isnan().all()

    again = torch.full_like(key_out, NAN)
    ops.rotate(
        projected,
        scalar(0),
        start + offset,
        frequencies,
        scaling,
        norm,
        1e-6,
        None,
        again,
        torch.empty_like(value_out),
        None,
    )
    assert torch.equal(again[:rows], key_out[first : first + rows]), "depends on more than position"


def merged(*parts):
    """Merge (output, log-sum-exp) pairs in float64."""
    outputs = torch.stack([output.double() for output, _ in parts])
    sums = torch.stack([part.double() for _, part in parts])
    total = sums.logsumexp(0)
    shares = (sums - total).exp().nan_to_num(0).unsqueeze(-1)
    return (outputs.nan_to_num(0) * shares).sum(0), total


@pytest.mark.parametrize("dtype", DTYPES)
@FEW
@given(
    rows=st.integers(1, 5),
    heads=st.integers(1, 5),
    head_dim=st.sampled_from([16, 80, 128]),
    transposed=st.booleans(),
    seed=st.integers(0, 5),
)
def test_merge_into(dtype, rows, heads, head_dim, transposed, seed, ops, near, randn):
    output = randn(rows, heads, head_dim, seed=seed)
    part = randn(heads, rows, head_dim, seed=seed + 1, dtype=dtype).transpose(0, 1)
    sums, part_sums = (randn(heads, rows + 3, seed=seed + n)[:, 1 : rows + 1].T * 9 for n in (2, 3))
    if not transposed:
        part, sums, part_sums = part.contiguous(), sums.contiguous(), part_sums.contiguous()
    part_before = part.clone()
    wanted = merged((output, sums), (part, part_sums))
    ops.merge_into(output, sums, part, part_sums)
    near(output, wanted[0])
    torch.testing.assert_close(sums.double(), wanted[1], rtol=0, atol=4e-6)
    assert torch.equal(part, part_before)


@pytest.mark.parametrize("poisoned", [False, True])
def test_merge_with_nothing(poisoned, ops, near, randn):
    empty = -math.inf
    sums = torch.tensor([[0.5, empty, empty, 1.0]])
    part_sums = torch.tensor([[empty, 0.25, empty, -200.0]])
    output, part = randn(1, 4, 16), randn(1, 4, 16, seed=1)
    if poisoned:
        output.masked_fill_(sums.isneginf()[..., None], NAN)
        part.masked_fill_(part_sums.isneginf()[..., None], NAN)
    wanted = torch.stack((output[0, 0], part[0, 1], torch.zeros(16), output[0, 3]))
    if not poisoned:
        wanted[2] = 0
    ops.merge_into(output, sums, part, part_sums)
    assert sums.tolist() == [[0.5, 0.25, empty, 1.0]]
    near(output[0], wanted.double())


def test_rows_do_not_know_of_each_other(ops, randn):
    rows, gate_up = randn(7, 300), randn(7, 600)
    weight = randn(300, seed=1)
    whole, part = torch.empty(7, 300), torch.empty(2, 300)
    ops.rms_norm(rows, weight, 1e-5, whole)
    ops.rms_norm(rows[3:5], weight, 1e-5, part)
    assert torch.equal(whole[3:5], part)
    ops.silu_mul(gate_up, whole)
    ops.silu_mul(gate_up[3:5], part)
    assert torch.equal(whole[3:5], part)
