"""What is printed of a comparison."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from tabulate import tabulate

from ruler_bench.divergence.comparison import Comparison
from ruler_bench.divergence.recording import (
    NAMES,
    WITHOUT_LAYER,
    CheckpointFolder,
    Recording,
    place,
)

NO_SETTINGS = {
    "checkpoint",
    "compile_seconds",
    "memory_plan",
    "weight_bytes",
    "device_buffer_bytes",
    "host_buffer_bytes",
}
"""What an engine tells beside its settings."""


def first_line(comparison: Comparison) -> str:
    """Return the sentence that names the first row that differs."""
    key, found = comparison.first()
    in_a, in_b = (
        _chunk(recording, recording.records[int(owners[0])].chunk)
        for recording, owners in (
            (comparison.a, found.owners_a),
            (comparison.b, found.owners_b),
        )
    )
    chunk = in_a if in_a == in_b else f"{in_a} in A and {in_b} in B"
    return (
        f"First difference: request {comparison.a.request_id}, {chunk}, {place(key)}, "
        f"position {found.positions[0]}."
    )


def _chunk(recording: Recording, chunk: int) -> str:
    records = [one for one in recording.records if one.chunk == chunk]
    first = min(one.start for one in records)
    last = max(one.start + one.rows for one in records) - 1
    extent = f"position {first}" if first == last else f"positions {first} to {last}"
    return f"chunk {chunk} ({extent})"


def amount_line(comparison: Comparison) -> str:
    """Return the sentence that says by how much that row differs."""
    key, found = comparison.first()
    dtypes = {
        recording.records[int(owners[0])].dtype
        for recording, owners in ((comparison.a, found.owners_a), (comparison.b, found.owners_b))
    }
    kinds = f" A and B are of different dtypes: {' and '.join(sorted(dtypes))}."
    note = kinds if len(dtypes) > 1 else ""
    if found.absolute is None or found.relative is None:
        return (
            "By how much: bits differ; store tensors with backend.checkpoint_tensors=true to see "
            f"by how much.{note}"
        )
    if found.absolute[0] == 0:
        return f"By how much: the values are equal, their bits are not.{note}"
    return (
        f"By how much there: {found.absolute[0]:.3g} absolute, {found.relative[0]:.3g} relative; "
        f"at most, in {place(key)}: {found.absolute.max():.3g} absolute, "
        f"{found.relative.max():.3g} relative.{note}"
    )


@dataclass(slots=True)
class _TableRow:
    """One layer of the table."""

    compared: int = 0
    differ: int = 0
    by_name: dict[str, int] = field(default_factory=dict)
    relative: float | None = None


def table(comparison: Comparison) -> str:
    """Return how many rows differ, by layer and name."""
    rows: dict[str, _TableRow] = {}
    for (name, layer), found in comparison.compared.items():
        if not found.rows:
            continue
        row = rows.setdefault(name if name in WITHOUT_LAYER else str(layer), _TableRow())
        row.compared += found.rows
        row.differ += found.positions.size
        row.by_name[name] = found.positions.size
        if found.relative is not None and found.relative.size:
            row.relative = max(row.relative or 0.0, float(found.relative.max()))
    present = {name for row in rows.values() for name in row.by_name}
    names = [name for name in NAMES if name in present and name not in WITHOUT_LAYER]
    measured = any(row.relative is not None for row in rows.values())
    header = ["layer", "compared", "differ", *names, *(["max relative"] if measured else [])]
    body = [
        [label, str(row.compared), str(row.differ)]
        + [str(row.by_name.get(name, "-")) for name in names]
        + ([_figure(row.relative)] if measured else [])
        for label, row in rows.items()
    ]
    align = ["left", *["right"] * (len(header) - 1)]
    return tabulate(body, header, tablefmt="plain", disable_numparse=True, colalign=align)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2e}"


def settings_line(a: CheckpointFolder, b: CheckpointFolder) -> str | None:
    """Return which settings of the two runs differ, or None.

    The folders themselves and what follows from other settings are left out.
    """
    parts = []
    for key in sorted((a.settings.keys() | b.settings.keys()) - NO_SETTINGS):
        one, other = a.settings.get(key), b.settings.get(key)
        if one != other:
            parts.append(f"{key}={json.dumps(one)} in A, {json.dumps(other)} in B")
    return f"Settings that differ: {'; '.join(parts)}." if parts else None


def listed(numbers: Sequence[int]) -> str:
    """Return ascending numbers as one would say them: "0 to 3, 7"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(low) if low == high else f"{low} to {high}" for low, high in spans)
