"""The rules that read the answer to each hypothesis off the records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ruler_bench.errors import UsageError, one_line
from ruler_bench.leak.arms import RECORDED, SYNCHRONISED
from ruler_bench.leak.diagnosis.arms import AGED
from ruler_bench.leak.diagnosis.evidence import Evidence, Pair, compare_arms
from ruler_bench.leak.join import PERSISTENT, PERSISTENT_AGAIN
from ruler_bench.records import Record

SUPPORTED, NOT_SUPPORTED, CANNOT_SAY = "supported", "not supported", "cannot be said"


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


def chunk_precision(evidence: Evidence) -> Finding:
    """Say whether other chunk sizes turn near ties, and nothing beyond."""
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


def ring_race(evidence: Evidence) -> Finding:
    """Say whether answers differ that forced synchronisation makes alike."""
    forced = [*evidence.having([SYNCHRONISED]), *evidence.starting("slots_", SYNCHRONISED)]
    free = [*evidence.having([PERSISTENT, PERSISTENT_AGAIN]), *evidence.starting("slots_")]
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


def positions(evidence: Evidence) -> Finding:
    """Compare the keys of the first layer: before any attention, they follow from a token and its
    position alone. The values there do not know positions, and show what rounding does.
    """
    from ruler_bench.divergence import compare, read_recording  # noqa: PLC0415 (numpy)

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


def layers(evidence: Evidence) -> Finding:
    """Say whether the engine a layer at a time differs from one with equal cuts on the device."""
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


def merge(evidence: Evidence) -> Finding:
    """Say whether other pieces of attention part answers by more than rounding."""
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


def switching(evidence: Evidence) -> Finding:
    """Say whether the place of keys and values changes answers."""
    arms = evidence.starting("offload_")
    if not arms or PERSISTENT not in evidence.answers:
        lacks = _refused(evidence, "offload_")
        return _cannot(evidence, "a setting offload with always, never and auto", lacks)
    pairs = _pairs(evidence, PERSISTENT, arms)
    if any(one.differs for one in pairs):
        found = [one for one in pairs if one.differs]
        return Finding(SUPPORTED, f"{_listed(found)} differ, and must not.", pairs)
    return Finding(NOT_SUPPORTED, "Where keys and values lie changes no answer.", pairs)


def age(evidence: Evidence) -> Finding:
    """Say whether answers late in a life differ, and what memory did meanwhile."""
    if len(evidence.having([PERSISTENT, AGED])) < 2:
        return _cannot(evidence, "the arms persistent and aged", [AGED])
    pairs = _pairs(evidence, PERSISTENT, [AGED])
    memory = _memory(evidence.served[AGED])
    noise = _pairs(evidence, PERSISTENT, evidence.having([PERSISTENT_AGAIN]))
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
