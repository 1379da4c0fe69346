"""What is said about a reproducer: how its answer changes, its README.md, its replay command."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from ruler_bench.leak.differences import first_difference
from ruler_bench.leak.probe import BITS, ERROR, Answer, Ask
from ruler_bench.leak.rebuild import IN_PROCESS
from ruler_bench.leak.reproducer import Reproducer
from ruler_bench.leak.search import Smallest
from ruler_bench.sharing import portable_path
from ruler_bench.streams import AGING_ORDINALS


def cost(probes: int, requests: int) -> str:
    """Return what a search took."""
    return f"{probes} engines were asked {requests} requests."


def what_changes(level: str | None, fresh: Answer, answer: Answer) -> str:
    """Say how an answer changes, and from which generated token on."""
    if level == ERROR:
        return "the engine fails at the last"
    if level == BITS:
        place = first_difference(fresh.logits_digest or (), answer.logits_digest or ())
        return f"the logits of its answer change from token {place} on, its tokens do not"
    if fresh.token_ids is None or answer.token_ids is None:
        return "its answer changes"
    return f"its answer changes from token {first_difference(fresh.token_ids, answer.token_ids)} on"


def told(kept: Reproducer, found: Smallest) -> list[str]:
    """Return what is said about a reproducer, line by line."""
    requests, whole = len(kept.asks), found.whole_requests
    tokens = sum(len(one.prompt_token_ids) for one in kept.asks)
    lines = [
        f"{kept.task}, arm {kept.arm}, ordinal {kept.ordinal}: {requests} of {whole} requests are "
        f"enough ({tokens} of {kept.about['whole_prompt_tokens']} prompt tokens): "
        f"{what_changes(kept.level, kept.expected, kept.wrong)}.",
        f"Expected {quoted(kept.expected)}, got {quoted(kept.wrong)}; shows in {kept.shown} of "
        f"{kept.tries} repeats (all {whole} requests: {found.whole_shown}).",
    ]
    if found.is_smallest:
        lines.append("Without any one of these requests it does not show.")
    else:
        lines.append(f"Not claimed to be the smallest: {found.why_not}.")
    if kept.about["each_engine_in"] == IN_PROCESS:
        lines.append(
            "All engines shared one process, so that what outlives an engine there counted as "
            "fresh."
        )
    lines += [f"Note: {one}." for one in kept.about["notes"]]
    lines.append(cost(found.probes, found.requests))
    return lines


def quoted(answer: Answer) -> str:
    """Return an answer as a sentence shows it: its text or its error, no more than a line."""
    if answer.error is not None:
        return f"an error ({answer.error:.200})"
    text = answer.text or ""
    return repr(text if len(text) <= 80 else f"{text[:77]}...")


def replay_command(folder: Path) -> str:
    """Return the command that replays a reproducer from where this was called."""
    return f"python -m ruler_bench.minimise --replay {shlex.quote(portable_path(str(folder)))}"


def sample_name(ask: Ask) -> str:
    """Return what a table calls a request's sample."""
    return "aging" if ask.ordinal >= AGING_ORDINALS else str(ask.ordinal)


def readme(folder: Path, kept: Reproducer, lines: Sequence[str]) -> str:
    """Return README.md."""
    rows = []
    for place, ask in enumerate(kept.asks):
        role = "**the answer that changes**" if place == len(kept.asks) - 1 else ""
        if ask.cancel_after_seconds is not None:
            role = f"cancelled after {ask.cancel_after_seconds:.3g} s"
        rows.append(
            f"| {place} | {sample_name(ask)} | {len(ask.prompt_token_ids)} | {ask.max_new_tokens} "
            f"| {role} |"
        )
    settings = " ".join(f"{key}={value}" for key, value in sorted(kept.engine.settings.items()))
    return "\n".join(
        [
            "# The smallest reproducer",
            "",
            *(f"{one}  " for one in lines),
            "",
            "| request | ordinal | prompt tokens | generates at most | |",
            "|---|---|---|---|---|",
            *rows,
            "",
            f"Backend {kept.engine.backend}: `{settings}`; model {kept.engine.model}, device "
            f"{kept.engine.device}, {kept.engine.threads} threads.",
            "",
            "Replay it (exit status 3: it shows, 0: it does not); settings of another engine may "
            "follow, such as `backend=gpu_only`:",
            "",
            f"    {replay_command(folder)}",
            "",
            "requests.jsonl holds the requests in order, expected.json the answer of an engine "
            "that was asked the last one alone, wrong.json the one after the others, "
            "reproducer.json the settings and how this was found.",
            "",
        ]
    )
