"""Attention to chosen blocks of keys: FlexAttention on GPUs, elsewhere a plain reference."""

from __future__ import annotations

import time
import types
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from backends.base import ConfigurationError
from backends.engine.block_mask import MASK_ROWS, BlockLists, find_lay_blocks
from backends.engine.cache.base import KVLayout, whole_blocks
from backends.engine.memory import Buffer
from backends.engine.policy import BLOCK_TOKENS, Place, Policy

LEAST_HEAD_DIM = 16
"""Of FlexAttention on a GPU: `tl.dot` takes no shorter rows (torch/_inductor/kernel/flex)."""


class BlockKernel(Protocol):
    """Attention to blocks of keys.

    Attributes:
        name: for records.
        compile_seconds: what compiling took; None where nothing is compiled.
    """

    name: str
    compile_seconds: float | None

    def warm_up(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Compile for keys and values of this size, once for each that `attend` will be given."""
        ...

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        blocks: torch.Tensor,
        place: Place,
    ) -> torch.Tensor:
        """Attend with a chunk's queries to the blocks that each reads, causally.

        Args:
            query: [rows, heads, head_dim], in whole blocks; those after the chunk's queries are
                not meant.
            keys: [rows, kv_heads, head_dim] from position 0 on, in whole blocks. Rows of blocks
                that nobody reads may hold anything; those after the chunk's last token, in its own
                block, must be finite.
            values: like `keys`.
            blocks: see `Policy.select`. A block of queries that reads nothing has no output.
            place: where the chunk stands.

        Returns:
            Like `query`, in memory that the next call may overwrite.
        """
        ...


def make_block_kernel(
    device: torch.device, tensors: Mapping[str, torch.Tensor], out: torch.Tensor
) -> BlockKernel:
    """Return the kernel of a device.

    Args:
        device: where it is to run.
        tensors: of `block_buffers`, and others.
        out: see `MaskedAttention`.
    """
    return FlexAttention(tensors) if device.type == "cuda" else MaskedAttention(out)


def check_head_dim(device: torch.device, head_dim: int, policy_name: str) -> None:
    """Raise ConfigurationError if the kernel for blocks cannot take heads of this size."""
    if device.type != "cuda" or head_dim >= LEAST_HEAD_DIM:
        return
    raise ConfigurationError(
        f"backend.policy.name={policy_name}: this model's heads are {head_dim} wide, and "
        f"FlexAttention takes {LEAST_HEAD_DIM} or more on a GPU: use backend/policy=full, or "
        "device=cpu."
    )


def block_buffers(
    device: torch.device, heads: int, query_rows: int, key_rows: int
) -> tuple[Buffer, ...]:
    """Declare what a `BlockKernel` keeps for good, for rows in whole blocks."""
    if device.type != "cuda":
        return ()
    counts = (1, heads, query_rows // BLOCK_TOKENS)
    shapes = {"blocks": (*counts, key_rows // BLOCK_TOKENS), "block_counts": counts}
    return tuple(
        Buffer(f"{kind}_{name}", shape, torch.int32, "device", "activations")
        for kind in ("partial", "full")
        for name, shape in shapes.items()
    )


def block_passing_buffers(
    device: torch.device, layout: KVLayout, policy: Policy, *, heads: int, queries: int, keys: int
) -> tuple[Buffer, ...]:
    """Declare the room for what a layer and chunk allocates to choose and to attend."""
    whole = Place(0, whole_blocks(queries), whole_blocks(keys))

    def buffer(name: str, dims: tuple[int, ...], dtype: torch.dtype) -> Buffer:
        return Buffer(name, dims, dtype, "device", "activations")

    buffers = (
        buffer("selection", (policy.scratch_bytes(queries, keys),), torch.uint8),
        # As the policy returns them, and a copy.
        buffer("chosen_blocks", (2, heads, whole.query_blocks, whole.key_blocks), torch.bool),
    )
    if device.type == "cuda":
        rows = min(whole.query_blocks, MASK_ROWS)
        return (
            *buffers,
            buffer("block_order", (4, heads, rows, whole.key_blocks), torch.int64),
            buffer("block_output", (whole.queries, heads, layout.head_dim), layout.dtype),
            buffer("block_log_sum_exp", (2, heads, whole.queries), torch.float32),
        )
    gathered = (2, whole.keys, layout.kv_heads, layout.head_dim)
    return (
        *buffers,
        buffer("gathered", gathered, layout.dtype),
        buffer("mask", (2, heads, BLOCK_TOKENS, whole.keys), layout.dtype),
    )


class MaskedAttention:
    """Block-sparse attention by PyTorch's dense attention with a mask, a query block at a time.

    Keys of a query block are gathered first, those that any head reads. What a block of queries
    gives therefore depends on its own rows and those keys alone, however the prompt is cut.

    Args:
        out: [rows, heads, head_dim], in whole blocks.
    """

    name = "masked"
    compile_seconds: float | None = None

    def __init__(self, out: torch.Tensor) -> None:
        self._out = out

    def warm_up(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """See `BlockKernel.warm_up`: there is nothing to compile."""

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        blocks: torch.Tensor,
        place: Place,
    ) -> torch.Tensor:
        """Attend; see `BlockKernel.attend`."""
        by_block = (-1, BLOCK_TOKENS, *keys.shape[1:])
        keys, values = keys.view(by_block), values.view(by_block)
        for number in range(place.query_blocks):
            read = blocks[:, number].any(0).nonzero()[:, 0]
            if not len(read):
                continue
            rows = slice(number * BLOCK_TOKENS, (number + 1) * BLOCK_TOKENS)
            mask = blocks[:, number, read].repeat_interleave(BLOCK_TOKENS, -1)
            place_of = torch.arange(BLOCK_TOKENS, device=keys.device)
            positions = (read[:, None] * BLOCK_TOKENS + place_of).flatten()
            causal = positions <= (place.start + rows.start + place_of)[:, None]
            self._out[rows] = _masked(query[rows], keys[read], values[read], mask[:, None] & causal)
        return self._out


def _masked(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Attend with [queries, heads, head_dim] to [blocks, BLOCK_TOKENS, kv_heads, head_dim].

    `mask` is bool [heads, queries, keys]. The heads of a group go as a batch.
    """
    queries, heads, head_dim = query.shape
    kv_heads = keys.shape[2]
    group = heads // kv_heads
    by_head = [rows.flatten(0, 1).transpose(0, 1).unsqueeze(1) for rows in (keys, values)]
    grouped_keys, grouped_values = (rows.expand(-1, group, -1, -1) for rows in by_head)
    found = scaled_dot_product_attention(
        query.view(queries, kv_heads, group, head_dim).permute(1, 2, 0, 3),
        grouped_keys,
        grouped_values,
        attn_mask=mask.view(kv_heads, group, queries, -1),
    )
    return found.permute(2, 0, 1, 3).reshape(queries, heads, head_dim)


class FlexAttention:
    """PyTorch's FlexAttention over a mask of blocks (arXiv 2412.05496), compiled at construction.

    All shapes are those of the largest chunk and of the whole cache, and the mask's tensors are
    filled anew for each call, so that every call runs the same program. Each block of queries is
    computed by itself, in a fixed order of keys: its own block first, where the mask is causal,
    then the others, ascending.

    Args:
        tensors: of `block_buffers`.
        compiled: False runs what is not compiled, which ignores the lists of blocks; for tests of
            the mask.
    """

    name = "flex"

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, compiled: bool = True) -> None:
        self.compile_seconds: float | None = None
        kinds = "partial_blocks", "partial_block_counts", "full_blocks", "full_block_counts"
        self._lists = BlockLists(*(tensors[kind].zero_() for kind in kinds))
        device = self._lists.partial.device
        self._lay_blocks = find_lay_blocks(device)
        self._start = torch.zeros((), dtype=torch.int32, device=device)
        self._masks: dict[int, BlockMask] = {}
        run = _fresh(_attend_by_mask)
        self._run = torch.compile(run, dynamic=False, fullgraph=True) if compiled else run

    def warm_up(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Compile; see `BlockKernel.warm_up`."""
        started = time.perf_counter()
        nothing = torch.zeros((self._lists.full.shape[1], 1, 1), dtype=torch.bool)
        self.lay(nothing.to(query.device), Place(0, 1, 1))
        self._call(query, keys, values)
        if query.device.type == "cuda":
            torch.cuda.synchronize(query.device)
        self.compile_seconds = (self.compile_seconds or 0.0) + time.perf_counter() - started

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        blocks: torch.Tensor,
        place: Place,
    ) -> torch.Tensor:
        """Attend; see `BlockKernel.attend`."""
        self.lay(blocks, place)
        return self._call(query, keys, values)

    def lay(self, blocks: torch.Tensor, place: Place) -> None:
        """Fill the mask; see `block_mask.lay_blocks`."""
        self._start.fill_(place.start)
        self._lay_blocks(blocks, place, self._lists)

    def mask(self, key_rows: int) -> BlockMask:
        """Return the mask as FlexAttention takes it, for so many rows of keys."""
        if key_rows not in self._masks:
            lists = self._lists
            query_rows = lists.partial.shape[2] * BLOCK_TOKENS
            self._masks[key_rows] = BlockMask.from_kv_blocks(
                lists.partial_counts,
                lists.partial,
                lists.full_counts,
                lists.full,
                BLOCK_SIZE=BLOCK_TOKENS,
                mask_mod=_causal_from(self._start),
                seq_lengths=(query_rows, key_rows),
                compute_q_blocks=False,
            )
        return self._masks[key_rows]

    def _call(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        by_head = (rows.transpose(0, 1).unsqueeze(0) for rows in (query, keys, values))
        found: torch.Tensor = self._run(*by_head, self.mask(keys.shape[0]))
        return found[0].transpose(0, 1)


def _causal_from(start: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return a mask by which query `q` stands at position `start` + `q`."""

    def sees(
        batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        del batch, head
        return query + start >= key

    return sees


def _attend_by_mask(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: BlockMask
) -> Any:
    grouped = query.shape[1] != keys.shape[1]
    return flex_attention(query, keys, values, block_mask=mask, enable_gqa=grouped)


def _fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with code of its own: compiled programs are counted, and kept, by code."""
    plain = cast(types.FunctionType, function)
    return types.FunctionType(plain.__code__.replace(), plain.__globals__, plain.__name__)
