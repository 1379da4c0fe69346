"""Checks of arms and of the settings that only some arms use."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ruler_bench.cell import Fresh
from ruler_bench.errors import UsageError
from ruler_bench.leak.arms import REFERENCES, SPELLINGS, kind_of, variant_of
from ruler_bench.streams import SAMPLE, streams
from ruler_bench.values import MAX_THREADS, check_int, shown

NEEDS_ARMS = (
    "experiment=leakcheck arms={arms}: one arm alone gives no verdict. A leak needs persistent and "
    "fresh; a race persistent_again, too; an unstable engine fresh and fresh_again; an engine "
    "fault fresh and reference."
)
BIT_KEYS = ("chunk_tokens", "attend_tokens")
"""Settings whose other values promise other bits."""


def check_arms(arms: Sequence[str]) -> tuple[str, ...]:
    """Return the arms, each known and named once."""
    if not arms:
        raise UsageError(f"arms=[]: names no arm. Allowed: {', '.join(sorted(SPELLINGS))}.")
    for arm in arms:
        if not isinstance(arm, str):
            raise UsageError(f"arms={shown(list(arms))}: {shown(arm)} is no name of an arm.")
        kind_of(arm)
    if len(set(arms)) != len(arms):
        raise UsageError(f"arms={shown(list(arms))}: names an arm twice.")
    return tuple(arms)


def check_fresh(fresh: Fresh, arms: Sequence[str], workers: int) -> None:
    """Check how the arms with an engine for each request are to be run.

    Raises:
        UsageError: there are no suspects without other arms, or no workers without processes.
    """
    check_int("workers", workers, 1, MAX_THREADS)
    if workers > 1 and fresh.engine == "inprocess":
        raise UsageError(
            f"workers={workers}: with fresh=inprocess one engine lives at a time; use workers=1, "
            "or fresh=process."
        )
    if fresh.on == "suspects" and all(kind_of(arm).is_fresh for arm in arms):
        raise UsageError(
            f"fresh.on=suspects: arms={shown(list(arms))} names no arm that could find suspects; "
            "add persistent, or use fresh.on=all."
        )


def check_given(
    given: Collection[str], arms: Sequence[str], fresh: Fresh, workers: int = 1
) -> None:
    """Refuse settings that these arms would not use: what a user sets is never dropped in silence.

    Args:
        given: keys that the user set.
        arms: to run.
        fresh: how.
        workers: fresh engines at a time.

    Raises:
        UsageError: names the key and the arms that would use it.
    """
    if {"num_samples", "indices"} <= {*given}:
        raise UsageError(
            "num_samples: indices names the samples to ask, so that it would do nothing; leave one "
            "of the two out."
        )
    named = f"arms={shown(list(arms))}"
    needs_fresh = {"fresh.on", "fresh.audit"} | ({"workers"} if workers > 1 else set())
    if not any(kind_of(arm).is_fresh for arm in arms):
        for key in sorted(needs_fresh & set(given)):
            raise UsageError(
                f"{key}: {named} has no arm with an engine for each sample, so that it would do "
                "nothing; add fresh, or leave it out."
            )
    if "timeout_seconds" in given and fresh.engine == "inprocess":
        raise UsageError(
            "timeout_seconds: with fresh=inprocess nothing can end an engine that hangs, so that "
            "it would do nothing; use fresh=process, or leave it out."
        )
    same = [arm for arm in arms if _keeps_bits(arm)]
    if "stop_on" in given and len(same) < 2 and not any(map(_asks_twice, same)):
        raise UsageError(
            f"stop_on: {named} never asks the same twice under the same settings, so that it would "
            "do nothing; add fresh or persistent_again, or leave it out."
        )
    if "max_unstable" in given and len(arms) < 2:
        raise UsageError(
            f"max_unstable: {named} gives no verdict, so that it would do nothing; add fresh and "
            "fresh_again, or leave it out."
        )
    for key in sorted(given):
        if key.partition(".")[0] in ("backend@reference", "reference") and not (
            {*REFERENCES} & {*arms}
        ):
            raise UsageError(
                f"{key}: {named} has no arm reference, so that it would do nothing; add it, or "
                "leave the setting out."
            )


def can_minimise(arms: Sequence[str]) -> bool:
    """Whether there is an arm of one engine, and a fresh one to hold it against."""
    fresh = [arm for arm in arms if kind_of(arm).is_fresh]
    warm = [arm for arm in arms if not kind_of(arm).is_fresh and arm not in REFERENCES]
    return bool(fresh and warm)


def _asks_twice(arm: str) -> bool:
    """Tell whether an arm asks a sample more than once, so that it can contradict itself."""
    (stream,) = streams([arm], [0], boundary_units=[2])
    asked = [one for one in stream.steps if one.source == SAMPLE and one.ordinal == 0]
    return sum(one.scored for one in asked) > 1


def _keeps_bits(arm: str) -> bool:
    """Tell whether an arm's answers may have to be those of the run's own settings."""
    variant = variant_of(arm)
    if arm in REFERENCES or variant is None:
        return arm not in REFERENCES
    return variant.preset is None and not any(
        key in BIT_KEYS for keys, _ in variant.settings for key in keys
    )
