"""`python -m ruler_bench.divergence A B`: where two recorded runs of our engine part.

    python -m ruler_bench backend.checkpoint=a
    python -m ruler_bench backend.checkpoint=b backend.offload=never
    python -m ruler_bench.divergence a b

A and B are folders that `backend.checkpoint=DIR` wrote. Rows are compared bit by bit, position by
position, and the first that differs is named in the order in which A computed: request, chunk,
layer, then rotation, query, key, value, attention, hidden, logits. Runs cut into other chunks can
be compared too, but only rotation must be equal there: --only rotation checks that the rotary
embedding depends on positions alone, whatever the prompts. Differences are measured where both
runs kept their tensors (backend.checkpoint_tensors=true); "relative" is the largest difference
within a row over the largest magnitude within it.

Exit status: 0 nothing differs, 1 something does, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from tabulate import tabulate

from ruler_bench.errors import UsageError, nearest, one_line, unknown_name

SAME, DIFFERENT, USAGE_ERROR, INTERRUPTED = 0, 1, 2, 130

# The format is backends.engine.checkpoint's, which says what each file and name means.
FORMAT, FORMAT_VERSION = "ruler_bench checkpoint", 1
MANIFEST = "checkpoint.json"
TENSOR_NAME = "rows"
NAMES = ("rotation", "query", "key", "value", "attention", "hidden", "logits")
WITHOUT_LAYER = ("rotation", "logits")
NO_SETTINGS = {
    "checkpoint",
    "compile_seconds",
    "memory_plan",
    "weight_bytes",
    "device_buffer_bytes",
    "host_buffer_bytes",
}
"""What an engine tells beside its settings."""
DIGEST = np.dtype("<u8")
_INDEX = re.compile(r"request_([0-9]{6,})\.jsonl")
_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}

Key = tuple[str, int]
"""What a row is: a name of NAMES and a layer."""
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


# --- one folder ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Record:
    """Rows of one name, layer and chunk.

    Attributes:
        start: position of the first row.
        shape: of all rows together, [rows, ...].
        first_digest: number of the first row's digest in the digest file.
        tensor: file of the rows within the folder, or None where they were not kept.
    """

    name: str
    layer: int
    chunk: int
    start: int
    shape: tuple[int, ...]
    dtype: str
    first_digest: int
    tensor: str | None

    @property
    def rows(self) -> int:
        """How many positions it holds."""
        return self.shape[0]


@dataclass(frozen=True, slots=True)
class Recording:
    """What one run recorded of one request.

    Attributes:
        digests: one a row, in the order of the records.
        finished: whether its end was reached; false after a crash.
    """

    folder: Path
    request_id: int
    prompt_token_ids: list[int]
    records: list[Record]
    digests: NDArray[np.uint64]
    finished: bool


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """What one run left: its settings, and which requests it recorded."""

    path: Path
    settings: dict[str, Any]
    request_ids: list[int]


def open_folder(path: Path) -> CheckpointFolder:
    """Read what a checkpoint folder is.

    Raises:
        UsageError: there is no such folder, or no run recorded it.
    """
    if not path.is_dir():
        raise _no_folder(path)
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        names = sorted(one.name for one in path.iterdir())
    except FileNotFoundError as error:
        raise UsageError(
            f"{path}: is no checkpoint folder, it has no {MANIFEST}; name one that "
            "backend.checkpoint=DIR wrote."
        ) from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{path / MANIFEST}: cannot be read ({one_line(error)}).") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UsageError(f"{path}: is no checkpoint folder, its {MANIFEST} is something else's.")
    if manifest.get("format_version") != FORMAT_VERSION:
        raise UsageError(
            f"{path}: its format version is {manifest.get('format_version')}, and only "
            f"{FORMAT_VERSION} is known; record it again."
        )
    # An index without a whole first line is of a process that died before it recorded anything.
    matches = (_INDEX.fullmatch(name) for name in names if _has_line(path / name))
    return CheckpointFolder(
        path=path,
        settings=dict(manifest.get("settings") or {}),
        request_ids=sorted(int(match[1]) for match in matches if match),
    )


def _has_line(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.readline().endswith(b"\n")
    except OSError:
        return True  # whoever reads it says what is wrong


def _no_folder(path: Path) -> UsageError:
    if path.exists():
        return UsageError(f"{path}: is no folder; name one that backend.checkpoint=DIR wrote.")
    try:
        siblings = [one.name for one in path.parent.iterdir() if one.is_dir()]
    except OSError:
        siblings = []
    close = nearest(path.name, siblings)
    hint = f" Did you mean {str(path.parent / close)!r}?" if close else ""
    return UsageError(f"{path}: no such folder.{hint}")


def read_recording(folder: Path, request_id: int) -> Recording:
    """Read the index and digests of one request; a half-written last line is left out.

    Raises:
        UsageError: a file is missing or damaged.
    """
    index = folder / f"request_{request_id:06d}.jsonl"
    try:
        *lines, _half = index.read_bytes().split(b"\n")
        raw = index.with_suffix(".digests").read_bytes()
    except OSError as error:
        raise UsageError(f"{error.filename}: cannot be read ({error.strerror}).") from error
    digests = np.frombuffer(raw[: len(raw) // DIGEST.itemsize * DIGEST.itemsize], dtype=DIGEST)
    prompt: list[int] = []
    records: list[Record] = []
    finished = False
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
            if number == 1:
                prompt = list(values["prompt_token_ids"])
            elif "records" in values:
                finished = values["records"] == len(records)
            else:
                records.append(_record(values, len(digests)))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise UsageError(
                f"{index} line {number}: is damaged ({type(error).__name__}: {one_line(error)}); "
                "record the run again."
            ) from error
    return Recording(folder, request_id, prompt, records, digests, finished)


def _record(values: dict[str, Any], digests: int) -> Record:
    record = Record(**values | {"shape": tuple(values["shape"])})
    if record.name not in NAMES:
        raise ValueError(f"unknown name {record.name!r}")
    if record.first_digest + record.rows > digests:
        raise ValueError("its digests are missing")
    return record


@functools.lru_cache(maxsize=4)  # rows come in order, so each file is read once
def read_rows(path: Path) -> Floats:
    """Return the rows of a tensor file as [rows, width].

    Raises:
        UsageError: the file is missing or damaged, or holds no floats.
    """
    from safetensors import SafetensorError, deserialize  # noqa: PLC0415 (digests need none)

    try:
        tensor = dict(deserialize(path.read_bytes()))[TENSOR_NAME]  # type: ignore[no-untyped-call]
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}).") from error
    except (SafetensorError, KeyError) as error:
        raise UsageError(f"{path}: is damaged ({one_line(error)}).") from error
    dtype, data = tensor["dtype"], bytes(tensor["data"])
    if dtype == "BF16":  # the upper half of a float32
        values = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    elif dtype in _FLOATS:
        values = np.frombuffer(data, _FLOATS[dtype])
    else:
        raise UsageError(f"{path}: holds {dtype}, whose differences this command cannot measure.")
    return values.astype(np.float64).reshape(tensor["shape"][0], -1)


# --- two recordings of one request --------------------------------------------------------------


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
    where = f"{recording.folder}: request {recording.request_id}, {_place(key)}"
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
                f"request {a.request_id}, {_place(key)}: a row is {list(one.kind[0])} in A and "
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


# --- for people ---------------------------------------------------------------------------------


def _place(key: Key) -> str:
    name, layer = key
    return name if name in WITHOUT_LAYER else f"layer {layer}, {name}"


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
        f"First difference: request {comparison.a.request_id}, {chunk}, {_place(key)}, "
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
        f"at most, in {_place(key)}: {found.absolute.max():.3g} absolute, "
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


def _listed(numbers: Sequence[int]) -> str:
    """Return ascending numbers as one would say them: "0 to 3, 7"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(low) if low == high else f"{low} to {high}" for low, high in spans)


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


# --- the command --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Options:
    """The command line, checked."""

    a: Path
    b: Path
    request: int | None
    only: tuple[str, ...]
    tolerance: float


def main() -> int:
    """Run the command line in sys.argv and return the exit status."""
    try:
        return run(parse(sys.argv[1:]))
    except UsageError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(
            f"{message}; usage: {self.prog} A B [--request N] [--only NAME ...] [--tolerance T]"
        )


def parse(arguments: Sequence[str]) -> Options:
    """Check the command line.

    Raises:
        UsageError: it is wrong; names the nearest name.
    """
    parser = _Parser(
        prog="python -m ruler_bench.divergence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("a", type=Path, metavar="A", help="a checkpoint folder")
    parser.add_argument("b", type=Path, metavar="B", help="the one to compare it with")
    parser.add_argument("--request", metavar="N", help="compare this request only")
    parser.add_argument(
        "--only", nargs="+", action="extend", metavar="NAME", help=f"some of: {', '.join(NAMES)}"
    )
    parser.add_argument(
        "--tolerance",
        metavar="T",
        help="pass over relative differences up to T, from 0 to 1; needs tensors",
    )
    read = parser.parse_args(arguments)
    for name in read.only or ():
        if name not in NAMES:
            raise unknown_name("name after --only", name, NAMES)
    return Options(
        a=read.a,
        b=read.b,
        request=_whole_number(read.request),
        only=tuple(name for name in NAMES if name in (read.only or NAMES)),
        tolerance=_share(read.tolerance),
    )


def _whole_number(text: str | None) -> int | None:
    if text is not None and not (text.isascii() and text.isdigit()):
        raise UsageError(f"--request={text}: must be the number of a request, from 0.")
    return None if text is None else int(text)


def _share(text: str | None) -> float:
    try:
        value = 0.0 if text is None else float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise UsageError(f"--tolerance={text}: must be a number in 0 to 1, such as 1e-3.")
    return value


def run(options: Options) -> int:
    """Compare, print what was found, and return the exit status.

    Raises:
        UsageError: there is nothing to compare, or a file is damaged.
    """
    a, b = open_folder(options.a), open_folder(options.b)
    request_ids = _common_requests(a, b, options.request)
    if options.only != ("rotation",):
        for request_id in request_ids:
            _check_prompts(a.path, b.path, request_id)
    differing, first, totals = [], None, _Totals()
    for request_id in request_ids:
        comparison = compare(
            read_recording(a.path, request_id),
            read_recording(b.path, request_id),
            options.only,
            options.tolerance,
        )
        totals.add(comparison)
        if comparison.differs:
            differing.append(request_id)
            first = first or comparison
    if not totals.rows:
        raise UsageError(
            f"A and B recorded no row of {', '.join(options.only)} at the same position and layer."
        )
    for line in _report(first, differing, totals, (a, b), options):
        print(line)
    return DIFFERENT if differing else SAME


@dataclass(slots=True)
class _Totals:
    """Counts over all requests that were compared."""

    requests: int = 0
    rows: int = 0
    left_out: int = 0
    passed_over: int = 0
    unfinished: list[str] = field(default_factory=list)

    def add(self, comparison: Comparison) -> None:
        self.requests += 1
        self.rows += comparison.rows
        self.left_out += sum(one.left_out for one in comparison.compared.values())
        self.passed_over += sum(one.passed_over for one in comparison.compared.values())
        for label, recording in (("A", comparison.a), ("B", comparison.b)):
            if not recording.finished:
                self.unfinished.append(f"request {recording.request_id} in {label}")


def _report(
    first: Comparison | None,
    differing: list[int],
    totals: _Totals,
    folders: tuple[CheckpointFolder, CheckpointFolder],
    options: Options,
) -> Iterable[str]:
    a, b = folders
    settings = settings_line(a, b)
    if settings:
        yield settings
    counted = f"{_count(totals.rows, 'row')} of {_count(totals.requests, 'request')} compared"
    if first is None:
        yield f"Nothing differs: {counted}."
    else:
        yield first_line(first)
        yield amount_line(first)
        yield f"Rows that differ in request {first.a.request_id}:"
        yield table(first)
        yield f"Requests that differ: {_listed(differing)} ({counted})."
    if options.tolerance:
        yield (
            f"Passed over: {_count(totals.passed_over, 'row')}, different by no more than "
            f"{options.tolerance:g} relative."
        )
    if totals.left_out:
        yield f"Not compared: {_count(totals.left_out, 'row')} that only one run recorded."
    for label, one, other in (("A", a, b), ("B", b, a)):
        alone = sorted(set(one.request_ids) - set(other.request_ids))
        if alone and options.request is None:
            yield f"Not compared: only {label} has request {_listed(alone)}."
    if totals.unfinished:
        yield f"Cut short, as by a crash: {', '.join(totals.unfinished)}."


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _common_requests(a: CheckpointFolder, b: CheckpointFolder, request: int | None) -> list[int]:
    for folder in (a, b):
        if not folder.request_ids:
            raise UsageError(f"{folder.path}: holds no request.")
        if request is not None and request not in folder.request_ids:
            raise UsageError(
                f"--request={request}: is not in {folder.path}, which holds "
                f"{_listed(folder.request_ids)}."
            )
    common = sorted(set(a.request_ids) & set(b.request_ids))
    if not common:
        raise UsageError(
            f"no request in common: {a.path} holds {_listed(a.request_ids)}, {b.path} holds "
            f"{_listed(b.request_ids)}."
        )
    return common if request is None else [request]


def _check_prompts(a: Path, b: Path, request_id: int) -> None:
    one, other = (_prompt(folder, request_id) for folder in (a, b))
    if one == other:
        return
    shorter = min(len(one), len(other))
    differ = (place for place in range(shorter) if one[place] != other[place])
    raise UsageError(
        f"request {request_id}: A and B had different prompts, from token {next(differ, shorter)} "
        "on; record both runs with the same samples in the same order, or name a request that "
        "both had with --request N."
    )


def _prompt(folder: Path, request_id: int) -> list[int]:
    index = folder / f"request_{request_id:06d}.jsonl"
    try:
        with index.open("rb") as file:
            return list(json.loads(file.readline())["prompt_token_ids"])
    except OSError as error:
        raise UsageError(f"{index}: cannot be read ({error.strerror}).") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{index} line 1: is damaged; record the run again.") from error


if __name__ == "__main__":
    sys.exit(main())
