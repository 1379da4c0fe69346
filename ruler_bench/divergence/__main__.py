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

import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ruler_bench.command_line import Parser, status_of
from ruler_bench.divergence.comparison import Comparison, compare
from ruler_bench.divergence.recording import NAMES, CheckpointFolder, open_folder, read_recording
from ruler_bench.divergence.text import amount_line, first_line, listed, settings_line, table
from ruler_bench.errors import UsageError, unknown_name

SAME, DIFFERENT = 0, 1


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
    return status_of(lambda: run(parse(sys.argv[1:])))


def parse(arguments: Sequence[str]) -> Options:
    """Check the command line.

    Raises:
        UsageError: it is wrong; names the nearest name.
    """
    parser = Parser("divergence", __doc__, "A B [--request N] [--only NAME ...] [--tolerance T]")
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
    compared = f"{_count(totals.rows, 'row')} of {_count(totals.requests, 'request')} compared"
    if first is None:
        yield f"Nothing differs: {compared}."
    else:
        yield first_line(first)
        yield amount_line(first)
        yield f"Rows that differ in request {first.a.request_id}:"
        yield table(first)
        yield f"Requests that differ: {listed(differing)} ({compared})."
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
            yield f"Not compared: only {label} has request {listed(alone)}."
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
                f"{listed(folder.request_ids)}."
            )
    common = sorted(set(a.request_ids) & set(b.request_ids))
    if not common:
        raise UsageError(
            f"no request in common: {a.path} holds {listed(a.request_ids)}, {b.path} holds "
            f"{listed(b.request_ids)}."
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
