"""The table of `scripts/bench_sparse.py`: attention alone, the choice, whole prompts, ratios."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ruler_bench.report.tables import markdown_table
from scripts.bench.journal import Row
from scripts.bench.sparse_prefill import (
    A_SHAPE,
    GPU_ONLY,
    OFFLOAD,
    SUBJECTS,
    XATTENTION,
)
from scripts.bench.table import NONE, gib_text, heading, left_out, not_measured, seconds_text

BLOCKS = "blocks"
"""Name of the rows of attention to blocks; others have the name of a dense kernel."""
LEGEND = """\
**Attention alone**: one layer, random queries, keys and values; "blocks" is the engine's kernel on
random blocks of 128x128 and the diagonal, the others are its dense kernels, causal. Error: of each
row the largest difference from float64 over the row's largest number, the worst of some rows of the
first, a middle and the last block of queries; compared before anything was timed.

**Choice of blocks**: XAttention's policy on one layer's structured queries and keys, everything
from queries and keys to the mask of blocks. Unlike: blocks that float64 keeps and the policy does
not or the other way round, over those that float64 keeps, in the same blocks of queries.

**Whole prompts**: to the first token; the median of the measured calls after one unmeasured shorter
one. Choice and attention: what these took of it, by events on the device; a dense engine does not
tell them. Density: computed blocks over causal ones, all layers and heads. Dense share: layers and
chunks in which so much was kept that the dense kernel ran. Up and down: keys and values copied.
Compiled in: once, when the engine is built, and part of "built in"."""


class Figures:
    """Rows of one folder.

    Args:
        manifest: of the folder.
        rows: by key.
    """

    def __init__(self, manifest: Mapping[str, Any], rows: Mapping[str, Row]) -> None:
        self.settings = manifest["settings"]
        self.runs = manifest["runs"]
        self.rows = rows
        self._done = [row for row in rows.values() if row["error"] is None]

    def lengths(self) -> list[int]:
        """Return the lengths of which something was measured, ascending."""
        return sorted({row["length"] for row in self._done})

    def of(self, kind: str, tokens: int | None = None) -> list[Row]:
        """Return the measured rows of a kind, of one length where it is named."""
        return [
            row for row in self._done if row["kind"] == kind and tokens in (None, row["length"])
        ]

    def best_dense(self, tokens: int) -> Row | None:
        """Return the row of the fastest dense kernel at a length."""
        rows = [row for row in self.of("attention", tokens) if row["name"] != BLOCKS]
        return min(rows, key=lambda row: row["figures"]["seconds"], default=None)

    def prompts(self, tokens: int) -> list[Row]:
        """Return the rows of whole prompts of a length, in the order of the subjects."""
        order = [one.name for one in SUBJECTS]
        return sorted(self.of("prompt", tokens), key=lambda row: order.index(row["name"]))

    def prompt(self, name: str, tokens: int) -> Mapping[str, Any] | None:
        """Return the figures of a subject at a length, the first of them."""
        found = [row["figures"] for row in self.prompts(tokens) if row["name"] == name]
        return found[0] if found else None


def render(manifest: Mapping[str, Any], rows: Mapping[str, Row]) -> str:
    """Return the Markdown document of a folder."""
    figures = Figures(manifest, rows)
    settings = figures.settings
    parts = ["# Sparse prefill on one machine", heading(manifest)]
    parts.append(
        f"XAttention's threshold is {settings['threshold']}. Keys of the choice and of whole "
        f"prompts: {settings['keys']}."
    )
    parts += _calibration(figures)
    for tokens in figures.lengths():
        parts.append(f"## {tokens} tokens")
        parts += _attention(figures, tokens)
        parts += _choice(figures, tokens)
        parts += _prompts(figures, tokens)
        ratios = list(_ratios(figures, tokens))
        if ratios:
            parts += ["### Ratios that decide", markdown_table(("ratio", "value"), ratios)]
    parts += left_out(figures.runs)
    if figures.lengths():
        parts.append(LEGEND)
    parts += not_measured(rows)
    return "\n\n".join(parts) + "\n"


def _calibration(figures: Figures) -> Iterator[str]:
    for row in figures.of("calibration"):
        found = row["figures"]
        tried = ", ".join(f"{strength:g}: {share:.4f}" for strength, share in found["tried"])
        yield (
            f"Strength of the structure: {found['strength']:g}, at which XAttention with stride "
            f"{row['settings']['stride']} keeps {found['density']:.4f} of the first layer's causal "
            f"blocks at {row['length']} tokens (tried: {tried})."
        )


def _attention(figures: Figures, tokens: int) -> Iterator[str]:
    rows = figures.of("attention", tokens)
    if not rows:
        return
    best = figures.best_dense(tokens)
    cells = []
    for row in rows:
        found = row["figures"]
        kept = found.get("kept_share")
        compiled = found.get("compile_seconds")
        cells.append(
            (
                row["name"] if kept is None else f"{BLOCKS}, {row['settings']['percent']} percent",
                NONE if kept is None else f"{kept:.4f}",
                seconds_text(found["seconds"]),
                f"{found['causal_operations_per_second'] / 1e12:.4g}",
                f"{(kept or 1) * found['causal_operations_per_second'] / 1e12:.4g}",
                _times(best, found["seconds"]),
                f"{found['largest_relative_error']:.2g}",
                seconds_text(compiled),
            )
        )
    titles = (
        "attention alone",
        "kept share",
        "time",
        "TFLOP/s as if dense",
        "TFLOP/s computed",
        "times as fast as the best dense",
        "error",
        "compiled in",
    )
    yield markdown_table(titles, cells)


def _times(best: Row | None, seconds: float) -> str:
    return NONE if best is None else f"{best['figures']['seconds'] / seconds:.3f}"


def _choice(figures: Figures, tokens: int) -> Iterator[str]:
    rows = figures.of("estimation", tokens)
    if not rows:
        return
    best = figures.best_dense(tokens)
    cells = [
        (
            f"XAttention, stride {row['settings']['stride']}",
            seconds_text(row["figures"]["seconds"]),
            _share(row["figures"]["seconds"], best),
            f"{row['figures']['density']:.4f}",
            f"{row['figures']['unlike_share']:.4f}",
            f"{row['figures']['strength']:g}",
        )
        for row in rows
    ]
    titles = (
        "choice of blocks",
        "time",
        "share of the best dense attention",
        "kept share",
        "unlike float64",
        "strength",
    )
    yield markdown_table(titles, cells)


def _share(seconds: float, best: Row | None) -> str:
    return NONE if best is None else f"{seconds / best['figures']['seconds']:.4f}"


PROMPT_TITLES = (
    "whole prompt",
    "prefill",
    "times as fast as dense",
    "choice",
    "attention",
    "density",
    "dense share",
    "up, GB",
    "down, GB",
    "over weights, GiB",
    "built in",
    "compiled in",
    "repeats equal",
)


def _prompts(figures: Figures, tokens: int) -> Iterator[str]:
    rows = figures.prompts(tokens)
    if not rows:
        return
    cells = []
    for row in rows:
        found = row["figures"]
        cells.append(
            (
                row["name"],
                seconds_text(found["prefill_seconds"]),
                _speed(figures, row["name"], tokens),
                seconds_text(found["estimation_seconds"]),
                seconds_text(found["attention_seconds"]),
                _four(found["density"]),
                _four(found["dense_share"]),
                _gigabytes(found["up_bytes"]),
                _gigabytes(found["down_bytes"]),
                gib_text(found["over_weights_bytes"]),
                seconds_text(found["construct_seconds"]),
                seconds_text(found["compile_seconds"]),
                "yes" if found["repeats_equal"] else "**NO**",
            )
        )
    yield markdown_table(PROMPT_TITLES, cells)


def _four(value: float | None) -> str:
    return NONE if value is None else f"{value:.4f}"


def _gigabytes(count: int | None) -> str:
    return NONE if count is None else f"{count / 1e9:.3f}"


def _speed(figures: Figures, name: str, tokens: int) -> str:
    ratio = _prefill_ratio(figures, name, tokens)
    return NONE if ratio is None else f"{ratio:.3f}"


def _prefill_ratio(figures: Figures, name: str, tokens: int) -> float | None:
    """Return how many times as fast a subject is as the dense one of the same preset."""
    dense = figures.prompt(name.partition(" ")[0], tokens)
    found = figures.prompt(name, tokens)
    if dense is None or found is None or " " not in name:
        return None
    return float(dense["prefill_seconds"] / found["prefill_seconds"])


def _ratios(figures: Figures, tokens: int) -> Iterator[Sequence[str]]:
    best = figures.best_dense(tokens)
    for row in figures.of("attention", tokens):
        if row["name"] == BLOCKS and best is not None:
            percent = row["settings"]["percent"]
            yield (
                f"attention at {percent} percent, times as fast as {best['name']}",
                _times(best, row["figures"]["seconds"]),
            )
    for row in figures.of("estimation", tokens):
        stride = row["settings"]["stride"]
        if best is not None:
            yield (
                f"choice at stride {stride}, share of {best['name']}",
                _share(row["figures"]["seconds"], best),
            )
    for policy in XATTENTION.values():
        ratio = _prefill_ratio(figures, f"{GPU_ONLY} {policy}", tokens)
        if ratio is not None:
            yield f"{GPU_ONLY} {policy} prefill, times as fast as {GPU_ONLY}", f"{ratio:.3f}"
    for policy in (*XATTENTION.values(), A_SHAPE):
        yield from _offloaded(figures, policy, tokens)


def _offloaded(figures: Figures, policy: str, tokens: int) -> Iterator[Sequence[str]]:
    name = f"{OFFLOAD} {policy}"
    dense, found = figures.prompt(OFFLOAD, tokens), figures.prompt(name, tokens)
    ratio = _prefill_ratio(figures, name, tokens)
    if dense is None or found is None or ratio is None:
        return
    yield f"{name} prefill, times as fast as {OFFLOAD}", f"{ratio:.3f}"
    if dense["up_bytes"]:
        share = found["up_bytes"] / dense["up_bytes"]
        yield f"{name}, bytes up, share of those of {OFFLOAD}", f"{share:.4f}"
