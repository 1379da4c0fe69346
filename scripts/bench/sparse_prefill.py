"""Whole prefills on structured keys: dense and sparse, with keys on the device and offloaded."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from backends.base import Generation, Request
from backends.engine import Engine, gpu_only, offload
from backends.engine.policy import BLOCK_TOKENS
from scripts.bench.ceilings import Bench
from scripts.bench.shapes import ChunkedSettings, Shape
from scripts.bench.sparse_attention import density
from scripts.bench.structured import StructuredWeights, first_layer
from scripts.bench.subjects import built
from scripts.bench.timing import allocated_bytes, synchronise

GPU_ONLY, OFFLOAD = "gpu_only", "offload"
PRESETS: dict[str, Callable[..., Engine]] = {GPU_ONLY: gpu_only, OFFLOAD: offload}
FULL, A_SHAPE = "full", "a_shape"
XATTENTION = {8: "xattention 8", 16: "xattention 16"}
"""By stride."""
WARM_UP_CHUNKS = 2
"""Chunks of the offloaded engine in the unmeasured prompt before the measured ones."""
WEAKEST, STRONGEST = 2.0, 32.0
"""Strengths between which the wanted density is looked for."""
MOST_TRIES = 10
CLOSE_ENOUGH = 0.05
"""Of the wanted density, as a share of it."""


@dataclass(frozen=True)
class Subject:
    """An engine that is measured.

    Attributes:
        preset: of `PRESETS`.
        policy: "full", or one of the sparse ones.
    """

    preset: str
    policy: str

    @property
    def name(self) -> str:
        """What rows call it."""
        return self.preset if self.policy == FULL else f"{self.preset} {self.policy}"


SUBJECTS = tuple(
    Subject(preset, policy)
    for preset, policies in (
        (GPU_ONLY, (FULL, *XATTENTION.values())),
        (OFFLOAD, (FULL, XATTENTION[8], A_SHAPE)),
    )
    for policy in policies
)


@dataclass(frozen=True)
class Plan:
    """How whole prefills are measured.

    Attributes:
        make_weights: of a strength.
        make_prompt: the prompt of so many tokens, with sinks and strong columns.
        repeats: measured prefills of one engine; the median counts.
        threshold: of XAttention.
        threads: of the CPU.
    """

    make_weights: Callable[[float], StructuredWeights]
    make_prompt: Callable[[int], tuple[int, ...]]
    repeats: int
    threshold: float
    threads: int

    def settings_of(self, subject: Subject, shape: Shape) -> dict[str, Any]:
        """Return the keyword arguments by which a subject is made."""
        settings: dict[str, Any] = {"policy": self._policy(subject.policy)}
        if subject.preset == GPU_ONLY:
            return settings | {"chunk_tokens": None, "attend_tokens": None}
        chunked = in_whole_blocks(shape.chunked)
        return settings | {
            "chunk_tokens": chunked.chunk_tokens,
            "kvcache_block_size": chunked.block_tokens,
            "attend_tokens": "block",
            "num_gpu_blocks": chunked.gpu_blocks,
        }

    def _policy(self, name: str) -> dict[str, Any]:
        for stride, called in XATTENTION.items():
            if name == called:
                return {"name": "xattention", "stride": stride, "threshold": self.threshold}
        return {"name": name}


def in_whole_blocks(chunked: ChunkedSettings) -> ChunkedSettings:
    """Return a setting that suits sparse prefill: chunks and blocks in whole blocks of 128."""
    chunk = -(-chunked.chunk_tokens // BLOCK_TOKENS) * BLOCK_TOKENS
    return ChunkedSettings(chunk, max(chunked.block_tokens, chunk), chunked.gpu_blocks)


def calibrate(
    bench: Bench, plan: Plan, tokens: int, stride: int, wanted: float
) -> dict[str, float | list[list[float]]]:
    """Look for the strength at which XAttention keeps the wanted share of the first layer.

    The stronger the structure, the less is kept. Halves the range, on a logarithmic scale, until
    the density is close enough.

    Returns:
        The strength, its density, and all that was tried: [strength, density] each.
    """
    prompt = plan.make_prompt(tokens)
    weak, strong = WEAKEST, STRONGEST
    tried: list[list[float]] = []
    while len(tried) < MOST_TRIES:
        strength = float(f"{(weak * strong) ** 0.5:.4g}")
        layer = first_layer(plan.make_weights(strength), bench.shape, prompt)
        found = density(bench, layer, stride, plan.threshold)
        del layer
        tried.append([strength, found])
        if abs(found / wanted - 1) <= CLOSE_ENOUGH:
            break
        weak, strong = (strength, strong) if found > wanted else (weak, strength)
    best = min(tried, key=lambda one: abs(one[1] - wanted))
    return {"strength": best[0], "density": best[1], "tried": tried}


def measure(
    subject: Subject, bench: Bench, plan: Plan, strength: float, tokens: int
) -> dict[str, Any]:
    """Build an engine, let it prefill a prompt, and return figures.

    Raises:
        ConfigurationError: the engine cannot be built.
        RequestError: it failed in a request.
    """
    before_bytes = allocated_bytes(bench.device)
    started = time.perf_counter()
    settings = plan.settings_of(subject, bench.shape) | {"threads": plan.threads}
    weights = plan.make_weights(strength)
    with built(PRESETS[subject.preset], bench, weights, tokens + 1, settings) as engine:
        synchronise(bench.device)
        construct_seconds = time.perf_counter() - started
        answers = [
            engine.generate(Request(number, "", plan.make_prompt(length), 1))
            for number, length in enumerate(_schedule(bench.shape, plan, tokens))
        ]
        description = engine.describe()
    measured = answers[1:]
    held_bytes = description["weight_bytes"] if bench.device.type == "cuda" else 0
    last = measured[-1]
    return {
        "prefill_seconds": statistics.median(_seconds(measured, "ttft_seconds")),
        "all_prefill_seconds": _seconds(measured, "ttft_seconds"),
        "estimation_seconds": _median(measured, "estimation_seconds"),
        "attention_seconds": _median(measured, "attention_seconds"),
        "density": last.density,
        "dense_share": last.dense_share,
        "up_bytes": last.bytes_up,
        "down_bytes": last.bytes_down,
        "over_weights_bytes": max(_seconds(measured, "peak_device_bytes"))
        - held_bytes
        - before_bytes,
        "construct_seconds": construct_seconds,
        "compile_seconds": description.get("compile_seconds"),
        "repeats_equal": all(one.logits_digest == last.logits_digest for one in measured),
        "logits_digest": list(last.logits_digest or ()),
        "token_ids": list(last.token_ids or ()),
        "kernel": last.kernel,
        "policy": description["policy"],
        "chunk_tokens": description["chunk_tokens"],
    }


def _schedule(shape: Shape, plan: Plan, tokens: int) -> Iterator[int]:
    """Yield the tokens of each prompt, the unmeasured one first."""
    yield min(tokens, WARM_UP_CHUNKS * in_whole_blocks(shape.chunked).chunk_tokens)
    yield from [tokens] * plan.repeats


def _seconds(answers: list[Generation], name: str) -> list[float]:
    return [getattr(one, name) for one in answers]


def _median(answers: list[Generation], name: str) -> float | None:
    values = _seconds(answers, name)
    return None if None in values else statistics.median(values)
