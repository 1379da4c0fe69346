"""One request: made from a step, asked of an engine, its answer checked, scored and recorded."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from backends.base import Generation, Request, RequestError
from ruler_bench.answer import check_answer
from ruler_bench.bench import Bench
from ruler_bench.errors import one_line
from ruler_bench.journal import prompt_hash
from ruler_bench.leak.arms import CANCEL, FILL, REFERENCES
from ruler_bench.lives import Failure, Life, Reply
from ruler_bench.records import Record
from ruler_bench.score import score
from ruler_bench.streams import Step
from ruler_bench.tokenizer import Tokenizer

CANCEL_SECONDS = 0.05
"""How long a request runs before it is cancelled where nothing has been timed yet."""
CANCELLED = "cancelled"
"""Finish reason of a request that the arm cancel ended, which is no error."""


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
