"""What this machine can do at best: copies, memory, matrix products, attention.

All on random data, since the power that products draw, and so their speed, depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from backends.base import ConfigurationError
from backends.engine.attention import KERNELS, Kernel, attention, choose_kernel
from scripts.bench.shapes import Product, Shape
from scripts.bench.timing import Stopwatch
from scripts.bench.work import causal_operations, rectangular_operations

GPU_BUFFER_BYTES, CPU_BUFFER_BYTES = 2**30, 2**23
COPY_REPEATS = 3
COPIES_TOGETHER = 4
"""Of each direction in one call, so that waiting for the slower at the end weighs little."""
MATH_KERNEL = "math"
"""Holds the whole score matrix."""
LARGEST_SCORES_BYTES = 2**32


@dataclass(frozen=True)
class Bench:
    """What every measurement needs: shape, device, number type, clock."""

    shape: Shape
    device: torch.device
    dtype: torch.dtype
    stopwatch: Stopwatch

    @property
    def buffer_bytes(self) -> int:
        """Bytes of one buffer that is copied or read; far beyond any cache on a GPU."""
        return GPU_BUFFER_BYTES if self.device.type == "cuda" else CPU_BUFFER_BYTES

    def random(self, *size: int) -> torch.Tensor:
        """Return normally distributed numbers on the device."""
        return torch.randn(size, device=self.device, dtype=self.dtype)


def copy_rates(bench: Bench) -> dict[str, float]:
    """Return bytes/s from pinned CPU memory to the device, back, and both ways together.

    On a CPU these are copies within its memory.
    """
    pinned = bench.device.type == "cuda"
    count = bench.buffer_bytes
    # uint8 sizes that are powers of two, which pinned memory would be rounded up to anyway.
    hosts = [torch.ones(count, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
    devices = [torch.ones(count, dtype=torch.uint8, device=bench.device) for _ in range(2)]

    def up() -> None:
        devices[0].copy_(hosts[0], non_blocking=True)

    def down() -> None:
        hosts[1].copy_(devices[1], non_blocking=True)

    def rate(call: Callable[[], object], moved_bytes: int) -> float:
        return moved_bytes / bench.stopwatch.seconds_per_call(call, COPY_REPEATS)

    return {
        "up_bytes_per_second": rate(up, count),
        "down_bytes_per_second": rate(down, count),
        "both_bytes_per_second": rate(
            _together(bench.device, (up, down)), 2 * COPIES_TOGETHER * count
        ),
    }


def _together(device: torch.device, copies: Sequence[Callable[[], None]]) -> Callable[[], None]:
    """Return what makes `COPIES_TOGETHER` of each copy, each kind on a stream of its own."""
    if device.type != "cuda":
        in_turn = list(copies) * COPIES_TOGETHER

        def one_by_one() -> None:
            for copy in in_turn:
                copy()

        return one_by_one
    streams = [torch.cuda.Stream(device) for _ in copies]  # type: ignore[no-untyped-call]

    def together() -> None:
        current = torch.cuda.current_stream(device)
        for stream, copy in zip(streams, copies, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                for _ in range(COPIES_TOGETHER):
                    copy()
        for stream in streams:
            current.wait_stream(stream)

    return together


def memory_rates(bench: Bench) -> dict[str, float]:
    """Return bytes/s of the device's memory: a copy (read and written), two reads, the best.

    Reading is what decode does: a matrix times a vector, and a sum.
    """
    width = bench.shape.hidden
    element_bytes = bench.dtype.itemsize
    rows = bench.buffer_bytes // (width * element_bytes)
    matrix, vector = bench.random(rows, width), bench.random(width)
    target = torch.empty_like(matrix)
    result = bench.random(rows)

    def rate(call: Callable[[], object], moved_bytes: int) -> float:
        return moved_bytes / bench.stopwatch.seconds_per_call(call, COPY_REPEATS)

    rates = {
        "copy_bytes_per_second": rate(lambda: target.copy_(matrix), 2 * matrix.nbytes),
        "matrix_vector_bytes_per_second": rate(
            lambda: torch.mv(matrix, vector, out=result), matrix.nbytes
        ),
        "sum_bytes_per_second": rate(matrix.sum, matrix.nbytes),
    }
    return rates | {"best_bytes_per_second": max(rates.values())}


def gemm_rate(bench: Bench, product: Product, rows: int) -> dict[str, float]:
    """Return seconds and operations/s of one of the model's products on so many rows."""
    inputs = bench.random(rows, product.inputs)
    weights = bench.random(product.outputs, product.inputs)
    out = bench.random(rows, product.outputs)
    transposed = weights.t()
    seconds = bench.stopwatch.seconds_per_call(lambda: torch.mm(inputs, transposed, out=out))
    operations = 2.0 * rows * product.inputs * product.outputs
    return {"seconds": seconds, "operations_per_second": operations / seconds}


def attention_kernels(bench: Bench) -> tuple[dict[str, Kernel], dict[str, str]]:
    """Return the engine's attention kernels by name, and why the others cannot run here."""
    found, refused = {}, {}
    for name, kernel in KERNELS.items():
        if bench.device.type in kernel.devices:
            try:
                found[name] = named_kernel(bench, name)
            except ConfigurationError as error:
                refused[name] = str(error)
    return found, refused


def named_kernel(bench: Bench, name: str) -> Kernel:
    """Return the attention kernel of that name.

    Raises:
        ConfigurationError: it cannot run on this device with this shape and number type.
    """
    shape = bench.shape
    heads = (shape.heads, shape.kv_heads, shape.head_dim)
    return choose_kernel(name, bench.device, bench.dtype, heads)


def is_out_of_reach(bench: Bench, kernel_name: str, queries: int, keys: int) -> bool:
    """Tell whether a kernel would hold more scores at once than `LARGEST_SCORES_BYTES`."""
    scores_bytes = 4 * bench.shape.heads * queries * keys
    return kernel_name == MATH_KERNEL and scores_bytes > LARGEST_SCORES_BYTES


def attention_rate(
    bench: Bench, kernel: Kernel, queries: int, keys: int, *, causal: bool
) -> dict[str, float]:
    """Return seconds and operations/s of one attention call, without merging."""
    shape = bench.shape
    query = bench.random(queries, shape.heads, shape.head_dim)
    key = bench.random(keys, shape.kv_heads, shape.head_dim)
    value = bench.random(keys, shape.kv_heads, shape.head_dim)
    seconds = bench.stopwatch.seconds_per_call(
        lambda: attention(query, key, value, causal=causal, kernel=kernel)
    )
    operations = (
        causal_operations(shape, keys) if causal else rectangular_operations(shape, queries, keys)
    )
    return {"seconds": seconds, "operations_per_second": operations / seconds}
