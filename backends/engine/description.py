"""What an engine says of itself: every setting in force, and the bytes allocated for good."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from backends.engine.block_attention import BlockKernel
from backends.engine.cache.base import KVCache
from backends.engine.memory import MemoryPlan
from backends.engine.plan import Blueprint


def in_force(
    blueprint: Blueprint,
    *,
    block_kernel: BlockKernel | None,
    ops: str,
    decode: str,
    weight_bytes: int,
    caches: list[KVCache],
    plan: MemoryPlan,
) -> dict[str, Any]:
    """Return every setting in force, and the bytes that are allocated for good.

    Args:
        blueprint: of the engine.
        block_kernel: attends to blocks of keys; None without a sparse policy.
        ops: name of what runs on the device beside attention.
        decode: how steps of one token are run, in words.
        weight_bytes: of the decoder.
        caches: that the engine has.
        plan: of its memory.
    """
    settings = blueprint.settings
    settings_in_force: dict[str, Any] = {
        "model_path": settings.model_path,
        "architecture": blueprint.shape.architecture,
        "device": str(blueprint.device),
        "threads": settings.threads,
        "max_model_len": blueprint.context_tokens,
        "dtype": str(blueprint.dtype).removeprefix("torch."),
        "attention": blueprint.kernel.name,
        "block_attention": None if block_kernel is None else block_kernel.name,
        "ops": ops,
        "decode": decode,
        "chunk_tokens": settings.chunk_tokens,
        "attend_tokens": settings.attend_tokens,
        "policy": blueprint.policy.describe(),
        "poison": settings.poison,
        "synchronise": settings.synchronise,
        "fault": settings.fault,
        "device_memory_gb": settings.device_memory_gb,
        "host_memory_gb": settings.host_memory_gb,
        "checkpoint": settings.checkpoint,
        "checkpoint_tensors": settings.checkpoint_tensors,
        "timeline": settings.timeline,
    }
    if settings.offload is not None:
        settings_in_force |= {
            "offload": settings.offload.mode,
            "resident_tokens": blueprint.resident_tokens,
            settings.offload.slots_key: settings.offload.num_gpu_blocks,
            "kvcache_block_size": settings.offload.block_tokens(blueprint.context_tokens),
            "prefix_cache": settings.offload.prefix_cache,
            "prefix_cache_tokens": settings.offload.prefix_cache_tokens or 0,
        }
    return settings_in_force | {
        "compile_seconds": None if block_kernel is None else block_kernel.compile_seconds,
        "weight_bytes": weight_bytes,
        "device_buffer_bytes": device_buffer_bytes(caches),
        "host_buffer_bytes": sum(
            buffer.nbytes for cache in caches for buffer in cache.host_buffers().values()
        ),
        "memory_plan": plan.to_json(),
    }


def settings_that_count(described: dict[str, Any]) -> dict[str, Any]:
    """Return what decides results, for a comparison: no sizes, and no paths of this machine.

    Args:
        described: what `in_force` returned.
    """
    left_out = {
        "checkpoint",
        "checkpoint_tensors",
        "compile_seconds",
        "device_buffer_bytes",
        "device_memory_gb",
        "host_buffer_bytes",
        "host_memory_gb",
        "memory_plan",
        "timeline",
        "weight_bytes",
    }
    found = {key: value for key, value in described.items() if key not in left_out}
    return found | {"model_path": Path(described["model_path"]).name}


def device_buffer_bytes(caches: list[KVCache]) -> dict[str, int]:
    """Return the bytes of each of the caches' buffers on the device by name."""
    return {
        name: buffer.nbytes for cache in caches for name, buffer in cache.device_buffers().items()
    }
