"""Parts of a step captured once as CUDA graphs and replayed, so that their launches cost little."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

WARM_UPS = 2
"""Runs before the capture: kernels are compiled and libraries allocate their workspaces in them."""


class CapturedParts:
    """Parts of a step whose kernels read on the device all that changes from step to step.

    Args:
        parts: each launches its part; run here in order, then captured one by one.
        device: a GPU.
    """

    def __init__(self, parts: Sequence[Callable[[], None]], device: torch.device) -> None:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                for part in parts:
                    part()
            # A tensor that is collected during a capture would break it.
            torch.cuda.synchronize(device)
            gc.collect()
            pool = torch.cuda.graph_pool_handle()
            self._graphs = [_capture(part, pool) for part in parts]
        torch.cuda.current_stream(device).wait_stream(stream)

    def replay(self, part: int) -> None:
        """Launch a part on the current stream."""
        self._graphs[part].replay()


def _capture(part: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool)
    try:
        part()
    finally:
        graph.capture_end()
    return graph
