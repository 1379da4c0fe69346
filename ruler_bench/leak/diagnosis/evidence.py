"""The records of a run, as the hypotheses read them: arm by arm, and two arms side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ruler_bench.leak.arms import RECORDED, SYNCHRONISED
from ruler_bench.leak.differences import difference, has_bits, largest_shift, numeric_floor
from ruler_bench.leak.join import ArmFacts, bits_differ_by
from ruler_bench.records import Record


@dataclass(frozen=True)
class Evidence:
    """The records of a run, as the hypotheses read them.

    Attributes:
        answers: finished answers to the samples, by arm and ordinal.
        served: all finished records of an arm, in order.
        failed: requests that failed in the engine, by arm.
        facts: of each arm.
        refused: why the backend refused an arm, by arm.
        recordings: folder with what the recorded arms wrote down, one folder an arm.
    """

    answers: Mapping[str, Mapping[int, Record]]
    served: Mapping[str, Sequence[Record]]
    failed: Mapping[str, int]
    facts: Mapping[str, ArmFacts]
    refused: Mapping[str, str]
    recordings: Path | None

    @classmethod
    def of(
        cls,
        records: Sequence[Record],
        facts: Mapping[str, ArmFacts],
        refused: Mapping[str, str] | None = None,
        recordings: Path | None = None,
    ) -> Evidence:
        """Sort the records of a run."""
        answers: dict[str, dict[int, Record]] = {}
        served: dict[str, list[Record]] = {}
        failed: dict[str, int] = {}
        for record in sorted(records, key=lambda one: (one.life, one.position)):
            if record.error is not None:
                failed[record.arm] = failed.get(record.arm, 0) + 1
                continue
            served.setdefault(record.arm, []).append(record)
            if record.score is not None:
                answers.setdefault(record.arm, {})[record.ordinal] = record
        return cls(answers, served, failed, facts, refused or {}, recordings)

    def having(self, arms: Sequence[str]) -> list[str]:
        """Return those of these arms that answered."""
        return [one for one in arms if one in self.answers]

    def starting(self, prefix: str, ending: str = "") -> list[str]:
        """Return the arms that answered and have this beginning and, or no other, ending."""
        return [
            one
            for one in self.answers
            if one.startswith(prefix)
            and one.endswith(ending)
            and (ending or not one.endswith((SYNCHRONISED, RECORDED)))
        ]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two arms' answers to the same samples.

    Attributes:
        a, b: the arms.
        ordinals: of the samples that both answered.
        is_bitwise: whether equal logits are promised and recorded.
        bits: samples whose logits or tokens differ; of is_bitwise alone.
        tokens: samples whose tokens (or texts) differ.
        gap: largest number of logits by which the paths differ where answers part, at least; None
            where no answer parts, infinite where that is not known.
        shift: largest difference of their top-2 margins where they agree; None where unknown.
        floor: what correct paths may differ by, in logits.
        right: right answers of a and of b.
    """

    a: str
    b: str
    ordinals: tuple[int, ...]
    is_bitwise: bool
    bits: tuple[int, ...]
    tokens: tuple[int, ...]
    gap: float | None
    shift: float | None
    floor: float
    right: tuple[int, int]

    @property
    def differs(self) -> bool:
        """Whether any sample does, at the level that is promised."""
        return bool(self.bits or self.tokens)

    @property
    def is_beyond_rounding(self) -> bool:
        """Whether answers part by more than correct paths may differ."""
        return self.gap is not None and self.gap > self.floor


def compare_arms(evidence: Evidence, a: str, b: str) -> Pair:
    """Compare what two arms answered to the same prompts."""
    mine, others = evidence.answers[a], evidence.answers[b]
    both = {
        one: (mine[one], others[one])
        for one in sorted(mine.keys() & others.keys())
        if mine[one].prompt_sha256 == others[one].prompt_sha256
    }
    promised = bits_differ_by(evidence.facts[a], evidence.facts[b]) is None
    found = {one: difference(*pair, promised) for one, pair in both.items()}
    seen = {one: how for one, how in found.items() if how is not None and how.is_visible}
    shifts = [largest_shift(*pair) for pair in both.values()]
    dtypes = [evidence.facts[one].arm.settings.get("dtype") for one in (a, b)]
    return Pair(
        a=a,
        b=b,
        ordinals=tuple(both),
        is_bitwise=promised and all(has_bits(*pair) for pair in both.values()),
        bits=tuple(one for one, how in found.items() if how is not None) if promised else (),
        tokens=tuple(seen),
        gap=max(
            (float("inf") if how.gap is None else how.gap for how in seen.values()), default=None
        ),
        shift=max((one for one in shifts if one != float("inf")), default=None),
        floor=numeric_floor(both.values(), dtypes).value,
        right=(
            sum(bool(one.correct) for one, _ in both.values()),
            sum(bool(other.correct) for _, other in both.values()),
        ),
    )
