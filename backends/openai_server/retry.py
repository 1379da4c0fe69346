"""When to ask again, and after how long."""

from __future__ import annotations

import email.utils
import time
from collections.abc import Mapping
from dataclasses import dataclass

RETRIED_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})


@dataclass(frozen=True, slots=True)
class Policy:
    """How often and after how long a request is sent again.

    Attributes:
        retries: how often, after the first time.
        backoff_seconds: wait before the first; each further one is twice as long.
        max_wait_seconds: no wait is longer, whatever the server asks for.
    """

    retries: int = 4
    backoff_seconds: float = 0.5
    max_wait_seconds: float = 60.0

    def wait_seconds(self, retry: int, asked_seconds: float | None) -> float:
        """Return how long to wait.

        Args:
            retry: the number of the retry, from 0.
            asked_seconds: what the server asked for.
        """
        own = self.backoff_seconds * 2.0 ** min(retry, 60)
        return min(own if asked_seconds is None else asked_seconds, self.max_wait_seconds)


def retry_after_seconds(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """Return what Retry-After asks for, as seconds from now (RFC 9110, 10.2.3).

    Args:
        headers: of the response, lower case.
        now: seconds since the epoch; None: the clock's.

    Returns:
        None where there is no such header, or nobody can read it.
    """
    text = headers.get("retry-after", "").strip()
    if text.isascii() and text.isdigit():
        return float(text[:12])
    try:
        when = email.utils.parsedate_to_datetime(text)
    except (ValueError, TypeError, OverflowError):
        return None
    if when.tzinfo is None:  # "-0000": the time is in UTC
        return None
    return max(0.0, when.timestamp() - (time.time() if now is None else now))
