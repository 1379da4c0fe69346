"""CPU memory of exact size, with CUDA's calls written down by a double, and on a GPU for real."""

import gc
import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.engine import pinned
from backends.engine.memory import Buffer
from backends.engine.pinned import HostPool, allocate_host

PAGE = os.sysconf("SC_PAGE_SIZE")
DTYPES = (torch.bfloat16, torch.float32, torch.uint8, torch.float16, torch.int64)
MAPS = Path("/proc/self/maps")
OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")

linux = pytest.mark.skipif(not MAPS.exists(), reason="reads /proc/self/maps")


lazy = pytest.mark.skipif(
    not OVERCOMMIT.exists() or OVERCOMMIT.read_text().strip() == "2",
    reason="the system refuses to map more than there is",
)


def is_mapped(address):
    ranges = (line.split(" ", 1)[0].split("-") for line in MAPS.read_text().splitlines())
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in ranges)


class FakeCudart:
    """Writes calls down and refuses what CUDA would refuse; fails from the n-th call on."""

    def __init__(self, fail_at=None, error=2, stuck=()):
        self.calls = []
        self.registered = {}
        self.threads = set()
        self.fail_at = fail_at
        self.error = error
        self.stuck = stuck
        self.unmapped_too_early = []
        self._lock = threading.Lock()

    def cudaHostRegister(self, address, nbytes, flags):  # noqa: N802
        with self._lock:
            self.threads.add(threading.get_ident())
            self.calls.append(("register", address, nbytes, flags))
            if self.fail_at is not None and len(self.calls) > self.fail_at:
                return self.error
            if address in self.registered:
                return 712
            self.registered[address] = nbytes
            return 0

    def cudaHostUnregister(self, address):  # noqa: N802
        with self._lock:
            self.calls.append(("unregister", address))
            if MAPS.exists() and not is_mapped(address):
                self.unmapped_too_early.append(address)
            if address not in self.registered:
                return 713
            if self.registered[address] in self.stuck:
                return 1
            del self.registered[address]
            return 0

    def cudaGetErrorString(self, error):  # noqa: N802
        return {1: "invalid argument", 2: "out of memory"}.get(error, f"code {error}")


def host(name, *shape, dtype=torch.float32):
    return Buffer(name, shape, dtype, "host", "kv_host")


@given(
    shape=st.lists(st.integers(0, 40), max_size=3),
    dtype=st.sampled_from(DTYPES),
    pin=st.booleans(),
)
@settings(deadline=None)
def test_size_is_exact_and_memory_is_zero(shape, dtype, pin):
    cudart = FakeCudart()
    tensor = allocate_host(shape, dtype, pin=pin, cudart=cudart)
    assert tensor.shape == tuple(shape)
    assert tensor.dtype == dtype
    assert tensor.device.type == "cpu"
    assert tensor.is_contiguous()
    assert not tensor.to(torch.float32).any()
    nbytes = math.prod(shape) * torch.empty(0, dtype=dtype).element_size()
    assert tensor.untyped_storage().nbytes() == nbytes
    pages = math.ceil(nbytes / PAGE)
    wanted = [("register", tensor.data_ptr(), pages * PAGE, 0)] if pin and nbytes else []
    assert cudart.calls == wanted
    assert tensor.data_ptr() % PAGE == 0
    del tensor
    assert not cudart.registered
    assert not cudart.unmapped_too_early


@given(sizes=st.lists(st.integers(0, 5 * PAGE), max_size=6), pin=st.booleans())
@settings(deadline=None)
def test_a_pool_maps_whole_pages_and_no_more(sizes, pin):
    cudart = FakeCudart()
    buffers = [host(str(index), size, dtype=torch.uint8) for index, size in enumerate(sizes)]
    with HostPool(cudart=cudart, threads=3) as pool:
        tensors = pool.allocate_many(buffers, pin=pin)
        assert list(tensors) == [buffer.name for buffer in buffers]
        assert [tensor.nbytes for tensor in tensors.values()] == sizes
        assert pool.mapped_bytes == sum(math.ceil(size / PAGE) * PAGE for size in sizes)
        assert len(cudart.registered) == (sum(size > 0 for size in sizes) if pin else 0)
        for index, tensor in enumerate(tensors.values()):
            tensor.fill_(index + 1)
        for index, tensor in enumerate(tensors.values()):
            assert (tensor == index + 1).all()
    assert pool.mapped_bytes == 0
    assert not cudart.registered
    assert not cudart.unmapped_too_early


def test_a_tensor_larger_than_a_piece_is_touched_in_pieces_and_registered_once(monkeypatch):
    monkeypatch.setattr(pinned, "_TOUCH_BYTES", 2 * PAGE)
    touched = []
    touch = pinned._Block.touch
    registering = threading.Event()

    def note(block, start):
        if start == 8 * PAGE:  # gives a registration that does not wait the time to show
            registering.wait(0.05)
        touch(block, start)
        touched.append((block.address, start))

    class Late(FakeCudart):
        def cudaHostRegister(self, address, nbytes, flags):  # noqa: N802
            registering.set()
            starts = [start for other, start in touched if other == address]
            assert sorted(starts) == list(range(0, nbytes, 2 * PAGE))
            return super().cudaHostRegister(address, nbytes, flags)

    monkeypatch.setattr(pinned._Block, "touch", note)
    cudart = Late()
    buffers = [host(str(index), 9 * PAGE + index, dtype=torch.uint8) for index in range(5)]
    with HostPool(cudart=cudart, threads=2) as pool:
        pool.allocate_many(buffers, pin=True)
        assert sorted(cudart.registered.values()) == [9 * PAGE] + [10 * PAGE] * 4


@linux
def test_pinned_pages_are_there_and_unpinned_ones_are_not():
    def resident_bytes():
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE

    size = 64 * 2**20
    before = resident_bytes()
    unpinned = allocate_host((size,), torch.uint8, pin=False)
    assert resident_bytes() - before < size // 2
    pool = HostPool(cudart=FakeCudart())
    tensors = pool.allocate_many([host("kv", size, dtype=torch.uint8)], pin=True)
    assert resident_bytes() - before > size // 2
    tensors["kv"].fill_(1)
    pool.release()
    assert resident_bytes() - before < size // 2
    assert not tensors["kv"].any()  # still ours to read, its pages given back
    assert unpinned.nbytes == size


def test_release_unregisters_once_and_may_be_repeated():
    cudart = FakeCudart()
    pool = HostPool(cudart=cudart)
    tensors = pool.allocate_many([host("a", 3), host("b", 4)], pin=True)
    addresses = [tensor.data_ptr() for tensor in tensors.values()]
    pool.release()
    pool.release()
    del tensors
    gc.collect()
    assert [call for call in cudart.calls if call[0] == "unregister"] == [
        ("unregister", address) for address in addresses
    ]
    assert not cudart.unmapped_too_early


def test_a_dropped_pool_leaves_its_tensors_pinned_until_they_go():
    cudart = FakeCudart()
    tensors = HostPool(cudart=cudart).allocate_many([host("a", 3), host("b", 4)], pin=True)
    gc.collect()
    assert len(cudart.registered) == 2
    part = tensors["a"][1:]
    tensors.clear()
    assert list(cudart.registered) == [part.data_ptr() - 4]
    assert part.tolist() == [0, 0]
    del part
    assert not cudart.registered
    assert not cudart.unmapped_too_early


@lazy
def test_memory_is_unmapped_with_its_last_tensor():
    def address_space_bytes():
        return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE

    size = 2**36  # far above what else may come and go
    before = address_space_bytes()
    with HostPool() as pool:
        tensor = pool.allocate_many([host("a", size, dtype=torch.uint8)], pin=False)["a"]
    assert address_space_bytes() - before > size // 2
    assert tensor[0] == 0
    del tensor
    assert address_space_bytes() - before < size // 2


def test_threads_of_our_own_register():
    cudart = FakeCudart()
    tensor = allocate_host((5,), torch.float32, pin=True, cudart=cudart)
    assert threading.get_ident() not in cudart.threads
    assert len(tensor) == 5


@pytest.mark.parametrize("fail_at", range(4))
def test_a_failing_registration_releases_what_this_call_had(fail_at):
    cudart = FakeCudart(fail_at=fail_at)
    buffers = [host(str(index), 2**10) for index in range(4)]
    pool = HostPool(cudart=cudart, threads=2)
    with pytest.raises(RuntimeError, match=r"out of memory.*cannot be pinned.*error 2") as caught:
        pool.allocate_many(buffers, pin=True)
    assert "\n" not in str(caught.value)
    assert not cudart.registered
    assert pool.mapped_bytes == 0
    assert not cudart.unmapped_too_early


def test_a_failing_registration_leaves_earlier_tensors_alone():
    cudart = FakeCudart(fail_at=1, error=1)
    pool = HostPool(cudart=cudart)
    tensor = pool.allocate_many([host("first", 7)], pin=True)["first"]
    with pytest.raises(
        RuntimeError, match=r"cannot be pinned.*error 1, invalid argument"
    ) as caught:
        pool.allocate_many([host("second", 7)], pin=True)
    assert "out of memory" not in str(caught.value)
    assert list(cudart.registered) == [tensor.data_ptr()]
    pool.release()
    assert not cudart.registered


def test_what_cannot_be_unregistered_is_named_after_the_rest_is_released():
    cudart = FakeCudart(stuck=[2 * PAGE])
    pool = HostPool(cudart=cudart)
    tensors = pool.allocate_many(
        [host("stuck", 2 * PAGE, dtype=torch.uint8), host("free", PAGE, dtype=torch.uint8)],
        pin=True,
    )
    tensors["stuck"].fill_(3)
    with pytest.raises(RuntimeError, match=r"cannot be unpinned.*invalid argument"):
        pool.release()
    assert list(cudart.registered) == [tensors["stuck"].data_ptr()]
    assert (tensors["stuck"] == 3).all()  # CUDA may still know these pages
    pool.release()


def test_more_than_the_address_space_is_out_of_memory():
    cudart = FakeCudart()
    with pytest.raises(RuntimeError, match=r"out of memory: .* cannot be mapped"):
        HostPool(cudart=cudart).allocate_many([host("a", 8), host("b", 2**56)], pin=True)
    with pytest.raises(RuntimeError, match="out of memory"):
        allocate_host((2**62,), torch.float32, pin=False)
    assert not cudart.calls


@lazy
def test_more_than_the_memory_there_is_can_be_mapped():
    total = os.sysconf("SC_PHYS_PAGES") * PAGE
    tensor = allocate_host((4 * total,), torch.uint8, pin=False)
    tensor[-1] = 1
    assert tensor[-1] == 1


def test_two_buffers_of_one_name_are_a_mistake():
    with pytest.raises(AssertionError, match="one name"):
        HostPool().allocate_many([host("a", 1), host("a", 2)], pin=False)


def test_memory_held_at_exit_is_unregistered_first():
    script = """
import torch
from backends.engine.pinned import allocate_host
class Cudart:
    def cudaHostRegister(self, address, nbytes, flags):
        print("register", flush=True)
        return 0
    def cudaHostUnregister(self, address):
        print("unregister", flush=True)
        return 0
tensor = allocate_host((5,), torch.float32, pin=True, cudart=Cudart())
print("end", flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["register", "end", "unregister"]
    assert done.stderr == ""


def cuda(test):
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
    return pytest.mark.cuda(skip(test))


@cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cuda_takes_the_memory_as_pinned(dtype):
    with HostPool() as pool:
        tensors = pool.allocate_many(
            [host("a", 3, 5, dtype=dtype), host("b", 2**20 + 1, dtype=dtype)], pin=True
        )
        assert all(tensor.is_pinned() for tensor in tensors.values())
        assert tensors["b"][2**19 :].is_pinned()
    assert not any(tensor.is_pinned() for tensor in tensors.values())


@cuda
def test_cuda_copies_both_ways_without_blocking():
    size = 2**26
    with HostPool() as pool:
        tensors = pool.allocate_many(
            [host("up", size), host("down", size)],
            pin=True,
        )
        tensors["up"].copy_(torch.arange(size, dtype=torch.float32))
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            on_device = torch.empty(size, device="cuda")
            on_device.copy_(tensors["up"], non_blocking=True)
            on_device.mul_(2)
            tensors["down"].copy_(on_device, non_blocking=True)
        stream.synchronize()
        assert torch.equal(tensors["down"], tensors["up"] * 2)


class _Recorder:
    """PyTorch's cudart, with the calls written down."""

    def __init__(self):
        self._cudart = torch.cuda.cudart()
        self.sizes = []

    def cudaHostRegister(self, address, nbytes, flags):  # noqa: N802
        self.sizes.append(nbytes)
        return self._cudart.cudaHostRegister(address, nbytes, flags)

    def __getattr__(self, name):
        return getattr(self._cudart, name)


@cuda
def test_cuda_registers_whole_pages_and_no_more():
    cudart = _Recorder()
    size = 2**24 + 1
    tensor = allocate_host((size,), torch.uint8, pin=True, cudart=cudart)
    assert tensor.is_pinned()
    assert cudart.sizes == [2**24 + PAGE]


@cuda
def test_cuda_refuses_in_words_and_forgets_it():
    class Twice(_Recorder):
        def cudaHostRegister(self, address, nbytes, flags):  # noqa: N802
            super().cudaHostRegister(address, nbytes, flags)
            error = super().cudaHostRegister(address, nbytes, flags)
            self._cudart.cudaHostUnregister(address)
            return error

    with pytest.raises(RuntimeError, match=r"cannot be pinned.*cudaHostRegister gives error 712"):
        allocate_host((100,), torch.uint8, pin=True, cudart=Twice())
    # A later kernel is not blamed.
    assert torch.ones(4, device="cuda").sum().item() == 4


@cuda
def test_cuda_takes_pool_after_pool():
    for _ in range(50):
        with HostPool() as pool:
            tensor = pool.allocate_many([host("a", 2**20)], pin=True)["a"]
            assert tensor.is_pinned()
