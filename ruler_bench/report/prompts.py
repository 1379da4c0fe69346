"""The prompts of a run, as far as its folder has them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from pathlib import Path

from ruler_bench.report.predictions import FOLDER


def prompts_of(folder: Path, wanted: Collection[str]) -> dict[str, str]:
    """Return prompts by hash, as far as the run's predictions hold them."""
    found: dict[str, str] = {}
    for path in sorted((folder / FOLDER).glob("*.jsonl")):
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    text = json.loads(line).get("input")
                except (ValueError, AttributeError):
                    continue
                if isinstance(text, str) and (key := _hash(text)) in wanted:
                    found[key] = text
                    if len(found) == len(wanted):
                        return found
    return found


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()
