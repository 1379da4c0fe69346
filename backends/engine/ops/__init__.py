"""The small device kernels of the decoder, behind one protocol: PyTorch's or Triton's."""

from __future__ import annotations

import importlib.util

import torch

from backends.engine.ops.base import SPLIT_TOKENS, Ops, splits_for
from backends.engine.ops.torch_ops import TorchOps

__all__ = ["SPLIT_TOKENS", "Ops", "TorchOps", "make_ops", "splits_for"]

_TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def make_ops(device: torch.device, dtype: torch.dtype) -> Ops:
    """Return Triton's kernels on a GPU where Triton is installed, else PyTorch's.

    Decided by what is there and never by timing, so that equal machines give equal bits.

    Args:
        device: where the tensors lie.
        dtype: of weights and activations.
    """
    usable = device.type == "cuda" and dtype in _TRITON_DTYPES
    if usable and importlib.util.find_spec("triton") is not None:
        from backends.engine.ops.triton_ops import TritonOps  # noqa: PLC0415 (only when asked for)

        return TritonOps()
    return TorchOps()
