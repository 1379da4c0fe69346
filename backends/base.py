"""The seam between the harness and an engine: Backend, Request, Generation and the error types.

A backend is any class with `generate`, `describe` and `close`. Its constructor takes keyword
arguments only. The harness fills in those of the names in `HARNESS_ARGUMENTS` that the signature
has; every other parameter is a setting of the user's (`backend.NAME=VALUE`), checked against the
signature, so that an unknown one is an error and never dropped.

Example: the whole of a backend that always answers the same.

    class Parrot:
        def __init__(self, *, phrase: str = "42") -> None:
            self.phrase = phrase

        def generate(self, request: Request) -> Generation:
            return Generation(text=self.phrase, finish_reason="stop")

        def describe(self) -> dict[str, object]:
            return {"phrase": self.phrase}

        def close(self) -> None:
            pass
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

FinishReason = Literal["stop", "length"]

HARNESS_ARGUMENTS = ("model_path", "device", "threads", "max_model_len", "dtype", "run_folder")
"""Constructor arguments that the harness knows and passes where a signature names them.

model_path: folder or hub name of the model, as text.
device: "cpu", "cuda" or "cuda:N"; never "auto", the harness has resolved it.
threads: CPU threads for one engine.
max_model_len: tokens of prompt and generation that one request may take.
dtype: "auto", "float32", "bfloat16" or "float16".
run_folder: folder of the run, for what an engine writes beside its answers, such as a log.
"""

OUTLIVES_CLOSE = "outlives_close"
"""Key of `describe()`: true where `close()` leaves the engine as it is, like a server that others
manage. Such a backend has a static method `why_not_fresh`, which takes the constructor's arguments
and returns why nobody can start a new engine, or None where the arguments allow it.
"""

CONCURRENCY = "concurrency"
"""Attribute of a backend whose `generate` may be called from so many threads at a time, and of
which a run of one arm makes use. Without it, requests come one after the other.
"""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue greedily.

    Attributes:
        request_id: a counter that never repeats within the life of an engine; the only name by
            which an engine may key state.
        prompt: the whole text, answer prefix included.
        prompt_token_ids: the same as token ids, BOS included exactly once where the tokenizer
            has one. Engines that take ids use these and never tokenise anew.
        max_new_tokens: where generation stops at the latest.
        stop_token_ids: tokens after which generation stops (end-of-text); the one that was
            produced is part of `Generation.token_ids`.
    """

    request_id: int
    prompt: str
    prompt_token_ids: tuple[int, ...]
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Generation:
    """What an engine answered, and what it cost. None means that the engine cannot tell.

    Attributes:
        token_ids: generated ids, end-of-text included.
        text: generated text without special tokens; None lets the harness decode `token_ids`.
        finish_reason: "stop" after a stop token, "length" at max_new_tokens.
        logits_digest: one hex digest a generated token, of the float32 logits it was chosen from.
        top2_margin: one figure a generated token, best minus second best logit.
        prompt_tokens: the number of prompt tokens the engine saw.
        ttft_seconds: from the call to the first token.
        decode_seconds: from the first token to the last.
        bytes_up, bytes_down: KV bytes copied to the device and from it.
        peak_device_bytes: peak device memory; on a CPU the cache's own device-side buffers.
        kernel: the attention kernel that ran.
        density: share of the causal key blocks computed, for sparse prefill, over heads, layers
            and chunks.
        dense_share: share of layers and chunks of a sparse prefill that went through dense
            attention, because so little would have been left out.
        estimation_seconds, attention_seconds: of sparse prefill, what the choice of blocks took,
            and attention.
        reused_tokens: prompt tokens whose keys and values were kept from an earlier request, and
            not computed again.
        copy_hidden_share: of the time that KV copies took on the device, the share during which a
            kernel ran, too; known where the request was traced.
        retries: how often the request was sent again, to a server that refused it or did not
            answer.
    """

    token_ids: tuple[int, ...] | None = None
    text: str | None = None
    finish_reason: FinishReason = "stop"
    logits_digest: tuple[str, ...] | None = None
    top2_margin: tuple[float, ...] | None = None
    prompt_tokens: int | None = None
    ttft_seconds: float | None = None
    decode_seconds: float | None = None
    bytes_up: int | None = None
    bytes_down: int | None = None
    peak_device_bytes: int | None = None
    kernel: str | None = None
    density: float | None = None
    dense_share: float | None = None
    estimation_seconds: float | None = None
    attention_seconds: float | None = None
    reused_tokens: int | None = None
    copy_hidden_share: float | None = None
    retries: int | None = None


@runtime_checkable
class Backend(Protocol):
    """An engine that answers one request at a time and is kept between requests."""

    def generate(self, request: Request) -> Generation:
        """Continue the prompt greedily.

        Raises:
            PromptTooLong: prompt and generation are more than max_model_len tokens.
            RequestError: this request failed; the engine can take the next one.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Return every setting that is really in force, after defaults and "auto", as plain JSON
        values. What a user asked for and what is missing here was dropped, which is a bug.
        """
        ...

    def close(self) -> None:
        """Free the device, processes and ports; afterwards `generate` raises. A second call does
        nothing.
        """
        ...


class ConfigurationError(ValueError):
    """A setting cannot be honoured. The message is one line for the user: the key, the value,
    what is allowed, and what to do.
    """


class RequestError(RuntimeError):
    """One request failed; it is recorded as an error and the run goes on."""


class PromptTooLong(RequestError):  # noqa: N818 (what happened, not "Error" twice)
    """Prompt and generation do not fit the engine's context."""


class OutOfMemory(RequestError):  # noqa: N818
    """The device ran out of memory; the engine has released the request."""


class RequestCancelled(RequestError):  # noqa: N818
    """Somebody ended the request before it was done; the engine has released it."""


class EngineDied(RequestError):  # noqa: N818
    """The engine is gone and takes no further request; the harness starts another."""


class NonFiniteLogits(RequestError):  # noqa: N818
    """The logits hold NaN or infinity, so that no token can be chosen."""
