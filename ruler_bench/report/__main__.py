"""`python -m ruler_bench.report results --out DIR`: many runs in one table and on one page.

    python -m ruler_bench.report results --out joined
    python -m ruler_bench.report 'results/niah_*' results/.sweeps/more --out joined
    python -m ruler_bench.report results --baseline results/reference/X --fail-under -2

Each name is a run folder, one above run folders, or a pattern. Without --out the tables are printed
as Markdown. With it DIR has report.md, report.html, cells.csv (a line a cell, for pandas),
differences.csv and, where matplotlib is installed, pictures as PNG files.

A difference is marked only where its 95% interval excludes zero, over pairs where both have the
same samples. Runs about other samples under the same name are kept apart, and it is said.

Exit status: 0 done, 6 a cell fell below the baseline, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ruler_bench.command_line import Parser, status_of
from ruler_bench.errors import UsageError
from ruler_bench.manifest import MANIFEST
from ruler_bench.report.digest import ALL_KEPT_RUNS, Digest
from ruler_bench.report.figures import write_figures
from ruler_bench.report.gate import against_baseline, gate_section
from ruler_bench.report.gather import gather
from ruler_bench.report.joined import (
    CELLS,
    DIFFERENCES,
    Joined,
    join,
    markdown,
    sections,
    write_cells,
    write_differences,
)
from ruler_bench.report.page import PAGE, Page, Section, link_to, render, tails_of, title_of
from ruler_bench.report.prompts import prompts_of

DONE, FELL = 0, 6


@dataclass(frozen=True)
class Options:
    """The command line."""

    named: tuple[str, ...]
    out: Path | None
    baseline: str | None
    fail_under: float
    processes: int | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    return status_of(lambda: report(parse(words)))


def parse(arguments: Sequence[str]) -> Options:
    """Check the command line.

    Raises:
        UsageError: it is wrong.
    """
    parser = Parser(
        "report", __doc__, "RUNS [...] [--out DIR] [--baseline RUNS --fail-under POINTS]"
    )
    parser.add_argument("named", nargs="+", metavar="RUNS", help="folders or patterns")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write files there")
    parser.add_argument("--baseline", metavar="RUNS", help="hold the runs against these")
    parser.add_argument(
        "--fail-under",
        metavar="POINTS",
        help="least difference from the baseline that passes, such as -2; 0 where left out",
    )
    parser.add_argument("--processes", metavar="N", help="that read; one a core where left out")
    # A negative number is a value here, whatever argparse takes it for.
    read = parser.parse_args(_joined(arguments, "--fail-under"))
    if read.fail_under is not None and read.baseline is None:
        parser.error("--fail-under needs --baseline RUNS")
    return Options(
        tuple(read.named),
        read.out,
        read.baseline,
        _points(read.fail_under),
        _count(read.processes),
    )


def _joined(arguments: Sequence[str], option: str) -> list[str]:
    words = list(arguments)
    if option in words[:-1]:
        place = words.index(option)
        words[place : place + 2] = [f"{option}={words[place + 1]}"]
    return words


def _points(text: str | None) -> float:
    try:
        value = 0.0 if text is None else float(text)
    except ValueError:
        value = math.nan
    if not -100 <= value <= 0:
        raise UsageError(f"--fail-under={text}: must be points in -100 to 0, such as -2.")
    return value


def _count(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--processes={text}: must be a number from 1.")
    return int(text)


def report(options: Options) -> int:
    """Read, join, print, write.

    Raises:
        UsageError: see `gather` and `against_baseline`; or --out cannot be written.
    """
    if options.out is not None:
        _check_out(options.out)
    gathered = gather(options.named, options.processes)
    digests, notes = gathered.digests, list(gathered.notes)
    joined = join(digests)
    tables = sections(joined)
    status = DONE
    if options.baseline is not None:
        baseline = gather([options.baseline], options.processes)
        gate = against_baseline(digests, baseline.digests, options.fail_under)
        notes += [f"baseline: {one}" for one in baseline.notes]
        notes += gate.notes
        tables.insert(0, gate_section(gate, options.fail_under))
        status = FELL if gate.fallen else DONE
    text = markdown(title_of(digests), notes, tables)
    if options.out is None:
        print(text, end="")
        return status
    for note in notes:
        print(note)
    if options.baseline is not None:
        print(markdown_of(tables[0]))
    page = Page(
        title=title_of(digests),
        verdict=_verdict(digests),
        notes=notes,
        tails=_tails(digests),
        sections=tables,
    )
    write(options.out, digests, joined, page, text)
    print(f"Report: {options.out / PAGE}")
    return status


def _verdict(digests: Sequence[Digest]) -> dict[str, Any] | None:
    """Return the verdict of one run alone; those of several are on their own pages."""
    if len({one.run for one in digests}) > 1:
        return None
    try:
        found = json.loads((Path(digests[0].folder) / "verdict.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _tails(digests: Sequence[Digest]) -> dict[str, str]:
    """Return the ends of the prompts that may be shown; of many runs none, they take too long."""
    folders = {one.folder for one in digests}
    if len(folders) > ALL_KEPT_RUNS:
        return {}
    wanted = {shown.prompt_sha256 for one in digests for shown in one.shown}
    found: dict[str, str] = {}
    for folder in sorted(folders):
        found |= tails_of(prompts_of(Path(folder), wanted - found.keys()).items())
    return found


def markdown_of(section: Section) -> str:
    """Return one table, for the terminal."""
    return markdown(section.title, (), [section]).partition("\n\n")[2].strip()


def _check_out(folder: Path) -> None:
    if folder.is_file():
        raise UsageError(f"--out {folder}: is a file; name a folder.")
    if (folder / MANIFEST).exists():
        raise UsageError(
            f"--out {folder}: is the folder of a run, whose report would be lost; name another."
        )


def write(
    folder: Path,
    digests: Sequence[Digest],
    joined: Joined,
    page: Page,
    text: str,
) -> None:
    """Write all files.

    Raises:
        UsageError: the folder cannot be written, or the disk is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.md").write_text(text, encoding="utf-8", newline="\n")
        write_cells(folder / CELLS, digests)
        write_differences(folder / DIFFERENCES, joined)
        links = {
            one.run: link_to(folder, Path(one.folder) / PAGE)
            for one in digests
            if (Path(one.folder) / PAGE).exists()
        }
        page = replace(page, links=links)
        (folder / PAGE).write_text(render(digests, page), encoding="utf-8", newline="\n")
        if not write_figures(folder, digests):
            print(
                "No PNG files: they need matplotlib (pip install 'ruler-bench[plot]'); the page "
                "has the same pictures.",
                file=sys.stderr,
            )
    except OSError as error:
        raise UsageError(f"--out {folder}: cannot be written ({error.strerror}).") from error


if __name__ == "__main__":
    sys.exit(main())
