"""The comparison's table: score, interval, density and speed of each policy, and what it lost."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ruler_bench.records import Record
from ruler_bench.report import Run
from ruler_bench.report.rows import build_row
from ruler_bench.report.tables import markdown_table
from ruler_bench.report.text import code_block, human_number, human_seconds, markdown_cell
from ruler_bench.statistics import score_interval
from scripts.accuracy.policies import FULL

NONE = "-"
LISTED = 300


@dataclass(frozen=True)
class CellFigures:
    """One policy's run of a task at a length; the fields are the columns of accuracy.csv.

    Attributes:
        policy, length_tokens, task: which run.
        samples, correct, errors: finished samples, those with full score, and failed ones.
        score, score_low_95, score_high_95: RULER's, with its interval.
        density: mean share of the causal blocks computed; 1 for the policy full.
        dense_share: mean share of layers and chunks that went through dense attention.
        prefill_seconds: mean time to the first token.
        estimation_seconds, attention_seconds: mean parts of it, as far as the engine tells.
        seconds: mean time of a whole request.
        lost, won: samples with a lower or a higher score than with full attention.
    """

    policy: str
    length_tokens: int
    task: str
    samples: int
    correct: int
    errors: int
    score: float | None
    score_low_95: float | None
    score_high_95: float | None
    density: float | None
    dense_share: float | None
    prefill_seconds: float | None
    estimation_seconds: float | None
    attention_seconds: float | None
    seconds: float | None
    lost: int | None
    won: int | None


@dataclass(frozen=True)
class Changed:
    """A sample whose score is not that of full attention."""

    length_tokens: int
    policy: str
    task: str
    ordinal: int
    depth: float | None
    full_score: float
    score: float
    expected: tuple[str, ...]
    output: str


@dataclass(frozen=True)
class Result:
    """What a cell left, and what full attention left of the same samples.

    Attributes:
        policy: title of the policy.
        run: of the cell.
        full: of full attention; None where it was not run.
    """

    policy: str
    run: Run
    full: Run | None

    def figures(self) -> CellFigures:
        """Return the figures of the cell."""
        row = build_row(self.run)
        records = [one for one in self.run.records if one.error is None]
        changed = None if self.full is None else list(self.changed())
        density = _mean(one.density for one in records)
        return CellFigures(
            policy=self.policy,
            length_tokens=row.length_tokens,
            task=row.task,
            samples=row.samples,
            correct=row.correct,
            errors=row.errors,
            score=row.score,
            score_low_95=row.score_low_95,
            score_high_95=row.score_high_95,
            density=1.0 if density is None and self.policy == FULL else density,
            dense_share=_mean(one.dense_share for one in records),
            prefill_seconds=_mean(one.ttft_seconds for one in records),
            estimation_seconds=_mean(one.estimation_seconds for one in records),
            attention_seconds=_mean(one.attention_seconds for one in records),
            seconds=_mean(one.total_seconds for one in records),
            lost=None if changed is None else sum(one.score < one.full_score for one in changed),
            won=None if changed is None else sum(one.score > one.full_score for one in changed),
        )

    def changed(self) -> Iterator[Changed]:
        """Yield the samples whose score is not that of full attention."""
        full = {} if self.full is None else {one.ordinal: one for one in self.full.records}
        for record in self.run.records:
            other = full.get(record.ordinal)
            if other is None or other.score is None or record.score is None:
                continue
            if record.score != other.score:
                yield _changed(self.policy, record, other.score)


def _changed(policy: str, record: Record, full_score: float) -> Changed:
    return Changed(
        length_tokens=record.length,
        policy=policy,
        task=record.task,
        ordinal=record.ordinal,
        depth=record.depth,
        full_score=full_score,
        score=record.score or 0.0,
        expected=record.expected,
        output=record.output or "",
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def write_csv(path: Path, cells: Sequence[CellFigures]) -> None:
    """Write one line a cell."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(
            file, [one.name for one in fields(CellFigures)], lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows(asdict(one) for one in cells)


def render(results: Sequence[Result], facts: dict[str, Any]) -> str:
    """Return the report in Markdown.

    Args:
        results: at least one.
        facts: what to say of the whole: lines under "heading", command lines under "commands".
    """
    cells = [one.figures() for one in results]
    parts = ["# Sparse prefill: accuracy", "\n".join(f"- {one}" for one in facts["heading"])]
    for length in dict.fromkeys(one.length_tokens for one in cells):
        of_length = [one for one in results if one.run.manifest["length"] == length]
        parts += [f"## {length} tokens", *_length_parts(of_length)]
    parts += ["## Commands", code_block(facts["commands"])]
    return "\n\n".join(parts) + "\n"


def _length_parts(results: Sequence[Result]) -> Iterator[str]:
    cells = [one.figures() for one in results]
    yield (
        "Score of RULER, with its 95% interval; Wilson's interval over all answers with full score."
    )
    yield _score_table(cells)
    yield (
        "Means over all samples. Choice and attention are parts of prefill; a dense engine does "
        "not tell them. Lost and won: samples with a lower or higher score than with full "
        "attention."
    )
    yield _cost_table(cells)
    changed = [one for result in results for one in result.changed()]
    lost = [one for one in changed if one.score < one.full_score]
    if lost:
        yield "Lost answers. Depth: of the first needle asked for, 0 is the start of the context."
        yield _lost_table(lost[:LISTED])
        if len(lost) > LISTED:
            yield f"and {len(lost) - LISTED} more, in the runs' records."


def _policies(cells: Sequence[CellFigures]) -> dict[str, list[CellFigures]]:
    found: dict[str, list[CellFigures]] = {}
    for cell in cells:
        found.setdefault(cell.policy, []).append(cell)
    return found


def _score_table(cells: Sequence[CellFigures]) -> str:
    tasks = list(dict.fromkeys(one.task for one in cells))
    rows = []
    for policy, own in _policies(cells).items():
        by_task = {one.task: one for one in own}
        right, samples = sum(one.correct for one in own), sum(one.samples for one in own)
        interval = score_interval([100.0] * right + [0.0] * (samples - right))
        rows.append(
            (
                policy,
                *(_score(by_task.get(task)) for task in tasks),
                human_number(_mean(one.score for one in own), 2),
                f"{right}/{samples}",
                NONE if interval is None else f"{interval.low:.1f} to {interval.high:.1f}",
                str(sum(one.errors for one in own)),
            )
        )
    titles = ("policy", *tasks, "mean score", "full score", "95% interval", "errors")
    return markdown_table(titles, rows)


def _score(cell: CellFigures | None) -> str:
    if cell is None or cell.score is None:
        return NONE
    return f"{human_number(cell.score, 2)} ({cell.score_low_95:.0f} to {cell.score_high_95:.0f})"


def _cost_table(cells: Sequence[CellFigures]) -> str:
    policies = _policies(cells)
    full = _mean(one.prefill_seconds for one in policies.get(FULL, []))
    rows = []
    for policy, own in policies.items():
        densities = [one.density for one in own if one.density is not None]
        prefill = _mean(one.prefill_seconds for one in own)
        rows.append(
            (
                policy,
                human_number(_mean(densities), 4),
                f"{min(densities):.4f} to {max(densities):.4f}" if densities else NONE,
                human_number(_mean(one.dense_share for one in own), 4),
                human_seconds(prefill),
                human_number(full / prefill if full and prefill else None, 3),
                human_seconds(_mean(one.estimation_seconds for one in own)),
                human_seconds(_mean(one.attention_seconds for one in own)),
                human_seconds(_mean(one.seconds for one in own)),
                _sum(one.lost for one in own),
                _sum(one.won for one in own),
            )
        )
    titles = ("policy", "density", "from task to task", "dense share", "prefill",
              "times as fast as full", "choice", "attention", "whole request", "lost",
              "won")  # fmt: skip
    return markdown_table(titles, rows)


def _sum(values: Iterable[int | None]) -> str:
    known = [value for value in values if value is not None]
    return str(sum(known)) if known else NONE


def _lost_table(lost: Sequence[Changed]) -> str:
    rows = [
        (
            one.policy,
            one.task,
            str(one.ordinal),
            human_number(one.depth, 2),
            f"{human_number(one.full_score, 0)} / {human_number(one.score, 0)}",
            markdown_cell(", ".join(one.expected), 60),
            markdown_cell(one.output, 60) or "*(empty)*",
        )
        for one in lost
    ]
    titles = ("policy", "task", "ordinal", "depth", "score full / here", "expected", "got")
    return markdown_table(titles, rows)
