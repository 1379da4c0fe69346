"""CPU memory of exact size for the engine, pinned for CUDA where asked for, and paid once.

PyTorch's allocator of pinned memory rounds up to a power of two: a little over 64 GiB becomes
128 GiB. Here memory is mapped to the page, touched by several threads, and registered with CUDA.
It stays registered until its pool is released or its last tensor is gone, and is unmapped only
after that.
"""

from __future__ import annotations

import mmap
import os
import platform
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch

from backends.engine.memory import Buffer, format_bytes

_TOUCH_BYTES = 256 * 2**20
_MOST_THREADS = 16
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


class Cudart(Protocol):
    """What is used of `torch.cuda.cudart()`. The calls return an error code, 0 for success."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int, /) -> Any:  # noqa: N802
        """Pin mapped memory."""
        ...

    def cudaHostUnregister(self, address: int, /) -> Any:  # noqa: N802
        """Unpin it."""
        ...

    def cudaGetErrorString(self, error: Any, /) -> str:  # noqa: N802
        """Return an error code in words."""
        ...


def allocate_host(
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    pin: bool,
    device: torch.device | None = None,
    cudart: Cudart | None = None,
) -> torch.Tensor:
    """Allocate one tensor of CPU memory, which holds zeros; it is unpinned and unmapped with it.

    Args:
        shape: of the tensor.
        dtype: of the tensor.
        pin: register it with CUDA; see `HostPool.allocate_many`.
        device: the CUDA device to register with; None is the current one.
        cudart: in place of PyTorch's, for tests.

    Raises:
        RuntimeError: it cannot be mapped or registered; "out of memory" in the text where that is
            the cause.
    """
    buffer = Buffer("tensor", tuple(shape), dtype, "host", "other")
    return HostPool(device=device, cudart=cudart).allocate_many([buffer], pin=pin)["tensor"]


class HostPool:
    """CPU memory that is allocated together and released together. A context manager.

    Nothing is lost when it is dropped unreleased: each tensor keeps its memory, pinned, as long as
    it lives.

    Args:
        device: the CUDA device to register with; None is the current one.
        threads: that touch and register; by default one a core, 16 at most.
        cudart: in place of PyTorch's, for tests.
    """

    def __init__(
        self,
        *,
        device: torch.device | None = None,
        threads: int | None = None,
        cudart: Cudart | None = None,
    ) -> None:
        self._device = device
        self._threads = threads or min(_MOST_THREADS, os.cpu_count() or 1)
        self._cudart = cudart
        self._blocks: list[_Block] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    @property
    def mapped_bytes(self) -> int:
        """Bytes of address space that the pool holds: each tensor rounded up to whole pages."""
        return sum(len(block.mapping) for block in self._blocks)

    def allocate_many(self, buffers: Sequence[Buffer], pin: bool) -> dict[str, torch.Tensor]:
        """Allocate tensors of CPU memory, which hold zeros, under the names of the buffers.

        With `pin` every page is touched and each tensor is registered once, several at a time.
        Without, pages are left to be taken when they are first written: on the CPU device a
        context that is never filled costs nothing.

        Raises:
            RuntimeError: memory cannot be mapped or registered; "out of memory" in the text where
                that is the cause. What this call had allocated is released.
        """
        if len({buffer.name for buffer in buffers}) < len(buffers):
            raise AssertionError("two buffers of one name")
        blocks: list[_Block] = []
        try:
            tensors = {}
            for buffer in buffers:
                tensors[buffer.name] = _tensor(buffer, pin, blocks)
            if pin and blocks:
                _pin(blocks, _Driver(self._cudart, self._device), self._threads)
        except BaseException:
            with suppress(RuntimeError):  # the error that is under way says more
                _release(blocks)
            raise
        self._blocks += blocks
        return tensors

    def release(self) -> None:
        """Unpin all memory and give its pages back. A second call does nothing.

        The caller has waited for every copy. A tensor that is still held afterwards reads zeros
        and is not pinned any more; its address space goes with it.

        Raises:
            RuntimeError: CUDA refuses to unregister; the rest has been released.
        """
        blocks, self._blocks = self._blocks, []
        _release(blocks)


class _Driver:
    """CUDA's calls on host memory, for one device."""

    def __init__(self, cudart: Cudart | None, device: torch.device | None) -> None:
        self._index: int | None = None
        if cudart is None:
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            index = None if device is None else device.index
            self._index = torch.cuda.current_device() if index is None else index
        self._cudart: Cudart = cudart

    def register(self, address: int, nbytes: int) -> None:
        with self._on_device():
            error = self._cudart.cudaHostRegister(address, nbytes, 0)
        if int(error):
            failure = self._failure("cudaHostRegister", error)
            cause = "out of memory: " if int(error) == _OUT_OF_MEMORY else ""
            raise RuntimeError(
                f"{cause}{format_bytes(nbytes)} of host memory cannot be pinned ({failure})"
            )

    def unregister(self, address: int) -> None:
        with self._on_device():
            error = self._cudart.cudaHostUnregister(address)
        if int(error):
            failure = self._failure("cudaHostUnregister", error)
            raise RuntimeError(f"host memory cannot be unpinned ({failure})")

    def unregister_late(self, address: int, mapping: mmap.mmap) -> None:
        """Unregister memory that nobody released, after whatever may still be copying.

        The argument keeps the memory mapped until then: an mmap that dies unmaps first and calls
        its own weak references after.
        """
        with suppress(RuntimeError):  # a device that has failed has also stopped
            if self._index is not None:
                torch.cuda.synchronize(self._index)
        with suppress(RuntimeError):
            self.unregister(address)

    def _failure(self, call: str, error: Any) -> str:
        return f"{call} gives error {int(error)}, {self._cudart.cudaGetErrorString(error)}"

    def _on_device(self) -> AbstractContextManager[object]:
        """Return a context with our device as the current one; a new thread starts with another."""
        if self._index is None:
            return nullcontext()
        return torch.cuda.device(self._index)


@dataclass(eq=False, slots=True)
class _Block:
    """Mapped memory of one tensor. The tensor holds `array`, and `array` holds `mapping`."""

    mapping: mmap.mmap
    array: npt.NDArray[np.uint8]
    unpin: weakref.finalize[..., Any] | None = None
    driver: _Driver | None = None

    @property
    def address(self) -> int:
        return int(self.array.ctypes.data)

    def touch(self, start: int) -> None:
        """Write a byte to each page of a piece. NumPy lets other threads run meanwhile."""
        self.array[start : start + _TOUCH_BYTES : mmap.PAGESIZE] = 0

    def pin(self, driver: _Driver, touched: Iterable[Future[None]]) -> None:
        for piece in touched:
            piece.result()
        driver.register(self.address, len(self.mapping))
        self.driver = driver
        self.unpin = weakref.finalize(
            self.array, driver.unregister_late, self.address, self.mapping
        )

    def release(self) -> None:
        if self.unpin is not None and self.unpin.detach() and self.driver is not None:
            self.driver.unregister(self.address)
        with suppress(OSError, AttributeError):  # where the system cannot, unmapping does it
            self.mapping.madvise(mmap.MADV_DONTNEED)


def _tensor(buffer: Buffer, pin: bool, blocks: list[_Block]) -> torch.Tensor:
    """Map memory for a tensor and add it to the blocks; an empty tensor needs none."""
    if not buffer.nbytes:
        return torch.empty(buffer.shape, dtype=buffer.dtype)
    mapping = _map(buffer.nbytes)
    _advise(mapping, "MADV_HUGEPAGE")
    if pin:
        # After a fork, a write by the parent could move its page away from the one CUDA knows.
        _advise(mapping, "MADV_DONTFORK")
    block = _Block(mapping, np.frombuffer(mapping, dtype=np.uint8, count=buffer.nbytes))
    blocks.append(block)
    return torch.from_numpy(block.array).view(buffer.dtype).view(buffer.shape)


def _map(nbytes: int) -> mmap.mmap:
    """Map zeros, rounded up to whole pages.

    Private, for shared memory takes no huge pages and keeps its pages after MADV_DONTNEED. Without
    a reservation, for with one Linux refuses at once what is more than the memory that there is
    now, even on a machine that would get more.
    """
    pages = -(-nbytes // mmap.PAGESIZE)
    try:
        return mmap.mmap(
            -1,
            pages * mmap.PAGESIZE,
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _no_reserve(),
        )
    except (OSError, OverflowError) as error:
        raise RuntimeError(
            f"out of memory: {format_bytes(nbytes)} of host memory cannot be mapped ({error})"
        ) from error


def _no_reserve() -> int:
    """Return MAP_NORESERVE, which Python names from 3.13 on, or 0 where its value is not known."""
    known = platform.system() == "Linux" and platform.machine() in ("x86_64", "aarch64")
    return int(getattr(mmap, "MAP_NORESERVE", 0x4000 if known else 0))


def _advise(mapping: mmap.mmap, name: str) -> None:
    """Give the kernel advice, where it takes it."""
    with suppress(AttributeError, OSError):
        mapping.madvise(getattr(mmap, name))


def _pin(blocks: Sequence[_Block], driver: _Driver, threads: int) -> None:
    """Touch and register, in order, so that one block is registered while the next is touched.

    Always in threads of our own: CUDA remembers a call that failed for its thread, and PyTorch
    would report it at the next kernel that the caller launches.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix="pin") as executor:
        pinned = []
        for block in blocks:
            touched = [
                executor.submit(block.touch, start)
                for start in range(0, len(block.mapping), _TOUCH_BYTES)
            ]
            # Its pieces have left the queue before it does, so that it never waits for a piece
            # that waits for a thread.
            pinned.append(executor.submit(block.pin, driver, touched))
        try:
            for block_pinned in pinned:
                block_pinned.result()
        except BaseException:
            executor.shutdown(cancel_futures=True)
            raise


def _release(blocks: Iterable[_Block]) -> None:
    """Release all; raise the first error at the end."""
    errors = []
    for block in blocks:
        try:
            block.release()
        except RuntimeError as error:
            errors.append(error)
    if errors:
        raise errors[0]
