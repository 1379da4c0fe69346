"""The engines of a stream: started, asked its requests one after the other or at once, closed."""

from __future__ import annotations

import functools
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from backends.base import ConfigurationError
from ruler_bench.asking import ask, request_of
from ruler_bench.bench import Bench, recordings, records_steps
from ruler_bench.cell import Cell
from ruler_bench.errors import UsageError, one_line
from ruler_bench.host import cannot_cancel, settings_of_arm
from ruler_bench.kept import BuildLife
from ruler_bench.leak.arms import CANCEL, REFERENCES, kind_of
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
from ruler_bench.streams import Step, Stream


@dataclass(frozen=True)
class Starting:
    """An engine is about to be built."""


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


Event = Starting | Started | Answered


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
    yield Starting()
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


# --- start and end --------------------------------------------------------------------------------


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


LOWER_CONTEXT = re.compile(
    r"lower backend\.max_model_len from (\d+) to (\d+), the largest that fits"
)
"""What our engine advises where its memory plan fits for shorter requests."""


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
    told = failure.message.partition(": ")[2]
    if told.startswith("backend."):  # the engine's own words name the setting
        return UsageError(f"{told}{again}")
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
