import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from backends.base import ConfigurationError
from backends.engine import attention
from backends.engine.attention import AUTO_ORDER, KERNELS, Attended, choose_kernel
from backends.engine.ops import TorchOps

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


def merge(first, second):
    """Merge two parts as a step does: into a float32 copy of the first."""
    merged = Attended(first.output.float(), first.log_sum_exp.clone())
    TorchOps().merge_into(*merged, *second)
    return merged


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
    assert choose_kernel("auto", CPU, torch.bfloat16, (4, 2, 16)).name == "flash_cpu"
    assert {name for order in AUTO_ORDER.values() for name in order} == set(KERNELS)
    for place, order in AUTO_ORDER.items():
        device = "cpu" if place == "cpu" else "cuda"
        assert all(device in KERNELS[name].devices for name in order)
        assert order[-1] == "math"  # which every dtype and head size allows


def test_auto_goes_on_to_the_next_where_a_trial_fails(monkeypatch):
    def broken(of):
        raise RuntimeError("no such head size")

    monkeypatch.setitem(KERNELS, "flash_cpu", kernel("flash_cpu", broken))
    assert choose_kernel("auto", CPU, torch.float32, (4, 2, 16)).name == "math"
    with pytest.raises(ConfigurationError, match="flash_cpu: no such head size"):
        choose_kernel("flash_cpu", CPU, torch.float32, (4, 2, 16))


def test_an_unknown_kernel_names_the_nearest():
    with pytest.raises(ConfigurationError, match=r"attention=flsh.*Did you mean 'flash'"):
        choose_kernel("flsh", CPU, torch.float32, (4, 2, 16))


def test_a_kernel_of_another_device_is_refused_with_the_reason():
    with pytest.raises(ConfigurationError, match=r"cudnn cannot run on cpu.*it needs cuda"):
        choose_kernel("cudnn", CPU, torch.float32, (4, 2, 16))


def kernel(name, run, dtypes=(torch.float32,), **settings):
    return attention.Kernel(name, run, ("cpu",), dtypes, **settings)


def test_a_kernel_that_computes_something_else_is_refused(monkeypatch):
    wrong = kernel("math", lambda of: attention._math(of._replace(scale=of.scale * 1.1)))
    monkeypatch.setitem(KERNELS, "math", wrong)
    with pytest.raises(ConfigurationError, match=r"math: a trial of .* gives a wrong result"):
        choose_kernel("math", CPU, torch.float32, (4, 2, 16))


def test_a_kernel_that_leaves_its_output_elsewhere_is_refused(monkeypatch):
    monkeypatch.setitem(KERNELS, "math", kernel("math", attention._math, writes_out=True))
    with pytest.raises(ConfigurationError, match=r"math: a trial of .* gives a wrong result"):
        choose_kernel("math", CPU, torch.float32, (4, 2, 16))


def test_a_dtype_that_a_kernel_lacks_is_refused(monkeypatch):
    monkeypatch.setitem(KERNELS, "math", kernel("math", attention._math, (torch.bfloat16,)))
    with pytest.raises(ConfigurationError, match="it takes bfloat16 only"):
        choose_kernel("math", CPU, torch.float32, (4, 2, 16))


# What a GPU would be told. Only the reasons are asked for, so none is needed.


@pytest.fixture
def gpu(monkeypatch):
    """Say that there is a GPU of this compute capability."""

    def there_is(capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return torch.device("cuda")

    return there_is


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("fa3", "fa3_fwd_interface", "fa3"), ("flash_attn", "flash_attn", "flash")],
)
def test_a_kernel_that_is_not_installed_names_the_command(name, package, extra, gpu, monkeypatch):
    find_spec = attention.importlib.util.find_spec
    monkeypatch.setattr(
        attention.importlib.util,
        "find_spec",
        lambda asked: None if asked == package else find_spec(asked),
    )
    with pytest.raises(ConfigurationError, match="its package is not installed") as error:
        choose_kernel(name, gpu((9, 0)), torch.bfloat16, (32, 8, 128))
    assert f'{name}: its package is not installed; pip install "ruler-bench[{extra}]"' in str(
        error.value
    )
    assert "Use backend.attention=auto" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_package_that_cannot_be_imported_gives_the_reason(gpu, monkeypatch):
    def broken(name):
        raise ImportError("undefined symbol: c10\nand more")

    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(attention, "_package", broken)
    wanted = r"cannot be imported \(undefined symbol: c10\); pip install .*installs it anew"
    with pytest.raises(ConfigurationError, match=wanted) as error:
        choose_kernel("fa3", gpu((9, 0)), torch.bfloat16, (32, 8, 128))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "capability", "dtype", "message"),
    [
        ("fa3", (8, 0), torch.bfloat16, "capability 9.0 or more and below 10.0, this one has 8.0"),
        ("fa3", (10, 0), torch.bfloat16, "below 10.0, this one has 10.0"),
        ("fa3", (9, 0), torch.float16, "fa3: it takes bfloat16 only"),
        ("cudnn", (7, 5), torch.float16, "capability 8.0 or more, this one has 7.5"),
        ("flash", (9, 0), torch.float32, "flash: it takes bfloat16, float16 only"),
    ],
)
def test_a_gpu_or_dtype_that_a_kernel_lacks(name, capability, dtype, message, gpu):
    with pytest.raises(ConfigurationError) as error:
        choose_kernel(name, gpu(capability), dtype, (32, 8, 128))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("capability", "order"), [((9, 0), "hopper"), ((8, 6), "cuda"), ((10, 0), "cuda")]
)
def test_auto_goes_by_the_gpu(capability, order, gpu, monkeypatch):
    tried = []
    monkeypatch.setattr(attention, "_refusal", lambda kernel, *_: tried.append(kernel.name) or "no")
    with pytest.raises(ConfigurationError):
        choose_kernel("auto", gpu(capability), torch.bfloat16, (32, 8, 128))
    assert tuple(tried) == AUTO_ORDER[order]
