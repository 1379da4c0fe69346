"""Two recordings of one request, row by row, by absolute position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ruler_bench.divergence.recording import (
    NAMES,
    Floats,
    Integers,
    Key,
    Recording,
    place,
    read_rows,
)
from ruler_bench.errors import UsageError


@dataclass(frozen=True, slots=True)
class Joined:
    """All rows of a name and layer, chunks joined, by ascending position.

    Attributes:
        positions: each once.
        digests: one a position.
        owners: number of the record that holds it.
        kind: shape of a row, and dtype.
    """

    positions: Integers
    digests: NDArray[np.uint64]
    owners: Integers
    kind: tuple[tuple[int, ...], str]


def join(recording: Recording, only: Sequence[str]) -> dict[Key, Joined]:
    """Join the chunks of every name and layer.

    Raises:
        UsageError: a position was recorded twice, or rows of one name differ in shape or dtype.
    """
    numbers: dict[Key, list[int]] = {}
    for number, record in enumerate(recording.records):
        if record.name in only:
            numbers.setdefault((record.name, record.layer), []).append(number)
    return {key: _join_one(recording, key, owned) for key, owned in numbers.items()}


def _join_one(recording: Recording, key: Key, numbers: list[int]) -> Joined:
    records = [recording.records[number] for number in numbers]
    where = f"{recording.folder}: request {recording.request_id}, {place(key)}"
    kinds = {(record.shape[1:], record.dtype) for record in records}
    if len(kinds) > 1:
        raise UsageError(f"{where}: rows of more than one shape or dtype; record the run again.")
    positions = np.concatenate([_range(record.start, record.rows) for record in records])
    places = np.concatenate([_range(record.first_digest, record.rows) for record in records])
    owners = np.repeat(np.array(numbers), [record.rows for record in records])
    order = np.argsort(positions, kind="stable")
    positions = positions[order]
    doubled = positions[1:][np.diff(positions) == 0]
    if doubled.size:
        raise UsageError(f"{where}: position {doubled[0]} was recorded twice.")
    return Joined(positions, recording.digests[places[order]], owners[order], kinds.pop())


def _range(start: int, count: int) -> Integers:
    return np.arange(start, start + count, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Compared:
    """The rows of a name and layer that both runs recorded.

    Attributes:
        rows: how many there are.
        left_out: how many only one of the runs recorded.
        passed_over: how many differ by no more than the tolerance.
        positions: of the rows that differ, ascending.
        owners_a, owners_b: the record of each of these.
        absolute, relative: the difference of each, where both runs kept their tensors.
    """

    rows: int
    left_out: int
    passed_over: int
    positions: Integers
    owners_a: Integers
    owners_b: Integers
    absolute: Floats | None
    relative: Floats | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two recordings of one request, and what was compared of them."""

    a: Recording
    b: Recording
    compared: dict[Key, Compared]

    @property
    def rows(self) -> int:
        """How many rows were compared."""
        return sum(one.rows for one in self.compared.values())

    @property
    def differs(self) -> bool:
        """Whether any row does."""
        return any(one.positions.size for one in self.compared.values())

    def first(self) -> tuple[Key, Compared]:
        """Return what differs first in the order in which A computed; its row is the first."""

        def order(item: tuple[Key, Compared]) -> tuple[int, float, int]:
            (name, layer), compared = item
            chunk = self.a.records[int(compared.owners_a[0])].chunk
            return chunk, _layer_order(name, layer), NAMES.index(name)

        return min((item for item in self.compared.items() if item[1].positions.size), key=order)


def _layer_order(name: str, layer: int) -> float:
    return {"rotation": -1.0, "logits": math.inf}.get(name, layer)


def compare(
    a: Recording, b: Recording, only: Sequence[str] = NAMES, tolerance: float = 0.0
) -> Comparison:
    """Compare two recordings of one request by absolute position.

    Args:
        a: one recording, whose order of computation counts.
        b: the other.
        only: names to compare.
        tolerance: relative differences up to this are passed over; above 0 it needs tensors.

    Raises:
        UsageError: they are not of one model, tensors are missing, or a file is damaged.
    """
    joined_a, joined_b = join(a, only), join(b, only)
    compared = {}
    for key in sorted(joined_a.keys() | joined_b.keys(), key=lambda one: _layer_order(*one)):
        one, other = joined_a.get(key), joined_b.get(key)
        if one is None or other is None:
            present = one or other
            left_out = 0 if present is None else present.positions.size
            compared[key] = _nothing(left_out)
            continue
        if one.kind[0] != other.kind[0]:
            raise UsageError(
                f"request {a.request_id}, {place(key)}: a row is {list(one.kind[0])} in A and "
                f"{list(other.kind[0])} in B; these are not of one model."
            )
        compared[key] = _compare_rows(a, b, one, other, tolerance)
    return Comparison(a, b, compared)


def _nothing(left_out: int) -> Compared:
    none = np.zeros(0, np.int64)
    return Compared(0, left_out, 0, none, none, none, None, None)


def _compare_rows(
    a: Recording, b: Recording, one: Joined, other: Joined, tolerance: float
) -> Compared:
    positions, in_a, in_b = np.intersect1d(
        one.positions, other.positions, assume_unique=True, return_indices=True
    )
    differ = one.digests[in_a] != other.digests[in_b]
    if one.kind[1] != other.kind[1]:  # other dtypes never hold the same bits
        differ[:] = True
    rows = positions.size
    positions = positions[differ]
    owners_a, owners_b = one.owners[in_a][differ], other.owners[in_b][differ]
    absolute, relative = _measure(a, b, positions, owners_a, owners_b)
    above = np.ones(positions.size, dtype=bool)
    if tolerance and positions.size:
        if absolute is None or relative is None:
            raise UsageError(f"--tolerance={tolerance:g}: {_lacking_tensors(a, b)}")
        above = relative > tolerance
    return Compared(
        rows=rows,
        left_out=one.positions.size + other.positions.size - 2 * rows,
        passed_over=int((~above).sum()),
        positions=positions[above],
        owners_a=owners_a[above],
        owners_b=owners_b[above],
        absolute=None if absolute is None else absolute[above],
        relative=None if relative is None else relative[above],
    )


def _lacking_tensors(a: Recording, b: Recording) -> str:
    lacking = [one.folder for one in (a, b) if any(record.tensor is None for record in one.records)]
    return (
        f"no tensors in {' and '.join(str(folder) for folder in lacking)}; record with "
        "backend.checkpoint_tensors=true."
    )


def _measure(
    a: Recording, b: Recording, positions: Integers, owners_a: Integers, owners_b: Integers
) -> tuple[Floats, Floats] | tuple[None, None]:
    """Return the largest absolute and relative difference of every row, or None and None."""
    absolute, relative = np.zeros(positions.size), np.zeros(positions.size)
    # Rows that lie together in both runs are read together.
    cuts = np.flatnonzero(np.diff(owners_a) | np.diff(owners_b)) + 1
    for part in np.split(np.arange(positions.size), cuts):
        if not part.size:
            continue
        both = []
        for recording, owners in ((a, owners_a), (b, owners_b)):
            record = recording.records[int(owners[part[0]])]
            if record.tensor is None:
                return None, None
            rows = read_rows(recording.folder / record.tensor)
            if rows.shape[0] != record.rows:
                raise UsageError(
                    f"{recording.folder / record.tensor}: holds {rows.shape[0]} rows, and its "
                    f"index says {record.rows}; record the run again."
                )
            both.append(rows[positions[part] - record.start])
        absolute[part], relative[part] = row_differences(*both)
    return absolute, relative


def row_differences(one: Floats, other: Floats) -> tuple[Floats, Floats]:
    """Return the largest absolute and relative difference of every row of [rows, width].

    Relative is the absolute one over the largest finite magnitude in the row of either. Equal
    infinities and two NaN do not differ; any other NaN or infinity differs infinitely.
    """
    with np.errstate(invalid="ignore"):
        gaps = np.abs(one - other)
    gaps[(one == other) | (np.isnan(one) & np.isnan(other))] = 0
    gaps[np.isnan(gaps)] = np.inf
    absolute = gaps.max(axis=1, initial=0)
    scale = np.zeros_like(absolute)
    for rows in (one, other):
        finite = np.where(np.isfinite(rows), np.abs(rows), 0)
        scale = np.maximum(scale, finite.max(axis=1, initial=0))
    relative = np.divide(absolute, scale, out=np.full_like(absolute, np.inf), where=scale > 0)
    relative[absolute == 0] = 0
    return absolute, relative
