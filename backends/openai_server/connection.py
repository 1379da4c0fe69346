"""Requests to a server: sent again where that may help, bounded in time and size, never redirected.

Every message that leaves this module has the key masked.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import ssl
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

import httpx

from backends.base import ConfigurationError, PromptTooLong, RequestError
from backends.openai_server.answers import Answer, message_of, parsed, shown
from backends.openai_server.retry import RETRIED_STATUSES, Policy, retry_after_seconds
from backends.openai_server.secret import Key
from backends.openai_server.sse import DONE, events

Found = TypeVar("Found")

CONNECT_SECONDS = 10.0
DRAIN_SECONDS = 1.0
"""How long the end of a stream is waited for once its last event was seen."""
MAX_RESPONSE_BYTES = 64 << 20
MAX_ERROR_BYTES = 64 << 10
JSON, STREAM = "application/json", "text/event-stream"

_TITLE = re.compile(r"<title[^>]{0,200}>([^<]{0,200})", re.IGNORECASE)
_TOO_LONG = re.compile(
    r"context.{0,40}(length|window|size|limit)|max_model_len|too (long|many tokens)|"
    r"exceeds?.{0,60}tokens|maximum.{0,40}tokens",
    re.IGNORECASE | re.DOTALL,
)
_LOOPBACK = re.compile(r"localhost|127\.\d+\.\d+\.\d+|::1|\[::1\]")


class Refused(RequestError):  # noqa: N818 (what happened)
    """The server does not take the request as it is; asking again would not help."""


class Unreachable(RequestError):  # noqa: N818
    """Nothing answers at the address."""


class _Again(Exception):  # noqa: N818 (what to do)
    """The request failed in a way that may pass."""

    def __init__(self, error: RequestError, asked_seconds: float | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.asked_seconds = asked_seconds


class Connection:
    """One server, by its address."""

    def __init__(
        self,
        url: str,
        *,
        key: Key,
        verify: ssl.SSLContext | bool,
        policy: Policy,
        request_seconds: float,
        is_gone: Callable[[], bool] = lambda: False,
    ) -> None:
        """Make a client; nothing is sent yet.

        Args:
            url: of the interface, without a slash at its end.
            key: sent with each request where there is one.
            verify: how certificates are checked.
            policy: when to ask again.
            request_seconds: the most that one try may take.
            is_gone: whether the server has ended, so that no retry would help.
        """
        self._is_gone = is_gone
        self.url = url
        self._key = key
        self._policy = policy
        self._request_seconds = request_seconds
        self._has_answered = False
        self._client = httpx.AsyncClient(
            # Reading certificates takes a while.
            verify=verify if url.startswith("https") else False,
            # A proxy of the environment's has no business between two programs of one machine.
            trust_env=not _LOOPBACK.fullmatch(httpx.URL(url).host),
            follow_redirects=False,
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=20),
            # Nothing is unpacked: what is received is bounded by what is sent.
            headers={"Accept-Encoding": "identity", "User-Agent": "ruler-bench", **key.headers()},
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    async def is_healthy(self, path: str) -> bool:
        """Ask once whether the server is ready.

        Args:
            path: under the server's root, not under the interface.

        Raises:
            ConfigurationError: the server answers that there is no such path.
        """
        root = httpx.URL(self.url).copy_with(path=path)
        try:
            async with (
                asyncio.timeout(CONNECT_SECONDS),
                self._client.stream("GET", root) as response,
            ):
                status = response.status_code  # what else it says is not read
        except (httpx.TransportError, TimeoutError) as error:
            self._check_certificate(error)
            return False
        if status == 404:
            raise ConfigurationError(
                f"backend.serve.health={path}: the server has no such path; name one that answers "
                "200 once it is ready."
            )
        return status == 200

    async def get(self, path: str) -> dict[str, Any]:
        """Return the JSON object at a path of the interface.

        Raises:
            ConfigurationError, RequestError: see `ask`.
        """

        async def once() -> dict[str, Any]:
            response = await self._send("GET", path, None)
            try:
                return self._parsed(await self._whole(response, MAX_RESPONSE_BYTES))
            finally:
                await response.aclose()

        found, _ = await self._attempts(once)
        return found

    async def ask(self, path: str, body: dict[str, Any], api: str) -> Answer:
        """Return the answer to a request.

        Raises:
            ConfigurationError: the key or the certificate is not accepted.
            Refused: the server does not take the request; PromptTooLong where that is why.
            Unreachable: nothing answers.
            RequestError: it failed in another way, as often as it was tried.
        """
        answer, retries = await self._attempts(lambda: self._answer(path, body, api))
        answer.retries = retries
        return answer

    async def _attempts(self, once: Callable[[], Awaitable[Found]]) -> tuple[Found, int]:
        """Return what `once` returns, and how often it was called in vain."""
        for retry in range(self._policy.retries + 1):
            try:
                async with asyncio.timeout(self._request_seconds):
                    return await once(), retry
            except TimeoutError:
                again = _Again(
                    RequestError(
                        f"{self.url} gave no whole answer within "
                        f"backend.request_seconds={self._request_seconds:g}"
                    )
                )
            except _Again as error:
                again = error
            if retry == self._policy.retries or not self._may_retry(again.error):
                break
            wait_seconds = self._policy.wait_seconds(retry, again.asked_seconds)
            print(f"{again.error}; asks again in {wait_seconds:.3g} s", file=sys.stderr)
            await asyncio.sleep(wait_seconds)
        tried = f" ({retry + 1} tries)" if retry else ""
        raise type(again.error)(f"{again.error}{tried}")

    def _may_retry(self, error: RequestError) -> bool:
        """Tell whether waiting may help: an address where nothing ever answered is a wrong one."""
        if self._is_gone():
            return False
        return self._has_answered or not isinstance(error, Unreachable)

    # --- one try --------------------------------------------------------------------------------

    async def _answer(self, path: str, body: dict[str, Any], api: str) -> Answer:
        answer = Answer(api, started_seconds=time.perf_counter())
        response = await self._send("POST", path, body)
        try:
            if _media_type(response) == JSON:
                # The server does not stream: nobody can tell when the first token was there.
                answer.add(self._parsed(await self._whole(response, MAX_RESPONSE_BYTES)), 0.0)
                answer.first_seconds = answer.last_seconds = None
                is_done = True
            else:
                self._check_media_type(response, STREAM, await self._beginning(response))
                is_done = await self._stream(response, answer)
        finally:
            await response.aclose()
        if answer.finish_reason is None:
            if is_done and not answer.choices:
                raise RequestError("the server sent no answer: choices is empty")
            what = "the answer has no finish_reason" if is_done else "the stream was cut"
            raise RequestError(f"{what} after {len(answer.text)} characters")
        answer.end(self._key.masked)
        return answer

    async def _stream(self, response: httpx.Response, answer: Answer) -> bool:
        """Take in the events of a stream; return whether its end was told."""
        is_done = False
        try:
            async with contextlib.aclosing(events(self._chunks(response))) as found:
                async for data in found:
                    if data == DONE:
                        is_done = True
                        break
                    answer.add(self._parsed(data), time.perf_counter())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(DRAIN_SECONDS):
                        async for _ in found:
                            pass
        except httpx.TransportError:
            return is_done  # a stream that was cut; what is missing is seen by the caller
        return is_done

    def _parsed(self, data: str) -> dict[str, Any]:
        return parsed(data, self._key.masked_json)

    def _shown(self, text: str) -> str:
        """Return a text of the server's for a message: masked before it is cut, lest half a key
        be left.
        """
        return shown(self._key.masked(text))

    async def _send(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        """Return a response whose status is 2xx and whose body is not read yet."""
        request = self._client.build_request(method, self.url + path, json=body)
        try:
            response = await self._client.send(request, stream=True)
        except httpx.TransportError as error:
            self._check_certificate(error)
            raise _Again(self._lost(error)) from error
        self._has_answered = True
        if response.is_success:
            return response
        try:
            text = await self._whole(response, MAX_ERROR_BYTES, may_cut=True)
        finally:
            await response.aclose()
        raise self._refusal(response, text)

    def _lost(self, error: httpx.TransportError) -> RequestError:
        reason = self._shown(_innermost(error))
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return Unreachable(f"nothing answers at {self.url} ({reason})")
        return RequestError(f"{self.url} broke the connection off ({reason})")

    def _check_certificate(self, error: BaseException) -> None:
        """Raise a ConfigurationError where TLS is what failed."""
        chain: BaseException | None = error
        while chain is not None:
            if isinstance(chain, ssl.SSLCertVerificationError):
                raise ConfigurationError(
                    f"the certificate of {self.url} is not trusted ({chain.verify_message}); set "
                    "backend.verify=FILE to the certificate of who issued it, or "
                    "backend.verify=false to trust anybody."
                ) from None
            if isinstance(chain, ssl.SSLError):
                raise ConfigurationError(
                    f"{self.url} does not speak TLS ({self._shown(str(chain))}); should it begin "
                    "with http://?"
                ) from None
            chain = chain.__cause__ or chain.__context__

    def _refusal(self, response: httpx.Response, text: str) -> Exception:
        """Return what a response without success means."""
        status = response.status_code
        where = f"{self.url} answers {status}"
        said = self._said(response, text)
        why = f" ({said})" if said else ""
        if 300 <= status < 400:
            to = self._shown(response.headers.get("location", "nowhere"))
            return Refused(
                f"{where}: it redirects to {to}, which is not followed; set backend.base_url to "
                "the address that is meant"
            )
        if status in (401, 403):
            variable = self._key.variable
            if variable is None:
                hint = "name the environment variable of the key with backend.api_key_env"
            elif self._key.value:
                hint = f"the key in {variable} is not accepted"
            else:
                hint = f"set the environment variable {variable}; backend.api_key_env names another"
            return ConfigurationError(f"{where}: it wants a key{why}; {hint}.")
        if status in RETRIED_STATUSES:
            return _Again(RequestError(where + why), retry_after_seconds(response.headers))
        if status in (400, 413, 422) and _TOO_LONG.search(said):
            return PromptTooLong(f"{where}: {said}")
        return Refused(where + why)

    def _said(self, response: httpx.Response, text: str) -> str:
        """Return the words of an error response, of a page its title."""
        if "html" in _media_type(response):
            return self._page(text)
        with contextlib.suppress(ValueError, RecursionError):
            return self._shown(message_of(json.loads(text)) or text)
        return self._shown(text)

    def _check_media_type(self, response: httpx.Response, wanted: str, beginning: str) -> None:
        found = _media_type(response)
        if found == wanted:
            return
        what = self._page(beginning) if "html" in found else self._shown(beginning)
        hint = "; does backend.base_url end in /v1?" if "html" in found else ""
        raise Refused(
            f"{self.url} answers with {self._shown(found) or 'no content type'}, not {wanted}: "
            f"{what}{hint}"
        )

    def _page(self, text: str) -> str:
        title = _TITLE.search(self._key.masked(text))
        return f"a web page, {shown(title[1])!r}" if title else "a web page"

    # --- bodies ---------------------------------------------------------------------------------

    async def _chunks(
        self, response: httpx.Response, most_bytes: int = MAX_RESPONSE_BYTES
    ) -> AsyncGenerator[bytes, None]:
        coding = response.headers.get("content-encoding", "identity")
        if coding != "identity":
            raise Refused(
                f"{self.url} answers in the encoding {self._shown(coding)}, which was not asked for"
            )
        received = 0
        async for chunk in response.aiter_raw():
            received += len(chunk)
            if received > most_bytes:
                raise RequestError(f"{self.url} sent more than {most_bytes} bytes for one request")
            yield chunk

    async def _whole(self, response: httpx.Response, most_bytes: int, may_cut: bool = False) -> str:
        """Return a body; of an error's what fits."""
        found = bytearray()
        try:
            async with contextlib.aclosing(self._chunks(response, most_bytes)) as chunks:
                async for chunk in chunks:
                    found += chunk
        except (httpx.TransportError, RequestError) as error:
            if not may_cut:
                if isinstance(error, RequestError):
                    raise
                raise RequestError(f"{self.url} cut its answer off") from error
        text = found.decode(errors="replace")
        if not may_cut:
            self._check_media_type(response, JSON, text)
        return text

    async def _beginning(self, response: httpx.Response) -> str:
        """Return the first bytes of a body that is not a stream, for the message."""
        if _media_type(response) == STREAM:
            return ""
        return await self._whole(response, MAX_ERROR_BYTES, may_cut=True)


def _innermost(error: BaseException) -> str:
    """Return what the system said, which the client wraps in words of its own."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, BaseExceptionGroup):  # one for each address of the host
            chain = chain.exceptions[0]
        if isinstance(chain, OSError) and chain.errno is not None:
            # Names that do not resolve have numbers below 0 and words of their own.
            return os.strerror(chain.errno) if chain.errno > 0 else str(chain.strerror)
        chain = chain.__cause__ or chain.__context__
    return str(error) or type(error).__name__


def _media_type(response: httpx.Response) -> str:
    return str(response.headers.get("content-type", "")).partition(";")[0].strip().lower()
