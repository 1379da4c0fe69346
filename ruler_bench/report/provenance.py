"""Which settings, versions and data stand behind figures: manifests as lines of key and value."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ruler_bench.report.text import visible

KEYS_LEFT_OUT = frozenset({"format_version", "lives"})


def shared_and_own(
    manifests: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Return what all manifests have in common, then what is each one's own, as flat text."""
    flat = [dict(_flatten(one)) for one in manifests]
    shared = {
        key: value
        for key, value in (flat[0].items() if flat else ())
        if all(other.get(key) == value for other in flat)
    }
    own = [{key: one[key] for key in one if key not in shared} for one in flat]
    return shared, own


def _flatten(manifest: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in manifest.items():
        if key == "command" and isinstance(value, list):
            yield key, visible(shlex.join(value))
        elif key not in KEYS_LEFT_OUT:
            yield from _leaves(key, value)


def _leaves(key: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    elif isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        yield visible(key), f"({len(value)} entries, see manifest.json)"
    else:
        yield visible(key), visible(value) if isinstance(value, str) else json.dumps(value)
