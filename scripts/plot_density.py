r"""Draw score against density from the folders of a sweep: what leaving blocks out costs.

    python -m ruler_bench -m task=niah_multikey_3 backend=xattn num_samples=25 out=SWEEP \
        backend.policy.threshold=0.3,0.5,0.7,0.9,0.95
    python -m ruler_bench task=niah_multikey_3 backend=gpu_only num_samples=25 out=SWEEP/full
    python scripts/plot_density.py SWEEP --out density.png

Each run folder in or below those named is a point, with the score's 95% interval; runs of one
policy that differ in one setting are joined by a line. All must be of one task, length and model.
Needs matplotlib: pip install "ruler-bench[plot]". Exit status: 0 drawn, 2 something is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # `ruler_bench`, wherever this is run from

from backends.base import ConfigurationError  # noqa: E402
from ruler_bench.errors import UsageError, one_line  # noqa: E402
from ruler_bench.journal import read_run  # noqa: E402
from ruler_bench.manifest import RECORDS  # noqa: E402
from ruler_bench.report import Run  # noqa: E402
from ruler_bench.report.rows import build_row  # noqa: E402

DONE, WRONG = 0, 2
ARM = "persistent"
FULL_DENSITY = 1.0
ONE_OF = ("task", "length", "model")
INCHES, DOTS_PER_INCH = (8.0, 5.0), 150


@dataclass(frozen=True)
class Point:
    """One run.

    Attributes:
        policy: its name.
        settings: of the policy, without the name.
        density: mean share of the causal blocks computed, 0 to 1.
        score, low, high: RULER's, with its 95% interval, 0 to 100.
        samples: finished ones.
    """

    policy: str
    settings: dict[str, Any]
    density: float
    score: float
    low: float
    high: float
    samples: int


@dataclass(frozen=True)
class Line:
    """Runs of a policy that differ in one setting.

    Attributes:
        title: the policy, and what else its runs have in common that others of it do not.
        points: by density.
        labels: what to write beside each.
    """

    title: str
    points: list[Point]
    labels: list[str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="the PNG")
    options = parser.parse_args(arguments)
    try:
        runs = read_runs(options.folders)
        draw(lines_of([point_of(run) for run in runs]), title_of(runs), options.out)
    except ConfigurationError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return WRONG
    print(options.out)
    return DONE


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Return the runs in and below the folders that have an answer of the persistent arm.

    Raises:
        UsageError: there is none, one is damaged, or they are of more than one task, length or
            model.
    """
    found = {path.parent.resolve() for folder in folders for path in folder.rglob(RECORDS)}
    runs = []
    for folder in sorted(found):
        run = read_run(folder)
        if run is None:
            continue
        records = [one for one in run.records if one.arm == ARM and one.error is None]
        if records:
            runs.append(Run(run.manifest, records))
    if not runs:
        named = ", ".join(str(one) for one in folders)
        raise UsageError(f"{named}: no run of the arm {ARM} lies there.")
    for key in ONE_OF:
        values = sorted({str(run.manifest[key]) for run in runs})
        if len(values) > 1:
            raise UsageError(
                f"the runs are of more than one {key} ({', '.join(values)}): name folders of one."
            )
    return runs


def point_of(run: Run) -> Point:
    """Return where a run stands."""
    row = build_row(run)
    in_force = (run.manifest.get("backend_in_force") or {}).get("policy") or {}
    settings = dict(in_force)
    name = str(settings.pop("name", "full"))
    known = [one.density for one in run.records if one.density is not None]
    if row.score is None or row.score_low_95 is None or row.score_high_95 is None:
        raise AssertionError("a run with answers has a score")
    return Point(
        policy=name,
        settings=settings,
        density=sum(known) / len(known) if known else FULL_DENSITY,
        score=row.score,
        low=row.score_low_95,
        high=row.score_high_95,
        samples=row.samples,
    )


def lines_of(points: Sequence[Point]) -> list[Line]:
    """Join the runs of a policy that differ in one setting: that with the most values."""
    lines = []
    for policy in dict.fromkeys(one.policy for one in points):
        own = [one for one in points if one.policy == policy]
        varied = sorted(
            (key for key in own[0].settings if _values(own, key) > 1),
            key=lambda key: _values(own, key),
        )
        along = varied.pop() if varied else None
        apart: dict[str, list[Point]] = {}
        for point in sorted(own, key=lambda one: [_order(one.settings.get(key)) for key in varied]):
            shown = " ".join(f"{key}={point.settings.get(key)}" for key in varied)
            apart.setdefault(f"{policy} {shown}".strip(), []).append(point)
        for title, of_line in apart.items():
            of_line.sort(key=lambda one: one.density)
            labels = ["" if along is None else f"{one.settings.get(along)}" for one in of_line]
            along_title = title if along is None else f"{title}, by {along}"
            lines.append(Line(along_title, of_line, labels))
    return lines


def _order(value: Any) -> tuple[float, str]:
    """Return what sorts numbers by size, and after them all else by its text."""
    is_number = isinstance(value, int | float)
    return (float(value), "") if is_number else (float("inf"), str(value))


def _values(points: Sequence[Point], key: str) -> int:
    return len({str(one.settings.get(key)) for one in points})


def title_of(runs: Sequence[Run]) -> str:
    """Return what the runs have in common."""
    manifest = runs[0].manifest
    counts = sorted({len(run.records) for run in runs})
    samples = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return (
        f"{manifest['task']} at {manifest['length']} tokens, {manifest['model']}, "
        f"{samples} samples a point"
    )


def draw(lines: Sequence[Line], title: str, path: Path) -> None:
    """Draw the lines into a PNG file.

    Raises:
        UsageError: matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 (an extra)
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise UsageError('drawing needs matplotlib: pip install "ruler-bench[plot]".') from error
    figure = Figure(figsize=INCHES, dpi=DOTS_PER_INCH, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(facecolor="white")
    for number, line in enumerate(lines):
        densities = [100 * one.density for one in line.points]
        scores = [one.score for one in line.points]
        below = [max(one.score - one.low, 0.0) for one in line.points]
        above = [max(one.high - one.score, 0.0) for one in line.points]
        bars = axes.errorbar(
            densities,
            scores,
            yerr=[below, above],
            marker="osD^v"[number % 5],
            markersize=5,
            linewidth=1.5,
            elinewidth=1.0,
            capsize=3,
            label=line.title,
        )
        for x, y, label in zip(densities, scores, line.labels, strict=True):
            axes.annotate(
                label,
                (x, y),
                # Those of neighbouring lines on either side, so that they do not cover each other.
                xytext=(5, -12) if number % 2 else (-5, 5),
                textcoords="offset points",
                ha="left" if number % 2 else "right",
                fontsize=8,
                color=bars[0].get_color(),
            )
    axes.set_xlabel("density: causal key blocks computed in prefill (%)")
    axes.set_ylabel("RULER score (95% interval)")
    axes.set_title(title, fontsize=11)
    axes.set_xlim(0, 104)
    axes.set_ylim(-3, 107)
    axes.grid(visible=True, color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.legend(loc="lower right", fontsize=9)
    try:
        figure.savefig(path, facecolor="white")
    except (OSError, ValueError) as error:
        raise UsageError(f"--out {path}: cannot be written ({one_line(error)}).") from error


if __name__ == "__main__":
    sys.exit(main())
