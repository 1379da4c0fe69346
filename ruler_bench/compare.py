"""`python -m ruler_bench.compare A B [...]`: the verdict over answers that are on disk already.

    python -m ruler_bench.compare results/RUN
    python -m ruler_bench.compare one_engine/niah_single_1.jsonl one_a_sample/niah_single_1.jsonl
    python -m ruler_bench.compare --persistent A --fresh B --fresh-again C --reference D

Each is a run folder, a records.jsonl, a prediction file in the reference's format (TASK.jsonl) or a
log of lm-eval (samples_TASK_DATE.jsonl). No engine is started.

What is given by an option has that role. What is given without one keeps the arms that its records
name; a second run of the same stream under the same settings is persistent_again, under others the
reference. Files that do not tell are persistent, fresh, fresh_again and reference, in this order.

Exit status: 0 nothing found, 3 leak or race, 4 engine fault, 5 unstable or undecided, 2 wrong
usage, 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ruler_bench.command_line import Parser, status_of
from ruler_bench.errors import UsageError
from ruler_bench.leak.arms import ENGINE_PER_SAMPLE, ONE_ENGINE
from ruler_bench.leak.files import NAMELESS, Source, aligned, answers_file, read_source
from ruler_bench.leak.join import (
    CORE,
    FRESH,
    FRESH_AGAIN,
    PERSISTENT,
    PERSISTENT_AGAIN,
    REFERENCE,
    REFERENCE_AGAIN,
    ArmFacts,
    bits_differ_by,
    check_same_data,
)
from ruler_bench.leak.report import markdown_verdict, terminal_verdict, write_verdict
from ruler_bench.leak.verdict import Verdict, audited, judge
from ruler_bench.records import Record

if TYPE_CHECKING:
    import pandas

    from ruler_bench.frames import Runs

BY_PLACE = (PERSISTENT, FRESH, FRESH_AGAIN, REFERENCE)
AGAIN = {PERSISTENT: PERSISTENT_AGAIN, FRESH: FRESH_AGAIN, REFERENCE: REFERENCE_AGAIN}
NO_SETTINGS = {
    "checkpoint",
    "checkpoint_tensors",
    "timeline",
    "max_model_len",
    "device_memory_gb",
    "host_memory_gb",
    "compile_seconds",
    "memory_plan",
    "weight_bytes",
    "device_buffer_bytes",
    "host_buffer_bytes",
}
"""Settings in force, and what an engine tells beside them, that make no other stream of a run."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to compare.

    Attributes:
        given: path and role of each; None lets the records or the place decide.
        out: folder for verdict.json, junit.xml and verdict.md, or None.
        max_unstable: share of unstable answers that passes.
    """

    given: tuple[tuple[Path, str | None], ...]
    out: Path | None
    max_unstable: float


def main() -> int:
    """Run the command line in sys.argv and return the exit status."""
    return status_of(lambda: run(parse(sys.argv[1:])))


def run(options: Options) -> int:
    """Compare, print and write the verdict, and return its exit status.

    Raises:
        UsageError: a file cannot be read or written, or holds something else.
    """
    verdict = compare(options)
    print(terminal_verdict(verdict))
    if options.out is not None:
        write(options.out, verdict)
    return verdict.status


def _spelled(role: str) -> str:
    return role.replace("_", "-")


def parse(arguments: Sequence[str]) -> Options:
    """Check the command line.

    Raises:
        UsageError: it is wrong.
    """
    usage = (
        "A B [...] [--ROLE FILE ...] [--out DIR] [--max-unstable SHARE], with ROLE one of "
        f"{', '.join(map(_spelled, CORE))}"
    )
    parser = Parser("compare", __doc__, usage)
    parser.add_argument("paths", nargs="*", type=Path, metavar="A", help="a run or a file")
    for role in CORE:
        parser.add_argument(f"--{_spelled(role)}", type=Path, metavar="FILE", dest=role)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write verdict.json, junit.xml and verdict.md"
    )
    parser.add_argument(
        "--max-unstable",
        metavar="SHARE",
        default="0",
        help="share of the answers, 0 to 1, that may be unstable",
    )
    read = parser.parse_args(arguments)
    given: list[tuple[Path, str | None]] = [(path, None) for path in read.paths]
    given += [(path, role) for role in CORE if (path := getattr(read, role)) is not None]
    if not given:
        parser.error("nothing to compare")
    return Options(tuple(given), read.out, _share(read.max_unstable))


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise UsageError(f"--max-unstable={text}: must be a share in 0 to 1, such as 0.05.")
    return value


def compare(options: Options) -> Verdict:
    """Read what is given, put it into roles and judge it.

    Raises:
        UsageError: a file is missing, empty or damaged, the runs are about different samples, or a
            role does not suit what the records tell.
    """
    check_different(options.given)
    sources = aligned([read_source(path) for path, _ in options.given])
    manifests = [(str(one.path), one.manifest) for one in sources if one.manifest is not None]
    check_same_data(manifests)
    roles = _Roles()
    for source, (_, role) in zip(sources, options.given, strict=True):
        if role is not None:
            roles.add_as(source, role)
    for source, (_, role) in zip(sources, options.given, strict=True):
        if role is None:
            roles.add(source)
    prompts = {key: text for source in sources for key, text in source.prompts.items()}
    notes = [note for source in sources for note in source.notes]
    return judge(
        roles.records,
        roles.facts,
        prompts=prompts,
        audited=_audit(manifests),
        max_unstable=options.max_unstable,
        notes=[*notes, *roles.notes],
    )


def check_different(given: Sequence[tuple[Path, str | None]]) -> None:
    """Refuse the same answers twice: what they agree on would say nothing.

    Raises:
        UsageError: names the file and both roles.
    """
    seen: dict[Path, str] = {}
    for place, (path, role) in enumerate(given, start=1):
        name = f"argument {place}" if role is None else f"--{_spelled(role)}"
        answers = answers_file(path).resolve()
        if answers in seen:
            raise UsageError(
                f"{path}: is given twice, as {seen[answers]} and as {name}; two roles need the "
                "answers of two runs."
            )
        seen[answers] = name


def _audit(manifests: Sequence[tuple[str, Mapping[str, Any]]]) -> set[int] | None:
    """Return the ordinals that all runs together audited, or None where all were."""
    found = [audited(manifest) for _, manifest in manifests]
    known = [one for one in found if one is not None]
    return set().union(*known) if known else None


class _Roles:
    """Which records play which role."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.facts: dict[str, ArmFacts] = {}
        self.notes: list[str] = []

    def add_as(self, source: Source, role: str) -> None:
        """Take the answers of a source in the role that an option gave it."""
        arms = source.arms
        if len(arms) > 1 and role not in arms:
            raise UsageError(
                f"--{_spelled(role)} {source.path}: it holds the arms {', '.join(arms)}; name a "
                "run with one arm, or give the run without an option."
            )
        arm = role if role in arms else arms[0]
        self._check_lifetime(source, arm, role)
        self._take(source, arm, role)

    def _check_lifetime(self, source: Source, arm: str, role: str) -> None:
        facts = source.facts[arm]
        told = arm != NAMELESS and sum(one.arm == arm for one in source.records) > 1
        wants_fresh = role in (FRESH, FRESH_AGAIN)
        is_warm = facts.arm.lifetime == ONE_ENGINE
        if told and wants_fresh and is_warm:
            raise UsageError(
                f"--{_spelled(role)} {source.path}: its records say that one engine answered "
                f"several samples; give it as --{_spelled(PERSISTENT)}, "
                f"--{_spelled(PERSISTENT_AGAIN)} or --{_spelled(REFERENCE)}."
            )
        if told and role in (PERSISTENT, PERSISTENT_AGAIN) and not is_warm:
            raise UsageError(
                f"--{_spelled(role)} {source.path}: its records say that each sample had an engine "
                f"of its own; give it as --{FRESH} or --{_spelled(FRESH_AGAIN)}."
            )

    def add(self, source: Source) -> None:
        """Take every arm of a source in the role that its records, or its place, tell."""
        for arm in source.arms:
            role = self._by_place(source) if arm == NAMELESS else self._by_facts(source, arm)
            self._take(source, arm, role)

    def _by_place(self, source: Source) -> str:
        free = [role for role in BY_PLACE if role not in self.facts]
        if not free:
            raise self._full(source)
        self.notes.append(
            f"{source.path} counts as {free[0]}, by its place among the arguments; options such as "
            f"--{_spelled(free[0])} say it."
        )
        return free[0]

    def _by_facts(self, source: Source, arm: str) -> str:
        if arm not in self.facts:
            return arm
        role = AGAIN.get(arm)
        if role == PERSISTENT_AGAIN and not _same_settings(self.facts[arm], source.facts[arm]):
            role = REFERENCE
        if role is None or role in self.facts:
            raise self._full(source)
        self.notes.append(f"{source.path}: its arm {arm} counts as {role}.")
        return role

    def _full(self, source: Source) -> UsageError:
        return UsageError(
            f"{source.path}: its role is taken already ({', '.join(self.facts)}); say it with an "
            f"option such as --{_spelled(REFERENCE)}."
        )

    def _take(self, source: Source, arm: str, role: str) -> None:
        if role in self.facts:
            raise self._full(source)
        facts = source.facts[arm]
        lifetime = facts.arm.lifetime
        if arm == NAMELESS and role in (FRESH, FRESH_AGAIN):
            lifetime = ENGINE_PER_SAMPLE
        self.facts[role] = replace(facts, arm=replace(facts.arm, name=role, lifetime=lifetime))
        self.records += _renamed(source.records, arm, role, lifetime)


def _renamed(records: Sequence[Record], arm: str, role: str, lifetime: str) -> Iterator[Record]:
    for record in records:
        if record.arm != arm:
            continue
        changes: dict[str, Any] = {"arm": role}
        if arm == NAMELESS and lifetime == ENGINE_PER_SAMPLE:
            changes |= {"life": record.position + 1, "position": 0}
        yield replace(record, **changes)


def _same_settings(a: ArmFacts, b: ArmFacts) -> bool:
    settings = [
        {key: value for key, value in one.arm.settings.items() if key not in NO_SETTINGS}
        for one in (a, b)
    ]
    return bits_differ_by(a, b) is None and settings[0] == settings[1]


def write(folder: Path, verdict: Verdict) -> None:
    """Write verdict.json, junit.xml and verdict.md.

    Raises:
        UsageError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_verdict(folder, verdict)
        text = f"# {verdict.title}\n\n{markdown_verdict(verdict)}\n"
        (folder / "verdict.md").write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise UsageError(f"--out {folder}: cannot be written ({error.strerror}).") from error


class _Callable(ModuleType):
    """`ruler_bench.compare` is this module once it is imported, and a function of Python before."""

    def __call__(self, a: Runs, b: Runs | None = None) -> pandas.DataFrame:
        from ruler_bench.frames import compare as call  # noqa: PLC0415 (pandas takes half a second)

        return call(a, b)


sys.modules[__name__].__class__ = _Callable

if __name__ == "__main__":
    sys.exit(main())
