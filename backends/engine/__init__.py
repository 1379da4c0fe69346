"""The project's own engine: exact attention with the KV cache on the device or in CPU memory.

Two presets of one class: `gpu_only` and `offload`. Every setting is a keyword argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backends.engine.engine import Engine
from backends.engine.policy import policy_name
from backends.engine.settings import Settings

__all__ = ["Engine", "gpu_only"]


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
            offload="never",
            resident_tokens=None,
            num_gpu_blocks=2,
            kvcache_block_size=1,
        )
    )
