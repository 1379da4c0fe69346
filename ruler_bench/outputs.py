"""What a run leaves beside its records: verdict, diagnosis, manifest, reports and predictions."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ruler_bench import manifest
from ruler_bench.bench import Bench, recordings
from ruler_bench.errors import UsageError, one_line
from ruler_bench.journal import prompt_hash
from ruler_bench.leak.diagnosis.evidence import Evidence
from ruler_bench.leak.diagnosis.hypotheses import Row, diagnose
from ruler_bench.leak.diagnosis.table import diagnosis_section, markdown_diagnosis
from ruler_bench.leak.join import arm_facts
from ruler_bench.report import Page, Run, Section, write_page, write_predictions, write_reports
from ruler_bench.tasks import Sample

if TYPE_CHECKING:
    from ruler_bench.leak.verdict import Verdict


REFUSED = "refused"
"""In the manifest of a diagnosis: why a backend refused an arm, by the arm's name."""


def diagnosis_of(bench: Bench, run: Run) -> list[Row] | None:
    """Return the answers to the hypotheses; None where none are asked, or nothing is recorded."""
    if not bench.cell.is_diagnosis or not run.records:
        return None
    return diagnose(
        Evidence.of(
            run.records,
            arm_facts(run.manifest, run.records),
            refused=run.manifest.get(REFUSED) or {},
            recordings=recordings(bench),
        )
    )


def verdict_of(bench: Bench, run: Run) -> Verdict | None:
    """Return the verdict over the arms of a run; None where there is no answer, or one arm in which
    no canary proves a leak.
    """
    arms = {one.arm for one in run.records}
    if all(one.error is not None for one in run.records):
        return None
    from ruler_bench.leak.verdict import judge  # noqa: PLC0415 (scipy takes long)

    prompts = [one.question.sample for one in bench.asked()]
    fresh = run.manifest.get("fresh") or {}
    try:
        found = judge(
            run.records,
            arm_facts(run.manifest, run.records),
            title=bench.cell.task.name,
            prompts={prompt_hash(one): one.prompt for one in prompts},
            audited=fresh.get("audited") if bench.cell.fresh.on == "suspects" else None,
            max_unstable=bench.cell.max_unstable,
            notes=[bench.cell.note] if bench.cell.note else [],
        )
    except UsageError as error:  # the arms have no sample in common yet
        if len(arms) > 1:
            print(f"no verdict: {one_line(error)}", file=sys.stderr)
        return None
    return found if len(arms) > 1 or found.status else None


def write_outputs(
    folder: Path,
    runs: Sequence[Run],
    samples: list[Sample],
    verdict: Verdict | None,
    diagnosis: Sequence[Row] | None = None,
) -> bool:
    """Write manifest, reports and predictions; a full disk is said and does not hide the table.

    Predictions are those of the first arm that asks each sample once.

    Returns:
        Whether all was written.
    """
    try:
        manifest.write_manifest(folder, runs[0].manifest)
        write_reports(folder, runs)
        if verdict is not None or diagnosis is not None:
            write_with_report(folder, verdict, diagnosis)
        page = Page("", verdict_values(verdict), sections=sections_of(diagnosis))
        write_page(folder, runs, page, prompts_of(samples))
        write_predictions(folder, _asked_once(runs), samples)
    except OSError as error:
        print(
            f"error: could not write the reports in {folder}: {one_line(error)}. What was recorded "
            "is kept; make room and run the same command again.",
            file=sys.stderr,
        )
        return False
    return True


def verdict_values(verdict: Verdict | None) -> dict[str, Any] | None:
    """Return a verdict as verdict.json holds it."""
    if verdict is None:
        return None
    from ruler_bench.leak.report import to_json  # noqa: PLC0415 (scipy takes long)

    return to_json(verdict)


def sections_of(diagnosis: Sequence[Row] | None) -> list[Section]:
    """Return what a page says of a diagnosis."""
    if diagnosis is None:
        return []
    return [diagnosis_section(diagnosis)]


def prompts_of(samples: Iterable[Sample]) -> Iterator[tuple[str, str]]:
    """Yield hash and text of each sample's prompt."""
    return ((prompt_hash(one), one.prompt) for one in samples)


def write_with_report(
    folder: Path, verdict: Verdict | None, diagnosis: Sequence[Row] | None = None
) -> None:
    """Write the files of a verdict and a diagnosis, and put both under the title of report.md."""
    from ruler_bench.leak.report import markdown_verdict, write_verdict  # noqa: PLC0415

    write_verdict(folder, verdict, diagnosis)
    path = folder / "report.md"
    title, gap, rest = path.read_text(encoding="utf-8").partition("\n\n")
    parts = [] if diagnosis is None else [markdown_diagnosis(diagnosis)]
    parts += [] if verdict is None else [markdown_verdict(verdict)]
    path.write_text(gap.join([title, *parts, rest]), encoding="utf-8", newline="\n")


def _asked_once(runs: Sequence[Run]) -> Run:
    for run in runs:
        ordinals = [one.ordinal for one in run.records]
        if len(set(ordinals)) == len(ordinals):
            return run
    return Run(runs[0].manifest, [])
