"""What a run of one server says: the figures of its row."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruler_bench.leak.differences import difference
from ruler_bench.leak.join import FRESH, PERSISTENT, REFERENCE
from ruler_bench.manifest import RECORDS
from ruler_bench.records import Record, read_records

VERDICT, MANIFEST = "verdict.json", "manifest.json"
WARM = ("repeat",)
"""Arms whose second and third answer follow the same prompt: what a prefix cache is for."""


@dataclass(frozen=True)
class Figures:
    """Of one run.

    Attributes:
        asked_as: "ids" or "text", and what the server tells of an answer.
        right, samples: of the persistent arm.
        errors: failed requests of all arms.
        verdict: one word.
        sentence, notes: of the verdict.
        reasons: of each index that is not ok.
        arms: their names.
        engines: how many were started.
        reused: share of a repeated prompt that came from a cache; None where nobody tells.
        moved: the largest difference of margins, in logits, between the fresh engine and any other
            arm of this server's at the same token; None where there are no margins.
        turned: answers of which tokens, or text, differ from the fresh engine's.
        first_seconds, again_seconds: median time to the first token, of a prompt that is new and of
            one that was asked just before.
        seconds: the run's requests, all together.
    """

    asked_as: str
    right: int
    samples: int
    errors: int
    verdict: str
    sentence: str
    notes: tuple[str, ...]
    reasons: tuple[str, ...]
    arms: tuple[str, ...]
    engines: int
    reused: float | None
    moved: float | None
    turned: int
    first_seconds: float | None
    again_seconds: float | None
    seconds: float


def read(folder: Path) -> Figures:
    """Return the figures of a run's folder.

    Raises:
        FileNotFoundError: the run did not come to a verdict.
    """
    verdict = json.loads((folder / VERDICT).read_text(encoding="utf-8"))
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    records = read_records(folder / RECORDS)
    arms = sorted({one.arm for one in records})
    persistent = [one for one in records if one.arm == PERSISTENT]
    again = [one for one in records if one.arm in WARM and one.step % 3]
    lives = {(one.arm, one.life) for one in records if one.arm != REFERENCE}
    shares = [
        one.reused_tokens / one.prompt_tokens for one in again if one.reused_tokens is not None
    ]
    moved, turned = _against_fresh(records)
    return Figures(
        asked_as=_asked_as(manifest.get("backend_in_force") or {}),
        right=sum(one.correct is True for one in persistent),
        samples=len(persistent),
        errors=sum(one.error is not None for one in records),
        verdict=str(verdict["verdict"]),
        sentence=str(verdict["sentence"]),
        notes=tuple(str(one) for one in verdict["notes"]),
        reasons=tuple(
            f"index {one['ordinal']}: {one['verdict']}, {one['reason']}"
            for one in verdict["indices"]
            if one["verdict"] != "ok"
        ),
        arms=tuple(arms),
        engines=len(lives),
        reused=statistics.median(shares) if shares else None,
        moved=moved,
        turned=turned,
        first_seconds=_median(one.ttft_seconds for one in persistent),
        again_seconds=_median(one.ttft_seconds for one in again),
        seconds=sum(one.total_seconds or 0.0 for one in records if one.arm != REFERENCE),
    )


def _asked_as(in_force: dict[str, Any]) -> str:
    tells = [str(one) for one in in_force.get("asks_for", ())]
    return ", ".join([str(in_force.get("prompt", "ids")), *tells])


def _median(values: Iterable[float | None]) -> float | None:
    known = [one for one in values if one is not None]
    return statistics.median(known) if known else None


def _against_fresh(records: list[Record]) -> tuple[float | None, int]:
    """Return how far margins moved from the fresh engine's, and how many answers are others."""
    fresh = {one.ordinal: one for one in records if one.arm == FRESH and one.error is None}
    moved: float | None = None
    turned = 0
    for one in records:
        mine = fresh.get(one.ordinal)
        same_prompt = mine is not None and one.prompt_sha256 == mine.prompt_sha256
        if mine is None or not same_prompt or one.arm in (FRESH, REFERENCE) or not one.output:
            continue
        parts = difference(one, mine, bit_by_bit=False)
        turned += parts is not None
        until = None if parts is None else parts.position
        for a, b in zip((one.top2_margin or ())[:until], mine.top2_margin or (), strict=False):
            moved = max(moved or 0.0, abs(a - b))
    return moved, turned
