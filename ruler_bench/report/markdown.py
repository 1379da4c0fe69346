"""report.md: the run as one would paste it into an issue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ruler_bench.records import Record
from ruler_bench.report.depth import DEPTH, markdown_depth, write_depth
from ruler_bench.report.means import markdown_means, write_means
from ruler_bench.report.provenance import shared_and_own
from ruler_bench.report.rows import Row, Run, build_rows, finished
from ruler_bench.report.tables import (
    HIDDEN,
    REUSED,
    markdown_runs,
    markdown_table,
    shown_columns,
    write_summary,
)
from ruler_bench.report.text import code_block, human_number, markdown_cell, visible

LISTED_SAMPLES = 100

LEGEND = (
    "Score, correct and interval are over finished samples; errors are samples that failed in the "
    "engine and are not counted as wrong. Nulls are empty outputs, truncated ones were ended by "
    "the token limit. Engines: how many were started to answer these samples, 1 for an unbroken "
    "run. Bytes up and down are KV cache copied to the device and from it. Peak device memory is "
    "that of the whole device on a GPU, and of the cache's own device-side buffers on a CPU."
)
REUSED_TOKENS = (
    " Reused: prompt tokens of a sample whose keys and values an earlier request had left."
)
TRACED = (
    " Copies hidden: of the time that KV copies took on the device, the share during which a "
    "kernel ran, too. The requests were traced for it, so their times are no speed figures."
)

ALL_RIGHT = "None: every sample was answered with full score."
NOTHING_RUN = "None: no sample has been run."


def write_reports(folder: Path, runs: Sequence[Run], verdict: str | None = None) -> None:
    """Write summary.csv and report.md into an existing folder, and what there is of depth.csv,
    means.csv and averages.csv.

    Args:
        folder: where to.
        runs: one entry an arm or run.
        verdict: a section that comes first (`ruler_bench.leak.report.markdown_verdict`).

    Raises:
        OSError: the folder cannot be written, or the disk is full.
        UsageError: a manifest's metric is unknown.
    """
    rows = build_rows(runs)
    write_summary(folder / "summary.csv", rows)
    write_depth(folder / DEPTH, runs, rows)
    write_means(folder, runs, rows)
    (folder / "report.md").write_text(report(runs, rows, verdict), encoding="utf-8", newline="\n")


def report(runs: Sequence[Run], rows: Sequence[Row], verdict: str | None = None) -> str:
    """Return title, verdict, the table, what failed, and the settings in force, in Markdown."""
    title = _name(rows[0]) if len(rows) == 1 else f"{len(rows)} runs"
    parts = [
        f"# RULER: {title}",
        *([verdict] if verdict else []),
        "## Results",
        markdown_runs(rows),
        legend(rows),
        *filter(None, (markdown_means(runs, rows), markdown_depth(runs, rows))),
        "## Samples to look at",
    ]
    failures = [part for run, row in zip(runs, rows, strict=True) for part in _failures(run, row)]
    parts += failures or [ALL_RIGHT if any(run.records for run in runs) else NOTHING_RUN]
    parts += ["## Settings in force", *_settings(runs, rows)]
    return "\n\n".join(parts) + "\n"


def legend(rows: Sequence[Row]) -> str:
    """Return what the columns that are shown mean."""
    columns = shown_columns(rows)
    return LEGEND + REUSED_TOKENS * (REUSED in columns) + TRACED * (HIDDEN in columns)


def _name(row: Row) -> str:
    parts = [
        row.task,
        f"{row.length_tokens} tokens",
        row.backend,
        row.model,
        row.arm,
        row.settings,
    ]
    return ", ".join(markdown_cell(part) for part in parts if part)


# --- settings -----------------------------------------------------------------------------------


def _settings(runs: Sequence[Run], rows: Sequence[Row]) -> Iterator[str]:
    """Yield what all runs share, then what is each one's own."""
    shared, own = shared_and_own([run.manifest for run in runs])
    yield _setting_lines(shared)
    for row, settings in zip(rows, own, strict=True):
        if settings:
            yield f"### {_name(row)}"
            yield _setting_lines(settings)


def _setting_lines(settings: Mapping[str, str]) -> str:
    return code_block([f"{key} = {value}" for key, value in settings.items()])


# --- samples that failed ------------------------------------------------------------------------


def _failures(run: Run, row: Row) -> Iterator[str]:
    """Yield wrong answers and errors of a run; nothing where all is well."""
    wrong = [record for record in finished(run) if not record.correct]
    errors = [record for record in run.records if record.error is not None]
    if not wrong and not errors:
        return
    yield f"### {_name(row)}"
    if wrong:
        yield _found(f"{len(wrong)} of {row.samples} without full score", wrong)
        yield markdown_table(
            ("ordinal", "position", "depth", "score", "ended by", "expected", "got"),
            [_wrong_cells(record) for record in wrong[:LISTED_SAMPLES]],
        )
    if errors:
        yield _found(f"{len(errors)} with an error in the engine", errors)
        yield markdown_table(
            ("ordinal", "position", "error"),
            [
                (str(one.ordinal), str(one.position), markdown_cell(one.error or ""))
                for one in errors[:LISTED_SAMPLES]
            ],
        )


def failures_summary(runs: Sequence[Run]) -> Iterator[str]:
    """Yield a line for each run in which samples failed in the engine, with the first message."""
    for run, row in zip(runs, build_rows(runs), strict=True):
        errors = [record for record in run.records if record.error is not None]
        if errors:
            yield (
                f"{row.task} {row.length_tokens} {row.backend}: {len(errors)} errors in the engine;"
                f" ordinal {errors[0].ordinal}: {visible(errors[0].error or '')}"
            )


def _found(what: str, records: Sequence[Record]) -> str:
    ordinals = ",".join(str(record.ordinal) for record in records)
    more = len(records) - LISTED_SAMPLES
    rest = f" The first {LISTED_SAMPLES} follow, the others are in records.jsonl." * (more > 0)
    return f"{what}: `indices=[{ordinals}]`.{rest}"


def _wrong_cells(record: Record) -> tuple[str, ...]:
    output = record.output or ""
    return (
        str(record.ordinal),
        str(record.position),
        human_number(record.depth, 2),
        human_number(record.score, 2),
        markdown_cell(record.finish_reason or "-"),
        markdown_cell(", ".join(record.expected)),
        markdown_cell(output) if output else "*(empty)*",
    )
