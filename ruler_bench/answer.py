"""What an engine returned, checked: an engine under test may return anything."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args

from backends.base import FinishReason, Generation, Request, RequestError


def checked_generation(found: object) -> Generation:
    """Return a Generation of plain Python values: NumPy's integers and floats become int and float.

    Raises:
        RequestError: a field holds something else than `Generation` says; names field and value.
    """
    if not isinstance(found, Generation):
        raise RequestError(f"generate() returned {type(found).__name__}, not a Generation")
    if found.text is None and found.token_ids is None:
        raise RequestError("the engine returned neither text nor token_ids")
    if found.text is not None and not isinstance(found.text, str):
        raise _wrong("text", found.text, "text")
    if found.finish_reason not in get_args(FinishReason):
        raise _wrong("finish_reason", found.finish_reason, "stop or length")
    return replace(
        found,
        token_ids=_each("token_ids", found.token_ids, _count),
        logits_digest=_each("logits_digest", found.logits_digest, _text),
        top2_margin=_each("top2_margin", found.top2_margin, _measure),
        kernel=_optional("kernel", found.kernel, _text),
        prompt_tokens=_optional("prompt_tokens", found.prompt_tokens, _count),
        reused_tokens=_optional("reused_tokens", found.reused_tokens, _count),
        retries=_optional("retries", found.retries, _count),
        bytes_up=_optional("bytes_up", found.bytes_up, _count),
        bytes_down=_optional("bytes_down", found.bytes_down, _count),
        peak_device_bytes=_optional("peak_device_bytes", found.peak_device_bytes, _count),
        ttft_seconds=_optional("ttft_seconds", found.ttft_seconds, _measure),
        decode_seconds=_optional("decode_seconds", found.decode_seconds, _measure),
        density=_optional("density", found.density, _share),
        dense_share=_optional("dense_share", found.dense_share, _share),
        estimation_seconds=_optional("estimation_seconds", found.estimation_seconds, _measure),
        attention_seconds=_optional("attention_seconds", found.attention_seconds, _measure),
        copy_hidden_share=_optional("copy_hidden_share", found.copy_hidden_share, _share),
    )


def check_answer(found: Generation, request: Request, vocabulary: int | None) -> None:
    """Check an answer against what was asked.

    Args:
        found: of plain values, see `checked_generation`.
        request: what the engine was asked.
        vocabulary: tokens that the model knows; None where nobody can tell.

    Raises:
        RequestError: more tokens than asked for, tokens that the model does not have, figures that
            do not belong to a token each, or more reused tokens than the prompt has; names the
            field and what is allowed.
    """
    ids = found.token_ids
    if ids is not None and len(ids) > request.max_new_tokens:
        raise RequestError(
            f"the engine returned {len(ids)} token_ids; must be at most max_new_tokens="
            f"{request.max_new_tokens}"
        )
    if ids and vocabulary is not None and max(ids) >= vocabulary:
        place = next(number for number, one in enumerate(ids) if one >= vocabulary)
        raise _wrong(f"token_ids[{place}]", ids[place], f"within the model's 0 to {vocabulary - 1}")
    for field in ("logits_digest", "top2_margin"):
        values = getattr(found, field)
        if values is not None and ids is None:
            raise RequestError(
                f"the engine returned {field} without token_ids; must be one entry a token of them"
            )
        if values is not None and ids is not None and len(values) != len(ids):
            raise RequestError(
                f"the engine returned {len(values)} entries of {field}; must be one for each of "
                f"the {len(ids)} token_ids"
            )
    prompt_tokens = found.prompt_tokens or len(request.prompt_token_ids)
    if found.reused_tokens is not None and found.reused_tokens > prompt_tokens:
        raise _wrong("reused_tokens", found.reused_tokens, f"at most the prompt's {prompt_tokens}")


def _wrong(field: str, value: object, allowed: str) -> RequestError:
    return RequestError(f"the engine returned {field}={value!r:.80}; must be {allowed}")


def _optional(field: str, value: Any, convert: Callable[[str, Any], Any]) -> Any:
    return None if value is None else convert(field, value)


def _each(field: str, values: Any, convert: Callable[[str, Any], Any]) -> Any:
    if values is None:
        return None
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise _wrong(field, values, "a tuple, one entry a generated token")
    return tuple(convert(field, value) for value in values)


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(field, value, "text")
    return value


def _count(field: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise _wrong(field, value, "a whole number") from None
    if number < 0 or isinstance(value, bool):
        raise _wrong(field, value, "a whole number, not negative")
    return number


def _measure(field: str, value: Any) -> float:
    if isinstance(value, str | bool):
        raise _wrong(field, value, "a number")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise _wrong(field, value, "a number") from None
    if not math.isfinite(number) or number < 0:
        raise _wrong(field, value, "a finite number, not negative")
    return number


def _share(field: str, value: Any) -> float:
    number = _measure(field, value)
    if number > 1:
        raise _wrong(field, value, "a share, 0 to 1")
    return number
