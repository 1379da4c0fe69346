"""Memory while an engine serves, and whether it stays flat."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ruler_bench.errors import UsageError

WARM_UP_REQUESTS = 10
"""Requests after which memory must be flat."""
RSS_BOUND_BYTES = 16 << 20
"""How far host memory may lie above what it was after the warm-up."""
GPU_RSS_BOUND_BYTES = 64 << 20
"""The same beside a GPU, where libraries load kernels and keep plans for each new number of rows.

On an H200 250 prompts of new lengths took 16.9 MiB, 250 others 2.6 MiB, and the same ones again
nothing.
"""
LATE_BOUND_BYTES = 2 << 20
"""How far host memory may grow in the last quarter of the life: less than any leak a request."""
RESERVED_BOUND_BYTES = 64 << 20
"""The same for what PyTorch's allocator holds, which rounds and splits what it hands out."""


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Memory of the process after some requests.

    Attributes:
        arm, life: the stream and its engine.
        requests: how many were served.
        allocated_bytes, reserved_bytes: device memory, in use and held by PyTorch's allocator;
            None on a CPU.
        rss_bytes: resident host memory, after freed memory was handed back to the system.
    """

    arm: str
    life: int
    requests: int
    allocated_bytes: int | None
    reserved_bytes: int | None
    rss_bytes: int


def sample_memory(arm: str, life: int, requests: int, device: str) -> MemorySample:
    """Read the memory of this process, once the device has done all its work."""
    allocated = reserved = None
    if device.startswith("cuda"):
        import torch  # noqa: PLC0415 (seconds, not needed to render)

        torch.cuda.synchronize(device)
        allocated = torch.cuda.memory_allocated(device)
        reserved = torch.cuda.memory_reserved(device)
    return MemorySample(arm, life, requests, allocated, reserved, resident_bytes())


def resident_bytes() -> int:
    """Return VmRSS of this process.

    glibc keeps freed memory, more or less of it by chance; it is asked to hand it back first, so
    that what is counted is in use.

    Raises:
        UsageError: the system has no /proc.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError as error:
        raise UsageError(
            f"/proc/self/status cannot be read ({error.strerror}): memory is measured on Linux only"
        ) from error
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


@dataclass(frozen=True, slots=True)
class Growth:
    """One kind of memory over the life of an engine, from the end of the warm-up on.

    Attributes:
        name: what was measured.
        first, last, largest: bytes.
        slope: bytes a request, of the least-squares line.
        allowed_bytes: how far any sample may lie above the first; 0 means equal to the byte.
        late_bytes: how far the last quarter's samples lie above its first.
        allowed_late_bytes: how far they may.
        flat: whether both hold.
    """

    name: str
    first: int
    last: int
    largest: int
    slope: float
    allowed_bytes: int
    late_bytes: int
    allowed_late_bytes: int
    flat: bool


def growths(samples: Sequence[MemorySample]) -> list[Growth]:
    """Return what became of each kind of memory that was measured after the warm-up."""
    later = [one for one in samples if one.requests >= WARM_UP_REQUESTS]
    on_gpu = any(one.allocated_bytes is not None for one in later)
    rss = (GPU_RSS_BOUND_BYTES if on_gpu else RSS_BOUND_BYTES, LATE_BOUND_BYTES)
    reserved = (RESERVED_BOUND_BYTES, RESERVED_BOUND_BYTES)
    kinds: list[tuple[str, Callable[[MemorySample], int | None], tuple[int, int]]] = [
        ("device, allocated", lambda one: one.allocated_bytes, (0, 0)),
        ("device, reserved", lambda one: one.reserved_bytes, reserved),
        ("host, resident", lambda one: one.rss_bytes, rss),
    ]
    found = []
    for name, read, allowed in kinds:
        points = [(one.requests, value) for one in later if (value := read(one)) is not None]
        if len(points) > 1:
            found.append(_growth(name, points, *allowed))
    return found


def _growth(
    name: str, points: Sequence[tuple[int, int]], allowed_bytes: int, allowed_late_bytes: int
) -> Growth:
    values = [value for _, value in points]
    spread = max(values) - (values[0] if allowed_bytes else min(values))
    late = values[len(values) * 3 // 4 :]
    late_bytes = max(late) - late[0]
    return Growth(
        name=name,
        first=values[0],
        last=values[-1],
        largest=max(values),
        slope=_slope(points),
        allowed_bytes=allowed_bytes,
        late_bytes=late_bytes,
        allowed_late_bytes=allowed_late_bytes,
        flat=spread <= allowed_bytes and late_bytes <= allowed_late_bytes,
    )


def _slope(points: Sequence[tuple[int, int]]) -> float:
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum(
        (x - mean_x) ** 2 for x, _ in points
    )
