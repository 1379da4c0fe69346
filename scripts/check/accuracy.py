"""Right answers at full speed: the needle tasks, on one persistent engine of each kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ruler_bench.records import Record
from ruler_bench.report.tables import markdown_table
from ruler_bench.report.text import human_number, human_seconds, markdown_cell
from ruler_bench.score import cell_score
from ruler_bench.tasks import Question
from scripts.check.bench import Bench, Evidence, Verdict, find_engine, problems_of
from scripts.check.compare import Comparison, compare_arms, difference_table
from scripts.check.engines import engines_of
from scripts.check.ledger import Ledger, steps
from scripts.check.questions import Batch, load_batch, load_task

NAME = "accuracy"
ACCEPTANCE = "acceptance"
ACCEPTANCE_TASK = "niah_single_1"
ACCEPTANCE_SLOTS = 2
SLOTS = (2, 4)


def run(bench: Bench, ledger: Ledger, tasks: Sequence[str], length: int, samples: int) -> None:
    """Ask every engine all samples of all tasks.

    A run that was stopped goes on with the samples that are missing, on a new engine.
    """
    questions = [
        question
        for task in tasks
        for question in load_batch(bench.source, Batch(task, length, samples))
    ]
    context = _context(bench, questions)
    pairs = bench.engines.pairs(SLOTS, context)
    settings = bench.settings(pairs, tasks=list(tasks), length=length, samples=samples)
    ledger.begin(NAME, settings)
    served = steps(enumerate(questions))
    jobs = [
        [ledger.stream(f"{NAME}/{engine.name}", engine, served, whole=False)]
        for engine in engines_of(pairs)
    ]
    bench.run(ledger, jobs, context, tasks)


def _context(bench: Bench, questions: Sequence[Question]) -> int:
    return bench.context(max(question.tokens for question in questions))


def judge(ledger: Ledger, settings: dict[str, Any]) -> Verdict:
    """Compare each engine with its counterpart, score all, and list where settings part."""
    expected = len(settings["tasks"]) * settings["samples"]
    names = [one["name"] for one in settings["engines"]]
    comparisons = [
        compare_arms(ledger, f"{NAME}/{offloaded}", f"{NAME}/{resident}", expected)
        for offloaded, resident in settings["pairs"]
    ]
    evidence = Evidence(comparisons, problems_of(ledger, NAME, ()))
    finished = [one for name in names for one in _finished(ledger, name)]
    right = sum(record.correct is True for record in finished)
    summary = f"{right} of {expected * len(names)} answers right; {evidence.counts}"
    parts = [
        f"{settings['samples']} samples of each task at {settings['length']} tokens, one "
        "persistent engine for all tasks. Scores are RULER's; in brackets the answers with full "
        "score.",
        _score_table(ledger, names, settings),
        *evidence.parts(),
        *_across(ledger, settings["pairs"], expected),
    ]
    return Verdict(NAME, evidence.passed, summary, tuple(parts))


def _finished(ledger: Ledger, engine: str) -> list[Record]:
    return [one for one in ledger.records(f"{NAME}/{engine}") if one.error is None]


def _score_table(ledger: Ledger, names: Sequence[str], settings: dict[str, Any]) -> str:
    rows = []
    for name in names:
        records = _finished(ledger, name)
        cells = [_score_cell(task, records) for task in settings["tasks"]]
        lives = len({record.life for record in records})
        seconds = sum(record.total_seconds or 0 for record in records)
        rows.append((name, *cells, str(lives), human_seconds(seconds)))
    return markdown_table(("engine", *settings["tasks"], "engines started", "time"), rows)


def _score_cell(task: str, records: Sequence[Record]) -> str:
    chosen = [record for record in records if record.task == task]
    if not chosen:
        return "-"
    outputs = [record.output or "" for record in chosen]
    points = cell_score(load_task(task).metric, outputs, [one.expected for one in chosen])
    right = sum(record.correct is True for record in chosen)
    return f"{human_number(points, 2)} ({right}/{len(chosen)})"


def _across(ledger: Ledger, pairs: Sequence[Sequence[str]], expected: int) -> list[str]:
    """Return where engines with other settings chose other tokens, in Markdown."""
    first = pairs[0]
    others = [pair for pair in pairs if pair[1] != first[1]]
    found: list[Comparison] = [
        compare_arms(ledger, f"{NAME}/{one}", f"{NAME}/{other}", expected, tokens_only=True)
        for pair in others
        for one, other in zip(pair, first, strict=True)
    ]
    if not found:
        return []
    differences = [one for each in found for one in each.differences]
    title = (
        f"Across settings, where only near ties may part: {len(differences)} answers with other "
        f"tokens among {sum(one.requests for one in found)} pairs."
    )
    return [title, difference_table(differences)] if differences else [title]


# --- the founding case --------------------------------------------------------------------------


def run_acceptance(bench: Bench, ledger: Ledger, length: int, samples: int) -> None:
    """Ask one persistent engine; then ask each miss again, of a fresh engine in a new process."""
    questions = load_batch(bench.source, Batch(ACCEPTANCE_TASK, length, samples))
    context = _context(bench, questions)
    pair = bench.engines.chunked_pair(ACCEPTANCE_SLOTS, context)
    settings = bench.settings([pair], length=length, samples=samples)
    ledger.begin(ACCEPTANCE, settings)
    engine = find_engine([pair], pair.offloaded.name)
    served = steps(enumerate(questions))
    tasks = [ACCEPTANCE_TASK]
    stream = ledger.stream(_PERSISTENT, engine, served, whole=True)
    bench.run(ledger, [[stream]], context, tasks)
    missed = {record.ordinal for record in ledger.records(_PERSISTENT) if not record.correct}
    again = [
        [ledger.stream(f"{_AGAIN}/{step.number}", engine, [step], whole=True)]
        for step in served
        if step.number in missed
    ]
    bench.run(ledger, again, context, tasks)


_PERSISTENT = f"{ACCEPTANCE}/persistent"
_AGAIN = f"{ACCEPTANCE}/again"


def judge_acceptance(ledger: Ledger, settings: dict[str, Any]) -> Verdict:
    """Say how many are right, and of each miss whether a fresh engine answers the same."""
    records = ledger.records(_PERSISTENT)
    missed = [record for record in records if not record.correct]
    right, samples = len(records) - len(missed), settings["samples"]
    arms = {record.ordinal: f"{_AGAIN}/{record.ordinal}" for record in missed}
    comparisons = [compare_arms(ledger, arm, _PERSISTENT, 1) for arm in arms.values()]
    problems = problems_of(ledger, ACCEPTANCE, [_PERSISTENT])
    if len(records) < samples:
        problems.append(f"{samples - len(records)} of {samples} samples are missing")
    evidence = Evidence(comparisons, problems)
    own = sum(one.passed for one in comparisons)
    summary = f"{right} of {samples} right"
    if missed:
        summary += f"; of {len(missed)} misses, a fresh engine gives the same bits for {own}"
    parts = [
        f"{ACCEPTANCE_TASK} at {settings['length']} tokens, {settings['pairs'][0][0]}, one "
        "persistent engine. Each miss was asked again of a fresh engine in a new process: the "
        "same bits there show that it is the model's own."
    ]
    if missed:
        parts.append(_missed_table(ledger, missed, arms))
        parts += evidence.parts()
    elif problems:
        parts.append("\n".join(f"- {line}" for line in problems))
    return Verdict(ACCEPTANCE, evidence.passed, summary, tuple(parts))


def _missed_table(ledger: Ledger, missed: Sequence[Record], arms: dict[int, str]) -> str:
    rows = []
    for record in missed:
        again = ledger.records(arms[record.ordinal])
        rows.append(
            (
                str(record.ordinal),
                markdown_cell(", ".join(record.expected)),
                _answer(record),
                _answer(again[0]) if again else "not asked again",
            )
        )
    return markdown_table(("ordinal", "expected", "persistent engine", "fresh engine"), rows)


def _answer(record: Record) -> str:
    return markdown_cell(record.error or record.output or "") or "*(empty)*"
