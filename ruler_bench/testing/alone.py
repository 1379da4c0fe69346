"""Checks of single requests: answers, limits, stop tokens, errors; and of the engine's end."""

from __future__ import annotations

import multiprocessing
import threading
from dataclasses import replace

from backends.base import Backend, EngineDied, Generation, PromptTooLong, RequestError
from ruler_bench.testing.bench import Bench, Unanswered, told
from ruler_bench.testing.prompts import Prompt
from ruler_bench.testing.report import Result

NO_TOKENS = "answers have no token_ids"
FEW_TOKENS = 2
FAR_ID = 10**9
"""A token id that no model has."""
LARGEST_FIT = 4
"""A prompt that fills the context is asked where it is so many times as long as the others."""


def check_answers(result: Result, bench: Bench, first: Backend) -> None:
    """Check the answer of a new engine to each prompt; they are what others are held against."""
    right = 0
    for number, prompt in enumerate(bench.prompts.all):
        bench.ask_alone(bench.engine() if number else first, prompt)
        answer = bench.alone(prompt)
        right += prompt.needle in bench.prompts.text_of(answer)
        needle = bench.foreign_needle(prompt, answer)
        result.expect(
            needle is None,
            f"{prompt.name}, asked of a new engine: the answer is another prompt's, {needle}",
        )
        check_ending(result, bench, prompt, answer, prompt.max_new_tokens)
        told_tokens = answer.prompt_tokens
        result.expect(
            told_tokens is None or told_tokens >= len(prompt.token_ids),
            f"{prompt.name}: prompt_tokens={told_tokens}, and it has {len(prompt.token_ids)}",
        )
    if not right:
        result.unchecked.append(
            "no answer holds its needle: answers to other prompts show only where answers change"
        )


def check_ending(
    result: Result, bench: Bench, prompt: Prompt, answer: Generation, limit: int
) -> None:
    """Check that an answer ends where its finish_reason says, and nowhere else."""
    ids, reason, stops = answer.token_ids, answer.finish_reason, bench.prompts.stop_token_ids
    if ids is None:
        return
    if not result.expect(bool(ids), f"{prompt.name}: token_ids is empty"):
        return
    early = next((place for place, one in enumerate(ids[:-1]) if one in stops), None)
    result.expect(
        early is None,
        f"{prompt.name}: it goes on after the stop token at place {early}, to {len(ids)} tokens",
    )
    if ids[-1] in stops:
        result.expect(
            reason == "stop", f"{prompt.name}: it ends in a stop token with finish_reason={reason}"
        )
        return
    result.expect(
        reason == "length",
        f"{prompt.name}: finish_reason={reason}, and its last token {ids[-1]} is no stop token "
        "(one that was generated is part of token_ids)",
    )
    result.expect(
        len(ids) == limit,
        f"{prompt.name}: it ends after {len(ids)} tokens, neither at a stop token nor at "
        f"max_new_tokens={limit}",
    )


def check_limits(result: Result, bench: Bench, engine: Backend) -> None:
    """Check max_new_tokens, and prompts that just fit, and that do not."""
    prompt = bench.prompts.long
    whole = bench.alone(prompt).token_ids
    for limit in (1, FEW_TOKENS):
        answer = bench.ask(engine, prompt, max_new_tokens=limit)
        if answer.token_ids is None or whole is None:
            result.unchecked.append(f"max_new_tokens: {NO_TOKENS}")
            break
        check_ending(result, bench, prompt, answer, limit)
        result.expect(
            answer.token_ids == whole[:limit],
            f"{prompt.name}: with max_new_tokens={limit} it begins {answer.token_ids}, without "
            f"{whole[:limit]}",
        )
    context = engine.describe().get("max_model_len")
    if not isinstance(context, int):
        result.unchecked.append("PromptTooLong: describe() tells no max_model_len")
        return
    _refuses(result, bench, engine, context)
    _takes_what_fits(result, bench, engine, context)


def _refuses(result: Result, bench: Bench, engine: Backend, context: int) -> None:
    """Check that what does not fit is PromptTooLong: by far, and by one token."""
    base = bench.prompts.long
    by_one = context - len(base.token_ids) + 1
    cases = [(bench.prompts.too_long(context), 1, "far beyond")]
    if by_one > 0:
        cases.append((base, by_one, "one token beyond"))
    for prompt, limit, how in cases:
        tokens = len(prompt.token_ids) + limit
        try:
            engine.generate(bench.request(prompt, limit))
        except PromptTooLong:
            result.expect(True, "")
        except Exception as error:
            result.expect(
                False,
                f"a request of {tokens} tokens, {how} max_model_len={context}, raised "
                f"{told(error)}; must be PromptTooLong",
            )
        else:
            result.expect(
                False,
                f"a request of {tokens} tokens, {how} max_model_len={context}, was answered; must "
                "raise PromptTooLong",
            )
    _still_answers(result, bench, engine, "PromptTooLong")


def _takes_what_fits(result: Result, bench: Bench, engine: Backend, context: int) -> None:
    prompt = bench.prompts.long
    room = context - len(prompt.token_ids)
    if room < prompt.max_new_tokens or context > LARGEST_FIT * len(prompt.token_ids):
        result.unchecked.append(
            f"a request that just fits: max_model_len={context} is not near the prompts' length"
        )
        return
    try:
        bench.ask(engine, prompt, max_new_tokens=room)
        result.expect(True, "")
    except Unanswered as error:
        result.expect(False, f"a request of just max_model_len={context} tokens: {error}")


def check_stop(result: Result, bench: Bench, engine: Backend) -> None:
    """Check that the request's stop tokens are the ones that end an answer."""
    prompt = bench.prompts.long
    whole = bench.alone(prompt).token_ids
    if whole is None:
        result.unchecked.append(NO_TOKENS)
        return
    place = len(whole) // 2
    stops = (whole[place],)
    end = whole.index(whole[place]) + 1
    answer = bench.ask(engine, prompt, stop_token_ids=stops)
    result.expect(
        (answer.token_ids, answer.finish_reason) == (whole[:end], "stop"),
        f"{prompt.name}: with stop_token_ids={stops} it gave {answer.token_ids} and "
        f"finish_reason={answer.finish_reason}; must be {whole[:end]} and stop",
    )
    limit = len(whole) + FEW_TOKENS
    context = engine.describe().get("max_model_len")
    if isinstance(context, int) and len(prompt.token_ids) + limit > context:
        result.unchecked.append("no stop tokens: max_model_len leaves no room for longer answers")
        return
    answer = bench.ask(engine, prompt, max_new_tokens=limit, stop_token_ids=())
    ids = answer.token_ids or ()
    result.expect(
        len(ids) == limit and answer.finish_reason == "length" and ids[: len(whole)] == whole,
        f"{prompt.name}: without stop tokens it gave {len(ids)} tokens and finish_reason="
        f"{answer.finish_reason}; must go on to max_new_tokens={limit} and say length",
    )


def check_errors(result: Result, bench: Bench, engine: Backend) -> None:
    """Check that what makes no sense is a RequestError at most, and leaves the engine alive."""
    base = bench.prompts.long
    nonsense = {
        "an empty prompt": (replace(base, text="", token_ids=()), None),
        f"token id {FAR_ID}": (replace(base, token_ids=(*base.token_ids[:-1], FAR_ID)), None),
        "token id -1": (replace(base, token_ids=(*base.token_ids[:-1], -1)), None),
        "max_new_tokens=0": (base, 0),
    }
    for what, (prompt, limit) in nonsense.items():
        try:
            engine.generate(bench.request(prompt, limit))
            result.expect(True, "")
        except EngineDied as error:
            result.expect(False, f"{what} ends the engine ({told(error)})")
        except RequestError:
            result.expect(True, "")
        except Exception as error:
            result.expect(False, f"{what} raised {told(error)}; must be RequestError")
        _still_answers(result, bench, engine, what)
    cancel = getattr(engine, "cancel", None)
    if callable(cancel):
        try:
            cancel(FAR_ID)
            result.expect(True, "")
        except Exception as error:
            result.expect(False, f"cancel() of a request that is over raised {told(error)}")
        _still_answers(result, bench, engine, "a cancel() that came too late")


def _still_answers(result: Result, bench: Bench, engine: Backend, what: str) -> None:
    """Check that an engine answers as a new one does."""
    prompt = bench.prompts.long
    try:
        difference = bench.difference(bench.ask(engine, prompt), bench.alone(prompt))
    except Unanswered as error:
        result.expect(False, f"after {what} the engine no longer answers: {error}")
        return
    result.expect(difference is None, f"after {what} the engine answers otherwise: {difference}")


def check_release(result: Result, bench: Bench, seconds: float) -> None:
    """Check that `close()` ends an engine, once as well as twice, and leaves nothing running."""
    threads, children = set(threading.enumerate()), set(multiprocessing.active_children())
    prompt = bench.prompts.long
    engine = bench.engine()
    difference = bench.difference(bench.ask(engine, prompt), bench.alone(prompt))
    result.expect(
        difference is None, f"an engine built after close() of others differs: {difference}"
    )
    bench.close(engine)
    try:
        engine.close()
        result.expect(True, "")
    except Exception as error:
        result.expect(False, f"a second close() raised {told(error)}; must do nothing")
    left = [one for one in threading.enumerate() if one not in threads and not one.daemon]
    names = ", ".join(one.name for one in left)
    result.expect(not left, f"close() leaves threads running that keep the process alive: {names}")
    processes = set(multiprocessing.active_children()) - children
    result.expect(not processes, f"close() leaves {len(processes)} processes running")
    _refuses_after_close(result, bench, engine, seconds)


def _refuses_after_close(result: Result, bench: Bench, engine: Backend, seconds: float) -> None:
    ended: list[BaseException | Generation] = []

    def ask() -> None:
        try:
            ended.append(engine.generate(bench.request(bench.prompts.long)))
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    if not ended:
        result.expect(False, f"generate after close() hangs for {seconds:g} s; must raise")
        return
    found = ended[0]
    result.expect(
        isinstance(found, Exception),
        "generate after close() answers; must raise, since what it needs is to be free",
    )
