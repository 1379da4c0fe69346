"""Attention over a piece of the history, and the merge of pieces.

`attention` returns the output and the log-sum-exp of the scores, so that pieces computed apart
can be merged exactly (online softmax, arXiv 1805.02867; FlashAttention, arXiv 2205.14135). All
tensors are [rows, heads, head_dim], rows outermost, as the cache holds them: a piece then has the
same strides wherever it lies, and a kernel given the same numbers gives the same bits.

One query (decode) on a GPU does not come here: `ops` has a kernel of its own for that.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from backends.base import ConfigurationError
from backends.engine.memory import Buffer
from backends.engine.settings import require_name

_HALF = (torch.bfloat16, torch.float16)
_aten = torch.ops.aten
HOPPER = 9
NO_CAPABILITY = 1000
"""Above every GPU's compute capability."""
PARTS_PER_PROCESSOR, PART_QUERIES, MOST_PARTS = 20, 64, 128
"""What FlashAttention-2 cuts keys into: at most so many parts a multiprocessor, of so many queries
and one head, and so many of one query. The first is the largest that num_splits_heuristic gives for
84 to 148 multiprocessors and up to a million keys, rounded up: https://github.com/pytorch/pytorch/
blob/v2.11.0/aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp."""


class Attended(NamedTuple):
    """Attention to some keys.

    Attributes:
        output: [queries, heads, head_dim].
        log_sum_exp: of the scaled scores, float32 [queries, heads]; minus infinity stands for no
            keys at all.
    """

    output: torch.Tensor
    log_sum_exp: torch.Tensor


class Operands(NamedTuple):
    """What one call of a kernel takes; `attention` explains each."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    causal: bool
    scale: float
    out: torch.Tensor | None = None


KernelFunction = Callable[[Operands], Attended]


class CallSize(NamedTuple):
    """What decides how much memory a call takes: at most so many rows, heads and numbers a head."""

    queries: int
    keys: int
    heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """An attention kernel by name, and where it can run.

    Attributes:
        run: attends.
        package: what must be installed beside PyTorch, None where nothing has to be.
        extra: the extra of this project that installs the package.
        capability: the GPU's least compute capability.
        capability_below: the first compute capability on which the package no longer runs.
        writes_out: whether the output goes to `out`; others allocate it for each call.
        copies: how many outputs a call holds beside the one that it returns.
        holds_scores: whether a call holds all scores, and its operands in float32.
        sums_apart: whether few queries attend to parts of the keys at a time, which are then
            summed, so that all multiprocessors have work.
    """

    name: str
    run: KernelFunction
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    package: str | None = None
    extra: str = ""
    capability: tuple[int, int] = (0, 0)
    capability_below: tuple[int, int] = (NO_CAPABILITY, 0)
    writes_out: bool = False
    copies: int = 0
    holds_scores: bool = False
    sums_apart: bool = False


def passing_buffers(
    kernel: Kernel, size: CallSize, dtype: torch.dtype, device: torch.device
) -> tuple[Buffer, ...]:
    """Declare the room for what a call allocates, its output and log-sum-exp included.

    tests/backends/engine/test_cuda.py holds an engine's peak to it with every kernel that can run.
    """
    queries, keys, heads, head_dim = size

    def buffer(name: str, dims: tuple[int, ...], kind: torch.dtype = torch.float32) -> Buffer:
        return Buffer(name, dims, kind, "device", "activations")

    held = kernel.copies + 1
    buffers: tuple[Buffer, ...] = (buffer("log_sum_exp", (held, queries, heads)),)
    if kernel.holds_scores:
        buffers += (
            buffer("scores", (2, heads, queries, keys)),
            buffer("float32_operands", (queries + 2 * keys, heads, head_dim)),
        )
    if kernel.sums_apart:
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        rows = min(processors * PARTS_PER_PROCESSOR * PART_QUERIES, queries * heads * MOST_PARTS)
        buffers += (buffer("parts", (rows, head_dim + 1)),)
    if kernel.writes_out:
        return buffers
    kind = torch.float32 if kernel.holds_scores else dtype
    return (*buffers, buffer("output", (held, queries, heads, head_dim), kind))


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool,
    kernel: Kernel,
    out: torch.Tensor | None = None,
) -> Attended:
    """Attend to one piece of keys and values.

    Args:
        query: [queries, heads, head_dim].
        key: [keys, kv_heads, head_dim]; query head h reads head h // (heads / kv_heads).
        value: like `key`.
        causal: query i sees keys 0 to i; there must be as many queries as keys.
        kernel: from `choose_kernel`.
        out: contiguous, like `query`; kernels with `writes_out` put the output there.

    Returns:
        The output in the dtype of `query`, and the log-sum-exp.

    Raises:
        ValueError: causal with unequal numbers of queries and keys.
    """
    if causal and query.shape[0] != key.shape[0]:
        raise ValueError(f"causal attention of {query.shape[0]} queries to {key.shape[0]} keys")
    return kernel.run(Operands(query, key, value, causal, query.shape[-1] ** -0.5, out))


def _grouped(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """View grouped heads as a batch, one entry for each query head of a group.

    For kernels without grouped heads: keys and values are repeated by a stride of zero.
    Returns views [group, kv_heads, rows, head_dim].
    """
    rows, heads, head_dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    queries = query.view(rows, kv_heads, group, head_dim).permute(2, 1, 0, 3)
    keys = key.transpose(0, 1).expand(group, -1, -1, -1)
    values = value.transpose(0, 1).expand(group, -1, -1, -1)
    return queries, keys, values


def _ungrouped(output: torch.Tensor, log_sum_exp: torch.Tensor) -> Attended:
    """Undo `_grouped` for outputs [group, kv_heads, rows, head_dim] and their log-sum-exp."""
    group, kv_heads, rows, head_dim = output.shape
    heads = group * kv_heads
    return Attended(
        output.permute(2, 1, 0, 3).reshape(rows, heads, head_dim),
        log_sum_exp.permute(2, 1, 0).reshape(rows, heads),
    )


def _math(of: Operands) -> Attended:
    """Plain float32 products; holds the whole score matrix."""
    query, key, value, causal, scale, _ = of
    queries, keys, values = (tensor.float() for tensor in _grouped(query, key, value))
    scores = queries @ keys.transpose(-1, -2) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores.masked_fill_(hidden, float("-inf"))
    output, log_sum_exp = _ungrouped(scores.softmax(-1) @ values, scores.logsumexp(-1))
    return Attended(output.to(query.dtype), log_sum_exp)


def _flash_cpu(of: Operands) -> Attended:
    """PyTorch's flash attention for CPUs."""
    query, key, value, causal, scale, _ = of
    output, log_sum_exp = _aten._scaled_dot_product_flash_attention_for_cpu(
        *_grouped(query, key, value), 0.0, causal, scale=scale
    )
    return _ungrouped(output, log_sum_exp)


def _efficient(of: Operands) -> Attended:
    """PyTorch's memory-efficient attention for GPUs, the only fused one in float32."""
    query, key, value, causal, scale, _ = of
    output, log_sum_exp, *_ = _aten._scaled_dot_product_efficient_attention(
        *_grouped(query, key, value), None, True, 0.0, causal, scale=scale
    )
    # The kernel pads the log-sum-exp to whole tiles of queries.
    return _ungrouped(output, log_sum_exp[..., : query.shape[0]])


def _flash(of: Operands) -> Attended:
    """FlashAttention-2 as built into PyTorch for GPUs (arXiv 2307.08691)."""
    query, key, value, causal, scale, _ = of
    output, log_sum_exp, *_ = _aten._flash_attention_forward(
        query.unsqueeze(0),
        key.unsqueeze(0),
        value.unsqueeze(0),
        None,
        None,
        query.shape[0],
        key.shape[0],
        0.0,
        causal,
        False,
        scale=scale,
    )
    return Attended(output[0], log_sum_exp[0, :, : query.shape[0]].transpose(0, 1))


def _cudnn(of: Operands) -> Attended:
    """Fused attention of cuDNN attention through PyTorch."""
    query, key, value, causal, scale, _ = of
    if key.shape[0] == 1:  # which cuDNN does not take
        return _math(of)
    output, log_sum_exp, *_ = _aten._scaled_dot_product_cudnn_attention(
        query.transpose(0, 1).unsqueeze(0),
        key.transpose(0, 1).unsqueeze(0),
        value.transpose(0, 1).unsqueeze(0),
        None,
        True,
        0.0,
        causal,
        False,
        scale=scale,
    )
    rows, heads, _ = query.shape
    return Attended(output[0].transpose(0, 1), log_sum_exp.reshape(heads, rows).transpose(0, 1))


def _flash_attn(of: Operands) -> Attended:
    """FlashAttention-2 from the package flash-attn (arXiv 2307.08691)."""
    query, key, value, causal, scale, _ = of
    output, log_sum_exp, _ = _package("flash_attn").flash_attn_func(
        query.unsqueeze(0),
        key.unsqueeze(0),
        value.unsqueeze(0),
        softmax_scale=scale,
        causal=causal,
        return_attn_probs=True,
    )
    return Attended(output[0], log_sum_exp[0].transpose(0, 1))


def _fa3(of: Operands) -> Attended:
    """FlashAttention-3 for Hopper GPUs from the package fa3-fwd (arXiv 2407.08608).

    The operator itself, because the package's function for Python takes no place for the output.
    One split: the default lets the kernel choose by the GPU's load.
    """
    query, key, value, causal, scale, out = of
    _package("fa3_fwd_interface")
    output, log_sum_exp, *_ = torch.ops.fa3_fwd.fwd(
        query.unsqueeze(0),
        key.unsqueeze(0),
        value.unsqueeze(0),
        out=None if out is None else out.unsqueeze(0),
        softmax_scale=scale,
        is_causal=causal,
        num_splits=1,
    )
    return Attended(output[0], log_sum_exp[0].transpose(0, 1))


def _package(name: str) -> Any:
    return importlib.import_module(name)


_ALL = (torch.float32, *_HALF)
KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            "fa3",
            _fa3,
            ("cuda",),
            (torch.bfloat16,),
            package="fa3_fwd_interface",
            extra="fa3",
            capability=(9, 0),
            capability_below=(10, 0),
            writes_out=True,
        ),
        Kernel(
            "flash_attn",
            _flash_attn,
            ("cuda",),
            _HALF,
            package="flash_attn",
            extra="flash",
            capability=(8, 0),
            sums_apart=True,
        ),
        Kernel("cudnn", _cudnn, ("cuda",), _HALF, capability=(8, 0)),
        Kernel("flash", _flash, ("cuda",), _HALF, capability=(8, 0), sums_apart=True),
        Kernel("efficient", _efficient, ("cuda",), _ALL, copies=1),
        Kernel("flash_cpu", _flash_cpu, ("cpu",), _ALL, copies=1),
        Kernel("math", _math, ("cpu", "cuda"), _ALL, copies=2, holds_scores=True),
    )
}
AUTO_ORDER = {
    "hopper": ("fa3", "cudnn", "flash_attn", "flash", "efficient", "math"),
    "cuda": ("flash_attn", "flash", "cudnn", "efficient", "math"),
    "cpu": ("flash_cpu", "math"),
}
"""What `auto` tries; the first that can run is taken. The order on Hopper is that of the speeds in
docs/gpu_benchmarks.md. Never chosen by timing: that would differ from one process to the next, and
so would the bits."""


def choose_kernel(
    name: str, device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]
) -> Kernel:
    """Return the kernel of that name, or for "auto" the first in `AUTO_ORDER` that can run.

    A kernel can run when a trial on a few rows agrees with plain float32 products.

    Args:
        name: "auto" or one of `KERNELS`.
        device: where it is to run.
        dtype: of queries, keys and values.
        shape: query heads, key heads and head_dim.

    Raises:
        ConfigurationError: the name is unknown, or that kernel cannot run here.
    """
    require_name("backend.attention", name, ("auto", *KERNELS))
    candidates = _auto_order(device) if name == "auto" else (name,)
    reasons = []
    for candidate in candidates:
        kernel = KERNELS[candidate]
        reason = _refusal(kernel, device, dtype) or _trial(kernel, device, dtype, shape)
        if reason is None:
            return kernel
        reasons.append(f"{candidate}: {reason}")
    heads, kv_heads, head_dim = shape
    raise ConfigurationError(
        f"backend.attention={name} cannot run on {device.type} in {_name(dtype)} with {heads} "
        f"query and {kv_heads} key heads of {head_dim}: {'; '.join(reasons)}. Use "
        "backend.attention=auto."
    )


def _auto_order(device: torch.device) -> tuple[str, ...]:
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == HOPPER:
        return AUTO_ORDER["hopper"]
    return AUTO_ORDER[device.type]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _refusal(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the kernel cannot run, as far as that is known without a trial."""
    if device.type not in kernel.devices:
        return f"it needs {' or '.join(kernel.devices)}"
    if dtype not in kernel.dtypes:
        return f"it takes {', '.join(_name(dtype) for dtype in kernel.dtypes)} only"
    if device.type == "cuda":
        found = torch.cuda.get_device_capability(device)
        if not kernel.capability <= found < kernel.capability_below:
            wanted = ".".join(map(str, kernel.capability))
            below = kernel.capability_below
            upper = f" and below {below[0]}.{below[1]}" if below[0] < NO_CAPABILITY else ""
            return (
                f"it needs a GPU of compute capability {wanted} or more{upper}, this one has "
                f"{found[0]}.{found[1]}"
            )
    return _missing_package(kernel)


def _missing_package(kernel: Kernel) -> str | None:
    if kernel.package is None:
        return None
    install = f'pip install "ruler-bench[{kernel.extra}]"'
    if importlib.util.find_spec(kernel.package) is None:
        return f"its package is not installed; {install} installs it"
    try:
        _package(kernel.package)
    except (ImportError, OSError) as error:  # built for another PyTorch or CUDA
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return f"its package cannot be imported ({first}); {install} installs it anew"
    return None


def _trial(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]
) -> str | None:
    """Run the kernel on a few rows; return what went wrong, or None."""
    heads, kv_heads, head_dim = shape
    generator = torch.Generator().manual_seed(0)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for queries, keys, causal in ((5, 5, True), (3, 7, False), (1, 7, False), (1, 1, False)):
        query, key, value = (
            torch.randn(size, generator=generator).to(device, dtype)
            for size in ((queries, heads, head_dim), *[(keys, kv_heads, head_dim)] * 2)
        )
        of = Operands(query, key, value, causal, head_dim**-0.5, torch.empty_like(query))
        try:
            found = kernel.run(of)
        except (RuntimeError, ValueError, TypeError) as error:
            return str(error).strip().splitlines()[0]
        wrong = f"a trial of {queries} queries and {keys} keys gives a wrong result"
        if kernel.writes_out and of.out is not None and not torch.equal(of.out, found.output):
            return wrong
        for got, wanted in zip(found, _math(of), strict=True):
            if got.shape != wanted.shape or not torch.allclose(
                got.float(), wanted.float(), rtol=tolerance, atol=tolerance
            ):
                return wrong
    return None
