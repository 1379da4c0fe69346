"""The page's pictures as PNG files, for papers and slides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from ruler_bench.report.depth import BINS
from ruler_bench.report.digest import STATES, Digest
from ruler_bench.report.text import visible

DEPTH_PNG, INDICES_PNG = "depth.png", "indices.png"
COLOURS = ("#3b82a6", "#e0b04a", "#d1502f", "#6d4aa8")
"""Of STATES, as on the page."""
MOST_ROWS = 40
DOTS_PER_INCH = 150


def write_figures(folder: Path, digests: Sequence[Digest]) -> bool:
    """Write depth.png and indices.png, of the first rows where there are many.

    Returns:
        False where matplotlib is not installed, and nothing was written.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    try:
        import matplotlib as mpl  # noqa: PLC0415 (an extra)
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415, F401
    except ImportError:
        return False
    with mpl.rc_context({"text.parse_math": False, "font.size": 8}):
        _depth(folder / DEPTH_PNG, [one for one in digests if any(one.depths)][:MOST_ROWS])
        _indices(folder / INDICES_PNG, [one for one in digests if one.shown][:MOST_ROWS])
    return True


def _name(one: Digest) -> str:
    """Return what tells a row from others: the start, and settings on a line of their own."""
    row = one.row
    parts = (row.task, str(row.length_tokens), row.backend, row.model, one.arm)
    name = visible(" ".join(parts), 60)
    return f"{name}\n{visible(row.settings, 60)}" if row.settings else name


def _high(digests: Sequence[Digest]) -> float:
    """Return the height of the rows, in inches: more where names have two lines."""
    return len(digests) * (0.35 if any(one.row.settings for one in digests) else 0.25)


def _depth(path: Path, digests: Sequence[Digest]) -> None:
    from matplotlib.colors import LinearSegmentedColormap  # noqa: PLC0415

    if not digests:
        return
    figure, axes = _axes(8.0, 1.2 + _high(digests))
    grid = [[float("nan") if cell is None else cell[0] for cell in one.depths] for one in digests]
    colours = LinearSegmentedColormap.from_list("score", [COLOURS[2], COLOURS[0]])
    axes.imshow(grid, vmin=0, vmax=100, cmap=colours, aspect="auto")
    for y, line in enumerate(grid):
        for x, score in enumerate(line):
            if not math.isnan(score):
                axes.text(x, y, f"{score:.0f}", ha="center", va="center", color="white")
    axes.set_xticks(range(BINS), [f"{n * 100 // BINS}%" for n in range(BINS)])
    axes.set_yticks(range(len(digests)), [_name(one) for one in digests])
    axes.set_title("Score by depth of the first needle asked for")
    figure.savefig(path)


def _indices(path: Path, digests: Sequence[Digest]) -> None:
    from matplotlib.colors import ListedColormap  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415

    if not digests:
        return
    ordinals = sorted({shown.ordinal for one in digests for shown in one.shown})
    place = {ordinal: x for x, ordinal in enumerate(ordinals)}
    grid = [[float("nan")] * len(ordinals) for _ in digests]
    for y, one in enumerate(digests):
        for shown in one.shown:
            grid[y][place[shown.ordinal]] = STATES.index(shown.state)
    figure, axes = _axes(min(16.0, 5.5 + 0.08 * len(ordinals)), 1.4 + _high(digests))
    axes.imshow(grid, vmin=-0.5, vmax=3.5, cmap=ListedColormap(COLOURS), aspect="auto",
                interpolation="nearest")  # fmt: skip
    for y in range(1, len(digests)):
        axes.axhline(y - 0.5, color="white", linewidth=1)
    step = max(1, len(ordinals) // 10)
    axes.set_xticks(range(0, len(ordinals), step), [str(one) for one in ordinals[::step]])
    axes.set_yticks(range(len(digests)), [_name(one) for one in digests])
    axes.set_xlabel("index")
    axes.legend(
        handles=[Patch(color=c, label=s) for c, s in zip(COLOURS, STATES, strict=True)],
        loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False,
    )  # fmt: skip
    figure.savefig(path)


def _axes(wide: float, high: float):  # type: ignore[no-untyped-def]
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure((wide, high), dpi=DOTS_PER_INCH, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()
