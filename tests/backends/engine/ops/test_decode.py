# ruff: noqa: PLR0917  (arguments are fixtures and drawn values)
"""Operations on one row, against float64."""

import os

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from backends.engine.ops import SPLIT_TOKENS, splits_for

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAN = float("nan")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
FEW = settings(deadline=None, derandomize=True, max_examples=4 if INTERPRETED else 15)
SIZES = st.tuples(st.sampled_from([2, 7, 9]), st.sampled_from([31, 256, 300, 1024, 1100]))


def projected(row, weight, bias, norm, epsilon):
    row = row.double()
    if norm is not None:
        row = row / (row.square().mean() + epsilon).sqrt() * norm.double()
    product = row @ weight.double().T
    return product if bias is None else product + bias.double()


@pytest.fixture(scope="module")
def slack(ops):
    """PyTorch's product of one row takes its input, and gives its output, in the weights' dtype."""
    return 4.0 if ops.name == "torch" else 1.5


@pytest.mark.parametrize("dtype", DTYPES)
@FEW
@given(
    size=SIZES,
    with_bias=st.booleans(),
    with_norm=st.booleans(),
    add=st.booleans(),
    wide_out=st.booleans(),
)
def test_project_one(dtype, size, with_bias, with_norm, add, wide_out, ops, near, randn, slack):
    outputs, inputs = size
    row = randn(1, inputs, dtype=dtype)
    weight = (randn(outputs, inputs, seed=1) / inputs**0.5).to(dtype)
    bias = randn(outputs, seed=2, dtype=dtype) if with_bias else None
    norm = randn(inputs, seed=3, dtype=dtype) if with_norm else None
    residual = randn(1, outputs, seed=4, dtype=torch.float32 if wide_out else dtype)
    out = residual.clone() if add else torch.full_like(residual, NAN)
    ops.project_one(row, weight, bias, out, norm=norm, epsilon=1e-5, add=add)
    wanted = projected(row, weight, bias, norm, 1e-5)
    if add:
        wanted = wanted + residual.double()
    if wide_out and ops.name == "torch":
        out = out.to(dtype)
    near(out, wanted, slack)


@pytest.mark.parametrize("dtype", DTYPES)
@FEW
@given(size=SIZES, with_bias=st.booleans(), with_norm=st.booleans())
def test_gated_one(dtype, size, with_bias, with_norm, ops, near, randn, slack):
    outputs, inputs = size
    row = randn(1, inputs, dtype=dtype)
    weight = (randn(2 * outputs, inputs, seed=1) / inputs**0.5).to(dtype)
    bias = randn(2 * outputs, seed=2, dtype=dtype) if with_bias else None
    norm = randn(inputs, seed=3, dtype=dtype) if with_norm else None
    out = torch.full((1, outputs), NAN, dtype=dtype)
    ops.gated_one(row, weight, bias, out, norm=norm, epsilon=1e-5)
    gate, up = projected(row, weight, bias, norm, 1e-5).chunk(2, -1)
    near(out, gate * torch.sigmoid(gate) * up, 2 * slack)


def attended(query, keys, values, scale):
    """Attend in float64; returns the output and the log-sum-exp."""
    group = query.shape[0] // keys.shape[1]
    keys, values = (part.double().repeat_interleave(group, 1) for part in (keys, values))
    scores = torch.einsum("hd,nhd->hn", query.double(), keys) * scale
    return torch.einsum("hn,nhd->hd", scores.softmax(-1), values), scores.logsumexp(-1)


class Sequence:
    """A query and its keys and values, and what comes of them."""

    def __init__(self, ops, randn, scalar, dtype, stop, heads, kv_heads, head_dim):
        self.ops, self._scalar = ops, scalar
        self.stop, self.shape, self.dtype = stop, (heads, kv_heads, head_dim), dtype
        self.query = randn(heads, head_dim, dtype=dtype)
        self.keys, self.values = (
            randn(stop, kv_heads, head_dim, seed=seed, dtype=dtype) for seed in (1, 2)
        )
        self.scale = head_dim**-0.5
        self.partial_output = torch.full((splits_for(stop) + 2, heads, head_dim), NAN)
        self.partial_log_sum_exp = torch.full((splits_for(stop) + 2, heads), NAN)

    def lay(self, rows, begin, end, spare):
        """Lay positions `begin` to `end` out amid NaN, with a row stride of its own."""
        _, kv_heads, head_dim = self.shape
        buffer = torch.full((end - begin + spare, 2, kv_heads, head_dim), NAN, dtype=self.dtype)
        buffer[: end - begin, 1] = rows[begin:end]
        return buffer[:, 1]

    def attend(self, first, last, tail_start=None, spare=0, max_keys=None):
        """Attend to positions `first` to `last`, with keys only as far as the tail's start."""
        end = last if tail_start is None else min(max(tail_start, first), last)
        tails = (None, None, None)
        if tail_start is not None:
            tails = (
                self.lay(self.keys, tail_start, self.stop, spare),
                self.lay(self.values, tail_start, self.stop, spare),
                self._scalar(tail_start),
            )
        self.ops.attend_splits(
            self.query,
            self.lay(self.keys, first, end, spare),
            self.lay(self.values, first, end, spare),
            first,
            self._scalar(self.stop),
            *tails,
            last - first if max_keys is None else max_keys,
            self.scale,
            self.partial_output,
            self.partial_log_sum_exp,
        )

    def combine(self):
        """Merge the splits."""
        heads, _, head_dim = self.shape
        out = torch.full((heads, head_dim), NAN, dtype=self.dtype)
        self.ops.combine_splits(
            self.partial_output, self.partial_log_sum_exp, self._scalar(self.stop), out
        )
        return out

    def check(self, near):
        """Compare every split, and all together, with float64."""
        parts = (self.partial_output, self.partial_log_sum_exp)
        splits = splits_for(self.stop)
        for split in range(splits):
            span = slice(split * SPLIT_TOKENS, (split + 1) * SPLIT_TOKENS)
            output, log_sum_exp = attended(
                self.query, self.keys[span], self.values[span], self.scale
            )
            error = (parts[0][split].double() - output).norm() / output.norm()
            assert error < (1e-5 if self.dtype == torch.float32 else 1e-2)
            torch.testing.assert_close(parts[1][split].double(), log_sum_exp, rtol=0, atol=1e-5)
        assert all(part[splits:].isnan().all() for part in parts)
        wanted, _ = attended(self.query, self.keys, self.values, self.scale)
        near(self.combine(), wanted, 4)


@pytest.fixture(scope="module")
def sequence(ops, randn, scalar):
    def make(dtype, stop, heads=4, kv_heads=2, head_dim=16):
        if ops.name == "triton" and dtype == torch.bfloat16:
            pytest.skip("Triton's interpreter multiplies the bits of bfloat16 as integers")
        return Sequence(ops, randn, scalar, dtype, stop, heads, kv_heads, head_dim)

    return make


SHAPES = [(4, 2, 64), (1, 1, 16), (6, 2, 80), (7, 1, 96), (20, 1, 32), (2, 2, 256)]
CASES = [(dtype, shape) for dtype in DTYPES for shape in SHAPES[: 6 if dtype.itemsize == 2 else 2]]


@pytest.mark.parametrize(("dtype", "shape"), CASES)
def test_attention_in_one_call(dtype, shape, sequence, near):
    for stop in (1, SPLIT_TOKENS + 17):
        case = sequence(dtype, stop, *shape)
        case.attend(0, stop, spare=3)
        case.check(near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@settings(FEW, phases=[Phase.explicit] if INTERPRETED else tuple(Phase))
@given(
    stop=st.integers(1, 3 * SPLIT_TOKENS),
    cut=st.integers(0, 2),
    tail=st.integers(0, 400),
    spare=st.integers(0, 3),
)
@example(stop=SPLIT_TOKENS, cut=0, tail=0, spare=0)  # ends where a split ends
@example(stop=2 * SPLIT_TOKENS, cut=1, tail=0, spare=1)
@example(stop=2 * SPLIT_TOKENS, cut=1, tail=1, spare=1)
@example(stop=SPLIT_TOKENS + 1, cut=1, tail=1, spare=0)  # the tail is the last split
@example(stop=SPLIT_TOKENS + 40, cut=1, tail=100, spare=2)  # the tail begins before the call
@example(stop=SPLIT_TOKENS + 40, cut=0, tail=100, spare=2)  # the tail crosses a split
@example(stop=300, cut=0, tail=300, spare=0)  # nothing but the tail
@example(stop=1, cut=0, tail=1, spare=0)
def test_bits_depend_on_positions_alone(dtype, stop, cut, tail, spare, sequence, near):
    heads = (2, 1) if INTERPRETED else (4, 2)
    whole = sequence(dtype, stop, *heads)
    whole.attend(0, stop)
    whole.check(near)

    cut_at = cut * SPLIT_TOKENS
    if cut_at >= stop:
        cut_at = 0
    pieces = sequence(dtype, stop, *heads)
    if cut_at:
        pieces.attend(0, cut_at, spare=spare)
    pieces.attend(cut_at, stop, tail_start=stop - min(tail, stop), spare=spare)
    splits = splits_for(stop)
    assert torch.equal(pieces.partial_output[:splits], whole.partial_output[:splits])
    assert torch.equal(pieces.partial_log_sum_exp[:splits], whole.partial_log_sum_exp[:splits])
    assert torch.equal(pieces.combine(), whole.combine())


def test_a_bound_far_above_the_length(sequence, near):
    case = sequence(torch.float32, 40)
    case.attend(0, 40, spare=2, max_keys=5 * SPLIT_TOKENS)
    case.check(near)


def test_a_span_ends_at_its_bound(sequence, near):
    case = sequence(torch.float32, 2 * SPLIT_TOKENS + 9)
    case.attend(0, 2 * SPLIT_TOKENS + 9, max_keys=SPLIT_TOKENS)
    assert not case.partial_output[0].isnan().any()
    assert case.partial_output[1:].isnan().all()
    case.attend(SPLIT_TOKENS, 2 * SPLIT_TOKENS + 9)
    case.check(near)


@pytest.mark.parametrize("held", [200, SPLIT_TOKENS])
def test_keys_beyond_the_tensors_are_not_read(held, sequence, near):
    case = sequence(torch.float32, SPLIT_TOKENS + 44)
    wanted, _ = attended(case.query, case.keys[:held], case.values[:held], case.scale)
    keys, values = (
        rows.index_fill(0, torch.arange(held, SPLIT_TOKENS + 44), NAN)[:held]
        for rows in (case.keys, case.values)
    )
    case.ops.attend_splits(
        case.query, keys, values, 0, torch.tensor([case.stop]), None, None, None, case.stop,
        case.scale, case.partial_output, case.partial_log_sum_exp,
    )  # fmt: skip
    near(case.combine(), wanted, 4)


def test_large_scores(sequence, near):
    case = sequence(torch.float32, 300)
    case.scale = 40.0
    case.attend(0, 300)
    case.combine()
    wanted, _ = attended(case.query, case.keys, case.values, case.scale)
    near(case.combine(), wanted, 30)


def test_nan_that_is_read_shows(sequence):
    case = sequence(torch.float32, 300)
    case.keys[270, 0] = NAN
    case.attend(0, 300)
    out = case.combine()
    assert out[:2].isnan().all()  # the query heads of that key head
    assert not out[2:].isnan().any()


def test_a_span_begins_where_a_split_begins(sequence):
    case = sequence(torch.float32, 300)
    with pytest.raises(ValueError, match="from position 7, which is inside a split of"):
        case.attend(7, 300)


def test_more_splits_than_one_step_merges(ops, near, randn, scalar):
    splits, stop = 1100, 1100 * SPLIT_TOKENS - 3
    outputs, sums = randn(splits + 1, 2, 20), randn(splits + 1, 2, seed=1) * 3
    outputs[splits], sums[splits] = NAN, NAN
    out = torch.empty(2, 20)
    ops.combine_splits(outputs, sums, scalar(stop), out)
    shares = sums[:splits].double().softmax(0).unsqueeze(-1)
    near(out, (outputs[:splits].double() * shares).sum(0), 2)


@settings(deadline=None)
@given(tokens=st.integers(0, 10**7))
def test_splits_for(tokens):
    assert splits_for(tokens) == len(range(0, tokens, SPLIT_TOKENS))
