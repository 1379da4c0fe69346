"""Many requests through one engine: answers of fresh ones, and memory that stays flat."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from ruler_bench.report.tables import markdown_table
from ruler_bench.report.text import human_bytes, human_seconds
from scripts.check.bench import Bench, Evidence, Verdict, problems_of
from scripts.check.compare import compare_arms
from scripts.check.ledger import Ledger, steps
from scripts.check.memory import WARM_UP_REQUESTS, Growth, growths
from scripts.check.questions import Cutter

NAME = "soak"
MEMORY_EVERY = 10
MOST_NEW_TOKENS = 16
NEW_PROCESSES = 3
_PERSISTENT, _RESIDENT = f"{NAME}/persistent", f"{NAME}/gpu_only"
_FRESH, _NEW_PROCESS = f"{NAME}/fresh", f"{NAME}/new-process"


def draw_lengths(requests: int, shortest: int, longest: int, seed: int) -> list[tuple[int, int]]:
    """Draw prompt and new tokens of each request.

    Prompts are log-uniform. The first has the longest and the second the shortest, so that memory
    has seen both by the end of the warm-up.
    """
    draw = random.Random(seed)
    low, high = math.log(shortest), math.log(longest + 1)
    found = [
        (min(longest, int(math.exp(draw.uniform(low, high)))), draw.randint(1, MOST_NEW_TOKENS))
        for _ in range(requests)
    ]
    extremes = [(longest, MOST_NEW_TOKENS), (shortest, 1)]
    return (extremes + found[2:])[:requests]


def pick_evenly(requests: int, picked: int) -> list[int]:
    """Return so many numbers of requests, evenly over the life, the first and the last included."""
    if picked >= requests:
        return list(range(requests))
    if picked <= 1:
        return [requests - 1][:picked]
    return sorted({round(at * (requests - 1) / (picked - 1)) for at in range(picked)})


def run(
    bench: Bench,
    ledger: Ledger,
    *,
    requests: int,
    shortest: int,
    longest: int,
    slots: int,
    fresh: int,
    seed: int,
) -> None:
    """Serve the requests by one engine, then some of them by fresh ones in the same process.

    All are also served by an engine with everything on the device, in another order, and a few
    by fresh engines in processes of their own.

    Args:
        bench: what all checks share.
        ledger: takes the answers.
        requests: how many.
        shortest: tokens of the shortest prompt.
        longest: of the longest.
        slots: of the engine.
        fresh: how many requests are also served by a fresh engine each.
        seed: of lengths, places and the other order.
    """
    context = bench.context(longest + MOST_NEW_TOKENS)
    pair = bench.engines.chunked_pair(slots, context)
    picked = pick_evenly(requests, fresh)
    alone = [picked[at] for at in pick_evenly(len(picked), NEW_PROCESSES)]
    settings = bench.settings(
        [pair], requests=requests, shortest=shortest, longest=longest, fresh=len(picked),
        new_processes=len(alone), soak_seed=seed,
    )  # fmt: skip
    ledger.begin(NAME, settings)
    cutter, draw = Cutter(bench.source, longest), random.Random(seed)
    served = steps(
        (ordinal, cutter.cut(ordinal, tokens, new_tokens, draw.random()))
        for ordinal, (tokens, new_tokens) in enumerate(
            draw_lengths(requests, shortest, longest, seed)
        )
    )
    mixed = list(served)
    draw.shuffle(mixed)
    offloaded = pair.offloaded
    persistent = ledger.stream(
        _PERSISTENT, offloaded, served, whole=True, memory_every=MEMORY_EVERY
    )
    again = ledger.stream(_FRESH, offloaded, [served[at] for at in picked], whole=False, fresh=True)
    resident = ledger.stream(_RESIDENT, pair.resident, mixed, whole=True)
    processes = [
        [ledger.stream(f"{_NEW_PROCESS}-{at}", offloaded, [served[at]], whole=True)] for at in alone
    ]
    bench.run(ledger, [[persistent, again], [resident], *processes], context)


def judge(ledger: Ledger, settings: dict[str, Any]) -> Verdict:
    """Compare the engine with all others, and judge its memory."""
    picked = pick_evenly(settings["requests"], settings["fresh"])
    alone = [picked[at] for at in pick_evenly(len(picked), NEW_PROCESSES)]
    comparisons = [
        compare_arms(ledger, _PERSISTENT, _RESIDENT, settings["requests"]),
        compare_arms(ledger, _FRESH, _PERSISTENT, settings["fresh"]),
        *(compare_arms(ledger, f"{_NEW_PROCESS}-{at}", _PERSISTENT, 1) for at in alone),
    ]
    grown = growths(ledger.memory(_PERSISTENT))
    problems = problems_of(ledger, NAME, [_PERSISTENT, _RESIDENT])
    measured = len(ledger.memory(_PERSISTENT))
    if measured != settings["requests"] // MEMORY_EVERY or not grown:
        problems.append(f"memory was measured {measured} times only")
    problems += [f"memory is not flat: {one.name}" for one in grown if not one.flat]
    evidence = Evidence(comparisons, problems)
    flat = "flat" if grown and all(one.flat for one in grown) else "NOT shown to be flat"
    summary = (
        f"{settings['requests']} requests through one engine: {evidence.counts}; memory {flat}"
    )
    parts = (
        f"{settings['requests']} prompts of {settings['shortest']} to {settings['longest']} tokens "
        f"(log-uniform; the longest and the shortest come first), cut from real ones, 1 to "
        f"{MOST_NEW_TOKENS} new tokens, through one {settings['pairs'][0][0]}. fresh: a new engine "
        "for each of these requests, in the same process, after the life of the first; "
        "new-process: one in a process of its own; gpu_only: one engine that serves all requests "
        "in another order.",
        "Serving took "
        + ", ".join(_time(ledger, arm) for arm in (_PERSISTENT, _FRESH, _RESIDENT))
        + ", the start of engines not counted.",
        *evidence.parts(),
        _memory_table(grown),
    )
    return Verdict(NAME, evidence.passed, summary, parts)


def _time(ledger: Ledger, arm: str) -> str:
    seconds = sum(record.total_seconds or 0 for record in ledger.records(arm))
    return f"{human_seconds(seconds)} ({arm})"


def _memory_table(grown: Sequence[Growth]) -> str:
    titles = (f"memory after {WARM_UP_REQUESTS} requests and more", "first", "last", "largest",
              "slope a request", "allowed growth", "in the last quarter", "flat")  # fmt: skip
    return markdown_table(
        titles,
        [
            (
                one.name,
                human_bytes(one.first),
                human_bytes(one.last),
                human_bytes(one.largest),
                f"{one.slope:.1f} B",
                human_bytes(one.allowed_bytes) if one.allowed_bytes else "none, equal to the byte",
                f"{human_bytes(one.late_bytes)} of {human_bytes(one.allowed_late_bytes)}",
                "yes" if one.flat else "**NO**",
            )
            for one in grown
        ],
    )
