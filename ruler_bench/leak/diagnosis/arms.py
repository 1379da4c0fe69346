"""Which arms try each hypothesis, as the settings of the engine that is to be diagnosed allow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ruler_bench.leak.arms import RECORDED, SYNCHRONISED
from ruler_bench.leak.join import PERSISTENT, PERSISTENT_AGAIN

AGED = "aged"
OWN_ENGINE = "backends.engine."


@dataclass(frozen=True, slots=True)
class Setup:
    """The run that is to be diagnosed.

    Attributes:
        backend: its composed settings, `_target_` included.
        length: tokens of prompt and generation together.
    """

    backend: Mapping[str, Any]
    length: int

    @property
    def is_own_engine(self) -> bool:
        """Whether it is one of our engine's presets, which can stand in for each other."""
        return str(self.backend.get("_target_")).startswith(OWN_ENGINE)

    def tokens(self, key: str) -> int:
        """Return a number of tokens among the settings, the length where it is none or more."""
        value = self.backend.get(key)
        if value == "block":
            value = self.backend.get("kvcache_block_size")
        return min(value, self.length) if isinstance(value, int) else self.length


def chunk_arms(setup: Setup) -> list[str]:
    """Return the run's chunk size and two others."""
    if "chunk_tokens" not in setup.backend:
        return []
    tokens = setup.tokens("chunk_tokens")
    sizes = (tokens // 2, 2 * tokens if 2 * tokens < setup.length else tokens // 4)
    return [PERSISTENT, *(f"chunks_{one}" for one in sizes if one)]


def slot_arms(setup: Setup) -> list[str]:
    """Return two runs, other numbers of slots, and each with every copy waited for."""
    found = [PERSISTENT, PERSISTENT_AGAIN]
    if "synchronise" in setup.backend:
        found.append(SYNCHRONISED)
    keys = ("num_gpu_blocks", "num_kv_buffers")
    now = next(
        (setup.backend[one] for one in keys if isinstance(setup.backend.get(one), int)), None
    )
    if now is None:
        return found
    for slots in sorted({2, 2 * now} - {now}):
        found.append(f"slots_{slots}")
        if "synchronise" in setup.backend:
            found.append(f"slots_{slots}_{SYNCHRONISED}")
    return found


def position_arms(setup: Setup) -> list[str]:
    """Return recorded arms whose prompts are cut into other chunks."""
    if not {"chunk_tokens", "checkpoint"} <= setup.backend.keys():
        return []
    chunks = chunk_arms(setup)[1:]
    return [RECORDED, *(f"{one}_{RECORDED}" for one in chunks)]


def layer_arms(setup: Setup) -> list[str]:
    """Return the engine a layer at a time, and one with all on the device and equal cuts."""
    return [PERSISTENT, "layerwise", "gpu_only_whole"] if setup.is_own_engine else []


def merge_arms(setup: Setup) -> list[str]:
    """Return other numbers of keys that one attention call reads."""
    if not setup.is_own_engine:
        return []
    tokens = setup.tokens("attend_tokens")
    pieces = [tokens // 2, tokens // 4] if tokens == setup.length else [tokens, tokens // 2]
    return ["attend_whole", *(f"attend_{one}" for one in pieces if one)]


def place_arms(setup: Setup) -> list[str]:
    """Return the other places for keys and values."""
    if "offload" not in setup.backend:
        return []
    others = [one for one in ("always", "never", "auto") if one != setup.backend["offload"]]
    return [PERSISTENT, *(f"offload_{one}" for one in others)]


def life_arms(setup: Setup) -> list[str]:
    """Return two young engines and one that has served many."""
    return [PERSISTENT, PERSISTENT_AGAIN, AGED]
