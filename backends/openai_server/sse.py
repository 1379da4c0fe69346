"""Server-sent events, as far as this interface uses them (HTML Living Standard, 9.2.6)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

from backends.base import RequestError

MAX_LINE_BYTES = 4 << 20
DONE = "[DONE]"


async def events(chunks: AsyncIterator[bytes]) -> AsyncGenerator[str, None]:
    """Yield the data of each event.

    An event that no empty line ends, as a stream that was cut leaves it, is not one.

    Raises:
        RequestError: a line is longer than MAX_LINE_BYTES or is no UTF-8.
    """
    data: list[str] = []
    async for line in _lines(chunks):
        if line.startswith("data:"):
            data.append(line.removeprefix("data:").removeprefix(" "))
        elif not line and data:
            yield "\n".join(data)
            data = []


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    rest = b""
    async for chunk in chunks:
        # A lone carriage return ends a line, too, but nobody sends one.
        *whole, rest = (rest + chunk).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise RequestError(f"the server sent a line of more than {MAX_LINE_BYTES} bytes")
        for line in whole:
            try:
                yield line.removesuffix(b"\r").decode()
            except UnicodeDecodeError:
                raise RequestError("the server's answer is no UTF-8 text") from None
