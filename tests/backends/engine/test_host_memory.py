"""Machines described by a few files."""

import os

import pytest

from backends.engine.host_memory import HostMemory, detect_host_memory

GIB = 2**30
NONE_V1 = 9223372036854771712  # what version 1 says for no limit


@pytest.fixture
def machine(tmp_path):
    """Write files below a root, which has 31 GiB and 24 GiB to take unless said otherwise."""

    def make(files=None, meminfo=None):
        default = f"MemTotal: {31 * 2**20} kB\nMemFree: 1000 kB\nMemAvailable: {24 * 2**20} kB\n"
        text = default if meminfo is None else meminfo
        for name, content in {"proc/meminfo": text, **(files or {})}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(content))
        return tmp_path

    return make


def bind(root, driver, device="virtio0"):
    """Bind a device to a driver, as sysfs shows it."""
    folder = root / driver
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bind").write_text("")
    (root / "sys/devices" / device).mkdir(parents=True, exist_ok=True)
    (folder / device).symlink_to(root / "sys/devices" / device)
    (folder / "module").symlink_to(root / "sys/devices")


def test_a_plain_machine(machine):
    assert detect_host_memory(machine()) == HostMemory(
        31 * GIB, 24 * GIB, "MemAvailable in /proc/meminfo", may_grow=False
    )


def test_an_old_kernel_names_only_free_memory(machine):
    root = machine(meminfo="MemTotal: 2048 kB\nMemFree: 1024 kB\nHugePages: x\n")
    assert detect_host_memory(root).available_bytes == 2**20


@pytest.mark.parametrize("group", ["/", "/job.slice/run.scope"])
def test_version_2_limit(machine, group):
    folder = f"sys/fs/cgroup{group}".rstrip("/")
    found = detect_host_memory(
        machine(
            {
                "proc/self/cgroup": f"0::{group}\n",
                f"{folder}/memory.max": 10 * GIB,
                f"{folder}/memory.current": 7 * GIB,
                f"{folder}/memory.stat": (
                    f"anon {4 * GIB}\ninactive_file {2 * GIB}\nactive_file {GIB}\n"
                ),
            }
        )
    )
    # File pages can be had back.
    assert (found.total_bytes, found.available_bytes) == (10 * GIB, 6 * GIB)
    assert found.source == f"memory.max of the control group /{folder}"


def test_the_tightest_of_a_group_and_those_above_it(machine):
    found = detect_host_memory(
        machine(
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "max",
                "sys/fs/cgroup/a/b/memory.current": 1,
                "sys/fs/cgroup/a/memory.max": 12 * GIB,
                "sys/fs/cgroup/a/memory.current": 4 * GIB,
                "sys/fs/cgroup/memory.max": 20 * GIB,
                "sys/fs/cgroup/memory.current": 5 * GIB,
            }
        )
    )
    assert (found.total_bytes, found.available_bytes) == (12 * GIB, 8 * GIB)


def test_version_1_limit_seen_from_within_a_container(machine):
    found = detect_host_memory(
        machine(
            {
                "proc/self/cgroup": "7:cpu,cpuacct:/x\n4:hugetlb,memory:/docker/1f\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": 8 * GIB,
                "sys/fs/cgroup/memory/memory.usage_in_bytes": 5 * GIB,
                "sys/fs/cgroup/memory/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}\n",
            }
        )
    )
    assert (found.total_bytes, found.available_bytes) == (8 * GIB, 4 * GIB)
    assert found.source.startswith("memory.limit_in_bytes of the control group")


def test_version_1_without_a_limit(machine):
    files = {
        "proc/self/cgroup": "4:memory:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": NONE_V1,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": 5 * GIB,
    }
    found = detect_host_memory(machine(files))
    assert (found.total_bytes, found.available_bytes) == (31 * GIB, 24 * GIB)


def test_usage_above_the_limit_leaves_nothing(machine):
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": GIB,
        "sys/fs/cgroup/memory.current": GIB + 4096,
    }
    assert detect_host_memory(machine(files)).available_bytes == 0


def test_a_machine_that_is_short_itself(machine):
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": 30 * GIB,
        "sys/fs/cgroup/memory.current": GIB,
    }
    root = machine(files)
    bind(root, "sys/bus/virtio/drivers/virtio_balloon")
    found = detect_host_memory(root)
    assert found.available_bytes == 24 * GIB
    assert not found.may_grow  # the limit stays


@pytest.mark.parametrize(
    "driver",
    [
        "sys/bus/virtio/drivers/virtio_mem",
        "sys/bus/virtio/drivers/virtio_balloon",
        "sys/bus/vmbus/drivers/hv_balloon",
    ],
)
def test_a_balloon_with_a_device_may_grow(machine, driver):
    root = machine({f"{driver}/bind": "", f"{driver}/uevent": ""})
    assert not detect_host_memory(root).may_grow  # a driver alone is in many kernels
    bind(root, driver)
    assert detect_host_memory(root).may_grow


def test_blocks_that_are_offline_may_come(machine):
    blocks = "sys/devices/system/memory"
    assert not detect_host_memory(machine({f"{blocks}/memory0/state": "online\n"})).may_grow
    assert detect_host_memory(machine({f"{blocks}/memory9/state": "offline\n"})).may_grow


@pytest.mark.parametrize("policy", ["online", "online_movable", "offline"])
@pytest.mark.parametrize("flags", ["flags : fpu hypervisor vme", "flags : fpu vme"])
def test_only_a_virtual_machine_is_given_blocks(machine, policy, flags):
    files = {
        "sys/devices/system/memory/auto_online_blocks": policy + "\n",
        "proc/cpuinfo": flags + "\n",
    }
    wanted = policy != "offline" and "hypervisor" in flags
    assert detect_host_memory(machine(files)).may_grow == wanted


def test_a_limit_above_the_memory_there_is_lets_it_grow(machine):
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": 128 * GIB,
        "sys/fs/cgroup/memory.current": GIB,
    }
    root = machine(files)
    bind(root, "sys/bus/virtio/drivers/virtio_mem")
    found = detect_host_memory(root)
    assert found.may_grow
    assert found.total_bytes == 31 * GIB


@pytest.mark.parametrize("knows_free", [True, False])
def test_without_proc(tmp_path, knows_free):
    def sysconf(name):
        values = {"SC_PAGE_SIZE": 16384, "SC_PHYS_PAGES": 100, "SC_AVPHYS_PAGES": 40}
        if name == "SC_AVPHYS_PAGES" and not knows_free:
            raise ValueError("unrecognized configuration name")
        return values[name]

    found = detect_host_memory(tmp_path, sysconf)
    available = (40 if knows_free else 100) * 16384
    assert found == HostMemory(100 * 16384, available, "os.sysconf", may_grow=False)


def test_this_machine():
    found = detect_host_memory()
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < found.available_bytes <= found.total_bytes
    assert found.total_bytes <= physical * 1.01
