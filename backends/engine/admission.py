"""Which requests an engine takes: they make sense, fit the context, and nobody cancelled them."""

from __future__ import annotations

import threading

from backends.base import PromptTooLong, Request, RequestCancelled, RequestError


def check_request(request: Request, vocabulary: int, context_tokens: int) -> None:
    """Refuse a request before anything is run.

    Args:
        request: as it came.
        vocabulary: token ids that the model knows.
        context_tokens: tokens of prompt and answer that there is room for.

    Raises:
        PromptTooLong: prompt and generation are longer than the context.
        RequestError: the request makes no sense, such as an empty prompt.
    """
    prompt = request.prompt_token_ids
    if not prompt:
        raise RequestError(f"request {request.request_id}: the prompt has no tokens")
    if request.max_new_tokens < 1:
        raise RequestError(
            f"request {request.request_id}: max_new_tokens={request.max_new_tokens} is below 1"
        )
    if not 0 <= min(prompt) <= max(prompt) < vocabulary:
        raise RequestError(
            f"request {request.request_id}: token ids from {min(prompt)} to {max(prompt)}, "
            f"but the model's vocabulary is 0 to {vocabulary - 1}"
        )
    total = len(prompt) + request.max_new_tokens
    if total > context_tokens:
        raise PromptTooLong(
            f"request {request.request_id}: {len(prompt)} prompt tokens and "
            f"{request.max_new_tokens} to generate make {total}, but max_model_len is "
            f"{context_tokens}"
        )


class Cancelled:
    """Which requests somebody wants ended; used from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ids: set[int] = set()

    def add(self, request_id: int) -> None:
        """Take note that a request is to end."""
        with self._lock:
            self._ids.add(request_id)

    def check(self, request_id: int) -> None:
        """Raise RequestCancelled if this request is to end, and forget it."""
        with self._lock:
            if request_id not in self._ids:
                return
            self._ids.discard(request_id)
        raise RequestCancelled(f"request {request_id} was cancelled")

    def forget(self, request_id: int) -> None:
        """Drop a request: it is over."""
        with self._lock:
            self._ids.discard(request_id)
