# ruff: noqa: PLR0917  (kernels have many arguments)
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Triton kernels for any number of rows: norm, rotation, activation, merge.

Launched by `backends.engine.ops.triton_ops`. Sizes of the model are compile-time constants.
Numbers that change from call to call are not specialised on, so that nothing is compiled while
serving. (Pointers have no annotation: Triton takes their types from the tensors.)
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    rows,
    weight,
    out,
    row_stride,
    out_stride,
    epsilon,
    hidden: tl.constexpr,
    block: tl.constexpr,
):
    """Normalise one row a program."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    inside = columns < hidden
    values = tl.load(rows + row * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    factors = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    mean_square = tl.sum(values * values, axis=0) / hidden
    values = values * tl.rsqrt(mean_square + epsilon) * factors
    tl.store(out + row * out_stride + columns, values, mask=inside)


@triton.jit
def _rotate_heads(
    source,
    norm,
    target,
    angles_of,
    scaling,
    epsilon,
    first_head,
    heads: tl.constexpr,
    half: tl.constexpr,
    head_block: tl.constexpr,
    half_block: tl.constexpr,
):
    """Rotate some heads of one row.

    `source`, `norm` and `target` point to its first head, `angles_of` is (position, frequencies).
    """
    columns = tl.arange(0, half_block)
    inside = columns < half
    position, frequencies = angles_of
    angles = position * tl.load(frequencies + columns, mask=inside, other=0.0)
    cosines = (tl.cos(angles) * scaling)[None, :]
    sines = (tl.sin(angles) * scaling)[None, :]
    head = first_head + tl.arange(0, head_block)
    mask = (head < heads)[:, None] & inside[None, :]
    cells = head[:, None] * (2 * half) + columns[None, :]
    left = tl.load(source + cells, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(source + cells + half, mask=mask, other=0.0).to(tl.float32)
    if norm is not None:
        mean_square = tl.sum(left * left + right * right, axis=1) / (2 * half)
        factor = tl.rsqrt(mean_square + epsilon)[:, None]
        left = left * factor * tl.load(norm + cells, mask=mask, other=0.0).to(tl.float32)
        right = right * factor * tl.load(norm + cells + half, mask=mask, other=0.0).to(tl.float32)
    tl.store(target + cells, left * cosines - right * sines, mask=mask)
    tl.store(target + cells + half, right * cosines + left * sines, mask=mask)


@triton.jit
def _copy_heads(
    source,
    target,
    first_head,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    head_block: tl.constexpr,
    dim_block: tl.constexpr,
):
    columns = tl.arange(0, dim_block)
    head = first_head + tl.arange(0, head_block)
    mask = (head < heads)[:, None] & (columns < head_dim)[None, :]
    cells = head[:, None] * head_dim + columns[None, :]
    tl.store(target + cells, tl.load(source + cells, mask=mask), mask=mask)


@triton.jit(
    do_not_specialize=["offset"],
    do_not_specialize_on_alignment=["start", "row"],
)
def rotate_kernel(
    projected,
    start,
    offset: tl.int64,
    frequencies,
    scaling,
    norm,
    epsilon,
    query_out,
    key_out,
    value_out,
    row,
    query_stride,
    key_stride,
    value_stride,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    half: tl.constexpr,
    head_block: tl.constexpr,
    half_block: tl.constexpr,
):
    """Handle `head_block` heads of one row a program: of queries, of keys or of values."""
    query_tiles: tl.constexpr = 0 if query_out is None else (heads + head_block - 1) // head_block
    kv_tiles: tl.constexpr = (kv_heads + head_block - 1) // head_block
    tiles: tl.constexpr = query_tiles + 2 * kv_tiles
    index = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    source = projected + index * ((heads + 2 * kv_heads) * 2 * half)
    position = (tl.load(start) + offset + index).to(tl.float32)
    target = index
    if row is not None:
        target += tl.load(row)
    if tile < query_tiles:
        if query_out is not None:
            _rotate_heads(
                source,
                norm,
                query_out + index * query_stride,
                (position, frequencies),
                scaling,
                epsilon,
                tile * head_block,
                heads,
                half,
                head_block,
                half_block,
            )
    elif tile < query_tiles + kv_tiles:
        _rotate_heads(
            source + heads * 2 * half,
            None if norm is None else norm + heads * 2 * half,
            key_out + target * key_stride,
            (position, frequencies),
            scaling,
            epsilon,
            (tile - query_tiles) * head_block,
            kv_heads,
            half,
            head_block,
            half_block,
        )
    else:
        _copy_heads(
            source + (heads + kv_heads) * 2 * half,
            value_out + target * value_stride,
            (tile - query_tiles - kv_tiles) * head_block,
            kv_heads,
            2 * half,
            head_block,
            2 * half_block,
        )


@triton.jit
def silu_mul_kernel(
    gate_up,
    out,
    gate_up_stride,
    out_stride,
    intermediate: tl.constexpr,
    block: tl.constexpr,
):
    """Handle `block` columns of one row a program."""
    blocks: tl.constexpr = (intermediate + block - 1) // block
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * block + tl.arange(0, block)
    inside = columns < intermediate
    gates = gate_up + row * gate_up_stride + columns
    gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gates + intermediate, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, gate / (1.0 + tl.exp(-gate)) * up, mask=inside)


@triton.jit(
    do_not_specialize=[
        "pairs",
        "sum_row_stride",
        "sum_head_stride",
        "part_sum_row_stride",
        "part_sum_head_stride",
    ],
    do_not_specialize_on_alignment=["log_sum_exp", "part_log_sum_exp"],
)
def merge_kernel(
    output,
    log_sum_exp,
    part_output,
    part_log_sum_exp,
    pairs: tl.int64,
    output_row_stride,
    sum_row_stride: tl.int64,
    sum_head_stride: tl.int64,
    part_row_stride,
    part_head_stride,
    part_sum_row_stride: tl.int64,
    part_sum_head_stride: tl.int64,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    pair_block: tl.constexpr,
    dim_block: tl.constexpr,
):
    """Merge `pair_block` pairs of row and head a program."""
    pair = tl.program_id(0).to(tl.int64) * pair_block + tl.arange(0, pair_block)
    real = pair < pairs
    row, head = pair // heads, pair % heads
    minus_infinity = float("-inf")
    sums = log_sum_exp + row * sum_row_stride + head * sum_head_stride
    ours = tl.load(sums, mask=real, other=minus_infinity)
    part_sums = part_log_sum_exp + row * part_sum_row_stride + head * part_sum_head_stride
    theirs = tl.load(part_sums, mask=real, other=minus_infinity)
    # Several threads read the same log-sum-exp; all must have done so before one overwrites it.
    tl.debug_barrier()
    top = tl.maximum(ours, theirs)
    top = tl.where(top == minus_infinity, 0.0, top)
    our_weight, their_weight = tl.exp(ours - top), tl.exp(theirs - top)
    total = our_weight + their_weight
    tl.store(sums, top + tl.log(total), mask=real)
    total = tl.where(total == 0.0, 1.0, total)

    columns = tl.arange(0, dim_block)
    inside = (columns < head_dim)[None, :]
    mine = output + (row * output_row_stride + head * head_dim)[:, None] + columns[None, :]
    other = (row * part_row_stride + head * part_head_stride)[:, None] + columns[None, :]
    our_mask = inside & (real & (ours != minus_infinity))[:, None]
    their_mask = inside & (real & (theirs != minus_infinity))[:, None]
    merged = tl.load(mine, mask=our_mask, other=0.0) * (our_weight / total)[:, None]
    part = tl.load(part_output + other, mask=their_mask, other=0.0).to(tl.float32)
    merged += part * (their_weight / total)[:, None]
    tl.store(mine, merged, mask=inside & real[:, None])
