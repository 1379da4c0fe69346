"""What the engine asks a policy: which blocks of keys the queries of a prefill step read.

A sparse policy answers by blocks of BLOCK_TOKENS queries and BLOCK_TOKENS keys (`known`, `select`).
A dense one is not asked: the engine reads every key, in the spans of `dense_spans`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

BLOCK_TOKENS = 128
"""Tokens of a block, of queries as of keys. The first begins at position 0."""


class Span(NamedTuple):
    """Positions `start` to `stop` - 1, read by one call of dense attention."""

    start: int
    stop: int


def dense_spans(keys: int, attend_tokens: int | None) -> tuple[Span, ...]:
    """Return the spans in which dense attention reads positions 0 to `keys` - 1.

    They are [0, attend_tokens), [attend_tokens, 2 * attend_tokens), ...: they follow from the
    arguments alone, not from where keys are stored.
    """
    step = attend_tokens or max(keys, 1)
    return tuple(Span(start, min(start + step, keys)) for start in range(0, keys, step))


class Place(NamedTuple):
    """Where a chunk of a prompt stands.

    Attributes:
        start: position of its first query, a multiple of BLOCK_TOKENS.
        queries: tokens in the chunk.
        keys: tokens up to the chunk's end, start + queries.
    """

    start: int
    queries: int
    keys: int

    @property
    def first_block(self) -> int:
        """The block of the chunk's first query."""
        return self.start // BLOCK_TOKENS

    @property
    def query_blocks(self) -> int:
        """Blocks of queries, the last of which may be part full."""
        return -(-self.queries // BLOCK_TOKENS)

    @property
    def key_blocks(self) -> int:
        """Blocks of keys, the last of which may be part full."""
        return -(-self.keys // BLOCK_TOKENS)


class Model(NamedTuple):
    """What a policy may know of the model. Query head h reads key head h // (heads / kv_heads)."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int


class Policy(Protocol):
    """Chooses the blocks of keys that prefill reads, for each query head apart.

    Built once an engine from its settings and the model. It holds these alone and keeps nothing
    from one call to the next. The blocks of a query block follow from that block's queries and the
    keys up to its end, so that a prompt cut into other chunks reads the same blocks; a policy for
    which this does not hold says so. (On CUDA, where a matrix product may round by the shape, only
    fixed tiles hold to this.)

    Its constructor takes the Model, then settings as keyword arguments, each with a default. The
    settings are checked there and nowhere else.

    Attributes:
        name: by which users choose it.
        sparse: False is dense attention; the engine then calls none of the methods but `describe`.
        reads_keys: False where `known` answers, so that keys that are not read need not be there.
    """

    name: str
    sparse: bool
    reads_keys: bool

    def known(self, layer: int, place: Place) -> torch.Tensor | None:
        """Return what `select` would, on the CPU, where no queries and keys are needed; else None.

        Heads may share memory, so that it must not be written to.
        """
        ...

    def select(
        self, query: torch.Tensor, keys: torch.Tensor, layer: int, place: Place
    ) -> torch.Tensor | None:
        """Choose the blocks of keys that each block of queries reads.

        No block lies after the block of queries, and the one with the same positions is always
        kept, so that every query reads at least itself.

        Args:
            query: [queries, heads, head_dim], rotated.
            keys: [keys, kv_heads, head_dim], rotated, from position 0 on to the chunk's end; of
                the queries' dtype and device. The last two dimensions are contiguous.
            layer: from 0.
            place: where the chunk stands.

        Returns:
            bool [heads, query_blocks, key_blocks] on the queries' device, or None where every
            block is to be read. Heads may share memory.
        """
        ...

    def scratch_bytes(self, queries: int, keys: int) -> int:
        """Return the most device memory that one `select` of such a chunk allocates."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return the settings in force, with the name, as JSON values."""
        ...


def causal_blocks(place: Place, device: torch.device | None = None) -> torch.Tensor:
    """Return where blocks hold keys that a query may read, bool [query_blocks, key_blocks]."""
    queries = torch.arange(place.first_block, place.first_block + place.query_blocks, device=device)
    return torch.arange(place.key_blocks, device=device) <= queries[:, None]
