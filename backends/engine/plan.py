"""Which buffers an engine needs, from its settings and the model's shape, before it has any."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from backends.base import ConfigurationError
from backends.engine import faults
from backends.engine.attention import CallSize, Kernel, choose_kernel, passing_buffers
from backends.engine.block_attention import (
    block_buffers,
    block_passing_buffers,
    check_head_dim,
)
from backends.engine.cache.base import KVLayout, whole_blocks
from backends.engine.cache.offload_geometry import OffloadGeometry
from backends.engine.cache.resident import resident_buffers
from backends.engine.memory import (
    Alternative,
    Buffer,
    MemoryPlan,
    check,
    context_allowance,
    read_limits,
)
from backends.engine.model import weight_buffers
from backends.engine.ops import SPLIT_TOKENS, Ops, make_ops, splits_for
from backends.engine.policy import BLOCK_TOKENS, Model, Policy, make_policy
from backends.engine.settings import MIN_SLOTS, Settings, resolve_device, resolve_dtype
from backends.engine.shape import ModelShape, find_model, read_shape
from backends.engine.sparse import check_chunk
from backends.engine.weights import Checkpoint, StateDict, WeightSource
from backends.engine.workspace import StepSize, workspace_buffers


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What decides every buffer of an engine.

    Attributes:
        settings: as asked for.
        shape: of the model.
        tied: whether the output matrix is the embedding.
        device, dtype: in force.
        kernel: for dense attention of many queries.
        policy: which blocks of keys prefill reads.
        one_token_kernels: whether `ops` has kernels of its own for a step of one token.
        context_tokens: the longest request.
    """

    settings: Settings
    shape: ModelShape
    tied: bool
    device: torch.device
    dtype: torch.dtype
    kernel: Kernel
    policy: Policy
    one_token_kernels: bool
    context_tokens: int

    @property
    def layout(self) -> KVLayout:
        """A token's keys and values."""
        shape = self.shape
        return KVLayout(shape.layers, shape.kv_heads, shape.head_dim, self.dtype)

    @property
    def chunk_tokens(self) -> int:
        """Tokens of the largest step."""
        return min(self.settings.chunk_tokens or self.context_tokens, self.context_tokens)

    @property
    def attend_tokens(self) -> int:
        """Tokens of the largest span."""
        return min(self.settings.attend_tokens or self.context_tokens, self.context_tokens)

    @property
    def decodes_by_splits(self) -> bool:
        """Whether steps of one token go through `ops`' own kernels.

        They read keys in splits; spans that are not whole splits go the general way. This must
        not depend on where keys and values lie, or the bits would.
        """
        attend = self.settings.attend_tokens
        return self.one_token_kernels and (attend is None or attend % SPLIT_TOKENS == 0)

    @property
    def geometry(self) -> OffloadGeometry | None:
        """The sizes of the offload cache, or None where there is none."""
        offload = self.settings.offload
        if offload is None or offload.mode == "never":
            return None
        return OffloadGeometry(
            context_tokens=self.context_tokens,
            block_tokens=offload.block_tokens(self.context_tokens),
            slots=offload.num_gpu_blocks,
            chunk_tokens=self.chunk_tokens,
            attend_tokens=self.attend_tokens,
            split_tokens=SPLIT_TOKENS if self.decodes_by_splits else 1,
            prefix_cache=offload.prefix_cache,
            prefix_cache_tokens=offload.prefix_cache_tokens or 0,
            sparse=self.policy.sparse,
        )

    @property
    def resident_tokens(self) -> int:
        """The longest request whose keys and values stay on the device."""
        offload = self.settings.offload
        if offload is None:
            return self.context_tokens
        return offload.longest_resident_tokens(self.context_tokens)

    @property
    def merges(self) -> bool:
        """Whether a step may attend to more than one piece of keys."""
        return min(self.chunk_tokens, self.attend_tokens) < self.context_tokens

    @property
    def query_rows(self) -> int:
        """Rows of the buffers of queries."""
        return whole_blocks(self.chunk_tokens) if self.policy.sparse else self.chunk_tokens

    def work_buffers(self) -> tuple[Buffer, ...]:
        """Declare what steps compute in."""
        size = StepSize(self.chunk_tokens, self.merges, self.query_rows)
        buffers = workspace_buffers(self.shape, self.dtype, size)
        if self.policy.sparse:
            sizes = (self.shape.heads, self.query_rows, whole_blocks(self.context_tokens))
            buffers += block_buffers(self.device, *sizes)
        if self.decodes_by_splits:
            heads = (splits_for(self.context_tokens), self.shape.heads)
            shapes = {
                "partial_output": (*heads, self.shape.head_dim),
                "partial_log_sum_exp": heads,
            }
            buffers += tuple(
                Buffer(name, dims, torch.float32, "device", "activations")
                for name, dims in shapes.items()
            )
        return buffers

    def cache_buffers(self) -> tuple[Buffer, ...]:
        """Declare what keys and values are kept in."""
        buffers: tuple[Buffer, ...] = ()
        if self.geometry is not None:
            buffers += self.geometry.buffers(self.layout)
        if self.resident_tokens:
            tokens = self.resident_tokens
            rows = whole_blocks(tokens) if self.policy.sparse else tokens
            buffers += resident_buffers(self.layout, rows)
        return buffers

    def passing_buffers(self) -> tuple[Buffer, ...]:
        """Declare the room for what a step allocates and gives back."""
        rows, heads = self.chunk_tokens, self.shape.heads
        size = CallSize(rows, max(rows, self.attend_tokens), heads, self.shape.head_dim)
        tokens = Buffer("tokens", (rows,), torch.int64, "device", "activations")
        buffers = (tokens, *passing_buffers(self.kernel, size, self.dtype, self.device))
        if self.policy.sparse:
            buffers += block_passing_buffers(
                self.device,
                self.layout,
                self.policy,
                heads=heads,
                queries=rows,
                keys=self.context_tokens,
            )
        return buffers

    def plan(self) -> MemoryPlan:
        """Return the whole plan."""
        return MemoryPlan(
            (
                *weight_buffers(self.shape, self.dtype, tied=self.tied),
                *self.cache_buffers(),
                *self.work_buffers(),
                *self.passing_buffers(),
                *context_allowance(self.device),
            )
        )

    def alternatives(self) -> Iterator[Alternative]:
        """Yield the settings that can be lowered, the least painful first."""
        offload = self.settings.offload
        if self.geometry is not None and offload is not None:
            if offload.prefix_cache_tokens is not None:
                yield Alternative(
                    "backend.prefix_cache_tokens",
                    offload.prefix_cache_tokens,
                    self._planner(self._with_prefixes),
                    range(1, offload.prefix_cache_tokens),
                )
            least = max(MIN_SLOTS, self.geometry.span_blocks)
            yield Alternative(
                f"backend.{offload.slots_key}",
                offload.num_gpu_blocks,
                self._planner(self._with_slots),
                range(least, offload.num_gpu_blocks),
            )
        if self.settings.chunk_tokens is not None:
            step = BLOCK_TOKENS if self.policy.sparse else 1
            yield Alternative(
                "backend.chunk_tokens",
                self.chunk_tokens,
                self._planner(self._with_chunk),
                range(step, self.chunk_tokens, step),
            )
        yield Alternative(
            "backend.max_model_len",
            self.context_tokens,
            self._planner(self._with_context),
            range(1, self.context_tokens),
        )

    def _planner(self, change: Callable[[int], Blueprint]) -> Callable[[int], MemoryPlan]:
        return lambda value: change(value).plan()

    def _with_prefixes(self, tokens: int) -> Blueprint:
        if self.settings.offload is None:
            raise AssertionError("a prefix cache without an offload cache")
        offload = replace(self.settings.offload, prefix_cache_tokens=tokens)
        return replace(self, settings=replace(self.settings, offload=offload))

    def _with_slots(self, slots: int) -> Blueprint:
        if self.settings.offload is None:
            raise AssertionError("slots without an offload cache")
        offload = replace(self.settings.offload, num_gpu_blocks=slots)
        return replace(self, settings=replace(self.settings, offload=offload))

    def _with_chunk(self, chunk_tokens: int) -> Blueprint:
        return replace(self, settings=replace(self.settings, chunk_tokens=chunk_tokens))

    def _with_context(self, context_tokens: int) -> Blueprint:
        settings, offload = self.settings, self.settings.offload
        if offload is not None and offload.kvcache_block_size is not None:
            block = min(offload.kvcache_block_size, context_tokens)
            settings = replace(settings, offload=replace(offload, kvcache_block_size=block))
        return replace(self, settings=settings, context_tokens=context_tokens)


def context_tokens(settings: Settings, max_positions: int) -> int:
    """Return the longest request.

    Raises:
        ConfigurationError: it is beyond the model's positions.
    """
    context = max_positions if settings.max_model_len is None else settings.max_model_len
    if context > max_positions:
        raise ConfigurationError(
            f"backend.max_model_len={context} is beyond the model's max_position_embeddings="
            f"{max_positions}."
        )
    return context


def draw(
    settings: Settings, device: torch.device, shape: ModelShape, source: WeightSource, ops: Ops
) -> Blueprint:
    """Decide every buffer of an engine; nothing is allocated.

    Args:
        settings: as asked for.
        device: in force.
        shape: of the model.
        source: its tensors, none of which is read.
        ops: what steps of one token go through.

    Raises:
        ConfigurationError: a setting does not suit the model or the device.
    """
    dtype = resolve_dtype(settings.dtype, device)
    heads = (shape.heads, shape.kv_heads, shape.head_dim)
    blueprint = Blueprint(
        settings=settings,
        shape=shape,
        tied=shape.tied_embeddings and "lm_head.weight" not in source,
        device=device,
        dtype=dtype,
        kernel=choose_kernel(settings.attention, device, dtype, heads),
        policy=make_policy(settings.policy, Model(shape.layers, *heads)),
        one_token_kernels=ops.name == "triton",
        context_tokens=context_tokens(settings, shape.max_positions),
    )
    if blueprint.policy.sparse:
        check_chunk(settings.chunk_tokens, blueprint.context_tokens, blueprint.policy.name)
        check_head_dim(device, shape.head_dim, blueprint.policy.name)
    if blueprint.geometry is not None:
        blueprint.geometry.check()
    if settings.fault is not None:
        faults.check(settings.fault, blueprint)
    return blueprint


def memory_plan(settings: Settings, weights: Mapping[str, torch.Tensor] | None = None) -> list[str]:
    """Return the lines of an engine's memory plan, with the machine's limits; allocate nothing.

    Raises:
        ConfigurationError: a setting cannot be honoured, or the plan does not fit.
    """
    device = resolve_device(settings.device)
    folder = find_model(settings.model_path)
    shape = read_shape(folder)
    ops = make_ops(device, resolve_dtype(settings.dtype, device))
    with weight_source(folder, weights) as source:
        blueprint = draw(settings, device, shape, source, ops)
    plan = blueprint.plan()
    limits = read_limits(device, settings.device_memory_gb, settings.host_memory_gb)
    return [*plan.lines(limits), *check(plan, limits, blueprint.alternatives())]


def weight_source(
    folder: Path, weights: Mapping[str, torch.Tensor] | None
) -> AbstractContextManager[WeightSource]:
    """Return the tensors that a model is made of: those given, else the folder's files."""
    return Checkpoint(folder) if weights is None else nullcontext(StateDict(weights))
