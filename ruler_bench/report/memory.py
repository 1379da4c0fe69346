"""What an engine planned to take of memory, and which share of its limits that is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ruler_bench.report.text import human_bytes

PLANNED = {"device": "planned on the device", "host": "planned in CPU memory"}
GIB = 2**30


def planned_memory(manifest: Mapping[str, Any], arm: str) -> dict[str, str]:
    """Return by title what the engine of an arm planned to take, where it told.

    Args:
        manifest: of the run, `arms.<arm>.settings` with the engine's `memory_plan` and the limits
            `device_memory_gb` and `host_memory_gb` (GiB, or None for none).
        arm: its name.
    """
    settings = _at(_at(_at(manifest, "arms"), arm), "settings")
    plan = _at(settings, "memory_plan")
    found = {}
    for place, title in PLANNED.items():
        count, limit = plan.get(f"{place}_bytes"), settings.get(f"{place}_memory_gb")
        if not isinstance(count, int):
            continue
        found[title] = human_bytes(count)
        if isinstance(limit, int | float) and limit > 0:
            found[title] += f", {count / (limit * GIB):.0%} of {human_bytes(limit * GIB)}"
    return found


def _at(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    inner = values.get(key)
    return inner if isinstance(inner, Mapping) else {}
