"""A probe: a sequence of requests, asked of a new engine, and what it answers to the last of them.

The last request is the victim, and its answer shows the leak where it is another than that of an
engine that was asked nothing else. Whatever one engine leaves in its process (allocators, caches,
module state, ports) would count as the work of the next, so that each probe has a process of its
own unless the caller chooses otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backends.base import Generation, Request
from ruler_bench.lives import Failure, Life
from ruler_bench.tokenizer import Tokenizer

BITS, TOKENS, TEXT, ERROR = "bits", "tokens", "text", "error"
LEVELS = (BITS, ERROR, TOKENS, TEXT)
"""How the victim's answer changes: its logits alone, that the engine fails at it, its tokens, its
text where there are no tokens. The later, the more a reader of the outputs sees."""

Start = Callable[[], Life]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a sequence.

    Attributes:
        request_id: as the run numbered it, unique in a sequence.
        ordinal: the sample that it asks, or asked before it was cut.
        prompt: the text.
        prompt_token_ids: the same as ids.
        max_new_tokens: where generation stops at the latest.
        stop_token_ids: see `backends.base.Request`.
        cancel_after_seconds: when it is cancelled; None leaves it alone.
    """

    request_id: int
    ordinal: int
    prompt: str
    prompt_token_ids: tuple[int, ...]
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    cancel_after_seconds: float | None = None

    def request(self) -> Request:
        """Return what the engine gets."""
        return Request(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            max_new_tokens=self.max_new_tokens,
            stop_token_ids=self.stop_token_ids,
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine made of a request.

    Attributes:
        text: without special tokens.
        token_ids, logits_digest: None where the backend cannot tell.
        error: what failed, on one line.
    """

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    logits_digest: tuple[str, ...] | None = None
    error: str | None = None


def change(answer: Answer, fresh: Answer, bits_are_promised: bool) -> str | None:
    """Return the level at which an answer differs from that of a fresh engine, or None.

    Args:
        answer: the victim's after others.
        fresh: the victim's alone.
        bits_are_promised: whether the same prompt always has the same logits.
    """
    if answer.error is not None or fresh.error is not None:
        return ERROR if answer.error is not None and fresh.error is None else None
    if answer.token_ids is None or fresh.token_ids is None:
        return TEXT if answer.text != fresh.text else None
    if answer.token_ids != fresh.token_ids:
        return TOKENS
    known = answer.logits_digest is not None and fresh.logits_digest is not None
    differ = known and answer.logits_digest != fresh.logits_digest
    return BITS if bits_are_promised and differ else None


def is_same(a: Answer, b: Answer) -> bool:
    """Whether two answers are the same to a reader: in tokens, without them in text."""
    if a.token_ids is None or b.token_ids is None:
        return (a.text, a.error) == (b.text, b.error)
    return a.token_ids == b.token_ids


def counts_as(found: str | None, level: str) -> bool:
    """Whether a change is one of this level: where only logits changed, other tokens do, too."""
    return found == level or (level == BITS and found in (TOKENS, TEXT))


@dataclass(frozen=True, slots=True)
class Probe:
    """What one engine made of a sequence.

    Attributes:
        answer: of the last request; None where the engine was over before it.
        failed: ids of the earlier requests that failed.
        settings: in force.
    """

    answer: Answer | None
    failed: frozenset[int]
    settings: Mapping[str, Any]


def probe(start: Start, asks: Sequence[Ask], tokenizer: Tokenizer | None) -> Probe:
    """Ask a sequence of a new engine.

    Args:
        start: builds the engine.
        asks: the requests, the victim last.
        tokenizer: decodes what an engine answers without text; None leaves it undecoded.

    Raises:
        ConfigurationError, StartFailed: see `start`.
    """
    life = start()
    try:
        failed: set[int] = set()
        for place, ask in enumerate(asks):
            found = life.ask(ask.request(), ask.cancel_after_seconds).answer
            if place == len(asks) - 1:
                return Probe(_answer(found, ask, tokenizer), frozenset(failed), life.settings)
            if isinstance(found, Failure):
                failed.add(ask.request_id)
                if found.is_over:
                    break
        return Probe(None, frozenset(failed), life.settings)
    except KeyboardInterrupt:
        life.end()
        raise
    finally:
        life.close()


def _answer(found: Generation | Failure, ask: Ask, tokenizer: Tokenizer | None) -> Answer:
    if isinstance(found, Failure):
        return Answer(error=found.message)
    text = found.text
    if text is None and tokenizer is not None:
        ids = list(found.token_ids or ())
        if ids and ids[-1] in ask.stop_token_ids:
            ids.pop()
        text = tokenizer.decode(ids)
    return Answer(text, found.token_ids, found.logits_digest)
