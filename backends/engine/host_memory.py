"""How much CPU memory there is to take, and whether the machine may get more.

Everything is read below a root folder, so that a test can describe a machine by a few files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_BALLOONS = (
    "sys/bus/virtio/drivers/virtio_mem",
    "sys/bus/virtio/drivers/virtio_balloon",
    "sys/bus/vmbus/drivers/hv_balloon",
)


@dataclass(frozen=True, slots=True)
class HostMemory:
    """CPU memory as it is found now.

    Attributes:
        total_bytes: of the machine, or of the control group where that is less.
        available_bytes: what can be taken without swapping.
        source: where the figure was read, in words for a message.
        may_grow: the machine may be given more memory when it asks for it.
    """

    total_bytes: int
    available_bytes: int
    source: str
    may_grow: bool


def detect_host_memory(
    root: Path = _ROOT, sysconf: Callable[[str], int] = os.sysconf
) -> HostMemory:
    """Read how much CPU memory this process may take.

    On Linux that is MemAvailable of /proc/meminfo, or what a control group (version 1 or 2, its
    own or one above it) leaves where that is less. File pages do not count as used there: the
    kernel gives them back. Elsewhere `os.sysconf` is asked.

    Args:
        root: the folder that holds proc and sys.
        sysconf: asked where there is no proc/meminfo.
    """
    meminfo = _key_values(root / "proc/meminfo", unit_bytes=1024)
    if "MemTotal" not in meminfo:
        return _from_sysconf(sysconf)
    total = meminfo["MemTotal"]
    available = meminfo.get("MemAvailable", meminfo.get("MemFree", 0))
    machine = HostMemory(total, available, "MemAvailable in /proc/meminfo", may_grow=False)
    # A limit above MemTotal, such as version 1's "none", limits nothing.
    groups = [group for group in _control_groups(root) if group.total_bytes < total]
    if groups:
        return min(machine, *groups, key=lambda memory: memory.available_bytes)
    return HostMemory(total, available, machine.source, may_grow=_may_grow(root))


def _from_sysconf(sysconf: Callable[[str], int]) -> HostMemory:
    page_bytes = sysconf("SC_PAGE_SIZE")
    total = sysconf("SC_PHYS_PAGES") * page_bytes
    try:
        available = sysconf("SC_AVPHYS_PAGES") * page_bytes
    except (ValueError, OSError):  # macOS has no such name
        available = total
    return HostMemory(total, available, "os.sysconf", may_grow=False)


def _control_groups(root: Path) -> Iterator[HostMemory]:
    """Yield the limit of each control group that holds this process and has one."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _limits(root, "sys/fs/cgroup", path, ("memory.max", "memory.current"))
            # Beside version 1's folders, version 2 is mounted here.
            yield from _limits(
                root, "sys/fs/cgroup/unified", path, ("memory.max", "memory.current")
            )
        elif "memory" in controllers.split(","):
            yield from _limits(
                root,
                "sys/fs/cgroup/memory",
                path,
                ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            )


def _limits(root: Path, mount: str, path: str, files: tuple[str, str]) -> Iterator[HostMemory]:
    """Yield the limits from the group at `path` up to the mount, which a container sees as its own.

    A path that the container cannot see is passed over; the mount itself is always asked.
    """
    limit_file, usage_file = files
    own = Path(path.lstrip("/"))
    for group in (own, *own.parents):
        folder = root / mount / group
        limit, usage = _number(folder / limit_file), _number(folder / usage_file)
        if limit is None or usage is None:
            continue
        source = f"{limit_file} of the control group /{mount}/{group}".removesuffix("/.")
        yield HostMemory(limit, max(0, limit - usage + _file_bytes(folder)), source, may_grow=False)


def _file_bytes(group: Path) -> int:
    """Return the bytes of file pages that a control group is charged for."""
    stat = _key_values(group / "memory.stat")
    # Version 1 sums up the groups below under other names.
    return sum(
        stat.get(f"total_{kind}", stat.get(kind, 0)) for kind in ("inactive_file", "active_file")
    )


def _may_grow(root: Path) -> bool:
    """Say whether there are signs that memory is plugged in on demand. In doubt, yes.

    Signs are a balloon or memory device with its driver, memory blocks that are offline, and a
    virtual machine that puts new blocks online by itself. (Bare metal may be set up for that, too,
    but nothing plugs memory in there.)
    """
    return (
        any(_has_device(root / driver) for driver in _BALLOONS)
        or any(
            _read(state).strip() == "offline"
            for state in (root / "sys/devices/system/memory").glob("memory*/state")
        )
        or (
            _read(root / "sys/devices/system/memory/auto_online_blocks").startswith("online")
            and "hypervisor" in _read(root / "proc/cpuinfo").split()
        )
    )


def _has_device(driver: Path) -> bool:
    """Say whether a driver is bound to a device; each is a link to a folder in its own."""
    try:
        return any(entry.is_dir() and entry.name != "module" for entry in driver.iterdir())
    except OSError:
        return False


def _key_values(path: Path, unit_bytes: int = 1) -> dict[str, int]:
    """Read lines such as "MemTotal:  24 kB" or "active_file 24"; others are passed over."""
    values = {}
    for line in _read(path).splitlines():
        words = line.split()
        if len(words) >= 2 and words[1].isdecimal():
            values[words[0].removesuffix(":")] = int(words[1]) * unit_bytes
    return values


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None


def _read(path: Path) -> str:
    """Return a file's text, or "" where it cannot be read."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
