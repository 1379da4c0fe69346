import hashlib
import struct

import pytest
import torch

from backends.digest import trace_logits


def test_digest_is_blake2b_of_the_float32_bytes():
    values = [0.5, -1.25, 3.0, 0.0]
    expected = hashlib.blake2b(struct.pack("<4f", *values), digest_size=8).hexdigest()
    trace = trace_logits(torch.tensor(values))
    assert trace.digest == expected
    assert trace.top2_margin == 2.5
    assert trace.finite


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_are_digested_as_float32(dtype):
    values = torch.tensor([1.5, -2.0, 0.25], dtype=dtype)
    assert trace_logits(values) == trace_logits(values.float())


def test_a_view_with_strides_is_read_in_its_own_order():
    table = torch.arange(12.0).reshape(4, 3)
    assert trace_logits(table[:, 1]) == trace_logits(torch.tensor([1.0, 4.0, 7.0, 10.0]))


def test_one_changed_bit_changes_the_digest():
    row = torch.ones(100)
    other = row.clone()
    other[57] = torch.nextafter(other[57], torch.tensor(2.0))
    assert trace_logits(row).digest != trace_logits(other).digest


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_are_seen(bad):
    row = torch.zeros(5)
    row[3] = bad
    assert not trace_logits(row).finite
