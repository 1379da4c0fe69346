"""The project's own engine: exact attention with the KV cache on the device or in CPU memory.

Two presets of one class: `gpu_only` and `offload`. Every setting is a keyword argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from backends.base import ConfigurationError
from backends.engine.engine import Engine
from backends.engine.policy import policy_name
from backends.engine.settings import OffloadSettings, Settings

__all__ = ["Engine", "gpu_only", "offload"]


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
) -> Engine:
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
        attention: name of the attention kernel, or "auto".
        policy: which keys prefill reads; {"name": "full"} and None mean all.
        poison: fill freed and unwritten cells with NaN, and stop at the first that is read.
        fault: a seeded fault by name; none are known yet.

    Raises:
        ConfigurationError: a setting cannot be honoured.
    """
    return Engine(
        Settings(
            model_path=model_path,
            device=device,
            threads=threads,
            max_model_len=max_model_len,
            dtype=dtype,
            chunk_tokens=chunk_tokens,
            attend_tokens=attend_tokens,
            attention=attention,
            policy=policy_name(policy),
            poison=poison,
            fault=fault,
            offload=None,
        )
    )


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
    attention: str = "auto",
    policy: Mapping[str, Any] | None = None,
    poison: bool = False,
    fault: str | None = None,
) -> Engine:
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
        attention: name of the attention kernel.
        policy: which keys prefill reads.
        poison: fill freed and unwritten cells with NaN.
        fault: a seeded fault by name.

    Raises:
        ConfigurationError: a setting cannot be honoured.
    """
    if isinstance(attend_tokens, str) and attend_tokens != "block":
        raise ConfigurationError(
            f"backend.attend_tokens={attend_tokens}: allowed are a whole number from 1, block "
            "and null."
        )
    return Engine(
        Settings(
            model_path=model_path,
            device=device,
            threads=threads,
            max_model_len=max_model_len,
            dtype=dtype,
            chunk_tokens=chunk_tokens,
            attend_tokens=kvcache_block_size if attend_tokens == "block" else attend_tokens,
            attention=attention,
            policy=policy_name(policy),
            poison=poison,
            fault=fault,
            offload=OffloadSettings(
                mode=offload,
                resident_tokens=resident_tokens,
                num_gpu_blocks=num_gpu_blocks,
                kvcache_block_size=kvcache_block_size,
            ),
        )
    )
