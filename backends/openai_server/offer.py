"""What a server offers: its models, and which parts of the interface it takes.

Servers differ in what they refuse (vLLM takes ids as a prompt, others do not; some refuse a field
they do not know). Each part is tried once, by a request for one token, when a backend starts: the
same few requests in every life of an engine, so that none of them is warmer than another.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, replace
from typing import Any

from backends.base import ConfigurationError, Request, RequestError
from backends.openai_server.answers import Answer, shown
from backends.openai_server.connection import Connection, Refused, Unreachable

TRIAL = Request(request_id=-1, prompt="The", prompt_token_ids=(1, 2, 3, 4, 5), max_new_tokens=1)
SHOWN_MODELS = 20
LENGTH_FIELDS = ("max_model_len", "context_length", "context_window")
"""What a model's entry calls the tokens that it takes: vLLM and SGLang, then others."""
META, META_LENGTH = "meta", "n_ctx"
"""Where llama.cpp's server tells it: of one slot, as it runs; n_ctx_train is the model's own."""
LIMIT_FIELDS = ("max_tokens", "max_completion_tokens")
OPTIONAL: dict[str, dict[str, dict[str, Any]]] = {
    "usage": {
        "completions": {"stream_options": {"include_usage": True}},
        "chat": {"stream_options": {"include_usage": True}},
    },
    "token_ids": {
        "completions": {"return_token_ids": True},
        "chat": {"return_token_ids": True},
    },
    "logprobs": {
        "completions": {"logprobs": 2},
        "chat": {"logprobs": True, "top_logprobs": 2},
    },
}
"""Fields of a request that not every server takes, by what they ask for and by interface."""
NEEDS = {"logprobs": "token_ids"}
"""What is of no use alone: nobody could tell which token a margin belongs to."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What the user asked for.

    Attributes:
        api: "completions" or "chat".
        prompt: "auto", "ids" or "text".
        extra: further fields of each request.
    """

    api: str
    prompt: str
    extra: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Offer:
    """How a server is asked.

    Attributes:
        model: its name for the model.
        api: "completions" or "chat".
        prompt: "ids" or "text".
        limit_field: name of the field that limits the answer, of LIMIT_FIELDS.
        optional: of OPTIONAL, what it takes.
        extra: further fields, the user's.
        max_model_len: tokens of prompt and generation it takes; None where it does not tell.
    """

    model: str
    api: str
    prompt: str = "text"
    limit_field: str = LIMIT_FIELDS[0]
    optional: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    max_model_len: int | None = None

    def body(self, request: Request) -> dict[str, Any]:
        """Return the body of a request: greedy, streamed, one answer."""
        body: dict[str, Any] = {
            "model": self.model,
            "temperature": 0,
            "stream": True,
            self.limit_field: request.max_new_tokens,
        }
        if self.api == "chat":
            body["messages"] = [{"role": "user", "content": request.prompt}]
        elif self.prompt == "ids":
            body["prompt"] = list(request.prompt_token_ids)
        else:
            body["prompt"] = request.prompt
        for name in self.optional:
            body |= OPTIONAL[name][self.api]
        return body | self.extra


async def offered(connection: Connection, path: str, trial: Trial, model: str | None) -> Offer:
    """Find out how a server is to be asked.

    Raises:
        ConfigurationError: there is no such model, several to choose from, or the server does not
            take requests as the user asked for.
        Unreachable, RequestError: the server does not answer, or not as it should.
    """
    listed = await _models(connection, is_needed=model is None)
    name = model or _only(listed)
    start = Offer(
        model=name, api=trial.api, extra=trial.extra, max_model_len=_limit(listed.get(name, {}))
    )
    offer = await _plain(connection, path, start, sorted(listed))
    if trial.api == "completions" and trial.prompt != "text":
        offer = await _with_ids(connection, path, offer, is_asked_for=trial.prompt == "ids")
    for part in OPTIONAL:
        if NEEDS.get(part, part) not in (part, *offer.optional):
            continue
        more = replace(offer, optional=(*offer.optional, part))
        try:
            await _ask(connection, path, more)
            offer = more
        except Unreachable:
            raise
        except RequestError:
            continue
    return offer


async def _ask(connection: Connection, path: str, offer: Offer) -> Answer:
    return await connection.ask(path, offer.body(TRIAL), offer.api)


async def _plain(connection: Connection, path: str, start: Offer, listed: list[str]) -> Offer:
    """Return an offer of which a plain request was answered."""
    refused: Refused | None = None
    for limit_field in LIMIT_FIELDS if start.api == "chat" else LIMIT_FIELDS[:1]:
        offer = replace(start, limit_field=limit_field)
        try:
            await _ask(connection, path, offer)
            return offer
        except Refused as error:
            refused = refused or error
    if start.model in listed or not listed:
        raise refused or AssertionError("nothing was asked")
    close = difflib.get_close_matches(start.model, listed, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ConfigurationError(
        f"backend.model={start.model}: {refused}.{hint} The server offers {_names(listed)}."
    )


async def _with_ids(connection: Connection, path: str, offer: Offer, is_asked_for: bool) -> Offer:
    """Return an offer with prompts as ids, where the server takes them."""
    with_ids = replace(offer, prompt="ids")
    try:
        answer = await _ask(connection, path, with_ids)
    except Unreachable:
        raise
    except RequestError as error:
        reason = str(error)
    else:
        wanted = len(TRIAL.prompt_token_ids)
        if answer.prompt_tokens in (None, wanted):
            return with_ids
        reason = f"it counts {answer.prompt_tokens} tokens where {wanted} ids were sent"
    if is_asked_for:
        raise ConfigurationError(
            f"backend.prompt=ids: the server takes no token ids ({reason}); use "
            "backend.prompt=text."
        )
    return offer


# --- models -------------------------------------------------------------------------------------


async def _models(connection: Connection, is_needed: bool) -> dict[str, dict[str, Any]]:
    """Return the entry of each model by name; {} where the server does not list them."""
    try:
        found = (await connection.get("/models")).get("data")
    except Unreachable:
        raise
    except RequestError as error:
        if not is_needed:
            return {}
        raise ConfigurationError(
            f"the server does not list its models ({error}); set backend.model=NAME, or correct "
            "backend.base_url, which mostly ends in /v1."
        ) from error
    entries = found if isinstance(found, list) else []
    return {
        one["id"]: one
        for one in entries
        if isinstance(one, dict) and isinstance(one.get("id"), str)
    }


def _only(listed: dict[str, dict[str, Any]]) -> str:
    if len(listed) == 1:
        return next(iter(listed))
    if not listed:
        raise ConfigurationError("the server lists no model; set backend.model=NAME.")
    raise ConfigurationError(
        f"backend.model is missing: the server offers {_names(sorted(listed))}; choose one."
    )


def _names(listed: list[str]) -> str:
    more = f" and {len(listed) - SHOWN_MODELS} more" if len(listed) > SHOWN_MODELS else ""
    return ", ".join(shown(one) for one in listed[:SHOWN_MODELS]) + more


def _limit(entry: dict[str, Any]) -> int | None:
    meta = entry.get(META)
    told = meta.get(META_LENGTH) if isinstance(meta, dict) else None
    for found in (*(entry.get(key) for key in LENGTH_FIELDS), told):
        if type(found) is int and found > 0:
            return found
    return None
