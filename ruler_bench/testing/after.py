"""Checks of requests after others: the same answer each time, to its own prompt, in any company."""

from __future__ import annotations

from contextlib import closing

from backends.base import Backend, Generation, Request
from ruler_bench.overlap import concurrency_of, in_flight
from ruler_bench.testing.bench import Bench, Unanswered
from ruler_bench.testing.prompts import Prompt
from ruler_bench.testing.report import Result

REPEATS = 3
MOST_IN_FLIGHT = 8


def check_determinism(result: Result, bench: Bench, engine: Backend) -> None:
    """Check that one prompt, asked several times in a row, has one answer."""
    prompt = bench.prompts.other
    first = bench.ask(engine, prompt)
    for number in range(1, REPEATS):
        difference = bench.difference(bench.ask(engine, prompt), first)
        result.expect(
            difference is None,
            f"{prompt.name}, asked {number + 1} times in a row, has other answers: {difference}",
        )


def check_leakage(result: Result, bench: Bench, engine: Backend) -> None:
    """Check that answers are those of engines that were asked nothing else."""
    long, other, short = bench.prompts.all
    sequence = [
        (long, "asked first, of two new engines"),
        (other, "after another of its length"),
        (long, "asked again after another"),
        (short, "after a longer one"),
        (long, "after a shorter one"),
        (long, "repeated"),
        (short, "after a longer one, again"),
        (short, "repeated"),
        (other, "after all others"),
    ]
    for prompt, when in sequence:
        _same_as_alone(result, bench, prompt, when, bench.ask(engine, prompt))


def check_order(result: Result, bench: Bench, engine: Backend) -> None:
    """Check that each answer is the one to its own prompt, also with several in flight."""
    for prompt in reversed(bench.prompts.all):
        needle = bench.foreign_needle(prompt, bench.ask(engine, prompt))
        result.expect(needle is None, f"{prompt.name}: the answer is another prompt's, {needle}")
    concurrency = concurrency_of(engine)
    if concurrency == 1:
        return
    count = min(2 * concurrency, MOST_IN_FLIGHT)
    prompts = [bench.prompts.all[place % len(bench.prompts.all)] for place in range(count)]
    requests = [bench.request(one) for one in prompts]
    by_number = {one.request_id: prompt for one, prompt in zip(requests, prompts, strict=True)}

    def ask(request: Request) -> Generation | Unanswered:
        try:
            return bench.send(engine, by_number[request.request_id], request)
        except Unanswered as error:
            return error

    with closing(in_flight(ask, requests, concurrency)) as replies:
        for place, answer in replies:
            when = f"with {concurrency} requests in flight"
            if isinstance(answer, Unanswered):
                result.expect(False, f"{when}: {answer}")
            else:
                _same_as_alone(result, bench, prompts[place], when, answer, tokens_alone=True)


def _same_as_alone(
    result: Result,
    bench: Bench,
    prompt: Prompt,
    when: str,
    answer: Generation,
    *,
    tokens_alone: bool = False,
) -> None:
    needle = bench.foreign_needle(prompt, answer)
    if not result.expect(
        needle is None, f"{prompt.name}, {when}: the answer is another prompt's, {needle}"
    ):
        return
    # A batch rounds otherwise than a single row does.
    difference = bench.difference(answer, bench.alone(prompt), tokens_alone)
    result.expect(difference is None, f"{prompt.name}, {when}: {difference}")
