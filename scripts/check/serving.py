"""What a process is asked to do, and doing it: engines, the requests they get, what they answer."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.base import Backend, ConfigurationError, Request, RequestError
from ruler_bench.answer import checked_generation
from ruler_bench.asking import output_text
from ruler_bench.errors import one_line
from ruler_bench.host import described, start_backend
from ruler_bench.journal import prompt_hash
from ruler_bench.records import Record
from ruler_bench.score import score
from ruler_bench.tasks import Question
from ruler_bench.tokenizer import Tokenizer, load_tokenizer
from scripts.check.engines import SOURCE_KEY, EngineSpec, source_sha256
from scripts.check.memory import MemorySample, sample_memory


@dataclass(frozen=True)
class Step:
    """A request and its place in its stream."""

    number: int
    question: Question


@dataclass(frozen=True)
class Stream:
    """Requests for one engine, or for a fresh one each.

    Attributes:
        arm: name of the stream.
        engine: what serves it.
        steps: in the order of serving.
        life: number of the first engine that is started, within the arm, from 1.
        fresh: build a new engine for every request.
        memory_every: requests between two looks at memory; 0 never looks.
    """

    arm: str
    engine: EngineSpec
    steps: tuple[Step, ...]
    life: int
    fresh: bool = False
    memory_every: int = 0


@dataclass(frozen=True)
class Common:
    """What all streams of a job share.

    Attributes:
        model: the model's folder.
        device, threads, dtype, max_model_len: as in `backends.base.HARNESS_ARGUMENTS`.
        stop_token_ids: of the model.
        metrics: how the answers of a task are scored.
    """

    model: Path
    device: str
    threads: int
    dtype: str
    max_model_len: int
    stop_token_ids: tuple[int, ...]
    metrics: dict[str, str]

    def harness_arguments(self) -> dict[str, Any]:
        """Return the arguments that every engine gets."""
        return {
            "model_path": str(self.model),
            "device": self.device,
            "threads": self.threads,
            "max_model_len": self.max_model_len,
            "dtype": self.dtype,
        }


@dataclass(frozen=True)
class Job:
    """Streams that one process serves one after the other."""

    common: Common
    streams: tuple[Stream, ...]


@dataclass(frozen=True)
class Life:
    """An engine was started, with these settings in force."""

    arm: str
    number: int
    in_force: dict[str, Any]


@dataclass(frozen=True)
class Failure:
    """A stream ended early: its engine could not be built, or its process died."""

    arm: str
    reason: str
    by_configuration: bool = False


@dataclass(frozen=True)
class Done:
    """A stream was served to its end."""

    arm: str
    requests: int
    seconds: float


Message = Life | Record | MemorySample | Failure | Done
Emit = Callable[[Message], None]


def serve(job: Job, emit: Emit) -> None:
    """Serve the streams of a job; tell what happens as soon as it has happened."""
    tokenizer = load_tokenizer(str(job.common.model))
    for stream in job.streams:
        try:
            _Server(job.common, tokenizer, stream, emit).serve()
        except Exception as error:  # whatever an engine under test raises when it is built
            by_configuration = isinstance(error, ConfigurationError)
            if not by_configuration:
                traceback.print_exc(file=sys.stderr)
            reason = f"{type(error).__name__}: {one_line(error)}"
            emit(Failure(stream.arm, reason, by_configuration))


class _Server:
    def __init__(self, common: Common, tokenizer: Tokenizer, stream: Stream, emit: Emit) -> None:
        self._common = common
        self._tokenizer = tokenizer
        self._stream = stream
        self._emit = emit
        self._source = source_sha256()

    def serve(self) -> None:
        stream, started = self._stream, time.perf_counter()
        if stream.fresh:
            for offset, step in enumerate(stream.steps):
                self._serve_life((step,), stream.life + offset)
        else:
            self._serve_life(stream.steps, stream.life)
        self._emit(Done(stream.arm, len(stream.steps), time.perf_counter() - started))

    def _serve_life(self, steps: tuple[Step, ...], life: int) -> None:
        arm, every = self._stream.arm, self._stream.memory_every
        engine = start_backend(self._stream.engine.settings, self._common.harness_arguments())
        try:
            self._emit(Life(arm, life, described(engine) | {SOURCE_KEY: self._source}))
            predecessor = None
            for position, step in enumerate(steps):
                place = {
                    "arm": arm,
                    "step": step.number,
                    "life": life,
                    "position": position,
                    "predecessor": predecessor,
                }
                self._emit(self._ask(engine, step.question, place))
                predecessor = step.question.sample.ordinal
                if every and (position + 1) % every == 0:
                    self._emit(sample_memory(arm, life, position + 1, self._common.device))
        finally:
            engine.close()

    def _ask(self, engine: Backend, question: Question, place: dict[str, Any]) -> Record:
        """Ask one question; a failure of the engine becomes a record with its message."""
        sample = question.sample
        known = {
            **place,
            "ordinal": sample.ordinal,
            "task": sample.task,
            "length": sample.length,
            "expected": sample.outputs,
            "depth": sample.depth,
            "prompt_sha256": prompt_hash(sample),
            "prompt_tokens": len(question.prompt_token_ids),
        }
        request = Request(
            request_id=place["position"],
            prompt=sample.prompt,
            prompt_token_ids=question.prompt_token_ids,
            max_new_tokens=sample.tokens_to_generate,
            stop_token_ids=self._common.stop_token_ids,
        )
        started = time.perf_counter()
        try:
            answer = checked_generation(engine.generate(request))
        except Exception as error:  # an engine under test may fail in any way
            if not isinstance(error, RequestError):
                traceback.print_exc(file=sys.stderr)
            return Record(**known, error=f"{type(error).__name__}: {one_line(error)}")
        seconds = time.perf_counter() - started
        output = output_text(answer, request, self._tokenizer)
        # A prompt that was cut has no reference.
        points = None
        if sample.outputs:
            points = score(self._common.metrics[sample.task], output, sample.outputs)
        return Record(
            **known,
            output=output,
            output_tokens=answer.token_ids,
            logits_digest=answer.logits_digest,
            top2_margin=answer.top2_margin,
            finish_reason=answer.finish_reason,
            score=points,
            correct=None if points is None else points == 100,
            total_seconds=seconds,
            ttft_seconds=answer.ttft_seconds,
            decode_seconds=answer.decode_seconds,
            bytes_up=answer.bytes_up,
            bytes_down=answer.bytes_down,
            peak_device_bytes=answer.peak_device_bytes,
            kernel=answer.kernel,
            density=answer.density,
        )
