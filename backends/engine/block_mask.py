"""The lists of blocks that FlexAttention reads, from what a policy chose, in PyTorch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch

from backends.engine.policy import Place

MASK_ROWS = 64
"""Blocks of queries whose lists of blocks are made at once, to bound the memory for it."""


class BlockLists(NamedTuple):
    """For each head and block of queries, the blocks of keys that it reads.

    Numbers of blocks stand in `partial` and `full` in the order in which they are read, and how
    many are read in the counts; what follows them is not read.

    Attributes:
        partial: those under a causal mask, int32 [1, heads, query blocks, key blocks].
        partial_counts: int32 [1, heads, query blocks].
        full: those that are read whole, like `partial`.
        full_counts: like `partial_counts`.
    """

    partial: torch.Tensor
    partial_counts: torch.Tensor
    full: torch.Tensor
    full_counts: torch.Tensor


LayBlocks = Callable[[torch.Tensor, Place, BlockLists], None]


def find_lay_blocks(device: torch.device) -> LayBlocks:
    """Return `lay_blocks` in Triton on a GPU where Triton is installed, else PyTorch's."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from backends.engine import block_mask_triton  # noqa: PLC0415 (only where it can run)

        return block_mask_triton.lay_blocks
    return lay_blocks


def lay_blocks(blocks: torch.Tensor, place: Place, lists: BlockLists) -> None:
    """Fill the lists: the block of the same positions is causal, the others are read whole.

    Blocks that are not read stand after those that are, so that nothing of an earlier call is left
    in a row. Rows of blocks after the chunk's read nothing.

    Args:
        blocks: see `Policy.select`.
        place: where the chunk stands.
        lists: to be filled.
    """
    for counts in (lists.partial_counts, lists.full_counts):
        counts[:, :, place.query_blocks :].zero_()
    for start in range(0, place.query_blocks, MASK_ROWS):
        rows = slice(start, min(start + MASK_ROWS, place.query_blocks))
        own = torch.arange(rows.start, rows.stop, device=blocks.device) + place.first_block
        _lay_rows(blocks[:, rows], rows, own, lists)


def _lay_rows(blocks: torch.Tensor, rows: slice, own: torch.Tensor, lists: BlockLists) -> None:
    """Fill rows of the lists for bool [heads, rows, key_blocks]; `own` is each row's block."""
    heads, count, columns = blocks.shape
    own = own[:, None].expand(heads, -1, 1)
    lists.partial_counts[0, :, rows].copy_(blocks.gather(2, own)[:, :, 0])
    lists.partial[0, :, rows, :1].copy_(own)
    blocks = blocks.scatter(2, own, value=False)
    read = blocks.sum(2, dtype=torch.int32)
    lists.full_counts[0, :, rows].copy_(read)
    # Where each column goes: those that are read first, both parts ascending.
    order = blocks.cumsum(2).sub_(1)
    rest = torch.arange(columns, device=blocks.device) - order.add(1) + read[:, :, None]
    order = torch.where(blocks, order, rest)
    numbers = torch.arange(columns, dtype=torch.int32, device=blocks.device)
    lists.full[0, :, rows, :columns].scatter_(2, order, numbers.expand(heads, count, -1))
