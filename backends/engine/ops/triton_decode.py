# ruff: noqa: PLR0917  (kernels have many arguments)
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
"""Triton kernels for one row: matrix times vector, and attention of one query.

They are bound by memory: each weight, key and value is read once. See
`backends.engine.ops.triton_rows` for what is specialised on.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _load(cells, mask):
    return tl.load(cells, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _load_weights(cells, mask):
    return tl.load(cells, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _sum_vectors(products, row_block: tl.constexpr, block: tl.constexpr, vector: tl.constexpr):
    """Sum up `vector` neighbours of [row_block, block].

    They are what one thread loads at once, so that few sums stay in its registers.
    """
    return tl.sum(tl.reshape(products, (row_block, block // vector, vector)), axis=2)


@triton.jit
def _normalising_factor(squares, hidden: tl.constexpr, epsilon):
    return tl.rsqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / hidden + epsilon)


@triton.jit
def project_kernel(
    rows,
    weight,
    bias,
    out,
    norm,
    epsilon,
    add: tl.constexpr,
    hidden: tl.constexpr,
    outputs: tl.constexpr,
    row_block: tl.constexpr,
    block: tl.constexpr,
    vector: tl.constexpr,
):
    """Compute `row_block` outputs a program.

    Weights are loaded one step ahead of their use. The root mean square of the row is a common
    factor of all products, so that it is worked out beside them and applied at the end.
    """
    index = tl.program_id(0) * row_block + tl.arange(0, row_block)
    safe = tl.minimum(index, outputs - 1).to(tl.int64)
    columns = tl.arange(0, block)[None, :]
    cells = weight + safe[:, None] * hidden + columns
    total = tl.zeros((row_block, block // vector), tl.float32)
    squares = tl.zeros((1, block // vector), tl.float32)
    weights = _load_weights(cells, columns < hidden)
    for begin in range(0, hidden, block):
        inside = columns < hidden - begin
        ahead = begin + block
        next_weights = _load_weights(cells + ahead, columns < hidden - ahead)
        inputs = _load(rows + begin + columns, inside)
        if norm is not None:
            squares += _sum_vectors(inputs * inputs, 1, block, vector)
            inputs *= _load(norm + begin + columns, inside)
        total += _sum_vectors(weights.to(tl.float32) * inputs, row_block, block, vector)
        weights = next_weights
    result = tl.sum(total, axis=1)
    if norm is not None:
        result *= _normalising_factor(squares, hidden, epsilon)
    real = index < outputs
    if bias is not None:
        result += _load(bias + index, real)
    if add:
        result += _load(out + index, real)
        # Several threads read the same cell; all must have done so before one overwrites it.
        tl.debug_barrier()
    tl.store(out + index, result, mask=real)


@triton.jit
def gated_kernel(
    rows,
    weight,
    bias,
    out,
    norm,
    epsilon,
    hidden: tl.constexpr,
    outputs: tl.constexpr,
    row_block: tl.constexpr,
    block: tl.constexpr,
    vector: tl.constexpr,
):
    """Compute `row_block` outputs a program, each from a row of gate and a row of up.

    Otherwise like `project_kernel`.
    """
    index = tl.program_id(0) * row_block + tl.arange(0, row_block)
    safe = tl.minimum(index, outputs - 1).to(tl.int64)
    columns = tl.arange(0, block)[None, :]
    gate_cells = weight + safe[:, None] * hidden + columns
    up_cells = weight + (safe + outputs)[:, None] * hidden + columns
    gates = tl.zeros((row_block, block // vector), tl.float32)
    ups = tl.zeros((row_block, block // vector), tl.float32)
    squares = tl.zeros((1, block // vector), tl.float32)
    gate_weights = _load_weights(gate_cells, columns < hidden)
    up_weights = _load_weights(up_cells, columns < hidden)
    for begin in range(0, hidden, block):
        inside = columns < hidden - begin
        ahead = begin + block
        next_gate_weights = _load_weights(gate_cells + ahead, columns < hidden - ahead)
        next_up_weights = _load_weights(up_cells + ahead, columns < hidden - ahead)
        inputs = _load(rows + begin + columns, inside)
        if norm is not None:
            squares += _sum_vectors(inputs * inputs, 1, block, vector)
            inputs *= _load(norm + begin + columns, inside)
        gates += _sum_vectors(gate_weights.to(tl.float32) * inputs, row_block, block, vector)
        ups += _sum_vectors(up_weights.to(tl.float32) * inputs, row_block, block, vector)
        gate_weights, up_weights = next_gate_weights, next_up_weights
    gate, up = tl.sum(gates, axis=1), tl.sum(ups, axis=1)
    if norm is not None:
        factor = _normalising_factor(squares, hidden, epsilon)
        gate *= factor
        up *= factor
    real = index < outputs
    if bias is not None:
        gate += _load(bias + index, real)
        up += _load(bias + outputs + index, real)
    tl.store(out + index, gate / (1.0 + tl.exp(-gate)) * up, mask=real)


@triton.jit(
    do_not_specialize=["first", "max_keys", "key_rows", "tail_rows"],
    do_not_specialize_on_alignment=["stop", "tail_start"],
)
def attend_kernel(
    query,
    keys,
    values,
    tail_keys,
    tail_values,
    partial_output,
    partial_log_sum_exp,
    stop,
    tail_start,
    first: tl.int64,
    max_keys: tl.int64,
    key_rows: tl.int64,
    tail_rows: tl.int64,
    scale,
    key_stride,
    value_stride,
    tail_key_stride,
    tail_value_stride,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    group_block: tl.constexpr,
    key_block: tl.constexpr,
    dim_block: tl.constexpr,
    split_tokens: tl.constexpr,
):
    """Attend with the query heads of one key head to the keys of one split.

    Whether a key lies in the tail decides on its address and on nothing else, so that both give
    the same bits.
    """
    kv_head = tl.program_id(0) % kv_heads
    split = first // split_tokens + tl.program_id(0) // kv_heads
    begin = split * split_tokens
    limit = tl.minimum(tl.load(stop), first + max_keys)
    if begin >= limit:
        return
    tail_first = tl.load(tail_start)
    dims = tl.arange(0, dim_block)
    member = tl.arange(0, group_block)
    head = kv_head * group + member
    query_mask = (member < group)[:, None] & (dims < head_dim)[None, :]
    queries = tl.load(query + head[:, None] * head_dim + dims[None, :], mask=query_mask, other=0.0)
    top = tl.full((group_block,), float("-inf"), tl.float32)
    total = tl.zeros((group_block,), tl.float32)
    output = tl.zeros((group_block, dim_block), tl.float32)
    cells = kv_head * head_dim + dims[None, :]
    for ahead in range(0, split_tokens, key_block):
        position = begin + ahead + tl.arange(0, key_block)
        row = position - first
        late_row = position - tail_first
        late = late_row >= 0
        there = (position < limit) & tl.where(late, late_row < tail_rows, row < key_rows)
        key_row = tl.where(late, tail_keys + late_row * tail_key_stride, keys + row * key_stride)
        value_row = tl.where(
            late, tail_values + late_row * tail_value_stride, values + row * value_stride
        )
        mask = there[:, None] & (dims < head_dim)[None, :]
        key = tl.load(key_row[:, None] + cells, mask=mask, other=0.0)
        value = tl.load(value_row[:, None] + cells, mask=mask, other=0.0)
        scores = tl.dot(queries, tl.trans(key), input_precision="ieee") * (scale * _LOG2_E)
        scores = tl.where(there[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        shares = tl.exp2(scores - base[:, None])
        decay = tl.exp2(top - base)
        total = total * decay + tl.sum(shares, axis=1)
        output = output * decay[:, None]
        output = tl.dot(shares.to(value.dtype), value, output, input_precision="ieee")
        top = new_top
    output = output / tl.where(total == 0.0, 1.0, total)[:, None]
    target = split * (kv_heads * group) + head
    tl.store(partial_output + target[:, None] * head_dim + dims[None, :], output, mask=query_mask)
    tl.store(partial_log_sum_exp + target, (top + tl.log2(total)) * _LN_2, mask=member < group)


@triton.jit(do_not_specialize_on_alignment=["stop"])
def combine_kernel(
    partial_output,
    partial_log_sum_exp,
    stop,
    out,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    split_block: tl.constexpr,
    dim_block: tl.constexpr,
    split_tokens: tl.constexpr,
):
    """Merge all splits for `dim_block` cells of one head a program."""
    dim_tiles: tl.constexpr = (head_dim + dim_block - 1) // dim_block
    head = tl.program_id(0) // dim_tiles
    dims = (tl.program_id(0) % dim_tiles) * dim_block + tl.arange(0, dim_block)
    inside = dims < head_dim
    splits = (tl.load(stop) + split_tokens - 1) // split_tokens
    member = tl.arange(0, split_block)
    tops = tl.full((split_block,), float("-inf"), tl.float32)
    begin = splits * 0
    while begin < splits:
        split = begin + member
        sums = partial_log_sum_exp + split * heads + head
        tops = tl.maximum(tops, tl.load(sums, mask=split < splits, other=float("-inf")))
        begin += split_block
    top = tl.max(tops, axis=0)
    total = tl.zeros((split_block,), tl.float32)
    output = tl.zeros((split_block, dim_block), tl.float32)
    begin = splits * 0
    while begin < splits:
        split = begin + member
        real = split < splits
        sums = partial_log_sum_exp + split * heads + head
        share = tl.exp(tl.load(sums, mask=real, other=float("-inf")) - top)
        total += share
        cells = (split * heads + head)[:, None] * head_dim + dims[None, :]
        part = tl.load(partial_output + cells, mask=real[:, None] & inside[None, :], other=0.0)
        output += part * share[:, None]
        begin += split_block
    merged = tl.sum(output, axis=0) / tl.sum(total, axis=0)
    tl.store(out + head * head_dim + dims, merged, mask=inside)
