"""`python -m ruler_bench.minimise RUN`: the shortest sequence of requests that changes an answer.

    python -m ruler_bench.minimise results/RUN
    python -m ruler_bench.minimise results/RUN --ordinal 4 --arm shuffled
    python -m ruler_bench.minimise --replay results/RUN/reproducer
    python -m ruler_bench.minimise --replay DIR backend=gpu_only backend.chunk_tokens=512

RUN is a run folder in which one engine answered a sample otherwise than a fresh one. What that
engine served before the sample is asked again, less and less of it, each time of a new engine in a
new process, to the shortest sequence after which the answer still changes; then the prompts and the
answers of what is left are shortened. RUN/reproducer gets the requests, the expected and the wrong
answer, and a README.md with the command that replays them.

With overrides (backend=NAME, backend.KEY=VALUE, device=, threads=, model.path=) the requests go to
another engine. Replaying holds the answer after the others against that of a fresh engine with the
same settings.

Exit status: 3 the answer changes (of RUN: and the reproducer is written), 0 a replay shows no
change, 5 the change of RUN does not show again, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from backends.base import ConfigurationError
from ruler_bench import manifest as manifests
from ruler_bench import model_files
from ruler_bench.cell import Cell
from ruler_bench.command_line import Parser, status_of
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
from ruler_bench.leak.rebuild import (
    IN_PROCESS,
    PROCESS,
    Rebuilt,
    RunFolder,
    check_engine,
    control_arm,
    differing,
    overridden,
    read_run,
    rebuilt,
    served,
    starter,
)
from ruler_bench.leak.reproducer import (
    ABOUT,
    BITS,
    ERROR,
    TEXT,
    TOKENS,
    Answer,
    Ask,
    Engine,
    Limits,
    NotReproduced,
    Reproducer,
    Search,
    Smallest,
    change,
    check_folder,
    counts_as,
    is_same,
    probe,
    read_reproducer,
    write_reproducer,
)
from ruler_bench.records import Record
from ruler_bench.sharing import is_secret_key, portable_path, shareable
from ruler_bench.streams import AGING_ORDINALS
from ruler_bench.tokenizer import Tokenizer

SAME, CHANGES, UNSTABLE = 0, 3, 5
MAX_REPEATS = 1000


@dataclass(frozen=True, slots=True)
class Options:
    """What to do.

    Attributes:
        run: the run folder, or None.
        replay: the reproducer's folder, or None.
        overrides: settings of the engine, `key=value`.
        arm: whose answer changes; None for the first that differs from fresh engines, persistent
            before others.
        ordinal: which; None for the first.
        out: where the reproducer goes; None for RUN/reproducer.
        limits: how much may be asked.
        repeats: as typed; None for each command's own default.
        fresh: "process" for a new process for each engine, "inprocess" for a new engine only.
    """

    run: Path | None = None
    replay: Path | None = None
    overrides: tuple[str, ...] = ()
    arm: str | None = None
    ordinal: int | None = None
    out: Path | None = None
    max_requests: int | None = None
    repeats: int | None = None
    fresh: str = PROCESS


USAGE = (
    "RUN [--ordinal N] [--arm NAME] [--max-requests N] [--repeat N] [--out DIR], or "
    "python -m ruler_bench.minimise --replay DIR [backend=NAME] [backend.KEY=VALUE ...]"
)


def main() -> int:
    """Run the command line in sys.argv and return the exit status."""
    return status_of(lambda: run(parse(sys.argv[1:])))


def run(options: Options) -> int:
    """Replay a reproducer or look for one, and return the exit status.

    Raises:
        ConfigurationError: the run or the reproducer cannot be built anew.
    """
    return replay(options) if options.replay is not None else minimise(options)


def parse(arguments: Sequence[str]) -> Options:
    """Check the command line.

    Raises:
        UsageError: it is wrong.
    """
    parser = Parser("minimise", __doc__, USAGE)
    parser.add_argument("words", nargs="*", metavar="RUN", help="a run folder; then key=value")
    parser.add_argument("--replay", type=Path, metavar="DIR", help="replay a reproducer")
    parser.add_argument("--ordinal", metavar="N", help="the answer to look at; default: the first")
    parser.add_argument(
        "--arm",
        metavar="NAME",
        help=f"whose answer; default: {PERSISTENT}, or the first other arm of one engine that "
        "differs from fresh ones where it does not",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help=f"default: RUN/{manifests.REPRODUCER}"
    )
    parser.add_argument(
        "--max-requests",
        metavar="N",
        help="look for less only as long as all probes together have asked no more than N requests "
        "(the answer alone and all of the run are asked in any case); what is found by then is "
        "written, and not called the smallest; default: no limit",
    )
    parser.add_argument(
        "--repeat", metavar="N", help="how often to ask what matters; default: 3, in a replay 1"
    )
    parser.add_argument(
        "--fresh",
        choices=(PROCESS, IN_PROCESS),
        default=PROCESS,
        help="each engine in a process of its own, or all in one, which is faster and sees less",
    )
    read = parser.parse_intermixed_args(arguments)
    overrides = tuple(one for one in read.words if "=" in one)
    paths = [one for one in read.words if "=" not in one]
    given = [key for key in ("ordinal", "arm", "out", "max_requests") if getattr(read, key)]
    if read.replay is not None and (paths or given):
        what = paths[0] if paths else f"--{given[0].replace('_', '-')}"
        parser.error(f"{what} does not go with --replay")
    if read.replay is None and len(paths) != 1:
        parser.error("name one run folder" if not paths else f"one run folder, not {len(paths)}")
    return Options(
        run=Path(paths[0]) if paths else None,
        replay=read.replay,
        overrides=overrides,
        arm=read.arm,
        ordinal=_whole("--ordinal", read.ordinal, 0, None),
        out=read.out,
        max_requests=_whole("--max-requests", read.max_requests, 1, None),
        repeats=_whole("--repeat", read.repeat, 1, MAX_REPEATS),
        fresh=read.fresh,
    )


def _whole(option: str, text: str | None, low: int, high: int | None) -> int | None:
    if text is None:
        return None
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
    if number < low or (high is not None and number > high):
        allowed = f"of at least {low}" if high is None else f"in {low} to {high}"
        raise UsageError(f"{option} {text}: must be a whole number {allowed}.")
    return number


# --- which answer -------------------------------------------------------------------------------


def chosen(run: RunFolder, options: Options) -> Record:
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
    return next((one for one in later if one.ordinal in _leaking(run)), later[0])


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


# --- minimise -----------------------------------------------------------------------------------


def minimise(options: Options) -> int:
    """Find the smallest reproducer of a run's change, write it, and return the exit status.

    Raises:
        UsageError: the run does not give one; says why.
    """
    assert options.run is not None
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
        print(f"{name}: no reproducer: {error}. {_cost(search.probes, search.requests)}")
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
    tries = 1 if kept.shown == kept.tries else kept.tries
    answers = (probe(start, kept.asks, again.tokenizer).answer for _ in range(tries))
    return any(
        answer is not None
        and counts_as(change(answer, kept.expected, kept.level == BITS), kept.level)
        for answer in answers
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _cost(probes: int, requests: int) -> str:
    return f"{probes} engines were asked {requests} requests."


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
            f"was {_shown(found.whole_wrong)}"
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


def _what_changes(level: str | None, fresh: Answer, answer: Answer) -> str:
    """Say how an answer changes, and from which generated token on."""
    if level == ERROR:
        return "the engine fails at the last"
    if level == BITS:
        place = _first(fresh.logits_digest or (), answer.logits_digest or ())
        return f"the logits of its answer change from token {place} on, its tokens do not"
    if fresh.token_ids is None or answer.token_ids is None:
        return "its answer changes"
    return f"its answer changes from token {_first(fresh.token_ids, answer.token_ids)} on"


def _first(a: Sequence[object], b: Sequence[object]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(a), len(b)))


def told(kept: Reproducer, found: Smallest) -> list[str]:
    """Return what is said about a reproducer, line by line."""
    requests, whole = len(kept.asks), found.whole_requests
    tokens = sum(len(one.prompt_token_ids) for one in kept.asks)
    lines = [
        f"{kept.task}, arm {kept.arm}, ordinal {kept.ordinal}: {requests} of {whole} requests are "
        f"enough ({tokens} of {kept.about['whole_prompt_tokens']} prompt tokens): "
        f"{_what_changes(kept.level, kept.expected, kept.wrong)}.",
        f"Expected {_shown(kept.expected)}, got {_shown(kept.wrong)}; shows in {kept.shown} of "
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
    lines.append(_cost(found.probes, found.requests))
    return lines


def _shown(answer: Answer) -> str:
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
        minimise(Options(run=cell.folder, overrides=tuple(secrets), fresh=fresh))
    except ConfigurationError as error:
        # The run is over and its verdict stands.
        print(f"minimise=true: no reproducer: {one_line(error)}", file=sys.stderr)


# --- replay -------------------------------------------------------------------------------------


def replay(options: Options) -> int:
    """Ask a reproducer's requests again and return whether its answer still changes, as a status.

    Raises:
        UsageError: the folder is damaged, a setting wrong, or the engine cannot be built.
    """
    assert options.replay is not None
    kept = read_reproducer(options.replay)
    engine = overridden(kept.engine, options.overrides)
    check_engine(engine)
    model = model_files.model_folder(engine.model_path)
    start = starter(engine, model, options.fresh)
    tokenizer = _tokenizer_of(model)
    tries = options.repeats or (1 if kept.shown == kept.tries else kept.tries)
    fresh = probe(start, kept.asks[-1:], tokenizer).answer or Answer(error="no answer")
    answers = [probe(start, kept.asks, tokenizer).answer for _ in range(tries)]
    shown = [
        one
        for one in answers
        if one is not None
        and (level := change(one, fresh, kept.level == BITS)) is not None
        and (counts_as(level, kept.level) or level != BITS)
    ]
    for line in _replayed(kept, engine, fresh, shown, answers):
        print(line)
    return CHANGES if shown else SAME


def _tokenizer_of(model: Path) -> Tokenizer | None:
    from ruler_bench.tokenizer import has_tokenizer, load_tokenizer  # noqa: PLC0415

    return load_tokenizer(str(model)) if has_tokenizer(model) else None


def _replayed(
    kept: Reproducer,
    engine: Engine,
    fresh: Answer,
    shown: Sequence[Answer],
    answers: Sequence[Answer | None],
) -> list[str]:
    others = len(kept.asks) - 1
    what = f"{kept.task}, ordinal {kept.ordinal}, after {others} other{'s' * (others > 1)} on "
    what += engine.backend
    lines = []
    if shown:
        how = _what_changes(change(shown[0], fresh, True), fresh, shown[0])
        lines.append(f"{what}: shows in {len(shown)} of {len(answers)}: {how}.")
        lines.append(f"Fresh {_shown(fresh)}, after the others {_shown(shown[0])}.")
    else:
        lines.append(f"{what}: does not show in {len(answers)} of {len(answers)}.")
        lines.append(f"Fresh and after the others {_shown(fresh)}.")
    if change(fresh, kept.expected, False) is not None:
        lines.append(f"Note: a fresh engine answered {_shown(kept.expected)} where this was found.")
    return lines


if __name__ == "__main__":
    sys.exit(main())
