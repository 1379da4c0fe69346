"""The main path: samples, streams, engines, score, record, report."""

from __future__ import annotations

import sys
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from backends.base import ConfigurationError
from ruler_bench import manifest
from ruler_bench.asking import record_of
from ruler_bench.bench import Bench, check_cell, prepared
from ruler_bench.cell import Cell
from ruler_bench.engines import Started, Starting, events
from ruler_bench.errors import one_line
from ruler_bench.journal import by_arm
from ruler_bench.kept import BuildLife
from ruler_bench.leak.arms import (
    ENGINE_PER_SAMPLE,
    ENGINE_PER_SAMPLE_IN_PROCESS,
    ONE_ENGINE,
    REFERENCES,
    Arm,
    variant_of,
)
from ruler_bench.lives import Life
from ruler_bench.outputs import REFUSED, diagnosis_of, verdict_of, write_outputs
from ruler_bench.progress import Progress, RunProgress, shown
from ruler_bench.records import Record, RecordingError
from ruler_bench.report import Run
from ruler_bench.streams import Left, Step, Stream
from ruler_bench.suspects import audited, suspects, suspicious
from ruler_bench.values import as_indices

if TYPE_CHECKING:
    from ruler_bench.leak.diagnosis.hypotheses import Row
    from ruler_bench.leak.verdict import Verdict


OK, SAMPLE_ERRORS, INTERRUPTED = 0, 1, 130


@dataclass(frozen=True)
class Outcome:
    """What became of one cell: its exit status, and each arm's records, partial after an
    interrupt; with several arms, the verdict over them; of a diagnosis, its table.
    """

    status: int
    runs: list[Run]
    verdict: Verdict | None = None
    diagnosis: list[Row] | None = None


def run_cell(
    cell: Cell,
    overwrite: bool = False,
    keep: BuildLife | None = None,
    settled: Collection[str] = (),
    progress: Progress | None = None,
) -> Outcome:
    """Run a cell's samples, or those still missing, and write its reports.

    Args:
        cell: what to run.
        overwrite: start its folder anew.
        keep: lends the engine of an arm that has one for all samples, for callers that keep it
            from cell to cell; None builds one for the cell.
        settled: arms of which nothing is asked; what is recorded of them counts.
        progress: of the command that the cell belongs to; None shows this cell's alone.

    Raises:
        UsageError, ConfigurationError: a setting is wrong; nothing was run.
    """
    with ExitStack() as stack:
        if progress is None:
            progress = stack.enter_context(shown(cell))
        asked = tuple(arm for arm in cell.arms if arm not in settled)
        run = stack.enter_context(progress.run(cell, asked))
        outcome = _run_cell(cell, overwrite, keep, settled, run)
        run.status = outcome.status
        return outcome


def _run_cell(
    cell: Cell,
    overwrite: bool,
    keep: BuildLife | None,
    settled: Collection[str],
    progress: RunProgress,
) -> Outcome:
    model = check_cell(cell)
    with manifest.locked_folder(cell.folder) as folder:
        bench = prepared(cell, model, overwrite, keep)
        journal = bench.journal
        status, ran = run_streams(bench, settled, progress)
        progress.reports()
        run = journal.close(ran, cell.ordinals)
        runs = by_arm(run)
        verdict, diagnosis = verdict_of(bench, run), diagnosis_of(bench, run)
        written = journal.holds_another_run or write_outputs(
            folder, runs, bench.questions.samples(), verdict, diagnosis
        )
    if status == OK and verdict is not None:
        status = verdict.status
    if status == OK and (not written or any(record.error for record in run.records)):
        status = SAMPLE_ERRORS
    return Outcome(status, runs, verdict, diagnosis)


def run_streams(
    bench: Bench, settled: Collection[str], progress: RunProgress
) -> tuple[int, list[Stream]]:
    """Run every stream of the cell; records are on disk.

    Returns:
        The exit status so far, and the streams as they were run or were to be run.
    """
    ran: list[Stream] = []
    progress.counted(
        {
            one.arm: (len(one.steps), len(one.steps) - len(one.left(bench.journal.records).pending))
            for one in bench.streams
            if one.arm not in settled
        }
    )
    try:
        for stream in bench.streams:
            chosen = narrowed(bench, stream)
            ran.append(chosen)
            if stream.arm in settled:
                continue
            try:
                run_stream(bench, chosen, progress)
            except ConfigurationError as error:
                if not (bench.cell.is_diagnosis and variant_of(stream.arm)):
                    raise
                ran.pop()
                refuse(bench, stream.arm, error)
    except KeyboardInterrupt:
        return INTERRUPTED, bench.streams
    except Stopped as stopped:
        print(f"stopped by stop_on={bench.cell.stop_on}: {stopped}", file=sys.stderr)
        return OK, bench.streams
    except ConfigurationError:
        bench.journal.close(bench.streams, bench.cell.ordinals)
        raise
    except RecordingError as error:
        print(f"error: {error}", file=sys.stderr)
        return SAMPLE_ERRORS, bench.streams
    return OK, ran


def refuse(bench: Bench, arm: str, error: ConfigurationError) -> None:
    """Go on without an arm that the backend cannot do, and keep why."""
    print(f"arm {arm}: left out ({one_line(error)})", file=sys.stderr)
    bench.journal.note(
        REFUSED, (bench.journal.manifest.get(REFUSED) or {}) | {arm: one_line(error)}
    )


def narrowed(bench: Bench, stream: Stream) -> Stream:
    """Return a stream, of a fresh arm only the samples that `fresh.on` asks for.

    Which ones they are, and which were drawn for the audit, is put into the manifest.
    """
    cell, journal = bench.cell, bench.journal
    if not stream.kind.is_fresh or cell.fresh.on == "all":
        return stream
    asked = set(cell.ordinals)
    cheap = {one.arm for one in bench.streams if not one.kind.is_fresh}
    records = [one for one in journal.records if one.arm in cheap and one.ordinal in asked]
    found = suspects(records, asked, journal.arms())
    drawn = audited(asked, cell.seed, cell.fresh.audit)
    journal.note(
        "fresh",
        {"on": cell.fresh.on, "seed": cell.seed, "suspects": found, "audited": drawn},
    )
    # What was recorded of other samples, when others were asked for, is kept beside.
    recorded = {one.ordinal for one in journal.finished(stream.arm)}
    return stream.only({*found, *drawn, *recorded})


class Stopped(Exception):  # noqa: N818 (what happened; nothing is wrong with the harness)
    """Two arms contradict each other, and the user asked to stop at that."""


def run_stream(bench: Bench, stream: Stream, progress: RunProgress) -> None:
    """Ask every request of the stream that has no record yet.

    Raises:
        Stopped: a record contradicts another, and `stop_on` asks to stop at that.
    """
    cell, journal = bench.cell, bench.journal
    done = journal.finished(stream.arm)
    own = {one.step for one in stream.steps}
    left = stream.left(journal.records)
    pending = left.pending
    title = f"{cell.task.name} {cell.length} {cell.backend}"
    if len(cell.arms) > 1:
        title = f"{title} {stream.arm}"
    if not pending:
        what = f"all {len(stream.steps)} samples are recorded" if own else "no sample to ask"
        if not left.kept:
            print(f"{title}: {what}", file=sys.stderr)
    for line in about_failures(stream, left):
        print(f"{title}: {line}", file=sys.stderr)
    for record in done:
        check_contradictions(bench, record)
    if not pending:
        progress.without(stream.arm, len(stream.steps))
        return
    asked_again = {one.step for one in pending}
    kept = [one for one in done if one.step in own - asked_again]
    progress.arm(stream.arm, len(stream.steps), kept)
    with closing(records_of(bench, stream, pending, progress)) as records:
        for record in records:
            journal.append(record)
            progress.add(record)
            check_contradictions(bench, record)


def about_failures(stream: Stream, left: Left) -> Iterator[str]:
    """Say what is done about requests that failed after their engine had served others."""
    if left.again:
        yield (
            f"asks {len(left.again)} recorded requests again, too: an engine failed after them, "
            "and only one that has served the same can show whether that was why."
        )
    if left.kept:
        ordinals = sorted({one.ordinal for one in stream.steps if one.step in left.kept})
        yield (
            f"ordinals {_listed(ordinals)} failed after their engine had served others that are "
            "not asked for here, and stay as they are; ask for all of them together to try again."
        )


def _listed(ordinals: Sequence[int]) -> str:
    return ", ".join(as_indices(ordinals))


def check_contradictions(bench: Bench, record: Record) -> None:
    """Stop where the user asked for it and a record contradicts another.

    Raises:
        Stopped: it does.
    """
    if bench.cell.stop_on is None:
        return
    same = [one for one in bench.journal.records if one.ordinal == record.ordinal]
    if suspicious(record, same, bench.journal.arms()):
        raise Stopped(
            f"arm {record.arm} answers ordinal {record.ordinal} otherwise than another arm of the "
            "same settings; the samples after it were not asked."
        )


def records_of(
    bench: Bench, stream: Stream, pending: Sequence[Step], progress: RunProgress
) -> Generator[Record, None, None]:
    """Ask the pending requests; the next of an engine only when the record was taken."""
    arm = arm_of(bench, stream)
    number, earlier = 0, None
    for event in events(bench, stream, pending):
        if isinstance(event, Starting):
            progress.engine_starts()
        elif isinstance(event, Started):
            progress.engine_started(event.seconds)
            earlier = None if event.life is None else event.life.earlier_requests
            settings = None if event.life is None else event.life.settings
            is_first = number == 0
            number = bench.journal.begin_life(arm_of(bench, stream), settings, event.seconds)
            if is_first and event.life is not None:
                show_printed(bench, event.life)
        else:
            place = {
                "arm": arm.name,
                "step": event.step.step,
                "life": number,
                "position": event.position,
                "predecessor": event.predecessor,
                "earlier_requests": earlier,
            }
            yield record_of(bench, event.step, event.reply, place)


def show_printed(bench: Bench, life: Life) -> None:
    """Print what an engine said at its start, such as its memory plan; the same line once a run."""
    for line in life.printed():
        if line not in bench.shown:
            bench.shown.add(line)
            print(line, file=sys.stderr)


def arm_of(bench: Bench, stream: Stream) -> Arm:
    """Return what the manifest says about a stream's arm, its settings in force apart."""
    backend = bench.cell.backend
    if stream.arm in REFERENCES:
        backend = bench.references[0].name
    lifetime = ONE_ENGINE
    if stream.kind.is_fresh:
        is_process = bench.cell.fresh.engine == "process"
        lifetime = ENGINE_PER_SAMPLE if is_process else ENGINE_PER_SAMPLE_IN_PROCESS
    return Arm(
        name=stream.arm,
        lifetime=lifetime,
        backend=backend,
        settings={},
        order=stream.kind.order,
        actions=stream.kind.actions,
    )
