"""What a server sent, read piece by piece: text, ids, log-probabilities, usage.

Field names are those of the OpenAI API reference (completions and chat completions, streamed and
whole), `token_ids` that of vLLM. Nothing is taken for what it should be: a server under test may
send anything.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any, NoReturn

from backends.base import FinishReason, NonFiniteLogits, RequestError

MAX_SHOWN_CHARACTERS = 300
FINISHES: dict[str, FinishReason] = {
    "stop": "stop",
    "eos": "stop",
    "eos_token": "stop",
    "length": "length",
}


def parsed(text: str) -> dict[str, Any]:
    """Return a JSON object.

    Raises:
        NonFiniteLogits: it holds NaN or an infinity.
        RequestError: it is none; or it is the server's own report of an error.
    """
    try:
        found = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise RequestError(f"the server sent no JSON: {shown(text)}") from None
    if not isinstance(found, dict):
        raise RequestError(f"the server sent no JSON object: {shown(text)}")
    if found.get("error") is not None:
        raise RequestError(f"the server reports an error: {shown(message_of(found) or text)}")
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
        prompt_tokens, cached_tokens: as the server counts.
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
        ids = _ids(choice.get("token_ids"))
        margins = self._margins(choice.get("logprobs"))
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

    def _margins(self, logprobs: Any) -> list[float]:
        """Return margins, one a token: log-probabilities differ as their logits do."""
        if logprobs is None:
            return []
        if not isinstance(logprobs, dict):
            raise _wrong("logprobs", logprobs)
        if self.api == "completions":
            rows = logprobs.get("top_logprobs")
            tops = [list(one.values()) if isinstance(one, dict) else [] for one in _listed(rows)]
        else:
            tops = [
                [each.get("logprob") for each in _listed(one.get("top_logprobs"))]
                for one in _listed(logprobs.get("content"))
                if isinstance(one, dict)
            ]
        found = []
        for top in tops:
            if not all(isinstance(one, int | float) and math.isfinite(one) for one in top):
                raise NonFiniteLogits(f"the server's log-probabilities are {top!r:.80}")
            if len(top) < 2:
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
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            self.cached_tokens = _count("usage.cached_tokens", details.get("cached_tokens"))

    def top2_margin(self) -> tuple[float, ...] | None:
        """Return one margin a token, or None where one is missing or has no token."""
        if self.margins is None or self.token_ids is None or self._lacks_margins:
            return None
        return tuple(self.margins) if len(self.margins) == len(self.token_ids) else None


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
