"""The fastest exact causal attention for each sequence length, found by trying them."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from scripts.probe.model import Attention

Log = Callable[[str], None]

TOLERANCE = 0.02  # of the largest entry; bfloat16 rounds to 1/256
TRIALS = 3


def plain_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention by torch's own choice of kernel."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def _kernel(backend: SDPBackend, *, repeat_heads: bool) -> Attention:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if repeat_heads:
            group = query.shape[1] // key.shape[1]
            key, value = (t.repeat_interleave(group, dim=1) for t in (key, value))
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=not repeat_heads
            )

    return attend


def candidates() -> dict[str, Attention]:
    """Return the kernels to try on CUDA."""
    return {
        "flash": _kernel(SDPBackend.FLASH_ATTENTION, repeat_heads=False),
        "flash, repeated heads": _kernel(SDPBackend.FLASH_ATTENTION, repeat_heads=True),
        "cudnn": _kernel(SDPBackend.CUDNN_ATTENTION, repeat_heads=False),
        "cudnn, repeated heads": _kernel(SDPBackend.CUDNN_ATTENTION, repeat_heads=True),
    }


def fastest(
    lengths: tuple[int, ...],
    batch_tokens: int,
    heads: tuple[int, int, int],
    device: torch.device,
    log: Log,
) -> dict[int, Attention]:
    """Choose a kernel for each length: right first, then fastest forward and backward.

    Args:
        lengths: sequence lengths in tokens.
        batch_tokens: tokens of a batch.
        heads: query heads, key/value heads and head_dim.
        device: where to run; on a CPU the choice is torch's.
        log: takes one line a length.

    Returns:
        Kernel by length.
    """
    if device.type != "cuda":
        return dict.fromkeys(lengths, plain_attention)
    kernels = candidates()
    trial = _inputs(2, 1536, heads, device)
    with sdpa_kernel(SDPBackend.MATH):
        expected = _run(plain_attention, tuple(t.float() for t in trial))
    right = {
        name: kernel
        for name, kernel in kernels.items()
        if _is_right(name, kernel, trial, expected, log)
    }
    if not right:
        return dict.fromkeys(lengths, plain_attention)
    chosen: dict[int, Attention] = {}
    for length in lengths:
        inputs = _inputs(batch_tokens // length, length, heads, device)
        name, first = next(iter(right.items()))
        expected = _run(first, inputs)  # plain attention is too large here
        seconds = {name: _seconds(first, inputs)} | {
            other: _seconds(kernel, inputs)
            for other, kernel in right.items()
            if kernel is not first and _is_right(other, kernel, inputs, expected, log)
        }
        best = min(seconds, key=lambda name: seconds[name])
        chosen[length] = right[best]
        table = ", ".join(f"{name} {1000 * t:.2f} ms" for name, t in seconds.items())
        log(f"attention at {length}: {best} ({table})")
    return chosen


def _inputs(
    rows: int, length: int, heads: tuple[int, int, int], device: torch.device
) -> tuple[Tensor, ...]:
    """Return query, key, value and an output gradient laid out as the model lays them out."""
    query_heads, kv_heads, head_dim = heads
    generator = torch.Generator(device).manual_seed(0)
    return tuple(
        torch.randn(
            rows * length, count, head_dim, device=device, dtype=torch.bfloat16, generator=generator
        )
        .view(rows, length, count, head_dim)
        .transpose(1, 2)
        .detach()
        for count in (query_heads, kv_heads, kv_heads, query_heads)
    )


def _run(kernel: Attention, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    query, key, value = (t.detach().requires_grad_() for t in inputs[:3])
    output = kernel(query, key, value)
    gradients = torch.autograd.grad(output, (query, key, value), inputs[3])
    return output.detach(), *gradients


def _is_right(
    name: str,
    kernel: Attention,
    inputs: tuple[Tensor, ...],
    expected: tuple[Tensor, ...],
    log: Log,
) -> bool:
    try:
        found = _run(kernel, inputs)
    except RuntimeError as error:
        log(f"attention kernel {name} does not run: {str(error).splitlines()[0][:120]}")
        return False
    errors = [
        (f.float() - e.float()).abs().max() / e.float().abs().max()
        for f, e in zip(found, expected, strict=True)
    ]
    worst = float(torch.stack(errors).max())
    right = worst < TOLERANCE  # false for NaN too
    if not right:
        log(f"attention kernel {name} is off by {worst:.3f}")
    return right


def _seconds(kernel: Attention, inputs: tuple[Tensor, ...]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(TRIALS):
        _run(kernel, inputs)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / TRIALS
