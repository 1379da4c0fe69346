"""How long something takes on a device: by events on a GPU, by the clock on a CPU."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


def synchronise(device: torch.device) -> None:
    """Wait until the device has done all that it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory(device: torch.device, *, collect: bool) -> None:
    """Give memory back that nobody uses, and lift a cap that an engine may have set.

    Args:
        device: whose memory.
        collect: look for cycles of objects first, which takes a while.
    """
    if collect:
        gc.collect()
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        torch.cuda.empty_cache()


def reset_peak(device: torch.device) -> None:
    """Count the peak from now. What is cached stays, so that the next call need not ask anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes of the tensors that live on the device; 0 on a CPU, which does not count."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


@dataclass(frozen=True)
class Stopwatch:
    """Times calls on one device.

    Args:
        device: where the calls run.
        sustained_seconds: how long the calls of one measurement are to take together at least.
    """

    device: torch.device
    sustained_seconds: float

    def seconds_per_call(self, call: Callable[[], object], repeats: int = 1) -> float:
        """Return the time of one call: the best of `repeats` sustained runs after one warm-up.

        Calls longer than `sustained_seconds` run once for each repeat.
        """
        call()
        synchronise(self.device)
        once = self._run(call, 1)
        if once >= self.sustained_seconds:
            return min([once, *(self._run(call, 1) for _ in range(repeats - 1))])
        calls = math.ceil(self.sustained_seconds / max(once, 1e-6))
        return min(self._run(call, calls) / calls for _ in range(repeats))

    def _run(self, call: Callable[[], object], calls: int) -> float:
        if self.device.type != "cuda":
            started = time.perf_counter()
            for _ in range(calls):
                call()
            return time.perf_counter() - started
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
