"""A step that is captured once as a CUDA graph and replayed, so that its launches cost nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch

WARM_UPS = 2
"""Runs before the capture: kernels are compiled and libraries allocate their workspaces in them."""


class CapturedStep:
    """A step of one token whose kernels read their place on the device.

    Args:
        run: computes the step; returns a tensor that each run overwrites.
        device: a GPU.
    """

    def __init__(self, run: Callable[[], torch.Tensor], device: torch.device) -> None:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                run()
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.synchronize(device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._out = run()

    def __call__(self) -> torch.Tensor:
        """Replay the step; return what `run` returned."""
        self._graph.replay()
        return self._out
