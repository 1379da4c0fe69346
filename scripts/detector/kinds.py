"""Kinds of the wrong outputs in a run, as the taxonomy names them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ruler_bench.leak.arms import ENGINE_PER_SAMPLE, REFERENCES
from ruler_bench.leak.taxonomy import classify
from ruler_bench.records import Record
from ruler_bench.streams import AGING_ORDINALS
from scripts.detector.runner import Finished

_VALUE = re.compile(r"One of the special magic \w+ for [^:\n]+? is: ([^.\n]+)\.")
LONGEST_SHOWN = 1000


def wrong_outputs(finished: Finished) -> list[dict[str, Any]]:
    """Return every wrong output of the tested engine, each once an index, with its kind.

    The answers of other samples are those that the same engine had served before.
    """
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for record in finished.records:
        is_wrong = record.correct is False and record.output is not None
        if not is_wrong or record.arm in REFERENCES or record.ordinal >= AGING_ORDINALS:
            continue
        key = (record.ordinal, record.output or "")
        if key not in found:
            found[key] = _labelled(record, finished)
    return list(found.values())


def _labelled(record: Record, finished: Finished) -> dict[str, Any]:
    prompt = finished.prompts.get(record.prompt_sha256)
    label = classify(
        record.output or "",
        record.expected,
        other_answers=_served_before(record, finished),
        context_values=None if prompt is None else _VALUE.findall(prompt),
    )
    return {
        "arm": record.arm,
        "ordinal": record.ordinal,
        "expected": list(record.expected),
        "output": (record.output or "")[:LONGEST_SHOWN],
        "kind": label.name,
        "reason": label.reason,
    }


def _served_before(record: Record, finished: Finished) -> dict[int, Sequence[str]]:
    if finished.facts[record.arm].arm.lifetime == ENGINE_PER_SAMPLE:
        return {}
    return {
        one.ordinal: one.expected
        for one in finished.records
        if (one.arm, one.life) == (record.arm, record.life)
        and one.position < record.position
        and one.ordinal != record.ordinal
    }
