"""Several requests in flight at one engine, as a server has in production.

A backend says with its attribute `concurrency` (backends.base.CONCURRENCY) from how many threads it
may be called. A run of one arm makes use of that, and so do the arms concurrent_<n>. Arms that are
held against each other ask one request at a time: a batch rounds otherwise than a single row, and
what comes before what would be a matter of chance.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

from backends.base import CONCURRENCY, Backend, Request
from ruler_bench.errors import UsageError
from ruler_bench.leak.arms import kind_of, variant_of
from ruler_bench.streams import Step

Found = TypeVar("Found")
ORDERS = ("ordinal", "shuffled")
"""Orders in which no request has to come after another."""


def concurrency_of(backend: Backend) -> int:
    """Return from how many threads a backend may be called at a time."""
    found = getattr(backend, CONCURRENCY, 1)
    return found if isinstance(found, int) and found > 1 else 1


def in_flight(
    ask: Callable[[Request], Found], requests: Sequence[Request], concurrency: int
) -> Generator[tuple[int, Found], None, None]:
    """Ask requests, so many at a time, and yield place and answer of each as it comes.

    Whoever stops early closes the engine, which ends what is still in flight.

    Raises:
        Exception: what `ask` raises.
    """
    pool = ThreadPoolExecutor(concurrency)
    places = {pool.submit(ask, one): place for place, one in enumerate(requests)}
    try:
        for future in as_completed(places):
            yield places[future], future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def may_overlap(concurrency: int, steps: Sequence[Step]) -> bool:
    """Tell whether these requests are asked several at a time."""
    return concurrency > 1 and all(
        one.group is None and one.action is None and not one.opening for one in steps
    )


def check_overlap(concurrency: int, arm: str, arms: Sequence[str]) -> None:
    """Refuse several requests at a time where the order of requests is what an arm is about.

    Raises:
        UsageError: names the arms, and what to do instead.
    """
    if concurrency == 1 or variant_of(arm) is not None:
        return
    if len(arms) == 1 and kind_of(arm).order in ORDERS:
        return
    raise UsageError(
        f"{concurrency} requests in flight (backend.concurrency, of hf backend.batch_size): "
        f"arms=[{','.join(arms)}] ask one request at a time, in order, so that they can be held "
        "against each other; leave it out, and add the arm "
        f"concurrent_{concurrency} to see what requests in flight do to each other."
    )
