"""Sparse prefill: asks the policy which blocks a chunk reads, and attends to these alone.

Where a policy leaves so little out that dense attention is faster, the engine's dense kernel reads
everything, and that is counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from backends.base import ConfigurationError
from backends.engine.block_attention import BlockKernel
from backends.engine.policy import BLOCK_TOKENS, Place, Policy

DENSE_FROM = {"cuda": 0.6, "cpu": 1.0}
"""Kept share of the causal blocks from which a layer and chunk goes through dense attention.

On an H200 FlexAttention on 128x128 blocks is as fast as dense attention of cuDNN at about 0.6, at
32768 tokens as at 131072. The masked kernel is for correctness, so that on a CPU only what leaves
nothing out is dense."""


def check_chunk(chunk_tokens: int | None, context_tokens: int, policy_name: str) -> None:
    """Raise ConfigurationError unless every chunk of a prompt starts where a block does."""
    if chunk_tokens is None or chunk_tokens >= context_tokens or chunk_tokens % BLOCK_TOKENS == 0:
        return
    below = chunk_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    nearest = " or ".join(str(one) for one in (below, below + BLOCK_TOKENS) if one)
    raise ConfigurationError(
        f"backend.chunk_tokens={chunk_tokens}: policy {policy_name} reads blocks of {BLOCK_TOKENS} "
        f"tokens, so that chunks must be a multiple of it, or null for the whole prompt: use "
        f"{nearest}."
    )


class Chosen(NamedTuple):
    """What a layer and chunk reads.

    Attributes:
        blocks: bool [heads, query_blocks, key_blocks] on the device, or None for dense attention.
        read: key blocks that some head and row reads, bool [key_blocks] in CPU memory; None is
            all.
        kept, causal: how many blocks are computed, and how many dense attention would compute,
            over all heads.
    """

    blocks: torch.Tensor | None
    read: torch.Tensor | None
    kept: int
    causal: int


class Selection:
    """Asks a policy, for one request at a time. It knows nothing of the request before.

    Args:
        policy: a sparse one.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def select(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        layer: int,
        place: Place,
        request_id: int,
    ) -> torch.Tensor | None:
        """Return the blocks that a request's chunk reads in a layer; see `Policy.select`."""
        del request_id
        return self.policy.select(query, keys, layer, place)


class Sparse:
    """What steps of several tokens go through in an engine with a sparse policy.

    Args:
        selection: asks the policy.
        kernel: attends to blocks.
        query: the workspace's queries, [rows, heads, head_dim], in whole blocks: those of all rows
            of a step, also where only the last is attended with.
        layers: of the model. The last of them attends with the last query of a prompt alone.
    """

    def __init__(
        self, selection: Selection, kernel: BlockKernel, query: torch.Tensor, layers: int
    ) -> None:
        self.layers = layers
        self.selection = selection
        self.policy = selection.policy
        self.kernel = kernel
        self.query = query
        self.dense_from = DENSE_FROM[query.device.type]

    def warm_up(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Compile all that will run for a cache whose layers are like these."""
        self.kernel.warm_up(self.query, keys, values)
        queries = min(self.query.shape[0], keys.shape[0])
        for count in {queries, min(queries, BLOCK_TOKENS + 1)}:
            self.policy.select(self.query[:count], keys[:count], 0, Place(0, count, count))

    def known(self, layer: int, place: Place) -> Chosen | None:
        """Return what is read where that follows from the place alone, blocks in CPU memory."""
        if self.policy.reads_keys:
            return None
        blocks = self.policy.known(layer, place)
        if blocks is None:
            raise AssertionError(f"policy {self.policy.name} neither knows nor reads keys")
        return self._judged(blocks, layer, place)

    def choose(
        self,
        keys: torch.Tensor,
        layer: int,
        place: Place,
        request_id: int,
        known: Chosen | None,
    ) -> Chosen:
        """Ask the policy for blocks on the device.

        Args:
            keys: the layer's, as the kernel takes them.
            layer: from 0.
            place: where the chunk stands.
            request_id: the request's counter.
            known: what `known` returned.
        """
        query, held = self.query[: place.queries], keys[: place.keys]
        blocks = self.selection.select(query, held, layer, place, request_id)
        if known is None or blocks is None:
            return self._judged(blocks, layer, place)
        return known._replace(blocks=self._attended_with(blocks, layer))

    def attend(
        self, keys: torch.Tensor, values: torch.Tensor, blocks: torch.Tensor, place: Place
    ) -> torch.Tensor:
        """Attend with the step's queries; see `BlockKernel.attend`."""
        return self.kernel.attend(self.query, keys, values, blocks, place)

    def _attended_with(self, blocks: torch.Tensor, layer: int) -> torch.Tensor:
        """Leave out what belongs to queries that the layer does not attend with."""
        if layer < self.layers - 1:
            return blocks
        blocks = blocks.clone()
        blocks[:, :-1] = False
        return blocks

    def _judged(self, blocks: torch.Tensor | None, layer: int, place: Place) -> Chosen:
        causal = self.query.shape[1] * causal_count(place, last=layer == self.layers - 1)
        if blocks is None:
            return Chosen(None, None, causal, causal)
        blocks = self._attended_with(blocks, layer)
        by_key = _counts_by_key(blocks).cpu()
        kept = int(by_key.sum())
        if kept >= self.dense_from * causal:
            return Chosen(None, None, causal, causal)
        return Chosen(blocks, by_key > 0, kept, causal)


def _counts_by_key(blocks: torch.Tensor) -> torch.Tensor:
    """Return how many heads and rows read each block of keys, int64 [key_blocks]."""
    if blocks.stride(0) == 0:  # all heads share one memory
        return blocks[0].sum(0) * blocks.shape[0]
    return blocks.sum((0, 1))


def causal_count(place: Place, *, last: bool = False) -> int:
    """Return how many blocks of keys a chunk's blocks of queries may see, for one head.

    With `last`, those that the last block of queries may see.
    """
    first, count = place.first_block, place.query_blocks
    if last:
        return first + count
    return count * first + count * (count + 1) // 2


class Figures(NamedTuple):
    """What `Generation` says of sparse prefill; None where there was none."""

    density: float | None
    dense_share: float | None
    estimation_seconds: float | None
    attention_seconds: float | None


@dataclass(slots=True)
class Tally:
    """What sparse prefill has cost one request.

    Attributes:
        device: where it runs.
        kept, causal: blocks computed, and blocks that dense attention would have computed, over
            heads, layers and chunks.
        dense_parts, parts: layers and chunks that went through dense attention, and all.
    """

    device: torch.device
    kept: int = 0
    causal: int = 0
    dense_parts: int = 0
    parts: int = 0
    _estimation: list[tuple[Any, Any]] = field(default_factory=list)
    _attention: list[tuple[Any, Any]] = field(default_factory=list)

    def count(self, chosen: Chosen) -> None:
        """Count a layer and chunk."""
        self.kept += chosen.kept
        self.causal += chosen.causal
        self.dense_parts += chosen.blocks is None
        self.parts += 1

    @contextmanager
    def estimating(self) -> Iterator[None]:
        """Time what is asked of the device within: the choice of blocks."""
        with self._timing(self._estimation):
            yield

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Time what is asked of the device within: attention."""
        with self._timing(self._attention):
            yield

    @contextmanager
    def _timing(self, spans: list[tuple[Any, Any]]) -> Iterator[None]:
        start = self._now()
        yield
        spans.append((start, self._now()))

    def _now(self) -> Any:
        """Return an event of the compute stream, or the time where there is none."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def figures(self) -> Figures:
        """Return what a Generation holds, once all that was asked of the device is done."""
        if not self.parts:
            return Figures(None, None, None, None)
        return Figures(
            self.kept / self.causal,
            self.dense_parts / self.parts,
            self._seconds(self._estimation),
            self._seconds(self._attention),
        )

    def _seconds(self, spans: list[tuple[Any, Any]]) -> float:
        if self.device.type != "cuda":
            return float(sum(stop - start for start, stop in spans))
        return float(sum(start.elapsed_time(stop) for start, stop in spans)) / 1000
