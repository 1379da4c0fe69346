# ruff: noqa: PLR0917  (kernels have many arguments)
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""XAttention's estimate as Triton kernels. See `backends.engine.policy.estimate` for the rule.

Tiles are of one size, at absolute positions of the keys, and every sum but those of whole numbers
is taken by one program in a fixed order, so that equal queries and keys give equal bits in every
process, however the prompt is cut into chunks. Nothing is compiled by the length. Runs on CPU
tensors too where TRITON_INTERPRET=1 was set before the import.

The product is taken by one kernel in two forms, which differ in how they load and in nothing else.
Where a tile's queries are all there, so are the keys that they see, and the copy engine of Hopper
and later GPUs loads whole tiles. What is left at a chunk's end goes by masked pointers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from backends.engine.policy.base import Place
from backends.engine.policy.estimate import Rule, slices
from backends.engine.policy.mass import FIXED_POINT

# Of the product: reduced rows, reduced columns and numbers of a head in a step, by bytes of a
# number. float32 has no tensor cores of full precision. For 131072 tokens at stride 8 an H200 takes
# 16.2 ms with these tiles, of which two share a multiprocessor, and 16.4 to 19.5 ms with others.
_ROW_BLOCK = {2: 128, 4: 32}
_COLUMN_BLOCK = {2: 128, 4: 128}
_DIM_BLOCK = {2: 64, 4: 32}
_STAGES = {2: 3, 4: 2}
_WARPS = {2: 4, 4: 4}
_MIN_DIM_BLOCK = 16  # of a product on tensor cores
# Key blocks in a step: 0.88 ms on the same, and 1.07 ms.
_MASS_BLOCK, _MASS_WARPS = 256, 4
_KEEP_BLOCK, _KEEP_WARPS = 512, 1

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_FIXED_POINT = tl.constexpr(FIXED_POINT)


def select_blocks(
    query: torch.Tensor, keys: torch.Tensor, place: Place, rule: Rule
) -> torch.Tensor:
    """See `estimate.select_blocks`."""
    heads = query.shape[1]
    shape = heads, place.query_blocks, place.key_blocks
    kept = torch.zeros(shape, dtype=torch.bool, device=query.device)
    for part in slices(place):
        rows = query[part.start - place.start :][: part.queries]
        # Nested, so that the log-sum-exps of one slice are gone before those of the next.
        mass = row_masses(log_sum_exps(rows, keys[: part.keys], part, rule), part, rule.cells)
        keep_blocks(mass, rule.share, part, kept[:, part.first_block - place.first_block :])
    return kept


def row_masses(sums: torch.Tensor, place: Place, cells: int) -> torch.Tensor:
    """Return what the rows of each block of queries attend to each block of keys.

    Args:
        sums: from `log_sum_exps`.
        place: where the queries stand.
        cells: rows in a block.

    Returns:
        Units of `mass.fixed_point`, int64 [heads, query_blocks, key_blocks]; after a row's own
        block, anything.
    """
    shape = sums.shape[0], place.query_blocks, place.key_blocks
    mass = torch.empty(shape, dtype=torch.int64, device=sums.device)
    mass_kernel[(shape[0] * shape[1],)](
        sums,
        mass,
        place.first_block,
        place.query_blocks,
        place.key_blocks,
        cells=cells,
        block=_MASS_BLOCK,
        num_warps=_MASS_WARPS,
    )
    return mass


def keep_blocks(mass: torch.Tensor, share: torch.Tensor, place: Place, kept: torch.Tensor) -> None:
    """Mark the blocks to keep, as `mass.keep_share` finds them; the first and the own are forced.

    Args:
        mass: from `row_masses`.
        share: of the attention, float64 [heads].
        place: where the queries stand.
        kept: bool [heads, at least query_blocks, at least key_blocks]; up to a row's own block it
            is overwritten.
    """
    heads, query_blocks, key_blocks = mass.shape
    keep_kernel[(heads * query_blocks,)](
        mass,
        share,
        kept.view(torch.uint8),
        kept.stride(0),
        kept.stride(1),
        place.first_block,
        query_blocks,
        key_blocks,
        block=_KEEP_BLOCK,
        num_warps=_KEEP_WARPS,
    )


def log_sum_exps(query: torch.Tensor, keys: torch.Tensor, place: Place, rule: Rule) -> torch.Tensor:
    """See `estimate.log_sum_exps`; cells of blocks after the row's own hold anything."""
    rows = place.query_blocks * rule.cells
    sums = torch.empty((query.shape[1], rows, place.key_blocks), device=query.device)
    tiles = triton.cdiv(rows, _ROW_BLOCK[query.element_size()])
    full = 0
    if _can_be_described(query, keys):
        full = place.queries // (_ROW_BLOCK[query.element_size()] * rule.stride)
        _reduce_tiles(query, keys, place, rule, sums, range(full), described=True)
    _reduce_tiles(query, keys, place, rule, sums, range(full, tiles), described=False)
    return sums


def _can_be_described(query: torch.Tensor, keys: torch.Tensor) -> bool:
    """Tell whether the copy engine can load the tiles: by the engine's buffers, not the length."""
    if query.element_size() != 2 or query.shape[2] % _DIM_BLOCK[2] != 0:
        return False
    if query.is_cuda and torch.cuda.get_device_capability(query.device) < (9, 0):
        return False
    strides = [stride for tensor in (query, keys) for stride in tensor.stride()[:2]]
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in (query, keys))
    return aligned and all(stride % 8 == 0 for stride in strides)


def _described(tokens: torch.Tensor, stride: int, rows: int) -> TensorDescriptor:
    """Describe `stride` tokens side by side as one row; what is left at the end is not in it.

    Args:
        tokens: [tokens, heads, head_dim].
        stride: tokens in a row.
        rows: rows in a tile.
    """
    heads, head_dim = tokens.shape[1:]
    # No further than the last number of the last token: there the storage may end.
    width = (stride - 1) * tokens.stride(0) + (heads - 1) * tokens.stride(1) + head_dim
    shape = [max(tokens.shape[0] // stride, 1), width]
    return TensorDescriptor(tokens, shape, [stride * tokens.stride(0), 1], [rows, _DIM_BLOCK[2]])


def _reduce_tiles(
    query: torch.Tensor,
    keys: torch.Tensor,
    place: Place,
    rule: Rule,
    sums: torch.Tensor,
    tiles: range,
    described: bool,
) -> None:
    """Set the log-sum-exps of some tiles of rows. Without tiles it still compiles the kernel."""
    heads, head_dim = query.shape[1:]
    size = query.element_size()
    columns = triton.cdiv(place.key_blocks * rule.cells, _COLUMN_BLOCK[size])
    left: Any = query
    right: Any = keys
    if described:
        left = _described(query, rule.stride, _ROW_BLOCK[size])
        right = _described(keys, rule.stride, _COLUMN_BLOCK[size])
    log_sum_exp_kernel[(max(heads * len(tiles) * columns, 1),)](
        left,
        right,
        sums,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        keys.stride(1),
        place.start,
        place.queries,
        place.keys,
        place.query_blocks,
        place.key_blocks,
        tiles.start,
        len(tiles),
        rule.scale,
        described=described,
        group=heads // keys.shape[1],
        head_dim=head_dim,
        stride=rule.stride,
        cells=rule.cells,
        row_block=_ROW_BLOCK[size],
        column_block=_COLUMN_BLOCK[size],
        dim_block=max(min(_DIM_BLOCK[size], triton.next_power_of_2(head_dim)), _MIN_DIM_BLOCK),
        num_warps=_WARPS[size],
        num_stages=_STAGES[size],
    )


@triton.jit
def _products_by_descriptor(
    query,
    keys,
    scores,
    row,
    query_cell,
    query_stride,
    column,
    key_cell,
    key_stride,
    head_dim: tl.constexpr,
    stride: tl.constexpr,
    dim_block: tl.constexpr,
):
    """Add the products of a tile to its scores.

    Queries go from their row's last token backwards, from `query_cell` on, and keys forwards.
    """
    dim_steps: tl.constexpr = head_dim // dim_block
    for step in range(0, stride * dim_steps):
        token = step // dim_steps
        dim = step % dim_steps * dim_block
        left = query.load([row, query_cell - token * query_stride + dim])
        right = keys.load([column, key_cell + token * key_stride + dim])
        scores = tl.dot(left, tl.trans(right), scores, input_precision="ieee")
    return scores


@triton.jit
def _products_by_pointer(
    query,
    keys,
    scores,
    row,
    query_stride,
    queries,
    column,
    key_stride,
    key_count,
    head_dim: tl.constexpr,
    stride: tl.constexpr,
    dim_block: tl.constexpr,
):
    """Add the products of a tile to its scores; tokens that are not there are zero.

    `query` and `keys` point to the first token of their head, `row` and `column` are all of the
    tile's. Queries go from their row's last token backwards, and keys forwards.
    """
    dims = tl.arange(0, dim_block)
    last_query = row * stride + stride - 1
    first_key = column * stride
    query_rows = query + last_query.to(tl.int64) * query_stride
    key_rows = keys + first_key.to(tl.int64) * key_stride
    dim_steps: tl.constexpr = (head_dim + dim_block - 1) // dim_block
    for step in range(0, stride * dim_steps):
        token = step // dim_steps
        dim = step % dim_steps * dim_block + dims
        query_cells = (query_rows - token * query_stride)[:, None] + dim[None, :]
        key_cells = (key_rows + token * key_stride)[:, None] + dim[None, :]
        query_there = (last_query - token < queries)[:, None]
        key_there = (first_key + token < key_count)[:, None]
        if head_dim % dim_block != 0:
            query_there &= (dim < head_dim)[None, :]
            key_there &= (dim < head_dim)[None, :]
        left = tl.load(query_cells, mask=query_there, other=0.0)
        right = tl.load(key_cells, mask=key_there, other=0.0)
        scores = tl.dot(left, tl.trans(right), scores, input_precision="ieee")
    return scores


@triton.jit(
    do_not_specialize=[
        "start",
        "queries",
        "key_count",
        "query_blocks",
        "key_blocks",
        "first_tile",
        "row_tiles",
        "scale",
    ]
)
def log_sum_exp_kernel(
    query,
    keys,
    sums,
    query_stride,
    head_stride,
    key_stride,
    kv_head_stride,
    start,
    queries,
    key_count,
    query_blocks,
    key_blocks,
    first_tile,
    row_tiles,
    scale,
    described: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    stride: tl.constexpr,
    cells: tl.constexpr,
    row_block: tl.constexpr,
    column_block: tl.constexpr,
    dim_block: tl.constexpr,
):
    """Reduce one tile of the scores: product, causal mask, log-sum-exp of each block of columns.

    Programs that read the same keys, for the heads of a group and all rows, follow each other.
    """
    if row_tiles == 0:
        return
    rows = query_blocks * cells
    column_tiles = tl.cdiv(key_blocks * cells, column_block)
    program = tl.program_id(0)
    row_tile = first_tile + program % row_tiles
    member = program // row_tiles % group
    column_tile = program // (row_tiles * group) % column_tiles
    kv_head = program // (row_tiles * group * column_tiles)
    head = kv_head * group + member
    first_column = column_tile * column_block
    if first_column >= start // stride + (row_tile + 1) * row_block:
        return
    row = row_tile * row_block + tl.arange(0, row_block)
    column = first_column + tl.arange(0, column_block)
    scores = tl.zeros((row_block, column_block), tl.float32)
    if described:
        last_cell = (stride - 1) * query_stride + head * head_stride
        scores = _products_by_descriptor(
            query,
            keys,
            scores,
            row_tile * row_block,
            last_cell,
            query_stride,
            first_column,
            kv_head * kv_head_stride,
            key_stride,
            head_dim,
            stride,
            dim_block,
        )
    else:
        scores = _products_by_pointer(
            query + head.to(tl.int64) * head_stride,
            keys + kv_head.to(tl.int64) * kv_head_stride,
            scores,
            row,
            query_stride,
            queries,
            column,
            key_stride,
            key_count,
            head_dim,
            stride,
            dim_block,
        )
    seen = column[None, :] <= (start // stride + row)[:, None]
    seen &= (row * stride < queries)[:, None]
    scores = tl.where(seen, scores * (scale * _LOG2_E), float("-inf"))
    blocks: tl.constexpr = column_block // cells
    scores = tl.reshape(scores, (row_block, blocks, cells))
    top = tl.max(scores, axis=2)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(scores - base[:, :, None]), axis=2)
    block = column_tile * blocks + tl.arange(0, blocks)
    target = (head * rows + row).to(tl.int64)[:, None] * key_blocks + block[None, :]
    inside = (row < rows)[:, None] & (block < key_blocks)[None, :]
    tl.store(sums + target, (base + tl.log2(total)) * _LN_2, mask=inside)


@triton.jit(do_not_specialize=["first_block", "query_blocks", "key_blocks"])
def mass_kernel(
    sums,
    mass,
    first_block,
    query_blocks,
    key_blocks,
    cells: tl.constexpr,
    block: tl.constexpr,
):
    """Add up what the rows of one block of queries attend to each block of keys, in fixed point."""
    head = tl.program_id(0) // query_blocks
    query_block = tl.program_id(0) % query_blocks
    visible = first_block + query_block + 1
    row = tl.program_id(0).to(tl.int64) * cells + tl.arange(0, cells)
    of_rows = sums + row[:, None] * key_blocks
    columns = tl.arange(0, block)
    top = tl.full((cells,), float("-inf"), tl.float32)
    total = tl.zeros((cells,), tl.float32)
    for begin in range(0, visible, block):
        column = begin + columns[None, :]
        part = tl.load(of_rows + column, mask=column < visible, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(part, axis=1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        total *= tl.exp2((top - base) * _LOG2_E)
        total += tl.sum(tl.exp2((part - base[:, None]) * _LOG2_E), axis=1)
        top = new_top
    base = tl.where(top == float("-inf"), 0.0, top)
    of_block = mass + (head * query_blocks + query_block).to(tl.int64) * key_blocks
    for begin in range(0, visible, block):
        column = begin + columns
        inside = column < visible
        part = tl.load(of_rows + column[None, :], mask=inside[None, :], other=float("-inf"))
        share = tl.exp2((part - base[:, None]) * _LOG2_E) / total[:, None]
        share = tl.where(share == share, share, 0.0)  # noqa: PLR0124  (NaN, and rows of no query)
        units = (share * _FIXED_POINT).to(tl.int64)
        tl.store(of_block + column, tl.sum(units, axis=0), mask=inside)


@triton.jit
def _mass_above(of_block, limit, visible, columns, block: tl.constexpr):
    """Add up the forced blocks, and the others that are heavier than `limit`."""
    found = tl.zeros((), tl.int64)
    for begin in range(0, visible, block):
        column = begin + columns
        mass = tl.load(of_block + column, mask=column < visible, other=0)
        forced = (column == 0) | (column == visible - 1)
        found += tl.sum(tl.where(forced | (mass > limit), mass, 0), axis=0)
    return found


@triton.jit(
    do_not_specialize=["head_stride", "block_stride", "first_block", "query_blocks", "key_blocks"],
    do_not_specialize_on_alignment=["kept"],
)
def keep_kernel(
    mass,
    share,
    kept,
    head_stride,
    block_stride,
    first_block,
    query_blocks,
    key_blocks,
    block: tl.constexpr,
):
    """Keep blocks of keys for one block of queries, as `mass.keep_share` does, without sorting.

    It searches for the least mass such that the blocks above it hold less than the share: those are
    kept, and of the blocks with just that mass the first, until the share is reached.
    """
    head = (tl.program_id(0) // query_blocks).to(tl.int64)
    query_block = tl.program_id(0) % query_blocks
    visible = first_block + query_block + 1
    of_block = mass + tl.program_id(0).to(tl.int64) * key_blocks
    out = kept + head * head_stride + query_block.to(tl.int64) * block_stride
    columns = tl.arange(0, block)
    total = tl.zeros((), tl.int64)
    top = tl.zeros((), tl.int64)
    for begin in range(0, visible, block):
        column = begin + columns
        part = tl.load(of_block + column, mask=column < visible, other=0)
        total += tl.sum(part, axis=0)
        top = tl.maximum(top, tl.max(part, axis=0))
    needed = tl.where(total == 0, float("inf"), tl.load(share + head) * total.to(tl.float64))
    # Blocks above `low` hold the share, those above `high` do not. Nothing is above `top`.
    low = tl.full((), -1, tl.int64)
    high = top
    if _mass_above(of_block, top, visible, columns, block).to(tl.float64) >= needed:
        high = top + 1
        low = top
    while high - low > 1:
        middle = (low + high) // 2
        if _mass_above(of_block, middle, visible, columns, block).to(tl.float64) < needed:
            high = middle
        else:
            low = middle
    above = _mass_above(of_block, high, visible, columns, block)
    ties_before = tl.zeros((), tl.int64)
    for begin in range(0, visible, block):
        column = begin + columns
        inside = column < visible
        part = tl.load(of_block + column, mask=inside, other=-1)
        forced = (column == 0) | (column == visible - 1)
        tie = ((part == high) & ~forced).to(tl.int64)
        before = above + (ties_before + tl.cumsum(tie, axis=0) - tie) * high
        chosen = forced | (part > high) | ((tie == 1) & (before.to(tl.float64) < needed))
        tl.store(out + column, chosen.to(tl.uint8), mask=inside)
        ties_before += tl.sum(tie, axis=0)
