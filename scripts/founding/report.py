"""founding_case.md and its lists, in the layout of the published case."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from backends.engine.faults import FAULTS
from ruler_bench.journal import read_run
from ruler_bench.leak.classes import LEAK
from ruler_bench.leak.join import FRESH, FRESH_AGAIN, PERSISTENT, PERSISTENT_AGAIN, REFERENCE
from ruler_bench.records import Record
from ruler_bench.report.tables import markdown_table
from ruler_bench.report.text import code_block, markdown_cell
from ruler_bench.statistics import score_interval
from scripts.founding.jobs import BEFORE, PARTS, Job, Plan, jobs_of, read_plan, slots_of, state_of

NAME = "founding_case"
SHOWN_CHARACTERS = 80
STRIPS = {
    PERSISTENT: "one engine",
    PERSISTENT_AGAIN: "one engine, again",
    FRESH: "fresh engines",
    FRESH_AGAIN: "fresh engines, again",
    REFERENCE: "without offload",
}
PUBLISHED = {
    "niah_single_1": (19, 0),
    "niah_single_2": (23, None),
    "niah_single_3": (8, None),
    "niah_multikey_1": (16, None),
    "niah_multikey_2": (30, 8),
    "niah_multikey_3": (24, 9),
}
"""Wrong answers of 100 as they were listed, of one engine and of fresh ones: Llama-3.1-8B-Instruct
at 32768 tokens, blocks of 1024, 2 slots. None: nothing was."""


@dataclass(frozen=True)
class Case:
    """What one run left.

    Attributes:
        job: the run.
        answers: records by arm and ordinal.
        verdict: its verdict.json.
        manifest: its manifest.json.
    """

    job: Job
    answers: Mapping[str, Mapping[int, Record]]
    verdict: Mapping[str, Any]
    manifest: Mapping[str, Any]

    @property
    def is_before(self) -> bool:
        """Whether its engines have the fault."""
        return state_of(self.job.part) == BEFORE

    def of(self, arm: str) -> Mapping[int, Record]:
        """Return the answers of an arm by ordinal."""
        return self.answers.get(arm, {})

    def wrong(self, arm: str) -> list[Record]:
        """Return what an arm answered wrongly, or failed to answer, in order."""
        return [one for _, one in sorted(self.of(arm).items()) if one.correct is not True]

    @property
    def is_as_it_must(self) -> bool:
        """Whether the verdict is leak before, and nothing after."""
        if self.is_before:
            return bool(self.verdict["verdict"] == LEAK)
        return bool(self.verdict["status"] == 0)


def read_case(job: Job) -> Case | None:
    """Return what a run left; None where it has not come to a verdict.

    Raises:
        UsageError: a file of it is damaged.
    """
    verdict = job.folder / "verdict.json"
    run = read_run(job.folder) if verdict.exists() else None
    if run is None:
        return None
    answers: dict[str, dict[int, Record]] = {}
    for record in run.records:
        answers.setdefault(record.arm, {})[record.ordinal] = record
    return Case(job, answers, json.loads(verdict.read_text(encoding="utf-8")), run.manifest)


def sentence_of(job: Job) -> str:
    """Return the verdict on a run in one sentence."""
    case = read_case(job)
    return "no verdict" if case is None else str(case.verdict["sentence"])


def write(out: Path) -> bool:
    """Write the page, the lists and the rows from what the folders hold.

    Returns:
        Whether all was asked, and every verdict is as it must be.

    Raises:
        UsageError: nothing was asked yet, or a file is damaged.
    """
    plan = read_plan(out)
    jobs = [job for part in PARTS for job in jobs_of(plan, part, out)]
    found = [(job, read_case(job)) for job in jobs]
    cases = [case for _, case in found if case is not None]
    missing = [job.name for job, case in found if case is None]
    _put(out / f"{NAME}.md", page(plan, cases, missing))
    rows = [row for case in cases for row in _rows(case)]
    _put(out / f"{NAME}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    runs = [_run_json(case) for case in cases]
    _put(out / f"{NAME}.json", json.dumps({"plan": asdict(plan), "runs": runs}, indent=2) + "\n")
    for name, arm in (("persistent", PERSISTENT), ("fresh", FRESH)):
        _put_csv(out / f"{name}_engine_errors.csv", cases, arm)
    print(out / f"{NAME}.md", flush=True)
    return not missing and all(case.is_as_it_must for case in cases)


def _put(path: Path, text: str) -> None:
    """Replace a file in one step: several parts may write it."""
    part = path.with_name(f".{os.getpid()}.{path.name}")
    part.write_text(text, encoding="utf-8", newline="\n")
    part.replace(path)


def _put_csv(path: Path, cases: Iterable[Case], arm: str) -> None:
    """Write the wrong answers of an arm, in the columns of the published lists and the part."""
    part = path.with_name(f".{os.getpid()}.{path.name}")
    with part.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("part", "task", "index", "expected", "output"))
        for case in cases:
            for one in case.wrong(arm):
                answer = one.output if one.error is None else f"error: {one.error}"
                writer.writerow(
                    (case.job.part, one.task, one.ordinal, "; ".join(one.expected), answer)
                )
    part.replace(path)


def _rows(case: Case) -> Iterator[dict[str, Any]]:
    verdicts = {one["ordinal"]: one["verdict"] for one in case.verdict["indices"]}
    for ordinal, record in sorted(case.of(PERSISTENT).items()):
        yield {
            "part": case.job.part,
            "task": case.job.task,
            "index": ordinal,
            "expected": record.expected,
            "verdict": verdicts.get(ordinal),
            "position": record.position,
            "prompt_tokens": record.prompt_tokens,
            **{
                arm: None if one is None else {"output": one.output, "error": one.error}
                for arm in STRIPS
                for one in [case.of(arm).get(ordinal)]
            },
        }


def _run_json(case: Case) -> dict[str, Any]:
    kept = ("command", "started", "finished", "device", "versions", "backend_in_force", "fresh")
    return {
        "part": case.job.part,
        "task": case.job.task,
        "verdict": case.verdict["verdict"],
        "sentence": case.verdict["sentence"],
        "counts": case.verdict["counts"],
        "excluded_leak_rate": case.verdict["excluded_leak_rate"],
        "seconds": {arm: round(_seconds(case, arm), 1) for arm in case.answers},
        **{key: case.manifest.get(key) for key in kept},
    }


def _seconds(case: Case, arm: str) -> float:
    """Return what an arm's requests took, without its engines' starts."""
    return sum(one.total_seconds or 0.0 for one in case.of(arm).values())


# --- the page -----------------------------------------------------------------------------------


def page(plan: Plan, cases: Sequence[Case], missing: Sequence[str]) -> str:
    """Return the whole page in Markdown."""
    fault = FAULTS[plan.fault]
    parts = [
        "# The founding case, replayed",
        "Made by `scripts/founding_case.py`. Before: one engine with the seeded fault "
        f"`{plan.fault}` ({markdown_cell(fault.description)} Its kind in public: {fault.source}). "
        "After: the same engine without it. "
        f"{plan.samples} samples of each task at {plan.length} tokens, probe model, "
        f"blocks of {plan.block_tokens}, chunks of {plan.chunk_tokens} tokens, {_device(cases)}.",
        _fresh_words(plan),
    ]
    if missing:
        parts.append(f"Not asked yet: {', '.join(missing)}.")
    parts += ["## Right answers", _score_table(cases), _published(plan)]
    for part in PARTS:
        of_part = [case for case in cases if case.job.part == part]
        if of_part:
            fault_words = (
                f"`backend.fault={plan.fault}`" if state_of(part) == BEFORE else "no fault"
            )
            parts.append(f"## {state_of(part).title()}, {slots_of(part)} slots ({fault_words})")
            parts += [text for case in of_part for text in _section(case)]
    if cases:
        parts += ["## Commands", code_block([_command(case) for case in cases])]
    return "\n\n".join(parts) + "\n"


def _device(cases: Sequence[Case]) -> str:
    devices = sorted({str(case.manifest.get("device")) for case in cases})
    return ", ".join(map(markdown_cell, devices)) or "no device yet"


def _fresh_words(plan: Plan) -> str:
    if plan.fresh == "all":
        return "Fresh: each sample was asked of a new engine in a new process, twice over."
    return (
        "Fresh: a new engine in a new process for each sample, twice over, and not for all: for "
        "those whose answer is wrong, failed, or is not the same in all other arms, and for "
        f"{plan.audit} drawn by the seed whatever their answers were. The others count as not "
        "asked (`-` in the strips), the verdict is over those that were asked, and what it "
        "excludes rests on the drawn ones alone."
    )


def _score_table(cases: Sequence[Case]) -> str:
    titles = (
        "task", "engine", "slots", "one engine", "95% interval", "first wrong", "fresh engines",
        "without offload", "verdict", "time",
    )  # fmt: skip
    return markdown_table(titles, [_score_row(case) for case in cases])


def _score_row(case: Case) -> tuple[str, ...]:
    wrong = case.wrong(PERSISTENT)
    answered = [one for one in case.of(PERSISTENT).values() if one.score is not None]
    interval = score_interval([one.score for one in answered if one.score is not None])
    return (
        case.job.task,
        state_of(case.job.part),
        str(slots_of(case.job.part)),
        _right(case, PERSISTENT),
        "-" if interval is None else f"{interval.low:.1f} to {interval.high:.1f}",
        str(wrong[0].ordinal) if wrong else "-",
        _right(case, FRESH),
        _right(case, REFERENCE),
        str(case.verdict["verdict"]),
        f"{_seconds(case, PERSISTENT):.0f} s",
    )


def _right(case: Case, arm: str) -> str:
    """Return how many of an arm's answers are right."""
    asked = len(case.of(arm))
    return f"{asked - len(case.wrong(arm))}/{asked}" if asked else "-"


def _published(plan: Plan) -> str:
    known = [(task, *PUBLISHED[task]) for task in plan.tasks if task in PUBLISHED]
    listed = "; ".join(
        f"{task} {warm} in one engine, {'not listed' if fresh is None else fresh} in fresh ones"
        for task, warm, fresh in known
    )
    time = "Time: of one engine's requests, the start of the engine apart. First wrong: its index."
    if not listed:
        return time
    return (
        f"{time} Published, wrong of 100 (Llama-3.1-8B-Instruct, 32768 tokens, 2 slots of 1024, "
        f"4x RTX 3090): {listed}. That is another model, engine and fault: the layout is to be "
        "compared, not the numbers."
    )


def _section(case: Case) -> Iterator[str]:
    """Yield the sentence, the table of wrong answers and the strips of one run."""
    yield f"### {case.job.task}"
    yield f"**{markdown_cell(str(case.verdict['sentence']), None)}**"
    wrong = case.wrong(PERSISTENT)
    samples = len(case.of(PERSISTENT))
    yield (
        f"One engine: {len(wrong)} of {samples} wrong. Fresh engines were asked "
        f"{len(case.of(FRESH))} of them: {len(case.wrong(FRESH))} wrong."
    )
    if wrong:
        yield markdown_table(
            ("index", "expected", "one engine", "fresh engine"),
            [
                (
                    str(one.ordinal),
                    markdown_cell("; ".join(one.expected)),
                    _answer(one),
                    _answer(case.of(FRESH).get(one.ordinal)),
                )
                for one in wrong
            ],
        )
    yield code_block(_strips(case))


def _answer(record: Record | None) -> str:
    if record is None:
        return "*(not asked)*"
    if record.error is not None:
        return f"*(error)* {markdown_cell(record.error, SHOWN_CHARACTERS)}"
    return markdown_cell(record.output or "", SHOWN_CHARACTERS) or "*(empty)*"


def _strips(case: Case) -> list[str]:
    """Return a letter an index and arm: r right, W wrong, E failed, - not asked."""
    count = max(case.of(PERSISTENT), default=-1) + 1
    width = max(map(len, STRIPS.values())) + 2
    ruler = "".join(f"{start:<10}" for start in range(0, count, 10))[:count]
    lines = ["r right, W wrong, E error, - not asked", " " * width + ruler.rstrip()]
    for arm, words in STRIPS.items():
        if case.of(arm):
            lines.append(words.ljust(width) + strip(case.of(arm).get, count))
    return lines


def strip(record_of: Callable[[int], Record | None], count: int) -> str:
    """Return one letter for each index from 0 on."""
    return "".join(_letter(record_of(ordinal)) for ordinal in range(count))


def _letter(record: Record | None) -> str:
    if record is None:
        return "-"
    if record.error is not None:
        return "E"
    return "r" if record.correct else "W"


def _command(case: Case) -> str:
    """Return what the run is asked, as one would type it."""
    overrides = " ".join(case.job.overrides)
    return f"python -m ruler_bench {overrides} out=runs/{case.job.part}/{case.job.task}"
