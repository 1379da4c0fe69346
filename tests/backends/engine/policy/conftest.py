"""The estimate under test, random queries and keys, and a prompt's selection put together.

In a process with TRITON_INTERPRET=1 the estimate is Triton's, run by its interpreter on CPU
tensors, else PyTorch's. `../test_interpreted.py` starts such a process.
"""

import os

import pytest
import torch

from backends.engine.policy import BLOCK_TOKENS, Place, estimate


@pytest.fixture(scope="session")
def estimator():
    """The module whose `select_blocks` and `log_sum_exps` are tested."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return estimate
    from backends.engine.policy import estimate_triton

    return estimate_triton


@pytest.fixture(scope="session")
def draw():
    """Make queries and keys whose attention is neither flat nor a single peak."""

    def make(tokens, model, seed=0, dtype=torch.float32):
        generator = torch.Generator().manual_seed(seed)
        query = torch.randn(tokens, model.heads, model.head_dim, generator=generator)
        keys = torch.randn(tokens, model.kv_heads, model.head_dim, generator=generator)
        return (4 * query).to(dtype), keys.to(dtype)

    return make


@pytest.fixture(scope="session")
def whole():
    """Select for a whole prompt, in chunks: bool [heads, query_blocks, key_blocks]."""

    def run(select, query, keys, chunk=None, layer=0):
        tokens = keys.shape[0]
        blocks = -(-tokens // BLOCK_TOKENS)
        found = torch.zeros(query.shape[1], blocks, blocks, dtype=torch.bool)
        for start in range(0, tokens, chunk or tokens):
            stop = min(start + (chunk or tokens), tokens)
            place = Place(start, stop - start, stop)
            of_chunk = select(query[start:stop], keys[:stop], layer, place)
            rows = slice(place.first_block, place.first_block + place.query_blocks)
            if of_chunk is None:
                of_chunk = torch.ones(place.query_blocks, place.key_blocks, dtype=torch.bool)
                of_chunk = of_chunk.tril(place.first_block)
            else:
                assert of_chunk.shape == (query.shape[1], place.query_blocks, place.key_blocks)
                assert of_chunk.dtype == torch.bool
            found[:, rows, : place.key_blocks] = of_chunk
        return found

    return run


@pytest.fixture(scope="session")
def lengths():
    """Name lengths one less than, at and one more than the multiples of what matters."""
    units = [1, 8, 16, 64, 100, 128, 256, 384, 512, 640]
    return sorted({max(unit + off, 1) for unit in units for off in (-1, 0, 1)})
