"""Equal bits in three processes and three orders of requests, with offload and without."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from scripts.check.bench import Bench, Evidence, Verdict, problems_of
from scripts.check.compare import compare_arms
from scripts.check.engines import engines_of
from scripts.check.ledger import Ledger, steps
from scripts.check.questions import Cutter

NAME = "bits"
PROCESSES = 3


def run(
    bench: Bench, ledger: Ledger, *, lengths: Sequence[int], new_tokens: int, slots: int, seed: int
) -> None:
    """Serve the same requests in each process, by each engine, in an order of the process's own.

    Args:
        bench: what all checks share.
        ledger: takes the answers.
        lengths: tokens of the prompts.
        new_tokens: generated after each.
        slots: of the chunked engine.
        seed: of the third order.
    """
    context = bench.context(max(lengths) + new_tokens)
    pairs = bench.engines.pairs((slots,), context)
    engines = engines_of(pairs)
    settings = bench.settings(pairs, lengths=list(lengths), new_tokens=new_tokens, order_seed=seed)
    ledger.begin(NAME, settings)
    cutter = Cutter(bench.source, max(lengths))
    questions = [
        cutter.cut(ordinal, tokens, new_tokens, place=0) for ordinal, tokens in enumerate(lengths)
    ]
    jobs = []
    for process, order in enumerate(orders(len(questions), seed)):
        served = steps((number, questions[ordinal]) for number, ordinal in enumerate(order))
        # Each process also starts with another engine.
        turned = engines[process % len(engines) :] + engines[: process % len(engines)]
        jobs.append(
            [ledger.stream(_arm(one.name, process), one, served, whole=True) for one in turned]
        )
    bench.run(ledger, jobs, context)


def orders(count: int, seed: int) -> list[list[int]]:
    """Return one order of the requests for each process: as they come, backwards, and mixed."""
    forwards = list(range(count))
    mixed = list(forwards)
    random.Random(seed).shuffle(mixed)
    return [forwards, forwards[::-1], mixed]


def _arm(engine: str, process: int) -> str:
    return f"{NAME}/{engine}/process-{process}"


def judge(ledger: Ledger, settings: dict[str, Any]) -> Verdict:
    """Compare each process with the first, and each engine with its counterpart."""
    count = len(settings["lengths"])
    names = [one["name"] for one in settings["engines"]]
    comparisons = [
        compare_arms(ledger, _arm(name, process), _arm(name, 0), count)
        for name in names
        for process in range(1, PROCESSES)
    ]
    comparisons += [
        compare_arms(ledger, _arm(offloaded, process), _arm(resident, process), count)
        for offloaded, resident in settings["pairs"]
        for process in range(PROCESSES)
    ]
    arms = [_arm(name, process) for name in names for process in range(PROCESSES)]
    evidence = Evidence(comparisons, problems_of(ledger, NAME, arms))
    summary = (
        f"{count} requests, {len(names)} engines, {PROCESSES} processes and orders: "
        f"{evidence.counts}"
    )
    lengths = ", ".join(map(str, settings["lengths"]))
    parts = (
        f"Prompts of {lengths} tokens, cut from real ones, up to {settings['new_tokens']} new "
        "tokens each. Process 0 serves them in this order, process 1 backwards, process 2 mixed; "
        "each serves all engines, one after the other, beginning with another one.",
        *evidence.parts(),
    )
    return Verdict(NAME, evidence.passed, summary, parts)
