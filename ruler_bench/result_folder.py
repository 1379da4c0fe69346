"""Where results go: a folder named after all that changes them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from ruler_bench.errors import UsageError
from ruler_bench.sharing import is_secret_key
from ruler_bench.suites import Suite
from ruler_bench.tasks import TaskSpec
from ruler_bench.values import plain

GROUPS_IN_FOLDER_NAME = ("task", "suite", "backend", "model", "length")
KEYS_WITHOUT_RESULTS = frozenset(
    {
        "num_samples",
        "indices",
        "threads",
        "device",
        "workers",
        "overwrite",
        "out",
        "dry_run",
        "arms",
        "fresh.on",
        "fresh.audit",
        "fresh.start",
        "stop_on",
        "max_unstable",
        "minimise",
        "timeout_seconds",
        "note",
        "progress",
    }
)
"""Keys that may differ where a folder goes on: more samples, more arms, how they are run."""
ENGINE_TARGETS = "backends.engine."
ENGINE_KEYS_WITHOUT_RESULTS = frozenset(
    {"compile_seconds", "device_memory_gb", "host_memory_gb", "memory_plan"}
)
"""Of our engine: what decides whether it can run and how soon, neither its answers nor their times.

checkpoint, timeline and synchronise change no answer either, but what is recorded beside it and how
long it takes: such a run has a folder of its own.
"""
MAX_FOLDER_NAME = 200


def backend_keys_without_results(settings: dict[str, Any]) -> frozenset[str]:
    """Return the keys of a backend's settings that may differ where a folder goes on."""
    ours = str(settings.get("_target_")).startswith(ENGINE_TARGETS)
    return ENGINE_KEYS_WITHOUT_RESULTS if ours else frozenset()


def result_folder(
    config: DictConfig,
    choices: dict[str, str],
    overrides: list[str],
    lengths: Sequence[int],
    swept: Sequence[str] | None,
) -> Path:
    """Name the folder after everything that changes results, so that no two runs share one."""
    if config.out is not None and not config.out.strip():
        raise UsageError("out: is empty; name a folder, or leave it out.")
    if config.out is not None and swept is None:
        return Path(config.out)
    swept = swept or ()
    joined = "-".join(str(length) for length in lengths)
    what = choices["task" if config.get("suite") is None else "suite"]
    parts = [what, choices["backend"], choices["model"], joined]
    quiet = KEYS_WITHOUT_RESULTS | {
        f"backend.{key}" for key in backend_keys_without_results(_backend(config))
    }
    quiet -= set(swept)
    for override in sorted(overrides):
        key, _, value = override.lstrip("+~").partition("=")
        if not (key in GROUPS_IN_FOLDER_NAME or key in quiet or is_secret_key(key)):
            parts.append(_folder_part(key, value))
    return Path(config.out or "results") / _short("_".join(parts))


def cell_folder(
    folder: Path, length: int, lengths: Sequence[int], spec: TaskSpec, suite: Suite | None
) -> Path:
    """Return the folder of one run within that of the command."""
    if len(lengths) > 1:
        folder = folder / str(length)
    return folder if suite is None else folder / spec.name


def _backend(config: DictConfig) -> dict[str, Any]:
    return dict(plain(config.get("backend")) or {})


def _folder_part(key: str, value: str) -> str:
    """Return `key-value` in characters that suit a folder; a hash keeps changed values apart.

    Of a path only the last part is shown. `_` separates the parts of a name, so a value that has
    one is a changed value too.
    """
    safe_key = re.sub(r"[^A-Za-z0-9._]+", "~", key)
    safe_value = re.sub(r"[^A-Za-z0-9.,+-]+", "~", value.rstrip("/").rpartition("/")[2])
    if (safe_key, safe_value) == (key, value):
        return f"{key}-{value}"
    return f"{safe_key}-{safe_value}~{_digest(f'{key}={value}')}"


def _short(name: str) -> str:
    if len(name.encode()) <= MAX_FOLDER_NAME:
        return name
    return f"{name[:160]}~{_digest(name)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
