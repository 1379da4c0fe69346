"""The engine's kernel for blocks, made as the engine makes it."""

from __future__ import annotations

import torch

from backends.engine.block_attention import BlockKernel, block_buffers, make_block_kernel
from scripts.bench.ceilings import Bench


def make_kernel(bench: Bench, rows: int) -> BlockKernel:
    """Return the kernel for a prompt of so many rows, in whole blocks, read in one chunk."""
    shape, device = bench.shape, bench.device
    tensors = {
        buffer.name: torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
        for buffer in block_buffers(device, shape.heads, rows, rows)
    }
    out = torch.empty(rows, shape.heads, shape.head_dim, device=device, dtype=bench.dtype)
    return make_block_kernel(device, tensors, out)
