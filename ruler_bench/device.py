"""Names of devices, for manifests and reports."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def device_name(device: str) -> str:
    """Return a device's product name, such as "NVIDIA H200" or "AMD EPYC, 2 cores"."""
    if device.startswith("cuda"):
        import torch  # noqa: PLC0415 (seconds; only where a GPU is used)

        return str(torch.cuda.get_device_name(device))
    return f"{_cpu_name()}, {os.cpu_count()} cores"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
