"""The table of a folder of rows: each figure beside its limit, and the ratios that decide."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ruler_bench.report.tables import markdown_table
from ruler_bench.report.text import markdown_cell
from scripts.bench.journal import Row
from scripts.bench.shapes import SHAPES, Shape
from scripts.bench.subjects import (
    CHUNKED,
    GPU_ONLY,
    LAYERWISE,
    OURS,
    SUBJECTS,
    TRANSFORMERS,
    TRANSFORMERS_OFFLOADED,
)
from scripts.bench.work import (
    ATTENTION,
    decode_weight_bytes,
    kv_bytes,
    prefill_operations,
    seconds_at,
)

NONE = "-"
COLUMNS = (
    "figure",
    "measured",
    "tokens/s",
    "limit",
    "share of the limit",
    "share, all rows",
    "compared with",
    "over weights, GiB (planned)",
    "up, GB (of expected)",
    "down, GB (of expected)",
    "built in",
)
LEGEND = """\
Limits are worked out from this table's own ceilings; docs/gpu_benchmarks.md says how. "Share of the
limit" of a prefill is against the work that one next-token answer needs, "all rows" against all
layers whole. "Compared with": how many times as fast as the row named. "Over weights": peak device
memory of the measured calls less the weights, and in brackets what the engine planned (on a CPU the
peak is that of the cache's own buffers alone). Up and down: keys and values copied in one whole
call, decode included; in a row of decode those of one token. In brackets the share of the bytes
expected from the shape where nothing that a ring keeps saves a copy."""


class Figures:
    """Rows of one folder, and what follows from several of them together.

    Args:
        settings: from the manifest.
        rows: by key.
    """

    def __init__(self, settings: Mapping[str, Any], rows: Mapping[str, Row]) -> None:
        self.shape: Shape = SHAPES[settings["shape"]]
        self.element_bytes: int = getattr(torch, settings["dtype"]).itemsize
        self.rows = rows
        self._done = [row for row in rows.values() if row["error"] is None]

    def ceilings(self, name: str) -> list[Row]:
        """Return the rows of one ceiling that were measured."""
        return [row for row in self._done if row["kind"] == "ceiling" and row["name"] == name]

    def lengths(self) -> list[int]:
        """Return the prompt lengths of which there is a row, ascending."""
        return sorted({row["length"] for row in self.rows.values() if row["kind"] == "prompt"})

    def of_length(self, tokens: int) -> list[Row]:
        """Return the rows of one prompt length, in the order of the subjects."""
        rows = [r for r in self.rows.values() if r["kind"] == "prompt" and r["length"] == tokens]
        return sorted(rows, key=lambda row: SUBJECTS.index(row["name"]))

    def first(self, name: str, tokens: int) -> dict[str, Any] | None:
        """Return the figures of a subject at one length; those without a cap where there are."""
        rows = [row for row in self.of_length(tokens) if row["name"] == name and not row["error"]]
        rows.sort(key=lambda row: row["settings"].get("device_memory_gb") is not None)
        return rows[0]["figures"] if rows else None

    def rates(self, tokens: int) -> dict[str, float]:
        """Return the best operations/s of each product, and of causal attention at one length.

        Attention at a length that was not measured counts at the longest measured below it.
        """
        rates: dict[str, float] = {}
        for row in self.ceilings("gemm"):
            rate, name = row["figures"]["operations_per_second"], row["settings"]["product"]
            rates[name] = max(rate, rates.get(name, 0.0))
        length = self.attention_tokens(tokens)
        at_length = [
            row["figures"]["operations_per_second"]
            for row in self.ceilings("attention")
            if row["settings"]["causal"] and row["settings"]["keys"] == length
        ]
        return rates | ({ATTENTION: max(at_length)} if at_length else {})

    def attention_tokens(self, tokens: int) -> int | None:
        """Return the length whose attention rate counts for a prompt of `tokens` tokens."""
        measured = [
            row["settings"]["keys"]
            for row in self.ceilings("attention")
            if row["settings"]["causal"] and row["settings"]["keys"] <= tokens
        ]
        return max(measured, default=None)

    def prefill_limit(self, tokens: int, *, all_rows: bool = False) -> float | None:
        """Return the least seconds of a prefill at the measured rates."""
        operations = prefill_operations(self.shape, tokens, all_rows=all_rows)
        return seconds_at(operations, self.rates(tokens))

    def memory_limit(self, tokens: int, new_tokens: int) -> float | None:
        """Return the least seconds of a decoded token: weights and KV over the best bandwidth.

        The KV are those of the mean step: prompt, tokens decoded before it, and its own.
        """
        rows = self.ceilings("memory")
        if not rows:
            return None
        weights = decode_weight_bytes(self.shape, self.element_bytes)
        keys = kv_bytes(self.shape, 1, self.element_bytes) * (tokens + new_tokens / 2)
        best: float = rows[0]["figures"]["best_bytes_per_second"]
        return (weights + keys) / best

    def copy_limit(self, tokens: int) -> float | None:
        """Return the least seconds of a decoded token: the prompt's KV over the copy bandwidth."""
        rows = self.ceilings("copy")
        if not rows:
            return None
        up: float = rows[0]["figures"]["up_bytes_per_second"]
        return kv_bytes(self.shape, tokens, self.element_bytes) / up


@dataclass(frozen=True)
class Ratio:
    """One figure that decides, and what it is of."""

    name: str
    value: str


def render(manifest: Mapping[str, Any], rows: Mapping[str, Row]) -> str:
    """Return the Markdown document of a folder: settings, ceilings, a table a length, ratios."""
    figures = Figures(manifest["settings"], rows)
    parts = ["# Engine and transformers on one machine", heading(manifest)]
    parts += ["## Ceilings", *_ceilings(figures, manifest["runs"])]
    for tokens in figures.lengths():
        parts += [f"## {tokens} tokens", *_limits(figures, tokens), _length_table(figures, tokens)]
        parts += _mixed_runs(figures, tokens)
        ratios = list(_ratios(figures, tokens))
        if ratios:
            cells = [(ratio.name, ratio.value) for ratio in ratios]
            parts.append(markdown_table(("ratio", "value"), cells))
    if figures.lengths():
        parts.append(LEGEND)
    parts += not_measured(rows)
    return "\n\n".join(parts) + "\n"


def not_measured(rows: Mapping[str, Row]) -> Iterator[str]:
    """Yield a section about the rows that failed, where there are any."""
    failed = [row for row in rows.values() if row["error"] is not None]
    if failed:
        yield "## Not measured"
        yield "\n".join(f"- {row['key']}: {markdown_cell(row['error'], None)}" for row in failed)


def left_out(runs: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield why attention kernels cannot run here, where there are any."""
    found = {name: why for run in runs for name, why in run.get("kernels_left_out", {}).items()}
    if found:
        yield "Attention kernels that cannot run here:\n" + "\n".join(
            f"- {markdown_cell(why, None)}" for why in found.values()
        )


def heading(manifest: Mapping[str, Any]) -> str:
    """Return what all rows have in common, and the runs that they come from, as a list."""
    settings, runs = manifest["settings"], manifest["runs"]
    versions = ", ".join(f"{name} {value}" for name, value in settings["versions"].items())
    lines = [
        f"- {settings['device']}; {settings['platform']}",
        f"- {versions}",
        f"- shape {settings['shape']}, {settings['dtype']}, random weights, seed "
        f"{settings['seed']}; prompt: {settings['prompt']}",
    ]
    lines += [f"- {run['started']}: `{run['command']}`" for run in runs]
    state = runs[-1].get("gpu_state")
    if state:
        lines.append("- " + ", ".join(f"{name} {value}" for name, value in state.items()))
    return "\n".join(lines)


# --- ceilings -----------------------------------------------------------------------------------


def _ceilings(figures: Figures, runs: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    cells = []
    for name in ("copy", "memory"):
        for row in figures.ceilings(name):
            for key, value in row["figures"].items():
                what = key.removesuffix("_bytes_per_second").replace("_", " ")
                cells.append((f"{name}, {what}", f"{value / 1e9:.4g} GB/s"))
    for name in ("gemm", "attention"):
        for row in figures.ceilings(name):
            rate = row["figures"]["operations_per_second"]
            cells.append((row["key"], f"{rate / 1e12:.4g} TFLOP/s"))
    yield markdown_table(("ceiling", "measured"), cells) if cells else "None was measured."
    yield from left_out(runs)


def _limits(figures: Figures, tokens: int) -> Iterator[str]:
    needed = figures.prefill_limit(tokens)
    whole = figures.prefill_limit(tokens, all_rows=True)
    if needed is None or whole is None:
        return
    length = figures.attention_tokens(tokens)
    other = "" if length == tokens else f", with the attention rate measured at {length} tokens"
    yield (
        f"Compute limit of the prefill: {seconds_text(needed)} for what one answer needs, "
        f"{seconds_text(whole)} with all rows of the last layer{other}."
    )


def _mixed_runs(figures: Figures, tokens: int) -> Iterator[str]:
    runs = {row["run"] for row in figures.of_length(tokens) if row["error"] is None}
    if len(runs) > 1:
        yield f"The rows of this length come from {len(runs)} runs of the command, not from one."


# --- one length ---------------------------------------------------------------------------------


def _length_table(figures: Figures, tokens: int) -> str:
    lines = []
    for row in figures.of_length(tokens):
        if row["error"] is not None:
            continue
        lines.append(_prefill_cells(figures, row))
        if row["figures"]["decode_seconds"] is not None:
            lines.append(_decode_cells(figures, row))
    return markdown_table(COLUMNS, lines) if lines else "No row was measured."


def _prefill_cells(figures: Figures, row: Row) -> tuple[str, ...]:
    found, tokens = row["figures"], row["length"]
    seconds = found["prefill_seconds"]
    limit = figures.prefill_limit(tokens)
    return (
        f"{_title(row)}: prefill",
        seconds_text(seconds),
        f"{tokens / seconds:,.0f}",
        seconds_text(limit),
        _share(limit, seconds),
        _share(figures.prefill_limit(tokens, all_rows=True), seconds),
        _compared(figures, row, "prefill_seconds"),
        _over_weights(found),
        _moved(found.get("up_bytes"), found.get("expected_up_bytes")),
        _moved(found.get("down_bytes"), found.get("expected_down_bytes")),
        seconds_text(found["construct_seconds"]),
    )


def _decode_cells(figures: Figures, row: Row) -> tuple[str, ...]:
    found, tokens = row["figures"], row["length"]
    seconds = found["decode_seconds"]
    on_device = row["name"] in (GPU_ONLY, TRANSFORMERS)
    limit = (
        figures.memory_limit(tokens, found["new_tokens"])
        if on_device
        else figures.copy_limit(tokens)
    )
    kind = "memory" if on_device else "copy"
    return (
        f"{_title(row)}: decode, a token",
        seconds_text(seconds),
        f"{1 / seconds:,.2f}",
        NONE if limit is None else f"{seconds_text(limit)} ({kind})",
        _share(limit, seconds),
        NONE,
        _compared(figures, row, "decode_seconds"),
        NONE,
        _moved(found.get("decode_up_bytes"), _decode_expected(figures, row)),
        NONE,
        NONE,
    )


def _decode_expected(figures: Figures, row: Row) -> int | None:
    """Return the bytes that one decoded token brings up where all KV lie in CPU memory."""
    if row["name"] not in OURS:
        return None
    if row["name"] == GPU_ONLY:
        return 0
    return kv_bytes(figures.shape, row["length"], figures.element_bytes)


def _over_weights(found: Mapping[str, Any]) -> str:
    planned = found.get("planned_bytes")
    beside = f" ({gib_text(planned['over_weights_bytes'])})" if planned else ""
    return gib_text(found.get("over_weights_bytes")) + beside


def _title(row: Row) -> str:
    """Return the subject's name with the settings that tell two of its rows apart."""
    settings = row["settings"]
    parts = [row["name"]]
    if row["name"] == CHUNKED:
        parts.append(
            f"(chunk {settings['chunk_tokens']}, block {settings['kvcache_block_size']}, "
            f"{settings['num_gpu_blocks']} slots)"
        )
    if settings.get("device_memory_gb") is not None:
        parts.append(f"within {settings['device_memory_gb']:g} GiB")
    return " ".join(parts)


COMPARED = {
    "prefill_seconds": {
        GPU_ONLY: TRANSFORMERS,
        LAYERWISE: GPU_ONLY,
        CHUNKED: GPU_ONLY,
        TRANSFORMERS_OFFLOADED: TRANSFORMERS,
    },
    "decode_seconds": {
        GPU_ONLY: TRANSFORMERS,
        LAYERWISE: TRANSFORMERS_OFFLOADED,
        CHUNKED: TRANSFORMERS_OFFLOADED,
    },
}
"""What each row is held against."""


def _compared(figures: Figures, row: Row, key: str) -> str:
    other = COMPARED[key].get(row["name"])
    ratio = _times_as_fast(figures, row["figures"], other, row["length"], key)
    return NONE if ratio is None else f"{ratio:.3f}x {other}"


def _times_as_fast(
    figures: Figures, found: Mapping[str, Any], other: str | None, tokens: int, key: str
) -> float | None:
    reference = figures.first(other, tokens) if other else None
    if reference is None or not reference.get(key) or not found.get(key):
        return None
    return float(reference[key] / found[key])


# --- the ratios that decide ---------------------------------------------------------------------


def _ratios(figures: Figures, tokens: int) -> Iterator[Ratio]:
    resident, layerwise, chunked = (figures.first(name, tokens) for name in OURS)
    if resident is not None:
        yield from _speed(figures, tokens, GPU_ONLY, resident, "prefill_seconds")
        yield _limit_ratio(figures, tokens, GPU_ONLY, resident)
        yield from _decode_over_memory(figures, tokens, resident)
        yield from _speed(figures, tokens, GPU_ONLY, resident, "decode_seconds")
    if layerwise is not None:
        yield from _speed(figures, tokens, LAYERWISE, layerwise, "prefill_seconds")
        yield from _same_bits(resident, layerwise)
        yield Ratio(f"{LAYERWISE} over weights, GiB", gib_text(layerwise["over_weights_bytes"]))
    if chunked is not None:
        yield _limit_ratio(figures, tokens, CHUNKED, chunked)
        yield Ratio(f"{CHUNKED} over weights, GiB", gib_text(chunked["over_weights_bytes"]))
    for name, found in ((LAYERWISE, layerwise), (CHUNKED, chunked)):
        if found is not None and found["decode_seconds"] is not None:
            share = _share(figures.copy_limit(tokens), found["decode_seconds"])
            yield Ratio(f"{name} decode, share of the copy limit", share)
            yield from _speed(figures, tokens, name, found, "decode_seconds")
    for name, found in zip(OURS, (resident, layerwise, chunked), strict=True):
        if found is not None and len(found["all_prefill_seconds"]) > 1:
            verdict = "yes" if found["repeats_equal"] else "NO"
            yield Ratio(f"{name}, all repeats equal bit for bit", verdict)
    yield from _same_tokens(figures, tokens)


def _speed(
    figures: Figures, tokens: int, name: str, found: Mapping[str, Any], key: str
) -> Iterator[Ratio]:
    other = COMPARED[key][name]
    ratio = _times_as_fast(figures, found, other, tokens, key)
    if ratio is not None:
        what = key.removesuffix("_seconds")
        yield Ratio(f"{name} {what}, times as fast as {other}", f"{ratio:.3f}")


def _limit_ratio(figures: Figures, tokens: int, name: str, found: Mapping[str, Any]) -> Ratio:
    share = _share(figures.prefill_limit(tokens), found["prefill_seconds"])
    return Ratio(f"{name} prefill, share of the compute limit", share)


def _decode_over_memory(figures: Figures, tokens: int, found: Mapping[str, Any]) -> Iterator[Ratio]:
    limit = figures.memory_limit(tokens, found["new_tokens"])
    if limit is not None and found["decode_seconds"] is not None:
        ratio = found["decode_seconds"] / limit
        yield Ratio(f"{GPU_ONLY} decode, times the memory limit", f"{ratio:.3f}")


def _same_bits(resident: Mapping[str, Any] | None, layerwise: Mapping[str, Any]) -> Iterator[Ratio]:
    """Compare the logits' digests where equal settings promise equal bits."""
    if resident is None:
        return
    promised = all(
        resident[key] == layerwise[key] for key in ("chunk_tokens", "attend_tokens", "kernel")
    )
    pairs = list(zip(resident["logits_digest"], layerwise["logits_digest"], strict=False))
    equal = sum(one == other for one, other in pairs)
    verdict = f"{equal} of {len(pairs)} equal"
    note = "" if promised else " (not promised: chunk_tokens, attend_tokens or kernel differ)"
    yield Ratio(f"{LAYERWISE} logits, bit for bit those of {GPU_ONLY}", verdict + note)


def _same_tokens(figures: Figures, tokens: int) -> Iterator[Ratio]:
    """Count the tokens on which the subjects agree with transformers on the device alone."""
    reference = figures.first(TRANSFORMERS, tokens)
    for name in (*OURS, TRANSFORMERS_OFFLOADED):
        found = figures.first(name, tokens)
        if reference is not None and found is not None:
            pairs = list(zip(reference["token_ids"], found["token_ids"], strict=False))
            equal = sum(one == other for one, other in pairs)
            yield Ratio(
                f"{name} tokens, equal to those of {TRANSFORMERS}", f"{equal} of {len(pairs)}"
            )


# --- cells --------------------------------------------------------------------------------------


def seconds_text(seconds: float | None) -> str:
    """Return a time in s or ms."""
    if seconds is None:
        return NONE
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.3f} ms"


def _share(limit: float | None, seconds: float) -> str:
    return NONE if limit is None else f"{limit / seconds:.3f}"


def gib_text(count: float | None) -> str:
    """Return a number of bytes in GiB."""
    return NONE if count is None else f"{count / 2**30:.3f}"


def _moved(moved: float | None, expected: int | None) -> str:
    if moved is None or expected is None:
        return NONE
    share = f" ({moved / expected:.3f})" if expected else ""
    return f"{moved / 1e9:.3f}{share}"
