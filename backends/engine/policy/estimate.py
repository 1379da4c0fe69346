"""XAttention's estimate of where attention goes, in PyTorch.

Source: XAttention (arXiv 2503.16428), section 2 and algorithm 1; thresholds as in
https://github.com/mit-han-lab/x-attention/tree/e379887.

Queries and keys are reduced by `stride`: a reduced row is `stride` queries in reverse order, side
by side, and a reduced column as many keys in order, so that their product is the sum of the
antidiagonal of a tile of the scores. Queries and keys beyond the end are zero, and a reduced row
without a single query has no mass. Only blocks in which some reduced column is not after the
reduced row have mass, hence none beyond the end of the keys has.

For each reduced row and block of keys only the log-sum-exp of its scores is kept. The softmax over
blocks of these is the row's attention to each block, as if it had been taken over columns.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional as F

from backends.engine.policy.base import BLOCK_TOKENS, Model, Place
from backends.engine.policy.mass import fixed_point, keep_share

SLICE_TOKENS = 8192
"""Queries that are estimated at a time, to bound the memory for log-sum-exps."""

_TILE_TOKENS = 4096
"""Keys in a product. Products are of one shape, whatever the chunk, so that they round alike."""


class Rule(NamedTuple):
    """What decides on blocks.

    Attributes:
        stride: tokens that are reduced to one; it divides BLOCK_TOKENS.
        scale: factor on the scores.
        share: of the attention, float64 [heads] on the queries' device: another block is kept
            while those before it hold less. Infinity keeps all.
    """

    stride: int
    scale: float
    share: torch.Tensor

    @property
    def cells(self) -> int:
        """Reduced rows, or columns, in a block."""
        return BLOCK_TOKENS // self.stride


SelectBlocks = Callable[[torch.Tensor, torch.Tensor, Place, Rule], torch.Tensor]


def find_select_blocks(device: torch.device) -> SelectBlocks:
    """Return `select_blocks` in Triton on a GPU where Triton is installed, else PyTorch's."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from backends.engine.policy import estimate_triton  # noqa: PLC0415 (only where it can run)

        return estimate_triton.select_blocks
    return select_blocks


def slices(place: Place) -> list[Place]:
    """Cut a chunk into slices of at most SLICE_TOKENS queries."""
    starts = range(place.start, place.keys, SLICE_TOKENS)
    stops = [min(start + SLICE_TOKENS, place.keys) for start in starts]
    return [Place(start, stop - start, stop) for start, stop in zip(starts, stops, strict=True)]


def scratch_bytes(queries: int, keys: int, model: Model, stride: int) -> int:
    """Return the most memory that `select_blocks` allocates, in PyTorch or in Triton."""
    _, heads, kv_heads, head_dim = model
    whole = Place(keys - queries, queries, keys)
    part = Place(0, min(queries, SLICE_TOKENS), keys)
    cells = BLOCK_TOKENS // stride
    chosen = heads * whole.query_blocks * whole.key_blocks
    sums = 4 * heads * part.query_blocks * cells * part.key_blocks
    masses = 8 * heads * part.query_blocks * part.key_blocks
    # PyTorch alone: the slice's rows and a tile's columns, a copy each; scores of a block and a
    # tile, and what their log-sum-exps pass through; shares of a block, units, what ranks them.
    rows = 8 * heads * head_dim * part.query_blocks * BLOCK_TOKENS
    tile = 8 * kv_heads * head_dim * _TILE_TOKENS + 32 * heads * cells * _TILE_TOKENS // stride
    ranking = heads * part.key_blocks * (32 * cells + 128)
    return chosen + sums + masses + rows + tile + ranking


def select_blocks(
    query: torch.Tensor, keys: torch.Tensor, place: Place, rule: Rule
) -> torch.Tensor:
    """Choose blocks of keys for the queries of a chunk.

    Args:
        query: as for `Policy.select`.
        keys: likewise.
        place: where the chunk stands.
        rule: what decides.

    Returns:
        bool [heads, query_blocks, key_blocks].
    """
    shape = query.shape[1], place.query_blocks, place.key_blocks
    kept = torch.zeros(shape, dtype=torch.bool, device=query.device)
    for part in slices(place):
        rows = query[part.start - place.start :][: part.queries]
        _mark_blocks(rows, keys, part, rule, kept[:, part.first_block - place.first_block :])
    return kept


def _mark_blocks(
    query: torch.Tensor, keys: torch.Tensor, place: Place, rule: Rule, kept: torch.Tensor
) -> None:
    """Set the blocks of one slice; a function, so that nothing of it stays for the next."""
    sums = log_sum_exps(query, keys[: place.keys], place, rule)
    for block in range(place.query_blocks):
        own = place.first_block + block
        of_block = sums[:, block * rule.cells : (block + 1) * rule.cells, : own + 1]
        mass = fixed_point(of_block.softmax(-1)).sum(1)
        column = torch.arange(own + 1, device=query.device)
        forced = (column == 0) | (column == own)
        kept[:, block, : own + 1] = keep_share(mass, forced, rule.share[:, None])


def log_sum_exps(query: torch.Tensor, keys: torch.Tensor, place: Place, rule: Rule) -> torch.Tensor:
    """Return the log-sum-exp of each reduced row's scores in each block of keys.

    Args:
        query: [queries, heads, head_dim].
        keys: [keys, kv_heads, head_dim].
        place: where the queries stand.
        rule: its stride and scale.

    Returns:
        float32 [heads, query_blocks * BLOCK_TOKENS / stride, key_blocks]; minus infinity where a
        row has no query, and where a block has no column up to the row.
    """
    heads, kv_heads = query.shape[1], keys.shape[1]
    reduced = _reduced(query, place.query_blocks * BLOCK_TOKENS, rule.stride, reverse=True)
    rows = reduced.view(kv_heads, heads // kv_heads, place.query_blocks, rule.cells, -1)
    shape = heads, place.query_blocks * rule.cells, place.key_blocks
    sums = torch.full(shape, -torch.inf, device=query.device)
    for first_key in range(0, place.keys, _TILE_TOKENS):
        tile = keys[first_key : first_key + _TILE_TOKENS]
        of_tile = sums[:, :, first_key // BLOCK_TOKENS :][:, :, : _TILE_TOKENS // BLOCK_TOKENS]
        _reduce_tile(rows, tile, first_key, place, rule, of_tile)
    return sums


def _reduce_tile(  # noqa: PLR0917
    rows: torch.Tensor,
    keys: torch.Tensor,
    first_key: int,
    place: Place,
    rule: Rule,
    sums: torch.Tensor,
) -> None:
    """Set the log-sum-exps of one tile of keys, a block of queries at a time.

    Args:
        rows: reduced queries, [kv_heads, heads a kv_head, query_blocks, cells, head_dim * stride].
        keys: the tile's, of which the first stands at `first_key`.
        first_key: a multiple of _TILE_TOKENS.
        place: where the queries stand.
        rule: its stride and scale.
        sums: [heads, rows, the tile's blocks].
    """
    columns = _reduced(keys, _TILE_TOKENS, rule.stride, reverse=False).transpose(1, 2)
    column = first_key // rule.stride + torch.arange(columns.shape[2], device=keys.device)
    for block in range(place.query_blocks):
        if place.start + (block + 1) * BLOCK_TOKENS <= first_key:
            continue
        of_block = slice(block * rule.cells, (block + 1) * rule.cells)
        row = torch.arange(of_block.start, of_block.stop, device=keys.device)[:, None]
        unseen = (column > place.start // rule.stride + row) | (row * rule.stride >= place.queries)
        products = rows[:, :, block].flatten(1, 2) @ columns
        scores = products.view(sums.shape[0], rule.cells, -1).mul(rule.scale)
        scores = scores.masked_fill(unseen, -torch.inf)
        found = scores.view(*scores.shape[:2], -1, rule.cells).logsumexp(-1)
        sums[:, of_block] = found[:, :, : sums.shape[2]]


def _reduced(tokens: torch.Tensor, length: int, stride: int, reverse: bool) -> torch.Tensor:
    """Put `stride` tokens side by side, after adding zeros up to `length` tokens.

    Args:
        tokens: [tokens, heads, head_dim].
        length: a multiple of the stride.
        stride: tokens that are reduced to one.
        reverse: whether the last of them comes first.

    Returns:
        float32 [heads, length / stride, stride * head_dim].
    """
    heads, head_dim = tokens.shape[1:]
    tokens = F.pad(tokens.float(), (0, 0, 0, 0, 0, length - tokens.shape[0]))
    tokens = tokens.view(-1, stride, heads, head_dim)
    if reverse:
        tokens = tokens.flip(1)
    return tokens.permute(2, 0, 1, 3).reshape(heads, -1, stride * head_dim)
