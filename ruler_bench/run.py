"""The main path: samples, streams, engine, score, record, report."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.base import Backend, ConfigurationError, Generation, Request, RequestError
from ruler_bench import manifest, model_files
from ruler_bench.answer import checked_generation
from ruler_bench.config import Cell
from ruler_bench.errors import UsageError, one_line
from ruler_bench.host import checked_factory, start_backend
from ruler_bench.journal import Journal, prompt_hash
from ruler_bench.progress import Progress
from ruler_bench.records import Record, RecordingError
from ruler_bench.report import Run, write_predictions, write_reports
from ruler_bench.score import score
from ruler_bench.streams import Step, Stream, streams
from ruler_bench.tasks import DataSpec, Question, Sample, load_questions
from ruler_bench.tokenizer import Tokenizer, has_tokenizer, load_tokenizer

OK, SAMPLE_ERRORS, INTERRUPTED = 0, 1, 130


@dataclass(frozen=True)
class Outcome:
    """What became of one cell: its exit status, and its records, partial after an interrupt."""

    status: int
    run: Run


@dataclass(frozen=True)
class Bench:
    """All that the requests of one cell share."""

    cell: Cell
    model: Path
    tokenizer: Tokenizer
    questions: dict[int, Question]
    stop_token_ids: tuple[int, ...]
    journal: Journal

    def harness_arguments(self) -> dict[str, Any]:
        """Return what the harness knows of a backend's constructor arguments (backends.base)."""
        return harness_arguments(self.cell, self.model, self.context_tokens())

    def context_tokens(self) -> int:
        """Return the context that the engine is built for, the same for any choice of samples.

        Where another tokenizer measured the samples, what they take is rounded up to a quarter of
        the length, so that a folder can grow.
        """
        needed = max(question.tokens for question in self.questions.values())
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
    }


def least_context_tokens(cell: Cell, model: Path, tokenizer: Tokenizer) -> int:
    """Return the context that an engine needs where the model's own tokenizer measures samples.

    A BOS takes one token more than RULER counts.
    """
    context = cell.length + tokenizer.adds_bos
    positions = model_files.max_positions(model)
    return context if positions is None else min(context, positions)


def run_cell(cell: Cell, overwrite: bool = False) -> Outcome:
    """Run a cell's samples, or those still missing, and write its reports.

    Raises:
        UsageError, ConfigurationError: a setting is wrong; nothing was run.
    """
    model = check_cell(cell)
    counter, encoder = load_tokenizers(cell, model)
    data = DataSpec(
        task=cell.task,
        length=cell.length,
        seed=cell.seed,
        template=cell.template,
        tokenizer=counter,
    )
    with manifest.locked_folder(cell.folder) as folder:
        journal = Journal(folder, cell, data, model, overwrite)
        questions = load_questions(data, encoder, max(cell.ordinals) + 1, cache_dir())
        bench = Bench(
            cell=cell,
            model=model,
            tokenizer=encoder,
            questions={one: questions[one] for one in cell.ordinals},
            stop_token_ids=model_files.stop_token_ids(model),
            journal=journal,
        )
        check_tokens(bench)
        journal.verify(questions, cell)
        status = run_streams(bench)
        run = journal.close(cell.ordinals)
        written = journal.holds_another_run or write_outputs(
            folder, run, [question.sample for question in questions]
        )
    if status == OK and not written:
        status = SAMPLE_ERRORS
    if status == OK and any(record.error for record in run.records):
        status = SAMPLE_ERRORS
    return Outcome(status, run)


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
    return model


def load_tokenizers(cell: Cell, model: Path) -> tuple[Tokenizer, Tokenizer]:
    """Return the tokenizer that measures the samples, and the model's, which the engine gets.

    `tokenizer=` names the first: with a common one, different models get the same questions. It
    serves as the model's too where that folder has none.
    """
    if cell.tokenizer == cell.model_path:
        own = load_tokenizer(str(model))
        return own, own
    counter = load_tokenizer(cell.tokenizer)
    return counter, load_tokenizer(str(model)) if has_tokenizer(model) else counter


def run_streams(bench: Bench) -> int:
    """Run every stream of the cell and return the exit status so far; records are on disk."""
    try:
        for stream in streams(bench.cell.arms, bench.cell.ordinals):
            run_stream(bench, stream)
    except KeyboardInterrupt:
        return INTERRUPTED
    except ConfigurationError:
        bench.journal.close(bench.cell.ordinals)
        raise
    except RecordingError as error:
        print(f"error: {error}", file=sys.stderr)
        return SAMPLE_ERRORS
    return OK


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
    vocabulary = model_files.vocabulary_size(bench.model)
    largest = max(max(one.prompt_token_ids) for one in bench.questions.values())
    if vocabulary is not None and largest >= vocabulary:
        raise UsageError(
            f"the tokenizer gives token {largest}, the model {bench.cell.model} has a vocabulary "
            f"of {vocabulary}: they do not belong together; name the model's own tokenizer."
        )
    positions = model_files.max_positions(bench.model)
    needed = max(one.tokens for one in bench.questions.values())
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


def cache_dir() -> Path:
    """Return where prepared data are kept: RULER_BENCH_CACHE, else the user's cache folder."""
    named = os.environ.get("RULER_BENCH_CACHE")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ruler_bench"


def run_stream(bench: Bench, stream: Stream) -> None:
    """Ask one engine every sample of the stream that has no record yet."""
    cell, journal = bench.cell, bench.journal
    done = [one for one in journal.finished(stream.arm) if one.ordinal in bench.questions]
    steps_done = {record.step for record in done}
    pending = [step for step in stream.steps if step.step not in steps_done]
    title = f"{cell.task.name} {cell.length} {cell.backend}"
    if not pending:
        print(f"{title}: all {len(stream.steps)} samples are recorded", file=sys.stderr)
        return
    backend, in_force = start_engine(bench)
    try:
        life = journal.begin_life(stream.arm, in_force)
        with Progress(title, total=len(stream.steps), done=done) as progress:
            for record in serve(bench, backend, stream.arm, life, pending):
                journal.append(record)
                progress.add(record)
    finally:
        close_engine(bench, backend)


def start_engine(bench: Bench) -> tuple[Backend, dict[str, Any]]:
    """Build the engine and return it with its settings in force.

    Raises:
        UsageError, ConfigurationError: a setting is wrong, or the engine's own code failed.
    """
    settings = bench.cell.backend_settings
    try:
        backend = start_backend(settings, bench.harness_arguments())
        return backend, described(backend)
    except (ConfigurationError, KeyboardInterrupt):
        raise
    except BaseException as error:
        bench.journal.log_error("at the start of the engine")
        raise UsageError(
            f"backend._target_={settings['_target_']}: the engine could not be built "
            f"({type(error).__name__}: {one_line(error)}); the traceback is in "
            f"{bench.journal.error_log}."
        ) from error


def described(backend: Backend) -> dict[str, Any]:
    """Return an engine's settings in force.

    Raises:
        UsageError: they are no plain JSON object, which the manifest could not hold.
    """
    found = backend.describe()
    try:
        plain = json.loads(json.dumps(found, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"the engine's describe() returned values that JSON does not have ({one_line(error)}); "
            "return numbers, text, lists and dicts."
        ) from error
    if not isinstance(plain, dict):
        raise UsageError(f"the engine's describe() returned {type(found).__name__}, not a dict.")
    return plain


def close_engine(bench: Bench, backend: Backend) -> None:
    """Close the engine; one that fails at it has still answered."""
    try:
        backend.close()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        bench.journal.log_error("at the end of the engine")
        print(
            f"warning: the engine failed to close ({type(error).__name__}: {one_line(error)}); "
            f"the traceback is in {bench.journal.error_log}.",
            file=sys.stderr,
        )


def serve(
    bench: Bench, backend: Backend, arm: str, life: int, pending: list[Step]
) -> Iterator[Record]:
    """Ask the pending samples one after the other; the next only when the record was taken."""
    predecessor: int | None = None
    for position, step in enumerate(pending):
        place = {
            "arm": arm,
            "step": step.step,
            "life": life,
            "position": position,
            "predecessor": predecessor,
        }
        yield ask(bench, backend, bench.questions[step.ordinal], place)
        predecessor = step.ordinal


def ask(bench: Bench, backend: Backend, question: Question, place: dict[str, Any]) -> Record:
    """Ask one question; a failure of the engine becomes a record with its message."""
    sample = question.sample
    known = {
        **place,
        "ordinal": sample.ordinal,
        "task": sample.task,
        "length": bench.cell.length,
        "expected": sample.outputs,
        "depth": sample.depth,
        "prompt_sha256": prompt_hash(sample),
        "prompt_tokens": len(question.prompt_token_ids),
    }
    request = Request(
        # Not the position: what an engine keeps under it must mean the same after a resume.
        request_id=place["step"],
        prompt=sample.prompt,
        prompt_token_ids=question.prompt_token_ids,
        max_new_tokens=sample.tokens_to_generate,
        stop_token_ids=bench.stop_token_ids,
    )
    started = time.perf_counter()
    try:
        generation = checked_generation(backend.generate(request))
        known["total_seconds"] = time.perf_counter() - started
        output = output_text(generation, request, bench.tokenizer)
        points = score(bench.cell.task.metric, output, sample.outputs)
    except (KeyboardInterrupt, ConfigurationError):
        # A setting that cannot be honoured fails every sample alike: it ends the run.
        raise
    except BaseException as error:
        # An engine under test may fail in any way, sys.exit() included; that is a finding, not
        # the harness's end.
        if not isinstance(error, RequestError):
            bench.journal.log_error(f"ordinal {sample.ordinal}")
        return Record(**known, error=f"{type(error).__name__}: {one_line(error)}")
    if generation.prompt_tokens is not None:
        known["prompt_tokens"] = generation.prompt_tokens
    return Record(
        **known,
        output=output,
        output_tokens=generation.token_ids,
        logits_digest=generation.logits_digest,
        top2_margin=generation.top2_margin,
        finish_reason=generation.finish_reason,
        score=points,
        correct=points == 100,
        ttft_seconds=generation.ttft_seconds,
        decode_seconds=generation.decode_seconds,
        bytes_up=generation.bytes_up,
        bytes_down=generation.bytes_down,
        peak_device_bytes=generation.peak_device_bytes,
        kernel=generation.kernel,
        density=generation.density,
        copy_hidden_share=generation.copy_hidden_share,
        reused_tokens=generation.reused_tokens,
    )


def output_text(generation: Generation, request: Request, tokenizer: Tokenizer) -> str:
    """Return the engine's text, or the decoded tokens without the one that ended it."""
    if generation.text is not None:
        return generation.text
    ids = list(generation.token_ids or ())
    if ids and ids[-1] in request.stop_token_ids:
        ids.pop()
    return tokenizer.decode(ids)


def write_outputs(folder: Path, run: Run, samples: list[Sample]) -> bool:
    """Write manifest, reports and predictions; a full disk is said and does not hide the table.

    Returns:
        Whether all was written.
    """
    try:
        manifest.write_manifest(folder, run.manifest)
        write_reports(folder, [run])
        write_predictions(folder, run, samples)
    except OSError as error:
        print(
            f"error: could not write the reports in {folder}: {one_line(error)}. What was recorded "
            "is kept; make room and run the same command again.",
            file=sys.stderr,
        )
        return False
    return True
