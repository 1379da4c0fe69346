"""What a server sent, read piece by piece: text, ids, log-probabilities, usage.

Field names are those of the OpenAI API reference (completions and chat completions, streamed and
whole), `token_ids` that of vLLM, `logprobs.content[].id` that of llama.cpp's server, which has the
form of chat completions for both. Nothing is taken for what it should be: a server under test may
send anything.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from backends.base import FinishReason, NonFiniteLogits, RequestError

MAX_SHOWN_CHARACTERS = 300
LEAST_LOGPROB = -1e30
"""From here on down a number stands for minus infinity, which JSON does not have: llama.cpp sends
the least float32 where a probability is 0 as a float32. Such a margin is not known."""
FINISHES: dict[str, FinishReason] = {
    "stop": "stop",
    "eos": "stop",
    "eos_token": "stop",
    "length": "length",
}


def parsed(text: str, masked: Callable[[Any], Any] = lambda value: value) -> dict[str, Any]:
    """Return a JSON object.

    Args:
        text: what the server sent.
        masked: takes out of a JSON value what must not be shown.

    Raises:
        NonFiniteLogits: it holds NaN or an infinity.
        RequestError: it is none; or it is the server's own report of an error.
    """
    try:
        found = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise RequestError(f"the server sent no JSON: {shown(masked(text))}") from None
    if not isinstance(found, dict):
        raise RequestError(f"the server sent no JSON object: {shown(masked(text))}")
    found = dict(masked(found))
    if found.get("error") is not None:
        words = message_of(found) or masked(text)
        raise RequestError(f"the server reports an error: {shown(words)}")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise NonFiniteLogits(f"the server's answer holds {name}")


def message_of(found: Any) -> str | None:
    """Return the words of an error report: OpenAI's `error.message`, FastAPI's `detail`, others."""
    for key in ("error", "detail", "message", "msg"):
        inner = found.get(key) if isinstance(found, dict) else None
        if isinstance(inner, list) and inner:
            inner = inner[0]
        if isinstance(inner, str) and inner:
            return inner
        if isinstance(inner, dict):
            return message_of(inner)
    return None


def shown(text: str) -> str:
    """Return a text of somebody else's on one line of bounded length, without control signs."""
    line = " ".join(text.split())
    line = "".join(one if one.isprintable() else "?" for one in line)
    return line if len(line) <= MAX_SHOWN_CHARACTERS else line[:MAX_SHOWN_CHARACTERS] + "..."


@dataclass
class Answer:
    """One answer as it grows.

    Attributes:
        api: "completions" or "chat".
        pieces: of text.
        token_ids: generated ids; None where the server sends none.
        margins: best minus second best log-probability, one a token; None where some are missing.
        finish_reason: None until the server tells.
        prompt_tokens, completion_tokens, cached_tokens: as the server counts.
        choices: how often a choice was seen.
        started_seconds: when the request was sent.
        first_seconds, last_seconds: when the first and the last piece came, as `add` was told.
        retries: how often the request was sent again before this answer came.
    """

    api: str
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] | None = None
    margins: list[float] | None = None
    finish_reason: FinishReason | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    choices: int = 0
    started_seconds: float = 0.0
    first_seconds: float | None = None
    last_seconds: float | None = None
    retries: int = 0
    _lacks_margins: bool = False

    @property
    def text(self) -> str:
        """The generated text."""
        return "".join(self.pieces)

    def add(self, found: dict[str, Any], now_seconds: float) -> None:
        """Take in one event, or a whole answer.

        Raises:
            RequestError: a field is of another kind than it should be.
        """
        self._add_usage(found.get("usage"))
        choices = found.get("choices", [])
        if not isinstance(choices, list):
            raise _wrong("choices", choices)
        for choice in choices:
            if not isinstance(choice, dict):
                raise _wrong("choices", choice)
            if choice.get("index", 0) != 0:
                raise _wrong("choices.index", choice["index"])
            self.choices += 1
            self._add_choice(choice, now_seconds)

    def _add_choice(self, choice: dict[str, Any], now_seconds: float) -> None:
        piece = self._text(choice)
        logprobs = _logprobs(choice.get("logprobs"))
        ids = _ids(choice.get("token_ids")) or _ids_beside(logprobs)
        margins = self._margins(logprobs)
        if piece:
            self.pieces.append(piece)
        if ids:
            self.token_ids = [*(self.token_ids or ()), *ids]
        if margins:
            self.margins = [*(self.margins or ()), *margins]
        if piece or ids:
            self.last_seconds = now_seconds
            if self.first_seconds is None:
                self.first_seconds = now_seconds
        reason = choice.get("finish_reason")
        if reason is None or reason == "":
            return
        if not isinstance(reason, str) or reason not in FINISHES:
            raise RequestError(f"the server ended the answer for another reason: {reason!r:.80}")
        self.finish_reason = FINISHES[reason]

    def _text(self, choice: dict[str, Any]) -> str:
        if self.api == "completions":
            text = choice.get("text")
        else:
            inner = choice.get("delta", choice.get("message"))
            if inner is not None and not isinstance(inner, dict):
                raise _wrong("choices.delta", inner)
            text = (inner or {}).get("content")
        if text is None:
            return ""
        if not isinstance(text, str):
            raise _wrong("text", text)
        return text

    def _margins(self, logprobs: dict[str, Any]) -> list[float]:
        """Return margins, one a token: log-probabilities differ as their logits do."""
        found = []
        for top in _tops(logprobs):
            if not all(isinstance(one, int | float) and math.isfinite(one) for one in top):
                raise NonFiniteLogits(f"the server's log-probabilities are {top!r:.80}")
            if len(top) < 2 or min(top) <= LEAST_LOGPROB:
                self._lacks_margins = True
                continue
            best, second = sorted(top, reverse=True)[:2]
            found.append(float(best - second))
        return found

    def _add_usage(self, usage: Any) -> None:
        if usage is None:
            return
        if not isinstance(usage, dict):
            raise _wrong("usage", usage)
        self.prompt_tokens = _count("usage.prompt_tokens", usage.get("prompt_tokens"))
        self.completion_tokens = _count("usage.completion_tokens", usage.get("completion_tokens"))
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            self.cached_tokens = _count("usage.cached_tokens", details.get("cached_tokens"))

    def end(self, masked: Callable[[str], str]) -> None:
        """Complete the answer: the whole text masked, and no ids where they are not all of them.

        Args:
            masked: takes out of a text what must not be shown; the ids would spell it.
        """
        text = self.text
        self.pieces = [masked(text)]
        # llama.cpp tells an id with the text that it sends, and holds back the bytes of a character
        # that is not whole.
        is_short = len(self.token_ids or ()) < (self.completion_tokens or 0)
        if self.text != text or is_short:
            self.token_ids = None

    def top2_margin(self) -> tuple[float, ...] | None:
        """Return one margin a token, or None where one is missing or has no token."""
        if self.margins is None or self.token_ids is None or self._lacks_margins:
            return None
        return tuple(self.margins) if len(self.margins) == len(self.token_ids) else None


def _logprobs(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _wrong("logprobs", value)
    return value


def _tops(logprobs: dict[str, Any]) -> list[list[Any]]:
    """Return the best log-probabilities of each token, in either form that there is."""
    rows = _listed(logprobs.get("top_logprobs"))
    if rows:  # of completions: an object a token
        return [list(one.values()) if isinstance(one, dict) else [] for one in rows]
    return [
        [each.get("logprob") for each in _listed(one.get("top_logprobs")) if isinstance(each, dict)]
        for one in _contents(logprobs)
    ]


def _ids_beside(logprobs: dict[str, Any]) -> list[int]:
    """Return the ids that llama.cpp tells with log-probabilities; [] where one is missing."""
    ids = [one.get("id") for one in _contents(logprobs)]
    return [] if None in ids else _ids(ids)


def _contents(logprobs: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in _listed(logprobs.get("content")) if isinstance(one, dict)]


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise _wrong("logprobs", value)
    return [one for one in value if one is not None]


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(type(one) is int and one >= 0 for one in value):
        raise _wrong("token_ids", value)
    return value


def _count(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if type(value) is not int or value < 0:
        raise _wrong(name, value)
    return value


def _wrong(name: str, value: Any) -> RequestError:
    return RequestError(f"the server sent {name}={shown(repr(value))}, which it should not be")
