import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from backends.base import ConfigurationError
from backends.engine import attention
from backends.engine.attention import AUTO_ORDER, KERNELS, Attended, choose_kernel, merge

CPU = torch.device("cpu")
CPU_KERNELS = [name for name, kernel in KERNELS.items() if "cpu" in kernel.devices]
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16


def brute_force(query, key, value, causal):
    """Softmax attention written out with loops, in float64."""
    query, key, value = (tensor.double().numpy() for tensor in (query, key, value))
    queries, heads, head_dim = query.shape
    group = heads // key.shape[1]
    output = np.zeros((queries, heads, head_dim))
    log_sum_exp = np.zeros((queries, heads))
    for row in range(queries):
        seen = row + 1 if causal else key.shape[0]
        for head in range(heads):
            shared = head // group
            scores = key[:seen, shared] @ query[row, head] / math.sqrt(head_dim)
            weights = np.exp(scores - scores.max())
            log_sum_exp[row, head] = scores.max() + np.log(weights.sum())
            output[row, head] = weights @ value[:seen, shared] / weights.sum()
    return torch.from_numpy(output), torch.from_numpy(log_sum_exp)


def tensors(queries, keys, dtype=torch.float32, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((queries, HEADS), (keys, KV_HEADS), (keys, KV_HEADS))
    return [(torch.randn(*size, HEAD_DIM, generator=generator) * scale).to(dtype) for size in sizes]


@pytest.mark.parametrize("name", CPU_KERNELS)
@pytest.mark.parametrize(
    ("queries", "keys", "causal"),
    [
        (33, 33, True),
        (1, 1, True),
        (7, 50, False),
        (50, 7, False),
        (1, 45, False),
        (9, 1, False),
        (1, 1, False),
    ],
)
def test_kernels_agree_with_brute_force(name, queries, keys, causal):
    inputs = tensors(queries, keys)
    found = attention.attention(*inputs, causal=causal, kernel=KERNELS[name])
    output, log_sum_exp = brute_force(*inputs, causal)
    torch.testing.assert_close(found.output.double(), output, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.log_sum_exp.double(), log_sum_exp, rtol=1e-5, atol=1e-5)
    assert found.output.shape == inputs[0].shape
    assert found.log_sum_exp.dtype == torch.float32


@pytest.mark.parametrize("name", CPU_KERNELS)
def test_kernels_take_half_precision(name):
    inputs = tensors(20, 30, torch.bfloat16)
    found = attention.attention(*inputs, causal=False, kernel=KERNELS[name])
    output, log_sum_exp = brute_force(*inputs, causal=False)
    assert found.output.dtype == torch.bfloat16
    torch.testing.assert_close(found.output.double(), output, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(found.log_sum_exp.double(), log_sum_exp, rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", CPU_KERNELS)
def test_kernels_read_rows_in_place_and_none_beside_them(name):
    query, key, value = tensors(4, 12)
    around = torch.full((30, 2, KV_HEADS, HEAD_DIM), float("nan"))
    around[10:22, 0], around[10:22, 1] = key, value
    found = attention.attention(
        query, around[10:22, 0], around[10:22, 1], causal=False, kernel=KERNELS[name]
    )
    alone = attention.attention(query, key, value, causal=False, kernel=KERNELS[name])
    torch.testing.assert_close(found, alone)


@pytest.mark.parametrize("name", CPU_KERNELS)
@pytest.mark.parametrize("which", [1, 2])
@pytest.mark.parametrize("row", [0, 11])
def test_kernels_pass_nan_on(name, which, row):
    inputs = tensors(4, 12)
    inputs[which][row, 0] = float("nan")
    found = attention.attention(*inputs, causal=False, kernel=KERNELS[name])
    assert not found.output.isfinite().all()


def test_causal_needs_as_many_queries_as_keys():
    with pytest.raises(ValueError, match="causal attention of 3 queries to 5 keys"):
        attention.attention(*tensors(3, 5), causal=True, kernel=KERNELS["math"])


@pytest.mark.parametrize("scale", [1.0, 8.0])
@pytest.mark.parametrize("cuts", [(5,), (1, 2, 30), (8, 16, 24, 32)])
def test_merged_pieces_are_the_whole(cuts, scale):
    query, key, value = tensors(6, 40, scale=scale)
    edges = [0, *cuts, 40]
    merged = None
    for start, stop in pairwise(edges):
        part = attention.attention(
            query, key[start:stop], value[start:stop], causal=False, kernel=KERNELS["flash_cpu"]
        )
        merged = part if merged is None else merge(merged, part)
    output, log_sum_exp = brute_force(query, key, value, causal=False)
    torch.testing.assert_close(merged.output.double(), output, rtol=1e-4, atol=1e-5 * scale**2)
    torch.testing.assert_close(merged.log_sum_exp.double(), log_sum_exp, rtol=1e-5, atol=1e-5)


def nothing(like):
    return Attended(torch.zeros_like(like.output), torch.full_like(like.log_sum_exp, float("-inf")))


def test_a_piece_without_keys_counts_for_nothing():
    part = attention.attention(*tensors(3, 9), causal=False, kernel=KERNELS["math"])
    for merged in (merge(part, nothing(part)), merge(nothing(part), part)):
        torch.testing.assert_close(merged, part, rtol=0, atol=0)


def test_two_pieces_without_keys_make_none():
    part = attention.attention(*tensors(3, 9), causal=False, kernel=KERNELS["math"])
    merged = merge(nothing(part), nothing(part))
    assert merged.log_sum_exp.isneginf().all()
    assert (merged.output == 0).all()


def test_merge_passes_nan_on():
    part = attention.attention(*tensors(3, 9), causal=False, kernel=KERNELS["math"])
    bad = Attended(part.output, torch.full_like(part.log_sum_exp, float("nan")))
    assert merge(part, bad).output.isnan().all()
    assert merge(bad, part).output.isnan().all()


def test_auto_takes_the_first_that_runs():
    assert choose_kernel("auto", CPU, torch.float32, (4, 2, 16)).name == "flash_cpu"
    assert set(AUTO_ORDER) == set(KERNELS)


def test_an_unknown_kernel_names_the_nearest():
    with pytest.raises(ConfigurationError, match=r"attention=flsh.*Did you mean 'flash'"):
        choose_kernel("flsh", CPU, torch.float32, (4, 2, 16))


def test_a_kernel_of_another_device_is_refused_with_the_reason():
    with pytest.raises(ConfigurationError, match=r"cudnn cannot run on cpu.*it needs cuda"):
        choose_kernel("cudnn", CPU, torch.float32, (4, 2, 16))


def test_a_kernel_that_computes_something_else_is_refused(monkeypatch):
    wrong = attention.Kernel(
        "math",
        lambda q, k, v, causal, scale: attention._math(q, k, v, causal, scale * 1.1),
        ("cpu",),
        (torch.float32,),
    )
    monkeypatch.setitem(KERNELS, "math", wrong)
    with pytest.raises(ConfigurationError, match=r"math: a trial of .* gives a wrong result"):
        choose_kernel("math", CPU, torch.float32, (4, 2, 16))


def test_a_dtype_that_a_kernel_lacks_is_refused(monkeypatch):
    monkeypatch.setitem(
        KERNELS, "math", attention.Kernel("math", attention._math, ("cpu",), (torch.bfloat16,))
    )
    with pytest.raises(ConfigurationError, match="it takes bfloat16 only"):
        choose_kernel("math", CPU, torch.float32, (4, 2, 16))
