"""The memory plan, against sums and searches done the long way."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backends.base import ConfigurationError
from backends.engine import memory
from backends.engine.host_memory import HostMemory
from backends.engine.memory import (
    GIB,
    OUTSIDE_ALLOCATOR_BYTES,
    Alternative,
    Buffer,
    Limits,
    MemoryPlan,
    cap_device,
    check,
    context_allowance,
    format_bytes,
    read_limits,
    require_memory_gb,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
PARTS = ("weights", "kv_ring", "kv_device", "kv_host", "activations", "other")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)
BAD_SIZES = (0, -1, 0.0, -0.5, float("nan"), float("inf"), -math.inf, True, False, "24", [24])

buffers = st.builds(
    Buffer,
    name=st.text(max_size=3),
    shape=st.lists(st.integers(0, 6), max_size=4).map(tuple),
    dtype=st.sampled_from(DTYPES),
    place=st.sampled_from(["device", "host"]),
    part=st.sampled_from(PARTS),
)
plans = st.lists(buffers, max_size=12).map(lambda found: MemoryPlan(tuple(found)))


def limits(device=None, host=None, may_grow=False, device_is_host=False):
    return Limits(device, "cap", host, "detected", may_grow, device_is_host)


def plan(**bytes_of):
    """Make a plan of so many bytes by part; kv_host lies in host memory."""
    return MemoryPlan(
        tuple(
            Buffer(part, (count,), torch.uint8, "host" if part == "kv_host" else "device", part)
            for part, count in bytes_of.items()
        )
    )


@given(buffers)
def test_a_buffer_is_as_large_as_its_tensor(buffer):
    assert buffer.nbytes == torch.empty(buffer.shape, dtype=buffer.dtype).nbytes


@given(plans)
def test_sums(found):
    for place, total in (("device", found.device_bytes), ("host", found.host_bytes)):
        assert total == sum(b.nbytes for b in found.buffers if b.place == place)
        by_part = found.bytes_by_part(place)
        assert list(by_part) == [
            part
            for part in PARTS
            if any(b.part == part and b.place == place for b in found.buffers)
        ]
        for part, count in by_part.items():
            assert count == sum(
                b.nbytes for b in found.buffers if b.place == place and b.part == part
            )


@given(plans)
def test_json_says_all_of_it(found):
    described = found.to_json()
    assert json.loads(json.dumps(described)) == described
    again = [
        Buffer(
            entry["name"],
            tuple(entry["shape"]),
            getattr(torch, entry["dtype"]),
            entry["place"],
            entry["part"],
        )
        for entry in described["buffers"]
    ]
    assert tuple(again) == found.buffers
    assert described["device_bytes"] == sum(described["device_bytes_by_part"].values())
    assert described["host_bytes"] == sum(described["host_bytes_by_part"].values())
    assert described["device_bytes"] + described["host_bytes"] == sum(
        entry["bytes"] for entry in described["buffers"]
    )


@given(plans)
def test_the_table_has_a_line_a_part_and_two_totals(found):
    names = [line.split()[0] for line in found.lines()]
    used = [part for part in PARTS if any(b.part == part for b in found.buffers)]
    assert names == [*used, "device", "host"]


def test_the_table():
    found = MemoryPlan(
        (
            Buffer("w", (15 * 2**29,), torch.bfloat16, "device", "weights"),
            Buffer("embedding", (2**29,), torch.bfloat16, "host", "weights"),
            Buffer("kv", (16, 2**30), torch.uint8, "host", "kv_host"),
            Buffer("step", (80, 2**20), torch.uint8, "device", "activations"),
        )
    )
    assert found.lines() == [
        "weights       15.00 GiB device + 1.00 GiB host",
        "kv_host       16.00 GiB host",
        "activations   80.00 MiB device",
        "device total  15.08 GiB",
        "host total    17.00 GiB",
    ]
    assert found.lines(limits(24 * GIB, 20 * GIB))[-2:] == [
        "device total  15.08 GiB of 24.00 GiB (cap)",
        "host total    17.00 GiB of 20.00 GiB (detected)",
    ]
    assert found.lines(limits(None, 40 * GIB, device_is_host=True))[-2:] == [
        "device total  15.08 GiB (no limit but cap)",
        "host total    32.08 GiB, device included, of 40.00 GiB (detected)",
    ]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0.00 MiB"),
        (2**20, "1.00 MiB"),
        (GIB // 10, "102.40 MiB"),
        (GIB // 10 + 1, "0.10 GiB"),
        (3 * GIB // 2, "1.50 GiB"),
    ],
)
def test_sizes_in_words(count, text):
    assert format_bytes(count) == text


def test_a_plan_that_fits_to_the_byte():
    found = plan(weights=60, kv_ring=40, kv_host=30)
    assert check(found, limits(100, 30)) == []
    assert check(found, limits()) == []
    with pytest.raises(ConfigurationError, match=r"need 100 bytes of device memory.* 99 bytes"):
        check(found, limits(99, 30))
    with pytest.raises(ConfigurationError, match=r"need 30 bytes of host memory.* 29 bytes"):
        check(found, limits(100, 29))


def test_on_the_cpu_device_buffers_count_as_host_memory():
    found = plan(weights=60, kv_ring=40, kv_host=30)
    assert check(found, limits(100, 130, device_is_host=True)) == []
    with pytest.raises(ConfigurationError, match=r"need 130 bytes of host memory.* 129 bytes"):
        check(found, limits(100, 129, device_is_host=True))


@given(
    weights=st.integers(0, 50),
    ring_step=st.integers(0, 9),
    host_step=st.integers(0, 9),
    device_limit=st.none() | st.integers(0, 300),
    host_limit=st.none() | st.integers(0, 300),
    may_grow=st.booleans(),
    candidates=st.lists(st.integers(1, 60), max_size=12, unique=True).map(sorted),
    current=st.integers(1, 60),
)
def test_the_largest_setting_that_fits_is_named(
    *, weights, ring_step, host_step, device_limit, host_limit, may_grow, candidates, current
):
    def plan_for(value):
        return plan(weights=weights, kv_ring=ring_step * value, kv_host=host_step * value)

    def fits(value):
        on_device = weights + ring_step * value
        return (device_limit is None or on_device <= device_limit) and (
            host_limit is None or may_grow or host_step * value <= host_limit
        )

    there = limits(device_limit, host_limit, may_grow)
    alternative = Alternative("backend.max_model_len", current, plan_for, candidates)
    if fits(current):
        short = host_limit is not None and host_step * current > host_limit
        assert len(check(plan_for(current), there, [alternative])) == short
        return
    with pytest.raises(ConfigurationError) as caught:
        check(plan_for(current), there, [alternative])
    text = str(caught.value)
    assert "\n" not in text
    best = max((value for value in candidates if value < current and fits(value)), default=None)
    if device_limit is not None and weights > device_limit:
        assert "the weights alone need" in text
        assert "backend.max_model_len" not in text
    elif best is None:
        assert "no lower backend.max_model_len would fit alone" in text
    else:
        assert f"lower backend.max_model_len from {current} to {best}, the largest" in text


def test_candidates_may_be_a_range_and_few_plans_are_made():
    asked = []

    def plan_for(value):
        asked.append(value)
        return plan(kv_host=value * 131072)

    alternative = Alternative("backend.max_model_len", 2**24, plan_for, range(256, 2**30, 256))
    with pytest.raises(ConfigurationError, match="from 16777216 to 524288, the largest"):
        check(plan(kv_host=2**24 * 131072), limits(host=64 * GIB), [alternative])
    assert len(asked) <= 20
    assert max(asked) < 2**24


def test_alternatives_are_tried_in_order():
    def never(value):
        return plan(kv_ring=1000)

    def sometimes(value):
        return plan(kv_ring=10 * value)

    first = Alternative("backend.max_model_len", 512, never, range(1, 512))
    second = Alternative("backend.num_gpu_blocks", 16, sometimes, range(2, 100))
    third = Alternative("backend.chunk_tokens", 64, sometimes, range(1, 64))
    with pytest.raises(ConfigurationError, match=r"lower backend\.num_gpu_blocks from 16 to 5,"):
        check(plan(kv_ring=160), limits(55), [first, second, third])
    with pytest.raises(
        ConfigurationError,
        match=r"no lower backend\.max_model_len or backend\.num_gpu_blocks would fit",
    ):
        check(plan(kv_ring=160), limits(19), [first, second])
    with pytest.raises(ConfigurationError, match="raise that limit, or take a smaller model"):
        check(plan(kv_ring=160), limits(19))


def test_both_shortages_are_named_in_one_line():
    with pytest.raises(ConfigurationError) as caught:
        check(plan(weights=2 * GIB, kv_ring=GIB, kv_host=9 * GIB), limits(GIB, 4 * GIB))
    assert str(caught.value) == (
        "The memory plan does not fit: the weights alone need 2.00 GiB of device memory, but there "
        "are 1.00 GiB (cap) and the buffers need 9.00 GiB of host memory, but there are 4.00 GiB "
        "(detected); raise that limit, or take a smaller model or dtype."
    )


def test_memory_that_may_grow_is_a_warning():
    (warning,) = check(plan(weights=2, kv_host=9 * GIB), limits(2, 4 * GIB, may_grow=True))
    assert "9.00 GiB of host memory, but there are 4.00 GiB (detected)" in warning
    assert "\n" not in warning
    # It does not excuse the device.
    with pytest.raises(ConfigurationError) as caught:
        check(plan(weights=3, kv_host=9 * GIB), limits(2, 4 * GIB, may_grow=True))
    assert "host memory" not in str(caught.value)


@pytest.mark.parametrize("bad", BAD_SIZES)
@pytest.mark.parametrize("key", ["backend.device_memory_gb", "backend.host_memory_gb"])
def test_bad_sizes(key, bad):
    calls = [lambda: require_memory_gb(key, bad)]
    if key == "backend.device_memory_gb":
        calls += [lambda: read_limits(CPU, bad, None), lambda: cap_device(CPU, bad)]
    else:
        calls += [lambda: read_limits(CPU, None, bad)]
    for call in calls:
        with pytest.raises(ConfigurationError) as caught:
            call()
        text = str(caught.value)
        assert text.startswith(f"{key}={bad!r} is not a number of GiB (2**30 bytes) above 0")
        assert "\n" not in text


@pytest.mark.parametrize("good", [None, 1, 0.5, 24, 24.0, 1e6])
def test_good_sizes(good):
    require_memory_gb("backend.device_memory_gb", good)


@pytest.fixture
def detected(monkeypatch):
    """A host with 24 GiB to take, which may grow."""
    found = HostMemory(31 * GIB, 24 * GIB, "MemAvailable in /proc/meminfo", may_grow=True)
    monkeypatch.setattr(memory, "detect_host_memory", lambda: found)


@pytest.mark.usefixtures("detected")
def test_limits_of_the_cpu():
    there = read_limits(CPU, None, None)
    assert (there.device_bytes, there.host_bytes) == (None, 24 * GIB)
    assert (there.host_may_grow, there.device_is_host) == (True, True)
    assert there.host_reason == (
        "MemAvailable in /proc/meminfo; backend.host_memory_gb overrides it"
    )
    there = read_limits(CPU, 1.5, 64)
    assert (there.device_bytes, there.host_bytes) == (3 * GIB // 2, 64 * GIB)
    assert there.device_reason == "cap backend.device_memory_gb=1.5"
    assert there.host_reason == "backend.host_memory_gb=64"
    assert not there.host_may_grow


@pytest.fixture
def gpu(monkeypatch):
    """A made-up GPU of 80 GiB, of which 50 are free and this process reserves 8 and uses 3."""
    fractions = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 8 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3 * GIB)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(total_memory=80 * GIB),
    )
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda fraction, device: fractions.append((fraction, device)),
    )
    return fractions


@pytest.mark.usefixtures("detected", "gpu")
@pytest.mark.parametrize(
    ("cap", "wanted", "reason"),
    [
        (None, 55, "free device memory"),
        (70, 55, "free device memory"),
        (58, 55, "cap backend.device_memory_gb=58 less 3.00 GiB that this process already holds"),
        (24, 21, "cap backend.device_memory_gb=24 less 3.00 GiB that this process already holds"),
        (2, 0, "cap backend.device_memory_gb=2 less 3.00 GiB that this process already holds"),
    ],
)
def test_limits_of_a_gpu(cap, wanted, reason):
    there = read_limits(CUDA, cap, None)
    assert (there.device_bytes, there.device_reason) == (wanted * GIB, reason)
    assert not there.device_is_host


@pytest.mark.usefixtures("detected", "gpu")
def test_a_cap_of_a_process_that_holds_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    there = read_limits(CUDA, 24, None)
    assert (there.device_bytes, there.device_reason) == (
        24 * GIB,
        "cap backend.device_memory_gb=24",
    )


def test_a_cap_is_a_share_of_the_device(gpu):
    cap_device(CUDA, 20)
    cap_device(CUDA, 80)
    cap_device(CUDA, None)
    cap_device(CUDA, 21, outside_bytes=GIB)
    assert gpu == [(0.25, CUDA), (1.0, CUDA), (1.0, CUDA), (0.25, CUDA)]


@pytest.mark.parametrize(
    ("cap", "text"),
    [
        (80.5, "backend.device_memory_gb=80.5 .* is more than the 80.00 GiB of cuda:0"),
        (1, "backend.device_memory_gb=1 .* leaves nothing for tensors: 1.00 GiB are kept"),
        (0, "backend.device_memory_gb=0 is not a number"),
    ],
)
def test_a_cap_that_cannot_be(gpu, cap, text):
    with pytest.raises(ConfigurationError, match=text) as caught:
        cap_device(CUDA, cap, outside_bytes=OUTSIDE_ALLOCATOR_BYTES)
    assert "\n" not in str(caught.value)
    assert gpu == []


def test_the_cpu_has_no_allocator_to_cap(gpu):
    cap_device(CPU, 1e6)
    assert gpu == []


def test_the_allowance_is_a_buffer_of_the_plan():
    assert context_allowance(CPU) == ()
    found = MemoryPlan(context_allowance(CUDA))
    assert found.bytes_by_part("device") == {"other": OUTSIDE_ALLOCATOR_BYTES}


def cuda(test):
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
    return pytest.mark.cuda(skip(test))


@cuda
def test_cuda_holds_to_the_cap():
    torch.cuda.empty_cache()
    held_gb = torch.cuda.memory_reserved() / GIB
    try:
        cap_device(CUDA, held_gb + 1)
        torch.empty(GIB // 2, dtype=torch.uint8, device=CUDA)
        torch.cuda.empty_cache()
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(5 * GIB // 4, dtype=torch.uint8, device=CUDA)
    finally:
        cap_device(CUDA, None)
    assert torch.empty(5 * GIB // 4, dtype=torch.uint8, device=CUDA).nbytes == 5 * GIB // 4


@cuda
def test_cuda_limits_are_what_can_be_allocated():
    torch.cuda.empty_cache()
    before = read_limits(CUDA, None, None).device_bytes
    assert 0 < before <= torch.cuda.get_device_properties(CUDA).total_memory
    tensor = torch.empty(GIB, dtype=torch.uint8, device=CUDA)
    taken = before - read_limits(CUDA, None, None).device_bytes
    assert taken >= tensor.nbytes
    del tensor  # now reserved by the allocator and unused, so it counts as free
    assert read_limits(CUDA, None, None).device_bytes >= before - taken + GIB
    with pytest.raises(ConfigurationError, match="is more than the"):
        cap_device(CUDA, 2**20)
