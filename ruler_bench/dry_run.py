"""What a run would do, for `dry_run=true`: samples are made and checked, no engine is started.

A backend whose constructor starts something may have a static or class method `refuse_early`. It
takes the text of the first prompt, by position, and the constructor's arguments; it starts nothing,
and raises the ConfigurationError that the constructor or that prompt would end in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backends.base import ConfigurationError
from ruler_bench import manifest
from ruler_bench.bench import Bench, check_cell, prepared
from ruler_bench.cell import Cell
from ruler_bench.engines import with_advice_that_works
from ruler_bench.errors import UsageError, one_line
from ruler_bench.host import TARGET, bound_factory, memory_plan, settings_of_arm
from ruler_bench.leak.arms import REFERENCES, variant_of
from ruler_bench.records import Record
from ruler_bench.streams import Stream

REFUSE_EARLY = "refuse_early"


def describe_cell(cell: Cell, overwrite: bool = False) -> str:
    """Return lines for a person: how many requests, of which size, in which memory and folder.

    Everything is checked that a run checks before it starts an engine, by the same code.

    Args:
        cell: what would run.
        overwrite: what its folder holds would not be gone on with.

    Raises:
        UsageError, ConfigurationError: the run would be refused.
    """
    model = check_cell(cell)
    manifest.check_folder(cell.folder)
    bench = prepared(cell, model, overwrite, only_look=True)
    plans = [_plan(bench, one) for one in bench.streams]
    missing, done = sum(one.missing for one in plans), sum(one.done for one in plans)
    most = "at most " * any(one.is_most for one in plans)
    lines = [
        f"{cell.task.name} at {cell.length} tokens, {cell.backend} with {cell.model} "
        f"on {cell.device}",
        f"  requests: {most}{missing} to run, {done} recorded already",
        *_arm_lines(cell, plans),
        f"  tokens: {missing * cell.length} of prompt and generation, at most",
        f"  expected time: {_expected_time(plans)}",
        f"  folder: {cell.folder}",
        *(["  then, after a leak or a race: what it takes to minimise it"] * cell.minimise),
        *_memory_plan(bench),
    ]
    return "\n".join(lines)


@dataclass(frozen=True)
class _Plan:
    """What is left of one arm.

    Attributes:
        arm: its name.
        missing, done: requests to run, and recorded already.
        engines: how many would be started.
        is_most: whether fewer may be asked, since suspects are not known before.
        sample_seconds, start_seconds: of a request and of an engine's start, as measured.
        measured_in: the arm whose figures these are.
        workers: engines at a time.
    """

    arm: str
    missing: int
    done: int
    engines: int
    is_most: bool
    sample_seconds: float | None
    start_seconds: float
    measured_in: str
    workers: int

    @property
    def seconds(self) -> float | None:
        """The expected time; None where nothing was measured."""
        if not self.missing:
            return 0.0
        if self.sample_seconds is None:
            return None
        alone = self.missing * self.sample_seconds + self.engines * self.start_seconds
        return alone / min(self.workers, self.engines)


def _plan(bench: Bench, stream: Stream) -> _Plan:
    cell, records = bench.cell, bench.journal.records
    steps = {one.step for one in stream.steps}
    mine = [one for one in records if one.arm == stream.arm]
    left = stream.left(mine)
    pending = left.pending
    done = {one.step for one in mine if one.error is None} & steps - left.again
    seconds, measured_in = _sample_seconds(stream.arm, mine, records)
    return _Plan(
        arm=stream.arm,
        missing=len(pending),
        done=len(done),
        engines=len(pending) if stream.kind.is_fresh else min(1, len(pending)),
        is_most=stream.kind.is_fresh and cell.fresh.on == "suspects" and bool(pending),
        sample_seconds=seconds,
        start_seconds=_start_seconds(stream.arm, bench.journal.manifest),
        measured_in=measured_in,
        workers=cell.workers if stream.kind.is_fresh else 1,
    )


def _sample_seconds(
    arm: str, mine: Sequence[Record], records: Sequence[Record]
) -> tuple[float | None, str]:
    """Return the mean time of a request: the arm's own, else that of an arm of the same backend."""
    if _mean(mine) is not None or arm in REFERENCES:
        return _mean(mine), arm
    others = [one for one in records if one.arm not in REFERENCES]
    names = sorted({one.arm for one in others}, key=lambda one: one != "persistent")
    for name in names:
        found = _mean([one for one in others if one.arm == name])
        if found is not None:
            return found, name
    return None, arm


def _mean(records: Sequence[Record]) -> float | None:
    seconds = [one.total_seconds for one in records if one.total_seconds is not None]
    return sum(seconds) / len(seconds) if seconds else None


def _start_seconds(arm: str, found: Mapping[str, object]) -> float:
    """Return the mean time to build an engine: of the arm, else of any; 0 where none was timed."""
    lives = found.get("lives")
    timed = [one for one in lives if "start_seconds" in one] if isinstance(lives, list) else []
    chosen = [one for one in timed if one["arm"] == arm] or timed
    engines = sum(one["engines"] for one in chosen)
    return sum(one["start_seconds"] for one in chosen) / engines if engines else 0.0


def _arm_lines(cell: Cell, plans: Sequence[_Plan]) -> list[str]:
    """Return a line an arm; none where there is only the default one."""
    if cell.arms == ("persistent",):
        return []
    lines = []
    for one in plans:
        engines = f", {one.engines} engines" if one.engines > 1 else ""
        most = "at most " * one.is_most
        time = "" if one.seconds is None or not one.missing else f", {one.seconds:.0f} s"
        lines.append(
            f"    {one.arm}: {most}{one.missing} to run, {one.done} recorded{engines}{time}"
        )
    return lines


def _memory_plan(bench: Bench) -> list[str]:
    """Return the engine's plan under its title; nothing for a backend that has none to tell.

    Raises:
        UsageError, ConfigurationError: an arm's engine does not fit or refuses a setting.
    """
    lines = None
    for arm in bench.cell.arms:
        if arm in REFERENCES:
            continue
        try:
            found = _plan_of(bench, settings_of_arm(arm, bench.cell.backend_settings))
        except ConfigurationError:
            if bench.cell.is_diagnosis and variant_of(arm):
                continue  # a run leaves the arm out
            raise
        lines = found if lines is None else lines
    if {*REFERENCES} & {*bench.cell.arms}:
        _check_reference(bench)
    return [] if lines is None else ["  memory plan:", *(f"    {line}" for line in lines)]


def _plan_of(bench: Bench, settings: dict[str, Any]) -> list[str] | None:
    try:
        _refuse_early(bench, settings)
        return memory_plan(settings, bench.harness_arguments())
    except ConfigurationError as error:
        raise with_advice_that_works(bench, error) from error


def _refuse_early(bench: Bench, settings: dict[str, Any]) -> None:
    """Have a backend check what it can without an engine; most have nothing to add.

    Raises:
        UsageError, ConfigurationError: a run would be refused, or the backend's own code failed.
    """
    factory = bound_factory(settings, bench.harness_arguments())
    check = getattr(factory.func, REFUSE_EARLY, None)
    if check is None:
        return
    first = bench.asked()[0].question.sample
    try:
        check(first.prompt, **factory.keywords)
    except (ConfigurationError, KeyboardInterrupt):
        raise
    except BaseException as error:  # an engine under test may do anything
        raise UsageError(
            f"backend._target_={settings[TARGET]}: its {REFUSE_EARLY} failed "
            f"({type(error).__name__}: {one_line(error)})."
        ) from error


def _check_reference(bench: Bench) -> None:
    """Refuse a reference of which no backend fits; a run takes the first that does."""
    *others, last = bench.references
    for one in others:
        try:
            _plan_of(bench, one.settings)
        except ConfigurationError:
            continue
        return
    _plan_of(bench, last.settings)


def _expected_time(plans: Sequence[_Plan]) -> str:
    left = [one for one in plans if one.missing]
    if not left:
        return "none, all is recorded"
    unknown = [one.arm for one in left if one.seconds is None]
    if len(unknown) == len(left):
        return "not known before a first sample has run in this folder"
    timed = [one for one in left if one.seconds is not None]
    total = sum(one.seconds for one in timed if one.seconds is not None)
    based = sorted({f"{one.sample_seconds:.2f} s a sample in {one.measured_in}" for one in timed})
    rest = f"; {', '.join(unknown)} not known before a first sample" if unknown else ""
    most = "at most " * any(one.is_most for one in timed)
    return f"{most}{total:.0f} s, as recorded in this folder ({', '.join(based)}){rest}"
