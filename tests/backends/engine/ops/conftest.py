"""The implementation under test, its tolerances, and random tensors.

In a process with TRITON_INTERPRET=1 it is Triton's, run by its interpreter on CPU tensors, else
PyTorch's. `../test_interpreted.py` starts such a process.
"""

import os

import pytest
import torch

from backends.engine.ops import TorchOps

LIMITS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture(scope="session")
def ops():
    """TorchOps, or TritonOps under the interpreter."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return TorchOps()
    from backends.engine.ops.triton_ops import TritonOps

    return TritonOps()


@pytest.fixture(scope="session")
def near():
    """Assert that a result is its float64 reference but for rounding to its dtype."""

    def check(got, wanted, times=1.0):
        limit = LIMITS[got.dtype] * times
        error = (got.double() - wanted).abs()
        allowed = limit * wanted.abs() + limit * wanted.square().mean().sqrt()
        assert (error <= allowed).all(), f"off by {(error / allowed).max():.3g} times the limit"

    return check


@pytest.fixture(scope="session")
def randn():
    """Make normal random tensors that depend on the seed and the size alone."""

    def make(*size, seed=0, dtype=torch.float32, device="cpu"):
        generator = torch.Generator().manual_seed(seed * 1009 + sum(size))
        return torch.randn(size, generator=generator).to(device, dtype)

    return make


@pytest.fixture(scope="session")
def scalar():
    """An int64 [1] that lies in the middle of something else."""

    def make(value, device="cpu"):
        return torch.tensor([-(10**6), value, -(10**6)], device=device)[1:2]

    return make
