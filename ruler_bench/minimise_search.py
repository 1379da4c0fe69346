"""Searching: which answer of a run changes, and the smallest reproducer of its change."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from backends.base import ConfigurationError
from ruler_bench import manifest as manifests
from ruler_bench.cell import Cell
from ruler_bench.errors import UsageError, one_line
from ruler_bench.leak.arms import ONE_ENGINE
from ruler_bench.leak.classes import LEAK, RACE
from ruler_bench.leak.join import (
    FRESH,
    OWN_ENGINE_DECIDES_BITS,
    PACKAGES_THAT_DECIDE_BITS,
    PERSISTENT,
    REFERENCE,
    REFERENCE_AGAIN,
)
from ruler_bench.leak.probe import BITS, TEXT, TOKENS, Answer, change, counts_as, is_same, probe
from ruler_bench.leak.rebuild import (
    IN_PROCESS,
    PROCESS,
    Rebuilt,
    RunFolder,
    control_arm,
    differing,
    read_run,
    rebuilt,
    served,
    starter,
)
from ruler_bench.leak.reproducer import (
    ABOUT,
    Reproducer,
    check_folder,
    read_reproducer,
    write_reproducer,
)
from ruler_bench.leak.search import Limits, NotReproduced, Search, Smallest
from ruler_bench.minimise_text import cost, quoted, readme, replay_command, told
from ruler_bench.records import Record
from ruler_bench.sharing import is_secret_key, portable_path, shareable
from ruler_bench.streams import AGING_ORDINALS

CHANGES, UNSTABLE = 3, 5


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Which answer to look at, and how much may be asked.

    Attributes:
        run: the run folder.
        overrides: settings of the engine, `key=value`.
        arm: whose answer changes; None for the first that differs from fresh engines, persistent
            before others.
        ordinal: which; None for the first.
        out: where the reproducer goes; None for RUN/reproducer.
        max_requests: of all probes together; None for any number.
        repeats: how often to ask what matters; None for 3.
        fresh: "process" for a new process for each engine, "inprocess" for a new engine only.
    """

    run: Path
    overrides: tuple[str, ...] = ()
    arm: str | None = None
    ordinal: int | None = None
    out: Path | None = None
    max_requests: int | None = None
    repeats: int | None = None
    fresh: str = PROCESS


def chosen(run: RunFolder, options: SearchOptions) -> Record:
    """Return the record whose answer is to be reproduced.

    Raises:
        UsageError: there is none, or it is not among those that differ.
    """
    arm = options.arm or _arm_of(run)
    control = control_arm(run, arm)
    mine = served(run, arm)
    if control is None and options.ordinal is None:
        raise UsageError(
            f"{run.path}: has no arm to hold {arm} against (it has "
            f"{', '.join(sorted(run.facts))}), so that nobody can tell which answer changes; run "
            f"it with arms=[{PERSISTENT},{FRESH}], or name an answer with --ordinal N."
        )
    found = mine if control is None else differing(run, arm, control)
    if options.ordinal is not None:
        return _of_ordinal(run, arm, options.ordinal, mine=mine, found=found, control=control)
    if not found:
        raise UsageError(
            f"{run.path}: arms {arm} and {control} answer alike wherever both did, so that "
            "there is nothing to reproduce; other arms, or more samples, may show more."
        )
    later = [one for one in found if one.position > 0] or found
    leaking = _leaking(run)
    return next((one for one in later if one.ordinal in leaking), later[0])


def _arm_of(run: RunFolder) -> str:
    """Return the first arm of one engine that differs from fresh ones; persistent where none does,
    or nothing can be held against it.
    """
    warm = [name for name, facts in run.facts.items() if facts.arm.lifetime == ONE_ENGINE]
    own = [name for name in warm if name not in (REFERENCE, REFERENCE_AGAIN)]
    for arm in sorted(own, key=lambda name: name != PERSISTENT):
        control = control_arm(run, arm)
        if control is not None and differing(run, arm, control):
            return arm
    return PERSISTENT


def _of_ordinal(
    run: RunFolder,
    arm: str,
    ordinal: int,
    *,
    mine: Sequence[Record],
    found: Sequence[Record],
    control: str | None,
) -> Record:
    asked = [one for one in mine if one.ordinal == ordinal]
    if not asked:
        known = sorted({one.ordinal for one in mine if one.ordinal < AGING_ORDINALS})
        raise UsageError(
            f"--ordinal {ordinal}: arm {arm} of {run.path} has no answer to it; "
            f"it has {known[0]} to {known[-1]} ({len(known)} samples)."
        )
    answer = next((one for one in found if one.ordinal == ordinal), None)
    if answer is not None:
        return answer
    if asked[-1].error is not None:
        return asked[-1]
    others = ", ".join(str(one.ordinal) for one in found[:10]) or "none"
    raise UsageError(
        f"--ordinal {ordinal}: arms {arm} and {control} answer it alike; those "
        f"that differ: {others}."
    )


def _leaking(run: RunFolder) -> set[int]:
    """Return the ordinals that the verdict calls a leak or a race."""
    from ruler_bench.leak.verdict import judge_run  # noqa: PLC0415 (scipy takes long)

    verdict = judge_run(run.manifest, run.records)
    return {one.ordinal for one in verdict.indices if one.verdict in (LEAK, RACE)}


def minimise(options: SearchOptions) -> int:
    """Find the smallest reproducer of a run's change, write it, and return the exit status.

    Raises:
        UsageError: the run does not give one; says why.
    """
    run = read_run(options.run)
    out = options.out or options.run / manifests.REPRODUCER
    check_folder(out, "--out " if options.out else "")
    victim = chosen(run, options)
    name = f"{victim.task}, arm {victim.arm}, ordinal {victim.ordinal}"
    if victim.position == 0:
        raise UsageError(
            f"{name}: was the first request of its engine, so that nothing before it can have "
            "changed its answer."
        )
    try:
        again = rebuilt(run, victim, options.overrides)
        _say(name)
        search = Search(
            starter(again.engine, again.model, options.fresh),
            again.asks[-1],
            again.tokenizer,
            Limits(options.repeats or 3, options.max_requests),
            _say,
        )
        found = search.run(again.asks[:-1])
    except NotReproduced as error:
        print(f"{name}: no reproducer: {error}. {cost(search.probes, search.requests)}")
        return UNSTABLE
    except ConfigurationError as error:
        raise UsageError(f"{run.path}: cannot be asked again: {one_line(error)}") from error
    kept = reproducer(run, victim, again, found, options.fresh)
    lines = told(kept, found)
    shorter = _shorter(out, kept)
    if shorter is not None and _still_shows(shorter, again, options.fresh):
        requests, tokens = _size(shorter)
        where = (
            f"Not written: {out} holds a shorter one that shows, too ({requests} requests, "
            f"{tokens} prompt tokens); --out DIR keeps both; replay that"
        )
    else:
        write_reproducer(out, kept, readme(out, kept, lines))
        where = f"Written to {out}; replay"
    for line in (*lines, f"{where}: {replay_command(out)}"):
        print(line)
    return CHANGES


def _size(kept: Reproducer) -> tuple[int, int]:
    return len(kept.asks), sum(len(one.prompt_token_ids) for one in kept.asks)


def _shorter(folder: Path, found: Reproducer) -> Reproducer | None:
    """Return the reproducer of the same answer that a folder holds, where it is shorter."""
    try:
        there = read_reproducer(folder)
    except UsageError:
        return None
    same = all(
        getattr(there, key) == getattr(found, key) for key in ("task", "arm", "ordinal", "level")
    )
    return there if same and _size(there) < _size(found) else None


def _still_shows(kept: Reproducer, again: Rebuilt, fresh: str) -> bool:
    """Ask a reproducer of this engine, as often as it may take to show."""
    start = starter(again.engine, again.model, fresh)
    answers = (probe(start, kept.asks, again.tokenizer).answer for _ in range(kept.tries_needed))
    return any(
        answer is not None
        and counts_as(change(answer, kept.expected, kept.level == BITS), kept.level)
        for answer in answers
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _not_as_it_was(run: RunFolder, victim: Record, found: Smallest) -> list[str]:
    """Say what differs from the run: settings and versions that decide bits, and the answers."""
    notes = []
    facts = run.facts[victim.arm]
    settings = facts.arm.settings
    if "attend_tokens" in settings:
        for key in OWN_ENGINE_DECIDES_BITS:
            there, here = settings.get(key), found.settings.get(key)
            if there != here:
                notes.append(f"{key} was {there} in the run and is {here} now")
    versions = manifests.versions()
    for package in PACKAGES_THAT_DECIDE_BITS:
        there, here = facts.versions.get(package), versions.get(package)
        if there is not None and there != here:
            notes.append(f"{package} was {there} in the run and is {here} now")
    control = control_arm(run, victim.arm)
    for arm, record, answer in (
        (victim.arm, victim, found.wrong),
        (control, _answer_in(run, control, victim), found.expected),
    ):
        if record is not None and not _is_answer(record, answer):
            notes.append(f"the run recorded another answer in arm {arm}")
    if found.level in (TOKENS, TEXT) and not is_same(found.wrong, found.whole_wrong):
        notes.append(
            f"the wrong answer is another than after all {found.whole_requests} requests, which "
            f"was {quoted(found.whole_wrong)}"
        )
    return notes


def _answer_in(run: RunFolder, arm: str | None, victim: Record) -> Record | None:
    key = (victim.ordinal, victim.prompt_sha256)
    return next(
        (
            one
            for one in reversed(run.records)
            if one.arm == arm and (one.ordinal, one.prompt_sha256) == key
        ),
        None,
    )


def _is_answer(record: Record, answer: Answer) -> bool:
    if record.output_tokens is not None and answer.token_ids is not None:
        return record.output_tokens == answer.token_ids
    return record.output == answer.text


def reproducer(
    run: RunFolder,
    victim: Record,
    again: Rebuilt,
    found: Smallest,
    fresh: str,
) -> Reproducer:
    """Return what the folder holds; paths are relative and secrets left out."""
    engine = replace(
        again.engine,
        settings=shareable(again.engine.settings),
        model_path=portable_path(again.engine.model_path),
    )
    in_force = {
        key: engine.model_path if value == str(again.model) else value
        for key, value in found.settings.items()
    }
    return Reproducer(
        task=victim.task,
        arm=victim.arm,
        ordinal=victim.ordinal,
        engine=engine,
        asks=found.asks,
        level=found.level,
        expected=found.expected,
        wrong=found.wrong,
        shown=found.shown,
        tries=found.tries,
        about={
            "run": portable_path(str(run.path)),
            "expected_answers": list(victim.expected),
            "is_smallest": found.is_smallest,
            "why_not_smallest": found.why_not,
            "whole_requests": found.whole_requests,
            "whole_prompt_tokens": sum(len(one.prompt_token_ids) for one in again.asks),
            "whole_shown": found.whole_shown,
            "probes": found.probes,
            "requests": found.requests,
            "each_engine_in": fresh,
            "backend_in_force": shareable(in_force),
            "versions": manifests.versions(),
            "notes": [*again.notes, *_not_as_it_was(run, victim, found)],
        },
    )


def after_run(cell: Cell, verdict: str) -> None:
    """With minimise=true, minimise a run that is over, where its verdict is a leak or a race.

    Args:
        cell: what was run; secrets, which no run writes down, are taken from it.
        verdict: its class.
    """
    if verdict not in (LEAK, RACE):
        return
    folder = cell.folder / manifests.REPRODUCER
    if (folder / ABOUT).exists():
        print(f"The reproducer is there already; replay: {replay_command(folder)}")
        return
    secrets = [
        f"backend.{key}={value}"
        for key, value in cell.backend_settings.items()
        if is_secret_key(key) and value is not None
    ]
    fresh = IN_PROCESS if cell.fresh.engine == "inprocess" else PROCESS
    try:
        minimise(SearchOptions(run=cell.folder, overrides=tuple(secrets), fresh=fresh))
    except ConfigurationError as error:
        # The run is over and its verdict stands.
        print(f"minimise=true: no reproducer: {one_line(error)}", file=sys.stderr)
