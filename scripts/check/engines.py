"""Which engines are proven, and with which settings."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import backends

TARGETS = {
    "gpu_only": "backends.engine.gpu_only",
    "offload": "backends.engine.offload",
    "offload_layerwise": "backends.engine.offload_layerwise",
}
SOURCE_KEY = "engine_source_sha256"
OFFLOADED = ("offload", "offload_layerwise")


@dataclass(frozen=True)
class Cuts:
    """What decides the sequence of computations, and with it the bits.

    Attributes:
        chunk_tokens: prompt tokens of one prefill step; None is the whole prompt.
        attend_tokens: earlier keys that one attention call reads; None is the whole history.
    """

    chunk_tokens: int | None
    attend_tokens: int | None

    @property
    def name(self) -> str:
        """Return both as part of an engine's name."""
        chunk, attend = (one or "all" for one in (self.chunk_tokens, self.attend_tokens))
        return f"chunk-{chunk}-attend-{attend}"


WHOLE = Cuts(None, None)
"""The cuts of layer-wise offload."""


@dataclass(frozen=True)
class EngineSpec:
    """One engine.

    Attributes:
        name: as tables call it, such as offload-2-slots.
        settings: `_target_` and what is set apart from what all engines share.
    """

    name: str
    settings: dict[str, Any]


@dataclass(frozen=True)
class Pair:
    """An engine with offload, and the one with all on the device that must have its bits."""

    offloaded: EngineSpec
    resident: EngineSpec


@dataclass(frozen=True)
class EngineOptions:
    """What the engines of all checks have in common.

    Attributes:
        chunked: of the engines with slots.
        block_tokens: tokens in a block.
        buffers: of the layer-wise engine.
        attention: name of the kernel.
        presets: which of `OFFLOADED` are proven.
    """

    chunked: Cuts
    block_tokens: int
    buffers: int
    attention: str
    presets: tuple[str, ...]

    def chunked_pair(self, slots: int, context_tokens: int) -> Pair:
        """Return offload in chunks with so many slots, and its counterpart."""
        settings = {
            "num_gpu_blocks": slots,
            "kvcache_block_size": min(self.block_tokens, context_tokens),
            "chunk_tokens": self.chunked.chunk_tokens,
            "attend_tokens": self.chunked.attend_tokens,
        }
        spec = self._spec(f"offload-{slots}-slots", "offload", settings)
        return Pair(spec, self._resident(self.chunked))

    def layerwise_pair(self) -> Pair:
        """Return layer-wise offload, and its counterpart."""
        name = f"offload_layerwise-{self.buffers}-buffers"
        spec = self._spec(name, "offload_layerwise", {"num_kv_buffers": self.buffers})
        return Pair(spec, self._resident(WHOLE))

    def pairs(self, slots: tuple[int, ...], context_tokens: int) -> list[Pair]:
        """Return a pair for each number of slots, then the layer-wise one, as `presets` says."""
        found = []
        if "offload" in self.presets:
            found += [self.chunked_pair(one, context_tokens) for one in slots]
        if "offload_layerwise" in self.presets:
            found.append(self.layerwise_pair())
        return found

    def _resident(self, cuts: Cuts) -> EngineSpec:
        settings = {"chunk_tokens": cuts.chunk_tokens, "attend_tokens": cuts.attend_tokens}
        return self._spec(f"gpu_only-{cuts.name}", "gpu_only", settings)

    def _spec(self, name: str, preset: str, settings: dict[str, Any]) -> EngineSpec:
        return EngineSpec(
            name, {"_target_": TARGETS[preset], "attention": self.attention, **settings}
        )


def engines_of(pairs: list[Pair]) -> list[EngineSpec]:
    """Return every engine of the pairs once; one counterpart serves all with its settings."""
    found: dict[str, EngineSpec] = {}
    for pair in pairs:
        for one in (pair.resident, pair.offloaded):
            found.setdefault(one.name, one)
    return list(found.values())


def source_sha256() -> str:
    """Return the hash of the engine's source: answers of different code prove nothing together."""
    digest = hashlib.sha256()
    folder = Path(backends.__path__[0])
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)}:{len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]
