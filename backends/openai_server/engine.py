"""OpenAIServer: greedy requests to a server over HTTP."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import socket
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import httpx

from backends.base import (
    OUTLIVES_CLOSE,
    ConfigurationError,
    EngineDied,
    Generation,
    PromptTooLong,
    Request,
    RequestCancelled,
    RequestError,
)
from backends.openai_server import settings as checks
from backends.openai_server.answers import Answer
from backends.openai_server.checked import checked
from backends.openai_server.connection import Connection, Refused, Unreachable
from backends.openai_server.offer import Offer, Trial, offered
from backends.openai_server.serve import Server, free_port, new_log

Found = TypeVar("Found")

PATHS = {"completions": "/completions", "chat": "/chat/completions"}
CHAT_TEMPLATE_TOKENS = 512
"""The most that a chat template may add to a prompt before its length counts as another's."""
CLOSE_SECONDS = 10.0


class OpenAIServer:
    """A server with the OpenAI interface; started and ended by the backend, or by others."""

    def __init__(
        self,
        *,
        base_url: str | None = None,
        model: str | None = None,
        api: str = "completions",
        prompt: str = "auto",
        api_key_env: str | None = "OPENAI_API_KEY",
        verify: bool | str = True,
        check_length: bool = True,
        concurrency: int = 1,
        request_seconds: float = 600.0,
        retries: int = 4,
        backoff_seconds: float = 0.5,
        max_wait_seconds: float = 60.0,
        extra: dict[str, Any] | None = None,
        serve: dict[str, Any] | None = None,
        max_model_len: int | None = None,
        model_path: str | None = None,
        run_folder: str | None = None,
    ) -> None:
        """Start the server where that is asked for, and find out what it takes.

        Args:
            base_url: address of the interface, such as http://127.0.0.1:8000/v1.
            model: its name; None: the only one that the server offers.
            api: "completions" (the prompt as it is) or "chat" (the prompt as a user's message).
            prompt: of completions, "ids", "text", or "auto": ids where the server takes them.
            api_key_env: environment variable of the key; None: no key is sent.
            verify: whether certificates are checked, or a file of those that are trusted.
            check_length: whether the server must count as many prompt tokens as the run does.
            concurrency: requests in flight at a time, in runs of one arm.
            request_seconds: the most that one try of a request may take.
            retries: how often a request is sent again after 429, 5xx, or no answer.
            backoff_seconds: wait before the first retry, doubled with each; where the server
                asks for another (Retry-After), that.
            max_wait_seconds: no wait is longer.
            extra: further fields of each request.
            serve: `command`, `health` and `startup_seconds` of a server to be started.
            max_model_len: tokens of prompt and generation that one request may take.
            model_path: the model's folder, for {model_path} in `serve.command`.
            run_folder: where the server's log goes.

        Raises:
            ConfigurationError: a setting is wrong, nothing answers, or the server does not take
                requests as they must be.
            ServerFailed: the server ended before it was ready, or was not in time.
        """
        found = checked(
            base_url=base_url,
            model=model,
            api=api,
            prompt=prompt,
            api_key_env=api_key_env,
            verify=verify,
            concurrency=concurrency,
            request_seconds=request_seconds,
            retries=retries,
            backoff_seconds=backoff_seconds,
            max_wait_seconds=max_wait_seconds,
            extra=extra,
            serve=serve,
        )
        self._serve, self._key, self._url = found.serve, found.key, found.url
        self._api, self._extra = found.trial.api, found.trial.extra
        self._policy, self._request_seconds = found.policy, found.request_seconds
        self._check_length = check_length
        self._verify = verify
        self.concurrency = found.concurrency

        self._tasks: dict[int, asyncio.Task[Answer]] = {}
        self._running: set[asyncio.Task[Answer]] = set()  # all, also of requests with one number
        self._server: Server | None = None
        self._connection: Connection | None = None
        self._ends = threading.Lock()
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            address = self._start(model_path, run_folder)
            self._connection = connection = Connection(
                address,
                key=self._key,
                verify=found.tls,
                policy=self._policy,
                request_seconds=self._request_seconds,
                is_gone=self._is_gone,
            )
            self._wait_until_ready(connection)
            self._offer = self._learn(connection, found.trial, model)
            self._max_model_len = self._limit(max_model_len)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def why_not_fresh(*, serve: dict[str, Any] | None = None, **_: object) -> str | None:
        """Say why there are no fresh engines, or return None; see backends.base."""
        if checks.serve_settings(serve).command is not None:
            return None
        return (
            "the server is managed by others, and what it keeps outlives each connection; give "
            "backend.serve.command, which starts one for each sample"
        )

    @staticmethod
    def refuse_early(_prompt: str, /, **arguments: Any) -> None:
        """Refuse what the constructor refuses before it starts or asks anything; see dry_run.py.

        Args:
            arguments: the constructor's.

        Raises:
            ConfigurationError: a setting is wrong.
        """
        defaults = inspect.signature(OpenAIServer).parameters
        names = inspect.signature(checked).parameters
        checked(**{name: arguments.get(name, defaults[name].default) for name in names})

    # --- start ----------------------------------------------------------------------------------

    def _start(self, model_path: str | None, run_folder: str | None) -> str:
        """Start the server where there is a command; return the address."""
        if self._serve.command is None:
            return self._url
        port = free_port()
        address = self._url.replace(checks.PORT, str(port))
        if address == self._url:
            _check_unused(httpx.URL(address))
        command = [
            one.replace(checks.PORT, str(port)).replace(checks.MODEL_PATH, model_path or "")
            for one in self._serve.command
        ]
        self._server = Server(command, new_log(run_folder), self._key.variable)
        return address

    def _wait_until_ready(self, connection: Connection) -> None:
        if self._server is not None:
            health = self._serve.health
            self._server.wait_until(
                lambda: self._wait(connection.is_healthy(health)),
                self._serve.startup_seconds,
            )

    def _is_gone(self) -> bool:
        return self._server is not None and self._server.ending() is not None

    def _learn(self, connection: Connection, trial: Trial, model: str | None) -> Offer:
        """Return what the server offers and takes."""
        try:
            return self._wait(offered(connection, PATHS[self._api], trial, model))
        except Unreachable as error:
            raise ConfigurationError(
                f"backend.base_url={self._url}: {error}. Start the server, correct the address, "
                "or let backend.serve.command start one."
            ) from error
        except RequestError as error:
            raise ConfigurationError(f"backend.base_url={self._url}: {error}.") from error

    def _limit(self, needed_tokens: int | None) -> int | None:
        """Return how many tokens a request may take, as far as anybody knows."""
        limit = self._offer.max_model_len
        if needed_tokens is None or limit is None:
            return needed_tokens or limit
        if needed_tokens > limit:
            raise ConfigurationError(
                f"the server takes {limit} tokens of prompt and generation for "
                f"{self._offer.model}, and this run needs {needed_tokens}: start the server with "
                f"a longer context, or use length={limit} or less."
            )
        return needed_tokens

    # --- requests -------------------------------------------------------------------------------

    def generate(self, request: Request) -> Generation:
        """Continue the prompt greedily; may be called from several threads at a time.

        Raises:
            PromptTooLong: prompt and generation do not fit the server's context.
            RequestCancelled: `cancel` ended the request.
            EngineDied: the server that the backend started has ended.
            RequestError: the server did not answer, or not as it should; or the engine is closed.
            ConfigurationError: the server counts another number of prompt tokens, or does not
                accept the key.
        """
        total_tokens = len(request.prompt_token_ids) + request.max_new_tokens
        if self._max_model_len is not None and total_tokens > self._max_model_len:
            raise PromptTooLong(
                f"{len(request.prompt_token_ids)} prompt tokens and {request.max_new_tokens} to "
                f"generate are {total_tokens}, more than max_model_len={self._max_model_len}"
            )
        try:
            answer = self._wait(self._owned(request))
        except concurrent.futures.CancelledError:
            raise RequestCancelled(f"request {request.request_id} was cancelled") from None
        except RequestError as error:
            if self._server is None or isinstance(error, Refused | PromptTooLong):
                raise
            ending = self._server.ending(patience_seconds=0.5)
            if ending is None:
                raise
            raise EngineDied(f"the server {ending}; {self._server.last_words()}") from error
        if self._check_length:
            self._compare_length(request, answer)
        return _generation(answer)

    def cancel(self, request_id: int) -> None:
        """End a request by closing its connection; one that is over is left alone."""
        with self._ends:
            if not self._is_closed:
                self._loop.call_soon_threadsafe(self._cancel, request_id)

    def _cancel(self, request_id: int) -> None:
        task = self._tasks.get(request_id)
        if task is not None:
            task.cancel()

    async def _owned(self, request: Request) -> Answer:
        """Ask, as a task that `cancel` finds; it is over when the connection is closed."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks[request.request_id] = task
        self._running.add(task)
        try:
            assert self._connection is not None  # made before there is anything to ask
            body = self._offer.body(request)
            return await self._connection.ask(PATHS[self._api], body, self._api)
        finally:
            self._running.discard(task)
            if self._tasks.get(request.request_id) is task:
                del self._tasks[request.request_id]

    def _compare_length(self, request: Request, answer: Answer) -> None:
        """Refuse a server whose tokenizer sees another prompt than the run made.

        Raises:
            ConfigurationError: says by how much they differ.
        """
        if answer.prompt_tokens is None:
            return
        own = len(request.prompt_token_ids)
        more = answer.prompt_tokens - own
        allowed = CHAT_TEMPLATE_TOKENS if self._api == "chat" else 0
        if 0 <= more <= allowed:
            return
        raise ConfigurationError(
            f"the server counts {answer.prompt_tokens} tokens in a prompt that has {own} by this "
            f"run's tokenizer ({more:+}): they are not the same tokenizer, or the server puts "
            "something before the prompt. Name the model that the server serves (model=local "
            "model.path=...), or accept it with backend.check_length=false."
        )

    # --- the end --------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Return the settings in force; never the key."""
        return {
            "base_url": self._url,
            "model": self._offer.model,
            "api": self._api,
            "prompt": self._offer.prompt,
            "asks_for": list(self._offer.optional),
            "api_key_env": self._key.variable,
            "has_key": bool(self._key.value),
            "verify": self._verify,
            "check_length": self._check_length,
            "concurrency": self.concurrency,
            "request_seconds": self._request_seconds,
            "retries": self._policy.retries,
            "backoff_seconds": self._policy.backoff_seconds,
            "max_wait_seconds": self._policy.max_wait_seconds,
            "extra": self._extra,
            "serve": self._serve.described(),
            "max_model_len": self._max_model_len,
            OUTLIVES_CLOSE: self._server is None,
        }

    def close(self) -> None:
        """Break off what is in flight, close connections and end the server that was started."""
        with self._ends:
            if self._is_closed:
                return
            self._is_closed = True
        try:
            with contextlib.suppress(TimeoutError, concurrent.futures.CancelledError):
                # What was started before is broken off, and nothing is started any more.
                asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(CLOSE_SECONDS)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            if self._server is not None:
                self._server.stop()

    async def _end(self) -> None:
        tasks = list(self._running)
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._connection is not None:
            await self._connection.close()

    def _wait(self, work: Coroutine[Any, Any, Found]) -> Found:
        """Return what a coroutine returns; Ctrl-C in this thread ends it.

        Raises:
            RequestError: the backend is closed.
        """
        with self._ends:
            if self._is_closed:
                work.close()
                raise RequestError("the engine is closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise


def _generation(answer: Answer) -> Generation:
    first, last = answer.first_seconds, answer.last_seconds
    return Generation(
        token_ids=None if answer.token_ids is None else tuple(answer.token_ids),
        text=answer.text,
        finish_reason=answer.finish_reason or "stop",
        top2_margin=answer.top2_margin(),
        prompt_tokens=answer.prompt_tokens,
        ttft_seconds=None if first is None else first - answer.started_seconds,
        decode_seconds=None if first is None or last is None else last - first,
        reused_tokens=answer.cached_tokens,
        retries=answer.retries,
    )


def _check_unused(url: httpx.URL) -> None:
    """Refuse an address that somebody else answers at: the run would test another's server.

    Raises:
        ConfigurationError: names it.
    """
    port = url.port or (443 if url.scheme == "https" else 80)
    with contextlib.suppress(OSError), socket.create_connection((url.host, port), timeout=1):
        raise ConfigurationError(
            f"backend.base_url={url}: something listens there already, and "
            "backend.serve.command would start another server; end it, or write {port} where the "
            "port stands in both."
        )
