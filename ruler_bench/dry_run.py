"""What a run would do, for `dry_run=true`."""

from __future__ import annotations

from pathlib import Path

from ruler_bench.config import Cell
from ruler_bench.host import memory_plan
from ruler_bench.journal import read_run
from ruler_bench.records import Record
from ruler_bench.run import (
    check_cell,
    harness_arguments,
    least_context_tokens,
    load_tokenizers,
)


def describe_cell(cell: Cell) -> str:
    """Return lines for a person: how many requests, of which size, in which memory and folder.

    Raises:
        UsageError, ConfigurationError: a setting is wrong or the memory plan does not fit, as far
            as that shows without starting the engine.
    """
    model = check_cell(cell)
    run = read_run(cell.folder)
    records = [] if run is None else run.records
    done = {one.ordinal for one in records if one.error is None} & set(cell.ordinals)
    missing = len(cell.ordinals) - len(done)
    lines = [
        f"{cell.task.name} at {cell.length} tokens, {cell.backend} with {cell.model} "
        f"on {cell.device}",
        f"  requests: {missing} to run, {len(done)} recorded already",
        f"  tokens: {missing * cell.length} of prompt and generation, at most",
        f"  expected time: {_expected_time(missing, records)}",
        f"  folder: {cell.folder}",
        *_memory_plan(cell, model),
    ]
    return "\n".join(lines)


def _memory_plan(cell: Cell, model: Path) -> list[str]:
    """Return the engine's plan under its title; nothing for a backend that has none to tell."""
    _, tokenizer = load_tokenizers(cell, model)
    context = least_context_tokens(cell, model, tokenizer)
    lines = memory_plan(cell.backend_settings, harness_arguments(cell, model, context))
    if lines is None:
        return []
    asked = cell.backend_settings.get("max_model_len")
    is_least = asked is None and cell.tokenizer != cell.model_path
    least = ", at least (another tokenizer measures the samples)" if is_least else ""
    return [f"  memory plan{least}:", *(f"    {line}" for line in lines)]


def _expected_time(missing: int, records: list[Record]) -> str:
    seconds = [one.total_seconds for one in records if one.total_seconds is not None]
    if not missing:
        return "none, all is recorded"
    if not seconds:
        return "not known before a first sample has run in this folder"
    mean = sum(seconds) / len(seconds)
    return f"{missing * mean:.0f} s, at {mean:.2f} s a sample as recorded in this folder"
