"""Seven hypotheses about answers lost with long prompts, each answered by a small comparison.

They were written down for the case that the leak lab grew out of (docs/leak_lab.md). Each names
arms, which run like those of any other run, and a rule that reads the answer off their records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ruler_bench.leak.arms import RECORDED, SYNCHRONISED

if TYPE_CHECKING:
    from ruler_bench.leak.join import ArmFacts
    from ruler_bench.records import Record
    from ruler_bench.report.page import Section

SUPPORTED, NOT_SUPPORTED, CANNOT_SAY = "supported", "not supported", "cannot be said"
PERSISTENT, AGAIN, AGED = "persistent", "persistent_again", "aged"
OWN_ENGINE = "backends.engine."


# --- which arms ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setup:
    """The run that is to be diagnosed.

    Attributes:
        backend: its composed settings, `_target_` included.
        length: tokens of prompt and generation together.
    """

    backend: Mapping[str, Any]
    length: int

    @property
    def is_own_engine(self) -> bool:
        """Whether it is one of our engine's presets, which can stand in for each other."""
        return str(self.backend.get("_target_")).startswith(OWN_ENGINE)

    def tokens(self, key: str) -> int:
        """Return a number of tokens among the settings, the length where it is none or more."""
        value = self.backend.get(key)
        if value == "block":
            value = self.backend.get("kvcache_block_size")
        return min(value, self.length) if isinstance(value, int) else self.length


def _chunk_arms(setup: Setup) -> list[str]:
    if "chunk_tokens" not in setup.backend:
        return []
    tokens = setup.tokens("chunk_tokens")
    sizes = (tokens // 2, 2 * tokens if 2 * tokens < setup.length else tokens // 4)
    return [PERSISTENT, *(f"chunks_{one}" for one in sizes if one)]


def _slot_arms(setup: Setup) -> list[str]:
    found = [PERSISTENT, AGAIN]
    if "synchronise" in setup.backend:
        found.append(SYNCHRONISED)
    keys = ("num_gpu_blocks", "num_kv_buffers")
    now = next(
        (setup.backend[one] for one in keys if isinstance(setup.backend.get(one), int)), None
    )
    if now is None:
        return found
    for slots in sorted({2, 2 * now} - {now}):
        found.append(f"slots_{slots}")
        if "synchronise" in setup.backend:
            found.append(f"slots_{slots}_{SYNCHRONISED}")
    return found


def _position_arms(setup: Setup) -> list[str]:
    if not {"chunk_tokens", "checkpoint"} <= setup.backend.keys():
        return []
    chunks = _chunk_arms(setup)[1:]
    return [RECORDED, *(f"{one}_{RECORDED}" for one in chunks)]


def _layer_arms(setup: Setup) -> list[str]:
    return [PERSISTENT, "layerwise", "gpu_only_whole"] if setup.is_own_engine else []


def _merge_arms(setup: Setup) -> list[str]:
    if not setup.is_own_engine:
        return []
    tokens = setup.tokens("attend_tokens")
    pieces = [tokens // 2, tokens // 4] if tokens == setup.length else [tokens, tokens // 2]
    return ["attend_whole", *(f"attend_{one}" for one in pieces if one)]


def _place_arms(setup: Setup) -> list[str]:
    if "offload" not in setup.backend:
        return []
    others = [one for one in ("always", "never", "auto") if one != setup.backend["offload"]]
    return [PERSISTENT, *(f"offload_{one}" for one in others)]


def _life_arms(setup: Setup) -> list[str]:
    return [PERSISTENT, AGAIN, AGED]


def arms_of_diagnosis(backend: Mapping[str, Any], length: int) -> tuple[str, ...]:
    """Return the arms that all hypotheses need, each once.

    Args:
        backend: composed settings; what they do not name is taken for missing.
        length: tokens of prompt and generation together.
    """
    setup = Setup(backend, length)
    return tuple(dict.fromkeys(arm for one in HYPOTHESES for arm in one.arms(setup)))


# --- what was recorded --------------------------------------------------------------------------


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
    from ruler_bench.leak.differences import (  # noqa: PLC0415
        difference,
        has_bits,
        largest_shift,
        numeric_floor,
    )
    from ruler_bench.leak.join import bits_differ_by  # noqa: PLC0415

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


# --- what it says -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """The answer to one hypothesis.

    Attributes:
        hypothesis, question: its name, and what is asked of the arms.
        verdict: SUPPORTED, NOT_SUPPORTED or CANNOT_SAY.
        why: the figures in words.
        arms: which were compared.
        samples: of each comparison; of several the fewest.
        token_differences: answers whose tokens differ, over all comparisons; None where no answers
            were compared.
        bit_differences: likewise of logits; None where equal bits are not promised.
        largest_gap: logits by which paths differ at least where answers part; None where none
            does or that is not known.
        floor: what correct paths may differ by, in logits.
    """

    hypothesis: str
    question: str
    verdict: str
    why: str
    arms: tuple[str, ...] = ()
    samples: int = 0
    token_differences: int | None = None
    bit_differences: int | None = None
    largest_gap: float | None = None
    floor: float | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """What a rule read off the records."""

    verdict: str
    why: str
    pairs: tuple[Pair, ...] = ()
    arms: tuple[str, ...] = ()
    samples: int = 0


def _cannot(evidence: Evidence, needs: str, arms: Sequence[str] = ()) -> Finding:
    """Say what is missing, and why where the backend refused it."""
    reasons = [f"{one}: {evidence.refused[one]}" for one in arms if one in evidence.refused]
    reasons += [f"{one}: every request failed" for one in arms if _has_failed(evidence, one)]
    return Finding(CANNOT_SAY, " ".join([f"Needs {needs}.", *reasons]))


def _has_failed(evidence: Evidence, arm: str) -> bool:
    return arm in evidence.failed and arm not in evidence.served


def _refused(evidence: Evidence, prefix: str) -> list[str]:
    return [one for one in (*evidence.refused, *evidence.failed) if one.startswith(prefix)]


def _pairs(evidence: Evidence, first: str, others: Sequence[str]) -> tuple[Pair, ...]:
    pairs = (compare_arms(evidence, first, one) for one in others)
    return tuple(one for one in pairs if one.ordinals)


def _chunk_precision(evidence: Evidence) -> Finding:
    arms = evidence.starting("chunks_")
    if not arms or PERSISTENT not in evidence.answers:
        return _cannot(
            evidence,
            "the same samples at two settings of chunk_tokens",
            _refused(evidence, "chunks_"),
        )
    pairs = _pairs(evidence, PERSISTENT, arms)
    parted = [one for one in pairs if one.tokens]
    if not parted:
        return Finding(
            NOT_SUPPORTED, f"Every size gives the same tokens; {_shifted(pairs)}.", pairs
        )
    if any(one.is_beyond_rounding for one in parted):
        return Finding(
            NOT_SUPPORTED,
            f"Sizes differ by {_gap(pairs)}, which is no matter of precision: see the rows on "
            "positions and on the merge.",
            pairs,
        )
    return Finding(
        SUPPORTED, f"Near ties turn: answers part at {_gap(pairs)}; {_rights(pairs)}.", pairs
    )


def _ring_race(evidence: Evidence) -> Finding:
    forced = [*evidence.having([SYNCHRONISED]), *evidence.starting("slots_", SYNCHRONISED)]
    free = [*evidence.having([PERSISTENT, AGAIN]), *evidence.starting("slots_")]
    arms = [*forced, *free]
    pairs = _pairs(evidence, arms[0], arms[1:]) if arms else ()
    wild = [one for one in pairs if one.b in free and one.differs]
    tame = [one for one in pairs if one.b in forced and one.differs]
    if len(free) < 2 or not evidence.starting("slots_"):
        lacks = [*_refused(evidence, "slots_"), *_refused(evidence, SYNCHRONISED)]
        return replace(
            _cannot(evidence, "two numbers of slots, and a setting synchronise", lacks), pairs=pairs
        )
    if not wild and not tame:
        return Finding(NOT_SUPPORTED, "Every number of slots and every run answers alike.", pairs)
    if len(forced) < 2:
        return Finding(
            CANNOT_SAY,
            f"{_listed(wild or tame)} differ; whether forced synchronisation ends that was not "
            "tried.",
            pairs,
        )
    if tame:
        return Finding(
            NOT_SUPPORTED, f"{_listed(tame)} differ under forced synchronisation.", pairs
        )
    return Finding(
        SUPPORTED,
        f"{_listed(wild)} differ; under forced synchronisation all {len(forced)} runs agree.",
        pairs,
    )


def _positions(evidence: Evidence) -> Finding:
    """Compare the keys of the first layer: before any attention, they follow from a token and its
    position alone. The values there do not know positions, and show what rounding does.
    """
    from ruler_bench.divergence import compare, read_recording  # noqa: PLC0415
    from ruler_bench.errors import UsageError, one_line  # noqa: PLC0415

    arms = [*evidence.having([RECORDED]), *evidence.starting("chunks_", RECORDED)]
    if len(arms) < 2 or evidence.recordings is None:
        lacks = [*_refused(evidence, RECORDED), *_refused(evidence, "chunks_")]
        return _cannot(evidence, "recordings of steps (checkpoint) at two chunk_tokens", lacks)
    common = set.intersection(*(set(evidence.answers[one]) for one in arms))
    if not common:
        return _cannot(evidence, "recordings of the same sample at two chunk_tokens")
    step = evidence.answers[arms[0]][min(common)].step
    try:
        recordings = [read_recording(evidence.recordings / one, step) for one in arms]
        compared = [compare(recordings[0], one, ("key", "value")) for one in recordings[1:]]
    except UsageError as error:
        return Finding(CANNOT_SAY, f"The recordings cannot be compared ({one_line(error)}).")
    prompt_tokens = len(recordings[0].prompt_token_ids)
    cuts = [
        len({each.chunk for each in one.records if each.start < prompt_tokens})
        for one in recordings
    ]
    if max(cuts) < 2:
        return Finding(CANNOT_SAY, "The prompt fits one chunk: use a greater length.")
    keys, values = (
        sum(int((one.compared[name, 0].positions < prompt_tokens).sum()) for one in compared)
        for name in ("key", "value")
    )
    what = (
        f"layer 0, prompt cut into {', '.join(str(one) for one in cuts)} chunks: {keys} of "
        f"{prompt_tokens * len(compared)} keys differ, {values} values"
    )
    verdict, note = SUPPORTED if keys else NOT_SUPPORTED, ""
    if keys and values:
        verdict, note = CANNOT_SAY, " Rounding alone may do that."
    return Finding(verdict, f"In {what}.{note}", arms=tuple(arms), samples=1)


def _layers(evidence: Evidence) -> Finding:
    needed = ["layerwise", "gpu_only_whole"]
    if len(evidence.having(needed)) < len(needed):
        needs = "our engine layer-wise, and on the device with equal cuts"
        return _cannot(evidence, needs, needed)
    equal = compare_arms(evidence, *needed)
    chunked = _pairs(evidence, "layerwise", evidence.having([PERSISTENT]))
    pairs = (equal, *chunked)
    beside = ""
    if any(one.is_beyond_rounding for one in chunked):
        beside = f" Chunked it differs by {_gap(chunked)}: see the other rows."
    if equal.differs:
        return Finding(SUPPORTED, f"{_listed([equal])} differ with equal cuts.{beside}", pairs)
    return Finding(NOT_SUPPORTED, f"With equal cuts every answer is the same.{beside}", pairs)


def _merge(evidence: Evidence) -> Finding:
    arms = [*evidence.having(["attend_whole"]), *evidence.starting("attend_")]
    arms = list(dict.fromkeys(arms))
    if len(arms) < 2:
        return _cannot(
            evidence, "our engine at two settings of attend_tokens", _refused(evidence, "attend_")
        )
    pairs = _pairs(evidence, arms[0], arms[1:])
    if any(one.is_beyond_rounding for one in pairs):
        return Finding(
            SUPPORTED, f"Other pieces, other answers: they part by {_gap(pairs)}.", pairs
        )
    if any(one.tokens for one in pairs):
        return Finding(NOT_SUPPORTED, f"Near ties alone turn, at {_gap(pairs)}.", pairs)
    return Finding(NOT_SUPPORTED, f"Every cut gives the same tokens; {_shifted(pairs)}.", pairs)


def _switching(evidence: Evidence) -> Finding:
    arms = evidence.starting("offload_")
    if not arms or PERSISTENT not in evidence.answers:
        lacks = _refused(evidence, "offload_")
        return _cannot(evidence, "a setting offload with always, never and auto", lacks)
    pairs = _pairs(evidence, PERSISTENT, arms)
    if any(one.differs for one in pairs):
        found = [one for one in pairs if one.differs]
        return Finding(SUPPORTED, f"{_listed(found)} differ, and must not.", pairs)
    return Finding(NOT_SUPPORTED, "Where keys and values lie changes no answer.", pairs)


def _age(evidence: Evidence) -> Finding:
    if len(evidence.having([PERSISTENT, AGED])) < 2:
        return _cannot(evidence, "the arms persistent and aged", [AGED])
    pairs = _pairs(evidence, PERSISTENT, [AGED])
    memory = _memory(evidence.served[AGED])
    noise = _pairs(evidence, PERSISTENT, evidence.having([AGAIN]))
    if not any(one.differs for one in pairs):
        return Finding(NOT_SUPPORTED, f"Late in a life every answer is the same. {memory}", pairs)
    if any(one.differs for one in noise):
        why = f"Late answers differ, but so do two runs from the start. {memory}"
        return Finding(CANNOT_SAY, why, pairs)
    return Finding(
        SUPPORTED,
        f"{_listed(pairs)} differ late in a life. {memory} Where memory does not grow it is a leak "
        "rather than fragments: experiment=leakcheck tells.",
        pairs,
    )


def _memory(served: Sequence[Record]) -> str:
    peaks = [one.peak_device_bytes for one in served if one.peak_device_bytes is not None]
    if not peaks:
        return "Memory is not recorded."
    early, late = peaks[0] / 2**20, peaks[-1] / 2**20
    return (
        f"Peak device memory: {early:.1f} MiB in request 1, {late:.1f} MiB in request {len(peaks)}."
    )


def _listed(pairs: Sequence[Pair]) -> str:
    """Return which arms differ, in how many of how many samples."""
    return ", ".join(
        f"{one.a} and {one.b} ({len(one.bits or one.tokens)} of {len(one.ordinals)})"
        for one in pairs
    )


def _gap(pairs: Sequence[Pair]) -> str:
    gap = max((one.gap for one in pairs if one.gap is not None), default=0.0)
    if gap == float("inf"):
        return "an unknown number of logits (no margins are recorded)"
    return f"up to {gap:.3g} logits (floor {max(one.floor for one in pairs):.2g})"


def _shifted(pairs: Sequence[Pair]) -> str:
    known = [one.shift for one in pairs if one.shift is not None]
    return f"margins move by {max(known):.2g} logits at most" if known else "margins are unknown"


def _rights(pairs: Sequence[Pair]) -> str:
    right = {one.a: one.right[0] for one in pairs} | {one.b: one.right[1] for one in pairs}
    return "right: " + ", ".join(f"{count} in {arm}" for arm, count in right.items())


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A cause that is thought of, and how it is tried.

    Attributes:
        name, question: for the table.
        arms: the arms that try it, for a run.
        answer: reads the answer off the records.
        is_direct: the answer is not read off generated answers, which a race or a leak may change.
    """

    name: str
    question: str
    arms: Callable[[Setup], list[str]]
    answer: Callable[[Evidence], Finding]
    is_direct: bool = False


CHUNKS, RACE, POSITIONS, LAYERS, MERGE, SWITCHING, AGE = (
    "chunk-boundary precision",
    "ring-buffer race",
    "positions restart in each chunk",
    "interference between layers",
    "unstable log-sum-exp merge",
    "switching by length",
    "memory fragmentation",
)

HYPOTHESES: tuple[Hypothesis, ...] = (
    Hypothesis(CHUNKS, "Do other chunk sizes turn near ties?", _chunk_arms, _chunk_precision),
    Hypothesis(
        RACE,
        "Do runs or numbers of slots differ, and with forced synchronisation not?",
        _slot_arms,
        _ring_race,
    ),
    Hypothesis(
        POSITIONS,
        "Do first keys depend on where the prompt is cut?",
        _position_arms,
        _positions,
        is_direct=True,
    ),
    Hypothesis(
        LAYERS,
        "Does the engine a layer at a time differ from one with all on the device?",
        _layer_arms,
        _layers,
    ),
    Hypothesis(
        MERGE, "Do answers depend on the pieces that attention merges?", _merge_arms, _merge
    ),
    Hypothesis(
        SWITCHING,
        "Do answers depend on whether keys and values leave the device?",
        _place_arms,
        _switching,
    ),
    Hypothesis(AGE, "Do answers depend on the requests before?", _life_arms, _age),
)
"""The seven, in the order of the table."""


def diagnose(evidence: Evidence) -> list[Row]:
    """Answer every hypothesis from the records of a run.

    What a race or a leak explains supports no other hypothesis.
    """
    findings = {one.name: one.answer(evidence) for one in HYPOTHESES}
    for cause, what in ((RACE, "a race"), (AGE, "what earlier requests leave")):
        if findings[cause].verdict == SUPPORTED:
            for one in HYPOTHESES:
                found = findings[one.name]
                if one.name not in (RACE, cause) and not one.is_direct:
                    findings[one.name] = _explained(found, what)
    return [_row(one, findings[one.name]) for one in HYPOTHESES]


def _explained(finding: Finding, cause: str) -> Finding:
    if finding.verdict != SUPPORTED:
        return finding
    return replace(
        finding,
        verdict=CANNOT_SAY,
        why=f"{finding.why} But {cause} alone may do that; end it first.",
    )


def _row(hypothesis: Hypothesis, finding: Finding) -> Row:
    pairs = finding.pairs
    gaps = [one.gap for one in pairs if one.gap is not None and one.gap != float("inf")]
    bitwise = [one for one in pairs if one.is_bitwise]
    return Row(
        hypothesis=hypothesis.name,
        question=hypothesis.question,
        verdict=finding.verdict,
        why=finding.why,
        arms=finding.arms or tuple(dict.fromkeys(arm for one in pairs for arm in (one.a, one.b))),
        samples=finding.samples or min((len(one.ordinals) for one in pairs), default=0),
        token_differences=sum(len(one.tokens) for one in pairs) if pairs else None,
        bit_differences=sum(len(one.bits) for one in bitwise) if bitwise else None,
        largest_gap=max(gaps, default=None),
        floor=max((one.floor for one in pairs), default=None),
    )


# --- for people ---------------------------------------------------------------------------------

TITLES = ("hypothesis", "verdict", "compared", "samples", "tokens", "bits", "why")


def _cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    return [
        (
            one.hypothesis,
            one.verdict,
            ", ".join(one.arms) or "-",
            str(one.samples),
            "-" if one.token_differences is None else str(one.token_differences),
            "-" if one.bit_differences is None else str(one.bit_differences),
            one.why,
        )
        for one in rows
    ]


def sentence(rows: Sequence[Row]) -> str:
    """Return what the table says in one sentence."""
    found = [one.hypothesis for one in rows if one.verdict == SUPPORTED]
    open_ones = sum(one.verdict == CANNOT_SAY for one in rows)
    start = f"Supported: {', '.join(found)}" if found else "No hypothesis is supported"
    return f"{start}; {open_ones} of {len(rows)} cannot be said."


def terminal_diagnosis(rows: Sequence[Row]) -> str:
    """Return the sentence and the table for a terminal."""
    from tabulate import tabulate  # noqa: PLC0415

    from ruler_bench.report.text import visible  # noqa: PLC0415

    cells = [[visible(cell) for cell in row] for row in _cells(rows)]
    widths = [22, None, 30, None, None, None, 60]
    table = tabulate(
        cells, headers=TITLES, tablefmt="simple", disable_numparse=True, maxcolwidths=widths
    )
    return f"Diagnosis. {sentence(rows)}\n\n{table}"


def markdown_diagnosis(rows: Sequence[Row]) -> str:
    """Return the sentence and the table as a section of a Markdown report."""
    from ruler_bench.report.tables import markdown_table  # noqa: PLC0415
    from ruler_bench.report.text import markdown_cell  # noqa: PLC0415

    cells = [[markdown_cell(cell, None) for cell in row] for row in _cells(rows)]
    table = markdown_table(TITLES, cells)
    return "\n\n".join(["## Diagnosis", f"**{markdown_cell(sentence(rows), None)}**", table])


def diagnosis_section(rows: Sequence[Row]) -> Section:
    """Return the sentence and the table for report.html."""
    from ruler_bench.report.page import Section  # noqa: PLC0415

    return Section("Diagnosis", sentence(rows), TITLES, _cells(rows))
