"""Records of several arms side by side: what belongs together, and what may be compared how."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ruler_bench.errors import UsageError
from ruler_bench.leak.arms import ONE_ENGINE, Arm, arms_of
from ruler_bench.manifest import differences
from ruler_bench.records import Record

PERSISTENT, PERSISTENT_AGAIN, SHUFFLED = "persistent", "persistent_again", "shuffled"
FRESH, FRESH_AGAIN = "fresh", "fresh_again"
REFERENCE, REFERENCE_AGAIN = "reference", "reference_again"
CORE = (
    PERSISTENT,
    PERSISTENT_AGAIN,
    SHUFFLED,
    FRESH,
    FRESH_AGAIN,
    REFERENCE,
    REFERENCE_AGAIN,
)
"""Arms that answer the same samples; verdicts are given where all of those at hand have a record.
Other arms are compared wherever they answered one of these prompts."""

OWN_ENGINE_DECIDES_BITS = (
    "architecture",
    "dtype",
    "threads",
    "attention",
    "block_attention",
    "ops",
    "decode",
    "chunk_tokens",
    "attend_tokens",
    "policy",
)
"""Settings in force of our engine that decide bits; the others promise not to (docs/design.md)."""

PACKAGES_THAT_DECIDE_BITS = (
    "python",
    "ruler-bench",
    "torch",
    "transformers",
    "triton",
    "flash-attn",
    "fa3-fwd",
)


@dataclass(frozen=True, slots=True)
class ArmFacts:
    """An arm, and what stands beside it in its run's manifest.

    Attributes:
        arm: name, lifetime, backend and settings.
        device: name of the device, or None where nobody can tell.
        model: fingerprint of the model, likewise.
        versions: of the packages in its engines, by name.
        source: the file or folder the records are from, where there are several.
        order_known: whether the records tell which request was served when.
    """

    arm: Arm
    device: str | None = None
    model: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    source: str | None = None
    order_known: bool = True

    @property
    def is_known(self) -> bool:
        """Whether the settings in force are known."""
        return bool(self.arm.settings)


def arm_facts(
    manifest: Mapping[str, Any], records: Sequence[Record], source: str | None = None
) -> dict[str, ArmFacts]:
    """Return the arms of a run by name.

    Args:
        manifest: the run's; without "arms" in it, the lifetimes are read off the records.
        records: the run's.
        source: what to call the run.

    Raises:
        UsageError: the manifest's arms are damaged.
    """
    try:
        arms = arms_of(manifest)
    except ValueError as error:
        raise UsageError(f"{source or 'manifest.json'}: is damaged ({error}).") from error
    names = {record.arm for record in records}
    for name in names - arms.keys():
        arms[name] = Arm(
            name=name,
            lifetime=lifetime_of([one for one in records if one.arm == name]),
            backend=str(manifest.get("backend", "")),
            settings=manifest.get("backend_in_force") or {},
        )
    return {
        name: ArmFacts(
            arm=arm,
            device=manifest.get("device"),
            model=manifest.get("model_fingerprint"),
            versions=_versions(manifest, name),
            source=source,
        )
        for name, arm in arms.items()
        if name in names
    }


def lifetime_of(records: Sequence[Record]) -> str:
    """Return what the records of one arm tell about its engines."""
    if len(records) > 1 and all(one.position == 0 for one in records):
        return "engine_per_sample"
    return ONE_ENGINE


def _versions(manifest: Mapping[str, Any], arm: str) -> dict[str, str]:
    lives = [one for one in manifest.get("lives", []) if one.get("arm") == arm]
    found = lives[-1].get("versions") if lives else None
    return dict(found or manifest.get("versions") or {})


def bits_differ_by(a: ArmFacts, b: ArmFacts) -> str | None:
    """Return why two arms must not be compared bit by bit, or None where they may.

    Equal bits are promised for equal settings in force that decide bits, equal versions, device
    and model. Of an engine that is not ours, every setting counts.
    """
    if not a.is_known or not b.is_known:
        return "settings unknown"
    packages = [{key: one.versions.get(key) for key in PACKAGES_THAT_DECIDE_BITS} for one in (a, b)]
    return (
        _differing({"device": a.device, "model": a.model}, {"device": b.device, "model": b.model})
        or _differing(*packages)
        or _settings_differ_by(a.arm, b.arm)
    )


def _settings_differ_by(a: Arm, b: Arm) -> str | None:
    ours = ["attend_tokens" in one.settings for one in (a, b)]
    if all(ours):
        keys = (*OWN_ENGINE_DECIDES_BITS, "device")
        return _differing(
            {key: a.settings.get(key) for key in keys}, {key: b.settings.get(key) for key in keys}
        )
    return _differing({"backend": a.backend}, {"backend": b.backend}) or _differing(
        a.settings, b.settings
    )


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> str | None:
    for key in sorted(a.keys() | b.keys()):
        if a.get(key) != b.get(key):
            return f"{key}: {_short(a.get(key))} and {_short(b.get(key))}"
    return None


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_same_data(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Refuse runs whose samples or models are not the same.

    Args:
        runs: what to call each, and its manifest.

    Raises:
        UsageError: names the field that differs.
    """
    for (first, a), (other, b) in itertools.pairwise(runs):
        for key in ("task", "data", "model_fingerprint"):
            if a.get(key) is None or b.get(key) is None:
                continue
            found = differences(a[key], b[key], key)
            # The fingerprint differs with whatever differs: what that is says more.
            found = [one for one in found if not one.startswith("data.fingerprint")] or found
            if found:
                raise UsageError(
                    f"{first} and {other} did not answer the same samples ({found[0]}); compare "
                    "runs of the same task, length, seed, template, tokenizer and model."
                )


@dataclass(frozen=True)
class Joined:
    """Records of several arms by ordinal.

    Attributes:
        facts: of each arm.
        answers: finished records by arm and ordinal; of several of one arm the last one, which
            had the most before it.
        streams: all records of each arm in the order in which they were served.
        compared: ordinals that every core arm at hand has answered.
        known: ordinals that some core arm has answered.
        beside: answers to other prompts than the samples' (cut to a boundary, of another length),
            each with the reference's to the same.
        notes: what was left out, one sentence each.
    """

    facts: Mapping[str, ArmFacts]
    answers: Mapping[str, Mapping[int, Record]]
    streams: Mapping[str, Sequence[Record]]
    compared: tuple[int, ...]
    known: tuple[int, ...]
    beside: tuple[tuple[Record, Record], ...]
    notes: tuple[str, ...]

    def has(self, *names: str) -> bool:
        """Whether all these arms are at hand."""
        return all(name in self.answers for name in names)

    def get(self, name: str, ordinal: int) -> Record | None:
        """Return an arm's answer, or None."""
        return self.answers.get(name, {}).get(ordinal)


def join(records: Iterable[Record], facts: Mapping[str, ArmFacts]) -> Joined:
    """Put the records of several arms side by side.

    Raises:
        UsageError: two arms were asked different questions under the same ordinal, or there is no
            record at all.
    """
    streams: dict[str, list[Record]] = {}
    failed: dict[str, int] = {}
    for record in records:
        streams.setdefault(record.arm, []).append(record)
        failed[record.arm] = failed.get(record.arm, 0) + (record.error is not None)
    if sum(failed.values()) == sum(map(len, streams.values())):
        raise UsageError(
            "there is no finished answer to compare; give a run folder or a file with answers."
        )
    for stream in streams.values():
        stream.sort(key=lambda one: (one.life, one.position, one.step))
    notes = [
        f"{name}: {count} of {len(streams[name])} requests failed in the engine and are not "
        "compared."
        for name, count in sorted(failed.items())
        if count
    ]
    questions = _questions(streams)
    answers, beside = _by_ordinal(streams, questions)
    core = [name for name in CORE if name in answers] or sorted(answers)[:1]
    compared = sorted(set.intersection(*(set(answers[name]) for name in core)))
    known = sorted(set.union(*(set(answers[name]) for name in core)))
    for name in core:
        missing = [one for one in known if one not in answers[name]]
        if missing:
            notes.append(
                f"{name} has no answer to {_some(missing)}: compared on the "
                f"{len(compared)} that all of {', '.join(core)} have."
            )
    if not compared and len(core) > 1:
        raise UsageError(
            f"the arms {', '.join(core)} have no ordinal in common; compare runs of the same "
            "samples."
        )
    return Joined(
        facts={name: facts.get(name) or _unknown(name) for name in streams},
        answers=answers,
        streams=streams,
        compared=tuple(compared),
        known=tuple(known),
        beside=_paired(beside),
        notes=tuple(notes),
    )


def _paired(beside: Mapping[str, Sequence[Record]]) -> tuple[tuple[Record, Record], ...]:
    """Return answers to prompts beside the samples with the reference's answer to the same."""
    reference = {(one.ordinal, one.prompt_sha256): one for one in beside.get(REFERENCE, ())}
    return tuple(
        (record, reference[record.ordinal, record.prompt_sha256])
        for name, records in sorted(beside.items())
        for record in records
        if name != REFERENCE and (record.ordinal, record.prompt_sha256) in reference
    )


def _unknown(name: str) -> ArmFacts:
    return ArmFacts(Arm(name=name, lifetime=ONE_ENGINE, backend="", settings={}))


def _questions(streams: Mapping[str, Sequence[Record]]) -> dict[int, Record]:
    """Return one record for each question that the core arms ask, after checking that they agree.

    The reference may ask more: prompts that only an arm beside the core asks.
    """
    found: dict[int, Record] = {}
    core = [name for name in CORE if name in streams] or sorted(streams)[:1]
    for name in core:
        own: dict[int, list[Record]] = {}
        for record in sorted(streams[name], key=lambda one: one.step):
            own.setdefault(record.ordinal, []).append(record)
        for ordinal, asked in own.items():
            question = found.setdefault(ordinal, asked[0])
            if not any(_foreign(question, one) is None for one in asked):
                key = _foreign(question, asked[0]) or ""
                raise UsageError(
                    f"ordinal {ordinal}: {question.arm} and {name} were not asked the same "
                    f"({key}: {_short(getattr(question, key))} and "
                    f"{_short(getattr(asked[0], key))}); compare runs of the same task, length, "
                    "seed, template, tokenizer and model."
                )
    return found


def _foreign(a: Record, b: Record) -> str | None:
    """Return the field in which two questions differ; one that is not known does not differ.

    Files of others have prompts that are cut elsewhere; their hashes bear a mark of the format, and
    are held against those of the same format alone.
    """
    for key in ("task", "expected"):
        one, two = getattr(a, key), getattr(b, key)
        if one and two and one != two:
            return key
    (mark, _, one), (other, _, two) = (record.prompt_sha256.rpartition(":") for record in (a, b))
    return "prompt_sha256" if one and two and mark == other and one != two else None


def _by_ordinal(
    streams: Mapping[str, Sequence[Record]], questions: Mapping[int, Record]
) -> tuple[dict[str, dict[int, Record]], dict[str, list[Record]]]:
    """Return the last answer of each arm to each question, and the answers to other prompts."""
    answers: dict[str, dict[int, Record]] = {}
    others: dict[str, list[Record]] = {}
    for name, stream in streams.items():
        # An unscored request is one that was cancelled, or went on beyond its end.
        scored = any(record.score is not None for record in stream)
        for record in stream:
            if record.error is not None or (scored and record.score is None):
                continue
            asked = questions.get(record.ordinal)
            if asked is not None and _foreign(asked, record) is None:
                answers.setdefault(name, {})[record.ordinal] = record
            else:
                others.setdefault(name, []).append(record)
    return answers, others


def _some(ordinals: Sequence[int], shown: int = 10) -> str:
    listed = ", ".join(str(one) for one in ordinals[:shown])
    rest = len(ordinals) - shown
    return f"ordinals {listed}" + (f" and {rest} more" if rest > 0 else "")
