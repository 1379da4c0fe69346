"""The sizes that decide the buffers of an offload cache, checked before one is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, lcm

from backends.base import ConfigurationError
from backends.engine.cache.base import KVLayout, whole_blocks
from backends.engine.cache.prefix import reusable_tokens
from backends.engine.memory import Buffer

STAGES = 2
"""Chunk buffers: one is copied down while the next layer fills the other."""

MAX_TAIL_TOKENS = 256
"""New tokens kept on the device before they are copied down; at most a block."""


def blocks_in_span(attend_tokens: int, block_tokens: int, context_tokens: int) -> int:
    """Return the most blocks that one span, cut at multiples of `attend_tokens`, touches."""
    starts = range(0, context_tokens, attend_tokens)
    return max(
        ceil(min(start + attend_tokens, context_tokens) / block_tokens) - start // block_tokens
        for start in starts
    )


@dataclass(frozen=True, slots=True)
class OffloadGeometry:
    """The sizes that decide the buffers of an `OffloadCache`.

    Attributes:
        context_tokens: the longest request.
        block_tokens: tokens in a block, and in a slot.
        slots: of the ring; each holds keys and values of one layer for one block.
        chunk_tokens: the largest step, at most the context.
        attend_tokens: the largest span, at most the context.
        split_tokens: a multiple of which each piece of a one-token step starts at.
        prefix_cache: whether a later request may reuse the blocks of a prompt.
        prefix_cache_tokens: tokens kept for that beyond one context.
        sparse: whether steps read whole layers, side by side.
    """

    context_tokens: int
    block_tokens: int
    slots: int
    chunk_tokens: int
    attend_tokens: int
    split_tokens: int = 1
    prefix_cache: bool = False
    prefix_cache_tokens: int = 0
    sparse: bool = False

    @property
    def blocks(self) -> int:
        """CPU blocks of each layer: a context, and what is kept beyond it."""
        sizes = (self.context_tokens, self.prefix_cache_tokens)
        return sum(ceil(tokens / self.block_tokens) for tokens in sizes)

    @property
    def tail_tokens(self) -> int:
        """Rows of the tail."""
        return min(self.block_tokens, MAX_TAIL_TOKENS)

    @property
    def span_blocks(self) -> int:
        """The most blocks that one span touches."""
        return blocks_in_span(self.attend_tokens, self.block_tokens, self.context_tokens)

    @property
    def stages_are_slots(self) -> bool:
        """Whether slots serve as stages: a prompt that is one step reads no history."""
        return self.chunk_tokens == self.context_tokens == self.block_tokens

    @property
    def reads_blocks(self) -> bool:
        """Whether a one-token step can read blocks one by one, wherever spans are cut."""
        return self.block_tokens % self.split_tokens == 0

    def check(self) -> None:
        """Raise ConfigurationError if a span or a block does not fit."""
        if self.block_tokens > self.context_tokens:
            raise ConfigurationError(
                f"backend.kvcache_block_size={self.block_tokens} is longer than the context, "
                f"backend.max_model_len={self.context_tokens}; at most that is allowed."
            )
        if self.span_blocks > self.slots:
            raise ConfigurationError(
                f"backend.attend_tokens={self.attend_tokens} can touch {self.span_blocks} blocks "
                f"of {self.block_tokens} tokens at once, but backend.num_gpu_blocks={self.slots}: "
                f"set attend_tokens to at most {self.slots * self.block_tokens}, or "
                f"num_gpu_blocks to {self.span_blocks} or more."
            )
        longest_prompt = self.context_tokens - 1
        if self.prefix_cache and not self._reusable(longest_prompt):
            raise ConfigurationError(
                f"backend.prefix_cache=true has no effect: what is reused ends at multiples of "
                f"backend.kvcache_block_size={self.block_tokens} and of backend.chunk_tokens="
                f"{self.chunk_tokens}, and the first common one, "
                f"{lcm(self.block_tokens, self.chunk_tokens)}, is not below backend.max_model_len="
                f"{self.context_tokens} less one: lower one of the two, or set prefix_cache to "
                "false."
            )

    def _reusable(self, prompt_tokens: int) -> int:
        return reusable_tokens(prompt_tokens, self.block_tokens, self.chunk_tokens)

    def buffers(self, layout: KVLayout) -> tuple[Buffer, ...]:
        """Declare all buffers. The axis of two: keys, values."""
        buffers = [
            layout.buffer("ring", "device", "kv_ring", self.slots, 2, self.block_tokens),
            layout.buffer("tail", "device", "kv_ring", layout.layers, 2, self.tail_tokens),
        ]
        if not self.stages_are_slots:
            stages = layout.buffer("stages", "device", "kv_ring", STAGES, 2, self.chunk_tokens)
            buffers.append(stages)
        if self.sparse:
            rows = whole_blocks(self.context_tokens)
            buffers += [
                layout.buffer(f"layer_{name}", "device", "kv_ring", rows)
                for name in ("keys", "values")
            ]
        if self.span_blocks > 1:
            buffers.append(layout.buffer("scratch", "device", "kv_ring", 2, self.attend_tokens))
        buffers += [
            layout.buffer(host_name(layer), "host", "kv_host", self.blocks, 2, self.block_tokens)
            for layer in range(layout.layers)
        ]
        return tuple(buffers)


def host_name(layer: int) -> str:
    """Return the name of the buffer with a layer's blocks."""
    return f"blocks_layer_{layer}"
