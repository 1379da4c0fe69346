# ruff: noqa: PLR0917  (kernels have many arguments)
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""The lists of blocks that FlexAttention reads, by one Triton kernel.

Whole numbers only: the lists are those of PyTorch to the last. Nothing is compiled by the length.
Runs on CPU tensors too where TRITON_INTERPRET=1 was set before the import.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from backends.engine.block_mask import BlockLists
from backends.engine.policy import Place

_COLUMNS = 512  # blocks of keys in a step
_WARPS = 1


def lay_blocks(blocks: torch.Tensor, place: Place, lists: BlockLists) -> None:
    """See `block_mask.lay_blocks`."""
    heads, rows, room = lists.full.shape[1:]
    lay_kernel[(heads * rows,)](
        blocks.view(torch.uint8),
        *blocks.stride(),
        *lists,
        place.first_block,
        place.query_blocks,
        place.key_blocks,
        rows,
        room,
        block=_COLUMNS,
        num_warps=_WARPS,
    )


@triton.jit(
    do_not_specialize=[
        "head_stride",
        "row_stride",
        "column_stride",
        "first_block",
        "query_blocks",
        "key_blocks",
    ],
    do_not_specialize_on_alignment=["blocks"],
)
def lay_kernel(
    blocks,
    head_stride,
    row_stride,
    column_stride,
    partial,
    partial_counts,
    full,
    full_counts,
    first_block,
    query_blocks,
    key_blocks,
    rows,
    room,
    block: tl.constexpr,
):
    """Fill the lists of one head and block of queries."""
    number = tl.program_id(0).to(tl.int64)
    head, row = number // rows, number % rows
    if row >= query_blocks:
        tl.store(partial_counts + number, 0)
        tl.store(full_counts + number, 0)
        return
    own = first_block + row
    chosen = blocks + head * head_stride + row * row_stride
    tl.store(partial + number * room, own.to(tl.int32))
    tl.store(partial_counts + number, tl.load(chosen + own * column_stride).to(tl.int32))
    columns = tl.arange(0, block)
    read = tl.zeros((), tl.int32)
    for begin in range(0, key_blocks, block):
        column = begin + columns
        other = (column < key_blocks) & (column != own)
        is_read = tl.load(chosen + column * column_stride, mask=other, other=0).to(tl.int32)
        read += tl.sum(is_read, axis=0)
    tl.store(full_counts + number, read)
    # Those that are read first, both parts ascending.
    before = tl.zeros((), tl.int32)
    for begin in range(0, key_blocks, block):
        column = begin + columns
        inside = column < key_blocks
        other = inside & (column != own)
        is_read = tl.load(chosen + column * column_stride, mask=other, other=0).to(tl.int32)
        read_before = before + tl.cumsum(is_read, axis=0) - is_read
        target = tl.where(is_read == 1, read_before, read + column - read_before)
        tl.store(full + number * room + target, column, mask=inside)
        before += tl.sum(is_read, axis=0)
