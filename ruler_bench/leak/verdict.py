"""The verdict: what is wrong with an answer, index by index, and what the whole run shows.

docs/leak_lab.md says what each class means, on which evidence, and what a set of arms can show.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backends.base import OUTLIVES_CLOSE
from ruler_bench.leak.arms import Arm
from ruler_bench.leak.case import Case
from ruler_bench.leak.classes import (
    CLASSES,
    ENGINE_FAULT,
    LEAK,
    OK,
    RACE,
    STATUS,
    STRENGTH,
    UNDECIDED,
    UNSTABLE,
    Evidence,
    IndexVerdict,
)
from ruler_bench.leak.index_verdicts import index_verdicts
from ruler_bench.leak.join import ArmFacts, arm_facts, join
from ruler_bench.leak.sentence import sentence
from ruler_bench.leak.support import Support, support
from ruler_bench.leak.tables import Test, tests
from ruler_bench.leak.tests_of_difference import excluded_rate
from ruler_bench.records import Record

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Verdict:
    """What a set of arms shows.

    Attributes:
        title: what was run, such as niah_single_1.
        verdict: one of CLASSES, of the whole.
        sentence: the whole in one sentence or a few.
        status: exit status, 0, 3, 4 or 5.
        indices: one entry a sample, ascending.
        compared: how many samples every core arm has answered.
        tests: what was tested across indices.
        support: which verdicts these arms can give, and what the others need.
        notes: what a reader must know: what was left out, which arms are not compared bit by bit.
        arms: one entry an arm, with its lifetime and backend.
        excluded_leak_rate: share of leaks that a run without one excludes at 95%; None where it
            has leaks, or nothing was audited.
        audited: answers that this bound counts.
    """

    title: str
    verdict: str
    sentence: str
    status: int
    indices: tuple[IndexVerdict, ...]
    compared: int
    tests: tuple[Test, ...]
    support: tuple[Support, ...]
    notes: tuple[str, ...]
    arms: Mapping[str, Mapping[str, Any]]
    excluded_leak_rate: float | None
    audited: int

    def count(self, verdict: str) -> int:
        """Return how many indices have a verdict."""
        return sum(one.verdict == verdict for one in self.indices)

    @property
    def evidence(self) -> list[Evidence]:
        """All evidence, the strongest first."""
        found = [one for index in self.indices for one in index.evidence]
        return sorted(found, key=lambda one: (STRENGTH.index(one.kind), one.ordinal))


def judge(
    records: Sequence[Record],
    arms: Mapping[str, Arm | ArmFacts],
    *,
    title: str | None = None,
    prompts: Mapping[str, str] | None = None,
    audited: Collection[int] | None = None,
    max_unstable: float = 0.0,
    notes: Sequence[str] = (),
) -> Verdict:
    """Say what is wrong with a backend's answers, as far as the arms given can show it.

    Args:
        records: of all arms, in any order.
        arms: what is known of each arm; with `ArmFacts` also versions and device, without which
            two arms count as run on the same machine.
        title: what was run; by default the task.
        prompts: prompts by their hash (`Record.prompt_sha256`), for canaries.
        audited: ordinals that were chosen for fresh engines without regard to their answers; by
            default all that have fresh answers. The bound on leaks counts these alone.
        max_unstable: share of the compared indices, 0 to 1, that may be unstable or undecided
            before the exit status says so.
        notes: sentences to pass on.

    Raises:
        UsageError: the arms answered different questions, or there is nothing to compare.
    """
    facts = {
        name: one if isinstance(one, ArmFacts) else ArmFacts(one) for name, one in arms.items()
    }
    joined = join(records, facts)
    case = Case(joined, prompts)
    found = index_verdicts(case)
    counted = set(case.ordinals if audited is None else audited)
    audit = [one for one in case.ordinals if case.fresh and one in counted]
    clean = not any(one.verdict in (LEAK, RACE) for one in found) and not any(
        set(test.differing) - case.rounded for test in case.warm_tests
    )
    excluded = excluded_rate(0, len(audit)) if clean and case.main is not None else None
    overall = _overall(case, found)
    shaky = sum(one.verdict in (UNSTABLE, UNDECIDED) and one.differs for one in found)
    status = STATUS.get(overall, 0)
    if overall in (UNSTABLE, UNDECIDED):
        allowed = max_unstable * len(case.ordinals)
        status = STATUS[UNSTABLE] if shaky > allowed else 0
    name = title or records[0].task
    words = sentence(case, overall, found, excluded, len(audit))
    failed = _failed_when_warm(case)
    if overall == OK and failed:
        overall, words = UNDECIDED, _failures(failed)
        status = STATUS[UNSTABLE] if len(failed) > max_unstable * len(case.ordinals) else 0
    return Verdict(
        title=name,
        verdict=overall,
        sentence=f"{name}: {words}",
        status=status,
        indices=tuple(found),
        compared=len(case.ordinals),
        tests=tuple(tests(case)),
        support=tuple(support(case)),
        notes=(*notes, *_notes(case, max_unstable, shaky)),
        arms={name: _arm(facts) for name, facts in joined.facts.items()},
        excluded_leak_rate=excluded,
        audited=len(audit),
    )


def judge_run(
    manifest: Mapping[str, Any],
    records: Sequence[Record],
    prompts: Mapping[str, str] | None = None,
    max_unstable: float = 0.0,
) -> Verdict:
    """Judge one run of several arms; see `judge`.

    Args:
        manifest: the run's.
        records: of all its arms.
        prompts: by their hash.
        max_unstable: share of unstable answers that passes.

    Raises:
        UsageError: see `judge`; or the manifest is damaged.
    """
    return judge(
        records,
        arm_facts(manifest, records),
        title=manifest.get("task"),
        prompts=prompts,
        audited=audited(manifest),
        max_unstable=max_unstable,
    )


def audited(manifest: Mapping[str, Any]) -> list[int] | None:
    """Return the ordinals that were given fresh engines whatever their answers; None for all."""
    fresh = manifest.get("fresh")
    found = fresh.get("audited") if isinstance(fresh, dict) else None
    return found if isinstance(found, list) else None


def _arm(facts: ArmFacts) -> dict[str, Any]:
    return {
        "lifetime": facts.arm.lifetime if facts.is_known or facts.order_known else None,
        "backend": facts.arm.backend or None,
        "order": facts.arm.order if facts.order_known else None,
        "source": facts.source,
    }


def _failed_when_warm(case: Case) -> list[int]:
    """Return the ordinals at which a warm engine failed and a fresh one answered."""
    fresh = case.joined.answers.get(case.fresh or "", {})
    return sorted(
        {
            record.ordinal
            for name in case.warm
            for record in case.joined.streams.get(name, ())
            if record.error is not None and record.ordinal in fresh
        }
    )


def _failures(failed: Sequence[int]) -> str:
    """Say that what failed is no answer that could be compared, and not nothing either."""
    several = len(failed) > 1
    return (
        f"UNDECIDED. {len(failed)} sample{'s' * several} failed in an engine that had served "
        f"others, and fresh engines answered {'them' if several else 'it'}; the other answers "
        f"agree. First at index {failed[0]}."
    )


def _overall(case: Case, found: Sequence[IndexVerdict]) -> str:
    """Return the gravest class of any index; of leak and race the more frequent one."""
    counts = {name: sum(one.verdict == name for one in found) for name in CLASSES}
    if counts[RACE] > counts[LEAK]:
        return RACE
    for name in (LEAK, ENGINE_FAULT, UNSTABLE):
        if counts[name]:
            return name
    arms = len(case.joined.answers)
    if arms == 1 or any(one.verdict == UNDECIDED and one.differs for one in found):
        return UNDECIDED
    return OK


def _notes(case: Case, max_unstable: float, shaky: int) -> list[str]:
    notes = list(case.joined.notes)
    names = sorted(case.joined.answers, key=lambda name: name != (case.fresh or case.main))
    for name in names[1:]:
        why = case.bits_differ_by(names[0], name)
        if why is not None:
            notes.append(f"{names[0]} and {name} are compared by tokens, not bit by bit ({why}).")
    for name in names:
        if case.facts(name).arm.lifetime == "engine_per_sample_in_process":
            notes.append(
                f"{name}: engines of one process; ports, allocators and caches of the process "
                "outlive them, so that these are less than fresh."
            )
        if not case.facts(name).order_known:
            notes.append(f"{name}: the order in which the requests were served is not known.")
    managed = [name for name in names if case.facts(name).arm.settings.get(OUTLIVES_CLOSE)]
    if managed:
        notes.append(
            f"{', '.join(sorted(managed))}: the server is managed by others. It may have served "
            "others before, and what one arm leaves there the next one meets: these arms show no "
            "engine's whole life, and none of them is fresh."
        )
    for floor in (case.floor, case.noise_floor if case.unstable else None):
        if floor is not None:
            notes.append(floor.sentence())
    if case.floor is not None and case.floor.is_beyond_rounding:
        notes.append(
            "The engine and the reference differ by more than rounding even where they agree: "
            "another dtype, other weights, or a fault that moves every logit."
        )
    if case.canaries is None:
        notes.append("Canaries were not looked for: no prompts, or no order of serving, at hand.")
    if shaky and max_unstable:
        notes.append(f"max_unstable={max_unstable:g}: {shaky} of {len(case.ordinals)} are.")
    return notes
