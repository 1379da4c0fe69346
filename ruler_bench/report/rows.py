"""Row: what a table says about one run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ruler_bench.records import Record
from ruler_bench.score import cell_score, is_null
from ruler_bench.statistics import score_interval


@dataclass
class Run:
    """The records of one arm of a run, and its manifest."""

    manifest: dict[str, Any]
    records: list[Record]


@dataclass(frozen=True, slots=True)
class Row:
    """One run in figures; the fields are the columns of summary.csv. None: nobody can tell.

    Attributes:
        task, length_tokens, backend, model, arm: which run.
        settings: other settings in which it differs from a run beside it, as one would type them.
        engines: how many engines answered these samples, 1 for an unbroken run.
        samples: finished samples; everything but `errors` is about these.
        correct: samples with full score.
        score: RULER's, 0 to 100, two decimals.
        score_low_95, score_high_95: bounds of its 95% interval.
        interval_method: "wilson" or "bootstrap".
        errors: samples that failed in the engine, not counted as wrong.
        nulls: empty outputs.
        truncated: outputs that the token limit ended.
        seconds_per_sample: mean time of a whole request, measured by the harness.
        ttft_seconds: mean time to first token.
        decode_tokens_per_second: tokens after the first, over the time they took.
        bytes_up_per_sample, bytes_down_per_sample: mean KV bytes copied to and from the device.
        peak_device_bytes: the largest of all samples.
        reused_tokens_per_sample: mean prompt tokens whose keys and values an earlier request had
            left.
        copy_hidden_share: mean share of the KV copies' time that compute hid, of traced samples.
        density: mean share of causal key blocks that sparse prefill computed.
        dense_share: mean share of its layers and chunks that went through dense attention.
        estimation_seconds, attention_seconds: mean time of its choice of blocks, and of its
            attention.
    """

    task: str
    length_tokens: int
    backend: str
    model: str
    arm: str | None
    settings: str
    engines: int
    samples: int
    correct: int
    score: float | None
    score_low_95: float | None
    score_high_95: float | None
    interval_method: str | None
    errors: int
    nulls: int
    truncated: int
    seconds_per_sample: float | None
    ttft_seconds: float | None
    decode_tokens_per_second: float | None
    bytes_up_per_sample: float | None
    bytes_down_per_sample: float | None
    peak_device_bytes: int | None
    reused_tokens_per_sample: float | None
    copy_hidden_share: float | None
    density: float | None
    dense_share: float | None
    estimation_seconds: float | None
    attention_seconds: float | None


def finished(run: Run) -> list[Record]:
    """Return the records of the samples that the engine answered."""
    return [record for record in run.records if record.error is None]


def build_rows(runs: Sequence[Run]) -> list[Row]:
    """Return the figures of each run, and in which settings they differ.

    Raises:
        UsageError: a manifest's metric is unknown.
    """
    settings = varied_settings([run.manifest for run in runs])
    return [build_row(run, one) for run, one in zip(runs, settings, strict=True)]


def varied_settings(manifests: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return for each manifest the settings in which it differs from the others, as one types them.

    A setting that not all have belongs to a backend, whose name stands in the row already.
    """
    flat = [dict(_settings(one.get("config", {}))) for one in manifests]
    everywhere = set.intersection(*(set(one) for one in flat)) if flat else set()
    varied = sorted(key for key in everywhere if len({one[key] for one in flat}) > 1)
    return [" ".join(f"{key}={one[key]}" for key in varied) for one in flat]


OWN_COLUMNS = ("task.", "length", "backend.name", "backend._target_", "model.name")
"""Settings that a row tells without naming them."""


def _settings(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, inner in value.items():
        key = f"{prefix}{name}"
        if isinstance(inner, dict):
            yield from _settings(inner, f"{key}.")
        elif not key.startswith(OWN_COLUMNS):
            yield key, inner if isinstance(inner, str) else json.dumps(inner)


def build_row(run: Run, settings: str = "") -> Row:
    """Return the figures of a run.

    Args:
        run: its manifest and records.
        settings: in which it differs from a run beside it.

    Raises:
        UsageError: the manifest's metric is unknown.
    """
    records = finished(run)
    outputs = [record.output or "" for record in records]
    interval = score_interval([record.score for record in records if record.score is not None])
    return Row(
        task=run.manifest["task"],
        length_tokens=run.manifest["length"],
        backend=run.manifest["backend"],
        model=run.manifest["model"],
        arm=run.records[0].arm if run.records else None,
        settings=settings,
        engines=len({record.life for record in run.records}),
        samples=len(records),
        correct=sum(bool(record.correct) for record in records),
        score=_score(run.manifest["metric"], outputs, records),
        score_low_95=interval.low if interval else None,
        score_high_95=interval.high if interval else None,
        interval_method=interval.method if interval else None,
        errors=len(run.records) - len(records),
        nulls=sum(is_null(output) for output in outputs),
        truncated=sum(record.finish_reason == "length" for record in records),
        seconds_per_sample=_mean(record.total_seconds for record in records),
        ttft_seconds=_mean(record.ttft_seconds for record in records),
        decode_tokens_per_second=_decode_rate(records),
        bytes_up_per_sample=_mean(record.bytes_up for record in records),
        bytes_down_per_sample=_mean(record.bytes_down for record in records),
        peak_device_bytes=_largest(record.peak_device_bytes for record in records),
        reused_tokens_per_sample=_mean(record.reused_tokens for record in records),
        copy_hidden_share=_mean(record.copy_hidden_share for record in records),
        density=_mean(record.density for record in records),
        dense_share=_mean(record.dense_share for record in records),
        estimation_seconds=_mean(record.estimation_seconds for record in records),
        attention_seconds=_mean(record.attention_seconds for record in records),
    )


def _score(metric: str, outputs: Sequence[str], records: Sequence[Record]) -> float | None:
    if not records:
        return None
    return cell_score(metric, outputs, [record.expected for record in records])


def _decode_rate(records: Sequence[Record]) -> float | None:
    # The first token belongs to prefill.
    timed = [
        (len(record.output_tokens) - 1, record.decode_seconds)
        for record in records
        if record.output_tokens and record.decode_seconds
    ]
    seconds = sum(one[1] for one in timed)
    return sum(one[0] for one in timed) / seconds if seconds else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)
