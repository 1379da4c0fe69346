"""The main path: samples, streams, engines, score, record, report."""

from __future__ import annotations

import functools
import re
import statistics
import sys
import time
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends.base import ConfigurationError, Generation, Request, RequestError
from ruler_bench import manifest, model_files
from ruler_bench.answer import check_answer
from ruler_bench.answer_prefix import check_answer_prefix
from ruler_bench.config import Cell, NamedBackend, as_indices
from ruler_bench.errors import UsageError, one_line
from ruler_bench.folders import cache_dir, folder_of
from ruler_bench.host import cannot_cancel, check_arm, checked_factory, described, settings_of_arm
from ruler_bench.journal import Journal, by_arm, prompt_hash
from ruler_bench.kept import BuildLife
from ruler_bench.leak.arms import (
    CANCEL,
    ENGINE_PER_SAMPLE,
    ENGINE_PER_SAMPLE_IN_PROCESS,
    FILL,
    ONE_ENGINE,
    REFERENCES,
    Arm,
    kind_of,
    variant_of,
)
from ruler_bench.leak.join import arm_facts
from ruler_bench.lives import (
    Failure,
    Life,
    LocalLife,
    ProcessLife,
    Reply,
    StartFailed,
    kill_processes,
)
from ruler_bench.overlap import check_overlap, may_overlap
from ruler_bench.progress import Progress
from ruler_bench.questions import Asked, Questions
from ruler_bench.records import Record, RecordingError
from ruler_bench.report import Page, Run, Section, write_page, write_predictions, write_reports
from ruler_bench.score import score
from ruler_bench.streams import BESIDE, Left, Step, Stream, streams
from ruler_bench.suspects import audited, suspects, suspicious
from ruler_bench.tasks import DataSpec, Sample
from ruler_bench.tokenizer import Tokenizer, has_tokenizer, load_tokenizer

if TYPE_CHECKING:
    from ruler_bench.leak.diagnose import Row
    from ruler_bench.leak.verdict import Verdict

__all__ = ["described", "output_text", "run_cell"]

OK, SAMPLE_ERRORS, INTERRUPTED = 0, 1, 130
CANCEL_SECONDS = 0.05
"""How long a request runs before it is cancelled where nothing has been timed yet."""


@dataclass(frozen=True)
class Outcome:
    """What became of one cell: its exit status, and each arm's records, partial after an
    interrupt; with several arms, the verdict over them; of a diagnosis, its table.
    """

    status: int
    runs: list[Run]
    verdict: Verdict | None = None
    diagnosis: list[Row] | None = None


@dataclass(frozen=True)
class Bench:
    """All that the requests of one cell share."""

    cell: Cell
    model: Path
    tokenizer: Tokenizer
    questions: Questions
    streams: list[Stream]
    stop_token_ids: tuple[int, ...]
    journal: Journal
    references: list[NamedBackend] = field(default_factory=list)
    keep: BuildLife | None = None
    shown: set[str] = field(default_factory=set)

    def asked(self) -> list[Asked]:
        """Return every question that the run asks."""
        return [self.questions.asked(step) for one in self.streams for step in one.steps]

    def harness_arguments(self) -> dict[str, Any]:
        """Return what the harness knows of a backend's constructor arguments (backends.base)."""
        return harness_arguments(self.cell, self.model, self.context_tokens)

    @functools.cached_property
    def vocabulary(self) -> int | None:
        """Tokens that the model knows, or None where its folder does not say."""
        return model_files.vocabulary_size(self.model)

    @functools.cached_property
    def context_tokens(self) -> int:
        """Return the context that the engine is built for, the same for any choice of samples.

        Where another tokenizer measured the samples, what they take is rounded up to a quarter of
        the length, so that a folder can grow.
        """
        needed = max(one.question.tokens for one in self.asked())
        context = least_context_tokens(self.cell, self.model, self.tokenizer)
        if needed > context:
            step = max(1, self.cell.length // 4)
            context = -(-needed // step) * step
        positions = model_files.max_positions(self.model)
        return context if positions is None else min(context, positions)


def harness_arguments(cell: Cell, model: Path, context_tokens: int) -> dict[str, Any]:
    """Return a value for each of `backends.base.HARNESS_ARGUMENTS`."""
    return {
        "model_path": str(model),
        "device": cell.device,
        "threads": cell.threads,
        "max_model_len": context_tokens,
        "dtype": "auto",
        "run_folder": str(cell.folder),
    }


def least_context_tokens(cell: Cell, model: Path, tokenizer: Tokenizer) -> int:
    """Return the context that an engine needs where the model's own tokenizer measures samples.

    A BOS takes one token more than RULER counts.
    """
    context = cell.length + tokenizer.adds_bos
    positions = model_files.max_positions(model)
    return context if positions is None else min(context, positions)


def run_cell(
    cell: Cell,
    overwrite: bool = False,
    keep: BuildLife | None = None,
    settled: Collection[str] = (),
) -> Outcome:
    """Run a cell's samples, or those still missing, and write its reports.

    Args:
        cell: what to run.
        overwrite: start its folder anew.
        keep: lends the engine of an arm that has one for all samples, for callers that keep it
            from cell to cell; None builds one for the cell.
        settled: arms of which nothing is asked; what is recorded of them counts.

    Raises:
        UsageError, ConfigurationError: a setting is wrong; nothing was run.
    """
    model = check_cell(cell)
    with manifest.locked_folder(cell.folder) as folder:
        bench = prepared(cell, model, overwrite, keep)
        journal = bench.journal
        status, ran = run_streams(bench, settled)
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


def prepared(
    cell: Cell,
    model: Path,
    overwrite: bool = False,
    keep: BuildLife | None = None,
    only_look: bool = False,
) -> Bench:
    """Make the samples, read what is recorded, and check all that shows without an engine.

    Args:
        cell: what to run, checked by `check_cell`.
        model: its folder.
        overwrite: see `run_cell`.
        keep: likewise.
        only_look: the folder is left as it is.

    Raises:
        UsageError: a setting is wrong, or the folder holds something else.
    """
    counter, encoder = load_tokenizers(cell, model)
    data = data_spec(cell, counter)
    bench = Bench(
        cell=cell,
        model=model,
        tokenizer=encoder,
        questions=Questions(data, encoder, cache_dir()),
        streams=planned(cell),
        stop_token_ids=model_files.stop_token_ids(model),
        journal=Journal(cell, data, model, overwrite, only_look),
        references=list(cell.references),
        keep=keep,
    )
    bench.questions.load(step for one in bench.streams for step in one.steps)
    check_answer_prefix(bench.questions.samples(), cell.task)
    check_tokens(bench)
    bench.journal.verify(recorded_streams(bench), bench.questions, cell)
    return bench


def with_advice_that_works(bench: Bench, error: ConfigurationError) -> ConfigurationError:
    """Return an error of a backend without the advice to build it for less than the samples take.

    An engine does not know the samples; a length that holds one of them is named instead.
    """
    needed = max(one.question.tokens for one in bench.asked())
    found = LOWER_CONTEXT.search(str(error))
    if found is None or int(found[2]) >= needed:
        return error
    length = int(found[2]) - (bench.context_tokens - bench.cell.length)
    advice = "raise that limit, or take a smaller model"
    if length > 0 and bench.questions.fits(length):
        advice = f"use length={length} or less, which fits, or raise that limit"
    return UsageError(str(error).replace(found[0], advice))


LOWER_CONTEXT = re.compile(
    r"lower backend\.max_model_len from (\d+) to (\d+), the largest that fits"
)
"""What our engine advises where its memory plan fits for shorter requests."""


def diagnosis_of(bench: Bench, run: Run) -> list[Row] | None:
    """Return the answers to the hypotheses; None where none are asked, or nothing is recorded."""
    if not bench.cell.is_diagnosis or not run.records:
        return None
    from ruler_bench.leak.diagnose import Evidence, diagnose  # noqa: PLC0415 (scipy takes long)

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


def data_spec(cell: Cell, counter: Tokenizer) -> DataSpec:
    """Return what decides the samples of a cell."""
    return DataSpec(
        task=cell.task,
        length=cell.length,
        seed=cell.seed,
        template=cell.template,
        tokenizer=counter,
        qa_data=folder_of(cell.qa_data),
        data=folder_of(cell.data),
    )


def planned(cell: Cell) -> list[Stream]:
    """Return the streams of a cell, cheap arms first; what is recorded, of the first sample."""
    found = streams(cell.arms, cell.ordinals, cell.seed, boundary_units(cell))
    return [one.only(cell.ordinals[:1]) if records_steps(one.arm) else one for one in found]


def records_steps(arm: str) -> bool:
    """Tell whether an arm's engine writes down what it computes."""
    variant = variant_of(arm)
    return variant is not None and variant.records


REFUSED = "refused"
"""In the manifest of a diagnosis: why a backend refused an arm, by the arm's name."""


def recordings(bench: Bench) -> Path:
    """Return the folder of what arms write down of their steps, one folder an arm."""
    return bench.journal.folder / "checkpoints"


def boundary_units(cell: Cell) -> list[int]:
    """Return the lengths around which the arm boundary asks: a block and a chunk, as far as known.

    Raises:
        UsageError: the arm is asked for and the backend has neither.
    """
    keys = ("kvcache_block_size", "chunk_tokens")
    found = [cell.backend_settings.get(key) for key in keys]
    units = list(dict.fromkeys(one for one in found if isinstance(one, int)))
    if not units and "boundary" in cell.arms:
        raise UsageError(
            f"arm boundary: the backend {cell.backend} has no {' or '.join(keys)} to ask around; "
            "set one, or leave the arm out."
        )
    return units


def recorded_streams(bench: Bench) -> list[Stream]:
    """Return the streams of every arm that is recorded, for the samples that there are."""
    records, cell = bench.journal.records, bench.cell
    known = {one.ordinal for one in records if one.ordinal <= max(cell.ordinals)}
    return streams(
        sorted(
            {one.arm for one in records} & set(bench.journal.arms())
            | {*cell.arms, "persistent", *BESIDE}
        ),
        sorted(known | set(cell.ordinals)),
        cell.seed,
        boundary_units(cell),
    )


def check_cell(cell: Cell) -> Path:
    """Check what can be checked before data are made and the engine is started.

    Returns:
        The model's folder.

    Raises:
        UsageError: the model, its length or a setting of the backend is wrong.
    """
    model = model_files.model_folder(cell.model_path)
    check_positions(cell, model)
    checked_factory(cell.backend_settings)
    for arm in cell.arms:
        if not (cell.is_diagnosis and variant_of(arm)):
            check_arm(arm, cell.backend_settings)
    for one in cell.references:
        checked_factory(one.settings)
    return model


def load_tokenizers(cell: Cell, model: Path) -> tuple[Tokenizer, Tokenizer]:
    """Return the tokenizer that measures the samples, and the model's, which the engine gets.

    `tokenizer=` names the first: with a common one, different models get the same questions. It
    serves as the model's too where that folder has none.
    """
    if cell.tokenizer == cell.model_path:
        own = load_tokenizer(str(model), cell.chat)
        return own, own
    counter = load_tokenizer(cell.tokenizer, cell.chat)
    return counter, load_tokenizer(str(model)) if has_tokenizer(model) else counter


def run_streams(bench: Bench, settled: Collection[str] = ()) -> tuple[int, list[Stream]]:
    """Run every stream of the cell; records are on disk.

    Returns:
        The exit status so far, and the streams as they were run or were to be run.
    """
    ran: list[Stream] = []
    try:
        for stream in bench.streams:
            chosen = narrowed(bench, stream)
            ran.append(chosen)
            if stream.arm in settled:
                continue
            try:
                run_stream(bench, chosen)
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


def check_positions(cell: Cell, model: Path) -> None:
    """Refuse a length beyond the model's positions; warn beyond what it is known to be good for."""
    positions = model_files.max_positions(model)
    if positions is not None and cell.length > positions:
        raise UsageError(
            f"length={cell.length}: the model {cell.model} has {positions} positions "
            f"(max_position_embeddings); use length={positions} or less."
        )
    good = cell.good_length_tokens
    if good is not None and cell.length > good:
        print(
            f"warning: length={cell.length}: the model {cell.model} is known to be good up to "
            f"{good} tokens; misses beyond may be its own.",
            file=sys.stderr,
        )


def check_tokens(bench: Bench) -> None:
    """Refuse prompts that the model cannot take: too long, or of another vocabulary."""
    vocabulary = bench.vocabulary
    questions = [one.question for one in bench.asked()]
    largest = max(max(one.prompt_token_ids) for one in questions)
    if vocabulary is not None and largest >= vocabulary:
        raise UsageError(
            f"the tokenizer gives token {largest}, the model {bench.cell.model} has a vocabulary "
            f"of {vocabulary}: they do not belong together; name the model's own tokenizer."
        )
    positions = model_files.max_positions(bench.model)
    needed = max(one.tokens for one in questions)
    allowed = bench.cell.backend_settings.get("max_model_len")
    if isinstance(allowed, int) and needed > allowed:
        raise UsageError(
            f"backend.max_model_len={allowed}: a prompt with its generation takes {needed} tokens; "
            "set it to that or more, or null for what is needed."
        )
    if positions is not None and needed > positions:
        raise UsageError(
            f"length={bench.cell.length}: a prompt with its generation takes {needed} tokens of "
            f"the model {bench.cell.model}, which has {positions} positions "
            "(max_position_embeddings); use a smaller length."
        )


def run_stream(bench: Bench, stream: Stream) -> None:
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
        return
    asked_again = {one.step for one in pending}
    kept = [one for one in done if one.step in own - asked_again]
    with (
        Progress(title, total=len(stream.steps), done=kept) as progress,
        closing(records_of(bench, stream, pending)) as records,
    ):
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


# --- engines ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Started:
    """An engine was built, or could not be."""

    life: Life | None
    seconds: float


@dataclass(frozen=True)
class Answered:
    """A request came back."""

    step: Step
    position: int
    predecessor: int | None
    reply: Reply


Event = Started | Answered


def records_of(
    bench: Bench, stream: Stream, pending: Sequence[Step]
) -> Generator[Record, None, None]:
    """Ask the pending requests; the next of an engine only when the record was taken."""
    arm = arm_of(bench, stream)
    number, earlier = 0, None
    for event in events(bench, stream, pending):
        if isinstance(event, Started):
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


def events(bench: Bench, stream: Stream, pending: Sequence[Step]) -> Iterator[Event]:
    """Yield what happens to the engines of a stream, life by life."""
    if not stream.kind.is_fresh:
        left = list(pending)
        while left:
            for event in one_life(bench, stream, tuple(left)):
                yield event
                if isinstance(event, Answered):
                    left.remove(event.step)
    elif bench.cell.workers == 1:
        for number, step in enumerate(pending):
            yield from one_life(bench, stream, [step], may_fail=number > 0)
    else:
        yield from parallel_lives(bench, stream, pending)


def parallel_lives(bench: Bench, stream: Stream, pending: Sequence[Step]) -> Iterator[Event]:
    """Yield what happens to fresh engines, several at a time; each life in one piece."""

    def live(step: Step) -> list[Event]:
        return list(one_life(bench, stream, [step], may_fail=step is not pending[0]))

    with ThreadPoolExecutor(bench.cell.workers) as pool:
        futures = [pool.submit(live, step) for step in pending]
        try:
            for future in as_completed(futures):
                yield from future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(one.done() for one in futures):
                kill_processes()
                time.sleep(0.05)


def one_life(
    bench: Bench,
    stream: Stream,
    steps: Sequence[Step],
    may_fail: bool = False,
) -> Iterator[Event]:
    """Start an engine and ask it these requests until it is over.

    Args:
        bench: the run.
        stream: whose engine it is.
        steps: at least one.
        may_fail: whether an engine that cannot be built is an error of its first request, as it
            is where others like it were built.
    """
    started = time.perf_counter()
    try:
        life = start_life(bench, stream)
    except StartFailed as error:
        if not (may_fail or error.failure.is_over) or not stream.kind.is_fresh:
            raise cannot_start(bench, stream, error.failure) from error
        yield Started(None, time.perf_counter() - started)
        yield Answered(steps[0], 0, None, Reply(error.failure))
        return
    try:
        yield Started(life, time.perf_counter() - started)
        if may_overlap(life.concurrency, steps):
            yield from overlapping(bench, life, steps)
            return
        predecessor: int | None = None
        for position, step in enumerate(steps):
            reply = ask(bench, life, step)
            if not stream.kind.is_fresh:
                for line in life.printed():
                    print(line, file=sys.stderr)
            yield Answered(step, position, predecessor, reply)
            if isinstance(reply.answer, Failure) and reply.answer.is_over:
                return
            predecessor = step.ordinal
    except KeyboardInterrupt:
        life.interrupt()
        raise
    finally:
        close_life(bench, life)


def overlapping(bench: Bench, life: Life, steps: Sequence[Step]) -> Iterator[Event]:
    """Yield answers as they come, of as many requests at a time as the engine takes.

    Positions are the order in which they were sent. Where the engine is gone, one request is the
    error, and the others that were in flight are asked again, of the next.
    """
    is_over = False
    with closing(life.ask_several([request_of(bench, life, one) for one in steps])) as replies:
        for place, reply in replies:
            for line in life.printed():
                print(line, file=sys.stderr)
            if isinstance(reply.answer, Failure) and reply.answer.is_over:
                if is_over:
                    continue
                is_over = True
            predecessor = steps[place - 1].ordinal if place else None
            yield Answered(steps[place], place, predecessor, reply)


def start_life(bench: Bench, stream: Stream) -> Life:
    """Build an engine for a stream.

    Raises:
        UsageError, ConfigurationError: a setting is wrong.
        StartFailed: the engine's own code failed, or its process died or hung.
    """
    if stream.arm in REFERENCES:
        return start_reference(bench, stream.arm)
    settings = settings_of_arm(stream.arm, bench.cell.backend_settings)
    if records_steps(stream.arm):
        settings |= {"checkpoint": str(recordings(bench) / stream.arm)}
    life = start_one(bench, settings, None if stream.kind.is_fresh else bench.keep)
    cancels = next((one for one in bench.cell.arms if CANCEL in kind_of(one).actions), None)
    if cancels is not None and not life.can_cancel:
        life.close()
        raise cannot_cancel(cancels, bench.cell.backend_settings["_target_"])
    try:
        check_overlap(life.concurrency, stream.arm, bench.cell.arms)
    except UsageError:
        life.close()
        raise
    return life


def start_reference(bench: Bench, arm: str) -> Life:
    """Build the reference's engine, of the first backend that can load the model."""
    while True:
        chosen = bench.references[0]
        try:
            return start_one(bench, chosen.settings, bench.keep)
        except (ConfigurationError, StartFailed) as error:
            if len(bench.references) == 1:
                raise
            print(
                f"arm {arm}: {chosen.name} cannot load the model ({one_line(error)}); takes "
                f"{bench.references[1].name}.",
                file=sys.stderr,
            )
            del bench.references[0]


def start_one(bench: Bench, settings: Mapping[str, Any], keep: BuildLife | None) -> Life:
    """Build one engine, or borrow the one that is kept."""
    build = functools.partial(new_life, bench.cell) if keep is None else keep
    try:
        return build(settings, bench.harness_arguments())
    except ConfigurationError as error:
        raise with_advice_that_works(bench, error) from error


def new_life(cell: Cell, settings: Mapping[str, Any], harness: Mapping[str, Any]) -> Life:
    """Build one engine, in a process of its own unless fresh=inprocess was asked for.

    What an engine leaves in its process must not reach the next one, and one that dies or hangs
    must not take the run with it.
    """
    start = cell.fresh.start
    if start is None:
        return LocalLife(settings, harness)
    return ProcessLife(settings, harness, start, cell.timeout_seconds)


def cannot_start(bench: Bench, stream: Stream, failure: Failure) -> UsageError:
    """Return the error of an engine that cannot be built; its traceback is kept."""
    bench.journal.log_error(f"at the start of the engine, arm {stream.arm}", failure.traceback)
    again = ""
    if bench.journal.arms() or stream.kind.is_fresh:
        again = (
            " Others were built before it: what they held (a port, a lock, memory) may not be free "
            "again; the same command goes on in a new process."
        ) * bool(bench.journal.records)
    target = bench.cell.backend_settings["_target_"]
    if stream.arm in REFERENCES:
        target = bench.references[0].settings["_target_"]
    return UsageError(
        f"backend._target_={target}: the engine of arm {stream.arm} could not be built "
        f"({failure.message}); the traceback is in {bench.journal.error_log}.{again}"
    )


def close_life(bench: Bench, life: Life) -> None:
    """Close the engine; one that fails at it has still answered."""
    failure = life.close()
    if failure is not None:
        bench.journal.log_error("at the end of the engine", failure.traceback)
        print(
            f"warning: the engine failed to close ({failure.message}); "
            f"the traceback is in {bench.journal.error_log}.",
            file=sys.stderr,
        )


# --- requests -----------------------------------------------------------------------------------


def ask(bench: Bench, life: Life, step: Step) -> Reply:
    """Ask one request."""
    request = request_of(bench, life, step)
    if step.action == CANCEL:
        reply = life.ask(request, cancel_after_seconds=half_way(bench))
    else:
        reply = life.ask(request)
    if isinstance(reply.answer, Failure):
        return reply
    try:
        check_answer(reply.answer, request, bench.vocabulary)
    except RequestError as error:
        return replace(reply, answer=Failure(f"{type(error).__name__}: {one_line(error)}"))
    return reply


def request_of(bench: Bench, life: Life, step: Step) -> Request:
    """Return the request of a step."""
    question = bench.questions.asked(step).question
    request = Request(
        # Not the position: what an engine keeps under it must mean the same after a resume.
        request_id=step.step,
        prompt=question.sample.prompt,
        prompt_token_ids=question.prompt_token_ids,
        max_new_tokens=question.sample.tokens_to_generate,
        stop_token_ids=bench.stop_token_ids,
    )
    if step.action == FILL:
        context = life.settings.get("max_model_len")
        if not isinstance(context, int):
            context = bench.context_tokens
        room = context - len(request.prompt_token_ids)
        request = replace(request, max_new_tokens=room, stop_token_ids=())
    return request


def half_way(bench: Bench) -> float:
    """Return half the time that a request of this run takes, as far as is known."""
    known = [
        one.total_seconds
        for one in bench.journal.records
        if one.total_seconds is not None and one.score is not None and one.arm not in REFERENCES
    ]
    return statistics.median(known) / 2 if known else CANCEL_SECONDS


CANCELLED = "cancelled"
"""Finish reason of a request that the arm cancel ended, which is no error."""


def record_of(bench: Bench, step: Step, reply: Reply, place: dict[str, Any]) -> Record:
    """Return the record of a request; a failure of the engine becomes its message."""
    asked = bench.questions.asked(step)
    sample = asked.question.sample
    known = {
        **place,
        "ordinal": step.ordinal,
        "task": sample.task,
        "length": asked.length,
        "expected": sample.outputs,
        "depth": sample.depth,
        "prompt_sha256": prompt_hash(sample),
        "prompt_tokens": len(asked.question.prompt_token_ids),
    }
    generation = reply.answer
    if isinstance(generation, Failure):
        if step.action == CANCEL and generation.message.startswith("RequestCancelled:"):
            return Record(**known, output="", finish_reason=CANCELLED, total_seconds=reply.seconds)
        if generation.traceback:
            bench.journal.log_error(
                f"arm {place['arm']}, ordinal {step.ordinal}", generation.traceback
            )
        return Record(**known, error=generation.message)
    output = decoded(generation, bench.stop_token_ids, bench.tokenizer)
    points = score(bench.cell.task.metric, output, sample.outputs) if asked.scored else None
    if generation.prompt_tokens is not None:
        known["prompt_tokens"] = generation.prompt_tokens
    return Record(
        **known,
        total_seconds=reply.seconds,
        output=output,
        output_tokens=generation.token_ids,
        logits_digest=generation.logits_digest,
        top2_margin=generation.top2_margin,
        finish_reason=generation.finish_reason,
        score=points,
        correct=None if points is None else points == 100,
        ttft_seconds=generation.ttft_seconds,
        decode_seconds=generation.decode_seconds,
        bytes_up=generation.bytes_up,
        bytes_down=generation.bytes_down,
        peak_device_bytes=generation.peak_device_bytes,
        kernel=generation.kernel,
        density=generation.density,
        dense_share=generation.dense_share,
        estimation_seconds=generation.estimation_seconds,
        attention_seconds=generation.attention_seconds,
        copy_hidden_share=generation.copy_hidden_share,
        reused_tokens=generation.reused_tokens,
        retries=generation.retries,
    )


def output_text(generation: Generation, request: Request, tokenizer: Tokenizer) -> str:
    """Return the engine's text, or the decoded tokens without the one that ended it."""
    return decoded(generation, request.stop_token_ids, tokenizer)


def decoded(generation: Generation, stop_token_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Return the engine's text, or the decoded tokens without the stop token that ended it."""
    if generation.text is not None:
        return generation.text
    ids = list(generation.token_ids or ())
    if ids and ids[-1] in stop_token_ids:
        ids.pop()
    return tokenizer.decode(ids)


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
    from ruler_bench.leak.diagnose import diagnosis_section  # noqa: PLC0415 (scipy takes long)

    return [diagnosis_section(diagnosis)]


def prompts_of(samples: Iterable[Sample]) -> Iterator[tuple[str, str]]:
    """Yield hash and text of each sample's prompt."""
    return ((prompt_hash(one), one.prompt) for one in samples)


def write_with_report(
    folder: Path, verdict: Verdict | None, diagnosis: Sequence[Row] | None = None
) -> None:
    """Write the files of a verdict and a diagnosis, and put both under the title of report.md."""
    from ruler_bench.leak.diagnose import markdown_diagnosis  # noqa: PLC0415
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
