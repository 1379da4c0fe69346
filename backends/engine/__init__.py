"""The project's own engine, with the KV cache on the device or in CPU memory.

Presets of one class: `gpu_only`, `offload` and `offload_layerwise`, all with exact attention unless
a sparse policy is chosen; `xattn` and `minference`, which are `gpu_only` with one. Every setting is
a keyword argument. A preset's `memory_plan` takes the same arguments and returns the lines of the
memory plan, without loading or allocating anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from backends.base import ConfigurationError
from backends.engine.engine import Engine
from backends.engine.policy import policy_settings
from backends.engine.preset import Preset, Weights
from backends.engine.settings import OffloadSettings, Settings

__all__ = ["Engine", "gpu_only", "minference", "offload", "offload_layerwise", "xattn"]


@Preset
def gpu_only(
    *,
    model_path: str,
    device: str = "cpu",
    threads: int = 1,
    max_model_len: int | None = None,
    dtype: str = "auto",
    chunk_tokens: int | None = None,
    attend_tokens: int | None = None,
    attention: str = "auto",
    policy: Mapping[str, Any] | None = None,
    poison: bool = False,
    fault: str | None = None,
    device_memory_gb: float | None = None,
    host_memory_gb: float | None = None,
    synchronise: bool = False,
    checkpoint: str | None = None,
    checkpoint_tensors: bool = False,
    timeline: str | None = None,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> tuple[Settings, Weights]:
    """Build an engine that keeps all keys and values on the device.

    Args:
        model_path: folder or hub name of a Llama-shaped model with safetensors weights.
        device: "cpu", "cuda" or "cuda:N".
        threads: CPU threads.
        max_model_len: tokens of prompt and generation that one request may take; None is the
            model's max_position_embeddings.
        dtype: "auto" (float32 on a CPU, bfloat16 on a GPU), "float32", "bfloat16", "float16".
        chunk_tokens: prompt tokens of one prefill step; None is the whole prompt at once.
        attend_tokens: earlier keys that one attention call reads, cut at multiples of it; None
            is the whole history.
        attention: name of the kernel for dense attention, or "auto".
        policy: which blocks of keys prefill reads, its name and settings; None and
            {"name": "full"} mean all. With a sparse one, chunk_tokens is a multiple of 128, and
            attend_tokens cuts dense attention only: that of decode, and of layers and chunks of
            which so much is kept that dense attention is faster.
        poison: fill freed and unwritten cells with NaN, and stop at the first that is read.
        fault: a seeded fault by name, of `backends.engine.faults`; None is a sound engine.
        device_memory_gb: the most device memory that the process may take, in GiB (2**30 bytes),
            CUDA's own share included; None is what is free.
        host_memory_gb: CPU memory that may be taken, in GiB, instead of what is detected.
        synchronise: wait for the whole device after every copy, to see whether a fault is one of
            order; slow.
        checkpoint: folder for digests of what every layer and step computes, for
            `python -m ruler_bench.divergence`; slow.
        checkpoint_tensors: keep the rows themselves there, too.
        timeline: folder for a Chrome trace of each request; slow.
        weights: the model's tensors by transformers' names, instead of the files in `model_path`;
            for callers in Python.

    Raises:
        ConfigurationError: a setting cannot be honoured.
    """
    return (
        Settings(
            model_path=model_path,
            device=device,
            threads=threads,
            max_model_len=max_model_len,
            dtype=dtype,
            chunk_tokens=chunk_tokens,
            attend_tokens=attend_tokens,
            attention=attention,
            policy=policy_settings(policy),
            poison=poison,
            fault=fault,
            offload=None,
            device_memory_gb=device_memory_gb,
            host_memory_gb=host_memory_gb,
            synchronise=synchronise,
            checkpoint=checkpoint,
            checkpoint_tensors=checkpoint_tensors,
            timeline=timeline,
        ),
        weights,
    )


xattn = gpu_only.with_policy("xattn", "xattention")
minference = gpu_only.with_policy("minference", "minference")


@Preset
def offload(
    *,
    model_path: str,
    device: str = "cpu",
    threads: int = 1,
    max_model_len: int | None = None,
    dtype: str = "auto",
    num_gpu_blocks: int = 4,
    kvcache_block_size: int = 512,
    chunk_tokens: int | None = 1024,
    attend_tokens: int | Literal["block"] | None = "block",
    offload: Literal["always", "never", "auto"] = "always",
    resident_tokens: int | None = None,
    prefix_cache: bool = False,
    prefix_cache_tokens: int | None = None,
    attention: str = "auto",
    policy: Mapping[str, Any] | None = None,
    poison: bool = False,
    fault: str | None = None,
    device_memory_gb: float | None = None,
    host_memory_gb: float | None = None,
    synchronise: bool = False,
    checkpoint: str | None = None,
    checkpoint_tensors: bool = False,
    timeline: str | None = None,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> tuple[Settings, Weights]:
    """Build an engine that keeps keys and values in CPU memory, and what it reads in a ring.

    Args:
        model_path: as for `gpu_only`, like all that is not explained here.
        device: where the computation runs.
        threads: CPU threads.
        max_model_len: tokens of prompt and generation that one request may take.
        dtype: of weights, activations, keys and values.
        num_gpu_blocks: slots of the ring on the device, at least 2. A slot holds the keys and
            values of one layer for one block.
        kvcache_block_size: tokens in a block, at most the context.
        chunk_tokens: prompt tokens of one prefill step; None is the whole prompt at once.
        attend_tokens: earlier keys that one attention call reads, cut at multiples of it;
            "block" is kvcache_block_size, None the whole history. What one call reads must fit
            the ring.
        offload: "always"; "never", which keeps every request on the device; "auto", which keeps
            those on the device that are short enough.
        resident_tokens: with "auto", the longest request, prompt and generation, that stays on
            the device; None is what the ring holds.
        prefix_cache: keep the blocks of finished prompts in CPU memory, and reuse those whose
            tokens begin a later prompt; the least recently used give way. It does not change an
            answer's bits. What is reused ends at a common multiple of kvcache_block_size and
            chunk_tokens, so let one be a multiple of the other.
        prefix_cache_tokens: tokens of CPU memory for that beyond max_model_len, in whole blocks.
            None is none: the next request, if it is as long as the context, then leaves nothing
            but what it shares.
        attention: name of the attention kernel.
        policy: which blocks of keys prefill reads.
        poison: fill freed and unwritten cells with NaN.
        fault: a seeded fault by name.
        device_memory_gb: the most device memory, in GiB.
        host_memory_gb: CPU memory that may be taken, in GiB.
        synchronise: wait for the whole device after every copy.
        checkpoint: folder for digests of what is computed.
        checkpoint_tensors: keep the rows, too.
        timeline: folder for Chrome traces.
        weights: the model's tensors by name.

    Raises:
        ConfigurationError: a setting cannot be honoured.
    """
    if isinstance(attend_tokens, str) and attend_tokens != "block":
        raise ConfigurationError(
            f"backend.attend_tokens={attend_tokens}: allowed are a whole number from 1, block "
            "and null."
        )
    return (
        Settings(
            model_path=model_path,
            device=device,
            threads=threads,
            max_model_len=max_model_len,
            dtype=dtype,
            chunk_tokens=chunk_tokens,
            attend_tokens=kvcache_block_size if attend_tokens == "block" else attend_tokens,
            attention=attention,
            policy=policy_settings(policy),
            poison=poison,
            fault=fault,
            offload=OffloadSettings(
                mode=offload,
                resident_tokens=resident_tokens,
                num_gpu_blocks=num_gpu_blocks,
                kvcache_block_size=kvcache_block_size,
                prefix_cache=prefix_cache,
                prefix_cache_tokens=prefix_cache_tokens,
            ),
            device_memory_gb=device_memory_gb,
            host_memory_gb=host_memory_gb,
            synchronise=synchronise,
            checkpoint=checkpoint,
            checkpoint_tensors=checkpoint_tensors,
            timeline=timeline,
        ),
        weights,
    )


@Preset
def offload_layerwise(
    *,
    model_path: str,
    device: str = "cpu",
    threads: int = 1,
    max_model_len: int | None = None,
    dtype: str = "auto",
    num_kv_buffers: int = 4,
    attention: str = "auto",
    policy: Mapping[str, Any] | None = None,
    poison: bool = False,
    fault: str | None = None,
    device_memory_gb: float | None = None,
    host_memory_gb: float | None = None,
    synchronise: bool = False,
    checkpoint: str | None = None,
    checkpoint_tensors: bool = False,
    timeline: str | None = None,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> tuple[Settings, Weights]:
    """Build an engine that keeps keys and values in CPU memory, a layer at a time on the device.

    The whole prompt goes through a layer in one step, so that its keys and values are copied down
    once, while the next layers compute, and nothing comes back before decode. There the layers
    are loaded ahead, up to one less than there are buffers. The same engine as `offload` with
    blocks as long as the context, and with the bits of `gpu_only` with null for both chunk_tokens
    and attend_tokens.

    Args:
        model_path: as for `gpu_only`, like all that is not explained here.
        device: where the computation runs.
        threads: CPU threads.
        max_model_len: tokens of prompt and generation that one request may take.
        dtype: of weights, activations, keys and values.
        num_kv_buffers: buffers on the device, at least 2, each as long as the context, for keys
            and values of one layer. Those that decode does not need to stream keep their layers.
        attention: name of the attention kernel.
        policy: which blocks of keys prefill reads.
        poison: fill freed and unwritten cells with NaN.
        fault: a seeded fault by name.
        device_memory_gb: the most device memory, in GiB.
        host_memory_gb: CPU memory that may be taken, in GiB.
        synchronise: wait for the whole device after every copy.
        checkpoint: folder for digests of what is computed.
        checkpoint_tensors: keep the rows, too.
        timeline: folder for Chrome traces.
        weights: the model's tensors by name.

    Raises:
        ConfigurationError: a setting cannot be honoured.
    """
    return (
        Settings(
            model_path=model_path,
            device=device,
            threads=threads,
            max_model_len=max_model_len,
            dtype=dtype,
            chunk_tokens=None,
            attend_tokens=None,
            attention=attention,
            policy=policy_settings(policy),
            poison=poison,
            fault=fault,
            offload=OffloadSettings(
                mode="always",
                resident_tokens=None,
                num_gpu_blocks=num_kv_buffers,
                kvcache_block_size=None,
                slots_key="num_kv_buffers",
            ),
            device_memory_gb=device_memory_gb,
            host_memory_gb=host_memory_gb,
            synchronise=synchronise,
            checkpoint=checkpoint,
            checkpoint_tensors=checkpoint_tensors,
            timeline=timeline,
        ),
        weights,
    )
