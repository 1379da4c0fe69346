"""What a user can set on the engine, checked before anything is loaded."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from backends.base import ConfigurationError
from backends.engine.memory import require_memory_gb

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
OFFLOAD_MODES = ("always", "never", "auto")
MIN_SLOTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadSettings:
    """Where keys and values lie, as asked for. `backends.engine.offload` explains each.

    Attributes:
        kvcache_block_size: None is the whole context.
        prefix_cache_tokens: None is none beyond one context.
        slots_key: what the user calls the number of slots.
    """

    mode: str
    resident_tokens: int | None
    num_gpu_blocks: int
    kvcache_block_size: int | None
    prefix_cache: bool = False
    prefix_cache_tokens: int | None = None
    slots_key: str = "num_gpu_blocks"

    def __post_init__(self) -> None:
        """Check every value that can be judged without the model.

        Raises:
            ConfigurationError: a value is of the wrong type, out of range or unknown.
        """
        if self.kvcache_block_size is not None:
            require_count("backend.kvcache_block_size", self.kvcache_block_size)
        require_count(f"backend.{self.slots_key}", self.num_gpu_blocks)
        self._check_prefix_cache()
        if self.num_gpu_blocks < MIN_SLOTS:
            raise ConfigurationError(
                f"backend.{self.slots_key}={self.num_gpu_blocks} is below {MIN_SLOTS}: one slot "
                "is read while the next is loaded."
            )
        require_name("backend.offload", self.mode, OFFLOAD_MODES)
        if self.resident_tokens is not None:
            require_count("backend.resident_tokens", self.resident_tokens)
            if self.mode != "auto":
                raise ConfigurationError(
                    f"backend.resident_tokens={self.resident_tokens} has no effect with "
                    f"backend.offload={self.mode}: set it to auto, or leave resident_tokens null."
                )

    def _check_prefix_cache(self) -> None:
        require_flag("backend.prefix_cache", self.prefix_cache)
        if self.prefix_cache and self.mode == "never":
            raise ConfigurationError(
                "backend.prefix_cache=true has no effect with backend.offload=never: what is kept "
                "lies in CPU memory. Set offload to always or auto."
            )
        if self.prefix_cache_tokens is not None:
            require_count("backend.prefix_cache_tokens", self.prefix_cache_tokens)
            if not self.prefix_cache:
                raise ConfigurationError(
                    f"backend.prefix_cache_tokens={self.prefix_cache_tokens} has no effect with "
                    "backend.prefix_cache=false: set it to true, or leave prefix_cache_tokens null."
                )

    def block_tokens(self, context_tokens: int) -> int:
        """Return the tokens in a block."""
        return self.kvcache_block_size or context_tokens

    def longest_resident_tokens(self, context_tokens: int) -> int:
        """Return the longest request that stays on the device.

        With `auto`, what was asked for or else what the ring holds.
        """
        longest = {"always": 0, "never": context_tokens}
        if self.mode == "auto":
            ring = self.num_gpu_blocks * self.block_tokens(context_tokens)
            return min(self.resident_tokens or ring, context_tokens)
        return longest[self.mode]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every setting of the engine, as asked for. `backends.engine` explains each.

    Attributes:
        policy: name and settings of the policy, checked as far as the model is not needed.
        offload: None keeps every request on the device.
        device_memory_gb, host_memory_gb: in GiB, 2**30 bytes.
    """

    model_path: str
    device: str
    threads: int
    max_model_len: int | None
    dtype: str
    chunk_tokens: int | None
    attend_tokens: int | None
    attention: str
    policy: Mapping[str, Any]
    poison: bool
    fault: str | None
    offload: OffloadSettings | None
    device_memory_gb: float | None = None
    host_memory_gb: float | None = None
    synchronise: bool = False
    checkpoint: str | None = None
    checkpoint_tensors: bool = False
    timeline: str | None = None

    def __post_init__(self) -> None:
        """Check every value that can be judged without the model.

        Raises:
            ConfigurationError: a value is of the wrong type, out of range or unknown.
        """
        require_count("threads", self.threads)
        for key in ("max_model_len", "chunk_tokens", "attend_tokens"):
            if getattr(self, key) is not None:
                require_count(f"backend.{key}", getattr(self, key))
        require_name("backend.dtype", self.dtype, ("auto", *DTYPES))
        for key in ("poison", "synchronise", "checkpoint_tensors"):
            require_flag(f"backend.{key}", getattr(self, key))
        for key in ("device_memory_gb", "host_memory_gb"):
            if getattr(self, key) is not None:
                require_memory_gb(f"backend.{key}", getattr(self, key))
        for key in ("checkpoint", "timeline"):
            require_folder(f"backend.{key}", getattr(self, key))
        if self.checkpoint_tensors and self.checkpoint is None:
            raise ConfigurationError(
                "backend.checkpoint_tensors=true has no effect without backend.checkpoint=DIR."
            )
        self._check_prefix_cache()

    def _check_prefix_cache(self) -> None:
        if self.offload is None or not self.offload.prefix_cache:
            return
        if self.chunk_tokens is None:
            raise ConfigurationError(
                "backend.prefix_cache=true needs backend.chunk_tokens: a known beginning is reused "
                "at whole chunks, so that a hit gives the bits of a miss."
            )


def require_flag(key: str, value: object) -> None:
    """Raise ConfigurationError unless `value` is true or false."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{key}={value!r}: allowed are true and false.")


def require_folder(key: str, value: object) -> None:
    """Raise ConfigurationError unless `value` is None or the name of a folder to write in."""
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigurationError(f"{key}={value!r}: allowed are a folder and null.")


def require_count(key: str, value: object) -> None:
    """Raise ConfigurationError unless `value` is a whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigurationError(f"{key}={value!r} is not a whole number; at least 1 is allowed.")
    if value < 1:
        raise ConfigurationError(f"{key}={value} is below 1.")


def require_name(key: str, name: object, allowed: Iterable[str]) -> None:
    """Raise ConfigurationError, naming the nearest, unless `name` is one of `allowed`."""
    names = list(allowed)
    if name in names:
        return
    close = difflib.get_close_matches(str(name), names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ConfigurationError(f"{key}={name}: unknown.{hint} Allowed: {', '.join(names)}.")


def resolve_device(name: str) -> torch.device:
    """Turn "cpu", "cuda" or "cuda:N" into a device that exists.

    Raises:
        ConfigurationError: the name is none of these, or there is no such GPU.
    """
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigurationError(f"device={name!r}: allowed are cpu, cuda and cuda:N.")
    if device.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise ConfigurationError(
            f"device={name}: PyTorch {torch.__version__} sees no GPU here. Use device=cpu, or "
            "install a CUDA build of PyTorch and check nvidia-smi."
        )
    index = device.index or 0
    if index >= count:
        raise ConfigurationError(f"device={name}: PyTorch sees {count} GPU(s), from cuda:0 on.")
    return torch.device("cuda", index)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Turn a checked dtype name into a dtype; "auto" is float32 on a CPU and bfloat16 on a GPU."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return DTYPES[name]
